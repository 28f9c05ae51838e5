"""`tilemesh guide`: what can be asked; `guide_run.py` answers when asked."""

from __future__ import annotations

from typing import Annotated

import typer


def guide(
    chapter: Annotated[
        str | None, typer.Argument(metavar="[CHAPTER]", help="A number or name; without one, the chapters are listed.")
    ] = None,
    progress: Annotated[bool, typer.Option("--progress", help="Show what you have done so far.")] = False,
    exercise: Annotated[
        str | None, typer.Option("--exercise", metavar="NAME", help="Only this exercise of the chapter.")
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option("--answer", metavar="TEXT", help="Check this answer to the exercise: as typed, or a Python file."),
    ] = None,
    notebook: Annotated[
        str | None, typer.Option("--notebook", metavar="FILE", help="Write the chapter as a Jupyter notebook instead.")
    ] = None,
    pause: Annotated[
        bool, typer.Option("--pause/--no-pause", help="On a terminal, wait for Enter before each section.")
    ] = True,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write the chapter's rows (- for output).")
    ] = None,
) -> None:
    """Learn ML systems by running them. Chapters ask you to predict, then measure on this machine."""
    from tilemesh.cli.guide_run import open_guide

    raise typer.Exit(open_guide(chapter, progress, exercise, answer, notebook, pause, json))
