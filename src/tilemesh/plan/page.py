"""What a page of a plan shows, as values: the frontier of memory against time, and the chosen plan's pipeline in time.

`report/plan_page.py` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.core.step.action import StepProgram
from tilemesh.core.step.book import build
from tilemesh.core.step.simulate import Slot, StepTimes, simulate
from tilemesh.plan.choose import SearchResult
from tilemesh.plan.step import Prediction

ROUNDS = (3, 2, 1)
"""Microbatches drawn, in multiples of the stages: filling, the steady state and draining ..."""
MOST_SLOTS = 6000
"""... and fewer where a browser would drag."""


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of points (time, memory) that no other beats in both, by time."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    kept: list[int] = []
    for i in order:
        if not kept or points[i][1] < points[kept[-1]][1]:
            kept.append(i)
    return kept


def simulated(result: SearchResult, best: Prediction) -> tuple[StepProgram, tuple[Slot, ...], float]:
    """The schedule's first microbatches, every pass with its stage, beginning and end, and the seconds of all."""
    plan = best.plan
    per_round = 2 * plan.pp * plan.pp * plan.interleave
    rounds = next((count for count in ROUNDS if count * per_round <= MOST_SLOTS), ROUNDS[-1])
    few = min(plan.accumulation, rounds * plan.pp)
    estimator = result.estimator()
    chunks = estimator.chunk_times(plan)
    schedule = build(plan.schedule, plan.pp, few, plan.interleave)
    times = StepTimes(chunks.forward_s, chunks.backward_s, [0.0] * len(chunks.backward_s))
    found = simulate(schedule, times, keep_slots=True)
    return schedule, found.slots, found.total_s
