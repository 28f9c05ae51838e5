"""Cosines and sines of angles, for rotary position embedding.

The one idea: under torch.compile they are one operator, whose results are written once. Left to the compiler, powers,
cosines and sines are computed anew for every element of every head that is turned: 31 of tinyllama-1.1b's 238 ms per
step on an H200.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

_library = torch.library.Library("tilemesh", "FRAGMENT")
_library.define("cosines_and_sines(Tensor angle) -> (Tensor, Tensor)")


def cosines_and_sines(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Of angles, by which pairs of a head turn."""
    if is_compiling():
        cos, sin = torch.ops.tilemesh.cosines_and_sines(angle)
        return cos, sin
    return _compute(angle)


def _compute(angle: Tensor) -> tuple[Tensor, Tensor]:
    return angle.cos(), angle.sin()


_library.impl("cosines_and_sines", _compute, "CPU")
_library.impl("cosines_and_sines", _compute, "CUDA")


@torch.library.register_fake("tilemesh::cosines_and_sines", lib=_library)
def _fake(angle: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angle), torch.empty_like(angle)
