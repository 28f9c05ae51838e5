"""Recompute the tuner's claim from recorded trials: within 2 % of the grid's best in at most a quarter of its trials.

    python benchmarks/tuner_claim.py [benchmarks/results/matmul_grid_h200_float16.jsonl]

The search is run again as the tuner runs it, except that `measure` looks trials up in the file.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from tilemesh.core.hardware import DEVICES
from tilemesh.kernels.matmul.config import TILE_KINDS, Config, from_dict, space
from tilemesh.kernels.matmul.cost import predict_s, rates_of
from tilemesh.kernels.matmul.problem import dense
from tilemesh.kernels.matmul.tuning import TUNING
from tilemesh.kernels.tuning import search
from tilemesh.kernels.tuning.tuner import SHARE

WITHIN = 1.02
RECORDED = Path(__file__).parent / "results" / "matmul_grid_h200_float16.jsonl"


def read_trials(path: str | Path) -> dict[str, dict[Config, float]]:
    """Seconds by problem and configuration; a trial that failed is infinite."""
    found: dict[str, dict[Config, float]] = {}
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["config"]["kind"] in TILE_KINDS:
            seconds = math.inf if line["seconds"] is None else float(line["seconds"])
            found.setdefault(line["problem"], {})[from_dict(line["config"])] = seconds
    return found


def replay(key: str, trials: dict[Config, float]) -> tuple[int, int, float]:
    """(size of the grid, trials made, found / best of the grid)."""
    shape, dtype, _, c_kind, activation = key.split(" ")
    m, n, k = (int(side) for side in shape.split("x"))
    problem = dense(m, n, k, dtype=dtype, c_kind=c_kind, activation=activation)
    rates = rates_of(DEVICES["h200"], dtype)
    grid = space(problem)
    if missing := [config.label for config in grid if config not in trials]:
        raise SystemExit(f"{key}: {len(missing)} of the grid's {len(grid)} trials are not recorded, as {missing[0]}")
    hopeful = search.prune(grid, [predict_s(problem, config, rates) for config in grid])
    made = search.search(
        hopeful,
        lambda config: predict_s(problem, config, rates),
        lambda batch: [trials[config] for config in batch],
        len(grid) // SHARE,
        TUNING.features,
    )
    return len(grid), len(made), search.best(made).seconds / min(trials[config] for config in grid)


def main() -> int:
    kept = True
    for key, trials in read_trials(sys.argv[1] if len(sys.argv) > 1 else RECORDED).items():
        grid, made, ratio = replay(key, trials)
        holds = ratio <= WITHIN and made * SHARE <= grid
        kept = kept and holds
        print(f"{key}: grid of {grid}, {made} trials, found {ratio:.4f} of the best: {'holds' if holds else 'FAILS'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
