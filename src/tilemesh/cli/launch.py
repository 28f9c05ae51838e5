"""`tilemesh launch`: a user's own script on several ranks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def launch(
    command: Annotated[
        list[str], typer.Argument(help="After --: a script with its arguments, -m MODULE, or a program.")
    ],
    ranks: Annotated[int | None, typer.Option(help="How many; known already inside mpiexec, srun or torchrun.")] = None,
    transport: Annotated[str, typer.Option(help="One of: mpi, torch, auto.")] = "auto",
    restarts: Annotated[int, typer.Option(help="How often a failed job is started again.")] = 0,
) -> None:
    """Start N ranks of your own script or program. Show what each prints, and end them all when one fails.

    tilemesh launch --ranks 4 -- script.py --steps 10
    """
    from tilemesh.launch.job import launch as launch_job

    outcome = launch_job(command, ranks=ranks, transport=transport, restarts=restarts)
    if outcome.exit_code:
        assert ranks is not None  # without it launch_job refuses, or becomes a rank and does not return
        print(f"tilemesh: {outcome.sentence(ranks)}", file=sys.stderr)
    raise typer.Exit(outcome.exit_code)
