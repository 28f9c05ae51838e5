"""How contributions are combined, for each operation and dtype.

One function a pair: `combine(held, arrived)` leaves the result in `held`. 16-bit floats are added in float32 and
rounded once a combination (bf16 through torch, which numpy does not know); bool is logic: sum and max are "or", prod
and min are "and". An average is a sum divided once, at the end. The smaller and the larger of two floats are always
the same bits, whoever comes first: -0.0 is below 0.0, and a NaN wins and becomes the one NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tilemesh.comm.runtime.transport import Array
from tilemesh.core.errors import UsageError, unknown

OPERATIONS = ("sum", "prod", "min", "max", "avg")
BF16 = "bfloat16"

_BLOCK = 1 << 14  # elements
PIECE_BYTES = 64 << 10  # of a reduction's target that stays in a core's cache while all contributions pass
MOST_ROWS = 4  # up to as many arrays are combined one by one
HALVED_BYTES = 2 << 10  # up to this the number of calls is what adding up costs
STACK_BYTES = 32 << 10  # up to this, one strided call for all ranks is cheaper than one call per rank

Combine = Callable[[Array, Array], Any]

UFUNCS: dict[str, Any] = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def require_operation(op: str, dtype: str) -> None:
    if op not in OPERATIONS:
        raise unknown("operation", op, OPERATIONS)
    if is_complex(dtype) and op in ("min", "max"):
        raise UsageError(
            f"{op} of {dtype}: complex numbers have no order; use it on their real, imaginary or absolute part"
        )
    if op == "avg" and not is_floating(dtype) and not is_complex(dtype):
        why = "bools are combined by logic" if dtype == "bool" else "it would not be whole in general"
        raise UsageError(f"avg of {dtype}: {why}; convert to a float dtype, or use op='sum' and divide")


def is_floating(dtype: str) -> bool:
    return "float" in dtype or dtype == "longdouble"


def is_complex(dtype: str) -> bool:
    return dtype.startswith("complex")


def combiner(op: str, dtype: str) -> Combine:
    """The function that combines two flat arrays of that dtype (bf16: their 16-bit patterns) into the first."""
    function = UFUNCS[op]
    if op in ("min", "max") and is_floating(dtype):
        return _bf16_extremes(op) if dtype == BF16 else _extremes(op)
    if dtype == BF16:
        return _bf16_combiner(op)

    def combine(held: Array, arrived: Array) -> None:
        function(held, arrived, out=held)

    return combine


def _extremes(op: str) -> Combine:
    """Min or max of floats. numpy's own leaves open which of two zeros or NaNs it takes, and ranks would differ."""
    function: Any = UFUNCS[op]
    both: Any = np.logical_or if op == "min" else np.logical_and  # a zero is negative if either one, or both are

    def combine(held: Array, arrived: Array) -> None:
        for at in range(0, held.size, _BLOCK):  # in parts that stay in the cache
            mine, other = held[at : at + _BLOCK], arrived[at : at + _BLOCK]
            result = function(mine, other)
            doubtful = np.flatnonzero((result == 0) | (result != result))
            if doubtful.size:
                few = result[doubtful]
                is_negative = both(np.signbit(mine[doubtful]), np.signbit(other[doubtful]))
                zeros = np.where(is_negative, few.dtype.type(-0.0), few.dtype.type(0.0))
                result[doubtful] = np.where(np.isnan(few), few.dtype.type(np.nan), zeros)
            mine[:] = result

    return combine


def _bf16_extremes(op: str) -> Combine:
    in_float32 = _extremes(op)

    def combine(held: Array, arrived: Array) -> None:
        mine, other = bf16_as_float32(held), bf16_as_float32(arrived)
        in_float32(mine, other)
        held[:] = mine.view(np.uint32) >> 16  # exact: it is one of the two, or the NaN

    return combine


def bf16_as_float32(patterns: Array) -> Array:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def divide(total: Array, dtype: str, by: int) -> None:
    """Turn a sum into an average, in place."""
    if dtype == BF16:
        as_torch_bf16(total).div_(by)
    else:
        np.divide(total, by, out=total)


def as_torch_bf16(patterns: Array) -> Any:
    """bf16 values over the same memory as their 16-bit patterns."""
    import torch

    return torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)


