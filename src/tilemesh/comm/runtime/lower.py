"""From a schedule to one rank's program: a flat list of instructions over ranges of elements, then over real memory.

All that depends only on (schedule, rank, sizes) is decided here, once: which messages belong together, where a reduced
message lands, and what can start early. The receive (and, where nothing stands in the way, the send) of round k+1 is
posted before what came in round k is reduced, so that the wire works while the rank adds.

`MessageProgram` is a program whose every range has become a view of real memory; its `steps` carry it out. `Planner`
keeps both for the next call like it: small calls keep their memory and all their views between calls; large ones run
in the caller's own buffers, where making the views anew costs nothing that could be noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tilemesh.comm.runtime.arena import DIRECT_SEGMENT_BYTES, HALF_BYTES, SEGMENT_BYTES
from tilemesh.comm.runtime.arithmetic import Combine, combiner, ufunc_of
from tilemesh.comm.runtime.memory import Like, as_bytes, same_start
from tilemesh.comm.runtime.observe import Stopwatch
from tilemesh.comm.runtime.transport import Array, Message, Token, Transport
from tilemesh.comm.schedules.book import build, is_direct, is_shared
from tilemesh.comm.schedules.collectives import REDUCING, Layout, layout
from tilemesh.comm.schedules.schedule import DATA, INPUT, TEMP, Move, Schedule, moves

LANDING = 3  # where messages that will be reduced arrive: two halves, used in turn

KEPT_BYTES = 64 << 10  # up to this many bytes of input and result, a call's memory is kept
KEPT_PROGRAMS = 512

_IN_PLACE = ("all_reduce", "reduce", "broadcast", "all_gather")


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """Elements lo … hi of a space."""

    space: int
    lo: int
    hi: int

    def overlaps(self, other: MemorySpan) -> bool:
        return self.space == other.space and self.lo < other.hi and other.lo < self.hi


@dataclass(frozen=True, slots=True)
class Post:
    """Start messages: (is_send, peer, where)."""

    number: int
    messages: tuple[tuple[bool, int, MemorySpan], ...]


@dataclass(frozen=True, slots=True)
class Wait:
    number: int


@dataclass(frozen=True, slots=True)
class Local:
    """Copy into `target`, or combine with what it holds; from a neighbour's memory where `peer` is not -1."""

    target: MemorySpan
    source: MemorySpan
    reduce: bool
    peer: int = -1


@dataclass(frozen=True, slots=True)
class Meet:
    """Wait for the others of the arena."""


Instruction = Post | Wait | Local | Meet


@dataclass(frozen=True)
class Program:
    """One rank's part in a schedule over buffers of known sizes, in elements."""

    instructions: tuple[Instruction, ...]
    lengths: tuple[int, int, int, int]  # of INPUT, DATA, TEMP and LANDING
    shared: frozenset[int]


@dataclass
class _OwnRound:
    """What one rank does in one round."""

    meets: bool = False
    locals: list[Local] = field(default_factory=list)
    receives: list[tuple[int, MemorySpan]] = field(default_factory=list)
    sends: list[tuple[int, MemorySpan]] = field(default_factory=list)
    combines: list[Local] = field(default_factory=list)


def lower(schedule: Schedule, rank: int, layout_of: Callable[[int], Layout]) -> Program:
    """`layout_of(rank)`: the slot sizes of any rank (a read needs the neighbour's)."""
    places = _Places(schedule, layout_of)
    rounds: list[_OwnRound] = []
    landing = 0
    for round_ in schedule.rounds():
        own, arriving = _own_round(moves(round_, rank), rank, places)
        landing = max(landing, arriving)
        if own.meets or own.locals or own.receives or own.sends:
            rounds.append(own)
    for index, own in enumerate(rounds):
        _land(own, (index % 2) * landing)
    ends = [places.offsets(rank, space)[-1] for space in (INPUT, DATA, TEMP)]
    return Program(tuple(_instructions(rounds)), (ends[0], ends[1], ends[2], 2 * landing), schedule.shared)


