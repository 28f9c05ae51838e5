"""What is changed in a whole model after it was made: torch's dropout for peers, layouts that suit a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn
from torch.nn import functional

from tilemesh.model.config import VOCABULARY_MULTIPLE
from tilemesh.model.transformer import Attention, Dropout, Pass, Transformer

_Kind = TypeVar("_Kind", bound=nn.Module)


class PlainDropout(nn.Module):
    """torch's dropout, whose mask comes from a generator."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        return functional.dropout(x, self.rate, training=now.dropout_seed is not None)


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


def _replace(model: nn.Module, kind: type[_Kind], make: Callable[[_Kind], nn.Module]) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kind):
                setattr(module, name, make(child))
