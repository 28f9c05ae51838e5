"""`tilemesh calibrate`: what can be asked; `calibrate_run.py` answers when asked."""

from __future__ import annotations

from typing import Annotated

import typer


def calibrate(
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows; - for stdout.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Coarser, in less than half the time; no --host.")] = False,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Only where this machine was not measured.")] = False,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Store the calibration for later limits.")] = True,
    host: Annotated[
        bool, typer.Option("--host", help="Only what a GPU's host needs to launch a step (a minute); the rest stays.")
    ] = False,
) -> None:
    """Measure this machine's speed, for predictions and limits. Matmul peak, memory bandwidth, launch cost."""
    from tilemesh.cli.calibrate_run import measure_machine

    measure_machine(json, quick, if_missing, save, host)
