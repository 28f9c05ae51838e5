"""The learning rate of every step, for every schedule."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.train.config import OptimizerConfig
from tilemesh.train.schedule import rate


def rates(steps: int, **settings: object) -> list[float]:
    optimizer = OptimizerConfig(lr=1.0, lr_end=0.1, **settings)  # type: ignore[arg-type]
    return [rate(step, steps, optimizer) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@given(steps=st.integers(2, 200), warmup=st.integers(0, 250))
def test_it_rises_in_a_line_never_rises_again_and_ends_where_it_should(schedule: str, steps: int, warmup: int) -> None:
    found = rates(steps, schedule=schedule, warmup=warmup)
    first = min(warmup, steps)
    assert found[:first] == pytest.approx([(step + 1) / first for step in range(first)])
    after = found[first:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    assert all(0.1 - 1e-12 <= value <= 1 for value in after)
    if len(after) > 1 and (schedule != "wsd" or round(0.2 * steps)):
        assert after[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_figures() -> None:
    cosine = rates(12, warmup=2)
    assert cosine[2:] == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * step / 9)) for step in range(10)])
    assert rates(12, schedule="linear", warmup=2)[2:] == pytest.approx([1 - 0.1 * step for step in range(10)])
    assert rates(4, schedule="constant", warmup=0) == [1.0] * 4
    assert rates(10, schedule="wsd", warmup=2, decay=0.3) == pytest.approx([0.5, *[1.0] * 6, 0.7, 0.4, 0.1])
