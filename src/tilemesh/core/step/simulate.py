"""A step on a clock: when each action begins and ends, and how long every rank waits.

A rank computes one action after the other. Everything that moves data begins when the list reaches it and runs beside
computing: messages without limit, collectives one after the other, copies to and from the host one after the other.
A message delays whoever waits for it and occupies nobody. What a pass exchanges with experts of other ranks is part of
the pass's time, but for what is computed meanwhile, and has a lane of its own (`Timeline.exchanges`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import EVERY, Action, PassDone, StepProgram, makes, parts

_NOT_YET = float("-inf")
_COMPUTE, _EXCHANGE, _COPY, _WIRE = range(4)
_LANES = {"GATHER": _EXCHANGE, "REDUCE": _EXCHANGE, "OUT": _COPY, "IN": _COPY, "SEND": _WIRE, "RECV": _WIRE}


class ExchangeTimes(NamedTuple):
    """A layer's pass around its two exchanges with experts of other ranks, in the order of the pass."""

    before_s: float
    first_s: float
    """Forward of DISPATCH, backward of COMBINE ..."""
    beside_first_s: float
    """... and of what is computed before the rank waits for it."""
    between_s: float
    """The experts."""
    second_s: float
    beside_second_s: float
    after_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.second_begin_s + max(self.second_s, self.beside_second_s) + self.after_s

    @property
    def second_begin_s(self) -> float:
        return self.before_s + max(self.first_s, self.beside_first_s) + self.between_s

    @property
    def spans(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Beginning and end of both, from the beginning of the layer's pass."""
        return (self.before_s, self.before_s + self.first_s), (self.second_begin_s, self.second_begin_s + self.second_s)


class RoutedTimes(NamedTuple):
    """Of every layer whose experts other ranks have too."""

    forward: ExchangeTimes
    backward: ExchangeTimes
    """Of I ..."""
    weight_s: float = 0.0
    """... and what B has to do more."""

    def of(self, inner: Action, is_whole: bool) -> ExchangeTimes:
        """Of the layer that an exchange belongs to. `is_whole`: in a backward pass that is not in two halves."""
        if inner.of == "activation" or not is_whole:
            return self.forward if inner.of == "activation" else self.backward
        half_s = self.weight_s / 2
        back = self.backward
        return back._replace(between_s=back.between_s + half_s, after_s=back.after_s + half_s)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the actions, by chunk where it matters."""

    forward_s: Sequence[float]
    input_s: Sequence[float]
    """Of I. B takes I and W together."""
    weight_s: Sequence[float]
    transfer_s: float = 0.0
    """From the end of a pass on one rank until its message can be used on another."""
    pair_s: float | None = None
    """Of FB; None: F and B one after the other."""
    gather_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    copy_s: float = 0.0
    """Of OUT and of IN."""
    slice_shares: Sequence[float] = (1.0,)
    """What each slice takes of its chunk's time."""
    routed: RoutedTimes | None = None
    """Where passes exchange rows with experts: how their layers, whose seconds are in those of the passes, divide."""

    @classmethod
    def even(cls, chunks: int, forward_s: float, input_s: float, weight_s: float, transfer_s: float = 0.0) -> StepTimes:
        """All chunks alike."""
        return cls([forward_s] * chunks, [input_s] * chunks, [weight_s] * chunks, transfer_s)

    def of(self, action: Action) -> float:
        if action.kind == "FB":
            forward, backward = parts(action)
            return self.of(forward) + self.of(backward) if self.pair_s is None else self.pair_s
        share = self.slice_shares[action.slice] if len(self.slice_shares) > 1 else 1.0
        match action.kind:
            case "F" | "RECOMPUTE":
                return self.forward_s[action.chunk] * share
            case "I":
                return self.input_s[action.chunk] * share
            case "W":
                return self.weight_s[action.chunk] * share
            case "B":
                return (self.input_s[action.chunk] + self.weight_s[action.chunk]) * share
            case "GATHER":
                return self.gather_s
            case "REDUCE":
                return self.reduce_s
            case "UPDATE":
                return self.update_s
            case "OUT" | "IN":
                return self.copy_s
        return self.transfer_s if action.kind == "SEND" else 0.0

    def within(self, program: StepProgram, action: Action) -> Iterator[tuple[Action, float, float]]:
        """What a pass exchanges with experts of other ranks, with its beginning and end from that of the pass.

        The embedding comes before the layers of the first chunk, the head after those of the last.
        """
        if self.routed is None:
            return
        began_s = 0.0
        for part in parts(action) or (action,):
            exchanges = program.within(part)
            share = self.slice_shares[part.slice] if len(self.slice_shares) > 1 else 1.0
            layers = [self.routed.of(inner, part.kind == "B") for inner in exchanges[::2]]
            rest_s = max(0.0, self.of(part) - share * sum(layer.total_s for layer in layers))
            is_alone_first = part.chunk == 0 and program.chunks > 1
            now = began_s + rest_s * ((part.kind in ("F", "RECOMPUTE")) == is_alone_first)
            for layer, pair in zip(layers, zip(exchanges[::2], exchanges[1::2], strict=True), strict=True):
                for inner, (begin_s, end_s) in zip(pair, layer.spans, strict=True):
                    yield inner, now + share * begin_s, now + share * end_s
                now += share * layer.total_s
            began_s += self.of(part)


class Slot(NamedTuple):
    """An action with its place on the clock."""

    rank: int
    place: int
    """In the rank's list."""
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step, run on a clock."""

    total_s: float
    busy_s: tuple[float, ...]
    """Computing of each rank."""
    spans_s: tuple[float, ...]
    """From the beginning of a rank's first pass to the end of its last computing."""
    slots: tuple[Slot, ...] = ()
    """Every action, where they were asked for, in an order in which each follows what it waits for."""
    exchanges: tuple[Slot, ...] = ()
    """What these passes exchange with experts of other ranks: a lane of its own for each rank."""

    @property
    def bubble(self) -> float:
        """The part of the ranks' time in which they wait, averaged over the ranks."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.total_s) if self.total_s else 0.0

    @property
    def bubble_rate(self) -> float:
        """The same by the longest span of a rank, as the papers on zero bubbles count it: a rank that is done early
        goes on to the next step."""
        longest_s = max(self.spans_s)
        return 1 - max(self.busy_s) / longest_s if longest_s else 0.0


class Timed(NamedTuple):
    """An action as the clock needs it: what it takes, waits for and makes, by number."""

    cost: int
    lane: int
    near: tuple[int, ...]
    far: tuple[int, ...]
    """Waited for with the time of a message on top."""
    raised: tuple[int, ...]


class Numbered(NamedTuple):
    """A program with its actions and events numbered once, to be timed many times."""

    costs: tuple[Action, ...]
    """One action of each duration."""
    events: int
    lists: tuple[tuple[Timed, ...], ...]


class _Numbers:
    """A number for everything that can happen: passes by their place, all else in the order it is first named."""

    def __init__(self, program: StepProgram) -> None:
        self.microbatches, self.slices = program.microbatches, program.slices
        self.each_kind = program.chunks * program.microbatches * program.slices
        self.known: dict[object, int] = {}

    def of_pass(self, event: PassDone) -> int:
        kind, chunk, microbatch, piece = event
        place = (chunk * self.microbatches + microbatch) * self.slices + piece
        return place if kind == "F" else place + self.each_kind if kind == "I" else place + 2 * self.each_kind

    def __call__(self, key: object) -> int:
        return self.known.setdefault(key, 3 * self.each_kind + len(self.known))


_KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}


def _number_passes(program: StepProgram) -> Numbered:
    """`number` for lists of whole passes alone, as a planner times them by the thousand: arithmetic, no names."""
    placement, m, top = program.placement, program.microbatches, program.chunks - 1
    ways, each_kind = placement.directions, program.chunks * m
    costs: dict[int, int] = {}
    samples: list[Action] = []
    lists = []
    for rank, actions in enumerate(program.actions):
        # For each direction and chunk, whether the chunk before and the one after are on another rank.
        before = [[chunk > 0 and table[chunk - 1] != rank for chunk in range(top + 1)] for table in ways]
        after = [[chunk < top and table[chunk + 1] != rank for chunk in range(top + 1)] for table in ways]
        timed = []
        for action in actions:
            kind, chunk, microbatch = action[0], action[1], action[2]
            way, place = microbatch % len(ways), chunk * m + microbatch
            near: tuple[int, ...] = ()
            far: tuple[int, ...] = ()
            if kind == "F":
                raised: tuple[int, ...] = (place,)
                if before[way][chunk]:
                    far = (place - m,)
                elif chunk:
                    near = (place - m,)
            elif kind == "W":
                raised = (place + 2 * each_kind,)
                near = (place + each_kind,)
            else:
                raised = (place + each_kind,) if kind == "I" else (place + each_kind, place + 2 * each_kind)
                near = (place,)
                if after[way][chunk]:
                    far = (place + each_kind + m,)
                elif chunk < top:
                    near = (place, place + each_kind + m)
            key = 4 * chunk + _KINDS[kind]
            cost = costs.setdefault(key, len(samples))
            if cost == len(samples):
                samples.append(action)
            timed.append(Timed(cost, _COMPUTE, near, far, raised))
        lists.append(tuple(timed))
    return Numbered(tuple(samples), 3 * each_kind, tuple(lists))


def number(program: StepProgram) -> Numbered:
    """What each action waits for and makes. Messages that are not in the lists delay the passes that need them."""
    if program.slices == 1 and program.kinds <= _KINDS.keys():
        return _number_passes(program)
    return number_anything(program)


def number_anything(program: StepProgram) -> Numbered:
    """The same for every list."""
    name = _Numbers(program)
    costs: dict[object, int] = {}
    samples: list[Action] = []
    lists = []
    for rank, actions in enumerate(program.actions):
        timed = []
        latest: dict[object, int] = {}
        for index, action in enumerate(actions):
            near, far, raised = _pass_events(program, rank, action, name)
            if latest or not raised:
                _other_events(program, rank, index, action, name, latest, near, raised)
            pair = action.pair
            key = (action.kind, action.chunk, action.slice, pair and (pair.kind, pair.chunk, pair.slice))
            cost = costs.setdefault(key, len(samples))
            if cost == len(samples):
                samples.append(action)
            timed.append(Timed(cost, _LANES.get(action.kind, _COMPUTE), tuple(near), tuple(far), tuple(raised)))
        lists.append(tuple(timed))
    return Numbered(tuple(samples), 3 * name.each_kind + len(name.known), tuple(lists))


def _pass_events(
    program: StepProgram, rank: int, action: Action, name: _Numbers
) -> tuple[list[int], list[int], list[int]]:
    """Events that passes wait for: on this rank, as messages from another; and those they make."""
    near: list[int] = []
    far: list[int] = []
    raised: list[int] = []
    for part in parts(action):
        for event in program.needs(part):
            if event.chunk == part.chunk or program.placement.rank(event.chunk, event.microbatch) == rank:
                near.append(name.of_pass(event))
            elif "SEND" in program.kinds:
                near.append(name(("arrived", event)))
            else:
                far.append(name.of_pass(event))
        for event in makes(part):
            raised.append(name.of_pass(event))
    return near, far, raised


def _other_events(
    program: StepProgram,
    rank: int,
    index: int,
    action: Action,
    name: _Numbers,
    latest: dict[object, int],
    near: list[int],
    raised: list[int],
) -> None:
    """Events of messages, collectives and copies, and the passes that wait for them."""
    kind, chunk = action.kind, action.chunk
    which = (chunk, action.microbatch, action.slice)
    if kind == "SEND":
        event = PassDone("F" if action.of == "activation" else "I", *which)
        near.append(name.of_pass(event))
        raised.append(name(("arrived", event)))
    elif kind in ("GATHER", "IN", "OUT"):
        key = (action.of, *which)
        if kind == "IN" and key in latest:  # moved out before: what comes back has to have left
            near.append(latest[key])
        latest[key] = name((kind, rank, index))
        raised.append(latest[key])
    elif kind == "REDUCE":
        turn = latest[("reductions", chunk)] = latest.get(("reductions", chunk), 0) + 1
        raised.append(name(("REDUCE", rank, chunk, turn)))
    elif kind == "UPDATE":
        if ("reductions", chunk) in latest:  # the sum is there when the slowest of its ranks has come to it
            turn = latest[("reductions", chunk)]
            near += [name(("REDUCE", holder, chunk, turn)) for holder in program.placement.holders[chunk]]
        near += [latest[key] for key in (("states", *which), ("weights", *which)) if key in latest]
    for part in parts(action) if kind != "RECOMPUTE" else (action,):
        keys = (("weights", part.chunk, EVERY, 0), ("activation", part.chunk, part.microbatch, part.slice))
        near += [latest[key] for key in keys if key in latest]


def simulate(program: StepProgram, times: StepTimes, keep_slots: bool = False) -> Timeline:
    """Runs the lists on a clock. UsageError when ranks wait for one another for ever."""
    return time_numbered(program, program_numbers(program), times, keep_slots)


def program_numbers(program: StepProgram) -> Numbered:
    """`number`, once per program."""
    numbered = program.__dict__.get("_numbered")
    if numbered is None:
        numbered = program.__dict__["_numbered"] = number(program)
    return cast(Numbered, numbered)


def time_numbered(program: StepProgram, numbered: Numbered, times: StepTimes, keep_slots: bool) -> Timeline:
    lists, ranks = numbered.lists, len(numbered.lists)
    costs = [times.of(action) for action in numbered.costs]
    when = [_NOT_YET] * numbered.events
    waiting: dict[int, list[int]] = {}
    transfer_s = times.transfer_s
    done, clock, busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    began: list[float | None] = [None] * ranks
    lanes = [[0.0] * 3 for _ in range(ranks)]
    slots: list[Slot] = []
    ready = list(range(ranks))
    while ready:
        rank = ready.pop()
        now, at, timed = clock[rank], done[rank], lists[rank]
        while at < len(timed):
            cost, lane, near, far, raised = timed[at]
            start, missing = now, -1
            for event in near:
                came = when[event]
                if came == _NOT_YET:
                    missing = event
                    break
                if came > start:
                    start = came
            for event in far:
                came = when[event] + transfer_s
                if came == _NOT_YET:
                    missing = event
                    break
                if came > start:
                    start = came
            if missing >= 0:
                waiting.setdefault(missing, []).append(rank)
                break  # whoever makes it wakes this rank
            took = costs[cost]
            if lane == _COMPUTE:
                end = now = start + took
                busy[rank] += took
                if began[rank] is None:
                    began[rank] = start
            elif lane == _WIRE:
                end = start + took
            else:
                start = max(start, lanes[rank][lane])
                end = lanes[rank][lane] = start + took
            if keep_slots:
                slots.append(Slot(rank, at, program.actions[rank][at], start, end))
            at += 1
            for event in raised:
                when[event] = end
                if event in waiting:
                    ready += waiting.pop(event)
        clock[rank], done[rank] = now, at
    _require_finished(program, done)
    inner = tuple(
        Slot(rank, place, child, start + begin_s, start + end_s)
        for rank, place, action, start, _ in slots
        for child, begin_s, end_s in times.within(program, action)
    )
    spans = tuple(end - (start or 0.0) for start, end in zip(began, clock, strict=True))
    last_s = max((*clock, *(end for rank_lanes in lanes for end in rank_lanes)))
    return Timeline(last_s, tuple(busy), spans, tuple(slots), inner)


def _require_finished(program: StepProgram, done: Sequence[int]) -> None:
    stuck = [
        f"rank {rank} at {actions[count]}"
        for rank, (actions, count) in enumerate(zip(program.actions, done, strict=True))
        if count < len(actions)
    ]
    if stuck:
        raise UsageError(f"{program.name} deadlocks: {', '.join(stuck[:4])} wait for ever")
