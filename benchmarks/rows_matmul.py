"""The rows of the fused matmul's suite, written shape by shape so that an interrupted run keeps what it has.

    python benchmarks/rows_matmul.py --out rows.jsonl [--dtype bfloat16] [--no-compile] [--seconds 300] [MxNxK …]

What `tilemesh bench kernel` measures, nothing else.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tilemesh.bench.kernel.matmul import BENCH
from tilemesh.bench.kernel.measure import bench_rows
from tilemesh.kernels.matmul.cost import SUITE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--c", default="full")
    parser.add_argument("--activation", default="relu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e9, help="after this long, leave torch.compile out")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    began = time.monotonic()
    with Path(given.out).open("w", encoding="utf-8") as out:
        for shape in given.shapes or SUITE:
            late = time.monotonic() - began > given.seconds
            settings = {"dtype": given.dtype, "c": given.c, "activation": given.activation}
            compiled = not (given.no_compile or late)
            rows = bench_rows(BENCH, [shape], settings, compiled=compiled, repeats=given.repeats)
            for row in rows:
                out.write(row.to_json() + "\n")
                out.flush()
                peers = "  ".join(f"{name} {sample.median * 1e6:.2f}" for name, sample in row.peers.items())
                ours, limit = row.measured.median * 1e6, (row.limit or 0) * 1e6
                print(f"{shape} {row.case['time']:6s} ours {ours:.2f}  {peers}  limit {limit:.2f}"
                      f"  [{row.case['config']}] {row.missing}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
