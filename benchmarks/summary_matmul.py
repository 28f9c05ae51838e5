"""The suite's rows boiled down: speedups over each peer, the geometric mean, and the distance to `a @ b` alone.

    python benchmarks/summary_matmul.py benchmarks/results/matmul_rows_h200_float16.jsonl […]

Prints a Markdown table; every number is computed from the rows.
"""

from __future__ import annotations

import math
import sys

from tilemesh.bench.kernel.matmul import ALONE
from tilemesh.measure.row import Row, read_rows

COLUMNS = ("eager", "addmm", "compile", "compile max-autotune", ALONE)
NOT_SLOWER = 0.98  # of a peer's speed, by medians


def main() -> None:
    rows = [row for path in sys.argv[1:] for row in read_rows(path)]
    for dtype in dict.fromkeys(row.case["dtype"] for row in rows):
        for figure in ("kernel", "call"):
            some = [row for row in rows if row.case["time"] == figure and row.case["dtype"] == dtype]
            print(f"\n{dtype}, {figure} time, µs (ratio: peer / ours)\n")
            print("| M×N×K | ours | " + " | ".join(COLUMNS) + " | slower than a peer? |")
            print("|---" * (len(COLUMNS) + 3) + "|")
            for row in some:
                print(line(row))
            print(
                f"\ngeometric mean over eager: {mean([row.speedup['eager'] for row in some]):.3f} ({len(some)} shapes)"
            )


def line(row: Row) -> str:
    assert row.measured is not None
    cells = [str(row.case["shape"]).replace("x", "×"), f"{row.measured.median * 1e6:.1f}"]
    for name in COLUMNS:
        peer = row.peers.get(name)
        cells.append("" if peer is None else f"{peer.median * 1e6:.1f} ({row.speedup[name]:.2f})")
    slower = [f"{name} {ratio:.3f}" for name, ratio in row.speedup.items() if name != ALONE and ratio < NOT_SLOWER]
    return "| " + " | ".join([*cells, ", ".join(slower) or "no"]) + " |"


def mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


if __name__ == "__main__":
    main()
