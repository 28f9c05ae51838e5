"""`tilemesh doctor`: what can be asked; `doctor_run.py` answers when asked."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    json: Annotated[
        str | None, typer.Option(help="Also write the findings as JSON to this file (- for output).")
    ] = None,
) -> None:
    """Say what works on this machine and what is missing. Each part is tried. Exit code 0: the main job can run."""
    from tilemesh.cli.doctor_run import examine

    raise typer.Exit(examine(json))
