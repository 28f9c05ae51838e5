"""What a call was given, checked before anything is sent: roots, ranks, axes, counts, tags and `out`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tilemesh.comm.runtime.arithmetic import BF16
from tilemesh.comm.runtime.memory import Like, described
from tilemesh.comm.schedules.collectives import cut
from tilemesh.core.errors import UsageError

_LARGEST = 1e308
_MOST_ELEMENTS = 1 << 48


def whole(value: Any, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{what} is {value!r}: expected a whole number") from None


def rank_of(value: Any, size: int, what: str) -> int:
    rank = whole(value, what)
    if not 0 <= rank < size:
        raise UsageError(f"{what} {rank} is not a rank of this communicator: expected 0 to {size - 1}")
    return rank


def tag_of(value: Any, tags: int) -> int:
    tag = whole(value, "tag")
    if not 0 <= tag < tags:
        raise UsageError(f"tag {tag}: expected 0 to {tags - 1}")
    return tag


def seconds(value: Any, what: str) -> float:
    """A time above 0; infinity is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)) or not value > 0:
        raise UsageError(f"{what} {value!r}: expected a number of seconds above 0")
    return float(value) if value < _LARGEST else math.inf  # an integer of 400 digits is not a float


def shape_of(value: Any) -> tuple[int, ...]:
    lengths = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    shape = tuple(whole(length, "shape") for length in lengths)
    if any(length < 0 for length in shape) or math.prod(shape) >= _MOST_ELEMENTS:
        raise UsageError(f"shape {shape}: expected lengths of 0 or more, and below 2^48 elements in all")
    return shape


def dtype_of(value: Any) -> Like:
    """A dtype of numpy or torch, or the name of either's (bfloat16 is torch's)."""
    if isinstance(value, str) and value == BF16:
        return Like(BF16, "cpu")
    if type(value).__module__ == "torch":
        import torch

        return described(torch.empty(0, dtype=value), "array")[1]
    try:
        dtype = np.dtype(value)
    except (TypeError, ValueError, SyntaxError):
        raise UsageError(f"dtype {value!r}: expected one of numpy's or torch's, or its name") from None
    return described(np.empty(0, dtype), "array")[1]


def axis_of(axis: Any, shape: tuple[int, ...]) -> int:
    place = whole(axis, "axis")
    if not -len(shape) <= place < len(shape):
        raise UsageError(
            f"axis {place} of an array of shape {tuple(shape)}: expected {-len(shape)} to {len(shape) - 1}"
        )
    return place % len(shape)


def counts_of(counts: Sequence[int] | None, size: int, what: str) -> tuple[int, ...] | None:
    if counts is None:
        return None
    if not isinstance(counts, Iterable) or getattr(counts, "ndim", 1) != 1:
        raise UsageError(f"{what} {counts!r}: expected one length for each of {size} ranks")
    result = tuple(whole(count, what) for count in counts)
    if len(result) != size or min(result) < 0:
        raise UsageError(f"{what} {list(result)}: expected one length of 0 or more for each of {size} ranks")
    return result


def require_total(counts: tuple[int, ...], length: int, axis: int, what: str) -> None:
    if sum(counts) != length:
        raise UsageError(f"{what} {list(counts)} add up to {sum(counts)}: the input has {length} along axis {axis}")


def parts_of(counts: Any, size: int, length: int, axis: int, what: str = "counts") -> tuple[int, ...]:
    """How long each rank's part of an axis is: as given, else as even as can be."""
    parts = counts_of(counts, size, what)
    if parts is None:
        return cut(length, size)
    require_total(parts, length, axis, what)
    return parts


def lengths_of(counts: Any, size: int, rank: int, mine: int) -> tuple[int, ...]:
    """How long each rank's array is along an axis: as given, else all as this rank's own."""
    parts = counts_of(counts, size, "counts") or (mine,) * size
    if parts[rank] != mine:
        raise UsageError(f"counts {list(parts)} give rank {rank} {parts[rank]}: its array has {mine}")
    return parts


def with_length(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    """The shape with another length along one axis."""
    return (*shape[:axis], length, *shape[axis + 1 :])


def elements(parts: Sequence[int], shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Elements of each part: its length times everything that is not split."""
    row = math.prod(with_length(shape, axis, 1))
    return tuple(part * row for part in parts)
