"""How contributions are combined, for each operation and dtype.

One function a pair: `combine(held, arrived)` leaves the result in `held`. 16-bit floats are added in float32 and
rounded once a combination (bf16 through torch, which numpy does not know); bool is logic: sum and max are "or", prod
and min are "and". An average is a sum divided once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilemesh.comm.runtime.transport import Array
from tilemesh.core.errors import UsageError, unknown

OPERATIONS = ("sum", "prod", "min", "max", "avg")
BF16 = "bfloat16"

Combine = Callable[[Array, Array], Any]

UFUNCS: dict[str, Any] = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def require_operation(op: str, dtype: str) -> None:
    if op not in OPERATIONS:
        raise unknown("operation", op, OPERATIONS)
    if op == "avg" and not is_floating(dtype):
        why = "bools are combined by logic" if dtype == "bool" else "it would not be whole in general"
        raise UsageError(f"avg of {dtype}: {why}; convert to a float dtype, or use op='sum' and divide")


def is_floating(dtype: str) -> bool:
    return "float" in dtype or dtype == "longdouble"


def combiner(op: str, dtype: str) -> Combine:
    """The function that combines two flat arrays of that dtype (bf16: their 16-bit patterns) into the first."""
    if dtype == BF16:
        return _bf16_combiner(op)
    function = UFUNCS[op]

    def combine(held: Array, arrived: Array) -> None:
        function(held, arrived, out=held)

    return combine


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

    function: Any = {
        "sum": torch.add,
        "avg": torch.add,
        "prod": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
    }[op]

    def combine(held: Array, arrived: Array) -> None:
        target = as_torch_bf16(held)
        function(target, as_torch_bf16(arrived), out=target)

    return combine
