"""How long a schedule would take: an α-β-γ clock over a topology, without a byte moved.

A message starts when both ends have come to its round and takes the wire's latency (α) and its bytes over the wire's
bandwidth (β); a rank's messages in one direction follow each other, both directions run at once; a reduction adds its
bytes over the reducing bandwidth (γ). Where every rank does the same over equal wires, one rank stands for all, so a
ring of thousands of ranks is a matter of seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tilemesh.comm.schedules.collectives import BLOCKED
from tilemesh.comm.schedules.schedule import NOBODY, Round, Schedule, Shift, Step, Vector
from tilemesh.core.errors import UsageError


@dataclass(frozen=True)
class Wire:
    """One direction between two ranks."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


class Topology(Protocol):
    @property
    def ranks(self) -> int: ...

    @property
    def is_uniform(self) -> bool:
        """Whether all wires are alike."""

    def wire(self, source: int, target: int) -> Wire: ...


@dataclass(frozen=True)
class Flat:
    """Every rank reaches every other over a wire of its own."""

    ranks: int
    every: Wire
    is_uniform: bool = True

    def wire(self, source: int, target: int) -> Wire:
        return self.every


@dataclass(frozen=True)
class TwoLevel:
    """Nodes of neighbouring ranks: fast wires inside, slower ones between."""

    ranks: int
    node_size: int
    inside: Wire
    between: Wire

    @property
    def is_uniform(self) -> bool:
        return self.inside == self.between or self.ranks <= self.node_size

    def wire(self, source: int, target: int) -> Wire:
        return self.inside if source // self.node_size == target // self.node_size else self.between


@dataclass(frozen=True)
class Memory:
    """What a rank does by itself: combining, copying and reading, bytes of result per second; and meeting others."""

    reduce_bytes_per_s: float
    copy_bytes_per_s: float
    sync_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """When the last rank was done, and after how many rounds."""

    seconds: float
    rounds: int
    finished_s: tuple[float, ...]


def simulate(schedule: Schedule, nbytes: int, topology: Topology, memory: Memory) -> Timeline:
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
    finished = clock.times()
    return Timeline(max(finished), rounds, tuple(finished))


class _Clock:
    """When each rank is free again. While all are equal, one number is kept instead of a list."""

    def __init__(self, ranks: int, chunk: float, topology: Topology, memory: Memory) -> None:
        self.ranks = ranks
        self.chunk = chunk
        self.topology = topology
        self.memory = memory
        self.together = 0.0
        self.apart: list[float] | None = None

    def times(self) -> list[float]:
        return [self.together] * self.ranks if self.apart is None else self.apart

    def round(self, steps: Round) -> None:
        if self.apart is None and self.topology.is_uniform and all(_is_alike(step) for step in steps):
            self.together += self._alike(steps)
            return
        self.apart = self._ranks(steps, self.times())
        if min(self.apart) == max(self.apart):
            self.together, self.apart = self.apart[0], None

    def _alike(self, steps: Round) -> float:
        """A round in which rank 0 stands for everybody."""
        sends = receives = local = 0.0
        for step in steps:
            nbytes = step.count[0] * self.chunk
            if step.kind == "send":
                sends += self.topology.wire(0, 0).seconds(nbytes)
            elif step.kind == "recv":
                receives += self.topology.wire(0, 0).seconds(nbytes)
                local += nbytes / self.memory.reduce_bytes_per_s if step.reduce else 0.0
            else:
                local += self._local(step, nbytes)
        return max(sends, receives) + local

    def _local(self, step: Step, nbytes: float) -> float:
        if step.kind == "sync":
            return self.memory.sync_s
        return nbytes / (self.memory.reduce_bytes_per_s if step.reduce else self.memory.copy_bytes_per_s)

    def _ranks(self, steps: Round, ready: list[float]) -> list[float]:
        before = list(ready)
        for step in steps:
            if step.kind == "sync":
                self._meet(step, before)
        for step in steps:
            if step.kind in ("copy", "read"):
                for rank, _, count in _parts(step):
                    before[rank] += self._local(step, count * self.chunk)
        start, sends, receives, after = list(before), [0.0] * self.ranks, [0.0] * self.ranks, [0.0] * self.ranks
        for step in steps:
            if step.kind in ("send", "recv"):
                for rank, peer, count in _parts(step):
                    nbytes = count * self.chunk
                    start[rank] = max(start[rank], before[peer])
                    seconds = self.topology.wire(rank, peer).seconds(nbytes)
                    (sends if step.kind == "send" else receives)[rank] += seconds
                    after[rank] += nbytes / self.memory.reduce_bytes_per_s if step.reduce else 0.0
        return [start[r] + max(sends[r], receives[r]) + after[r] for r in range(self.ranks)]

    def _meet(self, step: Step, ready: list[float]) -> None:
        latest: dict[int, float] = {}
        for rank, group in enumerate(step.peer):
            latest[group] = max(latest.get(group, 0.0), ready[rank])
        for rank, group in enumerate(step.peer):
            if group != NOBODY:
                ready[rank] = latest[group] + self.memory.sync_s


def _is_alike(step: Step) -> bool:
    """Whether all ranks take part, in the same way but for their place."""
    return isinstance(step.peer, Shift) and _is_constant(step.count)


def _is_constant(vector: Vector) -> bool:
    return isinstance(vector, Shift) and vector.scale == 0


def _parts(step: Step) -> list[tuple[int, int, int]]:
    return [
        (rank, peer, count)
        for rank, (peer, count) in enumerate(zip(step.peer, step.count, strict=True))
        if peer != NOBODY and count > 0
    ]
