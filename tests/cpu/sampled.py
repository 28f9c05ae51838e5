"""Parameters of which `make test` runs a sample, and `make test-all` every one."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], sample: Container[Any]) -> list[Any]:
    """For `pytest.mark.parametrize`: those outside the sample are marked slow. A tuple is several parameters."""
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    alone = [one[0] if len(one) == 1 else one for one in several]
    return [
        pytest.param(*one, marks=() if value in sample else pytest.mark.slow)
        for one, value in zip(several, alone, strict=True)
    ]
