"""A model made of torch's own operations: projections with their activations, and for peers dropout.

For the peers, and for models under torch.compile: there an operator of ours is a wall that the compiler cannot fuse
across, while torch's operations it fuses itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn
from torch.nn import functional

from tilemesh.kernels.modules import FusedLinear
from tilemesh.model.config import VOCABULARY_MULTIPLE
from tilemesh.model.transformer import Attention, Dropout, Pass, Transformer

_Kind = TypeVar("_Kind", bound=nn.Module)
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


class PlainDropout(nn.Module):
    """torch's dropout, whose mask comes from a generator."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        return functional.dropout(x, self.rate, training=now.dropout_seed is not None)


def make_plain(model: nn.Module) -> None:
    """Replace every fused projection of a model; parameters stay the same tensors under the same names."""

    def plain(child: FusedLinear) -> nn.Module:
        made = PlainLinear(child.in_features, child.out_features, child.bias is not None, device="meta")
        made.weight, made.bias = child.weight, child.bias
        made.activation = child.activation
        return made

    _replace(model, FusedLinear, plain)


def drop_plainly(model: nn.Module) -> None:
    """torch's dropout in place of ours: as quick as a user's own, and another mask in every layout."""
    _replace(model, Dropout, lambda child: PlainDropout(child.rate))


def suit_gpu(model: Transformer, *, compiled: bool) -> None:
    """What makes the step of a whole model quicker on a GPU; its weights stay, its results but for rounding.

    The vocabulary is rounded up to whole 128-byte lines of 16-bit numbers. Compiled, there is one product for query,
    key and value; not where query and key are turned (the values would keep what these were before in memory), nor for
    a gate and what it opens (their gradients, made in one pass, would be made in two).
    """
    model.align_vocabulary = VOCABULARY_MULTIPLE
    for module in model.modules():
        if isinstance(module, Attention):
            module.joined = compiled and model.config.positions != "rotary"


def prepare_for_compile(model: Transformer) -> None:
    """What a model is made of where torch.compile runs the whole of it for a GPU."""
    make_plain(model)
    suit_gpu(model, compiled=True)


def _replace(model: nn.Module, kind: type[_Kind], make: Callable[[_Kind], nn.Module]) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kind):
                setattr(module, name, make(child))