class _Places:
    """Where slots lie: prefix sums of their sizes, for each rank that is asked about."""

    def __init__(self, schedule: Schedule, layout_of: Callable[[int], Layout]) -> None:
        self.temp_slots = schedule.temp
        self.layout_of = layout_of
        self.known: dict[tuple[int, int], list[int]] = {}
        self.is_stage = TEMP in schedule.shared  # no message fills its slots
        self.filled: dict[int, int] = {}  # how much the stage's slots hold that could hold more

    def offsets(self, rank: int, space: int) -> list[int]:
        key = (rank, space)
        if key not in self.known:
            self.known[key] = [0, *accumulate(self.layout_of(rank).sizes(space, self.temp_slots))]
        return self.known[key]

    def span(self, rank: int, space: int, at: int, count: int) -> MemorySpan:
        offsets = self.offsets(rank, space)
        return MemorySpan(space, offsets[at], offsets[at + count])


def _own_round(parts: list[Move], rank: int, places: _Places) -> tuple[_OwnRound, int]:
    """One round's work of a rank, and how many elements arrive to be reduced."""
    own = _OwnRound()
    arriving = 0
    for move in parts:
        if move.kind == "sync":
            own.meets = True
            continue
        if move.kind in ("copy", "read"):
            own.locals += _locals(move, rank, places)
            continue
        span = places.span(rank, move.space, move.at, move.count)
        if span.lo == span.hi:
            continue
        if move.kind == "send":
            own.sends.append((move.peer, span))
        elif not move.reduce:
            own.receives.append((move.peer, span))
        else:
            length = span.hi - span.lo
            landing = MemorySpan(LANDING, arriving, arriving + length)
            own.receives.append((move.peer, landing))
            own.combines.append(Local(span, landing, reduce=True))
            arriving += length
    return own, arriving


def _locals(move: Move, rank: int, places: _Places) -> list[Local]:
    """A copy or read of neighbouring slots is one instruction, unless TEMP, with its larger slots, is on one side.

    What lies behind the end of a slot's contents is of an earlier call: added up, it could be reported as an overflow.
    All ranks fill the slots of a stage alike, so what this one has put there tells how much a neighbour's holds.
    """
    owner = move.peer if move.kind == "read" else rank
    peer = owner if owner != rank else -1
    filled = places.filled
    is_within = move.space == TEMP == move.source
    slots = range(move.source_at, move.source_at + move.count)
    uneven = (move.space == TEMP) != (move.source == TEMP) or (is_within and any(slot in filled for slot in slots))
    result = []
    for i in range(move.count if uneven else 1):
        count = 1 if uneven else move.count
        target = places.span(rank, move.space, move.at + i, count)
        source = places.span(owner, move.source, move.source_at + i, count)
        length = min(target.hi - target.lo, source.hi - source.lo)
        if is_within:
            length = min(length, filled.get(move.source_at + i, length))
        if move.space == TEMP and not move.reduce and places.is_stage:
            filled.pop(move.at + i, None)
            if length < target.hi - target.lo:
                filled[move.at + i] = length
        if length:
            result.append(
                Local(
                    MemorySpan(target.space, target.lo, target.lo + length),
                    MemorySpan(source.space, source.lo, source.lo + length),
                    move.reduce,
                    peer,
                )
            )
    return result


def _land(own: _OwnRound, base: int) -> None:
    """Put the round's landing places into its half."""

    def moved(span: MemorySpan) -> MemorySpan:
        return MemorySpan(LANDING, span.lo + base, span.hi + base) if span.space == LANDING else span

    own.receives = [(peer, moved(span)) for peer, span in own.receives]
    own.combines = [Local(local.target, moved(local.source), True) for local in own.combines]


