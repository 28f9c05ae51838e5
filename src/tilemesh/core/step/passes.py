"""Passes that complete a schedule: its author writes computing alone, they add what moves data.

Order: `recompute`, `offload`, `stow`, `gather`, then `exchange`, which adds the messages between ranks and the sums of
gradients, both at places that all ranks agree on. Each takes a program and gives a new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import COMPUTE, EVERY, Action, StepProgram, parts
from tilemesh.core.step.simulate import StepTimes, simulate


def recompute(program: StepProgram, chunks: Collection[int] | None = None) -> StepProgram:
    """Forward passes of these chunks (None: all) keep their input alone and are done again before the backward pass."""

    def again(action: Action) -> Iterable[Action]:
        for part in parts(action):
            if part.kind in ("B", "I") and (chunks is None or part.chunk in chunks):
                yield part._replace(kind="RECOMPUTE")
        yield action

    return _rewritten(program, lambda actions: [added for action in actions for added in again(action)])


def offload(program: StepProgram, chunks: Collection[int] | None = None, ahead: int = 1) -> StepProgram:
    """Activations of these chunks go to the host's memory after their forward pass.

    They come back `ahead` computing actions before the first that needs them. A backward pass that follows sooner
    keeps its activations where they are.
    """

    def moved(actions: list[Action]) -> list[Action]:
        computing = [place for place, action in enumerate(actions) if action.kind in COMPUTE]
        turn = {place: count for count, place in enumerate(computing)}
        began: dict[tuple[int, int, int], int] = {}
        before: dict[int, list[Action]] = {}
        after: dict[int, list[Action]] = {}
        for place in computing:
            touched = parts(actions[place]) or (actions[place],)
            for part in touched:
                which = (part.chunk, part.microbatch, part.slice)
                if part.kind == "F" and (chunks is None or part.chunk in chunks):
                    began[which] = place
                elif part.kind in ("B", "I", "RECOMPUTE") and which in began:
                    start = began.pop(which)
                    back = max(turn[place] - ahead, 0)
                    if back > turn[start] + 1:  # else it would come back before it has gone
                        after.setdefault(start, []).append(Action("OUT", *which, of="activation"))
                        before.setdefault(computing[back], []).append(Action("IN", *which, of="activation"))
        return [
            each
            for place, action in enumerate(actions)
            for each in (*before.get(place, ()), action, *after.get(place, ()))
        ]

    return _rewritten(program, moved)


def stow(program: StepProgram, ahead: int = 1) -> StepProgram:
    """Weights go to the host's memory after a chunk was read, and come back `ahead` chunks before it is read again.

    A step begins and ends with all of them on the device: a chunk leaves after it was read for the first time, and
    after its last pass it stays. So the device holds the weights of 1 + `ahead` chunks when activations are most.
    """
    if ahead < 0:
        raise UsageError(f"bringing weights back {ahead} chunks ahead: expected 0 or more")

    def stowed(actions: list[Action]) -> list[Action]:
        uses = [_read(action) for action in actions]
        last = {chunk: place for place, chunks in enumerate(uses) for chunk in chunks}
        read: dict[int, bool] = {}  # of each chunk that was read: whether it is on the device
        with_moves: list[Action] = []
        for place, action in enumerate(actions):
            if uses[place]:
                coming = _next_distinct(uses, place, max(1 + ahead, len(uses[place])))
                for chunk in [chunk for chunk, is_here in read.items() if is_here and chunk not in coming]:
                    if last[chunk] > place:
                        read[chunk] = False
                        with_moves.append(Action("OUT", chunk, of="weights"))
                for chunk in [chunk for chunk in coming if not read.get(chunk, True)]:
                    read[chunk] = True
                    with_moves.append(Action("IN", chunk, of="weights"))
                read.update(dict.fromkeys(uses[place], True))
            with_moves.append(action)
        return with_moves

    return _rewritten(program, stowed)


def gather(program: StepProgram, ahead: int = 1) -> StepProgram:
    """ZeRO-3: weights are made whole before they are read, `ahead` chunks early, and given back when others come.

    A rank holds the weights of the next 1 + `ahead` chunks it will read. With one chunk per layer, `ahead` counts
    layers.
    """
    return _rewritten(program, lambda actions: gathers(actions, ahead))


def gathers(actions: Sequence[Action], ahead: int = 1) -> list[Action]:
    """One rank's actions with GATHER and FREE among them, as `gather` puts them."""
    if ahead < 0:
        raise UsageError(f"gathering {ahead} chunks ahead: expected 0 or more")
    uses = [_read(action) for action in actions]
    most = len({chunk for chunks in uses for chunk in chunks})  # to look for more would be to look through to the end
    on_rank: list[int] = []
    out: list[Action] = []
    for place, action in enumerate(actions):
        if uses[place]:
            coming = _next_distinct(uses, place, max(min(1 + ahead, most), len(uses[place])))
            for chunk in [chunk for chunk in on_rank if chunk not in coming]:
                on_rank.remove(chunk)
                out.append(Action("FREE", chunk, of="weights"))
            for chunk in [chunk for chunk in coming if chunk not in on_rank]:
                on_rank.append(chunk)
                out.append(Action("GATHER", chunk, of="weights"))
        out.append(action)
    return out + [Action("FREE", chunk, of="weights") for chunk in on_rank]


