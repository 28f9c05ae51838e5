"""Starting a run's ranks on this machine and waiting for them. No torch: the process that waits needs none.

Why ranks died is known here alone, so it is this process that writes it into the run's metrics, between the attempts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tilemesh.launch.job import Outcome, launch
from tilemesh.launch.output import Sink
from tilemesh.runs.journal import Journal
from tilemesh.runs.metrics import FAILED, RESTART, STOPPED, last_line, last_step
from tilemesh.train.config import TrainConfig

INTERRUPT_GRACE_S = 120.0  # after Ctrl-C: a step has to end and a checkpoint to be written


def start(
    folder: Path,
    config: TrainConfig,
    *,
    resume: bool,
    init: str | Path | None,
    transport: str,
    restarts: int,
    stop_after: int | None,
    sink: Sink,
    say: Callable[[str], None] | None = None,
) -> Outcome:
    """Start the ranks of a run on this machine and wait for them."""
    command = ["-m", "tilemesh.train.rank", str(folder), "--resume", "yes" if resume else "no"]
    if init is not None:
        command += ["--init", str(init)]
    if stop_after is not None:
        command += ["--stop-after", str(stop_after)]

    def note(kind: str, why: str) -> None:
        journal = Journal(folder, True, say or (lambda text: None))
        journal.add(kind, last_step(folder), why=why)

    outcome = launch(
        command,
        ranks=config.ranks,
        transport=transport,
        restarts=restarts,
        sink=sink,
        interrupt_grace_s=INTERRUPT_GRACE_S,
        say=say,
        again=lambda failure: note(RESTART, failure.sentence()),
    )
    # A run that stopped itself has said why.
    if outcome.failure is not None and not outcome.interrupted and last_line(folder).get("kind") != STOPPED:
        note(FAILED, outcome.failure.sentence())
    return outcome
