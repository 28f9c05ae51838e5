"""Norms that lose nothing of what they add up: of gradients, which are clipped by them, and of weights.

On a CPU torch adds squares one after the other in the tensor's own dtype: in float32 the sum is 0.06 % low at 8 million
values and 0.8 % at 40 million, in bfloat16 the result is rounded to 3 digits. Here parts that fit a cache are added in
float64. On a GPU thousands of threads each add a few values in float32, which is as good, and takes a few launches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PART = 1 << 16  # numbers: half a MiB in float64


@torch.no_grad()
def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each, side by side on their device: float64, on a GPU at least float32. Nothing is waited for."""
    norms: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # of several at once torch launches one for each
        alike = [at for at, tensor in enumerate(tensors) if tensor.dtype == dtype]
        norms |= dict(zip(alike, _alike([tensors[at] for at in alike]), strict=True))
    return torch.stack([norms[at] for at in range(len(tensors))])


def norm_of(*tensors: Tensor) -> float:
    """The norm of all of them together."""
    return float(torch.linalg.vector_norm(norms_of(tensors)))


def _alike(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Of tensors of one dtype."""
    if tensors[0].device.type != "cpu":
        return torch._foreach_norm(tensors, 2, dtype=torch.promote_types(tensors[0].dtype, torch.float32))
    return [_by_parts(tensor) for tensor in tensors]


def _by_parts(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    starts = range(0, max(1, flat.numel()), _PART)
    parts = [torch.linalg.vector_norm(flat[start : start + _PART], dtype=torch.float64) for start in starts]
    whole: Tensor = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))
    return whole
