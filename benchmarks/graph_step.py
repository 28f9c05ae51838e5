"""A model's training step as `tilemesh bench graph` times it, in a process that may compile beside others.

Timing waits for the file that all of them lock, so models compile at once and are timed one after the other. Rows go
into OUT/MODEL.jsonl; with --profile the kernels of a step, longest first, into OUT/MODEL.WAY.txt.
"""

from __future__ import annotations

import argparse
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tilemesh.bench.graph.models import SIZES
from tilemesh.bench.graph.run import bench_model
from tilemesh.bench.train.rank import kernels
from tilemesh.measure.row import write_rows
from tilemesh.measure.table import print_rows


@contextmanager
def alone(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="small")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", default="eager")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    device = torch.device(given.device)

    def profile(way: str, step: Callable[[], object]) -> None:
        lines = [
            f"{seconds * 1e3:9.3f} ms {calls:6.1f} x {name[:150]}" for seconds, calls, name in kernels(step, device)
        ]
        (given.out / f"{given.model}.{way}.txt").write_text("\n".join(lines) + "\n")

    found = bench_model(
        given.model,
        SIZES[given.size],
        dtype=getattr(torch, given.dtype),
        device=device,
        peers=given.peers.split(","),
        repeats=given.repeats,
        seconds=given.seconds,
        alone=alone(given.out / "timing.lock"),
        watch=profile if given.profile else None,
    )
    write_rows(found.rows, str(given.out / f"{given.model}.jsonl"))
    made = found.figures
    print(f"{given.model}: {made.operators} operators became {made.launches}, {made.opaque} of them torch's own")
    for reason in made.refused:
        print(f"  as torch traced it: {reason}")
    print_rows(found.rows)


if __name__ == "__main__":
    main()
