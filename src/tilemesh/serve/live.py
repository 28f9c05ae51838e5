"""Weights that change while an engine serves, and memory that it gives back while it sleeps.

The one idea: new weights are written, between two steps, into the memory that computes already. What looks into that
memory follows by itself (projections of a group, captured steps, parts on ranks); what was computed from older weights
must go: pages that others could find, and weights in a second layout. All that is refused is refused before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch

from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.ranges import LARGEST_WHOLE, Range
from tilemesh.serve.adapters import AdapterSlots
from tilemesh.serve.core import EngineCore
from tilemesh.serve.load import ServedModel, WeightSource, check_weights, open_weights
from tilemesh.serve.ranks import RankRunner, RanksLostError

WhileRunning = Literal["finish", "carry", "recompute"]
"""What becomes of requests under way: they end with the old weights first, and those that wait begin with the new ones;
or go on with the new ones over the keys and values that the old ones computed; or have these computed again."""


def check_running(running: str) -> None:
    if running not in get_args(WhileRunning):
        raise unknown("running", running, get_args(WhileRunning))


class LiveWeights:
    """What an engine computes with. Called in the thread that takes its steps, between two of them."""

    def __init__(
        self, core: EngineCore, served: ServedModel, owns: bool, on_gpu: bool, adapters: AdapterSlots | None = None
    ) -> None:
        """`owns`: whether the weights' memory is this engine's alone. `adapters`: what it holds beside them."""
        self._core, self._model, self._owns, self._on_gpu = core, served.model, owns, on_gpu
        self._origin = served.origin
        """Where the weights of now can be read again; None: nowhere."""
        self._dropped = False
        """Whether it sleeps without weights anywhere."""
        self._adapters = adapters
        core.on_restart = self.restore

    def next_version(self, version: int | None) -> int:
        """One more than that of the weights of now, or a higher one that was asked for."""
        last = self._core.scheduler.version
        Range(last + 1, LARGEST_WHOLE).check("version", last + 1 if version is None else version, whole=True)
        return last + 1 if version is None else version

    def update(self, source: WeightSource, version: int | None, running: WhileRunning) -> int:
        """Write weights that were found to fit; returns their version."""
        core, version = self._core, self.next_version(version)
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
        self.write_adapters()
        self._origin, self._dropped = source.origin, False
        core.renew(version)
        return version

    def write_adapters(self) -> None:
        """All that are held, into the memory that computes."""
        if self._adapters is not None:
            self._core.runner.write_weights(self._adapters.tensors())

    def restore(self) -> None:
        """Give ranks that were started again the weights that the lost ones had."""
        self.write_adapters()
        if self._core.scheduler.version == 0:
            return  # they have read what they were started with
        if self._origin is None:
            self._core.lacks = "ranks were lost, and with them weights that are in no folder"
        else:
            try:
                self._read_again()
            except (RunError, UsageError) as error:  # their requests wait, and the engine for weights
                self._core.lacks = f"ranks were lost, and their weights cannot be read again: {error}"

    def sleep(self, level: int) -> None:
        """Give memory back; requests wait, and are computed again later."""
        core = self._core
        if level == 2 and not self._owns:
            raise UsageError("level is 2 and the weights belong to whoever gave the model: sleep at level 1")
        core.forget_computed()
        self._on_ranks(lambda: core.runner.sleep(level))
        if core.draft is not None:
            core.draft.runner.sleep(level if self._on_gpu else 1)  # nothing would give a CPU's back
        core.asleep = max(core.asleep, level)
        self._dropped |= level == 2 and not self._on_gpu

    def wake(self) -> None:
        """Take the memory again, and the weights if they were dropped."""
        core = self._core
        if self._dropped and self._origin is None:
            raise UsageError("the weights were dropped and are in no folder: call update_weights before wake")
        if self._dropped:
            self._read_again()
            self.write_adapters()
            self._dropped = False
        try:
            self._on_ranks(core.runner.wake)
            if core.draft is not None:
                core.draft.runner.wake()
        except torch.OutOfMemoryError as error:
            raise RunError(f"there is no memory to wake with, so the engine sleeps on: {error}") from error
        core.asleep = 0

    def _on_ranks(self, call: Callable[[], None]) -> None:
        """Of ranks that were lost in their sleep others are started, which know nothing of it."""
        try:
            call()
        except RanksLostError:
            assert isinstance(self._core.runner, RankRunner)
            self._core.runner.restart()
            self.restore()
            call()

    def _read_again(self) -> None:
        assert self._origin is not None
        source = open_weights(*self._origin)
        check_weights(source, self._model)
        self._write(source, again=True)

    def _write(self, source: WeightSource, again: bool = False) -> None:
        """`again`: what all replicas had before, which may meet ranks that were started in the place of others."""
        core = self._core
        try:
            if isinstance(core.runner, RankRunner):
                core.runner.write_weights(source.tensors, everywhere=again)
            else:
                core.runner.write_weights(source.tensors)
        except BaseException as error:
            core.lacks = f"weights were written in part ({type(error).__name__}: {error})"
            core.forget_computed()
            if isinstance(error, RanksLostError) and isinstance(core.runner, RankRunner):
                core.runner.restart()
            raise RunError(f"{core.lacks}: requests wait until update_weights gives all of them") from error
        core.lacks = ""
