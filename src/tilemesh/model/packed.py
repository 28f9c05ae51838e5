"""Weights in the layout that a CPU's products want, in a model that only computes forward.

The one idea: torch hands a weight to its library as it lies, and the library lays it out for its kernel in every call.
For a prompt that is little; for the few tokens of a decode step it is as much work as the product. oneDNN's product
takes a weight that was laid out once (torch's `mkldnn` operators, which torch.compile uses as well). The plain weight
stays where it is: a state dict is what it was, one row is multiplied by it (it is read once, there is nothing to gain),
and whoever writes into it in place is noticed. So each weight is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.model.kinds import Adapted
from tilemesh.model.linear import ALONE, DENSE, DenseMatrix, Linear, WeightHolder
from tilemesh.model.programs.group import LayerGroups, group_layers
from tilemesh.model.transformer import Transformer

LEAST_ROWS = 2
"""One row is a matrix times a vector."""
_CPU = torch.device("cpu")
_PLANNED_ROWS = 16
"""The layout is chosen for about as many; products of other numbers of rows take it as it is."""


def packs(dtype: torch.dtype) -> bool:
    """Whether this CPU's library has products of weights laid out before: tried once."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight = torch.eye(16, dtype=dtype)
        x = torch.arange(32.0, dtype=dtype).view(2, 16)
        return torch.equal(PackedWeight(weight).product(x, None), x)
    except (AttributeError, RuntimeError):  # NotImplementedError is one: this build has no such operator
        return False


_switch = Lock()
_was_enabled: list[bool] = []  # one entry per caller: the switch is the process's, ranks may be threads


def without_onednn() -> Callable[[], None]:
    """Leave products to BLAS, which begins sooner, until what this gives is called by the last of all callers."""
    with _switch:
        _was_enabled.append(torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)

    def restore() -> None:
        with _switch:
            torch._C._set_mkldnn_enabled(_was_enabled.pop() and not _was_enabled)

    return restore


class PackedWeight:
    """A weight (N, K) as it lies and as the library wants it. `written`: the parameters that are its parts, if any."""

    def __init__(self, weight: Tensor, written: tuple[Tensor, ...] = ()) -> None:
        self.weight, self._written = weight, written or (weight,)
        self._dtype = weight.dtype
        self._seen = self._state()
        self._packed: Tensor | None = self._pack()

    def forget(self) -> None:
        """Give the second layout's memory back; the next product lays the weight out as it is then."""
        self._seen, self._packed = [], None

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        # A model that was moved or cast since, and one row, take the plain weight.
        is_same = x.dtype == self._dtype == self.weight.dtype and x.device == self.weight.device == _CPU
        if not is_same or x.requires_grad or x.numel() < LEAST_ROWS * x.shape[-1]:
            return functional.linear(x, self.weight, bias)
        if self._state() != self._seen:
            self._seen, self._packed = self._state(), self._pack()
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return made

    def _pack(self) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PLANNED_ROWS)
        return packed

    def _state(self) -> list[tuple[int, int]]:
        """Another one where a weight was written in place or is other memory."""
        return [(part.data_ptr(), 0 if part.is_inference() else part._version) for part in self._written]


@dataclass(frozen=True)
class Packed(DenseMatrix):
    """A dense weight, and the same as the library wants it."""

    held: PackedWeight | None = None

    def affine(self, layer: WeightHolder, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self.held is not None
        return self.held.product(x, bias)


def packed_bytes(model: Transformer) -> int:
    """What `pack_products` would take at most."""
    table = model.output_weight
    inner = [parameter for parameter in model.layers.parameters() if parameter.dim() == 2]
    return sum(parameter.nbytes for parameter in (*inner, table))


def forget_packed(model: Transformer, groups: Sequence[LayerGroups] = ()) -> None:
    """`PackedWeight.forget` of every product that `pack_products` gave one."""
    for layer in (*group_layers(groups), *model.modules()):
        kind = getattr(layer, "kind", None)
        kind = kind.base if isinstance(kind, Adapted) else kind
        if isinstance(kind, Packed) and kind.held is not None:
            kind.held.forget()


@torch.no_grad()
def pack_products(model: Transformer, groups: Sequence[LayerGroups] = ()) -> None:
    """Every product whose weight is dense, those of groups as they lie together.

    Projections that are something else (split over ranks, in few bits, with an adapter that is trained) stay as they
    are.
    """
    grouped: set[Linear] = set()
    for product in (product for pair in groups for product in (pair.heads, pair.gated) if product is not None):
        if _is_dense(product.layer):
            parts = tuple(member.weight for member in product.members)
            _pack(product.layer, parts)
            grouped.update(product.members)
    for module in model.layers.modules():
        if _is_dense(module) and module not in grouped:
            _pack(module)
    head = model.token_embedding if model.output is None else model.output
    if head is not None and (head is model.token_embedding or _is_dense(head)):
        head.become(Packed(held=PackedWeight(head.weight)))


def _is_dense(module: object) -> TypeGuard[Linear]:
    if not isinstance(module, Linear) or module.place != ALONE or module._forward_hooks or module._forward_pre_hooks:
        return False
    kind = module.kind.stacked()
    kind = kind.base if isinstance(kind, Adapted) else kind
    return kind == DENSE and not module.weight.requires_grad


def _pack(layer: Linear, parts: tuple[Tensor, ...] = ()) -> None:
    packed = Packed(held=PackedWeight(layer.weight, parts))
    layer.become(replace(layer.kind, base=packed) if isinstance(layer.kind, Adapted) else packed)
