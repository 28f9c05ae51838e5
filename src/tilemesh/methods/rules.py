"""Who may read and what is applied when: BSP, SSP and ASP as one small state machine. Pure: no tensors, no clock.

The one idea: all three are one rule with a bound s on how far ranks may drift apart. A worker's clock is the number of
pushes it has made; the slowest clock is the smallest of all members. A worker may read while its clock is at most s
ahead of the slowest, and a push of clock u is applied once u < slowest + s. With s = 0 that is BSP: a push waits until
every worker has made its own, and what waited is applied as one update. With s infinite it is ASP: everything at once.
In between a reader at clock c has seen every push of a clock below c - s, which is what SSP (Ho et al. 2013) promises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from tilemesh.core.errors import UsageError


class Push(NamedTuple):
    """One gradient of one worker."""

    worker: int
    clock: int


def bound_of(consistency: str, staleness: int) -> float:
    """The bound s of a consistency by its name; `staleness` counts for ssp alone."""
    if consistency == "ssp" and staleness < 0:
        raise UsageError(f"a staleness bound of {staleness}: expected 0 or more")
    return {"bsp": 0.0, "ssp": float(staleness), "asp": math.inf}[consistency]


class StalenessRule:
    """Clocks of the workers of one server, and the pushes that are not applied yet.

    `batch`: pushes that are collected for one update, where the bound allows it; BSP always collects one of each
    worker. A worker that leaves, or is given up as dead, is waited for no more.
    """

    def __init__(self, workers: Iterable[int] = (), bound: float = 0.0, batch: int = 1, clock: int = 0) -> None:
        if bound < 0 or batch < 1:
            raise UsageError(f"bound {bound} and batch {batch}: expected at least 0 and at least 1")
        self.bound, self.batch = bound, batch
        self.clocks = dict.fromkeys(workers, clock)
        self._waiting: list[Push] = []
        self._left: dict[int, int] = {}

    @property
    def slowest(self) -> float:
        """The smallest clock; infinite where nobody is left, so that nothing waits."""
        return min(self.clocks.values(), default=math.inf)

    def may_read(self, worker: int) -> bool:
        return self.clocks[worker] - self.slowest <= self.bound

    def push(self, worker: int, clock: int) -> bool:
        """Take note of a push; False for one that was made before, which a worker does that was restarted."""
        mine = self.clocks[worker]
        if clock < mine:
            return False
        if clock > mine or not self.may_read(worker):
            raise UsageError(f"worker {worker} pushes clock {clock}: expected {mine}, and within the bound")
        self.clocks[worker] = clock + 1
        self._waiting.append(Push(worker, clock))
        return True

    def join(self, worker: int, at_least: int = 0) -> int:
        """A new member, or one that comes back: it begins at the slowest clock, so that nobody waits for it longer,
        or after its own last push, so that none is made twice. `at_least`: where another server has it begin, so that
        all of them have one clock of it; the clocks that it skips here are nobody's."""
        if worker not in self.clocks:
            slowest = self.slowest
            begin = max(self._left.values(), default=0) if math.isinf(slowest) else int(slowest)
            self.clocks[worker] = max(begin, self._left.pop(worker, 0))
        self.clocks[worker] = max(self.clocks[worker], at_least)
        return self.clocks[worker]

    def leave(self, worker: int) -> None:
        if worker in self.clocks:
            self._left[worker] = self.clocks.pop(worker)

    def due(self) -> list[list[Push]]:
        """What is to be applied now, each group as one update, its pushes in the order of workers."""
        slowest = self.slowest
        ready = [push for push in self._waiting if push.clock < slowest + self.bound]
        if self.bound and len(ready) < self.batch and not any(push.clock < slowest for push in ready):
            return []
        self._waiting = [push for push in self._waiting if push not in ready]
        if self.bound:  # one update for each `batch`, in the order of arrival; alone where nothing is collected
            groups = [ready[begin : begin + self.batch] for begin in range(0, len(ready), self.batch)]
        else:
            groups = [
                [push for push in ready if push.clock == clock] for clock in sorted({push.clock for push in ready})
            ]
        return [sorted(group) for group in groups]


def expected_excess(diameter: float, lipschitz: float, bound: float, workers: int, pushes: int) -> float:
    """The most by which the mean loss over all pushes exceeds the least loss of a convex problem under SSP.

    Theorem 1 of Ho et al. 2013: 4 F L sqrt(2 (s + 1) P / T), with ||x - x'||² / 2 <= F², gradients no longer than L
    and the step F / (L sqrt(2 (s + 1) P t)) at push t.
    """
    return 4 * diameter * lipschitz * math.sqrt(2 * (bound + 1) * workers / pushes)
