"""Where a model is cut into chunks: as evenly as layers, the embedding and the head allow.

The embedding is with the first chunk and the head with the last, so equal layers do not make equal chunks.
"""

from __future__ import annotations

import functools
import math


@functools.cache
def spread(layers: int, chunks: int, first: float, last: float) -> tuple[int, ...]:
    """Layers of each chunk, of layers that all cost 1: the smallest maximum under which all find room, then filled
    evenly. `first` and `last` are what the first and the last chunk cost besides their layers."""
    if chunks == 1:
        return (layers,)
    share = layers // chunks
    wholes = range(share, share + 3)
    for top in sorted({w + extra for w in wholes for extra in (0.0, first, last)} | {share + math.ceil(last) + 1.0}):
        room = [_fits(top, first), *([math.floor(top)] * (chunks - 2)), _fits(top, last)]
        if min(room) >= 1 and sum(room) >= layers:
            break
    else:  # a head heavier than everything else: one layer beside it, the rest shared
        room = [share + 1] * (chunks - 1) + [1]
        while sum(room) < layers:
            room[room.index(min(room[:-1]))] += 1
    excess = sum(room) - layers
    extras = [first, *([0.0] * (chunks - 2)), last]
    while excess:
        # Take from the costliest that can give one; the first of equals, so that the same question has one answer.
        giver = max((i for i in range(chunks) if room[i] > 1), key=lambda i: (room[i] + extras[i], -i))
        room[giver] -= 1
        excess -= 1
    return tuple(room)


@functools.cache
def spread_uneven(costs: tuple[float, ...], chunks: int) -> tuple[int, ...]:
    """Layers of each chunk, of layers with these costs, ends included: each takes what the smallest maximum leaves room
    for, and at least one."""
    below, top = max(max(costs), sum(costs) / chunks), sum(costs)
    for _ in range(50):
        middle = (below + top) / 2
        below, top = (below, middle) if _filled(costs, chunks, middle) else (middle, top)
    return _filled(costs, chunks, top)


def _filled(costs: tuple[float, ...], chunks: int, top: float) -> tuple[int, ...]:
    """Chunks from the first on, as full as `top` allows; none where it does not."""
    counts: tuple[int, ...] = ()
    at = 0
    for left in range(chunks - 1, -1, -1):
        end, cost = at, 0.0
        while end < len(costs) - left and (end == at or cost + costs[end] <= top + 1e-9):
            cost, end = cost + costs[end], end + 1
        counts, at = (*counts, end - at), end
    return counts if at == len(costs) else ()


def _fits(top: float, extra: float) -> int:
    return math.floor(top - extra + 1e-9)
