"""What the planner said of the published steps and of the graded layouts, kept: its figures move by at most 1 %.

`plan_figures.json` has step time and memory of every published case, of the H200's and of the nine layouts of
`LAYOUTS` of `tilemesh.bench.jobs`, on calibrations that are in the repository. A change that is meant to move
them writes them again: `python tests/pure/test_plan_figures.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilemesh.core import calibration
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.task import Code
from tilemesh.plan import Prediction, predict
from tilemesh.plan.local import local_cpu, local_gpu

KEPT = Path(__file__).with_name("plan_figures.json")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200, CORES = RESULTS / "calibration-h200.json", RESULTS / "calibration_layers_neoverse_n1_2c.jsonl"

_NAMES = {"matmul": "matmul_flops_per_s", "attention": "attention_flops_per_s", "projection": "projection_flops_per_s"}
_UNITS = {"B/s": "bytes_per_s", "elements/s": "per_s", "s": "s"}


def two_cores() -> Calibration:
    """The rows of a calibration that the repository has, as a calibration again."""
    found: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for line in CORES.read_text().splitlines():
        row = json.loads(line)
        name, case, value = row["name"], row["case"], row["measured"]["median"]
        if name in _NAMES:
            found[case["cores"]].setdefault(_NAMES[name], {})[case.get("pass", case["dtype"])] = value
        else:
            field = "launch_s" if name == "call" else f"{name}_{_UNITS[row['unit']]}"
            found[case["cores"]][field] = value
    found[2]["launch_s"] = found[1]["launch_s"]
    return Calibration("two", "two cores", "then", one_core=Rates(**found[1]), all_cores=Rates(**found[2]))


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"microbatch": 16},
    "one, accumulated": {"microbatch": 4, "accumulation": 4},
    "dp 2": {"dp": 2, "microbatch": 8},
    "dp 2, accumulated": {"dp": 2, "microbatch": 2, "accumulation": 4},
    "tp 2": {"tp": 2, "microbatch": 16},
    "tp 2, sequence parallel": {"tp": 2, "microbatch": 16, "sequence_parallel": True},
    "dp 4": {"dp": 4, "microbatch": 4},
    "dp 2 x tp 2": {"dp": 2, "tp": 2, "microbatch": 8},
    "tp 4": {"tp": 4, "microbatch": 16},
}
MEGATRON: dict[str, tuple[tuple[int, int, int], str, dict[str, Any]]] = {
    "22B": ((48, 6144, 64), "8xa100", {"microbatch": 4}),
    "175B": ((96, 12288, 96), "64xa100", {"pp": 8, "accumulation": 64, "schedule": "interleaved", "interleave": 3}),
    "530B": (
        (105, 20480, 128),
        "280xa100",
        {"pp": 35, "accumulation": 280, "schedule": "interleaved", "interleave": 3},
    ),
    "1T": ((128, 25600, 160), "512xa100", {"pp": 64, "accumulation": 512}),
}
RECIPES: tuple[dict[str, Any], ...] = ({"recompute": "full"}, {"recompute": "selective", "sequence_parallel": True})
ZERO: dict[str, dict[str, Any]] = {
    f"ZeRO-{stage}": {"dp": 8, "zero": stage, "microbatch": 1, "accumulation": 4} for stage in range(4)
}


def published() -> Iterator[tuple[str, Prediction]]:
    """The tables of Korthikanti et al. 2022 and "The Llama 3 Herd of Models" that docs/plan/README.md shows."""
    for name, ((layers, width, heads), cluster, fields) in MEGATRON.items():
        model = ModelConfig(layers=layers, width=width, heads=heads, vocabulary=51200, context=2048, dropout=0.1)
        for recipe in RECIPES:
            plan = ParallelPlan(tp=8, attention="materialized", precision="bf16-master", **fields, **recipe)
            yield f"{name}, {recipe['recompute']}", predict(model, parse_cluster(cluster), plan)
    model = preset("llama-3-70b").replace(layers=126, width=16384, heads=128, kv_heads=8, mlp_width=53248)
    for gpus, accumulation in ((8192, 32), (16384, 16)):
        plan = ParallelPlan(
            dp=gpus // 128, tp=8, pp=16, sequence_parallel=True, zero=1, accumulation=accumulation,
            schedule="interleaved", interleave=7, precision="bf16-master",
        )  # fmt: skip
        yield f"405B on {gpus}", predict(model, parse_cluster(f"{gpus}xh100"), plan)
    for name, fields in ZERO.items():
        plan = ParallelPlan(precision="bf16-master", **fields)
        yield f"llama-2-7b, {name}", predict(preset("llama-2-7b"), parse_cluster("8xh100"), plan)


def graded() -> Iterator[tuple[str, Prediction]]:
    """The steps measured on an H200 and on two cores."""
    here = local_gpu(calibration.load(H200), 1, ("NVIDIA H200",))
    for name, batch in (("gpt2-124m", 8), ("gpt2-124m", 32), ("tinyllama-1.1b", 4), ("tinyllama-1.1b", 8)):
        model, plan = preset(name).replace(dropout=0.0), ParallelPlan(microbatch=batch, precision="bf16")
        codes: tuple[Code, ...] = ("compiled", "eager")
        for code in codes:
            found = predict(model, here.cluster, plan, rates=here.rates, code=code, graph=code == "compiled")
            yield f"{name} x {batch}, {code}", found
    cores = two_cores()
    for name, fields in LAYOUTS.items():
        plan = ParallelPlan(precision="fp32", **fields)
        here = local_cpu(cores, plan.world, 2, 24 << 30)
        yield f"tiny, {name}", predict(preset("tiny"), here.cluster, plan, rates=here.rates)


def figures() -> dict[str, dict[str, float]]:
    return {
        name: {"step_time_s": found.step_time_s, "total_bytes": found.memory.total_bytes, "mfu": found.mfu}
        for name, found in (*published(), *graded())
    }


def test_published_and_graded_figures_stay_within_a_percent() -> None:
    kept, now = json.loads(KEPT.read_text()), figures()
    assert now.keys() == kept.keys()
    for name, values in now.items():
        assert values == pytest.approx(kept[name], rel=0.01), name


if __name__ == "__main__":
    KEPT.write_text(json.dumps(figures(), indent=1) + "\n")