def _instructions(rounds: list[_OwnRound]) -> list[Instruction]:
    program: list[Instruction] = []
    posted = 0
    waiting: list[int] = []

    def post(receives: list[tuple[int, MemorySpan]], sends: list[tuple[int, MemorySpan]]) -> None:
        nonlocal posted
        messages = [(False, *receive) for receive in receives] + [(True, *send) for send in sends]
        if messages:
            program.append(Post(posted, tuple(messages)))
            waiting.append(posted)
            posted += 1

    early_receives = early_sends = False
    for index, own in enumerate(rounds):
        if own.meets:
            program.append(Meet())
        program += own.locals
        post([] if early_receives else own.receives, [] if early_sends else own.sends)
        program += [Wait(number) for number in waiting]
        waiting.clear()
        following = rounds[index + 1] if index + 1 < len(rounds) else _OwnRound(meets=True)
        is_plain = not following.meets and not following.locals
        early_receives = is_plain and not _touch(following.receives, own.combines)
        early_sends = early_receives and not _touch(following.sends, own.combines)
        if early_receives:
            post(following.receives, following.sends if early_sends else [])
        program += own.combines
    return program


def _touch(messages: list[tuple[int, MemorySpan]], combines: list[Local]) -> bool:
    return any(span.overlaps(local.target) for _, span in messages for local in combines)


# Over real memory -----------------------------------------------------------------------------------------------------

_POST, _WAIT, _COPY, _REDUCE = range(4)
_PARTS = ("wire", "wire", "copy", "reduce")  # of a stopwatch, by instruction


class MessageProgram:
    """A program with its memory: views made once, used at every call."""

    def __init__(
        self, program: Program, transport: Transport, function: Any, combine: Combine | None, spaces: Spaces
    ) -> None:
        """`function`: numpy's own for the operation, where it has one that takes its result by position."""
        self.transport = transport
        self.function = function
        self.combine = combine
        self.spaces = spaces
        self.posts = 0
        self.code: list[tuple[int, Any, Any]] = []
        for instruction in program.instructions:
            self._bind(instruction)

    def _bind(self, instruction: Instruction) -> None:
        if isinstance(instruction, Post):
            self.posts += 1
            messages = [self._message(*message) for message in instruction.messages]
            self.code.append((_POST, instruction.number, messages))
        elif isinstance(instruction, Wait):
            self.code.append((_WAIT, instruction.number, None))
        elif isinstance(instruction, Local):
            target, source = self.spaces.view(instruction.target), self.spaces.view(instruction.source)
            if instruction.reduce:
                self.code.append((_REDUCE, target, source))
            elif not same_start(target, source):
                self.code.append((_COPY, target, source))

    def _message(self, is_send: bool, peer: int, span: MemorySpan) -> Message:
        region = as_bytes(self.spaces.view(span))
        return Message(is_send, peer, self.transport.view(region), region.nbytes)

    def steps(self, tag: int, stopwatch: Stopwatch | None = None) -> Iterator[Token]:
        """Carry the program out, yielding what must be done before it can go on."""
        post, function, combine, copy = self.transport.post, self.function, self.combine, np.copyto
        tokens: list[Token] = [None] * self.posts  # type: ignore[list-item]
        for code, first, second in self.code:
            if stopwatch is not None:
                stopwatch.begin(_PARTS[code])
            if code == _POST:
                tokens[first] = post(second, tag)
            elif code == _WAIT:
                yield tokens[first]
            elif code == _REDUCE and function is not None:
                function(first, second, first)
            elif code == _REDUCE:
                combine(first, second)  # type: ignore[misc]
            else:
                copy(first, second)
        if stopwatch is not None:
            stopwatch.begin(None)


class Spaces:
    """The spaces of one rank as flat arrays. Given arrays are used as they are; missing ones are made."""

    def __init__(self, program: Program, carrier: np.dtype[Any], inputs: Array | None, data: Array | None) -> None:
        lengths = program.lengths
        self.arrays: dict[int, Array] = {
            INPUT: np.empty(lengths[INPUT], carrier) if inputs is None else inputs,
            DATA: np.empty(lengths[DATA], carrier) if data is None else data,
            TEMP: np.empty(lengths[TEMP], carrier),
            LANDING: np.empty(lengths[LANDING], carrier),
        }

    def view(self, span: MemorySpan) -> Array:
        return self.arrays[span.space][span.lo : span.hi]


