"""How long a schedule would take: an α-β-γ clock over a topology, without a byte moved.

A message starts when both ends have come to its round and takes what the topology says (latency, and its bytes over
what it gets of the links it shares). A rank's messages in one direction follow each other, both directions run at once;
a reduction adds its own time. Where ranks are alike up to a period (all of them on equal wires, those of equal place in
nodes of equal size), one period stands for all, so a ring of thousands of ranks is a matter of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tilemesh.comm.schedules.collectives import BLOCKED
from tilemesh.comm.schedules.schedule import NOBODY, Grid, Round, RoundStep, Schedule, Shift, Vector
from tilemesh.comm.schedules.topology import Sent, Topology
from tilemesh.core.errors import UsageError


class Work(Protocol):
    """What a rank does by itself, in seconds: combining and copying so many bytes of result, and meeting the others."""

    @property
    def sync_s(self) -> float: ...

    def reduce_s(self, nbytes: float) -> float: ...

    def copy_s(self, nbytes: float) -> float: ...


@dataclass(frozen=True)
class Memory:
    """Work at constant rates."""

    reduce_bytes_per_s: float
    copy_bytes_per_s: float
    sync_s: float = 0.0

    def reduce_s(self, nbytes: float) -> float:
        return nbytes / self.reduce_bytes_per_s

    def copy_s(self, nbytes: float) -> float:
        return nbytes / self.copy_bytes_per_s


@dataclass(frozen=True)
class SimulatedTime:
    """When the last rank was done, and after how many rounds."""

    seconds: float
    rounds: int


def simulate(schedule: Schedule, nbytes: int, topology: Topology, memory: Work) -> SimulatedTime:
    """`nbytes`: the whole payload, as in `cost.traffic`; chunks are taken to be equal."""
    if topology.ranks != schedule.ranks:
        raise UsageError(f"a schedule of {schedule.ranks} ranks on a topology of {topology.ranks}: expected the same")
    chunk = nbytes / (schedule.ranks if schedule.collective in BLOCKED else 1)
    chunk /= schedule.segments if schedule.collective in BLOCKED else schedule.chunks
    clock = _Clock(schedule.ranks, chunk, topology, memory)
    rounds = 0
    for steps in schedule.rounds():
        clock.round(steps)
        rounds += 1
    return SimulatedTime(max(clock.times()), rounds)


class Exchanged(NamedTuple):
    """A rank's messages in a round: whom it waits for, how long it is at it, how long it reduces afterwards."""

    peers: tuple[int, ...]
    busy_s: float
    after_s: float


class _Clock:
    """When each rank is free again: of one period while ranks that far apart are equal, otherwise of all."""

    def __init__(self, ranks: int, chunk: float, topology: Topology, memory: Work) -> None:
        self.ranks = ranks
        self.chunk = chunk
        self.topology = topology
        self.memory = memory
        self.free = [0.0] * topology.period
        self._known: dict[object, list[Exchanged]] = {}

    def times(self) -> list[float]:
        return self.free * (self.ranks // len(self.free))

    def round(self, steps: Round) -> None:
        period = math.lcm(len(self.free), *(_period(step, self.ranks) for step in steps))
        self.free = self.free * (period // len(self.free))
        self._advance(steps)
        if len(self.free) > self.topology.period and min(self.free) == max(self.free):
            self.free = self.free[: self.topology.period]

    def _advance(self, steps: Round) -> None:
        free, memory, count = self.free, self.memory, len(self.free)
        for step in steps:
            if step.kind == "sync":
                self._meet(step, free)
        for step in steps:
            if step.kind in ("copy", "read"):
                for rank, _, slots in _parts(step, count):
                    nbytes = slots * self.chunk
                    free[rank] += memory.reduce_s(nbytes) if step.reduce else memory.copy_s(nbytes)
        if not any(step.kind in ("send", "recv") for step in steps):
            return
        self.free = [
            max(free[rank], *(free[peer] for peer in seconds.peers)) + seconds.busy_s + seconds.after_s
            if seconds.peers
            else free[rank]
            for rank, seconds in enumerate(self._exchanged(steps, count))
        ]

    def _exchanged(self, steps: Round, count: int) -> list[Exchanged]:
        """What a round's messages are to each rank; remembered where rounds are many and say so in a few numbers."""
        if not all(isinstance(vector, (Shift, Grid)) for step in steps for vector in (step.peer, step.count)):
            return self._exchange(steps, count)
        key = (count, *((step.kind, step.peer, step.count, step.reduce) for step in steps))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._exchange(steps, count)
        return known

    def _exchange(self, steps: Round, count: int) -> list[Exchanged]:
        sends, receives, after = [0.0] * count, [0.0] * count, [0.0] * count
        peers: list[list[int]] = [[] for _ in range(count)]
        for step in steps:
            if step.kind not in ("send", "recv"):
                continue
            is_send = step.kind == "send"
            parts = _parts(step, count)
            sent: list[Sent] = [
                (rank, peer, slots * self.chunk) if is_send else (peer, rank, slots * self.chunk)
                for rank, peer, slots in parts
            ]
            took = self.topology.times(sent, count)
            busy = sends if is_send else receives
            for (rank, peer, slots), seconds in zip(parts, took, strict=True):
                peers[rank].append(peer % count)
                busy[rank] += seconds
                after[rank] += self.memory.reduce_s(slots * self.chunk) if step.reduce else 0.0
        return [Exchanged(tuple(peers[r]), max(sends[r], receives[r]), after[r]) for r in range(count)]

    def _meet(self, step: RoundStep, free: list[float]) -> None:
        groups = step.peer if len(free) == self.ranks else [step.peer[rank] for rank in range(len(free))]
        latest: dict[int, float] = {}
        for rank, group in enumerate(groups):
            latest[group] = max(latest.get(group, 0.0), free[rank])
        for rank, group in enumerate(groups):
            if group != NOBODY:
                free[rank] = latest[group] + self.memory.sync_s


def _period(step: RoundStep, ranks: int) -> int:
    """How far apart ranks are that take part in the same way but for their place."""
    if not _is_constant(step.count):
        return ranks
    if isinstance(step.peer, Shift):
        return 1
    return step.peer.size if isinstance(step.peer, Grid) else ranks


def _is_constant(vector: Vector) -> bool:
    return isinstance(vector, Shift) and vector.scale == 0


def _parts(step: RoundStep, ranks: int) -> list[tuple[int, int, int]]:
    """(rank, peer, slots) of the first so many ranks that take part."""
    if ranks == len(step.peer):
        pairs = enumerate(zip(step.peer, step.count, strict=True))
        return [(rank, peer, slots) for rank, (peer, slots) in pairs if peer != NOBODY and slots > 0]
    some = [(rank, step.peer[rank], step.count[rank]) for rank in range(ranks)]
    return [part for part in some if part[1] != NOBODY and part[2] > 0]


def crossovers(times: Mapping[str, Sequence[tuple[int, float]]]) -> list[tuple[int, int, str, str]]:
    """Where the quickest changes: (last size of the one, first size of the other, the one, the other)."""
    sizes = sorted({size for points in times.values() for size, _ in points})
    best = []
    for size in sizes:
        here = {name: dict(points)[size] for name, points in times.items() if size in dict(points)}
        best.append(min(here, key=lambda name: here[name]))
    return [(sizes[i], sizes[i + 1], best[i], best[i + 1]) for i in range(len(sizes) - 1) if best[i] != best[i + 1]]
