"""Fit the model that `auto` asks about shapes nobody tuned, from committed trials, and say how well it chooses.

    PYTHONPATH=src python scripts/fit_matmul.py [--check] [--out FILE]
    PYTHONPATH=src python scripts/fit_matmul.py --trials 150 --seed 1 --out trials.jsonl [--seconds 200]

Each shape's trials weigh as much as any other's, and within a shape the more the nearer they are to its best: it is
among those that the choice is made. `--check` leaves out every sixth shape in turn, fits on the others, and prints
what share of the best trial's speed the choice has on the shapes left out. Neither needs a GPU. `--trials` makes the
trials on one: every configuration on so many shapes drawn from a seed; seed 0 is for judging (`bench kernel matmul
--drawn`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from tilemesh.bench.kernel.cases import KernelCase, drawn_matmuls
from tilemesh.core.hardware import DEVICES
from tilemesh.kernels.matmul.config import KINDS, Config, from_dict, to_dict
from tilemesh.kernels.matmul.cost import FORM, predict_s, rates_of
from tilemesh.kernels.matmul.learnt import FORMAT, Learnt, features
from tilemesh.kernels.matmul.portfolio import offered
from tilemesh.kernels.matmul.problem import Problem, dense
from tilemesh.kernels.matmul.tuning import SHORTLIST, TUNING
from tilemesh.kernels.tuning import trees

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FILES = ("matmul_untuned_trials_h200.jsonl", "matmul_grid_h200_float16.jsonl", "matmul_trials_h200_float16.jsonl")
TABLE = Path(__file__).parents[1] / "src/tilemesh/kernels/matmul/tables/nvidia-h200.trees.json"
DEVICE = DEVICES["h200"]
FOLDS = 6
NEARNESS = 1.0  # a trial twice as slow as its shape's best weighs 2**-1

Trials = dict[Problem, dict[Config, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="how well it chooses for shapes it has not seen")
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--trials", type=int, metavar="N", help="time every configuration on N drawn shapes, on a GPU")
    parser.add_argument("--seed", type=int, default=1, help="of these shapes")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further shape after so many")
    given = parser.parse_args()
    if given.trials is not None:
        if given.seed == 0 or given.out == TABLE:
            parser.error("--trials needs --out FILE, and another --seed than 0, which is for judging")
        time_trials(drawn_matmuls(given.trials, given.seed), given.seconds, given.out)
        return
    trials = read()
    print(f"{sum(map(len, trials.values()))} trials of {len(trials)} shapes")
    if given.check:
        check(trials)
        return
    model = learn(trials)
    kinds = sorted({problem.c_kind for problem in trials})
    body = {"format": FORMAT, "gpu": "NVIDIA H200", "c_kinds": kinds, "model": trees.to_dict(model.model)}
    given.out.write_text(json.dumps(body, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"wrote {given.out}, {given.out.stat().st_size} bytes")


def time_trials(cases: list[KernelCase], limit_s: float, path: Path) -> None:
    """One JSON object per configuration of a shape, kernel time; written shape by shape."""
    import torch

    from tilemesh.kernels.matmul.trial import MatmulBench
    from tilemesh.kernels.tuning.compiler import Compiler

    device, began = torch.device("cuda", torch.cuda.current_device()), time.monotonic()
    problems = [FORM.problem(case.shape, case.settings) for case in cases]
    work = [(problem, [Config("torch"), *offered(problem)]) for problem in problems]
    with Compiler(device) as compiler:
        failures = compiler.ahead(TUNING, [(problem, config) for problem, configs in work for config in configs])
    with path.open("w", encoding="utf-8") as out:
        for done, (problem, configs) in enumerate(work):
            if time.monotonic() - began > limit_s:
                print(f"stopped after {done} of {len(work)} shapes: time is up", flush=True)
                return
            bench = MatmulBench(problem, device)
            for config in configs:
                reason = failures.get((problem.key, config))
                trial = None if reason else bench.time(config)
                failure = reason or (trial.failure if trial else None)
                seconds = None if trial is None or failure else trial.seconds
                line = {"problem": problem.key, "config": to_dict(config), "seconds": seconds, "failure": failure}
                out.write(json.dumps(line) + "\n")
            out.flush()


def read() -> Trials:
    trials: Trials = defaultdict(dict)
    for name in FILES:
        for line in (RESULTS / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("seconds") and row["config"]["kind"] in KINDS:
                trials[problem_of(row["problem"])][from_dict(row["config"])] = row["seconds"]
    return trials


def problem_of(key: str) -> Problem:
    shape, dtype, layout, c_kind, activation = key.split(" ")
    m, n, k = (int(side) for side in shape.split("x"))
    return dense(m, n, k, dtype=dtype, layout=layout.removesuffix("u"), c_kind=c_kind, activation=activation)


def learn(trials: Trials) -> Learnt:
    rows, targets, weights = [], [], []
    for problem, times in trials.items():
        rates = rates_of(DEVICE, problem.dtype)
        ours = {config: seconds for config, seconds in times.items() if config.kind != "torch"}
        best = min(ours.values())
        nearness = [(best / seconds) ** NEARNESS for seconds in ours.values()]
        share = min(1.0, 40 / len(ours))  # a whole grid of one shape counts as forty trials
        for (config, seconds), near in zip(ours.items(), nearness, strict=True):
            rows.append(features(problem, config, rates))
            targets.append(math.log(seconds / predict_s(problem, config, rates)))
            weights.append(near * share)
    return Learnt(trees.fit(np.array(rows), targets, weights), tuple(sorted({p.c_kind for p in trials})))


def check(trials: Trials) -> None:
    problems = list(trials)
    kept, over_eager, places = [], [], []
    for fold in range(FOLDS):
        left_out = [p for n, p in enumerate(problems) if n % FOLDS == fold]
        model = learn({p: times for p, times in trials.items() if p not in left_out})
        for problem in left_out:
            times = trials[problem]
            configs = [config for config in offered(problem) if config in times]
            expected = model.expected_s(problem, configs, rates_of(DEVICE, problem.dtype))
            ranked = [config for _, config in sorted(zip(expected, configs, strict=True), key=lambda pair: pair[0])]
            taken, best = times[ranked[0]], min(times[config] for config in configs)
            kept.append(best / taken)
            places.append(next(place for place, config in enumerate(ranked) if times[config] <= 1.01 * best))
            over_eager.append(times[Config("torch")] / taken)
            if kept[-1] < 0.9:
                print(f"  {kept[-1]:.2f} {problem.key}: took {ranked[0].label}")
        print(f"fold {fold + 1} of {FOLDS} done", flush=True)
    for least in (0.98, 0.95, 0.9):
        print(f"at least {least} of the best trial: {sum(share >= least for share in kept)} of {len(kept)}")
    print(f"within 1 % of the best trial among the first {SHORTLIST} expected: "
          f"{sum(place < SHORTLIST for place in places)} of {len(places)}")  # fmt: skip
    print(f"geometric mean {statistics.geometric_mean(kept):.3f} of the best trial, "
          f"{statistics.geometric_mean(over_eager):.2f} times eager (lowest {min(over_eager):.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
