"""The range of a prediction: eight of ten lie inside, as far as readings of a machine and graded runs can say."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilemesh.core import calibration as module
from tilemesh.core import config
from tilemesh.core.calibration import MOST_READINGS, Calibration, Rates, load
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.measure.machine import this_machine
from tilemesh.measure.row import Row
from tilemesh.model.config import preset
from tilemesh.plan.grade import Grade
from tilemesh.plan.local import local_cpu
from tilemesh.plan.ranges import MODEL_ERRORS, predicted_range
from tilemesh.plan.step import predict
from tilemesh.train.load import load as load_config
from tilemesh.train.predict import predict_run
from tilemesh.train.preview import preview
from tilemesh.train.rows import least_bytes
from tilemesh.train.rules import kept_share

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CORE = Rates({"fp32": 48e9}, copy_bytes_per_s=6.3e9, operation_s=5e-6)
HERE = Calibration("box-1", "a test", "first", {"torch": "2.13.0"}, one_core=CORE, all_cores=CORE)


def test_one_reading_leaves_the_models_own_error() -> None:
    assert predicted_range([2.0], 0.1) == pytest.approx((2 * math.exp(-0.1), 2 * math.exp(0.1)))
    assert predicted_range([2.0, 2.0, 2.0], 0.1) == pytest.approx(predicted_range([2.0], 0.1))
    low, high = predicted_range([4.0, 1.0], 0.0)  # two that differ: by Student, 3.078 of their scatter
    scatter = math.log(4) / math.sqrt(2) * math.sqrt(1.5)
    assert (low, high) == pytest.approx((2 * math.exp(-3.078 * scatter), 2 * math.exp(3.078 * scatter)))
    low, high = predicted_range([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0.0)
    assert low <= 9.0 <= high  # what is predicted lies inside, whatever the others say


@pytest.mark.parametrize("readings", [2, 3, 5])
@pytest.mark.parametrize("model", [0.0, 0.1])
def test_four_fifths_of_what_is_drawn_alike_lie_inside(readings: int, model: float) -> None:
    draw = random.Random(readings)
    inside = 0
    for _ in range(3000):
        *known, now = (math.exp(draw.gauss(0, 0.05)) for _ in range(readings + 1))
        low, high = predicted_range(known, model)
        inside += low <= now * math.exp(draw.gauss(0, model / 1.2816)) <= high
    assert 0.77 <= inside / 3000 <= (0.83 if model == 0 else 0.9)


def test_layouts_of_an_x86_machine_that_was_read_three_times() -> None:
    """Ten steps measured beside the last reading; nothing of the range was fitted on them. Eight are aimed at."""
    readings = [load(RESULTS / f"calibration-xeon-2of16c{name}.json") for name in ("-e4c1162", "-049f48d", "")]
    model, inside, graded = preset("tiny"), 0, 0
    for line in (RESULTS / "layouts_xeon_2of16c_e4c1162.jsonl").read_text().splitlines():
        run = json.loads(line)
        if run["name"] != "grade":
            continue
        plan = config.from_dict(ParallelPlan, run["plan"], "a run")
        step_s = next(figure["measured"] for figure in run["figures"] if figure["name"] == "step time")
        said = []
        for reading in readings:
            here = local_cpu(reading, plan.world, 2, 24 << 30)
            said.append(predict(model, here.cluster, plan, model.context, rates=here.rates, code="eager").step_time_s)
        low, high = predicted_range(said, MODEL_ERRORS["cpu"]["step_time_s"])
        inside, graded = inside + (low <= step_s <= high), graded + 1
    assert graded == 10
    assert inside >= 7


def test_a_calibration_keeps_what_was_read_before() -> None:
    stored = HERE
    for number in range(8):
        stored = replace(HERE, when=f"reading {number}", extra={"fits": number}).stored_over(stored)
    stored = Calibration.from_dict(json.loads(json.dumps(stored.to_dict())))
    assert [each.when for each in stored.readings] == [
        f"reading {number}" for number in range(7, 7 - MOST_READINGS, -1)
    ]
    assert [each.extra["fits"] for each in stored.readings] == [7, 6, 5, 4, 3]
    other = replace(HERE, versions={"torch": "2.14.0"}).stored_over(stored)
    assert other.readings == (other,)  # another torch: what was read with the last one says nothing of it


def test_a_run_is_told_a_range_and_its_rows_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = replace(CORE, matmul_flops_per_s={"fp32": 40e9})
    twice = HERE.stored_over(replace(HERE, one_core=slower, all_cores=slower))
    made = load_config("tiny", mesh="dp=1", sets=["train.device=cpu,train.batch=8"])
    ranges = {}
    for name, known in (("once", HERE), ("twice", replace(twice, identity=this_machine().id))):
        monkeypatch.setattr(module, "find", lambda identity, known=known: known)
        said = predict_run(made, ())
        low, high = ranges[name] = said["ranges"]["step_time_s"]
        assert low < said["step_time_s"] < high
        assert said["readings"] == (1 if name == "once" else 2)
        assert said["ranges"]["memory_bytes"][0] < said["memory_bytes"] < said["ranges"]["memory_bytes"][1]
    assert ranges["twice"][1] / ranges["twice"][0] > 1.05 * ranges["once"][1] / ranges["once"][0]
    seen = preview(made)
    step = next(row for row in seen.rows() if row.name == "step time")
    assert step.predicted_range == tuple(ranges["twice"])
    assert Row.from_json(step.to_json()) == step
    assert f"{json.loads(step.to_json())['predicted_range']}" == str(list(ranges["twice"]))
    assert " to " in dict(seen.lines())["time"]


@pytest.mark.parametrize(
    ("sets", "copies"), [("", 2), ("optimizer.name=lion", 1), ("optimizer.name=sgd", 1),
                         ("optimizer.name=sgd,optimizer.momentum=0", 0)],
)  # fmt: skip
def test_memory_is_predicted_with_what_the_optimizer_keeps(
    sets: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find", lambda identity: HERE)
    made = load_config("tiny", mesh="dp=1", sets=["train.device=cpu", *filter(None, [sets])])
    memory = predict_run(made, ())["memory"]
    assert memory["optimizer_bytes"] == copies * memory["weights_bytes"]
    parts = {name: size for name, size in memory.items() if name not in ("total_bytes", "usable_bytes", "later_bytes")}
    assert memory["total_bytes"] == sum(parts.values()) - memory["later_bytes"]
    share = kept_share(made.optimizer, "fp32")
    assert least_bytes(made.model, made.plan, kept_share=share) == (2 + copies) * memory["weights_bytes"]


def test_a_run_of_local_updates_is_predicted_by_its_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find", lambda identity: HERE)

    def told(*sets: str) -> dict[str, Any]:
        return predict_run(
            load_config(
                "tiny", mesh="dp=2", sets=["train.device=cpu,train.steps=8,checkpoint.every=0,evaluate.every=0", *sets]
            ),
            (),
        )

    common = told()
    assert common["exchanges"]["dp"]["all_reduce"] > 0
    assert told("train.method=local,method.period=1")["traffic"] == common["traffic"]
    for period, start, exchanged in ((4, 0, 2 / 8), (3, 0, 3 / 8), (4, 4, 5 / 8)):
        local = told(f"train.method=local,method.period={period},method.start={start}")
        assert local["traffic"]["dp"] == pytest.approx(exchanged * common["traffic"]["dp"])
        assert local["times"]["dp_s"] < common["times"]["dp_s"]
        assert sum(local["times"].values()) == pytest.approx(local["step_time_s"])
        assert local["tokens_per_s"] * local["step_time_s"] == pytest.approx(common["tokens"])
        assert local["exchanges"] == (common["exchanges"] if start else {})
    assert (
        "method.compress=top-k takes to make its messages is not modelled" in told("method.compress=top-k")["missing"]
    )
    assert "Muon takes to make matrices orthogonal is not modelled" in told("optimizer.name=muon")["missing"]
    assert "a recipe takes to round or mask weights in every pass" in told("compress.recipe=int8")["missing"]
    taught = load_config("tiny").changed(distill={"teacher": Path("teacher")})
    assert "a teacher beside the student takes is not modelled" in predict_run(taught, ())["missing"]


def test_a_range_lies_around_its_prediction() -> None:
    fields = {
        "name": "a", "case": {}, "unit": "s", "measured": None, "limit": None, "machine": "m", "versions": {},
        "commit": None, "command": "c", "missing": {"measured": "no", "limit": "no", "peers": "no"},
    }  # fmt: skip
    assert Row(predicted=1.0, predicted_range=(0.9, 1.1), **fields).predicted_range == (0.9, 1.1)
    with pytest.raises(UsageError, match=r"predicted_range is 1.1 to 1.2, around a prediction of 1.0"):
        Row(predicted=1.0, predicted_range=(1.1, 1.2), **fields)
    text = Row(predicted=1.0, predicted_range=(0.9, 1.1), **fields).to_json().replace("[0.9, 1.1]", '[0.9, "x"]')
    with pytest.raises(UsageError, match="expected two numbers"):
        Row.from_json(text)


def test_a_grade_says_whether_it_lies_inside() -> None:
    assert Grade("step time", "s", 1.0, 1.1, between=(0.9, 1.2)).is_inside is True
    assert Grade("step time", "s", 1.0, 1.3, between=(0.9, 1.2)).is_inside is False
    assert Grade("step time", "s", 1.0, 1.3).is_inside is None
