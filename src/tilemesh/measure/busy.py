"""Watching how busy this machine is with other work, and measuring again while it is.

What the kernel counts for each core (`/proc/stat`) before and after, less what was used by this process and those that
it has waited for, is what others used; `core/busy.py` judges it. Where the kernel tells nothing (macOS, some sandboxes)
only the load average and the spread of readings are left to judge by.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tilemesh.core.busy import Busyness, Counts, counts_of, judge
from tilemesh.core.cores import available_cores, visible_cores
from tilemesh.measure.sample import Sample

TRIES = 3
PAUSE_S = 5.0

T = TypeVar("T")


class OtherWork:
    """From its making on: what others used, beside this process and those that it has waited for."""

    def __init__(self) -> None:
        self.before, self.own_before_s = counts(), own_seconds()

    def busyness(self, samples: Iterable[Sample] = ()) -> Busyness:
        """Until now. `samples`: of what was measured meanwhile."""
        own_s = own_seconds() - self.own_before_s
        judged = judge(self.before, counts(), own_s, available_cores(), len(visible_cores()))
        return replace(judged, spread=spread_of(samples))


def counts() -> Counts | None:
    """As they are now; None where the kernel does not tell."""
    try:
        stat = Path("/proc/stat").read_text(encoding="ascii")
        return counts_of(stat, visible_cores(), os.sysconf("SC_CLK_TCK"), time.monotonic(), os.getloadavg()[0])
    except (OSError, ValueError):
        return None


def own_seconds() -> float:
    """Core seconds of this process and of all that it has waited for."""
    return sum(os.times()[:4])


def spread_of(samples: Iterable[Sample]) -> float:
    """p80 / p20 of the typical one; 0: there are none."""
    spreads = sorted(sample.p80 / sample.p20 for sample in samples if sample.p20 > 0)
    return spreads[len(spreads) // 2] if spreads else 0.0


def again_while_busy(
    measure: Callable[[], tuple[T, Busyness]],
    warn: Callable[[str], None],
    *,
    tries: int = TRIES,
    pause_s: float = PAUSE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[T, Busyness]:
    """What was measured while the machine was least disturbed: the first undisturbed one, or the best of `tries`."""
    best = measure()
    for attempt in range(2, tries + 1):
        if not best[1].is_busy:
            return best
        warn(f"this machine is busy ({best[1].words}): measuring again in {pause_s:g} s ({attempt} of {tries})")
        sleep(pause_s)
        attempt_result = measure()
        best = min(best, attempt_result, key=lambda result: result[1].score)
    if best[1].is_busy:
        warn(f"measured on a busy machine ({best[1].words}); measure again when it is idle")
    return best
