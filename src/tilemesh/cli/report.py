"""`tilemesh report` and `tilemesh watch`: what can be asked; `report_run.py` answers when asked."""

from __future__ import annotations

from typing import Annotated

import typer


def report(
    what: Annotated[
        list[str],
        typer.Argument(metavar="RUN ... | ROWS.jsonl ...", help="A run, up to eight runs, or files of bench rows."),
    ],
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Where to write; else beside what is shown.")
    ] = None,
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FOLDER", help="Of rows: a chart per operator or collective.")
    ] = None,
) -> None:
    """Make the page of runs or of a benchmark's rows. One HTML file, no network; several runs are compared."""
    from tilemesh.cli.report_run import make

    for path in make(what, html, svg):
        print(f"{'chart' if svg is not None and path != html else 'page'}: {path}")


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    port: Annotated[int, typer.Option("--port", metavar="N", help="On loopback; 0 takes a free one.")] = 0,
) -> None:
    """Show a run in progress in a browser on this machine. The page refreshes by itself."""
    from tilemesh.cli.report_run import follow

    follow(run, port)
