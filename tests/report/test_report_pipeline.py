"""The pipeline's part of a run's page: measured and simulated beside each other, from a trace as a run writes it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from tilemesh.core import config
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.book import build
from tilemesh.core.step.memory import StepBytes
from tilemesh.core.step.simulate import ExchangeTimes, RoutedTimes, StepTimes, simulate
from tilemesh.plan.grade import expected_kept
from tilemesh.report import pipeline_part, spans
from tilemesh.report.run import Run

PLAN = ParallelPlan(pp=2, tp=2, schedule="zb-h1", accumulation=4)
TIMES = StepTimes([0.1, 0.1], [0.12, 0.12], [0.08, 0.08])
EVERY_S = 10.0


def events() -> list[dict[str, Any]]:
    """Five steps as ranks trace them: an action spans its waiting too, which is a span of its own inside."""
    found = []
    done = simulate(build(PLAN.schedule, PLAN.pp, PLAN.accumulation), TIMES, keep_slots=True)
    for step, stage in itertools.product(range(1, 6), range(PLAN.pp)):
        mine = sorted((slot for slot in done.slots if slot.rank == stage), key=lambda slot: slot.start_s)
        asked = 0.0
        for count, slot in enumerate(mine):
            base = {"ph": "X", "pid": stage * PLAN.tp, "tid": 0}
            args = {"action": slot.action.kind, "step": step, "chunk": stage, "live": 100 * (count + 1)}
            began, ended = ((asked + step * EVERY_S) * 1e6, (slot.end_s + step * EVERY_S) * 1e6)
            found.append(
                {**base, "cat": "action", "name": str(slot.action), "ts": began, "dur": ended - began, "args": args}
            )
            if slot.start_s > asked:
                wait = {"ts": began, "dur": (slot.start_s - asked) * 1e6, "args": {"group": "pp"}}
                found.append({**base, "cat": "exchange", "name": "wait recv", **wait})
            asked = slot.end_s
    return found


def run(**more: Any) -> Run:
    settings = {"plan": config.to_dict(PLAN), "model": {"layers": 2}}
    return Run("r", "/r", "done", config=settings, timeline=spans.with_steps(events()), **more)


def test_waiting_inside_an_action_is_no_computing() -> None:
    measured = pipeline_part.median_step(run(), PLAN)
    whole = simulate(build("zb-h1", 2, 4), TIMES)
    assert [sum(one.busy_s for one in each) for each in measured] == pytest.approx(list(whole.busy_s))
    assert len(measured) == 2
    assert len(measured[0]) == 12


def test_both_timelines_the_bubble_and_the_memory_are_on_the_page() -> None:
    """Simulated with the medians that were measured, the step is the measured one."""
    page = str(pipeline_part.pipeline(run(), StepBytes(kept=[100.0, 100.0], kept_for_weights=[50.0, 50.0])))
    whole = simulate(build("zb-h1", 2, 4), TIMES)
    share = f"{100 * whole.bubble:.1f}"
    for words in (
        "run 0",
        "run 1",
        "sim 0",
        "sim 1",
        "bubble",
        "with the median of each chunk",
        "Memory of each stage",
    ):
        assert words in page
    assert page.count(share) >= 2
    assert "stage 1, predicted" in page
    assert "stage 1, measured" in page


def test_predicted_times_are_simulated_where_there_are_some() -> None:
    told = {"forward_s": [1.0, 1.0], "input_s": [1.0, 1.0], "weight_s": [1.0, 1.0], "transfer_s": 0.0}
    kept = {"kept_bytes": [5, 6], "kept_for_weights_bytes": [1, 2]}
    found = run(predicted={"pipeline": told | kept})
    assert "predicted before the run" in str(pipeline_part.pipeline(found, None))
    expected = expected_kept(found.config, found.predicted, found.summary)
    assert expected is not None
    assert list(expected.kept) == [5.0, 6.0]


def test_predicted_exchanges_with_experts_have_a_lane() -> None:
    """As the planner writes them; what it did not write so is left out."""
    plan = dataclasses.replace(PLAN, dp=2, ep=2)
    settings = {"plan": config.to_dict(plan), "model": {"layers": 2, "experts": 4}}
    times = RoutedTimes(ExchangeTimes(0.3, 0.2, 0.1, 0.1, 0.2, 0.0), ExchangeTimes(0, 0.2, 0, 0.1, 0.2, 0.1, 0.3), 0.1)
    told = {"forward_s": [1.0, 1.0], "input_s": [1.0, 1.0], "weight_s": [0.1, 0.1]}
    for given, is_drawn in ((times, True), ([1, 2], False), ([[1], [2], 3], False)):
        predicted = json.loads(json.dumps({"pipeline": told | {"routed": list(given)}, "chunk_layers": [1, 1]}))
        page = str(pipeline_part.pipeline(Run("r", "/r", "done", config=settings, predicted=predicted), None))
        assert ("sim 1, experts" in page and "1DISPATCH_F3/1" in page) == is_drawn


def test_a_run_without_a_pipeline_has_no_such_part() -> None:
    alone = Run("r", "/r", "done", config={"plan": config.to_dict(ParallelPlan(dp=2))})
    assert pipeline_part.pipeline(alone, None) is None
    assert "nothing was predicted" in str(
        pipeline_part.pipeline(Run("r", "/r", "done", config={"plan": config.to_dict(PLAN)}), None)
    )
