"""Where a step's time went, and the largest single thing to improve: shares, and one sentence made of them.

A pure function of the measured shares, so that every sentence is a test. It names what was measured, never a guess
at what a change would bring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilemesh.core.units import format_bytes


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
    parts = [max(0.0, one) / step_s for one in (exchange_s, data_s, idle_s)]
    total = sum(parts)
    if total > 1:
        parts = [one / total for one in parts]
    return Shares(max(0.0, 1 - sum(parts)), *parts)


def improvement(
    of: Shares,
    exchanges: Mapping[str, float],
    step_bytes: Mapping[str, Mapping[str, int]],
    *,
    ranks: int,
    cores: int,
    mfu: float | None = None,
) -> str:
    """The largest thing to improve. `exchanges`: seconds by "axis operation"; `mfu`: of the calibrated peak."""
    parts = {"exchange": of.exchange, "data": of.data, "idle": of.idle}
    largest = max(parts, key=lambda name: parts[name])
    crowded = f" ({ranks} ranks share {cores} cores, so every exchange is also work)" if ranks > cores else ""
    if parts[largest] >= 0.1 and parts[largest] >= 0.5 * (1 - of.compute):
        percent = f"{parts[largest]:.0%}"
        if largest == "exchange" and exchanges:
            name = max(exchanges, key=lambda one: exchanges[one])
            axis, operation = name.split(" ", 1)
            nbytes = step_bytes.get(axis, {}).get(operation, 0)
            size = f", {format_bytes(nbytes)} a step and rank" if nbytes else ""
            advice = {
                "tp": "fewer ranks along tp (more along dp) send less",
                "dp": "more accumulation exchanges less often",
            }.get(axis, "a larger batch a step meets less often")
            return f"exchanges take {percent} of a step, most of it {operation} over {axis}{size}: {advice}{crowded}"
        if largest == "data":
            return f"waiting for data takes {percent} of a step: prepare shards once with `tilemesh data prepare`"
        return f"waiting for the slowest rank takes {percent} of a step: the ranks are not equally fast{crowded}"
    reached = f" at {mfu:.0%} of the measured matmul peak" if mfu is not None else ""
    return f"compute takes {of.compute:.0%} of a step{reached}: larger matrices, a lower precision or a fused kernel"
