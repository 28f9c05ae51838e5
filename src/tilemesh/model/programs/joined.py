"""Query, key and value by one product with their three weights in a row, in a layer that trains under torch.compile.

Worth it where weights are cast on their way anyway (autocast): the cast then writes them side by side. One wide product
for three, forward and twice backward, and nothing to add up for x's gradient. Not where queries and keys are turned
(the values would keep what these were before in memory), nor for a gate and what it opens (their gradients, made in one
pass, would be made in two). Attention by tilemesh's kernels takes the product as it is, with one gradient for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.cost import Cost
from tilemesh.kernels.attention.joined import self_attention
from tilemesh.model.kernels import TORCH
from tilemesh.model.linear import ALONE, DENSE
from tilemesh.model.programs.definition import attention_passes
from tilemesh.model.programs.program import LayerProgram, ProgramSeat, pass_cost, products_cost
from tilemesh.model.transformer import Attention, Pass


@dataclass(frozen=True)
class JoinedWeights(LayerProgram):
    def why_not(self, seat: ProgramSeat) -> str:
        use, attention = seat.use, seat.here.attention
        projections = (attention.fc_q, attention.fc_k, attention.fc_v)
        if not use.trains:
            return "weights in a row would be copied in every pass"
        if not use.compiled:
            return "weights in a row are a copy, which only torch.compile for a GPU joins with their cast"
        if use.puts_off or use.updates_meanwhile:
            return "weights in a row are a copy: it has no halves to put off, and is older than an update under way"
        if use.tp > 1:
            return "ranks share the layer"
        if any(layer.kind.stacked() != DENSE or layer.place != ALONE for layer in projections):
            return "matrices are not dense"
        return (
            "" if attention.config.positions != "rotary" else "queries and keys are turned, values would be kept twice"
        )

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        attention, size = seat.here.attention, seat.itemsize
        projections = (attention.fc_q, attention.fc_k, attention.fc_v)
        apart = products_cost(projections, rows, size)
        saved = 2 * rows * attention.fc_q.in_features * size  # x is read once, not three times
        one = replace(apart, bytes_read=apart.bytes_read - saved, launches=1)
        weights = sum(layer.out_features * layer.in_features for layer in projections)
        copied = Cost() if seat.use.casts else pass_cost(weights, size)
        return one + copied + attention_passes(seat, rows) + products_cost([attention.fc_o], rows, size)

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        attention = seat.here.attention
        config = attention.config
        is_plain = config.qk_norm == "none" and config.query_factor == 1
        is_plain = is_plain and not config.score_cap and not config.score_sink
        return partial(_by_kernel if is_plain and attention.implementation != TORCH else _apart, attention)


def _apart(attention: Attention, x_BTD: Tensor, now: Pass) -> Tensor:
    widths = [layer.weight.shape[0] for layer in (attention.fc_q, attention.fc_k, attention.fc_v)]
    q, k, v = torch.split(joined(attention, x_BTD), widths, dim=-1)
    return attention.attend(q, k, v, now)


def _by_kernel(attention: Attention, x_BTD: Tensor, now: Pass) -> Tensor:
    if now.cache is not None or now.documents is not None:
        return _apart(attention, x_BTD, now)
    width = attention.config.head_width
    heads, kv_heads = (layer.weight.shape[0] // width for layer in (attention.fc_q, attention.fc_k))
    options = {"window": attention.window, "implementation": attention.implementation}
    y_BTD: Tensor = attention.fc_o(self_attention(joined(attention, x_BTD), heads=heads, kv_heads=kv_heads, **options))
    return y_BTD


def joined(attention: Attention, x_BTD: Tensor) -> Tensor:
    """Queries, keys and values side by side."""
    projections = (attention.fc_q, attention.fc_k, attention.fc_v)
    weight = torch.cat([projection.weight for projection in projections])
    bias = None if projections[0].bias is None else torch.cat([projection.bias for projection in projections])
    return functional.linear(x_BTD, weight, bias)


JOINED = JoinedWeights("weights of query, key and value in a row", "attention")
