"""Slices of a sequence that pass through a pipeline (TeraPipe, Li et al. 2021), cut so that none holds up the rest.

A later token attends to all before it, so equal slices take longer and longer; the pipeline's pace is that of its
slowest slice. Lengths are found by dynamic programming: of all ways to cut, the one with the least
sum(t) + (stages - 1) max(t).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from tilemesh.core.errors import UsageError
from tilemesh.core.shard import share

SliceTime = Callable[[int, int], float]
"""Seconds of a slice on one stage, from its tokens and those before it."""


def cut_sequence(tokens: int, stages: int, slice_s: SliceTime, grain: int = 8, slices: int | None = None) -> list[int]:
    """Lengths of the slices of a sequence, in multiples of `grain` (but for the last), that are fastest.

    `slices`: how many; None: as many as are fastest. For a bound on the slowest slice the least sum is a shortest path
    over positions, and the sum only falls as the bound rises. So a range of bounds whose lowest bound with the sum of
    its highest is no gain is left out whole.
    """
    if tokens < 1 or grain < 1:
        raise UsageError(
            f"a sequence of {tokens} tokens in slices of multiples of {grain}: expected at least 1 of each"
        )
    edges = [*range(0, tokens, grain), tokens]
    if slices is not None and not 1 <= slices < len(edges):
        raise UsageError(
            f"{slices} slices of {tokens} tokens in multiples of {grain}: expected from 1 to {len(edges) - 1}"
        )
    times = [[slice_s(end - begin, begin) for begin in edges[:place]] for place, end in enumerate(edges) if place]
    lowest = _lowest_bound(times)
    bounds = sorted({time for row in times for time in row if time >= lowest})
    least_s, cuts = _shortest(times, bounds[-1], slices)
    best_s, best = least_s + (stages - 1) * bounds[-1], cuts
    ranges = [(0, len(bounds) - 1, least_s)]
    while ranges:
        low, high, least_s = ranges.pop()
        if low == high or least_s + (stages - 1) * bounds[low] >= best_s:
            continue
        middle = (low + high) // 2
        sum_s, cuts = _shortest(times, bounds[middle], slices)
        if sum_s + (stages - 1) * bounds[middle] < best_s:
            best_s, best = sum_s + (stages - 1) * bounds[middle], cuts
        ranges += [(middle + 1, high, least_s), (low, middle, sum_s)]
    return [edges[end] - edges[begin] for begin, end in pairwise(best)]


_PLACES = 128
_MOST_CUT = 32
"""Of more slices each is so short that equal ones differ little, and finding lengths would take seconds."""


def slice_lengths(tokens: int, stages: int, slices: int, slice_s: SliceTime) -> tuple[int, ...]:
    """Tokens of each of so many slices, the fastest way to cut a sequence at one of about 128 places."""
    if slices > _MOST_CUT:
        return tuple(share(tokens, slices, number)[1] for number in range(slices))
    return tuple(cut_sequence(tokens, stages, slice_s, max(1, tokens // max(_PLACES, 4 * slices)), slices))


def slice_shares(lengths: Sequence[int], slice_s: SliceTime) -> tuple[float, ...]:
    """What each slice takes of the time of all."""
    times = [slice_s(tokens, begin) for tokens, begin in zip(lengths, (0, *accumulate(lengths)), strict=False)]
    return tuple(time / sum(times) for time in times)


def _lowest_bound(times: list[list[float]]) -> float:
    """The least possible time of the slowest slice: below it nothing can be cut."""
    reach = [0.0]
    for row in times:
        reach.append(min(max(reach[begin], time) for begin, time in enumerate(row)))
    return reach[-1]


def _shortest(times: list[list[float]], bound: float, slices: int | None) -> tuple[float, list[int]]:
    """The least sum of (so many) slices none of which takes longer than the bound, and the places of their ends."""
    never = float("inf")
    sums, came = [0.0] + [never] * len(times), []
    for _ in range(1 if slices is None else slices):
        # With a number of slices each round adds one; without, a slice may follow any other of the same round.
        sums_here, steps = [0.0 if slices is None else never], [0]
        for row in times:
            before = sums_here if slices is None else sums
            shortest = min(
                ((before[begin] + time, begin) for begin, time in enumerate(row) if time <= bound), default=(never, 0)
            )
            sums_here.append(shortest[0])
            steps.append(shortest[1])
        sums = sums_here
        came.append(steps)
    if sums[-1] == never:
        return never, []
    places, end = [len(times)], len(times)
    while end:
        end = (came.pop() if slices is not None else came[0])[end]
        places.append(end)
    return sums[-1], places[::-1]
