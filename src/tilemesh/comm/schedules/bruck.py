"""Bruck's algorithms: ceil(log2 n) rounds for any rank count, at the price of copies and (all_to_all) forwarded bytes.

Blocks are kept in an order relative to the rank itself, in TEMP, so that every rank does the same: in the round of
distance d it sends to the rank d back (gather) or d further (exchange). All-to-all moves every block whose distance to
travel has bit d set; those blocks are packed next to each other first. TEMP slots are as large as the largest block.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.comm.schedules.schedule import (
    DATA,
    INPUT,
    TEMP,
    Round,
    RoundStep,
    Schedule,
    Shift,
    copy,
    recv,
    same,
    send,
)


def all_gather(ranks: int, root: int = 0) -> Schedule:
    """TEMP slot i of rank r becomes the block of rank r + i."""

    def rounds() -> Iterator[Round]:
        zero, one = same(ranks, 0), same(ranks, 1)
        yield (copy(zero, INPUT, zero, TEMP, zero, one),)
        count_here = 1
        while count_here < ranks:
            count = same(ranks, min(count_here, ranks - count_here))
            yield (
                send(Shift(ranks, -count_here), zero, count, space=TEMP),
                recv(Shift(ranks, count_here), same(ranks, count_here), count, space=TEMP),
            )
            count_here = min(2 * count_here, ranks)
        yield tuple(copy(zero, TEMP, same(ranks, i), DATA, Shift(ranks, i), one) for i in range(ranks))

    return Schedule("all_gather", "bruck", ranks, root, ranks, rounds, temp=ranks)


def all_to_all(ranks: int, root: int = 0) -> Schedule:
    """TEMP slot i holds the block that still has the set bits of i, from the present distance on, to travel."""
    half = (ranks + 1) // 2
    packed, arrived = ranks, ranks + half

    def rounds() -> Iterator[Round]:
        zero, one = same(ranks, 0), same(ranks, 1)
        yield tuple(copy(zero, INPUT, Shift(ranks, i), TEMP, same(ranks, i), one) for i in range(ranks))
        distance = 1
        while distance < ranks:
            leaving = [i for i in range(ranks) if i & distance]
            count = same(ranks, len(leaving))
            yield (
                *_gather(ranks, [(i, packed + j) for j, i in enumerate(leaving)]),
                send(Shift(ranks, distance), same(ranks, packed), count, space=TEMP),
                recv(Shift(ranks, -distance), same(ranks, arrived), count, space=TEMP),
            )
            yield _gather(ranks, [(arrived + j, i) for j, i in enumerate(leaving)])
            distance *= 2
        # Slot i came from the rank i back.
        yield tuple(copy(zero, TEMP, same(ranks, i), DATA, Shift(ranks, -i), one) for i in range(ranks))

    return Schedule("all_to_all", "bruck", ranks, root, ranks, rounds, temp=ranks + 2 * half)


def _gather(ranks: int, pairs: list[tuple[int, int]]) -> tuple[RoundStep, ...]:
    """TEMP copies from slot to slot; neighbours that stay neighbours move in one step."""
    steps: list[RoundStep] = []
    at = 0
    while at < len(pairs):
        source, target = pairs[at]
        length = 1
        while at + length < len(pairs) and pairs[at + length] == (source + length, target + length):
            length += 1
        steps.append(copy(same(ranks, 0), TEMP, same(ranks, source), TEMP, same(ranks, target), same(ranks, length)))
        at += length
    return tuple(steps)
