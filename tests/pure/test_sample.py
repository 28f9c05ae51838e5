"""Samples: quantiles, what counts as equal, and which way a speedup points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.measure.sample import Sample, equal, speedup


def test_quantiles_are_interpolated() -> None:
    sample = Sample.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])
    assert sample == Sample(median=3.5, p20=2.0, p80=5.0, n=6)


def test_one_measurement_is_its_own_spread() -> None:
    assert Sample.of([2.5]) == Sample(2.5, 2.5, 2.5, 1)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_nothing_or_not_a_number_is_refused(values: list[float]) -> None:
    with pytest.raises(UsageError):
        Sample.of(values)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40))
def test_order_of_quantiles_and_of_values(values: list[float]) -> None:
    sample = Sample.of(values)
    assert min(values) <= sample.p20 <= sample.median <= sample.p80 <= max(values)
    assert Sample.of(reversed(values)) == sample


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (Sample(1.0, 1.0, 1.0, 9), Sample(1.019, 1.019, 1.019, 9), True),  # 1.9 % apart
        (Sample(1.0, 1.0, 1.0, 9), Sample(1.021, 1.021, 1.021, 9), False),  # 2.1 % apart, no spread
        (Sample(1.0, 0.9, 1.2, 9), Sample(1.3, 1.15, 1.4, 9), True),  # far apart, spreads overlap
        (Sample(1.0, 0.9, 1.1, 9), Sample(1.3, 1.15, 1.4, 9), False),
        (Sample(0.0, 0.0, 0.0, 9), Sample(0.0, 0.0, 0.0, 9), True),
    ],
)
def test_equal(a: Sample, b: Sample, same: bool) -> None:
    assert equal(a, b) is same
    assert equal(b, a) is same


def test_speedup_above_one_is_ours_faster() -> None:
    two, four = Sample.of([2.0]), Sample.of([4.0])
    assert speedup(two, four) == 2.0
    assert speedup(four, two, higher_is_better=True) == 2.0


def test_rate_turns_slow_times_into_low_rates() -> None:
    rate = Sample(median=2.0, p20=1.0, p80=4.0, n=3).rate(8.0)
    assert rate == Sample(median=4.0, p20=2.0, p80=8.0, n=3)


def test_scaled() -> None:
    assert Sample(2.0, 1.0, 4.0, 3).scaled(1e3) == Sample(2e3, 1e3, 4e3, 3)
