"""Operators beside their peers on this GPU in little time: processes that compile together and measure in turn.

    PYTHONPATH=src:FOLDER_OF_LIGER python benchmarks/kernels_h200.py FOLDER [--seconds 150] [--jobs norms,loss]

Most of `tilemesh bench kernel` is waiting for torch.compile. Here each job is a process of its own: it makes inputs,
compiles what it will time, and waits. When all are ready, or --ready seconds have passed, one after the other measures,
so that none is disturbed; who is late comes last. Rows are those of the command they name; FOLDER/kernels.jsonl has
the rows of every job as it ends, in the order below, and FOLDER/untuned_calls.jsonl those of products.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

REPEATS = 8
BEHIND = (  # shapes of `untuned_matmul.py judge` whose calls took longer than eager's
    "659x143x4940", "9840x304x1976", "2x400x456", "64x19x64", "125x26x152", "665x3x56", "646x7710x260",
    "331x1375x1715", "80x1x2",
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """Some shapes of an operator as `tilemesh bench kernel` times them. peers: `all`, or names with commas between."""

    operator: str
    shapes: str
    peers: str = "all"
    times: str = "kernel,call"
    both: bool = False
    mask: str = ""

    @property
    def settings(self) -> dict[str, str]:
        return ({"mask": self.mask} if self.mask else {}) | ({"passes": "both"} if self.both else {})

    @property
    def words(self) -> list[str]:
        """Of the command that makes the same rows."""
        words = ["bench", "kernel", self.operator, "--shapes", self.shapes]
        for name, value in self.settings.items():
            words += ["--set", f"{name}={value}"]
        words += ["--peers", self.peers] * (self.peers != "all") + ["--times", self.times] * ("," not in self.times)
        return ["tilemesh", *words, "--repeats", str(REPEATS), "--json", "rows.jsonl"]


def calls(operator: str, shapes: str, both: bool = False) -> Timed:
    return Timed(operator, shapes, "eager", "call", both)


def both_ways(timed: Timed) -> tuple[Timed, Timed]:
    return timed, replace(timed, both=True)


SIZES = "16384x1024,32x64"
NORMED = "32768x768,16384x4096,8192x8192"
# Every target of docs/kernels/LOG.md has its row here. In the order of their worth: where time ends, the last ones are
# left out.
JOBS: dict[str, tuple[Timed, ...]] = {
    "layer_norm": (Timed("layer_norm", NORMED, times="kernel", both=True),),
    "rms_norm": (Timed("rms_norm", NORMED, times="kernel", both=True),),
    "layer_norm_forward": (Timed("layer_norm", NORMED, times="kernel"),),
    "rms_norm_forward": (Timed("rms_norm", NORMED, times="kernel"),),
    "softmax": (Timed("softmax", "16384x1024,8192x8192,4096x32768,512x262144", times="kernel"),),
    "loss": (Timed("cross_entropy", "8192x50304,8192x128256", both=True),),
    "calls": (
        *(calls(name, SIZES) for name in ("softmax", "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")),
        *(calls(name, SIZES) for name in ("cross_entropy", "swiglu", "geglu", "scale_shift")),
        calls("rotary", "8x2048x32x64,1x64x4x64"),
        calls("attention", "1x64x4x1x64"),
        calls("mlp", "32x64x128"),
        calls("linear_cross_entropy", "32x64x1000"),
    ),
    "calls_both": (
        *(calls(name, SIZES, True) for name in ("softmax", "rms_norm", "layer_norm", "add_rms_norm", "swiglu")),
        *(calls(name, SIZES, True) for name in ("add_layer_norm", "cross_entropy", "geglu")),
    ),
    "attention": both_ways(Timed("attention", "4x4096x8x4x128,2x8192x8x4x128,1x16384x8x4x128", "cuDNN", "kernel")),
    "attention_64": both_ways(Timed("attention", "8x2048x16x1x64,4x4096x16x1x64,1x16384x16x1x64", "cuDNN", "kernel")),
    "window": both_ways(Timed("attention", "4x4096x8x4x128", "flex_attention", "kernel", mask="window")),
    "packed": both_ways(Timed("attention", "4x4096x8x4x128", "flex_attention", "kernel", mask="packed")),
    "linear_loss": (Timed("linear_cross_entropy", "8192x768x50304", both=True),),
    "adamw": (Timed("adamw", "148x838656,16x65536"),),
    "mlp": (Timed("mlp", "32768x768x3072", times="kernel", both=True),),
    "linear_loss_wide": (Timed("linear_cross_entropy", "8192x4096x128256", both=True),),
    "gated": (
        *both_ways(Timed("swiglu", "16384x5632", times="kernel")),
        *both_ways(Timed("geglu", "16384x5632", times="kernel")),
    ),
    "elements": (
        *both_ways(Timed("rotary", "8x2048x32x128", times="kernel")),
        Timed("scale_shift", "16384x1024", times="kernel"),
    ),
    "adds": (
        *both_ways(Timed("add_rms_norm", "16384x4096", times="kernel")),
        *both_ways(Timed("add_layer_norm", "32768x768", times="kernel")),
    ),
    "embedding": (Timed("embedding", "32768x768x50304", times="kernel", both=True),),
    "untuned": (),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=150, help="end what is running after so many")
    parser.add_argument("--ready", type=float, default=45, help="seconds that jobs may take to compile")
    parser.add_argument("--jobs", default=",".join(JOBS), help="names with commas between, in their order")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # of the process that measures: its name
    given = parser.parse_args()
    names = given.jobs.split(",")
    unknown = [name for name in names if name not in JOBS]
    if unknown:
        parser.error(f"no job is called {unknown[0]}: {', '.join(JOBS)}")
    if given.job is not None:
        measure(given.job, given.folder)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        take_turns(names, Path(place), given)


# ---- the process that gives turns --------------------------------------------------------------------------------


def take_turns(names: Sequence[str], place: Path, given: argparse.Namespace) -> None:
    begun = time.monotonic()
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # as many processes as there are cores compile
    started = {
        name: subprocess.Popen([sys.executable, __file__, str(place), "--job", name], env=environment)
        for name in names
    }  # fmt: skip

    def is_ready(name: str) -> bool:
        return (place / f"{name}.ready").exists()

    def is_over(name: str) -> bool:
        return started[name].poll() is not None

    try:
        wait_until(lambda: all(is_ready(name) or is_over(name) for name in names), begun + given.ready)
        left = list(names)
        print(f"== {sum(map(is_ready, left))} of {len(left)} ready: {time.monotonic() - begun:.0f} s", flush=True)
        while left and time.monotonic() < begun + given.seconds:
            wait_until(lambda: any(is_ready(name) or is_over(name) for name in left), begun + given.seconds)
            name = next((name for name in left if is_ready(name) or is_over(name)), left[0])
            left.remove(name)
            (place / f"{name}.turn").touch()
            wait_until(lambda name=name: is_over(name), begun + given.seconds)
            started[name].kill()
            gather(names, place, given.folder)
            print(f"== {name}: {time.monotonic() - begun:.0f} s", flush=True)
        print(f"not measured: {', '.join(left) or 'none'}", flush=True)
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def wait_until(holds: Callable[[], bool], end: float) -> None:
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)


def gather(names: Sequence[str], place: Path, folder: Path) -> None:
    for kind, target in (("rows", "kernels.jsonl"), ("untuned", "untuned_calls.jsonl")):
        parts = [place / f"{name}.{kind}" for name in names]
        text = "".join(part.read_text(encoding="utf-8") for part in parts if part.exists())
        if text:
            (folder / target).write_text(text, encoding="utf-8")


# ---- a process that measures -------------------------------------------------------------------------------------


def measure(name: str, place: Path) -> None:
    from tilemesh.bench.kernel.measure import this_gpu
    from tilemesh.measure.row import Row, write_rows

    on = this_gpu()
    if name == "untuned":
        measure_untuned(on.device, place)
        return
    prepared = [(timed, case) for timed in JOBS[name] for case in prepare(timed, on)]
    for _, case in prepared:
        case.warm()
    wait_for_turn(name, place)
    rows: list[Row] = []
    for timed, case in prepared:
        sys.argv = timed.words  # what the rows name
        try:
            rows += case.rows(REPEATS)
        except Exception as error:  # of torch, a driver or a peer; the others are worth having
            print(f"{timed.operator} {timed.shapes}: {type(error).__name__}: {error}", flush=True)
        if rows:
            write_rows(rows, place / f"{name}.rows")
    for row in rows:
        seconds = 1.0 if row.measured is None else row.measured.median
        beside = {peer: f"{sample.median / seconds:.2f}" for peer, sample in row.peers.items()}
        limit = "" if row.limit is None else f"{row.limit / seconds:.2f} of the limit"
        print(row.name, *row.case.values(), f"{seconds * 1e6:.1f} us", limit, beside, flush=True)


def prepare(timed: Timed, on):  # type: ignore[no-untyped-def]
    from tilemesh.bench.kernel.book import bench_of
    from tilemesh.bench.kernel.measure import Candidates, PreparedCase
    from tilemesh.kernels import registry

    bench, settings = bench_of(registry.find(timed.operator)), timed.settings
    wanted = None if timed.peers == "all" else timed.peers.split(",")
    on = replace(on, timers={figure: on.timers[figure] for figure in timed.times.split(",")})
    for shape in timed.shapes.split(","):
        problem = bench.form.problem(shape, settings)
        candidates = Candidates.of(bench, problem, compiled=True, wanted=wanted)
        yield PreparedCase(bench, problem, bench.form.case(shape, settings), candidates, on)


def measure_untuned(device, place: Path) -> None:  # type: ignore[no-untyped-def]
    """As `untuned_matmul.py judge --peers eager`, of those shapes alone."""
    from untuned_matmul import JUDGED, _calls, draw

    from tilemesh.kernels.matmul.choose import choose
    from tilemesh.kernels.matmul.trial import MatmulBench
    from tilemesh.measure.gpu import call_timer
    from tilemesh.measure.machine import stamp
    from tilemesh.measure.timing import compare

    problems = [problem for problem in draw(JUDGED, 0) if problem.key.split(" ")[0] in BEHIND]
    benches = [MatmulBench(problem, device, seed=7) for problem in problems]
    prepared = [_calls(bench, autotune=False, peers=["eager"]) for bench in benches]
    wait_for_turn("untuned", place)
    sys.argv = [__file__, "FOLDER", "--jobs", "untuned"]  # what the rows name
    marks = stamp()
    with (place / "untuned.untuned").open("w", encoding="utf-8") as out:
        for problem, bench, both in zip(problems, benches, prepared, strict=True):
            for clock, timer in (("call", call_timer(device)), ("kernel", bench.timer)):
                result = compare(both, timer=timer, repeats=11, sets=len(bench.sets), seconds=0.15)
                medians = {name: sample.median for name, sample in result.items()}
                ratio, config = medians["eager"] / medians["ours"], choose(problem, "auto", None, device).label
                row = {"problem": problem.key, "clock": clock, "config": config, "ratio": ratio, "median_s": medians}
                out.write(json.dumps(row | marks) + "\n")
                shown = {name: f"{seconds * 1e6:.1f}" for name, seconds in medians.items()}
                print(clock, f"{ratio:.2f}", problem.key, config, shown, flush=True)
            out.flush()


def wait_for_turn(name: str, place: Path) -> None:
    import torch

    torch.cuda.synchronize()
    (place / f"{name}.ready").touch()
    wait_until((place / f"{name}.turn").exists, time.monotonic() + 600)


if __name__ == "__main__":
    main()
