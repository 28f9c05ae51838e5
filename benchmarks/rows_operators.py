"""Rows of every operator but the matmul beside eager torch and torch.compile on one GPU, in one process.

    PYTHONPATH=src python3 benchmarks/rows_operators.py ROWS.jsonl [--seconds 300] [--repeats 12] [operator …]

The cases that targets are about come first; when the time is up, the rest is left out and named. A case that fails is
named too, and the others go on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tilemesh.bench.kernel.book import bench_of
from tilemesh.bench.kernel.measure import bench_rows
from tilemesh.kernels import registry

FORWARD, BOTH = {"passes": "forward"}, {"passes": "both"}
CASES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("layer_norm", "32768x768", BOTH),
    ("add_layer_norm", "32768x768", BOTH),
    ("embedding", "32768x768x50304", {**BOTH, "dtype": "float32"}),
    ("adamw", "148x838656", {"dtype": "float32"}),
    ("adamw", "148x838656", {"dtype": "bfloat16"}),
    ("linear_cross_entropy", "8192x768x50304", BOTH),
    ("cross_entropy", "8192x50304", BOTH),
    ("softmax", "16384x1024", FORWARD),
    ("softmax", "4096x32768", FORWARD),
    ("rms_norm", "16384x4096", BOTH),
    ("layer_norm", "32768x768", FORWARD),
    ("layer_norm", "32x64", FORWARD),
    ("embedding", "32768x768x50304", FORWARD),
    ("embedding", "16384x2048x32000", BOTH),
    ("softmax", "8192x8192", FORWARD),
    ("softmax", "512x262144", FORWARD),
    ("layer_norm", "16384x4096", BOTH),
    ("add_rms_norm", "16384x4096", BOTH),
    ("rms_norm", "32768x768", BOTH),
    ("rms_norm", "8192x8192", BOTH),
    ("layer_norm", "8192x8192", BOTH),
    ("rms_norm", "32768x768", FORWARD),
    ("rms_norm", "16384x4096", FORWARD),
    ("rms_norm", "8192x8192", FORWARD),
    ("layer_norm", "16384x4096", FORWARD),
    ("layer_norm", "8192x8192", FORWARD),
    ("cross_entropy", "8192x128256", BOTH),
    ("linear_cross_entropy", "8192x4096x128256", BOTH),
    ("adamw", "200x5500000", {"dtype": "float32"}),
    ("softmax", "32x64", FORWARD),
    ("rms_norm", "32x64", FORWARD),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="a file that rows are added to")
    parser.add_argument("operators", nargs="*", help="of these alone")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--repeats", type=int, default=12)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    for name, shape, settings in CASES:
        if given.operators and name not in given.operators:
            continue
        if time.monotonic() > end:
            print(f"left out, the time is up: {name} {shape} {settings}", flush=True)
            continue
        try:
            rows = bench_rows(bench_of(registry.find(name)), [shape], settings, repeats=given.repeats)
        except Exception as error:  # the others are worth having
            print(f"failed: {name} {shape} {settings}: {type(error).__name__}: {error}", flush=True)
            continue
        with given.rows.open("a") as file:
            for row in rows:
                file.write(row.to_json() + "\n")
                peers = ", ".join(f"{peer} {sample.median * 1e6:.1f}" for peer, sample in row.peers.items())
                limit = "" if row.limit is None else f", limit {row.limit * 1e6:.1f}"
                print(f"{row.name} {row.case}: {row.measured.median * 1e6:.1f} µs; {peers}{limit}", flush=True)


if __name__ == "__main__":
    main()
