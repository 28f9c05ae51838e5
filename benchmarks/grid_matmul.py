"""Time every configuration of the tuner's grid, for some shapes: the data that the tuner's claim is computed from.

    python benchmarks/grid_matmul.py --out trials.jsonl 2048x2048x2048 8192x8192x1024 64x4096x4096

One JSON object a line: problem key, configuration, median seconds of kernel time (or why there are none).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from tilemesh.kernels.matmul.config import Config, from_dict, space, to_dict
from tilemesh.kernels.matmul.problem import dense
from tilemesh.kernels.matmul.trial import MatmulBench
from tilemesh.kernels.matmul.tuning import TUNING
from tilemesh.kernels.tuning.compiler import Compiler

SUITE = (
    "512x512x512 1024x1024x1024 2048x2048x2048 4096x4096x4096 8192x8192x8192 4096x11008x4096 8192x8192x1024 "
    "64x4096x4096 16x8192x8192 2049x2047x2051 4096x4096x512 128x28672x8192 8192x128x8192 3000x3000x3000"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help="MxNxK; all of the suite when none is given")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--extra", help="a file of more configurations, one JSON object a line: {shape, config}")
    parser.add_argument("--only-extra", action="store_true")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop taking trials after this long")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    started = time.monotonic()
    work = []
    for shape in arguments.shapes or SUITE.split():
        m, n, k = (int(side) for side in shape.split("x"))
        problem = dense(m, n, k, dtype=arguments.dtype)
        configs = (
            [Config("library"), Config("torch")]
            if arguments.only_extra
            else [Config("library"), Config("torch"), *space(problem)]
        )
        if arguments.extra:
            lines = [json.loads(line) for line in Path(arguments.extra).read_text().splitlines()]
            configs += [from_dict(line["config"]) for line in lines if line["shape"] in (shape, "*")]
        work.append((problem, list(dict.fromkeys(configs))))
    with Compiler(device) as compiler:
        failures = compiler.ahead(TUNING, [(problem, config) for problem, configs in work for config in configs])
    print(f"compiled ahead in {time.monotonic() - started:.0f} s, {len(failures)} failed", flush=True)
    with Path(arguments.out).open("w") as out:
        for problem, configs in work:
            if time.monotonic() - started > arguments.seconds:
                print(f"{problem.key}: left out, time is up", flush=True)
                continue
            run_one(problem, configs, failures, device, out)


def run_one(problem, configs, failures, device, out) -> None:
    began = time.monotonic()
    bench = MatmulBench(problem, device)
    best, failed = [], 0
    for config in configs:
        if (problem.key, config) in failures:
            out.write(line(problem, config, None, failures[problem.key, config]))
            failed += 1
            continue
        trial = bench.time(config)
        out.write(line(problem, config, None if trial.failure else trial.seconds, trial.failure))
        out.flush()
        if trial.failure:
            failed += 1
            if failed < 4:
                print("  failed:", config.label, trial.failure[:200], file=sys.stderr, flush=True)
        best.append((trial.seconds, config))
    alone = time_alone(bench)
    out.write(
        json.dumps({"problem": problem.key, "config": {"kind": "matmul alone"}, "seconds": alone, "failure": None})
        + "\n"
    )
    best.sort(key=lambda pair: pair[0])
    took = time.monotonic() - began
    print(f"{problem.key}: {len(configs)} configurations in {took:.0f} s, {failed} failed", flush=True)
    builtin = {config.kind: seconds for seconds, config in best if config.kind in ("library", "torch")}
    for seconds, config in best[:4]:
        print(f"   {seconds * 1e6:9.2f} us  {config.label}", flush=True)
    builtin["a @ b alone"] = alone
    print("   " + "  ".join(f"{kind} {seconds * 1e6:.2f} us" for kind, seconds in builtin.items()), flush=True)


def time_alone(bench: MatmulBench) -> float:
    """`a @ b` without an epilogue, for reference."""

    def call(index: int) -> object:
        inputs = bench.sets[index]
        return torch.mm(inputs.a, inputs.b, out=inputs.d)

    ready = bench.timer.prepare(call, sets=len(bench.sets), warmup=1)
    return statistics.median(ready.read().seconds for _ in range(5))


def line(problem, config, seconds, failure) -> str:
    return (
        json.dumps({"problem": problem.key, "config": to_dict(config), "seconds": seconds, "failure": failure}) + "\n"
    )


if __name__ == "__main__":
    main()
