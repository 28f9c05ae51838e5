"""From a plan to a step's lists: every schedule by its name, proved; layers of the chunks; what cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.book import all_schedules, build, find, prove, synchronous
from tilemesh.core.step.check import check
from tilemesh.core.step.program import chunk_layers, step_program
from tilemesh.core.step.schedule import PipelineSchedule


def plan_of(schedule: str, pp: int, accumulation: int, **more: object) -> ParallelPlan:
    interleave = 2 if find(schedule).interleaves else 1
    return ParallelPlan(pp=pp, schedule=schedule, accumulation=accumulation, interleave=interleave, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", all_schedules(), ids=lambda schedule: schedule.name)
def test_every_schedule_is_what_it_says(schedule: PipelineSchedule) -> None:
    prove(schedule)
    assert find(schedule.name) is schedule


@pytest.mark.parametrize("schedule", synchronous())
@pytest.mark.parametrize("dp", [1, 2])
def test_every_schedule_becomes_a_proved_step(schedule: str, dp: int) -> None:
    plan = plan_of(schedule, 4, 8, dp=dp)
    step = step_program(plan, 9)
    check(step.program)
    assert step.program.chunks == plan.chunks == len(step.layers)
    assert [layer for layers in step.layers for layer in layers] == list(range(9))
    reduces = "REDUCE" in step.program.kinds
    assert reduces == (dp > 1 or schedule in ("dualpipe", "chimera"))
    check(step_program(plan, 9, update=True).program)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_without_a_pipeline(zero: int) -> None:
    step = step_program(ParallelPlan(dp=2, zero=zero, accumulation=3), 5, update=True)
    check(step.program)
    assert step.program.chunks == (5 if zero == 3 else 1)
    assert ("GATHER" in step.program.kinds) == (zero == 3)


@given(schedule=st.sampled_from(all_schedules()), pp=st.integers(2, 5), microbatches=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_what_is_not_refused_can_be_made(schedule: PipelineSchedule, pp: int, microbatches: int) -> None:
    """And the next number of microbatches that a refusal names, too."""
    reason = schedule.why_not(pp, microbatches)
    if reason is not None:
        with pytest.raises(UsageError, match="takes"):
            build(schedule.name, pp, microbatches)
    if reason is None or "stages" not in reason:
        nearest = microbatches if reason is None else int(reason.rsplit(", ", 1)[1].split()[0])
        assert nearest >= microbatches
        check(build(schedule.name, pp, nearest))


def test_layers_are_cut_evenly_and_the_ends_have_less() -> None:
    assert chunk_layers(ParallelPlan(pp=4), 10) == (2, 3, 3, 2)
    assert chunk_layers(ParallelPlan(pp=2, schedule="zb-v", accumulation=4), 6) == (1, 2, 2, 1)
    assert chunk_layers(ParallelPlan(pp=2, chunk_layers=(5, 1)), 6) == (5, 1)
    with pytest.raises(UsageError, match="pp 2 x 2 chunks of zb-v needs as many layers, the model has 3"):
        chunk_layers(ParallelPlan(pp=2, schedule="zb-v"), 3)
    with pytest.raises(UsageError, match="add up to 6"):
        chunk_layers(ParallelPlan(pp=2, chunk_layers=(5, 1)), 7)


def test_the_documents_lists_of_zero_are_what_is_run() -> None:
    text = (Path(__file__).parents[2] / "docs" / "parallel" / "README.md").read_text()
    for zero in (2, 3):
        actions = step_program(ParallelPlan(dp=2, zero=zero), 3).program.actions[0]
        assert f"ZeRO-{zero}  {' '.join(map(str, actions))}\n" in text


@pytest.mark.parametrize("what", ["activations", "weights"])
def test_the_documents_lists_of_moves_are_what_is_run(what: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "parallel" / "README.md").read_text()
    actions = step_program(ParallelPlan(offload=what), 4).program.actions[0]
    assert f"{what:<13}{' '.join(map(str, actions))}\n" in text
