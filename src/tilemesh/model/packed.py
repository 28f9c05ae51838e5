"""Weights in the layout that a CPU's products want, in a model that only computes forward.

The one idea: torch hands a weight to its library as it lies, and the library lays it out for its kernel in every call.
For a prompt that is little; for the few tokens of a decode step it is as much work as the product. oneDNN's product
takes a weight that was laid out once (torch's `mkldnn` operators, which torch.compile uses as well). The plain weight
stays where it is: a state dict is what it was, one row is multiplied by it (it is read once, there is nothing to gain),
and whoever writes into it in place is noticed. So each weight is held twice.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.c_library import host_cpu
from tilemesh.kernels.few_linear.cost import MOST_ROWS
from tilemesh.kernels.few_linear.cpu import few_product, library
from tilemesh.model.kinds import Adapted
from tilemesh.model.linear import ALONE, DENSE, DenseMatrix, Linear, MatrixKind, WeightHolder
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


@dataclass(frozen=True)
class FewRows(DenseMatrix):
    """A dense weight whose product with a few rows is ours, in C: as it is stored, it is read once."""

    def affine(self, layer: WeightHolder, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = layer.weight
        has_function = x.device == weight.device == _CPU and library(weight.dtype) is not None
        if not has_function or x.requires_grad or not 0 < x.numel() <= MOST_ROWS * x.shape[-1]:
            is_widened = weight.dtype == torch.bfloat16 and not multiplies_bfloat16()
            dtype = torch.float32 if is_widened else weight.dtype
            bias = None if bias is None else bias.to(dtype)
            return functional.linear(x.to(dtype), weight.to(dtype), bias).to(x.dtype)
        y_RN = few_product(x.reshape(-1, x.shape[-1]).float(), weight, bias)
        return y_RN.view(*x.shape[:-1], len(weight)).to(x.dtype)

    @property
    def widens(self) -> bool:
        return True

    def stacked(self) -> MatrixKind | None:
        return self


FEW_ROWS = FewRows()


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it. Without, a weight is better widened for each product of many rows."""
    return "bf16" in host_cpu()


def multiplies_few(dtype: torch.dtype) -> bool:
    """Whether there is this product here. On arm64 oneDNN's, of weights that were laid out once, is as quick where it
    knows the dtype."""
    on_arm = platform.machine() in ("aarch64", "arm64")
    return library(dtype) is not None and not (on_arm and packs(dtype))


def _packed(weight: Tensor, parts: tuple[Tensor, ...]) -> DenseMatrix:
    return Packed(held=PackedWeight(weight, parts))


@torch.no_grad()
def pack_products(
    model: Transformer,
    groups: Sequence[LayerGroups] = (),
    kind: Callable[[Tensor, tuple[Tensor, ...]], DenseMatrix] = _packed,
) -> None:
    """Every product whose weight is dense, those of groups as they lie together. `kind`: of a weight and its parts.

    Projections that are something else (split over ranks, in few bits, with an adapter that is trained) stay as they
    are.
    """
    grouped: set[Linear] = set()
    for product in (product for pair in groups for product in (pair.heads, pair.gated) if product is not None):
        if _is_dense(product.layer):
            _become(product.layer, kind(product.layer.weight, tuple(member.weight for member in product.members)))
            grouped.update(product.members)
    for module in model.layers.modules():
        if _is_dense(module) and module not in grouped:
            _become(module, kind(module.weight, ()))
    head = model.token_embedding if model.output is None else model.output
    if head is not None and (head is model.token_embedding or _is_dense(head)):
        head.become(kind(head.weight, ()))


def _is_dense(module: object) -> TypeGuard[Linear]:
    if not isinstance(module, Linear) or module.place != ALONE or module._forward_hooks or module._forward_pre_hooks:
        return False
    kind = module.kind.stacked()
    kind = kind.base if isinstance(kind, Adapted) else kind
    return kind == DENSE and not module.weight.requires_grad


def _become(layer: Linear, kind: DenseMatrix) -> None:
    layer.become(replace(layer.kind, base=kind) if isinstance(layer.kind, Adapted) else kind)
