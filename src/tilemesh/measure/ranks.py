"""Timing what all ranks do together: barrier, start, end; the slowest rank counts.

Every rank calls `compare(..., timer=rank_timer(group), on_error="raise")` with the same arguments. Readings are agreed
on before anything is decided from them, so all ranks loop equally often and stop in the same round. A failure
must raise: a rank that went on without the others would wait for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from tilemesh.core.cores import available_cores
from tilemesh.measure.row import CaseValue
from tilemesh.measure.timing import MIN_READING_S, LoopTimer


class RankGroup(Protocol):
    """What timing needs of a communicator."""

    def barrier(self) -> None: ...

    def max_over_ranks(self, values: list[float]) -> list[float]: ...


def rank_timer(
    group: RankGroup, *, clock: Callable[[], float] = time.perf_counter, min_reading_s: float = MIN_READING_S
) -> LoopTimer:
    """A timer for `compare` whose readings start at a barrier and are the slowest rank's.

    Within one reading calls follow each other without a barrier, as in a training step: a rank that is early in
    one call may be let off waiting in the next.
    """

    def slowest(seconds: float) -> float:
        return group.max_over_ranks([seconds])[0]

    return LoopTimer(clock=clock, start=group.barrier, agree=slowest, min_reading_s=min_reading_s)


def slowest_s(group: RankGroup, step: Callable[[], object]) -> float:
    """Seconds from a barrier on until the slowest rank has done a step."""
    group.barrier()
    began = time.perf_counter()
    step()
    return group.max_over_ranks([time.perf_counter() - began])[0]


def ranks_case(ranks: int, cores: int | None = None) -> dict[str, CaseValue]:
    """What a row's `case` says of the ranks: how many, on how many cores, and whether they outnumber these."""
    count = available_cores() if cores is None else cores
    return {"ranks": ranks, "cores": count, "oversubscribed": ranks > count}
