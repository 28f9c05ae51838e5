"""Measure what replaces an all-reduce while a rank is slow. Trains one model by data parallelism, BSP, SSP, ASP and
local SGD; then server traffic, compressed gradients beside torch's hooks, K-means on MapReduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tilemesh.cli.output import console_beside, show_rows
from tilemesh.core.options import ROWS, OutFile, option
from tilemesh.core.ranges import Range


@dataclass(frozen=True, kw_only=True)
class MethodsBenchOptions:
    slow: str = option("rank=3,factor=4", "Which worker is slow, and how much.", "rank=3,factor=4")
    steps: Annotated[int, Range(8, 10_000)] = option(
        60, "Steps per worker with a random slow one; a third of it with a fixed one.", "N"
    )
    blocks: Annotated[int, Range(1, 100)] = option(2, "How many turns each method gets.", "N")
    json: OutFile | None = option(None, ROWS, "FILE")
    chart: OutFile | None = option(None, "Draw losses, bounds and server loads: .svg or .png.", "FILE")
    html: OutFile = option("methods.html", "The page.", "FILE")


def methods(options: MethodsBenchOptions) -> None:
    from tilemesh.bench.methods.run import bench_methods, parse_slow
    from tilemesh.core.files import write_text
    from tilemesh.measure.table import print_words
    from tilemesh.report import methods_page
    from tilemesh.report.picture import check_picture, write_picture

    rank, factor = parse_slow(options.slow)
    if options.chart is not None:
        check_picture(options.chart)
    console = console_beside(options.json)
    measured = bench_methods(rank, factor, options.steps, options.blocks, console.print)
    show_rows(measured.rows, options.json, console)
    for note in measured.notes:
        print_words(note, console)
    if options.chart is not None:
        write_picture(methods_page.drawings(measured.curves, measured.loads, measured.bounds), options.chart)
    page = methods_page.render(measured.rows, measured.curves, measured.notes, measured.loads, measured.bounds)
    write_text(page, options.html)
    console.print(f"page: {options.html}", soft_wrap=True)
