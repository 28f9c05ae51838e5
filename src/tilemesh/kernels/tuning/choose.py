"""Which tuned entry speaks for a problem, and whether a problem may be tuned when it is first met.

TILEMESH_TUNE (never, once, always) says whether a shape that was not tuned on this GPU may be tuned when it is first
met; the default is never, so nothing ever pauses unasked. Nothing here needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tilemesh.core.errors import unknown
from tilemesh.kernels.tuning.table import TunedEntry, TunedTable

TUNE_MODES = ("never", "once", "always")

ConfigT = TypeVar("ConfigT")


def tune_mode() -> str:
    mode = os.environ.get("TILEMESH_TUNE", "never")
    if mode not in TUNE_MODES:
        raise unknown("TILEMESH_TUNE", mode, TUNE_MODES)
    return mode


def should_tune(key: str, table: TunedTable[ConfigT], tuned: Iterable[str]) -> bool:
    """never (default) pauses for nothing, once tunes what this GPU has no entry for, always tunes once per process."""
    mode = tune_mode()
    if mode == "never" or key in tuned:
        return False
    return mode == "always" or key not in table.entries


def exact(key: str, tables: Sequence[TunedTable[ConfigT]], runs: Callable[[ConfigT], bool]) -> ConfigT | None:
    """The entry of this very problem that can run here; `tables` in order of trust."""
    for table in tables:
        entry = table.entries.get(key)
        if entry is not None and runs(entry.config):
            return entry.config
    return None


def nearest(
    entries: Iterable[tuple[str, TunedEntry[ConfigT]]],
    distance: Callable[[str], float],
    speaks: Callable[[str, ConfigT], bool],
    within: float,
) -> ConfigT | None:
    """The configuration of the nearest tuned key that speaks for the problem; of two as near, the later."""
    best, best_distance = None, within
    for key, entry in entries:
        apart = distance(key)
        if apart <= best_distance and speaks(key, entry.config):
            best, best_distance = entry.config, apart
    return best
