"""A schedule made for given times and a memory limit, where the published ones were made for F = I = W.

The one idea: many ways to order forward passes and input gradients come from two families (how far each rank runs ahead
in a loop; how slowly a microbatch passes through a V). Weight gradients are put into their gaps under the real times
(`fill.py`), what exceeds the memory is dropped, the shortest step wins, and swaps of neighbouring actions shorten it
further. Deterministic. The result is never longer than any published schedule that fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action, StepProgram, parts
from tilemesh.core.step.book import all_schedules, build
from tilemesh.core.step.fill import fill
from tilemesh.core.step.memory import StepBytes, memory_peaks
from tilemesh.core.step.placement import loop
from tilemesh.core.step.schedule import PipeShape
from tilemesh.core.step.schedules.vees import stretched
from tilemesh.core.step.simulate import ExchangeTimes, RoutedTimes, StepTimes, simulate

_PATIENCE = (0.0, 0.5, 1.0)
_SLOPES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
_STRETCHES = (1.0, 1.5, 2.0, 3.0)  # a leg of the V in passes and messages
_SWAPPED = 150_000  # actions in all the programs that are tried with two neighbours swapped: some seconds


class ExpertTimes(NamedTuple):
    """Seconds of a microbatch's rows on their way to experts of other ranks, through a rank's part of the model."""

    dispatch_s: float
    combine_s: float
    beside_s: float = 0.0
    """Of the forward pass and of its input gradients, what is computed beside the dispatch: shared experts."""


@dataclasses.dataclass(frozen=True)
class PassTimes:
    """Seconds of a microbatch's passes through a rank's part of the model, and bytes of its activations there.

    A rank with two chunks takes half of each for either.
    """

    forward_s: float = 1.0
    input_s: float = 1.0
    weight_s: float = 1.0
    transfer_s: float = 0.0
    kept: float = 1.0
    kept_for_weights: float = 1.0
    slice_shares: tuple[float, ...] = ()
    """What each slice of a sequence takes of a pass; empty: all the same."""
    experts: ExpertTimes | None = None

    def times(self, program: StepProgram) -> StepTimes:
        share = program.ranks / program.chunks
        shares = self.slice_shares or (1 / program.slices,) * program.slices
        forward_s, input_s, weight_s = self.forward_s * share, self.input_s * share, self.weight_s * share
        routed = None
        if self.experts is not None:
            dispatch_s, combine_s, beside_s = (seconds * share for seconds in self.experts)
            early_s, late_s = (forward_s - beside_s) / 2, (input_s - beside_s) / 2
            routed = RoutedTimes(
                ExchangeTimes(early_s, dispatch_s, beside_s, early_s, combine_s, 0.0),
                ExchangeTimes(late_s, combine_s, 0.0, late_s, dispatch_s, beside_s),
                weight_s,
            )
            forward_s, input_s = routed.forward.total_s, routed.backward.total_s
        even = StepTimes.even(program.chunks, forward_s, input_s, weight_s, self.transfer_s)
        return dataclasses.replace(even, slice_shares=shares, routed=routed)

    def sizes(self, program: StepProgram) -> StepBytes:
        share = program.ranks / program.chunks / program.slices
        return StepBytes.activations(program.chunks, self.kept * share, self.kept_for_weights * share)


def search(ranks: int, microbatches: int, costs: PassTimes, most_bytes: float) -> StepProgram:
    """The shortest step found whose activations stay within `most_bytes` on every rank: in the unit of `costs.kept`,
    which is a microbatch of a rank's part of the model unless it is given."""
    best: tuple[float, float, int, StepProgram] | None = None
    least = float("inf")
    for order, program in enumerate(_candidates(ranks, microbatches, costs, most_bytes)):
        peak = max(memory_peaks(program, costs.sizes(program)))
        least = min(least, peak)
        if peak > most_bytes * (1 + 1e-9):
            continue
        timeline = simulate(program, costs.times(program))
        candidate = (timeline.total_s, max(timeline.spans_s), order, program)
        if best is None or candidate[:3] < best[:3]:
            best = candidate
    if best is None:
        raise UsageError(
            f"no schedule of {ranks} stages and {microbatches} microbatches keeps within the activations of "
            f"{most_bytes / costs.kept:g} microbatches on every rank; the least found is {least / costs.kept:g}"
        )
    return dataclasses.replace(_improved(best[3], costs, most_bytes), name="search")


