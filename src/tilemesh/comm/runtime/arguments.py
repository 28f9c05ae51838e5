"""What a call was given, checked before anything is sent: roots, ranks, axes, counts, tags and `out`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from tilemesh.comm.runtime.memory import Like, opened
from tilemesh.comm.runtime.transport import Array
from tilemesh.core.errors import UsageError

TAGS = 1_000_000  # a user's tags lie below, those of collectives above


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


def tag_of(value: Any) -> int:
    tag = whole(value, "tag")
    if not 0 <= tag < TAGS:
        raise UsageError(f"tag {tag}: expected 0 to {TAGS - 1}")
    return tag


def axis_of(axis: Any, shape: tuple[int, ...], what: str = "axis") -> int:
    place = whole(axis, what)
    if not -len(shape) <= place < len(shape):
        raise UsageError(
            f"{what} {place} of an array of shape {tuple(shape)}: expected {-len(shape)} to {len(shape) - 1}"
        )
    return place % len(shape)


def counts_of(counts: Sequence[int] | None, size: int, what: str) -> tuple[int, ...] | None:
    if counts is None:
        return None
    result = tuple(whole(count, what) for count in counts)
    if len(result) != size or min(result) < 0:
        raise UsageError(f"{what} {list(result)}: expected one length of 0 or more for each of {size} ranks")
    return result


def require_total(counts: tuple[int, ...], length: int, axis: int, what: str) -> None:
    if sum(counts) != length:
        raise UsageError(f"{what} {list(counts)} add up to {sum(counts)}: the input has {length} along axis {axis}")


def out_array(out: Any, shape: tuple[int, ...], like: Like) -> Array | None:
    """The memory of `out` as an array (None: no out, or CUDA), after checking that the result fits it."""
    if out is None:
        return None
    array, given = opened(out, "out")
    if given.dtype != like.dtype or given.is_torch != like.is_torch:
        kinds = [f"{'torch' if one.is_torch else 'numpy'} {one.dtype}" for one in (given, like)]
        raise UsageError(f"out is {kinds[0]}: expected {kinds[1]}, as the input")
    if tuple(out.shape) != tuple(shape):
        raise UsageError(f"out has shape {tuple(out.shape)}: this call's result has {tuple(shape)}")
    if getattr(out, "requires_grad", False):
        raise UsageError("out requires gradients, which a collective cannot follow: give out.detach()")
    if given.device not in (None, "cpu"):
        return None
    if not array.flags.writeable:
        raise UsageError("out is read-only: give an array that may be written to")
    return array


def with_length(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    """The shape with another length along one axis."""
    return (*shape[:axis], length, *shape[axis + 1 :])


def elements(parts: Sequence[int], shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Elements of each part: its length times everything that is not split."""
    row = math.prod(with_length(shape, axis, 1))
    return tuple(part * row for part in parts)
