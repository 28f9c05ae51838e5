"""What ZeRO-3 gathers in a step is counted on the step's own list."""

from __future__ import annotations

import pytest

from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.book import find, synchronous
from tilemesh.core.step.program import step_program
from tilemesh.model.config import preset
from tilemesh.model.work.step_exchanges import gathers_of_chunks, step_exchanges
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import shard_parameters


def gathered_bytes(plan: ParallelPlan) -> int:
    model = preset("tiny")
    found = step_exchanges(model, plan, Task.of(plan, model.context, "eager"), (model.layers,))
    return found["dp"]["all_gather"]


def test_the_last_chunks_are_still_whole_when_backward_begins() -> None:
    """Four layers, one fetched ahead: forward gathers all, backward only the first two again. As a run records it."""
    assert gathered_bytes(ParallelPlan(dp=4, zero=3, microbatch=4, precision="fp32")) == 6_298_112


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
@pytest.mark.parametrize("accumulation", [1, 2, 5, 23])
def test_every_microbatch_after_the_first_gathers_alike(prefetch: int, accumulation: int) -> None:
    plan = ParallelPlan(dp=2, zero=3, accumulation=accumulation, prefetch=prefetch, precision="fp32")
    layers = preset("tiny").layers
    step = step_program(plan, layers)
    gathers = [action for action in step.program.actions[0] if action.kind == "GATHER"]
    by_chunk = gathers_of_chunks(plan, len(step.layers))
    assert sum(times for which, times in by_chunk.items() if len(which) == 1) == len(gathers)
    shards, last = shard_parameters(preset("tiny"), 1), len(step.layers) - 1
    nbytes = sum(4 * shards.stage(len(step.layers[one.chunk]), one.chunk == 0, one.chunk == last) for one in gathers)
    assert gathered_bytes(plan) == nbytes


@pytest.mark.parametrize("schedule", synchronous())
def test_a_long_step_of_a_pipeline_gathers_as_its_list_says(schedule: str) -> None:
    """Two short steps, a round apart, tell what a long one does, on every stage."""
    interleave = 3 if find(schedule).interleaves else 1
    for prefetch, accumulation in ((0, 64), (1, 88)):
        plan = ParallelPlan(
            dp=2, pp=4, zero=3, schedule=schedule, accumulation=accumulation, prefetch=prefetch, interleave=interleave
        )  # type: ignore[arg-type]
        step = step_program(plan, 4 * plan.chunks)
        for stage, actions in enumerate(step.program.actions):
            found = gathers_of_chunks(plan, plan.chunks, stage)
            for chunk in step.program.placement.held[stage]:
                times = sum(action.kind == "GATHER" and action.chunk == chunk for action in actions)
                assert found[frozenset((chunk,))] == times, (prefetch, stage, chunk)
