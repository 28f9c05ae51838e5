"""`tilemesh bench collective`: the collectives measured against the library's own; fitted; simulated; drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilemesh.core.errors import UsageError


def bench_collective(
    collectives: Annotated[
        list[str] | None, typer.Argument(metavar="[COLLECTIVE]...", help="Which; all of five.")
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks",
            help="Numbers of ranks, with commas between. [default: 2,4,8; --draw: 8; --simulate: 64,1024,16384]",
            show_default=False,
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option("--sizes", help="4B..64MiB (powers of four), or sizes with commas between.")
    ] = "4B..64MiB",
    transport: Annotated[
        str, typer.Option("--transport", help="mpi, gloo or nccl; auto takes what there is.")
    ] = "auto",
    algorithms: Annotated[
        str,
        typer.Option(
            "--algorithms", help="Besides auto, what to time or simulate: all, none, or names (native: as we call it)."
        ),
    ] = "all",
    fit: Annotated[bool, typer.Option("--fit", help="Measure and store what auto predicts from.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter readings.")] = False,
    simulate: Annotated[
        str | None,
        typer.Option("--simulate", metavar="TOPOLOGY", help="On paper instead: flat, ring or two-level; any --ranks."),
    ] = None,
    draw: Annotated[
        str | None, typer.Option("--draw", metavar="ALGORITHM", help="Draw this algorithm's schedule, round by round.")
    ] = None,
    root: Annotated[int, typer.Option("--root", help="Of a drawn broadcast, reduce, scatter or gather.")] = 0,
    node_size: Annotated[
        int | None, typer.Option("--node-size", help="Ranks a node, for the hierarchical schedules. [default: 8]")
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also write the drawing as an SVG.")] = None,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows; - for stdout.")] = None,
    chart: Annotated[
        str | None, typer.Option("--chart", metavar="FILE", help="Draw time over size: .svg, .png.")
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="A page of the rows, or of the rounds with a slider.")
    ] = None,
) -> None:
    """Time our collectives beside the library's own. Or fit the machine, or look at schedules."""
    from tilemesh.cli import bench_collective_run as run

    asked = [name for name, given in (("--draw", draw), ("--simulate", simulate), ("--fit", fit)) if given]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)}: each is a run of its own, give one of them")
    mode = asked[0] if asked else "a measurement"
    for name, given, modes in (
        ("--svg", svg, ("--draw",)),
        ("--json", json, ("a measurement",)),
        ("--chart", chart, ("a measurement",)),
        ("--html", html, ("a measurement", "--draw")),
    ):
        if given is not None and mode not in modes:
            raise UsageError(f"{name} with {mode}: it belongs to {' or '.join(modes)}; leave it out")
    if draw is not None:
        run.draw_schedule(collectives or ["all_reduce"], draw, ranks or "8", root, node_size, svg, html)
    elif simulate is not None:
        counts = ranks or "64,1024,16384"
        run.simulate_scale(collectives or ["all_reduce"], simulate, counts, sizes, node_size, algorithms)
    elif fit:
        run.fit_machine(ranks or "2,4,8", sizes, transport, quick)
    else:
        counts = ranks or "2,4,8"
        run.measure(collectives, counts, sizes, transport, algorithms, quick=quick, json=json, chart=chart, html=html)
