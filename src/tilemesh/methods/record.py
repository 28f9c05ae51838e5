"""What a server did, in its order, and doing it again in one process: the proof that ranks computed what they say.

A record is a list of events of one server: `pull` (a worker read a version of the weights for a clock), `push` (its
gradient came) and `apply` (pushes became one update, which made a version). With several servers each has its own list,
and a worker's gradient needs its reads at all of them. Every value is JSON.

A run that is stopped or killed and goes on adds to its record. `state` says that a checkpoint was taken after so many
steps of the worker that asked for it, `start` that servers began with the checkpoint of that step: what was done in
between was undone (`standing`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tilemesh.core.errors import UsageError
from tilemesh.methods.rules import Push

T = TypeVar("T")


class ServerEvent(NamedTuple):
    kind: str
    """pull, push, apply, state or start."""
    pushes: tuple[Push, ...]
    """Of a pull the one gradient that will be made of it; of state and start who asked, after so many steps."""
    version: int
    """That was read, that the server had, or that was made."""
    scale: float = 1.0
    """Of an apply: what the mean gradient was multiplied by, which clips it; of a push: what the loss was."""

    def to_json(self) -> list[Any]:
        plain = [self.kind, [list(push) for push in self.pushes], self.version]
        return plain if self.scale == 1.0 else [*plain, self.scale]

    @classmethod
    def from_json(cls, value: Any) -> ServerEvent:
        kind, pushes, version, *scale = value
        parsed = tuple(Push(int(worker), int(clock)) for worker, clock in pushes)
        return cls(str(kind), parsed, int(version), *map(float, scale[:1]))


def append_record(path: Path, events: Sequence[ServerEvent]) -> None:
    """Add to a record. What a killed server wrote in part stays a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write("".join(json.dumps(event.to_json()) + "\n" for event in events).encode())


def read_record(path: Path) -> list[ServerEvent]:
    """All that a server wrote. A line that was written in part is of what a restart undid, and is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(ServerEvent.from_json(json.loads(line)))
        except ValueError:
            continue
    return events


def standing(events: Sequence[ServerEvent]) -> list[ServerEvent]:
    """What counts of a record: without what was done after a checkpoint that servers began with again later."""
    kept: list[ServerEvent] = []
    for event in events:
        if event.kind == "start" and kept:
            (begun,) = event.pushes
            states = [place for place, known in enumerate(kept) if known.kind == "state" and known.pushes == (begun,)]
            if begun.clock and not states:
                raise UsageError(f"a record that begins again at step {begun.clock}, of which it has no checkpoint")
            kept = kept[: states[-1] + 1] if states else []
        kept.append(event)
    return kept


def staleness(events: Sequence[ServerEvent]) -> Counter[int]:
    """Updates between the read and the application of each push, by how often."""
    read: dict[Push, int] = {}
    counts: Counter[int] = Counter()
    for event in events:
        for push in event.pushes:
            if event.kind == "pull":
                read[push] = event.version
            elif event.kind == "apply":
                counts[event.version - 1 - read[push]] += 1
    return counts


def largest_lead(events: Sequence[ServerEvent], workers: Sequence[int]) -> int:
    """How far a worker was ahead of the slowest when it was given weights, at most."""
    clocks, most = dict.fromkeys(workers, 0), 0
    for event in events:
        if event.kind == "push":
            clocks[event.pushes[0].worker] = event.pushes[0].clock + 1
        elif event.kind == "start":
            clocks = dict.fromkeys(workers, event.pushes[0].clock)
        elif event.kind == "pull":
            most = max(most, event.pushes[0].clock - min(clocks.values()))
    return most


def replay(
    records: Sequence[Sequence[ServerEvent]],
    copy: Callable[[int], T],
    gradient: Callable[[Push, list[T]], list[T]],
    apply: Callable[[int, Sequence[Push], list[T], float], object],
) -> None:
    """Do what the servers did, in one process. Of a run that was stopped, `standing` records.

    `copy(server)`: its weights as they are now. `gradient(push, shards)`: of the weights that were read, one part for
    each server. `apply(server, pushes, gradients, scale)`: one update.
    """
    at, starts = [0] * len(records), [0] * len(records)
    # By how often its server had begun: a push that a restart lost is made once more, of other weights.
    reads: dict[tuple[int, Push], dict[int, T]] = {}
    gradients: dict[tuple[int, Push], list[T]] = {}
    moving = True
    while moving:
        moving = False
        for server, events in enumerate(records):
            while at[server] < len(events):
                event = events[at[server]]
                keys = [(starts[server], push) for push in event.pushes]
                if event.kind == "start":
                    starts[server] += 1
                elif event.kind == "pull":
                    reads.setdefault(keys[0], {})[server] = copy(server)
                elif event.kind == "apply":
                    if any(key not in gradients and len(reads.get(key, {})) < len(records) for key in keys):
                        break  # another server comes first
                    for key in keys:
                        if key not in gradients:
                            gradients[key] = gradient(key[1], [shard for _, shard in sorted(reads.pop(key).items())])
                    apply(server, event.pushes, [gradients[key][server] for key in keys], event.scale)
                at[server] += 1
                moving = True
    left = [str(events[place]) for place, events in zip(at, records, strict=True) if place < len(events)]
    if left:
        raise UsageError(f"a record that cannot be replayed: {left[0]} applies a push that nobody read weights for")
