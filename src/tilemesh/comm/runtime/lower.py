"""From a schedule to one rank's program: a flat list of instructions over ranges of elements.

All that depends only on (schedule, rank, sizes) is decided here, once: which messages belong together, where a reduced
message lands, and what can start early. The receive (and, where nothing stands in the way, the send) of round k+1 is
posted before what came in round k is reduced, so that the wire works while the rank adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from tilemesh.comm.schedules.collectives import Layout
from tilemesh.comm.schedules.schedule import DATA, INPUT, TEMP, Move, Schedule, moves

LANDING = 3  # where messages that will be reduced arrive: two halves, used in turn


@dataclass(frozen=True, slots=True)
class Span:
    """Elements lo … hi of a space."""

    space: int
    lo: int
    hi: int

    def overlaps(self, other: Span) -> bool:
        return self.space == other.space and self.lo < other.hi and other.lo < self.hi


@dataclass(frozen=True, slots=True)
class Post:
    """Start messages: (is_send, peer, where)."""

    number: int
    messages: tuple[tuple[bool, int, Span], ...]


@dataclass(frozen=True, slots=True)
class Wait:
    number: int


@dataclass(frozen=True, slots=True)
class Local:
    """Copy into `target`, or combine with what it holds; from a neighbour's memory where `peer` is not -1."""

    target: Span
    source: Span
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
    sent_messages: int
    sent_elements: int


@dataclass
class _Turn:
    """What one rank does in one round."""

    meets: bool = False
    locals: list[Local] = field(default_factory=list)
    receives: list[tuple[int, Span]] = field(default_factory=list)
    sends: list[tuple[int, Span]] = field(default_factory=list)
    combines: list[Local] = field(default_factory=list)


def lower(schedule: Schedule, rank: int, layout_of: Callable[[int], Layout]) -> Program:
    """`layout_of(rank)`: the slot sizes of any rank (a read needs the neighbour's)."""
    places = _Places(schedule, layout_of)
    turns: list[_Turn] = []
    landing = 0
    for round_ in schedule.rounds():
        turn, arriving = _turn(moves(round_, rank), rank, places)
        landing = max(landing, arriving)
        if turn.meets or turn.locals or turn.receives or turn.sends:
            turns.append(turn)
    for index, turn in enumerate(turns):
        _land(turn, (index % 2) * landing)
    sent = [span for turn in turns for _, span in turn.sends]
    ends = [places.offsets(rank, space)[-1] for space in (INPUT, DATA, TEMP)]
    return Program(
        tuple(_instructions(turns)),
        (ends[0], ends[1], ends[2], 2 * landing),
        schedule.shared,
        len(sent),
        sum(span.hi - span.lo for span in sent),
    )


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

    def span(self, rank: int, space: int, at: int, count: int) -> Span:
        offsets = self.offsets(rank, space)
        return Span(space, offsets[at], offsets[at + count])


def _turn(parts: list[Move], rank: int, places: _Places) -> tuple[_Turn, int]:
    """One round's work of a rank, and how many elements arrive to be reduced."""
    turn = _Turn()
    arriving = 0
    for move in parts:
        if move.kind == "sync":
            turn.meets = True
            continue
        if move.kind in ("copy", "read"):
            turn.locals += _locals(move, rank, places)
            continue
        span = places.span(rank, move.space, move.at, move.count)
        if span.lo == span.hi:
            continue
        if move.kind == "send":
            turn.sends.append((move.peer, span))
        elif not move.reduce:
            turn.receives.append((move.peer, span))
        else:
            length = span.hi - span.lo
            landing = Span(LANDING, arriving, arriving + length)
            turn.receives.append((move.peer, landing))
            turn.combines.append(Local(span, landing, reduce=True))
            arriving += length
    return turn, arriving


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
                    Span(target.space, target.lo, target.lo + length),
                    Span(source.space, source.lo, source.lo + length),
                    move.reduce,
                    peer,
                )
            )
    return result


def _land(turn: _Turn, base: int) -> None:
    """Put the round's landing places into its half."""

    def moved(span: Span) -> Span:
        return Span(LANDING, span.lo + base, span.hi + base) if span.space == LANDING else span

    turn.receives = [(peer, moved(span)) for peer, span in turn.receives]
    turn.combines = [Local(local.target, moved(local.source), True) for local in turn.combines]


def _instructions(turns: list[_Turn]) -> list[Instruction]:
    program: list[Instruction] = []
    posted = 0
    waiting: list[int] = []

    def post(receives: list[tuple[int, Span]], sends: list[tuple[int, Span]]) -> None:
        nonlocal posted
        messages = [(False, *receive) for receive in receives] + [(True, *send) for send in sends]
        if messages:
            program.append(Post(posted, tuple(messages)))
            waiting.append(posted)
            posted += 1

    early_receives = early_sends = False
    for index, turn in enumerate(turns):
        if turn.meets:
            program.append(Meet())
        program += turn.locals
        post([] if early_receives else turn.receives, [] if early_sends else turn.sends)
        program += [Wait(number) for number in waiting]
        waiting.clear()
        following = turns[index + 1] if index + 1 < len(turns) else _Turn(meets=True)
        is_plain = not following.meets and not following.locals
        early_receives = is_plain and not _touch(following.receives, turn.combines)
        early_sends = early_receives and not _touch(following.sends, turn.combines)
        if early_receives:
            post(following.receives, following.sends if early_sends else [])
        program += turn.combines
    return program


def _touch(messages: list[tuple[int, Span]], combines: list[Local]) -> bool:
    return any(span.overlaps(local.target) for _, span in messages for local in combines)
