"""An MLP without a gate as one operator of tilemesh's, for training: the activation and its derivative are inside of
products (`kernels/mlp/`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from tilemesh.core.cost import Cost
from tilemesh.kernels.mlp.reference import mlp
from tilemesh.model.experts import Experts
from tilemesh.model.kernels import TORCH
from tilemesh.model.linear import ALONE, DENSE
from tilemesh.model.programs.group import EXPERTS
from tilemesh.model.programs.program import CUT_OTHERWISE, LayerProgram, ProgramSeat, products_cost
from tilemesh.model.transformer import Mlp


@dataclass(frozen=True)
class OneOperatorMlp(LayerProgram):
    def why_not(self, seat: ProgramSeat) -> str:
        if isinstance(seat.here.mlp, Experts):
            return EXPERTS
        block = seat.mlp
        if seat.model.kernels.mlp == TORCH:
            return "the MLP's kernels are torch's (train.kernels)"
        if block.fc_gate is not None:
            return "the MLP has a gate"
        if seat.use.invariant:
            return CUT_OTHERWISE
        if seat.use.puts_off:
            return "weights' gradients are put off, and one operator has no halves"
        if seat.use.tp > 1:
            return "ranks share the layer"
        is_dense = all(layer.kind.stacked() == DENSE and layer.place == ALONE for layer in (block.fc_in, block.fc_out))
        return "" if is_dense else "matrices are not dense"

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        return products_cost([seat.mlp.fc_in, seat.mlp.fc_out], rows, seat.itemsize)

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        return partial(_compute, seat.mlp, seat.model.kernels.mlp)


def _compute(block: Mlp, implementation: str, x_BTD: Tensor) -> Tensor:
    first, last = block.fc_in, block.fc_out
    y_BTD: Tensor = mlp(
        x_BTD, first.weight, first.bias, last.weight, last.bias,
        activation=first.activation, implementation=implementation,
    )  # fmt: skip
    return y_BTD


FUSED_MLP = OneOperatorMlp("MLP as one operator", "mlp")
