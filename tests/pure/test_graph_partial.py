"""Mutants of programs: where they differ is found without computing them, and corrected exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.graph import build
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.ir import Graph, Node
from tilemesh.guide.dataflow.partial import PRIME, _differences, correct, mutants


def _two(stride: int, padding: int, dilation: int, taps: int = 3) -> Graph:
    first, second = (build.argument(name, [2, 2, 12, 8], "float64") for name in "xy")
    w = build.argument("w", [3, 2, taps, taps], "float64")
    settings = [stride] * 2, [padding] * 2, [dilation] * 2
    return Graph((first, second, w), (build.conv(first, w, *settings), build.conv(second, w, *settings)))


def _values(graph: Graph) -> list[np.ndarray]:
    numbers = np.random.default_rng(3)
    return [numbers.normal(size=[int(size) for size in node.shape]) for node in graph.inputs]  # type: ignore[call-overload]


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 0, 1)])
def test_what_differs_is_found_and_corrected(stride: int, padding: int, dilation: int) -> None:
    graph = _two(stride, padding, dilation)
    values = _values(graph)
    expected = run_numpy(graph, *values)
    made = list(mutants(graph))
    assert made, "there is at least the join along the batch"
    for mutant in made:
        for node, raw, exact, strips in zip(
            graph.outputs, run_numpy(mutant.graph, *values), expected, mutant.wrong, strict=True
        ):
            right = np.ones(exact.shape, bool)
            for dim, start, stop in strips:
                right[(slice(None),) * dim + (slice(start, stop),)] = False
                assert not np.allclose(raw.take(range(start, stop), dim), exact.take(range(start, stop), dim))
            np.testing.assert_allclose(raw[right], exact[right], rtol=1e-12, atol=1e-12)
            assert node.shape == exact.shape
        for ours, exact in zip(run_numpy(correct(graph, mutant), *values), expected, strict=True):
            np.testing.assert_allclose(ours, exact, rtol=1e-12, atol=1e-12)


def test_few_positions_are_looked_at() -> None:
    graph = _two(1, 1, 1)
    joined = next(mutant for mutant in mutants(graph) if "dim 2" in mutant.name)
    outputs = sum(int(np.prod([int(size) for size in node.shape])) for node in graph.outputs)  # type: ignore[call-overload]
    assert joined.positions < outputs / 4
    assert joined.error < 1e-15
    assert joined.wrong == (((2, 11, 12),), ((2, 0, 1),))
    batched = next(mutant for mutant in mutants(graph) if "dim 0" in mutant.name)
    assert batched.wrong == ((), ()), "joined along the batch the program is fully equivalent"


def _corrected(graph: Graph) -> list[Graph]:
    """Every mutant gives the same numbers once it is corrected."""
    values = _values(graph)
    expected = run_numpy(graph, *values)
    made = [correct(graph, mutant) for mutant in mutants(graph)]
    for each in made:
        for ours, exact in zip(run_numpy(each, *values), expected, strict=True):
            np.testing.assert_allclose(ours, exact, rtol=1e-11, atol=1e-11)
    return made


def _pictures(count: int, *shape: int) -> list[Node]:
    return [build.argument(f"x{place}", shape, "float64") for place in range(count)]


def test_convolutions_are_joined_wherever_they_stand() -> None:
    """Whatever is before and behind them: here a ReLU, a scale, another convolution by the same weights."""
    pictures, w = _pictures(2, 1, 2, 6, 5), build.argument("w", [2, 2, 3, 3], "float64")

    def conv(x: Node) -> Node:
        return build.conv(x, w, padding=[1, 1])

    for around, convolutions in (
        (lambda x: build.relu(conv(x)), 1),
        (lambda x: conv(build.relu(x)), 1),
        (lambda x: conv(build.multiply(x, 2.0)), 1),
        (lambda x: build.tanh(conv(build.relu(conv(x)))), 2),
        (lambda x: conv(conv(x)), 2),
    ):
        made = _corrected(Graph((*pictures, w), tuple(around(x) for x in pictures)))
        fewest = min(sum(node.op == "conv" for node in each.nodes()) for each in made)
        assert fewest == 2 * convolutions - 1


def test_nothing_is_made_of_what_has_no_two_convolutions_alike() -> None:
    pictures, w = _pictures(2, 2, 4, 6), build.argument("w", [4, 2, 3], "float64")
    for graph in (
        Graph((*pictures, w), tuple(build.conv(x, w, groups=2) for x in pictures)),  # in groups
        Graph((pictures[0],), (build.relu(pictures[0]),)),  # no convolution
        Graph((*pictures,), tuple(build.softmax(x) for x in pictures)),
    ):
        assert _corrected(graph) == []


def test_windows_that_are_wrong_everywhere_or_see_no_picture() -> None:
    """Five taps over four positions: no window sees one picture alone. One tap behind the edge sees zeros alone."""
    pictures, w = _pictures(3, 1, 1, 4), build.argument("w", [1, 1, 5], "float64")
    graph = Graph((*pictures, w), tuple(build.conv(x, w, padding=[2]) for x in pictures))
    joined = next(mutant for mutant in mutants(graph) if "dim 2" in mutant.name)
    assert joined.wrong[1] == ((2, 0, 4),)
    _corrected(graph)
    point = build.argument("point", [1, 1, 1], "float64")
    _corrected(Graph((*pictures, point), tuple(build.conv(x, point, [2], [2]) for x in pictures)))


sizes = st.integers(1, 2)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 3),
    batch=sizes,
    channels=sizes,
    dims=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.integers(1, 2)),
        min_size=1,
        max_size=2,
    ),
)
def test_every_mutant_can_be_corrected(
    count: int, batch: int, channels: int, dims: list[tuple[int, int, int, int, int]]
) -> None:
    space, taps, stride, padding, dilation = map(list, zip(*dims, strict=True))
    pictures, w = _pictures(count, batch, channels, *space), build.argument("w", [2, channels, *taps], "float64")
    try:
        graph = Graph((*pictures, w), tuple(build.conv(x, w, stride, padding, dilation) for x in pictures))
    except UsageError:
        return  # the window is larger than the picture
    _corrected(graph)


def test_work_does_not_grow_with_what_is_before_a_convolution() -> None:
    """Fifty layers of 64 channels are compared as often as one, and each number is drawn once."""
    pictures, w = _pictures(2, 1, 64, 28, 28), build.argument("w", [64, 64, 3, 3], "float64")
    outputs = list(pictures)
    for _ in range(25):
        outputs = [build.relu(build.conv(x, w, padding=[1, 1])) for x in outputs]
    _differences.cache_clear()
    made = list(mutants(Graph((*pictures, w), tuple(outputs))))
    assert len(made) == 25 * 3
    assert _differences.cache_info().misses == 3
    assert {mutant.error for mutant in made} == {(2 / PRIME) ** 2}


def test_two_strips_are_one_correction() -> None:
    graph = _two(1, 1, 1)
    joined = next(mutant for mutant in mutants(graph) if "dim 3" in mutant.name)
    corrected = correct(graph, joined)
    assert sum(node.op == "conv" for node in corrected.nodes()) <= 3
