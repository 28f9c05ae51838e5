"""The definition as a program like the others: what there always is, and what its passes over memory cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilemesh.core.cost import Cost
from tilemesh.model.experts import Experts
from tilemesh.model.programs.program import LayerProgram, ProgramSeat, pass_cost, products_cost
from tilemesh.model.transformer import Mlp

_TURNING = 7  # torch's operations that turn queries or keys: four products, a sum, a difference, joined


def attention_passes(seat: ProgramSeat, rows: int, *, side_by_side: bool = False) -> Cost:
    """Of what lies between the product of query, key and value and attention: heads turned and, where serving, keys and
    values put into their pages. Side by side one kernel does both."""
    attention, size = seat.here.attention, seat.itemsize
    turned = rows * (attention.fc_q.out_features + attention.fc_k.out_features)
    stored = 0 if seat.use.trains else 2 * rows * attention.fc_k.out_features
    if side_by_side:
        return pass_cost(turned + stored, size)
    passes = pass_cost(stored, size, launches=4) if stored else Cost()
    if seat.model.config.positions != "rotary":
        return passes
    return passes + pass_cost(turned, size, read=5, written=4, launches=2 * _TURNING)


def gate_passes(mlp: Mlp, rows: int, size: int, *, together: bool = False) -> Cost:
    """Of a gate's activation and its product with what it opens; together it is one kernel."""
    if mlp.fc_gate is None:
        return Cost()
    hidden = rows * mlp.fc_in.out_features
    return pass_cost(hidden, size, read=2) if together else pass_cost(hidden, size, read=3, written=2, launches=2)


def _mlp_cost(mlp: Mlp, rows: int, size: int) -> Cost:
    products = [layer for layer in (mlp.fc_gate, mlp.fc_in, mlp.fc_out) if layer is not None]
    alone = Cost() if mlp.fc_gate else pass_cost(rows * mlp.fc_in.out_features, size)  # the activation
    return products_cost(products, rows, size) + gate_passes(mlp, rows, size) + alone


def norm_passes(seat: ProgramSeat, rows: int) -> Cost:
    """Of a layer's norms, each with the addition before it."""
    return pass_cost(rows * seat.model.config.width, seat.itemsize, read=4, written=4, launches=2)


@dataclass(frozen=True)
class DefinedAttention(LayerProgram):
    def why_not(self, seat: ProgramSeat) -> str:
        return ""

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        block = seat.here.attention
        latent = [layer for layer in (block.fc_query_latent, block.fc_latent) if layer is not None]
        products = (block.fc_q, *latent, block.fc_k, block.fc_v, block.fc_o)
        return products_cost(products, rows, seat.itemsize) + attention_passes(seat, rows)

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        return seat.here.attention


@dataclass(frozen=True)
class DefinedMlp(LayerProgram):
    def why_not(self, seat: ProgramSeat) -> str:
        return ""

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        block, size = seat.here.mlp, seat.itemsize
        if isinstance(block, Experts):  # as many at work as tokens can pick, with as many tokens each
            picked = rows * block.config.experts_per_token
            at_work, first = min(block.config.experts, picked), next(iter(block.experts))
            assert isinstance(first, Mlp)
            return sum((_mlp_cost(first, -(-picked // at_work), size) for _ in range(at_work)), Cost())
        return _mlp_cost(block, rows, size)

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        return seat.here.mlp


ATTENTION = DefinedAttention("definition", "attention")
MLP = DefinedMlp("definition", "mlp")
