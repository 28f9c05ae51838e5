"""Every sample once an epoch over all replicas, in an order that depends on the seed alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.data.order import Order, permuted, rows_of


@given(count=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
def test_a_permutation_meets_every_place_once(count: int, key: int) -> None:
    assert sorted(permuted(place, count, key) for place in range(count)) == list(range(count))


@given(
    samples=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    dp=st.sampled_from([1, 2, 3, 4]),
    accumulation=st.sampled_from([1, 2, 3]),
    micro=st.integers(1, 4),
)
def test_every_sample_once_an_epoch_over_all_ranks(
    samples: int, seed: int, dp: int, accumulation: int, micro: int
) -> None:
    """Steps are taken until an epoch is full, also where a batch straddles its end."""
    order, batch = Order(samples, seed), dp * accumulation * micro
    seen: list[int] = []
    for step in range(-(-2 * samples // batch)):
        taken = {}
        for index in range(dp):
            for number in range(accumulation):
                for row in rows_of(batch, dp, index, accumulation, number):
                    assert row not in taken
                    taken[row] = order.at(step * batch + row)
        seen += [taken[row] for row in sorted(taken)]
    assert Counter(seen[:samples]) == Counter(range(samples))
    assert Counter(seen[samples : 2 * samples]) == Counter(range(samples))


@given(samples=st.integers(1, 300), seed=st.integers(0, 2**32), step=st.integers(0, 50))
def test_the_batch_of_a_step_does_not_depend_on_the_layout(samples: int, seed: int, step: int) -> None:
    order, batch = Order(samples, seed), 24
    whole = list(order.rows(step * batch, batch))
    for dp, accumulation in ((1, 1), (2, 3), (4, 2), (8, 1), (3, 4)):
        parts = [
            order.at(step * batch + row)
            for index in range(dp)
            for micro in range(accumulation)
            for row in rows_of(batch, dp, index, accumulation, micro)
        ]
        assert parts == whole


def test_epochs_and_seeds_differ_and_repeat() -> None:
    order = Order(1000, seed=7)
    first, second = list(order.rows(0, 1000)), list(order.rows(1000, 1000))
    assert first != second
    assert first != list(Order(1000, seed=8).rows(0, 1000))
    assert first == list(Order(1000, seed=7).rows(0, 1000))
    # Not the order it came in, nor nearly: a random permutation of 1000 leaves one place fixed on average.
    assert sum(place == sample for place, sample in enumerate(first)) < 10


def test_refusals() -> None:
    with pytest.raises(UsageError, match="shorter than one sequence"):
        Order(0, 0)
    with pytest.raises(UsageError, match="does not divide"):
        rows_of(10, 4, 0, 1, 0)
