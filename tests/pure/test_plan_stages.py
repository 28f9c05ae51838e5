"""Cutting a model into chunks: as good as dynamic programming, which is as good as trying everything."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.plan.cut import spread


def cut(layer_costs: tuple[float, ...], chunks: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each chunk: the least possible maximum of cost, and among those the most even, by dynamic programming.

    Of equals the one with less in front, where a pipeline holds the most microbatches. `first` and `last` are what the
    first and the last chunk cost besides their layers.
    """
    layers = len(layer_costs)
    before = [0.0]
    for cost in layer_costs:
        before.append(before[-1] + cost)
    mean = before[-1] / layers
    reach = 2 + math.ceil(max(first, last) / mean) + math.ceil((max(layer_costs) - min(layer_costs)) / mean)
    least, most = max(1, layers // chunks - reach), -(-layers // chunks) + reach
    # best[i]: (maximum, sum of squares, layers of each chunk so far) of i layers in the chunks so far.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for chunk in range(chunks):
        extra = (first if chunk == 0 else 0.0) + (last if chunk == chunks - 1 else 0.0)
        left = chunks - chunk - 1
        reached: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (top, squares, counts) in best.items():
            for end in range(start + least, min(start + most, layers - left) + 1):
                if end + left * most < layers:
                    continue
                cost = before[end] - before[start] + extra
                candidate = (max(top, cost), squares + cost * cost, (*counts, end - start))
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    return best[layers][2]


def chunk_costs(counts: tuple[int, ...], costs: tuple[float, ...], first: float, last: float) -> list[float]:
    ends = [0, *itertools.accumulate(counts)]
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
    sums[0] += first
    sums[-1] += last
    return sums


def worst(counts: tuple[int, ...], costs: tuple[float, ...], first: float, last: float) -> float:
    return max(chunk_costs(counts, costs, first, last))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 3), min_size=3, max_size=9), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
def test_dynamic_programming_finds_the_best(costs: list[int], chunks: int, first: int, last: int) -> None:
    chunks = min(chunks, len(costs))
    ways = [
        tuple(b - a for a, b in itertools.pairwise((0, *places, len(costs))))
        for places in itertools.combinations(range(1, len(costs)), chunks - 1)
    ]
    every = tuple(float(cost) for cost in costs)

    def order(way: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        """The least maximum, then the most even, then the least in front; whole numbers, hence exact."""
        sums = chunk_costs(way, every, first, last)
        return max(sums), sum(cost**2 for cost in sums), way

    assert cut(every, chunks, first, last) == min(ways, key=order)


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
    assert spread(32, 4, 0.0, 3.0) == (8, 9, 9, 6)
    assert spread(80, 8, 0.0, 1.2) == (10, 10, 10, 10, 10, 10, 11, 9)


def test_equal_chunks_stay_equal() -> None:
    assert set(spread(105, 35, 0.0, 0.2)) == {3}
