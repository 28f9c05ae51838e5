"""TeraPipe (Li et al. 2021): a sequence passes through the pipeline in slices, cut so that none holds up the rest.

A later token attends to all before it, so equal slices take longer and longer; the pipeline's pace is that of its
slowest slice. Lengths are found by dynamic programming: of all ways to cut, the one with the least
sum(t) + (stages - 1) max(t).
"""

from __future__ import annotations

from collections.abc import Callable

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action, StepProgram
from tilemesh.core.step.placement import loop

SliceTime = Callable[[int, int], float]
"""Seconds of a slice on one stage, from its tokens and those before it."""


def linear_slice_time(fixed_s: float, token_s: float, context_s: float, product_s: float) -> SliceTime:
    """The paper's model, a0 + a1 i + a2 j + a3 ij for i tokens after j, which it fits within 2 %."""
    return lambda tokens, before: fixed_s + token_s * tokens + context_s * before + product_s * tokens * before


def terapipe_s(lengths: list[int], stages: int, slice_s: SliceTime) -> float:
    """Seconds of one pass of one sequence through all stages."""
    times = [slice_s(tokens, sum(lengths[:place])) for place, tokens in enumerate(lengths)]
    return sum(times) + (stages - 1) * max(times)


def cut_sequence(tokens: int, stages: int, slice_s: SliceTime, grain: int = 8) -> list[int]:
    """Lengths of the slices of a sequence, in multiples of `grain`, that are fastest.

    For a bound on the slowest slice the least sum is a shortest path over positions, and the sum only falls as the
    bound rises. So a range of bounds whose lowest bound with the sum of its highest is no gain is left out whole.
    """
    if tokens < 1 or grain < 1 or tokens % grain:
        raise UsageError(f"a sequence of {tokens} tokens in slices of multiples of {grain}: expected a multiple of it")
    places = tokens // grain
    times = [[slice_s((end - begin) * grain, begin * grain) for begin in range(end)] for end in range(1, places + 1)]
    lowest = _lowest_bound(times)
    bounds = sorted({time for row in times for time in row if time >= lowest})
    least_s, cuts = _shortest(times, bounds[-1])
    best_s, best = least_s + (stages - 1) * bounds[-1], cuts
    ranges = [(0, len(bounds) - 1, least_s)]
    while ranges:
        low, high, least_s = ranges.pop()
        if low == high or least_s + (stages - 1) * bounds[low] >= best_s:
            continue
        middle = (low + high) // 2
        sum_s, cuts = _shortest(times, bounds[middle])
        if sum_s + (stages - 1) * bounds[middle] < best_s:
            best_s, best = sum_s + (stages - 1) * bounds[middle], cuts
        ranges += [(middle + 1, high, least_s), (low, middle, sum_s)]
    return [length * grain for length in best]


def _lowest_bound(times: list[list[float]]) -> float:
    """The least possible time of the slowest slice: below it nothing can be cut."""
    reach = [0.0]
    for row in times:
        reach.append(min(max(reach[begin], time) for begin, time in enumerate(row)))
    return reach[-1]


def _shortest(times: list[list[float]], bound: float) -> tuple[float, list[int]]:
    """The least sum of slices none of which takes longer than the bound, and their lengths in grains."""
    sums, came = [0.0], [0]
    for row in times:
        shortest = min(
            ((sums[begin] + time, begin) for begin, time in enumerate(row) if time <= bound), default=(float("inf"), 0)
        )
        sums.append(shortest[0])
        came.append(shortest[1])
    cuts, end = [], len(times)
    while end:
        cuts.append(end - came[end])
        end = came[end]
    return sums[-1], cuts[::-1]


def terapipe(ranks: int, microbatches: int, slices: int) -> StepProgram:
    """All slices of all microbatches forward, then backward, a sequence's last slice first."""
    lists = []
    for rank in range(ranks):
        actions = [Action("F", rank, m, piece) for m in range(microbatches) for piece in range(slices)]
        actions += [Action("B", rank, m, piece) for m in range(microbatches) for piece in reversed(range(slices))]
        lists.append(tuple(actions))
    return StepProgram("terapipe", loop(ranks), microbatches, tuple(lists), slices)
