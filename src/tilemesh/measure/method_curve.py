"""One run of a training method while ranks are slow, as a value: what the bench measures and its page draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MethodCurve:
    """What a run came to, by time. `slow`: which worker was slow, in words."""

    method: str
    slow: str
    losses: Sequence[tuple[float, float]]
    """Held-out loss against seconds, at each step of worker 0."""
    utilisation: Sequence[float]
    """The part of the time in which each worker computed."""
    staleness: Sequence[tuple[int, int]] = ()
    """Of a server: how many gradients were applied so many updates after the read of their weights."""
    lead: int | None = None
    """How far a worker was ahead of the slowest when it was given weights, at most."""
    replay_difference: float | None = None