def _candidates(ranks: int, microbatches: int, costs: PassTimes, most_bytes: float) -> Iterator[StepProgram]:
    for schedule in all_schedules():
        is_plain = not (schedule.updates or schedule.interleaves or schedule.cuts_sequences)
        is_one_way = len(schedule.placement(ranks).directions) == 1 if is_plain else False
        if is_one_way and schedule.why_not(ranks, microbatches) is None:
            yield schedule.build(PipeShape(ranks, microbatches))
    most = max(1, int(most_bytes / costs.kept + 1e-9))
    ahead = [[min(most, 1 + round(slope * (ranks - 1 - rank))) for rank in range(ranks)] for slope in _SLOPES]
    for in_flight, patience in product(dict.fromkeys(map(tuple, ahead)), _PATIENCE):
        bare = _ahead(ranks, microbatches, in_flight)
        yield fill(bare, costs.times(bare), [most] * ranks, patience)
    for stretch, patience in product(product(_STRETCHES, repeat=4), (0.0, 1.0)):
        # A rank at one end of the V would keep more than at the other: that leaves memory unused.
        if abs(stretch[0] + stretch[3] - stretch[1] - stretch[2]) <= 1:
            yield stretched(ranks, microbatches, stretch, costs.times(build("v-min", ranks, 1)), 2 * most, patience)


def _ahead(ranks: int, microbatches: int, in_flight: tuple[int, ...]) -> StepProgram:
    """F and I of a loop: each rank runs as many forward passes ahead as it may, then both in turn."""
    lists = []
    for rank in range(ranks):
        forwards = [Action("F", rank, m) for m in range(microbatches)]
        inputs = [Action("I", rank, m) for m in range(microbatches)]
        first = min(in_flight[rank], microbatches)
        actions = forwards[:first]
        for place, action in enumerate(inputs):
            actions += [action, *forwards[first + place : first + place + 1]]
        lists.append(tuple(actions))
    return StepProgram("search", loop(ranks), microbatches, tuple(lists))


def _improved(program: StepProgram, costs: PassTimes, most_bytes: float) -> StepProgram:
    """Swaps of neighbouring actions, as long as they shorten the step within the memory."""
    times, sizes = costs.times(program), costs.sizes(program)
    pairs = [(rank, place) for rank, actions in enumerate(program.actions) for place in range(len(actions) - 1)]
    swaps = _SWAPPED // sum(map(len, program.actions))
    shortest_s = simulate(program, times).total_s
    least_s = max(simulate(program, dataclasses.replace(times, transfer_s=0.0)).busy_s)
    is_better = True
    while is_better and swaps > 0 and shortest_s > least_s * (1 + 1e-9):
        is_better = False
        for rank, place in pairs:
            mine = program.actions[rank]
            if swaps <= 0 or _depends(mine[place], mine[place + 1]):
                continue
            swaps -= 1
            swapped = (*mine[:place], mine[place + 1], mine[place], *mine[place + 2 :])
            lists = (*program.actions[:rank], swapped, *program.actions[rank + 1 :])
            trial = dataclasses.replace(program, actions=lists)
            try:
                total_s = simulate(trial, times).total_s
            except UsageError:  # the swap makes ranks wait in a circle
                continue
            if total_s < shortest_s * (1 - 1e-12) and max(memory_peaks(trial, sizes)) <= most_bytes * (1 + 1e-9):
                program, shortest_s, is_better = trial, total_s, True
    return program


def _depends(first: Action, second: Action) -> bool:
    """Whether two actions are passes of the same microbatch through the same chunk."""
    places = [{(part.chunk, part.microbatch, part.slice) for part in parts(action)} for action in (first, second)]
    return all(first & second for first, second in pairwise(places))
