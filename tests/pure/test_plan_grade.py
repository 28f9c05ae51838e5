"""Grading a run: figures beside their predictions, what is missing, what is wrong, and the order of several runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tilemesh.cli.commands.plan.grade import GradeOptions, grade_run, grades
from tilemesh.cli.commands.plan.grade import grade as grade_runs
from tilemesh.cli.typed import run
from tilemesh.core import config
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.errors import RunError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.measure.machine import Machine
from tilemesh.model.config import preset
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.grade import ROUTED, Grade, Graded, RunSummary, code_of, grade, rank_correlation, read_run
from tilemesh.plan.step import predict

TINY = preset("tiny")
PLAN = ParallelPlan(dp=2, tp=2, microbatch=8, precision="fp32")
CLUSTER = parse_cluster("4xcpu")


def summary(**changes: Any) -> dict[str, Any]:
    """What a run would have left that went exactly as predicted."""
    found = predict(TINY, CLUSTER, PLAN)
    whole = {
        "schema": 1, "model": config.to_dict(TINY), "plan": PLAN.to_dict(), "context": 128, "cluster": "4xcpu",
        "world": 4, "parameters": count_parameters(TINY).total,
        "step_time_s": {"median": found.step_time_s, "p20": found.step_time_s, "p80": found.step_time_s, "n": 9},
        "peak_memory_bytes": [found.memory.total_bytes + 1000] * 4, "memory_baseline_bytes": [1000] * 4,
        "exchanges": {**found.exchanges, "control": {"all_reduce": 48}},
        "shares": {"compute": 1.0, "exchange": 0.0, "idle": 0.0},
    }  # fmt: skip
    return {key: value for key, value in (whole | changes).items() if value is not None}


def graded(tmp_path: Path, **changes: Any) -> Graded:
    (tmp_path / "summary.json").write_text(json.dumps(summary(**changes)))
    return grade(read_run(tmp_path), CLUSTER)


def test_a_run_as_predicted_has_no_errors(tmp_path: Path) -> None:
    found = graded(tmp_path)
    assert [g.error for g in found.grades] == pytest.approx([0.0] * len(found.grades))
    assert {g.name for g in found.grades} == {
        "parameters", "step time", "tokens/s", "peak memory", "tp all_reduce", "dp all_reduce",
    }  # fmt: skip
    assert found.advice == ()
    assert not found.before


def test_bytes_of_a_step_as_a_real_run_counted_them() -> None:
    """dp 2 x tp 2 of the tiny preset over MPI: the bytes that training's own recorder had counted."""
    assert predict(TINY, CLUSTER, PLAN).exchanges == {"tp": {"all_reduce": 9_449_472}, "dp": {"all_reduce": 2_101_760}}


def test_bytes_with_sequence_parallelism_as_a_real_run_counted_them() -> None:
    """tp 2 of the tiny preset: beside the loss's sums, the gradients of nine norms that each rank sees a part of."""
    plan = ParallelPlan(tp=2, sequence_parallel=True, microbatch=16, precision="fp32")
    assert predict(TINY, parse_cluster("2xcpu"), plan).exchanges == {
        "tp": {"all_gather": 18_874_368, "reduce_scatter": 18_874_368, "all_reduce": 29_184}
    }


def test_the_worst_comes_first_with_what_to_do(tmp_path: Path) -> None:
    slow = 10 * predict(TINY, CLUSTER, PLAN).step_time_s
    found = graded(tmp_path, step_time_s={"median": slow, "p20": slow, "p80": 2 * slow, "n": 9})
    assert found.grades[0].name == "step time"
    assert found.find("step time").error == pytest.approx(-0.9)
    assert found.find("step time").holds is False
    assert "tilemesh calibrate" in found.advice[0]
    assert "computing takes" in found.advice[0]
    assert "wander" in found.advice[1]


def test_a_rate_is_not_judged_beside_its_time(tmp_path: Path) -> None:
    """14 % off the time is 16 % off the rate: one verdict, and it is the time's."""
    found = graded(tmp_path, step_time_s=predict(TINY, CLUSTER, PLAN).step_time_s / 0.86)
    rate = found.find("tokens/s")
    assert rate.error == pytest.approx(1 / 0.86 - 1)
    assert (rate.bound, rate.holds) == (None, None)
    assert all(g.holds in (True, None) for g in found.grades)
    assert found.advice == ()


def test_of_a_gpu_what_torch_allocates_is_graded() -> None:
    plan = ParallelPlan(microbatch=32, precision="bf16")
    memory = predict(preset("gpt2-124m"), parse_cluster("1xh200"), plan, code="compiled").memory
    assert memory.seen_bytes("gpu") == memory.total_bytes - memory.reserved_bytes < memory.total_bytes
    assert memory.seen_bytes("cpu") == memory.total_bytes


@pytest.mark.parametrize(("pp", "interleave", "sends"), [(2, 1, 1), (4, 1, 1), (2, 2, 3), (4, 3, 5)])
def test_the_first_stage_sends_each_output_on_and_each_gradient_back(pp: int, interleave: int, sends: int) -> None:
    schedule = "interleaved" if interleave > 1 else "1f1b"
    plan = ParallelPlan(pp=pp, accumulation=8, schedule=schedule, interleave=interleave, precision="fp32")
    model = TINY.replace(layers=12)
    found = predict(model, parse_cluster(f"{pp}xcpu"), plan).exchanges["pp"]["send"]
    assert found == 8 * sends * 128 * model.width * 4


