"""A pass of a few tokens through a model that serves, by kernels that leave no gap between them.

The one idea: a decoding batch has so little to compute that the time between two kernels counts. So every kernel of a
layer is ours and launched before the one ahead has ended, norms add up the parts that products leave, and there are
eight or nine of them. It computes what `Transformer` does, for plain layers: RMSNorm before attention and a gated MLP.

S: parts of a sum; T: tokens; D: width; F: MLP width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.kernels.few_linear.cost import MOST_ROWS, parts_of
from tilemesh.kernels.few_linear.reference import few_linear, parts_rms_norm
from tilemesh.model.linear import ALONE, DENSE, Linear
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.transformer import Layer, Pass, Transformer


class FewTokens:
    """Call it with embedded tokens: what the norm after the last layer gives. For 2 to 64 tokens (`takes`)."""

    def __init__(self, model: Transformer, implementation: str = "auto") -> None:
        self.model, self.implementation = model, implementation

    @staticmethod
    def serves(model: Transformer) -> bool:
        """Whether all layers of the model are such that this computes them."""
        is_short = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
        norm = model.final_norm
        return (
            is_short and norm is not None and _is_plain_norm(norm) and all(_is_plain(layer) for layer in _layers(model))
        )

    @staticmethod
    def takes(tokens: int) -> bool:
        return 2 <= tokens <= MOST_ROWS

    def __call__(self, x_TD: Tensor, now: Pass) -> Tensor:
        parts_STD = torch.zeros_like(x_TD)[None]
        for layer in _layers(self.model):
            attention, gated = layer.attention, layer.mlp.stacked
            heads = attention.stacked
            assert heads is not None
            assert gated is not None
            y_TD, x_TD = self._norm(parts_STD, x_TD, layer.attention_norm)
            y_1TD = attention.attend(self._product(y_TD, heads.layer.weight), now, x_TD.dtype)
            parts_STD = self._product(y_1TD[0], attention.fc_o.weight)
            y_TD, x_TD = self._norm(parts_STD, x_TD, layer.mlp_norm)
            h_1TF = self._product(y_TD, gated.layer.weight, gate="silu")
            parts_STD = self._product(h_1TF[0], layer.mlp.fc_out.weight)
        assert self.model.final_norm is not None
        return self._norm(parts_STD, x_TD, self.model.final_norm)[0]

    def _norm(self, parts_STD: Tensor, x_TD: Tensor, norm: ResidualNorm) -> tuple[Tensor, Tensor]:
        y_TD, total_TD = parts_rms_norm(
            parts_STD, x_TD, norm.weight, eps=norm.epsilon, implementation=self.implementation
        )
        return y_TD, total_TD

    def _product(self, x_TD: Tensor, weight: Tensor, gate: str = "none") -> Tensor:
        made: Tensor = few_linear(x_TD, weight, gate=gate, implementation=self.implementation)
        return made


def _layers(model: Transformer) -> list[Layer]:
    return [layer for layer in model.layers if isinstance(layer, Layer)]


def _is_plain_norm(norm: ResidualNorm) -> bool:
    return norm.kind == "rmsnorm" and norm.weight is not None


def _is_plain(layer: Layer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    heads, gated = attention.stacked, mlp.stacked
    if layer.norm_place != "pre" or layer.parallel_residual or mlp.gate != "silu":
        return False
    if heads is None or gated is None:
        return False
    if not (_is_plain_norm(layer.attention_norm) and _is_plain_norm(layer.mlp_norm)):
        return False
    if attention.qk_norm != "none" or attention.query_factor != 1:
        return False
    return _fits(heads.layer) and _fits(gated.layer, "silu") and _fits(attention.fc_o) and _fits(mlp.fc_out)


def _fits(layer: Linear, gate: str = "none") -> bool:
    if layer.kind.stacked() != DENSE or layer.place != ALONE or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    outputs = layer.out_features // (1 if gate == "none" else 2)
    return layer.bias is None and parts_of(outputs, layer.in_features, gate) > 0
