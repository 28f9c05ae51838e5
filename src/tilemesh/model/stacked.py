"""Projections of the same activations by one product, in a model that only computes forward.

The one idea: the weights are laid side by side once, and each projection's own weight becomes a part of that memory. So
nothing is held twice, a state dict is what it was, and whoever writes into a projection's weight in place writes into
the stack. It is not for training: there weights are stepped, split and cast (`transformer.joined` serves that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.kernels.gated.reference import swiglu
from tilemesh.kernels.row_linear.reference import norm_row_linear, row_linear
from tilemesh.model.norm import ResidualNorm


class SideBySide(Protocol):
    """Several projections of the same activations as one product: of plain weights, or of codes (`model.lowbit`)."""

    @property
    def widths(self) -> list[int]: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def gated(self, x: Tensor) -> Tensor: ...

    def takes_norm(self, norm: ResidualNorm) -> bool: ...

    def normed(self, x: Tensor, branch: Tensor, norm: ResidualNorm, gate: str = "none") -> tuple[Tensor, Tensor]: ...


class HeldProduct(Protocol):
    """Computes products with a weight that it holds: see `model.packed`."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class StackedProduct:
    """Call it with activations: the projections' results side by side, `widths` of them each."""

    weight: Tensor
    bias: Tensor | None
    widths: list[int]
    one_row: bool = False
    """Whether the product of a single token is `row_linear`'s."""
    packed: HeldProduct | None = None
    """Who computes the product on a CPU, where somebody does."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.one_row and is_one_row(x):
            return times_row(x, self.weight, self.bias)
        return self._product(x)

    def gated(self, x: Tensor) -> Tensor:
        """silu of the first of two projections times the second."""
        if self.one_row and is_one_row(x):
            return times_row(x, self.weight, self.bias, gate="silu")
        gate, values = self._product(x).chunk(2, -1)
        product: Tensor = swiglu(gate, values)
        return product

    def _product(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.product(x, self.bias)
        return functional.linear(x, self.weight, self.bias)

    def takes_norm(self, norm: ResidualNorm) -> bool:
        """Whether the product of a single token can have this norm inside."""
        return self.one_row and self.bias is None and norm.kind == "rmsnorm" and norm.weight is not None

    def normed(self, x: Tensor, branch: Tensor, norm: ResidualNorm, gate: str = "none") -> tuple[Tensor, Tensor]:
        """Of a single token: the product of the norm of x + branch, and x + branch."""
        assert norm.weight is not None
        return times_normed_row(x, branch, norm.weight, self.weight, norm.epsilon, gate)


def is_one_row(x: Tensor) -> bool:
    """Whether these are activations of a single token on a GPU: a library's products are not made for that."""
    return x.device.type == "cuda" and x.numel() == x.shape[-1] and x.is_contiguous()


def times_row(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str = "none") -> Tensor:
    """The product of a single token. A model's weights are never what the kernel before has just made."""
    made: Tensor = row_linear(x.view(1, -1), weight, bias, gate=gate, settled=True)
    return made.view(*x.shape[:-1], -1)


def times_normed_row(
    x: Tensor, branch: Tensor, scale: Tensor, weight: Tensor, eps: float, gate: str = "none"
) -> tuple[Tensor, Tensor]:
    """The same of the RMSNorm of x + branch; and x + branch."""
    rows = (x.view(1, -1), branch.view(1, -1))
    made, total = norm_row_linear(*rows, scale, weight, eps=eps, gate=gate, settled=True)
    return made.view(*x.shape[:-1], -1), total.view(x.shape)


@torch.no_grad()
def stack(projections: Sequence[nn.Linear], one_row: bool = False) -> StackedProduct:
    """Lay their weights side by side in new memory, and let theirs be parts of it."""
    widths = [projection.weight.shape[0] for projection in projections]
    weight = torch.cat([projection.weight.detach() for projection in projections])
    biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
    bias = torch.cat(biases) if len(biases) == len(projections) else None
    begin = 0
    for projection, width in zip(projections, widths, strict=True):
        projection.weight.data = weight[begin : begin + width]
        if bias is not None:
            projection.bias.data = bias[begin : begin + width]
        begin += width
    return StackedProduct(weight, bias, widths, one_row)


def stack_products(model: nn.Module, plain: Sequence[type[nn.Linear]], one_row: bool = False) -> None:
    """Query, key and value by one product and gate and first projection by another, in every layer where it can be.

    `plain`: classes whose call is a product and an activation that the model knows of, and nothing else. A layer whose
    projections are others (split over ranks, say) stays as it is. `one_row`: products of a single token are
    `row_linear`'s.
    """
    for layer in model.get_submodule("layers").children():
        attention, mlp = layer.get_submodule("attention"), layer.get_submodule("mlp")
        heads = [attention.get_submodule(name) for name in ("fc_q", "fc_k", "fc_v")]
        if _can_stack(heads, plain) and not _is_stacked(attention.stacked, heads):
            attention.stacked = stack(heads, one_row)  # type: ignore[arg-type, assignment]
        if mlp.fc_gate is not None:
            gated = [mlp.get_submodule(name) for name in ("fc_gate", "fc_in")]
            if _can_stack(gated, plain) and not _is_stacked(mlp.stacked, gated):
                mlp.stacked = stack(gated, one_row)  # type: ignore[arg-type, assignment]


def _is_stacked(stacked: object, modules: Sequence[nn.Module]) -> bool:
    """Whether it was done before, and the weights have not moved since (`model.to` moves them)."""
    if not isinstance(stacked, StackedProduct):
        return False
    address, step = stacked.weight.data_ptr(), stacked.weight.stride(0) * stacked.weight.element_size()
    for module, width in zip(modules, stacked.widths, strict=True):
        weight = module.weight
        assert isinstance(weight, Tensor)
        if weight.data_ptr() != address or weight.dtype != stacked.weight.dtype:
            return False
        address += width * step
    return True


def _can_stack(modules: Sequence[nn.Module], plain: Sequence[type[nn.Linear]]) -> bool:
    if any(type(module) not in plain or module._forward_hooks or module._forward_pre_hooks for module in modules):
        return False
    weights = [module.weight for module in modules]
    if any(weight.requires_grad for weight in weights):  # somebody steps them, and knows where they are
        return False
    alike = {(weight.dtype, weight.device, weight.shape[1]) for weight in weights}  # type: ignore[index]
    return len(alike) == 1 and len({module.bias is None for module in modules}) == 1
