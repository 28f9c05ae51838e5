"""A model's training step as `tilemesh bench graph` times it, in a process that may compile beside others.

Timing waits for a file that all of them lock, until nobody compiles and nobody else is timed: models compile at once
and are timed one after the other on a quiet machine. Rows go into OUT/MODEL.jsonl; with --profile the kernels of a
step, longest first, into OUT/MODEL.WAY.txt, and our programs into OUT/MODEL.programs.txt. With --first only the first
step of one way is timed, in a process that compiled nothing before and has not loaded a compiler: OUT/first.jsonl gets
a line. With --stages it is not timed, and OUT/MODEL.WAY.first.txt gets a profile of it.
"""

from __future__ import annotations

import argparse
import cProfile
import fcntl
import json
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from tilemesh.bench.graph.models import SIZES, ModelSize, make_trained
from tilemesh.measure.machine import stamp


@contextmanager
def alone(file: TextIO) -> Iterator[None]:
    """While this process times. Before and after, it holds the lock together with others that compile."""
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
    fcntl.flock(file, fcntl.LOCK_SH)


def timed(function: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    """The function, with its seconds added to a part."""

    def call(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - began

    return call


def first_step(
    name: str, size: ModelSize, dtype: torch.dtype, device: torch.device, way: str, out: Path, stages: bool
) -> None:
    """Seconds of the first step of a compiled model. An eager step before it sets torch's own libraries up."""
    trained = make_trained(name, size, dtype, device)
    trained.step(trained.module)
    profile = cProfile.Profile() if stages else None
    began = time.perf_counter()
    if profile:
        profile.enable()
    backend: Any = "inductor"
    spent: dict[str, float] = {}
    if way == "ours":  # as torch finds it by name: its entry point is imported now
        from tilemesh.graph import backend as own

        spent["importing ours"] = time.perf_counter() - began
        backend = own.tilemesh
        own.compiled = timed(own.compiled, "our programs", spent)
        own.AheadCompilers.__exit__ = timed(own.AheadCompilers.__exit__, "waiting for kernels", spent)  # type: ignore[method-assign]
    trained.step(torch.compile(trained.module, backend=backend))
    if device.type == "cuda":
        torch.cuda.synchronize()
    if profile:
        profile.disable()
        with (out / f"{name}.{way}.first.txt").open("w") as file:
            pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats(120)
        return
    seconds = time.perf_counter() - began
    parts = {key: round(sum(times), 3) for key, times in torch._dynamo.utils.compilation_time_metrics.items()}
    if way == "ours":
        parts |= {"our programs": 0.0, "waiting for kernels": 0.0} | spent
    line = json.dumps(
        {"model": name, "way": way, "first step": seconds, "parts": parts, "dtype": str(dtype), **stamp()}
    )
    with (out / "first.jsonl").open("a") as file:
        file.write(line + "\n")
    print(f"{name} by {way}: first step {seconds:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", help="of the files, where it is not the model's")
    parser.add_argument("--size", default="small")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", default="eager")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--first", choices=["ours", "compile"], help="time only the first step of this way")
    parser.add_argument("--stages", action="store_true")
    given = parser.parse_args()
    device = torch.device(given.device)
    if given.first:
        dtype = getattr(torch, given.dtype)
        first_step(given.model, SIZES[given.size], dtype, device, given.first, given.out, given.stages)
        return
    from tilemesh.bench.graph.run import bench_model
    from tilemesh.bench.train.rank import kernels
    from tilemesh.measure.row import write_rows
    from tilemesh.measure.table import print_rows

    name = given.name or given.model
    lock = (given.out / "timing.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_SH)

    def profile(way: str, step: Callable[[], object]) -> None:
        lines = [
            f"{seconds * 1e3:9.3f} ms {calls:6.1f} x {name[:150]}" for seconds, calls, name in kernels(step, device)
        ]
        (given.out / f"{name}.{way}.txt").write_text("\n".join(lines) + "\n")

    found = bench_model(
        given.model,
        SIZES[given.size],
        dtype=getattr(torch, given.dtype),
        device=device,
        peers=given.peers.split(","),
        repeats=given.repeats,
        seconds=given.seconds,
        alone=alone(lock),
        watch=profile if given.profile else None,
    )
    write_rows(found.rows, str(given.out / f"{name}.jsonl"))
    if given.profile:
        programs = [f"{piece.graph}\n" for piece in found.pieces if piece.graph is not None]
        (given.out / f"{name}.programs.txt").write_text("\n".join(programs))
    made = found.figures
    print(f"{given.model}: {made.operators} operators became {made.launches}, {made.opaque} of them torch's own")
    for reason in made.refused:
        print(f"  as torch traced it: {reason}")
    print_rows(found.rows)


if __name__ == "__main__":
    main()