def test_slow_exchanges_are_told_from_slow_computing(tmp_path: Path) -> None:
    step = predict(TINY, CLUSTER, PLAN).step_time_s
    found = graded(
        tmp_path, step_time_s=3 * step, shares={"compute": 1 / 3, "exchange": 2 / 3, "idle": 0.0}
    )  # fmt: skip
    assert "exchanges take" in found.advice[0]


def test_one_byte_more_is_not_exact(tmp_path: Path) -> None:
    found = graded(tmp_path, exchanges={"tp": {"all_reduce": 9_449_473}, "dp": {"all_reduce": 2_101_760, "send": 4}})
    off = {g.name for g in found.grades if g.holds is False}
    assert off == {"tp all_reduce", "dp send"}
    assert found.find("dp send").error == -1.0  # what was not foreseen counts as 0
    assert "exchanged bytes differ" in found.advice[0]


def test_what_was_not_recorded_says_so(tmp_path: Path) -> None:
    found = graded(tmp_path, exchanges=None, peak_memory_bytes=None, parameters=None)
    missing = {g.name for g in found.grades if g.measured is None}
    assert missing == {"tp all_reduce", "dp all_reduce", "peak memory", "parameters"}
    assert all("did not record" in g.note for g in found.grades if g.measured is None)
    assert found.grades[0].measured is not None  # last, not first


def test_a_prediction_made_before_the_run_is_the_one_graded(tmp_path: Path) -> None:
    found = graded(tmp_path, predicted={"step_time_s": 123.0, "memory": {"total_bytes": 456, "reserved_bytes": 7}})
    assert found.before
    assert found.find("step time").predicted == 123.0
    assert found.find("peak memory").predicted == 456
    assert graded(tmp_path, predicted={"missing": "nobody asked"}).before is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"has no summary\.json: give the folder of a run that has ended"),
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ("{}", "has schema None"),
        ('{"schema": 1, "kind": "dice"}', "of a run of kind 'dice': expected 'train'"),
        ('{"schema": 1, "plan": {}, "cluster": "1xh100"}', "has no 'model'"),
        ('{"schema": 1, "plan": {}, "cluster": "1xh100", "model": {"layer": 1}}', "did you mean 'layers'"),
    ],
)
def test_a_folder_that_is_no_run(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with pytest.raises(RunError, match=words):
        read_run(tmp_path)


def test_a_run_on_the_cores_of_a_machine_with_a_gpu_is_judged_by_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine("box", "a box with a GPU", "a CPU", 2, 8 << 30, ("NVIDIA H200",))
    monkeypatch.setattr("tilemesh.measure.machine.this_machine", lambda: machine)
    one_core, all_cores = (Rates({"fp32": flops}, copy_bytes_per_s=1e10) for flops in (1e10, 2e10))
    Calibration("box", "a box with a GPU", "today", one_core=one_core, all_cores=all_cores).save()
    (tmp_path / "summary.json").write_text(json.dumps(summary(cluster="4xlocal", device="cpu", machine="box")))
    [row] = grades([grade_run(str(tmp_path))]).json
    assert isinstance(row, dict)
    step = next(figure for figure in row["figures"] if figure["name"] == "step time")
    # Four ranks share two cores of 1e10 FLOP/s each; a GPU would be ten thousand times as fast.
    assert step["limit"] > predict(TINY, CLUSTER, PLAN).model_flops / 2.1e10


def test_what_is_said_of_a_graded_run_fits_100_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    slow = 10 * predict(TINY, CLUSTER, PLAN).step_time_s
    changed = summary(step_time_s={"median": slow, "p20": slow, "p80": 2 * slow, "n": 9}, cluster="4xh100")
    folder = tmp_path / ("a run with a name of many words " * 2)
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(changed))
    run(grade_runs, GradeOptions(runs=(str(folder),)))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  - ") for line in lines)
    assert max(map(len, lines)) <= 100


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # By hand: ranks 1 2 3 4 and 2 1 3 4, sum of squared differences 2, 1 - 6 x 2 / (4 x 15).
    assert rank_correlation([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 2, 2, 4], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert rank_correlation([1, 2], [1, 2]) is None
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


@pytest.mark.parametrize(
    ("summary", "device", "code"),
    [
        ({"code": "compiled"}, "2xcpu", "compiled"),
        ({"code": "fused"}, "2xh100", "fused"),
        ({"code": "unheard of"}, "2xcpu", "eager"),
        ({}, "2xcpu", "eager"),
        ({"compile": False}, "2xh100", "eager"),
        ({}, "2xh100", None),
    ],
)
def test_what_ran_is_as_the_summary_says(summary: dict[str, Any], device: str, code: str | None) -> None:
    run = RunSummary("a run", TINY, PLAN, TINY.context, device, summary)
    assert code_of(run, parse_cluster(device)) == code


def test_rows_to_experts_are_expected_and_not_judged() -> None:
    """How many come to a rank is its routers' choice; a sum of gradients beside it is exact as ever."""
    rows, sums = (Grade(name, "B", 100.0, 90.0) for name in (f"ep all_to_all, {ROUTED}", "dp all_reduce"))
    assert (rows.bound, rows.holds) == (None, None)
    assert (sums.bound, sums.holds) == (0.0, False)
