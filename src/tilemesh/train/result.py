"""What `fit` returns, and what it raises when ranks did not come to their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError
from tilemesh.measure.row import Row


@dataclass(frozen=True)
class Saved:
    """The newest step whose weights are on the disk, and the run's folder that has them."""

    step: int | None
    folder: Path


_OF_RANK_0 = ("step", "loss", "held_out", "interrupted", "saved_step")
"""Of a result, besides where the weights are."""


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
    saved_step: int | None = None
    """The newest step whose weights are on the disk."""
    saved_in: Path | None = None
    """The run's folder that has them: `folder`, or the one that was made under `checkpoint.fallback_dir`."""

    def as_event(self) -> dict[str, Any]:
        """What rank 0 knows, as JSON values for the process that started it."""
        values = {name: getattr(self, name) for name in _OF_RANK_0}
        return {**values, "saved_in": str(self.saved_in or self.folder)}

    @classmethod
    def of_event(cls, event: Mapping[str, Any], folder: Path, **more: Any) -> Result:
        """From what rank 0 said in the end."""
        known = {name: event[name] for name in _OF_RANK_0}
        return cls(folder=folder, **known, saved_in=Path(event["saved_in"]), **more)


class WeightsLostError(RunError):
    """A run came to its end and its last weights could not be written. `result`: its result."""

    def __init__(self, result: Result) -> None:
        kept = f"step {result.saved_step} is safe, in {result.saved_in}"
        if result.saved_step is None:
            kept = "no checkpoint was written"
        super().__init__(f"the weights of step {result.step} could not be saved: {kept}")
        self.result = result


class RanksFailedError(RunError):
    """The ranks of a run failed, or were interrupted before they could say what they had done."""

    def __init__(self, sentence: str, folder: Path, interrupted: bool) -> None:
        super().__init__(sentence)
        self.folder, self.interrupted = folder, interrupted
