"""A single token on a GPU: norms before and gates after a product, inside of its kernel.

The products of one row read every weight once, and little else; what counts beside that is the time between kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from tilemesh.core.cost import Cost
from tilemesh.model.linear import Linear
from tilemesh.model.programs.definition import attention_passes
from tilemesh.model.programs.group import GroupProduct
from tilemesh.model.programs.products import attend_side_by_side, why_not_side_by_side
from tilemesh.model.programs.program import LayerProgram, ProgramSeat, behind_hooks, products_cost
from tilemesh.model.transformer import Layer, Mlp, Pass, ResidualStream


def why_not_gated(seat: ProgramSeat) -> str:
    """Why a layer has no gate that the kernel of one token computes."""
    gated = seat.groups.gated
    if gated is None:
        return seat.groups.gated_apart
    if gated.gate != "silu":
        return f"its gate is {gated.gate}, the kernel's is silu"
    like = next(seat.here.mlp_norm.parameters())  # as wide as what enters, and of the model's dtype
    return "" if gated.takes_row(like) else "there is no kernel for a single row of its matrices here"


@dataclass(frozen=True)
class GateInside(LayerProgram):
    def why_not(self, seat: ProgramSeat) -> str:
        return why_not_gated(seat)

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        return products_cost([seat.gated.layer, seat.mlp.fc_out], 1, seat.itemsize)

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        return behind_hooks(seat.mlp, partial(_open_row, seat.mlp, seat.gated))


def _open_row(mlp: Mlp, gated: GroupProduct, x_BTD: Tensor) -> Tensor:
    y_BTD: Tensor = mlp.fc_out(gated.gated_row(x_BTD))
    return y_BTD


@dataclass(frozen=True)
class NormsInside(LayerProgram):
    """Two launches less per layer."""

    def why_not(self, seat: ProgramSeat) -> str:
        config, layer, (heads, gated, *apart) = seat.model.config, seat.here, seat.groups
        if heads is None:
            return apart[0]
        if reason := why_not_gated(seat) or why_not_side_by_side(seat):
            return reason
        if layer.attention._forward_pre_hooks or layer.mlp._forward_pre_hooks:
            return "ranks share the layer"
        if config.norm_place != "pre" or config.parallel_residual:
            return "its norms are not before its blocks"
        if layer.attention.layer == seat.model.part.begin:
            return "before the first layer's norm there is nothing to add"
        assert gated is not None
        takes = heads.takes_norm(layer.attention_norm) and gated.takes_norm(layer.mlp_norm)
        return "" if takes else "its norm or its matrices have no kernel for one token"

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        layer = seat.here
        products = (seat.heads.layer, layer.attention.fc_o, seat.gated.layer, seat.mlp.fc_out)
        sums = Cost(0, *(4 * seat.model.config.width * seat.itemsize,) * 2)
        return products_cost(products, 1, seat.itemsize) + attention_passes(seat, 1, side_by_side=True) + sums

    def bind(self, seat: ProgramSeat) -> Callable[..., Any]:
        return partial(_one_token, seat.here, seat.heads, seat.gated, seat.mlp.fc_out)


def _one_token(
    layer: Layer, heads: GroupProduct, gated: GroupProduct, last: Linear, stream: ResidualStream, now: Pass
) -> ResidualStream:
    assert stream.branch is not None
    qkv_BTF, x_BTD = heads.normed(stream.x, stream.branch, layer.attention_norm)
    y_BTD = layer.attention.fc_o(attend_side_by_side(layer.attention, qkv_BTF, now))
    h_BTF, x_BTD = gated.normed(x_BTD, y_BTD, layer.mlp_norm, gate="silu")
    return ResidualStream(x_BTD, last(h_BTF))


GATE = GateInside("gate inside of the product", "mlp", ("1",))
NORMS = NormsInside("norms inside of products", "layer", ("1",))
