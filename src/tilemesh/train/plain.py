"""Projections with their activations as torch's own operations, in place of the fused kernel.

For the peers, and for models under torch.compile: there an operator of ours is a wall that the compiler cannot fuse
across, while torch's operations it fuses itself.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from tilemesh.kernels.modules import FusedLinear

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


class PlainLinear(nn.Linear):
    """A projection and its activation as two operations of torch."""

    activation = "none"

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name nn.Linear uses)
        return _ACTIVATIONS[self.activation](functional.linear(input, self.weight, self.bias))


def make_plain(model: nn.Module) -> None:
    """Replace every fused projection of a model; parameters stay the same tensors under the same names."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, FusedLinear):
                plain = PlainLinear(child.in_features, child.out_features, child.bias is not None, device="meta")
                plain.weight, plain.bias = child.weight, child.bias
                plain.activation = child.activation
                setattr(module, name, plain)


def prepare_for_compile(model: nn.Module) -> None:
    """What a model is made of where torch.compile runs it: operations that the compiler can fuse with one another."""
    make_plain(model)
