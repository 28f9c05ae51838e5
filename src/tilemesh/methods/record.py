"""What a server did, in its order, and doing it again in one process: the proof that ranks computed what they say.

A record is a list of events of one server: `pull` (a worker read a version of the weights for a clock), `push` (its
gradient came) and `apply` (pushes became one update, which made a version). With several servers each has its own list,
and a worker's gradient needs its reads at all of them. Every value is JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from tilemesh.core.errors import UsageError
from tilemesh.methods.rules import Push

T = TypeVar("T")


class ServerEvent(NamedTuple):
    kind: str
    """pull, push or apply."""
    pushes: tuple[Push, ...]
    """Of a pull the one gradient that will be made of it."""
    version: int
    """That was read, that the server had, or that was made."""

    def to_json(self) -> list[Any]:
        return [self.kind, [list(push) for push in self.pushes], self.version]

    @classmethod
    def from_json(cls, value: Any) -> ServerEvent:
        kind, pushes, version = value
        return cls(str(kind), tuple(Push(int(worker), int(clock)) for worker, clock in pushes), int(version))


def staleness(events: Sequence[ServerEvent]) -> Counter[int]:
    """Updates between the read and the application of each push, by how often."""
    read: dict[Push, int] = {}
    found: Counter[int] = Counter()
    for event in events:
        for push in event.pushes:
            if event.kind == "pull":
                read[push] = event.version
            elif event.kind == "apply":
                found[event.version - 1 - read[push]] += 1
    return found


def largest_lead(events: Sequence[ServerEvent], workers: Sequence[int], first: int = 0) -> int:
    """How far a worker was ahead of the slowest when it was given weights, at most."""
    clocks, most = dict.fromkeys(workers, first), 0
    for event in events:
        if event.kind == "push":
            clocks[event.pushes[0].worker] = event.pushes[0].clock + 1
        elif event.kind == "pull":
            most = max(most, event.pushes[0].clock - min(clocks.values()))
    return most


def replay(
    records: Sequence[Sequence[ServerEvent]],
    copy: Callable[[int], T],
    gradient: Callable[[Push, list[T]], list[T]],
    apply: Callable[[int, Sequence[Push], list[T]], None],
) -> None:
    """Do what the servers did, in one process.

    `copy(server)`: its weights as they are now. `gradient(push, shards)`: of the weights that were read, one part for
    each server. `apply(server, pushes, gradients)`: one update.
    """
    at = [0] * len(records)
    reads: dict[Push, dict[int, T]] = {}
    made: dict[Push, list[T]] = {}
    moving = True
    while moving:
        moving = False
        for server, events in enumerate(records):
            while at[server] < len(events):
                event = events[at[server]]
                if event.kind == "pull":
                    reads.setdefault(event.pushes[0], {})[server] = copy(server)
                elif event.kind == "apply":
                    if any(push not in made and len(reads.get(push, {})) < len(records) for push in event.pushes):
                        break  # another server comes first
                    for push in event.pushes:
                        if push not in made:
                            made[push] = gradient(push, [shard for _, shard in sorted(reads.pop(push).items())])
                    apply(server, event.pushes, [made[push][server] for push in event.pushes])
                at[server] += 1
                moving = True
    left = [str(events[place]) for place, events in zip(at, records, strict=True) if place < len(events)]
    if left:
        raise UsageError(f"a record that cannot be replayed: {left[0]} applies a push that nobody read weights for")
