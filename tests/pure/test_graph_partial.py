"""Mutants of programs: where they differ is found without computing them, and corrected exactly."""

from __future__ import annotations

import numpy as np
import pytest

from tilemesh.graph import build
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.ir import Graph
from tilemesh.graph.partial import correct, improve, mutants


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


def test_a_mutant_is_taken_only_if_it_is_faster_with_its_corrections() -> None:
    graph = _two(1, 1, 1)
    convolutions = lambda each: float(sum(node.op == "conv" for node in each.nodes()))  # noqa: E731
    found = improve(graph, convolutions)
    assert found.mutant is not None
    assert found.mutant.wrong == ((), ())
    assert (found.cost, found.original) == (1.0, 2.0)
    dear = improve(graph, lambda each: -convolutions(each))
    assert dear.mutant is None or dear.cost < dear.original
    assert improve(graph, lambda each: 1.0).graph is graph


def test_two_strips_are_one_correction() -> None:
    graph = _two(1, 1, 1)
    joined = next(mutant for mutant in mutants(graph) if "dim 3" in mutant.name)
    corrected = correct(graph, joined)
    assert sum(node.op == "conv" for node in corrected.nodes()) <= 3
