"""Run folders to make pages of, written as training writes them, and a browser to open the pages in."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tilemesh.core.plan import ParallelPlan

CONFIG = """
[model]
layers = 4
width = 128
heads = {heads}
vocabulary = 256
context = 128
[train]
steps = {steps}
batch = 16
context = 128
seed = 0
[optimizer]
lr = {lr}
[plan]
dp = {dp}
tp = {tp}
microbatch = {micro}
precision = "fp32"
"""


def write_run(
    folder: Path, *, steps: int = 60, planned: int | None = None, dp: int = 2, tp: int = 2, lr: float = 0.004,
    traced: int = 6, layers: int = 4, seconds: float = 0.1, exchange: float = 0.3, summary: bool = True,
) -> Path:  # fmt: skip
    """A run of this many steps and ranks; what it says is made up, how it says it is what training writes."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        CONFIG.format(steps=planned or steps, dp=dp, tp=tp, lr=lr, heads=max(4, tp), micro=16 // min(16, dp))
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            wave = 0.05 * math.sin(step * 1.7) + 0.03 * math.sin(step * 0.37)
            took = seconds * (1 + 0.2 * wave)
            line: dict[str, Any] = {
                "kind": "step", "step": step, "loss": 1.2 + 4.3 * math.exp(-6 * step / steps) + wave, "norm": 1.0,
                "rate": lr, "seconds": took, "tokens_per_s": 2048 / took, "exchange_s": took * exchange,
                "data_s": took * 0.01, "memory_bytes": 400 << 20,
                "at": 1.79e9 + step * seconds,
            }  # fmt: skip
            if step % max(1, steps // 5) == 0:
                line["held_out"] = 1.3 + 4.3 * math.exp(-6 * step / steps)
            file.write(json.dumps(line) + "\n")
    for step in (steps // 2, steps):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (folder / "predicted.json").write_text(json.dumps({"missing": "the planner has no figures for ranks on a CPU"}))
    if traced:
        (folder / "trace.json").write_text(json.dumps({"traceEvents": trace_events(dp * tp, traced, layers, seconds)}))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary_of(steps, dp, tp, seconds, exchange)))
        (folder / "sample.txt").write_text("def main(): <b>pass</b>")
    return folder


def summary_of(steps: int, dp: int, tp: int, seconds: float, exchange: float) -> dict[str, Any]:
    plan = ParallelPlan(dp=dp, tp=tp, microbatch=16 // min(16, dp), precision="fp32").to_dict()
    return {
        "schema": 1,
        "model": {"layers": 4, "width": 128, "heads": max(4, tp), "vocabulary": 256, "context": 128}, "plan": plan,
        "context": 128, "batch": 16, "cluster": f"{dp * tp}xlocal", "device": "cpu", "machine": "made-up-2c",
        "world": dp * tp, "backend": "mpi", "cores": 2, "parameters": 836_000, "step": steps, "loss": 1.2,
        "held_out": 1.31, "interrupted": False, "seconds": steps * seconds, "seconds_to_first_step": 2.0,
        "step_time_s": {"median": seconds, "p20": seconds * 0.97, "p80": seconds * 1.04, "n": steps - 3},
        "checkpoint_step_time_s": None, "failed_checkpoints": 0,
        "shares": {"compute": 0.95 - exchange, "exchange": exchange, "data": 0.01, "idle": 0.04},
        "exchange_seconds": {"tp all_reduce": steps * seconds * exchange, "dp all_reduce": steps * seconds * 0.1},
        "exchanges": {"tp": {"all_reduce": 8 << 20}, "dp": {"all_reduce": 3 << 20}},
        "peak_memory_bytes": [(410 << 20) + (rank << 20) for rank in range(dp * tp)],
        "memory_baseline_bytes": [360 << 20] * (dp * tp), "improve": "exchanges take 30% of a step",
    }  # fmt: skip


def trace_events(ranks: int, steps: int, layers: int, seconds: float) -> list[dict[str, Any]]:
    """Forward and backward passes with an exchange a layer in each, gradients, optimizer, a meeting."""
    events: list[dict[str, Any]] = []
    us = seconds * 1e6
    for rank in range(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for step in range(1, steps + 1):
            at = (step - 1) * us * 1.02 + rank * 3.0

            def add(
                name: str, kind: str, begin: float, end: float, at: float = at, rank: int = rank, **args: Any
            ) -> None:
                events.append({"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": at + begin * us,
                               "dur": (end - begin) * us, "cat": kind, "args": args})  # fmt: skip

            add("data", "data", 0, 0.01, step=step)
            for name, begin, end in (("forward", 0.01, 0.36), ("backward", 0.36, 0.84)):
                for layer in range(layers):
                    mid = begin + (end - begin) * (layer + 0.6) / layers
                    add("all_reduce", "exchange", mid, mid + 0.25 * (end - begin) / layers, bytes=65536, group="tp")
                add(name, "compute", begin, end, step=step)
            add("all_reduce", "exchange", 0.85, 0.91, bytes=3 << 20, group="dp")
            add("gradients", "compute", 0.84, 0.92, step=step)
            add("optimizer", "compute", 0.92, 0.96, step=step)
            add("all_reduce", "exchange", 0.965, 0.985 + 0.01 * (rank % 2), bytes=24, group="control")
            add("meet", "idle", 0.96, 0.997, step=step)
    return events


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str = "run", **options: Any) -> Path:
        return write_run(tmp_path / name, **options)

    return make


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The tests that need it are skipped, and say so, where no Chromium is installed."""
    found = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    if module.executable() is None:
        pytest.skip("pages are not opened: no Chromium here (Debian: apt-get install chromium)")
    with module.Browser() as one:
        yield one
