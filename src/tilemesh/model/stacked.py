"""Projections of the same activations by one product, in a model that only computes forward.

The one idea: the pieces of several matrices are laid under one another once, and each projection's own become parts of
that memory. So nothing is held twice, a state dict is what it was, and whoever writes into a projection's weight in
place writes into the stack. It is not for training: there weights are stepped, split and cast (`transformer.joined`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.kernels.gated.reference import swiglu
from tilemesh.kernels.lowbit_linear.reference import lowbit_linear, norm_lowbit_linear, takes_one_token
from tilemesh.model.kinds import FewBits
from tilemesh.model.linear import ALONE, DenseMatrix, Linear, MatrixKind, make_linear
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.one_row import is_one_row, times_normed_row, times_row


@dataclass(frozen=True)
class StackedProduct:
    """Call it with activations: the projections' results side by side, `widths` of them each."""

    layer: Linear
    """Of the matrices under one another, without an activation."""
    widths: list[int]

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y

    def gated(self, x: Tensor) -> Tensor:
        """silu of the first of two projections times the second."""
        layer, kind = self.layer, self.layer.kind
        y: Tensor
        if not is_one_row(x) or not self._takes_one_token(x):
            y = swiglu(*layer(x).chunk(2, -1))
        elif isinstance(kind, FewBits):
            y = lowbit_linear(x, *kind.stored(layer), code=kind.scheme.format, gate="silu", settled=kind.settled)
        else:
            y = times_row(x, layer.weight, layer.bias, gate="silu")
        return y

    def takes_norm(self, norm: ResidualNorm) -> bool:
        """Whether the product of a single token can have this norm inside."""
        is_rms = norm.kind == "rmsnorm" and norm.weight is not None
        return is_rms and self.layer.bias is None and self._takes_one_token(norm.weight)

    def normed(self, x: Tensor, branch: Tensor, norm: ResidualNorm, gate: str = "none") -> tuple[Tensor, Tensor]:
        """Of a single token: the product of the norm of x + branch, and x + branch."""
        layer, kind = self.layer, self.layer.kind
        assert norm.weight is not None
        if not isinstance(kind, FewBits):
            return times_normed_row(x, branch, norm.weight, layer.weight, norm.epsilon, gate)
        y, total = norm_lowbit_linear(
            x.view(1, -1), branch.view(1, -1), norm.weight, *kind.stored(layer), code=kind.scheme.format,
            eps=norm.epsilon, gate=gate, settled=kind.settled,
        )  # fmt: skip
        return y.view(*x.shape[:-1], -1), total.view(x.shape)

    def _takes_one_token(self, row: Tensor) -> bool:
        """Whether there is a kernel for one token of this dtype and width; on a GPU."""
        layer, kind = self.layer, self.layer.kind
        if isinstance(kind, FewBits):
            return kind.inputs is None and takes_one_token(row, layer.codes, layer.scales, kind.scheme.format)
        return isinstance(kind, DenseMatrix) and kind.one_row


@torch.no_grad()
def stack(layers: Sequence[Linear], kind: MatrixKind) -> StackedProduct:
    """Lay their pieces under one another in new memory, and let theirs be parts of it. `kind`: of the stack."""
    widths = [layer.out_features for layer in layers]
    first, has_bias = layers[0], all(layer.bias is not None for layer in layers)
    stacked = make_linear(first.in_features, sum(widths), has_bias, kind=kind, device="meta")
    for name in list(stacked._parameters):
        if stacked._parameters[name] is None:
            continue
        parts = [layer.get_parameter(name) for layer in layers]
        values = torch.cat([part.detach() for part in parts])
        stacked.register_parameter(name, nn.Parameter(values, requires_grad=False))
        for part, rows in zip(parts, torch.split(values, [len(part) for part in parts]), strict=True):
            part.data = rows
    return StackedProduct(stacked, widths)


def stack_products(model: Any, one_row: bool = False) -> None:
    """Query, key and value by one product and gate and first projection by another, in every layer where it can be.

    A layer whose projections are of several kinds, or split over ranks, stays as it is. `one_row`: products of a single
    token with dense weights are `row_linear`'s.
    """
    for layer in model.layers:
        for block, names in ((layer.attention, ("fc_q", "fc_k", "fc_v")), (layer.mlp, ("fc_gate", "fc_in"))):
            modules = [getattr(block, name) for name in names]
            kind = _stacked_kind(modules)
            if kind is None or _is_stacked(block.stacked, modules):
                continue
            kind = replace(kind, one_row=one_row) if isinstance(kind, DenseMatrix) else kind
            block.stacked = stack(modules, kind)


def _is_stacked(stacked: StackedProduct | None, layers: Sequence[Linear]) -> bool:
    """Whether it was done before, and the pieces have not moved since (`model.to` moves them)."""
    if stacked is None:
        return False
    for name, whole in stacked.layer.named_parameters():
        address, step = whole.data_ptr(), whole.stride(0) * whole.element_size()
        for layer in layers:
            part = layer._parameters.get(name)
            if part is None or part.data_ptr() != address or part.dtype != whole.dtype:
                return False
            address += len(part) * step
    return True


def _stacked_kind(layers: Sequence[object]) -> MatrixKind | None:
    """The kind of these matrices under one another; None where they cannot be computed so."""
    alike: set[tuple[object, ...]] = set()
    for layer in layers:
        if not isinstance(layer, Linear) or layer.place != ALONE or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        if any(parameter.requires_grad for parameter in layer.parameters()):
            return None  # somebody steps them, and knows where they are
        dtypes = tuple((name, piece.dtype, piece.device) for name, piece in layer.named_parameters())
        alike.add((layer.kind.stacked(), layer.in_features, dtypes))
    (kind, *_) = alike.pop() if len(alike) == 1 else (None,)
    return kind if isinstance(kind, MatrixKind) else None
