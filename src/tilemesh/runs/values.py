"""Values of somebody's JSON as what they should be, and as nothing where they are not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MOST = 10**12
"""Of ranks, lanes and steps: what is larger was never meant."""


def number(value: object, otherwise: float = math.nan) -> float:
    """A JSON value as a number; NaN for what is none (`null` and "nan" are how files write it)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return otherwise
    # Beyond this nothing is measured, and sums would overflow.
    return float(value) if abs(value) < 1e100 else math.copysign(math.inf, value) if value == value else math.nan


def count(value: object, otherwise: int = 1) -> int:
    """A whole number of ranks, steps or parts; `otherwise` for what cannot be meant."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST
    return int(value) if is_count else otherwise  # type: ignore[call-overload]


def section(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table inside a table; empty when it is not there or no table."""
    value = of.get(name)
    return value if isinstance(value, Mapping) else {}


def numbers(of: Mapping[str, Any], name: str) -> list[float]:
    """A list of numbers inside a table, one per rank; empty when it is none."""
    value = of.get(name)
    return [number(item, 0.0) for item in value] if isinstance(value, list) else []