class ProgramKey(NamedTuple):
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
        self.program: Callable[[ProgramKey], Program] = lru_cache(maxsize=KEPT_PROGRAMS)(self._program)
        self.free: dict[ProgramKey, list[MessageProgram]] = {}

    def _layout(self, key: ProgramKey, rank: int, chunks: int) -> Layout:
        return layout(key.collective, rank, key.root, self.transport.size, chunks, key.sizes, key.received)

    def _program(self, key: ProgramKey) -> Program:
        if is_shared(key.algorithm):
            return self._over_the_stage(key)
        return self._lowered(key)

    def _lowered(self, key: ProgramKey, stage_segments: int = 1) -> Program:
        schedule = build(
            key.collective,
            key.algorithm,
            self.transport.size,
            key.root,
            stage_segments=stage_segments,
            node_size=self.node_size,
        )
        return lower(schedule, self.transport.rank, lambda rank: self._layout_of(key, rank, schedule.chunks))

    def _over_the_stage(self, key: ProgramKey) -> Program:
        """In as many segments as the stage asks for: the same number on every rank."""
        size = key.like.carrier.itemsize
        blocks = {"all_gather": 1, "gather": 1}.get(key.collective, len(key.sizes))
        staged = max(key.sizes, default=0) * blocks * size
        segment = SEGMENT_BYTES
        if is_direct(key.algorithm):  # what is reduced passes over the stage, or at least through the caches
            segment = DIRECT_SEGMENT_BYTES
        segments = max(1, -(-staged // segment))
        while True:
            program = self._lowered(key, segments)
            if program.lengths[TEMP] * size <= HALF_BYTES or not program.shared:
                return program
            segments *= 2

    def _layout_of(self, key: ProgramKey, rank: int, chunks: int) -> Layout:
        if key.collective == "all_to_all" and rank != self.transport.rank:
            # What another rank has: it sends the same sizes as we do, and receives as many of its own each time.
            received = (key.sizes[rank],) * self.transport.size
            return layout("all_to_all", rank, 0, self.transport.size, chunks, key.sizes, received)
        return self._layout(key, rank, chunks)

    def bound(self, key: ProgramKey, inputs: Array, data: Array | None) -> MessageProgram:
        """The program over its memory, with the input in place."""
        program = self.program(key)
        carrier = key.like.carrier
        if (program.lengths[INPUT] + program.lengths[DATA]) * carrier.itemsize <= KEPT_BYTES:
            pool = self.free.setdefault(key, [])
            bound = pool.pop() if pool else self._bind(key, program, Spaces(program, carrier, None, None))
            np.copyto(bound.spaces.arrays[INPUT], inputs)
            return bound
        if data is not None and np.may_share_memory(inputs, data) and not self._may_alias(key, inputs, data):
            inputs = inputs.copy()
        return self._bind(key, program, Spaces(program, carrier, inputs, data))

    def done(self, key: ProgramKey, bound: MessageProgram) -> None:
        """The call is over: what can be used again is kept."""
        if key in self.free:
            self.free[key].append(bound)
            if len(self.free) > KEPT_PROGRAMS:
                del self.free[next(iter(self.free))]

    def _bind(self, key: ProgramKey, program: Program, spaces: Spaces) -> MessageProgram:
        if key.collective not in (*REDUCING, "barrier"):
            return MessageProgram(program, self.transport, None, None, spaces)
        function = None if key.op in ("min", "max") else ufunc_of(key.op, key.like.dtype)
        return MessageProgram(program, self.transport, function, combiner(key.op, key.like.dtype), spaces)

    def _may_alias(self, key: ProgramKey, inputs: Array, data: Array) -> bool:
        """Whether the input lies in the result exactly where the schedule would copy it first."""
        if key.collective not in _IN_PLACE:
            return False
        before = sum(key.sizes[: self.transport.rank]) if key.collective == "all_gather" else 0
        start = data[before : before + inputs.size]
        return inputs.size == start.size and same_start(inputs, start)
