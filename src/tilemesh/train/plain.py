"""What is changed in a whole model after it was made: layouts that suit a GPU, and weights that may be 16-bit."""

from __future__ import annotations

from torch import nn

from tilemesh.model.config import VOCABULARY_MULTIPLE
from tilemesh.model.transformer import Attention, Transformer


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


def product_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that products alone read: autocast computes with their 16-bit values and no others.

    A table that is looked up is none of them, also where it is the output projection; nor are those of norms.
    """
    return {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters(recurse=False)
        if name in ("weight", "bias") and parameter.requires_grad
    }
