"""Configurations of one shape beside each other and beside `a @ b` alone, interleaved: what docs/kernels/LOG.md quotes.

    python benchmarks/compare_matmul.py --out trials.jsonl plan.txt [--dtype bfloat16] [--repeats 15]

plan.txt: one line a shape, `MxNxK: config; config; …`, a configuration as in kind=tma,block_m=64 or `auto` for what
`auto` chooses now. Behind `+` it runs after another's small kernel: `+auto`. One JSON object a line: kernel time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tilemesh.kernels.matmul.choose import choose
from tilemesh.kernels.matmul.config import Config, decode, to_dict
from tilemesh.kernels.matmul.problem import Problem, dense
from tilemesh.kernels.matmul.trial import MatmulBench
from tilemesh.kernels.matmul.tuning import TUNING
from tilemesh.kernels.tuning.compiler import Compiler
from tilemesh.measure.machine import stamp
from tilemesh.measure.timing import compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--c", default="full")
    parser.add_argument("--layout", default="nn")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    work = []
    for line in Path(given.plan).read_text().splitlines():
        shape, configs = line.split(":")
        m, n, k = (int(side) for side in shape.split("x"))
        problem = dense(m, n, k, dtype=given.dtype, c_kind=given.c, layout=given.layout)
        work.append((problem, [read(text.strip(), problem, device) for text in configs.split(";") if text.strip()]))
    with Compiler(device) as compiler:
        failures = compiler.ahead(TUNING, [(problem, config) for problem, named in work for _, config in named])
    for (key, config), reason in failures.items():
        print(f"{key} {config.label}: {reason[:300]}", file=sys.stderr, flush=True)
    with Path(given.out).open("w", encoding="utf-8") as out:
        for problem, named in work:
            run_one(problem, [pair for pair in named if (problem.key, pair[1]) not in failures], device, given, out)


def read(text: str, problem: Problem, device: torch.device) -> tuple[bool, Config]:
    behind, text = text.startswith("+"), text.removeprefix("+")
    if text.startswith("auto"):
        chosen = to_dict(choose(problem, "auto", None, device))
        extra = decode("kind=" + chosen["kind"] + text.removeprefix("auto"))
        return behind, Config(**{**chosen, **to_dict(extra)})
    return behind, decode(text)


def run_one(problem: Problem, named, device, given, out) -> None:
    bench = MatmulBench(problem, device, seed=3)
    other = torch.zeros(1 << 19, device=device, dtype=torch.float16)
    calls: dict[str, Callable[[int], object]] = {}
    for behind, config in named:
        trial = bench.time(config, readings=1)  # is it right? (every call below reuses what this compiled)
        if trial.failure:
            print(f"{problem.key} {config.label}: {trial.failure[:200]}", flush=True)
            continue
        once = bench.call(bench.runner(config))
        calls[("+" if behind else "") + config.label] = (lambda i, f=once: (other.add_(1), f(i))) if behind else once
    calls["a @ b alone"] = lambda i: torch.mm(bench.sets[i].a, bench.sets[i].b, out=bench.sets[i].d)
    result = compare(calls, timer=bench.timer, repeats=given.repeats, sets=len(bench.sets), seconds=3.0)
    marks = stamp()
    alone = result["a @ b alone"].median
    print(f"{problem.key}", flush=True)
    for name, sample in sorted(result.items(), key=lambda pair: pair[1].median):
        row = {"problem": problem.key, "config": name, "median_s": sample.median, "p20_s": sample.p20}
        row |= {"p80_s": sample.p80, **marks}
        out.write(json.dumps(row) + "\n")
        print(f"   {sample.median * 1e6:9.2f} us ({sample.median / alone:5.3f} of a @ b)  {name}", flush=True)
    out.flush()


if __name__ == "__main__":
    main()
