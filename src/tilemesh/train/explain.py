"""Where a step's time went: its four parts, of which `core.advice` says what to do about the largest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Parts of an ordinary step, as fractions that add up to 1."""

    compute: float
    exchange: float
    data: float
    idle: float


def shares(step_s: float, exchange_s: float, data_s: float, idle_s: float) -> Shares:
    """The four parts of a step of `step_s` seconds; what is in none of the others is compute."""
    if step_s <= 0:
        return Shares(1.0, 0.0, 0.0, 0.0)
    parts = [max(0.0, seconds) / step_s for seconds in (exchange_s, data_s, idle_s)]
    total = sum(parts)
    if total > 1:
        parts = [part / total for part in parts]
    return Shares(max(0.0, 1 - sum(parts)), *parts)
