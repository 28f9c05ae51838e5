"""A projection with its activation: fused into one kernel of ours, or two operations of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.kernels.modules import FusedLinear
from tilemesh.model.deferral import Deferral
from tilemesh.model.kernels import TORCH

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


class PlainLinear(nn.Linear):
    """Two operations of torch: an operator of ours is a wall that torch.compile cannot fuse across, these are none."""

    activation = "none"
    deferral: Deferral | None = None
    """Who puts off its weight's gradient, where somebody does."""

    def reset_parameters(self) -> None:
        # Without memory there is nothing to draw, and torch's random ops on the meta device import for two seconds.
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name nn.Linear uses)
        product = functional.linear if self.deferral is None else self.deferral.linear
        return self.activated(product(input, self.weight, self.bias))

    def activated(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](x)


def make_projection(
    inputs: int, outputs: int, bias: bool, activation: str, implementation: str, dtype: torch.dtype | None
) -> nn.Linear:
    """One without memory. `implementation`: as in `ModelKernels`."""
    if implementation == TORCH:
        plain = PlainLinear(inputs, outputs, bias, device="meta", dtype=dtype)
        plain.activation = activation
        return plain
    return FusedLinear(
        inputs, outputs, bias, activation=activation, implementation=implementation, device="meta", dtype=dtype
    )
