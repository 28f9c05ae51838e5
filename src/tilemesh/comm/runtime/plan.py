"""A collective call made ready: schedule, program and memory, kept and used again for the next call like it.

Small calls keep their memory and all their views between calls; large ones run in the caller's own buffers, where
making the views anew costs nothing that could be noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tilemesh.comm.runtime.arena import DIRECT_SEGMENT_BYTES, HALF_BYTES, SEGMENT_BYTES
from tilemesh.comm.runtime.arithmetic import combiner
from tilemesh.comm.runtime.lower import Program, lower
from tilemesh.comm.runtime.memory import Like
from tilemesh.comm.runtime.run import Bound, Memory
from tilemesh.comm.runtime.transport import Array, Transport
from tilemesh.comm.schedules.book import build, is_direct, is_shared
from tilemesh.comm.schedules.collectives import REDUCING, Layout, layout
from tilemesh.comm.schedules.schedule import DATA, INPUT, TEMP

KEPT_BYTES = 64 << 10  # up to this many bytes of input and result, a call's memory is kept
KEPT_PROGRAMS = 512

_IN_PLACE = ("all_reduce", "reduce", "broadcast", "all_gather")


class Shape(NamedTuple):
    """All that a program depends on, besides the rank: the key under which it is kept."""

    collective: str
    algorithm: str
    root: int
    sizes: tuple[int, ...]
    received: tuple[int, ...]
    like: Like
    op: str


class Planner:
    """The programs of one communicator."""

    def __init__(self, transport: Transport, node_size: int | None = None) -> None:
        self.transport = transport
        self.node_size = node_size
        self.program: Callable[[Shape], Program] = lru_cache(maxsize=KEPT_PROGRAMS)(self._program)
        self.free: dict[Shape, list[Bound]] = {}

    def _layout(self, shape: Shape, rank: int, chunks: int) -> Layout:
        return layout(shape.collective, rank, shape.root, self.transport.size, chunks, shape.sizes, shape.received)

    def _program(self, shape: Shape) -> Program:
        if is_shared(shape.algorithm):
            return self._over_the_stage(shape)
        return self._lowered(shape)

    def _lowered(self, shape: Shape, stage_segments: int = 1) -> Program:
        schedule = build(
            shape.collective,
            shape.algorithm,
            self.transport.size,
            shape.root,
            stage_segments=stage_segments,
            node_size=self.node_size,
        )
        return lower(schedule, self.transport.rank, lambda rank: self._layout_of(shape, rank, schedule.chunks))

    def _over_the_stage(self, shape: Shape) -> Program:
        """In as many segments as the stage asks for: the same number on every rank."""
        size = shape.like.carrier.itemsize
        blocks = {"all_gather": 1, "gather": 1}.get(shape.collective, len(shape.sizes))
        staged = max(shape.sizes, default=0) * blocks * size
        segment = SEGMENT_BYTES
        if is_direct(shape.algorithm):  # what is reduced passes over the stage, or at least through the caches
            segment = DIRECT_SEGMENT_BYTES
        segments = max(1, -(-staged // segment))
        while True:
            program = self._lowered(shape, segments)
            if program.lengths[TEMP] * size <= HALF_BYTES or not program.shared:
                return program
            segments *= 2

    def _layout_of(self, shape: Shape, rank: int, chunks: int) -> Layout:
        if shape.collective == "all_to_all" and rank != self.transport.rank:
            # What another rank has: it sends the same sizes as we do, and receives as many of its own each time.
            received = (shape.sizes[rank],) * self.transport.size
            return layout("all_to_all", rank, 0, self.transport.size, chunks, shape.sizes, received)
        return self._layout(shape, rank, chunks)

    def bound(self, shape: Shape, given: Array, data: Array | None) -> Bound:
        """The program over its memory, with the input in place."""
        program = self.program(shape)
        carrier = shape.like.carrier
        if (program.lengths[INPUT] + program.lengths[DATA]) * carrier.itemsize <= KEPT_BYTES:
            pool = self.free.setdefault(shape, [])
            bound = pool.pop() if pool else self._bind(shape, program, Memory(program, carrier, None, None))
            np.copyto(bound.memory.spaces[INPUT], given)
            return bound
        if data is not None and np.may_share_memory(given, data) and not self._may_alias(shape, given, data):
            given = given.copy()
        return self._bind(shape, program, Memory(program, carrier, given, data))

    def done(self, shape: Shape, bound: Bound) -> None:
        """The call is over: what can be used again is kept."""
        if shape in self.free:
            self.free[shape].append(bound)
            if len(self.free) > KEPT_PROGRAMS:
                del self.free[next(iter(self.free))]

    def _bind(self, shape: Shape, program: Program, memory: Memory) -> Bound:
        combine = combiner(shape.op, shape.like.dtype) if shape.collective in (*REDUCING, "barrier") else None
        return Bound(program, self.transport, combine, memory)

    def _may_alias(self, shape: Shape, given: Array, data: Array) -> bool:
        """Whether the input lies in the result exactly where the schedule would copy it first."""
        if shape.collective not in _IN_PLACE:
            return False
        before = sum(shape.sizes[: self.transport.rank]) if shape.collective == "all_gather" else 0
        start = data[before : before + given.size]
        return given.size == start.size and given.__array_interface__["data"][0] == start.__array_interface__["data"][0]
