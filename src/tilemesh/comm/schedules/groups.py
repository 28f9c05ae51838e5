"""Schedules made of schedules: one after another, or the same kind side by side in disjoint groups of ranks.

`in_groups` runs a small schedule within each group: its rank i is the group's i-th member and its chunk j stands for a
span of neighbouring chunks of the whole. Groups of unequal size get schedules of unequal length; the shorter ones
just end earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from tilemesh.comm.schedules.schedule import INPUT, NOBODY, Round, RoundStep, Schedule, Sparse, Vector


@dataclass(frozen=True)
class GroupSchedule:
    """A schedule for some of the ranks. `spans[j]` = (first chunk, how many) that its chunk j stands for."""

    schedule: Schedule
    members: Sequence[int]
    spans: Sequence[tuple[int, int]]


def in_groups(ranks: int, parts: Sequence[GroupSchedule]) -> Iterator[Round]:
    """The parts' rounds side by side, without their copies from INPUT: the data is already where they expect it."""
    for together in zip_longest(*(part.schedule.rounds() for part in parts)):
        steps = []
        for part, round_ in zip(parts, together, strict=True):
            for step in round_ or ():
                if not (step.kind == "copy" and step.source == INPUT):
                    steps.append(_embed(ranks, part, step))
        if steps:
            yield tuple(merge(ranks, steps))


def merge(ranks: int, steps: Sequence[RoundStep]) -> list[RoundStep]:
    """Steps of the same kind in which nobody takes part twice become one step."""
    merged: list[RoundStep] = []
    for step in steps:
        for index, before in enumerate(merged):
            if _alike(before, step) and not (_taking_part(before) & _taking_part(step)):
                merged[index] = _join(ranks, before, step)
                break
        else:
            merged.append(step)
    return merged


def spans_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive spans of these lengths."""
    result, at = [], 0
    for size in sizes:
        result.append((at, size))
        at += size
    return result


def _embed(ranks: int, part: GroupSchedule, step: RoundStep) -> RoundStep:
    peer: dict[int, int] = {}
    at: dict[int, int] = {}
    count: dict[int, int] = {}
    for index, rank in enumerate(part.members):
        who, slots = step.peer[index], step.count[index]
        if who == NOBODY or slots <= 0:
            continue
        first = step.at[index]
        covered = part.spans[first : first + slots]
        peer[rank] = part.members[who]
        at[rank] = covered[0][0]
        count[rank] = sum(length for _, length in covered)
    sparse = Sparse(ranks, at)
    return replace(step, peer=Sparse(ranks, peer), at=sparse, count=Sparse(ranks, count), source_at=sparse)


def _alike(one: RoundStep, other: RoundStep) -> bool:
    return (one.kind, one.space, one.reduce, one.source) == (other.kind, other.space, other.reduce, other.source)


def _taking_part(step: RoundStep) -> set[int]:
    if isinstance(step.peer, Sparse):
        return set(step.peer.values)
    return {rank for rank, peer in enumerate(step.peer) if peer != NOBODY}


def _join(ranks: int, one: RoundStep, other: RoundStep) -> RoundStep:
    def both(first: Vector, second: Vector) -> Sparse:
        values = {rank: first[rank] for rank in _taking_part(one)}
        return Sparse(ranks, values | {rank: second[rank] for rank in _taking_part(other)})

    at, source_at = both(one.at, other.at), both(one.source_at, other.source_at)
    return replace(one, peer=both(one.peer, other.peer), at=at, count=both(one.count, other.count), source_at=source_at)
