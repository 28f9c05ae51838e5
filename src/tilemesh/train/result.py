"""What `fit` returns, and what it raises when ranks did not come to their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilemesh.core.errors import RunError
from tilemesh.measure.row import Row


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    step: int
    loss: float
    """Nats per token over the last step's batch."""
    held_out: float | None
    interrupted: bool
    """Stopped before its last step, with a checkpoint to go on from."""
    rows: Sequence[Row] = ()
    """Predicted, measured, limit; on rank 0 alone where this process is a rank of several."""
    by_signal: str = ""
    """Where Ctrl-C or a signal ended the ranks that were started: the launcher's last line."""


class RanksFailedError(RunError):
    """The ranks of a run failed, or were interrupted before they could say what they had done."""

    def __init__(self, sentence: str, folder: Path, interrupted: bool) -> None:
        super().__init__(sentence)
        self.folder, self.interrupted = folder, interrupted
