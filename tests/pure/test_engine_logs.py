"""Others' logs beside their predictions. Lines of torchtitan, Megatron-LM and DeepSpeed are written here as their
sources format them, from what a run would have taken; a Trainer's state is one that a run left."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilemesh.cli.main import make_app, redirected
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import preset
from tilemesh.plan.engines.graded import grade_log
from tilemesh.plan.engines.logs import COMPUTE, DATA, EXCHANGE, WAITING, read_log, read_profile

PLAN = ParallelPlan(dp=8, tp=2, sequence_parallel=True, zero=2, microbatch=2, accumulation=8)
CONTEXT = 8192
TOKENS = PLAN.batch * CONTEXT
COLOUR = "\x1b[34m"
LINES = {
    "torchtitan": lambda s: (
        f"[titan] - root - INFO - step: 10  loss:  9.87130  grad_norm:  2.1234  {COLOUR}memory: 61.50GiB(77.70%)  "
        f"{COLOUR}tps: {round(TOKENS / s / 16):,}  tflops: 510.01  mfu: 51.60%\x1b[39m"
    ),
    "megatron": lambda s: (
        f" [2026-11-18 08:00:00] iteration       10/      50 | consumed samples:         1280 | elapsed time per "
        f"iteration (ms): {1e3 * s:.1f} | throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 1.0E-04 |\n"
        "[Rank 0] (after 10 iterations) memory (MB) | allocated: 1.0 | max allocated: 62976.0 | reserved: 70000.0"
    ),
    "deepspeed": lambda s: (
        f"[timer.py:264:stop] epoch=0/micro_step=80/global_step=10, RunningAvgSamplesPerSec=1.0, "
        f"CurrSamplesPerSec={PLAN.batch * PLAN.tp / s}, MemAllocated=1.0GB, MaxMemAllocated=61.5GB"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*LINES])
def test_a_log_says_what_a_step_took_and_the_most_memory(name: str, tmp_path: Path) -> None:
    seconds = (
        [60.0, 7.0, 7.5, 7.2] if name != "deepspeed" else [7.0, 7.5, 7.2]
    )  # torchtitan's and Megatron's first warms up
    (tmp_path / "run.log").write_text("\n".join(["noise", *map(LINES[name], seconds)]))
    for path in (tmp_path, tmp_path / "run.log"):
        measured = read_log(path, name, PLAN, CONTEXT)
        assert measured.steps_s == pytest.approx((7.0, 7.5, 7.2), rel=1e-3)
        assert measured.peak_bytes == int(61.5 * 2**30)
        assert measured.sample["median"] == pytest.approx(7.2, rel=1e-3)


def test_a_trainers_state_has_the_mean_of_its_steps(tmp_path: Path) -> None:
    """The end of one that transformers 5.22 wrote after 12 steps on a CPU."""
    history = [{"loss": 4.14, "step": 12}, {"step": 12, "train_runtime": 0.2604, "train_steps_per_second": 46.078}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 12, "log_history": history}))
    assert read_log(tmp_path, "hf-trainer", PLAN, CONTEXT).steps_s[0] == pytest.approx(0.2604 / 12, rel=1e-3)


def event(name: str, start: float, end: float, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": 1e6 * start, "dur": 1e6 * (end - start)}


def profile(path: Path) -> Path:
    """Two steps of 10 s: 6 s of matrix products, an exchange of 3 s that 1 s of them hides, 2 s of nothing."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for start in (100.0, 110.0):
        events += [
            event(f"ProfilerStep#{int(start)}", start, start + 10, "user_annotation"),
            event(f"ProfilerStep#{int(start)}", start + 0.5, start + 10.5, "gpu_user_annotation"),
            event("enumerate(DataLoader)#_SingleProcess.__next__", start, start + 0.25, "user_annotation"),
            event("sm90_gemm", start + 1, start + 5),
            event("flash_fwd", start + 4, start + 7),  # on another stream
            event("ncclDevKernel_AllReduce_Sum", start + 6, start + 9),
        ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_a_profile_says_where_a_step_went(tmp_path: Path) -> None:
    measured = read_profile(profile(tmp_path / "trace.json.gz"))
    assert measured.steps_s == pytest.approx((10.0, 10.0))
    assert measured.parts_s == pytest.approx({COMPUTE: 6.0, EXCHANGE: 2.0, DATA: 0.25, WAITING: 2.0})


@pytest.mark.parametrize("lengths", [(10.0, 10.5, 40.0), (10.0, 11.0, 12.0, 40.0)])
def test_parts_of_a_profile_add_up_to_its_step(lengths: tuple[float, ...], tmp_path: Path) -> None:
    """One step of 40 s moves no part more than the whole."""
    events, at = [], 100.0
    for number, length in enumerate(lengths):
        events += [event(f"ProfilerStep#{number}", at, at + length, "user_annotation")]
        events += [event("sm90_gemm", at, at + length / 2), event("ncclKernel", at + length / 2, at + 0.75 * length)]
        at += length
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    measured = read_profile(tmp_path / "trace.json")
    parts = measured.parts_s or {}
    assert sum(parts[name] for name in (COMPUTE, EXCHANGE, WAITING)) == pytest.approx(measured.sample["median"])
    assert parts[COMPUTE] == pytest.approx(measured.sample["median"] / 2)


def test_what_is_off_names_its_part_and_what_would_be_faster(tmp_path: Path) -> None:
    slow = ParallelPlan(dp=2, tp=8, accumulation=64)
    path = profile(tmp_path / "trace.json.gz")
    graded = grade_log(path, "kineto", preset("llama-3-8b"), slow, CONTEXT, parse_cluster("16xh100"), None)
    step = graded.find("step time")
    assert step.measured == 10.0
    assert step.predicted is not None
    assert graded.find(EXCHANGE).holds is None
    late = 10.0 - step.predicted
    assert graded.advice[0].startswith(f"a step takes {late:+.3g} s")
    assert "% less than this layout" in graded.advice[-1]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("torchtitan", "step: 1  loss: 3", "no line of torchtitan that says how long a step took"),
        ("hf-trainer", '{"log_history": []}', "no train_steps_per_second"),
        ("hf-trainer", "[]", "no state of a Trainer"),
        ("kineto", "{}", "no trace of torch.profiler"),
        ("kineto", '{"traceEvents": []}', "no ProfilerStep"),
    ],
)
def test_a_log_of_something_else(kind: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(RunError, match=words):
        read_log(tmp_path / "file", kind, PLAN, CONTEXT)


def test_the_command_grades_by_the_plan_that_was_written(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        line = redirected(["plan", *words])
        result = CliRunner(env={"COLUMNS": "160"}).invoke(make_app(line), line, catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    cluster = ("--cluster", "16xh100")
    fixed = "zero=2,tp=2,pp=1,microbatch=1,recompute=none"
    run("llama-3-8b", *cluster, "--batch", "128", "--for", "torchtitan", "--fix", fixed, "--out", str(tmp_path / "job"))
    (tmp_path / "a.log").write_text(LINES["torchtitan"](7.0))
    graded = ("grade", str(tmp_path / "a.log"), "--of", "torchtitan")
    assert "7 s" in run(*graded, "--plan", str(tmp_path / "job" / "plan.toml"), *cluster)
    with pytest.raises(UsageError, match=r"give --plan PLAN\.toml and --cluster"):
        run(*graded)
    with pytest.raises(UsageError, match=r"the plan has 16 ranks and the cluster 1x8xh100 has 8: give --cluster"):
        run(*graded, "--plan", str(tmp_path / "job" / "plan.toml"), "--cluster", "8xh100")
