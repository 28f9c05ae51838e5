"""Choosing placements: solvers against brute force, figures against counts, known layouts without pins."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tilemesh.core.errors import UsageError
from tilemesh.parallel.choose import CHOOSERS, choose, race
from tilemesh.parallel.choose.dynamic import dynamic
from tilemesh.parallel.choose.walk import Walk
from tilemesh.plan.place.problem import Moment, PlacementProblem, Transfer

needs_scipy = pytest.mark.skipif(
    importlib.util.find_spec("scipy") is None, reason="scipy is not installed: pip install 'tilemesh[choose]'"
)
Draw = np.random.Generator


def table(random: Draw, rows: int, columns: int, zeros: float = 0.3) -> tuple[tuple[float, ...], ...]:
    drawn = random.integers(1, 30, (rows, columns)) * (random.random((rows, columns)) > zeros)
    return tuple(tuple(float(cell) for cell in row) for row in drawn)


def drawn_problem(random: Draw, is_tree: bool = False) -> PlacementProblem:
    """At most eight variables of at most four choices, whose values are read by later ones, and live for a while."""
    count = int(random.integers(2, 9))
    choices = [int(random.integers(1, 5)) for _ in range(count)]
    seconds = tuple(tuple(float(cost) for cost in random.integers(1, 20, many)) for many in choices)
    transfers = []
    for source in range(count - 1):
        states, targets = int(random.integers(1, 4)), int(random.integers(1, 5))
        later = list(range(source + 1, count))
        many = 1 if is_tree else int(random.integers(1, 4))
        own = {source} if random.random() < 0.1 else set()
        readers = sorted({int(random.choice(later)) for _ in range(many)} | own)
        costs = table(random, states, targets)
        transfers.append(
            Transfer(
                source,
                tuple(int(random.integers(states)) for _ in range(choices[source])),
                tuple((each, tuple(int(random.integers(targets)) for _ in range(choices[each]))) for each in readers),
                costs,
                costs,
                table(random, states, targets),
                int(random.integers(1, 3)),
            )
        )
    values = tuple((v, tuple(float(size) for size in random.integers(1, 40, choices[v]))) for v in range(count))
    moments = []
    for at in range(count):
        living = {v: int(random.integers(1, 3)) for v in range(at + 1) if random.random() < 0.6}
        copies = [
            (t, r)
            for t, each in enumerate(transfers)
            for r, (v, _) in enumerate(each.readers)
            if v == at != each.source
        ]
        moments.append(Moment(living, tuple(copies)))
    names = tuple(f"v{number}" for number in range(count))
    return PlacementProblem(names, seconds, tuple(transfers), values, tuple(moments))


def every_choice(problem: PlacementProblem) -> tuple[Any, Any, Any]:
    """All of them, with seconds and peak bytes, written out again in numpy."""
    grid = np.stack(np.meshgrid(*[np.arange(len(own)) for own in problem.seconds], indexing="ij"), -1)
    grid = grid.reshape(-1, len(problem.seconds))
    seconds = sum(np.array(own)[grid[:, v]] for v, own in enumerate(problem.seconds))
    for each in problem.transfers:
        state = np.array(each.states)[grid[:, each.source]]
        for target in range(len(each.seconds[0])):
            wanted = np.zeros(len(grid), dtype=bool)
            for reader, wants in each.readers:
                wanted |= np.array(wants)[grid[:, reader]] == target
            seconds = seconds + wanted * each.count * np.array(each.seconds)[state, target]
    peak = np.zeros(len(grid))
    for moment in problem.moments:
        held = np.zeros(len(grid))
        for value, many in moment.values.items():
            variable, sizes = problem.values[value]
            held += many * np.array(sizes)[grid[:, variable]]
        for transfer, reader in moment.copies:
            each = problem.transfers[transfer]
            variable, wants = each.readers[reader]
            state = np.array(each.states)[grid[:, each.source]]
            held += np.array(each.copy_bytes)[state, np.array(wants)[grid[:, variable]]]
        peak = np.maximum(peak, held)
    return grid, seconds, peak


def against_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = drawn_problem(random)
    grid, seconds, peak = every_choice(problem)
    some = int(random.integers(len(grid)))
    figures = problem.figures(grid[some])
    assert (figures.seconds, figures.memory_bytes) == (pytest.approx(seconds[some]), pytest.approx(peak[some]))
    limit = math.inf if seed % 3 == 0 else float(np.quantile(peak, random.random() * 0.5))
    problem = replace(problem, limit_bytes=limit)
    best = seconds[peak <= limit].min()
    chosen = choose(problem, "ilp")
    assert chosen.figures is not None
    assert chosen.figures.seconds == pytest.approx(best, rel=1e-6)
    assert chosen.is_optimal
    assert chosen.lp_bound_s <= best * (1 + 1e-6)
    for each in race(problem, ("random", "greedy", "dp", "mcmc")) if seed % 10 == 0 else ():
        assert each.figures is None or each.figures.seconds >= best * (1 - 1e-9), each.chooser
        assert each.bound_s <= best * (1 + 1e-6), "what is called a bound is one"


@needs_scipy
@pytest.mark.parametrize("part", range(4))
def test_integer_programming_finds_what_brute_force_finds(part: int) -> None:
    for seed in range(10 * part, 10 * part + 10):
        against_brute_force(seed)


@pytest.mark.slow
@needs_scipy
@pytest.mark.parametrize("part", range(10))
def test_integer_programming_finds_what_brute_force_finds_a_thousand_times(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        against_brute_force(seed)


@pytest.mark.parametrize("seed", range(30))
def test_dynamic_programming_is_exact_on_trees_and_says_where_it_is_not(seed: int) -> None:
    problem = drawn_problem(np.random.default_rng(seed), is_tree=True)
    _, seconds, _ = every_choice(problem)
    chosen = dynamic(problem, most=10**6)
    assert chosen.figures is not None
    assert chosen.figures.seconds == pytest.approx(seconds.min())
    assert chosen.is_optimal
    narrow = dynamic(problem, most=1)
    assert narrow.figures is not None
    assert narrow.figures.seconds >= seconds.min() * (1 - 1e-9)
    assert not narrow.is_optimal or narrow.figures.seconds == pytest.approx(seconds.min())


def test_a_walk_knows_after_any_changes_what_its_choice_takes() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        problem = replace(drawn_problem(random), limit_bytes=50.0)
        walk = Walk(problem, [0] * len(problem.seconds))
        for _ in range(20):
            variable = int(random.integers(len(problem.seconds)))
            walk.move(variable, int(random.integers(len(problem.seconds[variable]))))
        figures = problem.figures(walk.choice)
        assert walk.seconds == pytest.approx(figures.seconds)
        assert float(walk.held.max()) == pytest.approx(figures.memory_bytes)


def test_what_fits_nowhere_is_refused() -> None:
    problem = PlacementProblem(("v",), ((1.0,),), (), ((0, (8.0,)),), (Moment({0: 1}),), 4.0)
    for name in CHOOSERS:
        if name != "ilp" or importlib.util.find_spec("scipy"):
            with pytest.raises(UsageError, match=f"{name} found no placement within"):
                choose(problem, name)
    with pytest.raises(UsageError, match="chooser 'ilpp'"):
        choose(problem, "ilpp")
