"""Where a model is cut into chunks: as evenly as layers, the embedding and the head allow.

The embedding is with the first chunk and the head with the last, so equal layers do not make equal chunks.
"""

from __future__ import annotations

import functools
import math

_REACH = 2  # how far from the even share a chunk may lie, beside what head and embedding weigh


@functools.cache
def cut(layer_costs: tuple[float, ...], chunks: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each chunk: the least possible maximum of cost, and among those the most even, by dynamic programming.

    Of equals the one with less in front, where a pipeline holds the most microbatches. `first` and `last` are what the
    first and the last chunk cost besides their layers.
    """
    layers = len(layer_costs)
    before = [0.0]
    for cost in layer_costs:
        before.append(before[-1] + cost)
    mean = before[-1] / layers
    reach = _REACH + math.ceil(max(first, last) / mean) + math.ceil((max(layer_costs) - min(layer_costs)) / mean)
    least, most = max(1, layers // chunks - reach), -(-layers // chunks) + reach
    # best[i]: (maximum, sum of squares, layers of each chunk so far) of i layers in the chunks so far.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for chunk in range(chunks):
        extra = (first if chunk == 0 else 0.0) + (last if chunk == chunks - 1 else 0.0)
        left = chunks - chunk - 1
        reached: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (top, squares, counts) in best.items():
            for end in range(start + least, min(start + most, layers - left) + 1):
                if end + left * most < layers:
                    continue
                cost = before[end] - before[start] + extra
                candidate = (max(top, cost), squares + cost * cost, (*counts, end - start))
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    return best[layers][2]


@functools.cache
def spread(layers: int, chunks: int, first: float, last: float) -> tuple[int, ...]:
    """The same for layers that all cost 1: the smallest maximum under which all find room, then filled evenly."""
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


def _fits(top: float, extra: float) -> int:
    return math.floor(top - extra + 1e-9)
