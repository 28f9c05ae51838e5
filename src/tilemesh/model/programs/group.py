"""Projections of the same activations in one storage, computed by one product.

The one idea: q, k and v, and a gate and what it opens, keep their own named parameters, which are rows of one piece of
memory: a state dict is what it was, nothing is held twice, and who writes into a projection's weight in place writes
into the group's. A group owns nothing: it is found where its pieces lie under one another, and laid so where not.

It is for models that only compute forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilemesh.kernels.gated.reference import geglu, swiglu
from tilemesh.kernels.lowbit_linear.reference import lowbit_linear, norm_lowbit_linear, takes_one_token
from tilemesh.model.experts import Experts
from tilemesh.model.kinds import FewBits
from tilemesh.model.linear import ALONE, DenseMatrix, Linear, MatrixKind, make_linear
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.one_row import times_normed_row, times_row
from tilemesh.model.transformer import Layer

GATED = {"silu": swiglu, "gelu_tanh": geglu}
"""By a gate's activation: both at once."""


@dataclass(frozen=True)
class GroupProduct:
    """Call it with activations: the projections' results side by side, `widths` of them each."""

    layer: Linear
    """Of the matrices under one another, without an activation."""
    members: tuple[Linear, ...]
    gate: str = "none"
    """The first member's activation, where it opens the second."""

    @property
    def widths(self) -> list[int]:
        return [member.out_features for member in self.members]

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(self.layer(x), self.widths, dim=-1)

    def gated(self, x: Tensor) -> Tensor:
        """The gate's activation of the first of two projections times the second."""
        made: Tensor = GATED[self.gate](*self.layer(x).chunk(2, -1))
        return made

    def gated_row(self, x: Tensor) -> Tensor:
        """The same of a single token by one kernel, where `takes_row`."""
        layer, kind = self.layer, self.layer.kind
        if isinstance(kind, FewBits):
            y: Tensor = lowbit_linear(
                x, *kind.stored(layer), code=kind.scheme.format, gate="silu", settled=kind.settled
            )
            return y
        return times_row(x, layer.weight, layer.bias, gate="silu")

    def takes_row(self, like: Tensor) -> bool:
        """Whether there is a kernel for one token of this dtype and width, with a norm before and a gate after it."""
        layer, kind = self.layer, self.layer.kind
        if isinstance(kind, FewBits):
            is_plain = kind.inputs is None and layer.bias is None  # of which its kernel knows nothing
            return is_plain and takes_one_token(like, layer.codes, layer.scales, kind.scheme.format)
        return isinstance(kind, DenseMatrix) and kind.one_row

    def takes_norm(self, norm: ResidualNorm) -> bool:
        """Whether the product of a single token can have this norm inside."""
        is_rms = norm.kind == "rmsnorm" and norm.weight is not None
        return is_rms and self.layer.bias is None and self.takes_row(norm.weight)

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


EXPERTS = "the layer has experts"


class LayerGroups(NamedTuple):
    """Of one layer; None where projections stay apart, with the reason."""

    heads: GroupProduct | None = None
    """Query, key and value."""
    gated: GroupProduct | None = None
    """The gate and the first projection."""
    heads_apart: str = "weights are trained"
    gated_apart: str = "weights are trained"


def group_layers(groups: Iterable[LayerGroups]) -> list[Linear]:
    """What computes several projections at once."""
    return [product.layer for pair in groups for product in (pair.heads, pair.gated) if product is not None]


def layer_groups(layer: Layer, one_row: bool = False) -> LayerGroups:
    """Lay a layer's projections together where they can be. `one_row`: products of a single token with dense weights
    are `row_linear`'s."""
    attention, mlp = layer.attention, layer.mlp
    heads, heads_apart = None, "keys and values are made of a latent"
    if attention.fc_latent is None:
        heads, heads_apart = group([attention.fc_q, attention.fc_k, attention.fc_v], one_row)
    if isinstance(mlp, Experts):
        return LayerGroups(heads, None, heads_apart, EXPERTS)
    if mlp.fc_gate is None:
        return LayerGroups(heads, None, heads_apart, "there is no gate")
    if mlp.fc_in.activation != "none":
        return LayerGroups(heads, None, heads_apart, f"there is no kernel for {mlp.fc_gate.activation}")
    gated, gated_apart = group([mlp.fc_gate, mlp.fc_in], one_row)
    return LayerGroups(heads, gated, heads_apart, gated_apart)


def group(layers: Sequence[nn.Module], one_row: bool = False) -> tuple[GroupProduct | None, str]:
    """One product for all of these, or why they stay apart."""
    members = tuple(layer for layer in layers if isinstance(layer, Linear))
    reason = why_apart(members) if len(members) == len(layers) else "a projection was replaced"
    if reason:
        return None, reason
    kind = members[0].kind.stacked()
    assert kind is not None
    kind = replace(kind, one_row=one_row) if isinstance(kind, DenseMatrix) else kind
    kind = kind.over([member.out_features for member in members])
    return GroupProduct(lay_together(members, kind), members, members[0].activation), ""


def why_apart(layers: Sequence[Linear]) -> str:
    """Why these matrices cannot be computed as one, in words; "" where they can."""
    alike: set[tuple[object, ...]] = set()
    for layer in layers:
        if layer.place != ALONE:
            return "ranks share them"
        if layer._forward_hooks or layer._forward_pre_hooks:
            return "somebody listens to them"
        if layer.in_blocks:
            return "they are multiplied in blocks of tokens"
        if any(parameter.requires_grad for parameter in layer.parameters()):
            return "weights are trained"  # somebody steps them, and knows where they are
        dtypes = tuple((name, piece.dtype, piece.device) for name, piece in layer.named_parameters())
        alike.add((layer.kind.stacked(), layer.in_features, dtypes))
    if len(alike) > 1:
        return "their matrices are of several kinds"
    return f"matrices of kind {type(layers[0].kind).__name__} stay apart" if layers[0].kind.stacked() is None else ""


@torch.no_grad()
def lay_together(layers: Sequence[Linear], kind: MatrixKind) -> Linear:
    """A layer of this kind of their pieces under one another, which become parts of one memory if they are not yet."""
    outputs = sum(layer.out_features for layer in layers)
    has_bias = all(layer.bias is not None for layer in layers)
    together = make_linear(layers[0].in_features, outputs, has_bias, kind=kind, device="meta")
    for name in [name for name, value in together._parameters.items() if value is not None]:
        values = put_together([layer.get_parameter(name) for layer in layers])
        together.register_parameter(name, nn.Parameter(values, requires_grad=False))
    return together


@torch.no_grad()
def put_together(parts: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of these parameters' rows, which become parts of its memory if they are not yet."""
    values = as_one(parts)
    if values is None:
        values = torch.cat([part.detach() for part in parts])
        for part, rows in zip(parts, torch.split(values, [len(part) for part in parts]), strict=True):
            part.data = rows
    return values


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """The memory of tensors that lie under one another, as one tensor of all their rows; None where they do not."""
    first, end = parts[0].detach(), parts[0].storage_offset()
    storage = first.untyped_storage()
    for part in parts:
        same = part.untyped_storage()._cdata == storage._cdata and part.dtype == first.dtype
        if not same or not part.is_contiguous() or part.storage_offset() != end or part.shape[1:] != first.shape[1:]:
            return None
        end += part.numel()
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), parts[0].storage_offset())
