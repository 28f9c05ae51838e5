"""Arrays as a buffer, an offset, a shape and strides: what slicing, transposing and broadcasting change.

    element [i, j] lies at data[offset + i * strides[0] + j * strides[1]]

`StridedView` is numpy's and torch's idea in forty lines, counted in elements rather than bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tilemesh.core.errors import UsageError


@dataclass(frozen=True)
class StridedView:
    data: Sequence[Any]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, data: Sequence[Any], shape: tuple[int, ...]) -> StridedView:
        """Row-major: the last dim has stride 1."""
        strides = row_major(shape)
        if len(data) != math.prod(shape):
            raise UsageError(f"{len(data)} elements for shape {shape}: expected {math.prod(shape)}")
        return cls(data, 0, shape, strides)

    def place(self, *index: int) -> int:
        """Where an element lies in the buffer."""
        for at, length in zip(index, self.shape, strict=True):
            if not 0 <= at < length:
                raise UsageError(f"index {index} is outside of shape {self.shape}")
        return self.offset + sum(at * stride for at, stride in zip(index, self.strides, strict=True))

    def __getitem__(self, index: tuple[int, ...]) -> Any:
        return self.data[self.place(*index)]

    def slice(self, *ranges: range) -> StridedView:
        """One range for each dim. Moves the offset; a step multiplies the stride. Copies nothing."""
        for chosen, length in zip(ranges, self.shape, strict=True):
            if chosen and not 0 <= min(chosen) <= max(chosen) < length:
                raise UsageError(f"{chosen} is outside of a dim of length {length}")
        offset = self.offset + sum(chosen.start * stride for chosen, stride in zip(ranges, self.strides, strict=True))
        strides = tuple(chosen.step * stride for chosen, stride in zip(ranges, self.strides, strict=True))
        return StridedView(self.data, offset, tuple(len(chosen) for chosen in ranges), strides)

    def permute(self, *dims: int) -> StridedView:
        """Dims in another order: (1, 0) transposes a matrix. Swaps strides, copies nothing."""
        if sorted(dims) != list(range(len(self.shape))):
            raise UsageError(f"permute{dims}: expected each of the {len(self.shape)} dims once")
        shape, strides = ((tuple(values[dim] for dim in dims)) for values in (self.shape, self.strides))
        return StridedView(self.data, self.offset, shape, strides)

    def broadcast(self, *shape: int) -> StridedView:
        """Dims of length 1 as long as wanted, and new dims in front: with stride 0 every index is the same place."""
        missing = len(shape) - len(self.shape)
        if missing < 0:
            raise UsageError(f"broadcast to {shape}: the view already has {len(self.shape)} dims")
        strides = []
        for wanted, length, stride in zip(
            shape, (1,) * missing + self.shape, (0,) * missing + self.strides, strict=True
        ):
            if length not in (1, wanted):
                raise UsageError(f"broadcast of shape {self.shape} to {shape}: {length} is neither 1 nor {wanted}")
            strides.append(stride if length == wanted and length != 1 else 0)
        return StridedView(self.data, self.offset, shape, tuple(strides))

    @property
    def contiguous(self) -> bool:
        """Are its elements, in order, one stretch of the buffer?"""
        wanted = row_major(self.shape)
        return all(
            length == 1 or stride == want for length, stride, want in zip(self.shape, self.strides, wanted, strict=True)
        )

    def copied(self) -> StridedView:
        """A contiguous copy: what torch's `.contiguous()` makes where it has to."""
        return StridedView.of(list(self), self.shape)

    def __iter__(self) -> Iterator[Any]:
        """In order of the last dim first."""
        return (self[index] for index in product(*(range(length) for length in self.shape)))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
