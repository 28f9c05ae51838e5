"""Timing configurations of one problem on this GPU: checked, then replayed as graphs.

A configuration that fails to compile, does not fit or computes something wrong is a `ConfigTrial` with its failure, not
an exception: a search goes on.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from tilemesh.kernels.tuning.values import ConfigurationT
from tilemesh.measure.gpu import KernelTimer
from tilemesh.measure.timing import reason_of


@dataclass(frozen=True)
class ConfigTrial(Generic[ConfigurationT]):
    """One configuration, timed: median seconds of kernel time, or why there are none."""

    config: ConfigurationT
    seconds: float = math.inf
    failure: str | None = None


class ConfigTimer(ABC, Generic[ConfigurationT]):
    """Times configurations of one problem, on sets of inputs that rotate past the L2."""

    timer: KernelTimer
    sets: Sequence[Any]

    @abstractmethod
    def runner(self, config: ConfigurationT) -> Any:
        """The configuration made ready; raises where it cannot run."""

    @abstractmethod
    def call(self, runner: Any) -> Callable[[int], object]:
        """Compute on the set of this number."""

    @abstractmethod
    def wrong(self, runner: Any) -> str | None:
        """Compute on the first set; what is wrong with the result, or None."""

    def time(self, config: ConfigurationT, readings: int = 5) -> ConfigTrial[ConfigurationT]:
        """Check the configuration's result, then take the median of a few replays."""
        try:
            runner = self.runner(config)
            if wrong := self.wrong(runner):
                return ConfigTrial(config, failure=f"wrong result: {wrong}")
            ready = self.timer.prepare(self.call(runner), sets=len(self.sets), warmup=1)
            return ConfigTrial(config, statistics.median(ready.read().seconds for _ in range(readings)))
        except Exception as error:
            return ConfigTrial(config, failure=reason_of(error))
