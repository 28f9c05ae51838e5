"""What ZeRO-3 gathers in a step is counted on the step's own list."""

from __future__ import annotations

import pytest

from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.program import step_program
from tilemesh.model.config import preset
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import shard_parameters
from tilemesh.plan.clock import exchanged, gathers_of_chunks


def gathered_bytes(plan: ParallelPlan) -> int:
    model = preset("tiny")
    found = exchanged(model, plan, Task.of(plan, model.context, "eager"), (model.layers,))
    return found["dp"]["all_gather"]


def test_the_last_chunks_are_still_whole_when_backward_begins() -> None:
    """Four layers, one fetched ahead: forward gathers all, backward only the first two again. As a run records it."""
    assert gathered_bytes(ParallelPlan(dp=4, zero=3, microbatch=4, precision="fp32")) == 6_298_112


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 5])
def test_every_microbatch_after_the_first_gathers_alike(prefetch: int, accumulation: int) -> None:
    plan = ParallelPlan(dp=2, zero=3, accumulation=accumulation, prefetch=prefetch, precision="fp32")
    layers = preset("tiny").layers
    step = step_program(plan, layers)
    gathers = [action for action in step.program.actions[0] if action.kind == "GATHER"]
    assert sum(gathers_of_chunks(plan, layers).values()) == len(gathers)
    shards, last = shard_parameters(preset("tiny"), 1), len(step.layers) - 1
    nbytes = sum(4 * shards.stage(len(step.layers[one.chunk]), one.chunk == 0, one.chunk == last) for one in gathers)
    assert gathered_bytes(plan) == nbytes
