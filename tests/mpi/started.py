"""What tests share that start ranks: kept ranks by transport and number, and whether a process lives."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from pathlib import Path

from warm import warm_start

from tilemesh.launch import Ranks

_KEPT: dict[tuple[str, int], Ranks] = {}


def ranks_of(transport: str, number: int) -> Ranks:
    """Ranks that all tests of this process call: started once, and anew where a test has ended them."""
    kept = _KEPT.get((transport, number))
    if kept is None or kept.ended is not None:
        with warm_start():
            kept = _KEPT[transport, number] = Ranks(number, transport=transport)
    return kept


@atexit.register
def close_all() -> None:
    while _KEPT:
        _KEPT.popitem()[1].close()


def is_running(pid: int) -> bool:
    """Alive and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)
