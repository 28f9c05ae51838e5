"""`tilemesh bench methods`: parameter servers, bounded staleness, compressed and local updates, MapReduce."""

from __future__ import annotations

from typing import Annotated

import typer

from tilemesh.cli.targets import check_targets


def bench_methods(
    slow: Annotated[str, typer.Option(metavar="rank=3,factor=4", help="Which worker is slow, and how much.")] = (
        "rank=3,factor=4"
    ),
    steps: Annotated[
        int,
        typer.Option(metavar="N", help="Steps per worker with a random slow one; a third of it with a fixed one."),
    ] = 60,
    blocks: Annotated[int, typer.Option(metavar="N", help="How many turns each method gets.")] = 2,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rows, one object per line; - for stdout.")
    ] = None,
    chart: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw losses, bounds and server loads: .svg or .png.")
    ] = None,
    html: Annotated[str, typer.Option(metavar="FILE", help="The page.")] = "methods.html",
) -> None:
    """Measure what replaces an all-reduce while a rank is slow. Trains one model by data parallelism, BSP, SSP, ASP and
    local SGD; then server traffic, compressed gradients beside torch's hooks, K-means on MapReduce."""
    from rich.console import Console

    from tilemesh.bench.methods.run import bench_methods as measure
    from tilemesh.bench.methods.run import parse_slow
    from tilemesh.core.errors import UsageError
    from tilemesh.core.files import write_text
    from tilemesh.measure.row import write_rows
    from tilemesh.measure.table import print_rows, print_words
    from tilemesh.report import methods_page
    from tilemesh.report.picture import check_picture, write_picture

    rank, factor = parse_slow(slow)
    if not 8 <= steps <= 10_000 or not 1 <= blocks <= 100:
        raise UsageError(f"--steps {steps} --blocks {blocks}: expected 8 to 10000 and 1 to 100")
    if chart is not None:
        check_picture(chart)
    check_targets(json=json, chart=chart, html=html)
    console = Console(stderr=json == "-", highlight=False, markup=False)
    measured = measure(rank, factor, steps, blocks, console.print)
    print_rows(measured.rows, console)
    for note in measured.notes:
        print_words(note, console)
    if json is not None:
        write_rows(measured.rows, json)
    if chart is not None:
        write_picture(methods_page.drawings(measured.curves, measured.loads, measured.bounds), chart)
    write_text(
        methods_page.render(measured.rows, measured.curves, measured.notes, measured.loads, measured.bounds), html
    )
    console.print(f"page: {html}", soft_wrap=True)
