"""Choosers: who answers a `PlacementProblem`, each for itself, raced in one table.

| name | how | proof |
|---|---|---|
| random | the best of some that are drawn | none |
| greedy | one variable after the other, until none changes | none |
| dp | dynamic programming over beginnings | on chains and trees |
| mcmc | single changes, worse ones by chance | none |
| learned | a policy trained by REINFORCE | none |
| ilp | integer programming by HiGHS | always, or the gap |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.units import format_bytes
from tilemesh.parallel.choose.dynamic import dynamic
from tilemesh.parallel.choose.integer import integer
from tilemesh.parallel.choose.learned import learned
from tilemesh.parallel.choose.walk import at_random, greedy, mcmc
from tilemesh.plan.place.problem import Chosen, PlacementProblem

CHOOSERS: Mapping[str, Callable[[PlacementProblem], Chosen]] = {
    "random": at_random,
    "greedy": greedy,
    "dp": dynamic,
    "mcmc": mcmc,
    "learned": learned,
    "ilp": integer,
}


def choose(problem: PlacementProblem, chooser: str = "ilp") -> Chosen:
    """The answer of one chooser; refused where it finds none that fits."""
    if chooser not in CHOOSERS:
        raise unknown("chooser", chooser, CHOOSERS)
    chosen = CHOOSERS[chooser](problem)
    if chosen.choice is None:
        raise refusal(problem, chooser)
    return chosen


def refusal(problem: PlacementProblem, chooser: str) -> UsageError:
    size = f"{format_bytes(problem.limit_bytes)} per rank"
    return UsageError(f"{chooser} found no placement within {size}: allow more memory, more ranks, or another chooser")


def race(problem: PlacementProblem, choosers: Sequence[str] = tuple(CHOOSERS)) -> list[Chosen]:
    """The answers of several, all with the best bound that any of them has proved; the fastest placement first."""
    answers = []
    for name in choosers:
        try:
            answers.append(CHOOSERS[name](problem))
        except RunError:  # a library is missing; asked for alone, it says so
            if len(choosers) == 1:
                raise
    bound = max((each.bound_s for each in answers), default=0.0)
    answers = [replace(each, bound_s=bound) for each in answers]
    return sorted(answers, key=lambda each: each.figures.seconds if each.figures else math.inf)
