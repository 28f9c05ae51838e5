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


@dataclass(frozen=True)
class ServerLoad:
    """So many workers at so many servers: where the server is what all wait for."""

    workers: int
    servers: int
    share: float
    """Of the steps that as many workers would make if a server's time were all theirs."""
    busy: float
    """The part of the time in which a server is at work."""
    queue_s: float
    """What one round trip waits for the server to become free."""


@dataclass(frozen=True)
class BoundCurve:
    """A run with a staleness bound."""

    bound: int
    losses: Sequence[float]
    """Mean over workers, at each of their steps."""
