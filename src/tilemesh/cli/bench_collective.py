"""`tilemesh bench collective`: look at the schedules behind the collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench_collective(
    collective: Annotated[str, typer.Argument(help="Which collective.")] = "all_reduce",
    draw: Annotated[
        str | None, typer.Option("--draw", metavar="ALGORITHM", help="Draw this algorithm's schedule, round by round.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", help="How many ranks the schedule is for.")] = 8,
    root: Annotated[int, typer.Option("--root", help="Root of a broadcast, reduce, scatter or gather.")] = 0,
    node_size: Annotated[
        int | None, typer.Option("--node-size", help="Ranks a node, for the hierarchical schedules. [default: 8]")
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also write the drawing as an SVG.")] = None,
) -> None:
    """Draw the schedule of a collective."""
    from tilemesh.comm.schedules import draw as drawing
    from tilemesh.comm.schedules.book import algorithms, build
    from tilemesh.core.errors import RunError, UsageError

    if draw is None:
        known = ", ".join(algorithms(collective))
        raise UsageError(f"nothing to do: give --draw ALGORITHM; for {collective} there are {known}")
    schedule = build(collective, draw, ranks, root, node_size=node_size)
    print(drawing.text(schedule))
    if svg is not None:
        try:
            svg.write_text(drawing.svg(schedule), encoding="utf-8")
        except OSError as error:
            raise RunError(f"{svg} could not be written: {error.strerror}") from None
