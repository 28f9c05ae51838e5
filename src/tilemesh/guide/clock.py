"""Seconds of what a chapter runs."""

from __future__ import annotations

import time
from collections.abc import Callable


def nothing() -> None:
    """What is done before and after a call unless said otherwise."""


def repeated(
    work: Callable[[], object],
    rounds: int = 5,
    *,
    before: Callable[[], object] = nothing,
    after: Callable[[], object] = nothing,
) -> list[float]:
    """Seconds of each call, behind one that does not count. `before` is not in them (a barrier), `after` is (waiting
    for a GPU)."""
    times = []
    for number in range(rounds + 1):
        before()
        began = time.perf_counter()
        work()
        after()
        if number:
            times.append(time.perf_counter() - began)
    return times
