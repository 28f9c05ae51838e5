"""Measure what replaces an all-reduce while a rank is slow. Trains one model by data parallelism, BSP, SSP, ASP and
local SGD; then server traffic, compressed gradients beside torch's hooks, K-means on MapReduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tilemesh.cli.output import Output, console_beside
from tilemesh.core.advice import NextCommand
from tilemesh.core.options import ROWS, OutFile, OutPicture, option
from tilemesh.core.ranges import Range


@dataclass(frozen=True, kw_only=True)
class MethodsBenchOptions:
    slow: str = option("rank=3,factor=4", "Which worker is slow, and how much.", "rank=3,factor=4")
    steps: Annotated[int, Range(8, 10_000)] = option(
        60, "Steps per worker with a random slow one; a third of it with a fixed one.", "N"
    )
    blocks: Annotated[int, Range(1, 100)] = option(2, "How many turns each method gets.", "N")
    json: OutFile | None = option(None, ROWS, "FILE")
    chart: OutPicture | None = option(None, "Draw losses, bounds and server loads: .svg or .png.", "FILE")
    html: OutFile = option("methods.html", "The page.", "FILE")


def methods(options: MethodsBenchOptions) -> Output:
    from tilemesh.bench.methods.run import bench_methods, parse_slow
    from tilemesh.report.methods_page import drawings, render

    rank, factor = parse_slow(options.slow)
    console = console_beside(options.json)
    measured = bench_methods(rank, factor, options.steps, options.blocks, console.print)
    rows, curves, loads, bounds = measured.rows, measured.curves, measured.loads, measured.bounds
    return Output(
        [rows, *measured.notes], rows, next=NextCommand("train --mesh dp=2 --set train.method=local"),
        files={
            "chart": lambda: drawings(curves, loads, bounds),
            "html": lambda: render(rows, curves, measured.notes, loads, bounds),
        },
    )  # fmt: skip