def _read(action: Action) -> tuple[int, ...]:
    """Chunks whose weights an action reads, once each. W reads none: it multiplies activations with gradients."""
    if action.kind == "RECOMPUTE":
        return (action.chunk,)
    return tuple(dict.fromkeys(part.chunk for part in parts(action) if part.kind != "W"))


def _next_distinct(uses: list[tuple[int, ...]], place: int, count: int) -> list[int]:
    distinct: dict[int, None] = {}
    for chunks in uses[place:]:
        distinct.update(dict.fromkeys(chunks))
        if len(distinct) >= count:
            break
    return list(distinct)[:count]


def exchange(program: StepProgram, reduce: str = "", update: bool = False, states_on_host: bool = False) -> StepProgram:
    """Adds SEND and RECV, and with `reduce` the sums of gradients.

    `reduce`: "step", once per chunk, or "microbatch", after every weight gradient (ZeRO-2 with the least memory; a
    chunk with two holders is summed once). `update` adds the optimizer's step, after all sums, since the norm of the
    whole gradient comes first; `states_on_host` moves its states in and out around it.

    Whatever several ranks do together is put into their lists at one moment of a clock on which all passes take
    equally long. So there is one order of all of it that every list follows, and no rank can wait for ever, not
    even if every send blocks.
    """
    if reduce not in ("", "step", "microbatch"):
        raise UsageError(f"reduce is {reduce!r}: expected 'step', 'microbatch' or ''")
    times = StepTimes.even(program.chunks, 1.0, 1.0, 1.0)
    # One share for every slice, however many there are: only the order counts.
    clock = simulate(program, dataclasses.replace(times, slice_shares=[1.0] * program.slices), keep_slots=True)
    marks: list[_Mark] = []
    last: dict[int, dict[int, float]] = {}
    now = [0.0] * program.ranks
    for rank, place, action, _, end in sorted(clock.slots, key=lambda slot: slot[:2]):
        is_compute = action.kind in COMPUTE
        now[rank] = end if is_compute else now[rank]
        marks.append(_Mark(now[rank], 0 if is_compute else 2, rank, place, ((rank, action),)))
        for part in parts(action):
            for send, receive, receiver in program.messages(part):
                marks.append(_Mark(end, 1, rank, place, ((rank, send), (receiver, receive))))
            if part.kind in ("B", "W"):
                last.setdefault(part.chunk, {})[rank] = end
                if reduce == "microbatch" and len(program.placement.holders[part.chunk]) == 1:
                    marks.append(_Mark(end, 1, rank, place, ((rank, _sum(part.chunk)),)))
    for chunk, ends in sorted(last.items()):
        if reduce == "step" or (reduce and len(program.placement.holders[chunk]) > 1):
            marks.append(_Mark(max(ends.values()), 3, chunk, 0, tuple((rank, _sum(chunk)) for rank in sorted(ends))))
    lists: list[list[Action]] = [[] for _ in program.actions]
    for mark in sorted(marks, key=lambda mark: mark[:4]):
        for rank, action in mark.actions:
            lists[rank].append(action)
    for rank, actions in enumerate(lists) if update else ():
        for chunk in program.placement.held[rank]:
            step = [Action("UPDATE", chunk, version=1, of="weights")]
            if states_on_host:
                step = [Action("IN", chunk, of="states"), *step, Action("OUT", chunk, of="states")]
            actions += step
    return dataclasses.replace(program, actions=tuple(map(tuple, lists)))


class _Mark(NamedTuple):
    """What some ranks do at one moment; sorted by the first four."""

    moment: float
    order: int
    rank: int
    place: int
    actions: tuple[tuple[int, Action], ...]


def _sum(chunk: int) -> Action:
    return Action("REDUCE", chunk, EVERY, of="gradient")


def _rewritten(program: StepProgram, rewrite: Callable[[list[Action]], list[Action]]) -> StepProgram:
    if "SEND" in program.kinds:
        raise UsageError(f"{program.name} has its messages already: other passes come before `exchange`")
    return dataclasses.replace(program, actions=tuple(tuple(rewrite(list(actions))) for actions in program.actions))