def _bf16_combiner(op: str) -> Combine:
    import torch

    function: Any = {"sum": torch.add, "avg": torch.add, "prod": torch.mul}[op]

    def combine(held: Array, arrived: Array) -> None:
        target = as_torch_bf16(held)
        function(target, as_torch_bf16(arrived), out=target)

    return combine


# Several arrays at once: what lies on the stage of shared memory ------------------------------------------------------


def stack_adder(function: Any, rows: Array, carrier: np.dtype[Any]) -> Callable[[Array], object]:
    """Combines all rows into an array, in the same order and so to the same bits wherever it is used.

    Small rows without a gap between them: half of them onto the other half, and so on, which takes the fewest calls.
    Few rows: one call each, which numpy gets through sooner than one reduction; it also adds rows of one element so.
    """
    count, combine = len(rows), _into(function)
    if count & (count - 1) == 0 and rows.flags.c_contiguous and rows.nbytes <= count * HALVED_BYTES:
        return _halving(combine, rows)
    if count > MOST_ROWS:
        return partial(_reduce_rows, function.reduce, rows, carrier)
    first, second, *rest = _each(rows)
    if not rest:
        return partial(combine, first, second)
    *middle, last = rest
    one, other = np.empty_like(first), np.empty_like(first)

    def add_up(out: Array) -> None:
        # Never onto an operand: with a single element numpy takes that for a reduction, which costs another call.
        combine(first, second, one)
        sums, free = one, other
        for row in middle:
            combine(sums, row, free)
            sums, free = free, sums
        combine(sums, last, out)

    return add_up


def _halving(combine: Callable[[Array, Array, Array], object], rows: Array) -> Callable[[Array], object]:
    steps = []
    while len(rows) > 2:
        half = len(rows) // 2
        sums = np.empty_like(rows[:half])
        steps.append((rows[:half], rows[half:], sums))
        rows = sums
    one, other = _each(rows)

    def add_up(out: Array) -> None:
        for some, others, sums in steps:
            combine(some, others, sums)
        combine(one, other, out)

    return add_up


def _into(function: Any) -> Callable[[Array, Array, Array], object]:
    """The function with its result by position, which costs a tenth less than by name. numpy keeps that from two."""
    if function in (np.minimum, np.maximum):
        return lambda one, other, out: function(one, other, out=out)
    combine: Callable[[Array, Array, Array], object] = function
    return combine


def _each(rows: Array) -> list[Array]:
    """Every row as a view: where rows are single numbers, `rows[0]` would be what was there when it was asked."""
    return [rows[place, ...] for place in range(len(rows))]


def _reduce_rows(reduce: Any, rows: Array, carrier: np.dtype[Any], out: Array) -> None:
    reduce(rows, 0, carrier, out)


def ufunc_of(op: str, dtype: str) -> Any:
    """numpy's own function for the operation, where it gives every rank the same bits; else None."""
    return None if dtype == BF16 or (op in ("min", "max") and is_floating(dtype)) else UFUNCS[op]


class Reducer:
    """Combines several arrays into one, in order, in pieces that stay in the cache."""

    def __init__(self, op: str, dtype: str, carrier: np.dtype[Any]) -> None:
        self.function = ufunc_of(op, dtype)
        self.into = _into(self.function)
        self.combine = combiner(op, dtype)
        self.carrier = carrier
        self.piece = PIECE_BYTES // carrier.itemsize

    def __call__(self, target: Array, sources: Any) -> None:
        """`sources`: arrays, or what `stack_adder` made of them."""
        if not isinstance(sources, list):
            sources(target)
            return
        if target.size <= self.piece:
            self._chain(target, sources)
            return
        for at in range(0, target.size, self.piece):
            end = at + self.piece
            self._chain(target[at:end], [source[at:end] for source in sources])

    def _chain(self, target: Array, sources: list[Array]) -> None:
        into = self.into
        if self.function is None or len(sources) == 1:
            target[:] = sources[0]
            for source in sources[1:]:
                self.combine(target, source)
            return
        into(sources[0], sources[1], target)
        for source in sources[2:]:
            into(target, source, target)
