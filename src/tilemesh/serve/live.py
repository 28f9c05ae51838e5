"""Weights that change while an engine serves.

The one idea: new weights are written, between two steps, into the memory that computes already. What looks into that
memory follows by itself (projections of a group, captured steps, parts on ranks); what was computed from older weights
must go: pages that others could find, and weights in a second layout. All that is refused is refused before.
"""

from __future__ import annotations

from typing import Literal, get_args

from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.serve.core import EngineCore
from tilemesh.serve.load import WeightOrigin, WeightSource, open_weights
from tilemesh.serve.ranks import RankRunner, RanksLostError

WhileRunning = Literal["finish", "carry", "recompute"]
"""What becomes of requests under way: they end with the old weights first, and those that wait begin with the new ones;
or go on with the new ones over the keys and values that the old ones computed; or have these computed again."""


def check_running(running: str) -> None:
    if running not in get_args(WhileRunning):
        raise unknown("running", running, get_args(WhileRunning))


class LiveWeights:
    """What an engine computes with. Called in the thread that takes its steps, between two of them."""

    def __init__(self, core: EngineCore, origin: WeightOrigin | None) -> None:
        self._core = core
        self._origin = origin
        """Where the weights of now can be read again; None: nowhere."""
        core.on_restart = self.restore

    def update(self, source: WeightSource, version: int, running: WhileRunning) -> None:
        """Write weights that were found to fit."""
        core = self._core
        if running == "finish" and core.scheduler.begun:
            raise UsageError(
                f"running is finish and {core.scheduler.begun} requests under way cannot: the engine sleeps or has no "
                "weights; give recompute"
            )
        core.tell_held()
        if running == "recompute":
            core.forget_computed()
        self._origin = None
        self._write(source)
        self._origin = source.origin
        core.scheduler.renew(version)
        core.lacks = ""

    def restore(self) -> None:
        """Give ranks that were started again the weights that the lost ones had."""
        if self._core.scheduler.version == 0:
            return  # they have read what they were started with
        if self._origin is None:
            self._core.lacks = "ranks were lost, and with them weights that are in no folder"
        else:
            try:
                self._write(open_weights(*self._origin))
            except (RunError, UsageError) as error:  # their requests wait, and the engine for weights
                self._core.lacks = f"ranks were lost, and their weights cannot be read again: {error}"

    def _write(self, source: WeightSource) -> None:
        core = self._core
        try:
            core.runner.write_weights(source.tensors)
        except BaseException as error:
            core.lacks = f"weights were written in part ({type(error).__name__}: {error})"
            core.forget_computed()
            if isinstance(error, RanksLostError) and isinstance(core.runner, RankRunner):
                core.runner.restart()
            raise RunError(f"{core.lacks}: requests wait until update_weights gives all of them") from error
