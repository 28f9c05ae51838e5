"""Shapes nobody tuned: trials that a model learns from, and a judgement of what `auto` takes on other ones.

    PYTHONPATH=src python benchmarks/untuned_matmul.py trials --seed 1 --count 150 --out trials.jsonl [--seconds 200]
    PYTHONPATH=src python benchmarks/untuned_matmul.py judge --out rows.jsonl [--autotune 12] [--warm 8] [--each 0.3]

Shapes are drawn from a seed: sizes 1 to 16,384 (even in their logarithm; seven in ten from 64 up), half of them
multiples of 64, a quarter of 8 and a quarter anything; four layouts; float16 and bfloat16; C of D's shape, and relu.
`judge` draws with seed 0, which no trial may use; there `auto` meets eager, addmm and torch.compile, and max-autotune
on the first few, in kernel time and in call time. One JSON object a line. `--warm N`: first let N processes compile
torch.compile's kernels of all shapes into its cache on disk; without it they are compiled one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tilemesh.kernels.matmul import reference
from tilemesh.kernels.matmul.choose import choose
from tilemesh.kernels.matmul.config import Config, to_dict
from tilemesh.kernels.matmul.portfolio import offered
from tilemesh.kernels.matmul.problem import LAYOUTS, Problem, dense
from tilemesh.kernels.matmul.trial import MatmulBench, MatmulInputs
from tilemesh.kernels.matmul.tuning import TUNING
from tilemesh.kernels.tuning.compiler import Compiler
from tilemesh.measure.gpu import call_timer
from tilemesh.measure.machine import stamp
from tilemesh.measure.timing import compare

LARGEST = 16384
COMMON = 64  # seven sides in ten are at least this long
MULTIPLES = (64, 64, 8, 1)
JUDGED = 60


def draw(count: int, seed: int) -> list[Problem]:
    """Problems of random shapes, the same for the same seed."""
    chance = random.Random(seed)

    def side(multiple: int) -> int:
        least = 1 if chance.random() < 0.3 else COMMON
        size = round(least * (LARGEST / least) ** chance.random())
        return max(1, size) if multiple == 1 or size < multiple else round(size / multiple) * multiple

    found = []
    for _ in range(count):
        multiple = chance.choice(MULTIPLES)
        m, n, k = (side(multiple) for _ in range(3))
        layout, dtype = chance.choice(LAYOUTS), chance.choice(("float16", "bfloat16"))
        found.append(dense(m, n, k, dtype=dtype, layout=layout))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("trials", "judge", "compile"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--autotune", type=int, default=12, help="judge: on how many shapes max-autotune is timed")
    parser.add_argument(
        "--warm", type=int, default=0, help="judge: processes that compile torch.compile's kernels first"
    )
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="compile: which of how many parts")
    parser.add_argument("--clocks", default="kernel,call", help="judge: which times are taken")
    parser.add_argument("--peers", default="eager,addmm,compile", help="judge: beside which of these")
    parser.add_argument("--each", type=float, default=1.0, help="judge: seconds of timing per shape and clock")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long; what is done is written")
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    if given.what == "compile":
        compile_part(draw(JUDGED, 0), device, *given.part)
        return
    with Path(given.out).open("w", encoding="utf-8") as out:
        if given.what == "trials":
            if given.seed == 0:
                raise SystemExit("seed 0 is for the judgement: take another for trials")
            trials(draw(given.count, given.seed), device, given.seconds, out)
        else:
            judge(draw(JUDGED, 0), device, given, out)


def trials(problems: list[Problem], device: torch.device, limit_s: float, out) -> None:
    began = time.monotonic()
    work = [(problem, [Config("torch"), *offered(problem)]) for problem in problems]
    with Compiler(device) as compiler:
        failures = compiler.ahead(TUNING, [(problem, config) for problem, configs in work for config in configs])
    print(
        f"{sum(len(c) for _, c in work)} compiled in {time.monotonic() - began:.0f} s, {len(failures)} failed",
        flush=True,
    )
    for done, (problem, configs) in enumerate(work):
        if time.monotonic() - began > limit_s:
            print(f"stopped after {done} of {len(work)} shapes: time is up", flush=True)
            return
        bench = MatmulBench(problem, device)
        for config in configs:
            reason = failures.get((problem.key, config))
            trial = None if reason else bench.time(config)
            seconds = trial.seconds if trial and not trial.failure else None
            failure = reason or (trial.failure if trial else None)
            line = {"problem": problem.key, "config": to_dict(config), "seconds": seconds, "failure": failure}
            out.write(json.dumps(line) + "\n")
        out.flush()


def compile_part(problems: list[Problem], device: torch.device, part: int, parts: int) -> None:
    """Compile torch.compile's kernels of some of the shapes: its cache on disk then has them for another process."""
    for problem in problems[part::parts]:
        _calls(MatmulBench(problem, device, seed=7), autotune=False)["compile"](0)


