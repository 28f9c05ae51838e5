"""One product for query, key and value, and one for the gate and the first projection, in a model that serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilemesh.core.cost import Cost
from tilemesh.model.programs.definition import attention_passes, gate_passes
from tilemesh.model.programs.group import GroupProduct
from tilemesh.model.programs.program import LayerProgram, ProgramSeat, behind_hooks, products_cost
from tilemesh.model.transformer import Attention, Mlp, Pass


def why_not_side_by_side(seat: ProgramSeat) -> str:
    """Why the cache cannot take what one product of query, key and value gives: more than turning whole heads lies
    between the product and attention, or the cache has no such way."""
    config = seat.model.config
    if not seat.use.side_by_side:
        return "the cache wants queries, keys and values apart"
    if config.qk_norm != "none":
        return "queries and keys are normalized"
    if config.query_factor != 1:
        return "queries are scaled"
    if config.positions == "rotary" and config.rotary_width != config.head_width:
        return "rotary positions turn a part of each head"
    return ""


def attend_side_by_side(attention: Attention, qkv_BTF: Tensor, now: Pass, dtype: torch.dtype | None = None) -> Tensor:
    """From one product to what the last projection takes; B parts of the product are added up by the cache."""
    width = attention.config.head_width
    heads, kv_heads = attention.fc_q.out_features // width, attention.fc_k.out_features // width
    cache: Any = now.cache
    y_BTHE: Tensor = cache.attend_joined(
        attention.layer, qkv_BTF, attention.rotary(now), heads=heads, kv_heads=kv_heads, dtype=dtype, **attention.seen
    )
    return y_BTHE.flatten(-2)


@dataclass(frozen=True)
class OneProductAttention(LayerProgram):
    def why_not(self, seat: ProgramSeat) -> str:
        return seat.groups.heads_apart

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        products = products_cost([seat.heads.layer, seat.here.attention.fc_o], rows, seat.itemsize)
        return products + attention_passes(seat, rows, side_by_side=not why_not_side_by_side(seat))

    def bind(self, seat: ProgramSeat) -> Callable[..., Tensor]:
        attention, heads = seat.here.attention, seat.heads
        call = _attend_apart if why_not_side_by_side(seat) else _attend_together
        return behind_hooks(attention, partial(call, attention, heads))


def _attend_apart(attention: Attention, heads: GroupProduct, x_BTD: Tensor, now: Pass) -> Tensor:
    q, k, v = heads.split(x_BTD)
    return attention.attend(q, k, v, now)


def _attend_together(attention: Attention, heads: GroupProduct, x_BTD: Tensor, now: Pass) -> Tensor:
    y_BTD: Tensor = attention.fc_o(attend_side_by_side(attention, heads(x_BTD), now))
    return y_BTD


@dataclass(frozen=True)
class OneProductMlp(LayerProgram):
    def why_not(self, seat: ProgramSeat) -> str:
        return seat.groups.gated_apart

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        products = products_cost([seat.gated.layer, seat.mlp.fc_out], rows, seat.itemsize)
        return products + gate_passes(seat.mlp, rows, seat.itemsize, together=True)

    def bind(self, seat: ProgramSeat) -> Callable[..., Tensor]:
        return behind_hooks(seat.mlp, partial(_open, seat.mlp, seat.gated))


def _open(mlp: Mlp, gated: GroupProduct, x_BTD: Tensor) -> Tensor:
    y_BTD: Tensor = mlp.fc_out(gated.gated(x_BTD))
    return y_BTD


ATTENTION = OneProductAttention("one product for query, key and value", "attention")
MLP = OneProductMlp("one product for gate and first projection", "mlp")
