"""Shapes whose rows start anywhere: every way to compute them beside eager and torch.compile, interleaved, kernel time.

    PYTHONPATH=src python benchmarks/unaligned_matmul.py [--shapes 2049x2047x2051 …] [--dtypes float16 …] [--no-compile]
                                                         [--out trials.jsonl] [--repeats 15]

Each variant's result is first checked against float64 (twice eager's own error), then all are timed in turns. The
copies are timed alone as well, by words and, for comparison, element by element. A variant that cannot compute
a shape is left out. Predictions are the cost model's, made before anything is timed.

The committed results (benchmarks/results/matmul_unaligned_h200.jsonl) also hold two ways that lost and are gone: see
the third round of docs/kernels/LOG.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch

from tilemesh.kernels.launch.gpu import gpu_of
from tilemesh.kernels.launch.steps import LaunchPlan
from tilemesh.kernels.matmul import reference
from tilemesh.kernels.matmul.choose import choose
from tilemesh.kernels.matmul.config import Config, libraries, refusal
from tilemesh.kernels.matmul.cost import FORM, device_or_nearest, predict_s, rates_of
from tilemesh.kernels.matmul.plan import tiles_plan
from tilemesh.kernels.matmul.problem import Problem, dense
from tilemesh.kernels.matmul.run import TilesRunner
from tilemesh.kernels.matmul.trial import MatmulBench
from tilemesh.kernels.matmul.tuning import TUNING
from tilemesh.kernels.tuning.compiler import Compiler
from tilemesh.measure.machine import stamp
from tilemesh.measure.timing import compare

SHAPES = ("2049x2047x2051", "1001x1003x1005", "4097x4095x4099")
TILES = [
    Config("persistent", 64, 256, 64, 8, 4, split_k=5, subtile=2, tma_epilogue=True, tail=True),  # the grid's best
    Config("persistent", 64, 256, 64, 8, 4, subtile=2, tma_epilogue=True),
    Config("persistent", 128, 256, 64, 8, 3, subtile=2, tma_epilogue=True),
    Config("tma", 128, 128, 64, 4, 4),
    Config("tma", 64, 128, 64, 4, 4, c_early=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    parser.add_argument("--c", default="full")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out")
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    work = []
    for dtype in given.dtypes:
        for shape in given.shapes:
            problem = dense(*FORM.parse_sizes(shape), dtype=dtype, c_kind=given.c)
            offered = [choose(problem, "auto", None, device), *TILES, *libraries(problem)]
            work.append((problem, [c for c in dict.fromkeys(offered) if refusal(c, problem) is None]))
    with Compiler(device) as compiler:
        failures = compiler.ahead(TUNING, [(problem, config) for problem, configs in work for config in configs])
    for (key, config), reason in failures.items():
        print(f"{key} {config.label}: {reason[:300]}", file=sys.stderr, flush=True)
    with Path(given.out).open("w", encoding="utf-8") if given.out else nullcontext() as out:
        for problem, configs in work:
            usable = [config for config in configs if (problem.key, config) not in failures]
            run_one(problem, usable, device, given, out)


def run_one(problem: Problem, configs: list[Config], device: torch.device, given, out: TextIO | None) -> None:
    bench = MatmulBench(problem, device, seed=5)
    rates = rates_of(device_or_nearest(gpu_of(device.index).name), problem.dtype)
    predicted = {config.label: predict_s(problem, config, rates) for config in configs}
    calls: dict[str, Callable[[int], object]] = {}
    for config in configs:
        trial = bench.time(config, readings=1)
        if trial.failure:
            print(f"{problem.key} {config.label}: {trial.failure[:200]}", flush=True)
        else:
            calls[config.label] = bench.call(bench.runner(config))
    calls |= peers(bench, compiled=not given.no_compile) | copies(bench)
    result = compare(calls, timer=bench.timer, repeats=given.repeats, sets=len(bench.sets), seconds=1.5)
    auto = choose(problem, "auto", None, device).label
    marks = stamp()
    print(problem.key, flush=True)
    for name, sample in sorted(result.items(), key=lambda pair: pair[1].median):
        row = {"problem": problem.key, "config": name, "predicted_s": predicted.get(name), "median_s": sample.median}
        row |= {"p20_s": sample.p20, "p80_s": sample.p80, **marks}
        if out:
            out.write(json.dumps(row) + "\n")
        expected = f"{predicted[name] * 1e6:8.2f}" if name in predicted else " " * 8
        chosen = "   <- auto" if name == auto else ""
        print(f"   {sample.median * 1e6:9.2f} us  predicted {expected}  {name}{chosen}", flush=True)
    for name, why in result.missing.items():
        print(f"   {name}: {why[:200]}", flush=True)


def peers(bench: MatmulBench, compiled: bool) -> dict[str, Callable[[int], object]]:
    def eager(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> torch.Tensor:
        return reference.fused_matmul(a, b, c, bench.problem.activation)

    functions = {"peer: eager": eager}
    if compiled:
        torch._dynamo.reset()
        functions["peer: torch.compile"] = torch.compile(eager, dynamic=False)
    sets = bench.sets
    calls = {name: (lambda i, f=function: f(sets[i].a, sets[i].b, sets[i].c)) for name, function in functions.items()}
    for name, call in calls.items():
        error = (call(0)[bench.rows].double() - bench.exact).abs().max().item()
        if not error <= bench.allowed:
            print(f"{bench.problem.key} {name}: wrong result: error {error:.3g}, allowed {bench.allowed:.3g}")
    return calls


def copies(bench: MatmulBench) -> dict[str, Callable[[int], object]]:
    """The aligned copies of A and B alone, both ways."""
    problem = bench.problem
    plan = tiles_plan(problem, Config("tma", chained=False), 132)
    step = plan.steps[0]
    if step.kernel != "copy_pass":
        return {}
    plain = replace(step, constants={**step.constants, "WORDS": False, "WORDS_2": False})
    steps = {"(copies alone, by words)": step, "(copies alone, by element)": plain}
    return {
        name: bench.call(TilesRunner(LaunchPlan((one,), plan.buffers), problem, bench.device))
        for name, one in steps.items()
    }


if __name__ == "__main__":
    main()