def warm(processes: int) -> None:
    command = [sys.executable, __file__, "compile", "--out", os.devnull, "--part"]
    started = [subprocess.Popen([*command, str(part), str(processes)]) for part in range(processes)]
    for process in started:
        process.wait()


def judge(problems: list[Problem], device: torch.device, given: argparse.Namespace, out) -> None:
    began, marks = time.monotonic(), stamp()
    if given.warm:
        warm(given.warm)
        print(f"torch.compile's kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    chosen = [choose(problem, "auto", None, device) for problem in problems]
    with Compiler(device) as compiler:
        compiler.ahead(TUNING, list(zip(problems, chosen, strict=True)))
    print(f"compiled ahead in {time.monotonic() - began:.0f} s", flush=True)
    ratios: dict[str, list[float]] = {"kernel": [], "call": []}
    for number, (problem, config) in enumerate(zip(problems, chosen, strict=True)):
        if time.monotonic() - began > given.seconds:
            print(f"stopped after {number} of {len(problems)} shapes: time is up", flush=True)
            break
        bench = MatmulBench(problem, device, seed=7)
        calls = _calls(bench, autotune=number < given.autotune, peers=given.peers.split(","))
        wrong = bench.wrong(bench.runner(config))
        timers = {"kernel": bench.timer, "call": call_timer(device)}
        for clock, timer in ((name, timers[name]) for name in given.clocks.split(",")):
            result = compare(calls, timer=timer, repeats=11, sets=len(bench.sets), seconds=given.each)
            medians = {name: sample.median for name, sample in result.items()}
            peers = {name: seconds for name, seconds in medians.items() if name != "ours"}
            against = min(peers.values()) if clock == "kernel" else medians["eager"]
            ratio = against / medians["ours"]
            ratios[clock].append(ratio)
            row = {"problem": problem.key, "clock": clock, "config": config.label, "ratio": ratio, "wrong": wrong}
            spread = [result["ours"].p20, result["ours"].p80]
            out.write(json.dumps(row | {"median_s": medians, "ours_p20_p80": spread, **marks}) + "\n")
            print(f"{clock:6} {ratio:5.2f} {medians['ours'] * 1e6:9.1f} us {problem.key} {config.label}"
                  f"  best {min(peers, key=peers.get)}{' WRONG ' + wrong if wrong else ''}", flush=True)  # fmt: skip
        out.flush()
    for clock, values in ((clock, values) for clock, values in ratios.items() if values):
        near = sum(value >= 0.98 for value in values)
        print(f"{clock}: {near} of {len(values)} at 0.98 or more, lowest {min(values):.3f}, "
              f"geometric mean {statistics.geometric_mean(values):.3f}", flush=True)  # fmt: skip


def _calls(
    bench: MatmulBench, autotune: bool, peers: Sequence[str] = ("eager", "addmm", "compile")
) -> dict[str, Callable[[int], object]]:
    from tilemesh.kernels import fused_matmul

    activation, sets = bench.problem.activation, bench.sets

    def eager(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> torch.Tensor:
        return reference.fused_matmul(a, b, c, activation)

    def addmm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.addmm(c, a, b).relu_()

    torch._dynamo.reset()
    known = {"eager": eager, "addmm": addmm, "compile": torch.compile(eager, dynamic=False)}
    functions = {name: known[name] for name in peers}
    if autotune:
        functions["max-autotune"] = torch.compile(eager, dynamic=False, mode="max-autotune-no-cudagraphs")
    functions["ours"] = lambda a, b, c: fused_matmul(a, b, c, activation=activation)

    def over(function: Callable[..., object]) -> Callable[[int], object]:
        return lambda index: function(*_given(sets[index]))

    calls = {}
    for name, function in functions.items():
        try:
            over(function)(0)
        except Exception as error:
            print(f"{bench.problem.key} {name}: {str(error)[:200]}", file=sys.stderr, flush=True)
        else:
            calls[name] = over(function)
    return calls


def _given(inputs: MatmulInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return inputs.given


if __name__ == "__main__":
    main()
