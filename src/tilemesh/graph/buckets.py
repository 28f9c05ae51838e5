"""Sizes that change, in few programs: inputs are filled up to the next power of two.

A compiler makes one program per size. Where elements along a dim do not depend on each other (requests of a batch), a
batch of 5 may run as one of 8, and results beyond the fifth are dropped: log2(n) programs instead of n, for at most
twice the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilemesh.core.errors import UsageError


def bucket(size: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(size - 1, 0).bit_length()


class SizeBuckets:
    """A function of tensors whose dim `dim` is filled with zeros up to a power of two; results are cut back.

    `seen` holds the sizes that were asked for, `programs` those that ran.
    """

    def __init__(self, call: Callable[..., Any], dim: int = 0) -> None:
        self.call, self.dim = call, dim
        self.seen: set[int] = set()
        self.programs: set[int] = set()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        sizes = {tensor.shape[self.dim] for tensor in tensors}
        if len(sizes) != 1:
            raise UsageError(f"the inputs have sizes {sorted(sizes)} along dim {self.dim}; give equal ones")
        (size,) = sizes
        filled = bucket(size)
        self.seen.add(size)
        self.programs.add(filled)
        results = self.call(*(self._filled(tensor, filled - size) for tensor in tensors))
        if isinstance(results, torch.Tensor):
            return results.narrow(self.dim, 0, size)
        return type(results)(result.narrow(self.dim, 0, size) for result in results)

    def _filled(self, tensor: torch.Tensor, more: int) -> torch.Tensor:
        if not more:
            return tensor
        shape = list(tensor.shape)
        shape[self.dim] = more
        return torch.cat([tensor, tensor.new_zeros(shape)], self.dim)
