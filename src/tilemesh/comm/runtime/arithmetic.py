"""How contributions are combined, for each operation and dtype.

One function a pair: `combine(held, arrived)` leaves the result in `held`. 16-bit floats are added in float32 and
rounded once a combination (bf16 through torch, which numpy does not know); bool is logic: sum and max are "or", prod
and min are "and". An average is a sum divided once, at the end. The smaller and the larger of two floats are always
the same bits, whoever comes first: -0.0 is below 0.0, and a NaN wins and becomes the one NaN. What a library cannot
combine so travels as something else (`widens`, `orders`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilemesh.comm.runtime.transport import Array, Caps
from tilemesh.comm.schedules.collectives import REDUCING
from tilemesh.core.errors import UsageError, unknown

OPERATIONS = ("sum", "prod", "min", "max", "avg")
BF16 = "bfloat16"
WIDENED = (BF16, "float16")  # floats that no library of collectives is sure to know

_BLOCK = 1 << 14  # elements

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


def ufunc_of(op: str, dtype: str) -> Any:
    """numpy's own function for the operation, where it gives every rank the same bits; else None."""
    return None if dtype == BF16 or (op in ("min", "max") and is_floating(dtype)) else UFUNCS[op]


def widens(collective: str, dtype: str, op: str, caps: Caps) -> str | None:
    """The wider dtype that travels instead, or None: MPI has no 16-bit floats to add, and gloo not everywhere."""
    if collective not in REDUCING:
        return None
    if dtype in WIDENED:
        return "float32"
    return "uint32" if op == "sum" and dtype in caps.saturating else None


def orders(collective: str, dtype: str, op: str) -> bool:
    """Whether the wire carries whole numbers in place of floats."""
    return collective in REDUCING and op in ("min", "max") and is_floating(dtype)


def combiner(op: str, dtype: str) -> Combine:
    """The function that combines two flat arrays of that dtype (bf16: their 16-bit patterns) into the first."""
    function = UFUNCS[op]
    if op in ("min", "max") and is_floating(dtype):
        return _bf16_extremes(op) if dtype == BF16 else _extremes(op)
    if dtype == BF16:
        return _bf16_combiner(op)

    def combine(total: Array, arrived: Array) -> None:
        function(total, arrived, out=total)

    return combine


def _extremes(op: str) -> Combine:
    """Min or max of floats. numpy's own leaves open which of two zeros or NaNs it takes, and ranks would differ."""
    function: Any = UFUNCS[op]
    both: Any = np.logical_or if op == "min" else np.logical_and  # a zero is negative if either one, or both are

    def combine(total: Array, arrived: Array) -> None:
        for at in range(0, total.size, _BLOCK):  # in parts that stay in the cache
            mine, other = total[at : at + _BLOCK], arrived[at : at + _BLOCK]
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

    def combine(total: Array, arrived: Array) -> None:
        mine, other = bf16_as_float32(total), bf16_as_float32(arrived)
        in_float32(mine, other)
        total[:] = mine.view(np.uint32) >> 16  # exact: it is one of the two, or the NaN

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

    def combine(total: Array, arrived: Array) -> None:
        target = as_torch_bf16(total)
        function(target, as_torch_bf16(arrived), out=target)

    return combine
