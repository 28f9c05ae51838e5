"""Start N ranks of your own script or program. Show what each prints, and end them all when one fails.

tilemesh launch --ranks 4 -- script.py --steps 10
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tilemesh.cli.output import tell
from tilemesh.core.options import MAY_BE_EMPTY, argument, option


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    command: Annotated[tuple[str, ...], MAY_BE_EMPTY] = argument(
        ..., "After --: a script with its arguments, -m MODULE, or a program."
    )
    ranks: int | None = option(None, "How many; known already inside mpiexec, srun or torchrun.")
    transport: str = option("auto", "One of: mpi, torch, auto.")
    restarts: int = option(0, "How often a failed job is started again.")


def launch(options: LaunchOptions) -> int:
    from tilemesh.launch.job import launch as launch_job

    ranks = options.ranks
    outcome = launch_job(options.command, ranks=ranks, transport=options.transport, restarts=options.restarts)
    if outcome.exit_code:
        assert ranks is not None  # without it launch_job refuses, or becomes a rank and does not return
        tell(outcome.sentence(ranks))
    return outcome.exit_code
