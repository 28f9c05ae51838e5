"""Cosines and sines of positions, for rotary position embedding.

The one idea: under torch.compile they are one operator, whose results are written once. Left to the compiler, powers,
cosines and sines are computed anew for every element of every head that is turned: 31 of tinyllama-1.1b's 238 ms per
step on an H200.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

_library = torch.library.Library("tilemesh", "FRAGMENT")
_library.define("turns_of(Tensor positions, int width, float base, ScalarType dtype) -> (Tensor, Tensor)")


def turns_of(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., width / 2): pair i turns by position x base^(-2i/width)."""
    if is_compiling():
        cos, sin = torch.ops.tilemesh.turns_of(positions, width, base, dtype)
        return cos, sin
    return _compute(positions, width, base, dtype)


def _compute(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pair = torch.arange(0, width, 2, device=positions.device).to(dtype)
    angle = positions.to(dtype)[..., None] * base ** (-pair / width)
    return angle.cos(), angle.sin()


_library.impl("turns_of", _compute, "CPU")
_library.impl("turns_of", _compute, "CUDA")


@torch.library.register_fake("tilemesh::turns_of", lib=_library)
def _fake(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, width // 2)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)
