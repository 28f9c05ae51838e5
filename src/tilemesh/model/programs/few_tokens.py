"""A pass of a few tokens through a model that serves, by kernels that leave no gap between them.

The one idea: a decoding batch has so little to compute that the time between two kernels counts. So every kernel of a
layer is ours and launched before the one ahead has ended, norms add up the parts that products leave, and there are
eight or nine of them. It computes what the layers do that it is for: RMSNorm before attention and a gated MLP.

S: parts of a sum; T: tokens; D: width; F: MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tilemesh.core.cost import Cost
from tilemesh.kernels.few_linear.cost import cost as few_cost
from tilemesh.kernels.few_linear.cost import norm_cost, parts_of
from tilemesh.kernels.few_linear.reference import few_linear, parts_rms_norm
from tilemesh.model.kernels import TORCH
from tilemesh.model.linear import ALONE, DENSE, Linear
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.programs.definition import attention_passes
from tilemesh.model.programs.products import attend_side_by_side, why_not_side_by_side
from tilemesh.model.programs.program import CUT_OTHERWISE, LayerProgram, ProgramSeat
from tilemesh.model.transformer import Layer, Pass


def why_not_in_a_row(seat: ProgramSeat, any_matrix: bool = False) -> str:
    """Why a layer is not norm, product, attention, product, norm, gated product, product, one after the other.
    `any_matrix`: of whatever kind, and with a bias."""
    config, layer, (heads, gated, *apart) = seat.model.config, seat.here, seat.groups
    if config.norm_place != "pre" or config.parallel_residual:
        return "norms are not before the blocks"
    norms = (layer.attention_norm, layer.mlp_norm, seat.model.final_norm)
    if any(norm is None or norm.kind != "rmsnorm" or norm.weight is None for norm in norms):
        return "a norm is no plain RMSNorm"
    if heads is None or gated is None:
        return next(reason for reason in apart if reason)
    if gated.gate != "silu":
        return f"the gate is {gated.gate}, the kernel's is silu"
    if reason := why_not_side_by_side(seat):
        return reason
    products = (heads.layer, gated.layer, layer.attention.fc_o, seat.mlp.fc_out)
    return next((reason for product in products if (reason := _why_not_plain(product, any_matrix))), "")


@dataclass(frozen=True)
class FewTokens(LayerProgram):
    """Of each layer one after the other: a layer's products leave parts of sums for the next one's norm."""

    implementation: str = "auto"
    """"torch" is its reference form, which has no limits of size and dtype."""

    def why_not(self, seat: ProgramSeat) -> str:
        if not seat.use.launches_early:
            return "kernels here are not launched before the one ahead has ended"
        if seat.use.invariant:
            return CUT_OTHERWISE
        has_limits = self.implementation != TORCH
        if has_limits and seat.dtype not in (torch.bfloat16, torch.float16):
            return "its kernels are for 16 bits"
        if reason := why_not_in_a_row(seat):
            return reason
        products = ((seat.heads.layer, 1), (seat.gated.layer, 2), (seat.here.attention.fc_o, 1), (seat.mlp.fc_out, 1))
        for product, halves in products:
            outputs, inputs = product.out_features // halves, product.in_features
            if has_limits and not parts_of(outputs, inputs, "none" if halves == 1 else "silu"):
                return f"there is no kernel for a matrix of {product.out_features} by {inputs}"
        return ""

    def cost(self, seat: ProgramSeat, rows: int) -> Cost:
        layer, heads, gated = seat.here, seat.heads, seat.gated
        dtype = str(seat.dtype).removeprefix("torch.")
        made = few_cost(rows, gated.layer.out_features // 2, gated.layer.in_features, dtype, "silu")
        last = seat.mlp.fc_out
        for product in (heads.layer, layer.attention.fc_o, last):
            made += few_cost(rows, product.out_features, product.in_features, dtype)
        parts = parts_of(last.out_features, last.in_features)
        norms = 2 * norm_cost(parts, rows, seat.model.config.width, dtype)
        return made + norms + attention_passes(seat, rows, side_by_side=True)

    def bind(self, seat: ProgramSeat) -> FewTokensLayer:
        return FewTokensLayer(seat.here, seat.heads.layer, seat.gated.layer, seat.mlp.fc_out, self.implementation)

    def bind_all(self, seats: Sequence[ProgramSeat]) -> Callable[[Tensor, Pass], Tensor]:
        """All layers, and the norm after the last."""
        final_norm = seats[0].model.final_norm
        assert final_norm is not None
        return partial(_through, tuple(self.bind(seat) for seat in seats), final_norm)


@dataclass(frozen=True)
class FewTokensLayer:
    """Call it with the parts that the layer before left (S, T, D) and the stream that they are added to (T, D)."""

    layer: Layer
    heads: Linear
    gated: Linear
    last: Linear
    implementation: str

    def __call__(self, parts_STD: Tensor, x_TD: Tensor, now: Pass) -> tuple[Tensor, Tensor]:
        layer = self.layer
        y_TD, x_TD = self.normalize(parts_STD, x_TD, layer.attention_norm)
        y_1TD = attend_side_by_side(layer.attention, self._product(y_TD, self.heads.weight), now, x_TD.dtype)
        parts_STD = self._product(y_1TD[0], layer.attention.fc_o.weight)
        y_TD, x_TD = self.normalize(parts_STD, x_TD, layer.mlp_norm)
        h_1TF = self._product(y_TD, self.gated.weight, gate="silu")
        return self._product(h_1TF[0], self.last.weight), x_TD

    def normalize(self, parts_STD: Tensor, x_TD: Tensor, norm: ResidualNorm) -> tuple[Tensor, Tensor]:
        y_TD, total_TD = parts_rms_norm(
            parts_STD, x_TD, norm.weight, eps=norm.epsilon, implementation=self.implementation
        )
        return y_TD, total_TD

    def _product(self, x_TD: Tensor, weight: Tensor, gate: str = "none") -> Tensor:
        made: Tensor = few_linear(x_TD, weight, gate=gate, implementation=self.implementation)
        return made


def _through(layers: tuple[FewTokensLayer, ...], final_norm: ResidualNorm, x_1TD: Tensor, now: Pass) -> Tensor:
    x_TD = x_1TD[0]
    parts_STD = torch.zeros_like(x_1TD)
    for layer in layers:
        parts_STD, x_TD = layer(parts_STD, x_TD, now)
    return layers[-1].normalize(parts_STD, x_TD, final_norm)[0][None]


def _why_not_plain(layer: Linear, any_matrix: bool) -> str:
    if layer.place != ALONE or (layer.kind.stacked() != DENSE and not any_matrix):
        return "a matrix is not dense and whole"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "somebody listens to a projection"
    return "" if any_matrix or layer.bias is None else "a projection has a bias"


FEW = FewTokens("few tokens, kernels without gaps", "layers", ("2-64",))
