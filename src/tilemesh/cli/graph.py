"""The options of `tilemesh graph`."""

from __future__ import annotations

from typing import Annotated

import typer

graph = typer.Typer(help="Look at a model as a graph of operators.")


@graph.command("explain")
def explain(
    program: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function of yours that returns a torch module and its inputs.",
        ),
    ],
    device: Annotated[str, typer.Option("--device", help="Predict times for this device, such as h200.")] = "h100",
    whole: Annotated[bool, typer.Option("--whole", help="Print both graphs whole, however long they are.")] = False,
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FILE", help="Draw the graph: before, after, and as kernels.")
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="The drawing and the rules as a page.")
    ] = None,
    json: Annotated[str | None, typer.Option("--json", help="Also write this as JSON; - is standard output.")] = None,
) -> None:
    """Print a model's graph before and after rewriting. Says what each rule saves."""
    from tilemesh.cli.graph_run import explain_graph

    explain_graph(program, device, whole, svg, html, json)


@graph.command("breaks")
def breaks(
    program: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function of yours that returns a torch module and its inputs.",
        ),
    ],
) -> None:
    """List where torch.compile cuts a model into pieces. With the line that causes it, and what guards each piece."""
    from tilemesh.cli.graph_run import list_breaks

    list_breaks(program)
