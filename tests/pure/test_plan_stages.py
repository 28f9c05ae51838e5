"""Cutting a model into chunks: dynamic programming against trying everything, and the quick way against it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.plan.cut import cut, spread


def worst(counts: tuple[int, ...], costs: tuple[float, ...], first: float, last: float) -> float:
    ends = [0, *itertools.accumulate(counts)]
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 3), min_size=3, max_size=9), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
def test_dynamic_programming_finds_the_best(costs: list[int], chunks: int, first: int, last: int) -> None:
    chunks = min(chunks, len(costs))
    ways = [
        tuple(b - a for a, b in itertools.pairwise((0, *places, len(costs))))
        for places in itertools.combinations(range(1, len(costs)), chunks - 1)
    ]
    every = tuple(float(cost) for cost in costs)
    best = min(worst(way, every, first, last) for way in ways)
    found = cut(every, chunks, first, last)
    assert sum(found) == len(costs)
    assert min(found) >= 1
    assert worst(found, every, first, last) == best


@settings(max_examples=80)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 30), st.integers(0, 60))
def test_the_quick_way_is_as_good_for_equal_layers(layers: int, chunks: int, first: int, last: int) -> None:
    chunks = min(chunks, layers)
    quick = spread(layers, chunks, first / 10, last / 10)
    exact = cut((1.0,) * layers, chunks, first / 10, last / 10)
    assert sum(quick) == sum(exact) == layers
    assert min(quick) >= 1
    ones = (1.0,) * layers
    assert worst(quick, ones, first / 10, last / 10) == pytest.approx(worst(exact, ones, first / 10, last / 10))


def test_a_heavy_head_takes_layers_from_its_stage() -> None:
    # Of equally good cuts the one with less in front: early stages hold the most microbatches.
    assert cut((1.0,) * 32, 4, 0.0, 3.0) == (8, 9, 9, 6)
    assert cut((1.0,) * 80, 8, 0.0, 1.2) == (10, 10, 10, 10, 10, 10, 11, 9)


def test_equal_chunks_stay_equal() -> None:
    assert set(cut((1.0,) * 105, 35, 0.0, 0.2)) == {3}
    assert set(spread(105, 35, 0.0, 0.2)) == {3}
