"""Length and memory of schedules without walking through every microbatch: what a search over many layouts asks.

Closed forms for equal chunks; for uneven ones the pace of the steady state, read off short simulations. Tests hold both
to the simulator and to liveness.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from tilemesh.core.step.action import Action, StepProgram
from tilemesh.core.step.book import find
from tilemesh.core.step.memory import Moment, fullest_moments, largest_moments
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape, RankLoad
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.core.step.versions import held_versions

_SETTLED_ROUNDS = 2  # rounds of `stages` microbatches before the pace of a pipeline is looked at
_STEADY_ROUNDS = 3  # rounds that must take equally long to be its pace
_SETTLED_FOR_MEMORY = 2  # rounds after which a rank holds no more than before
_SAME = 1e-9
_CHEAP_PASSES = 8_000  # to walk through for the pace of one pipeline


def program_for_memory(name: str, stages: int, microbatches: int, interleave: int, slices: int = 1) -> StepProgram:
    """A step that holds as much as that of so many microbatches: of most schedules a shorter one, as the steady state
    repeats."""
    return _built(name, stages, _settled(name, stages, microbatches), interleave, slices)


def moments_for_memory(
    name: str, ranks: tuple[int, ...], stages: int, microbatches: int, interleave: int, slices: int = 1
) -> tuple[Moment, ...]:
    """The moments of that step at which one of these ranks, whose chunks must be of the same sizes, can hold most."""
    shape = PipeShape(stages, _settled(name, stages, microbatches), interleave, slices)
    return _moments_of_ranks(name, shape)[ranks]


def copies_of_weights(name: str, rank: int, stages: int, microbatches: int) -> int:
    """Copies of its weights that a rank has at most: versions, and where passes are corrected their mean change. 1: no
    other than the weights themselves."""
    updates = find(name).updates
    if updates is None:
        return 1
    return _versions(name, stages, _settled(name, stages, microbatches))[rank] + updates.is_corrected


@functools.lru_cache(maxsize=1024)
def _versions(name: str, stages: int, microbatches: int) -> list[int]:
    return held_versions(_built(name, stages, microbatches, 1))


def _settled(name: str, stages: int, microbatches: int) -> int:
    """So many microbatches, or fewer with which ranks hold as much."""
    schedule, enough = find(name), _SETTLED_FOR_MEMORY * stages + microbatches % stages
    is_short = enough < microbatches and schedule.is_settling and schedule.why_not(stages, enough) is None
    return enough if is_short else microbatches


class _RankMoments(dict[tuple[int, ...], tuple[Moment, ...]]):
    """By ranks, each found when it is first asked for: of a pipeline of equal stages nobody asks for most ranks."""

    def __init__(self, schedule: PipelineSchedule, shape: PipeShape) -> None:
        super().__init__()
        self.chunks_by_rank = schedule.placement(shape.stages, shape.interleave).held
        self.lists: list[Iterable[Action]] = list(schedule.checked_lists(shape))

    def __missing__(self, ranks: tuple[int, ...]) -> tuple[Moment, ...]:
        first = ranks[0]
        if len(ranks) == 1:
            moments, self.lists[first] = fullest_moments(self.lists[first], self.chunks_by_rank[first]), ()
        else:
            moments = largest_moments({moment for rank in ranks for moment in self[rank,]})
        self[ranks] = moments
        return moments


@functools.lru_cache(maxsize=1024)
def _moments_of_ranks(name: str, shape: PipeShape) -> _RankMoments:
    return _RankMoments(find(name), shape)


@functools.cache
def bubble_fraction(name: str, stages: int, microbatches: int, interleave: int = 1) -> float:
    """What a step waits, if all chunks take equally long, F, I and W too."""
    if stages == 1:
        return 0.0
    schedule, shape = find(name), PipeShape(stages, microbatches, interleave)
    if schedule.bubble is not None:
        return schedule.bubble.fraction(shape)
    chunks = schedule.placement(stages, interleave).chunks
    each = stages / chunks / 3
    return 1 - microbatches / simulated_s(
        name, stages, microbatches, interleave, StepTimes.even(chunks, each, each, each)
    )


def closed_form_s(name: str, stages: int, microbatches: int, interleave: int, load: RankLoad) -> float:
    """Length of a step, quickly: all microbatches through the busiest rank, and the bubble of the schedule.

    What simulation gives for equal chunks of GPipe, 1F1B, interleaved 1F1B, ZB-H1 and ZB-H2, and on a V where I is no
    shorter than F; a ranking for the others.
    """
    total = microbatches * load.slowest_s
    if stages == 1:
        return total
    schedule = find(name)
    if schedule.waits_s is not None:
        waits = schedule.waits_s(PipeShape(stages, microbatches, interleave), load)
    else:
        bubble = bubble_fraction(name, stages, microbatches, interleave)
        waits = microbatches * load.others_s / (stages - 1) * bubble / (1 - bubble)
    # The first microbatch's way through all stages, and the last one's back.
    return total + waits + 2 * (stages - 1) * load.transfer_s


def simulated_passes(stages: int, microbatches: int, interleave: int) -> int:
    """How many passes `simulated_s` walks through where the pace is steady from the start: its least cost."""
    first = _SETTLED_ROUNDS * stages + microbatches % stages
    walked = microbatches if microbatches <= first + stages else 2 * first + stages
    return 2 * stages * interleave * walked


def simulated_s(name: str, stages: int, microbatches: int, interleave: int, times: StepTimes) -> float:
    """Length of a step without walking through all of it: the steady state repeats every `stages` microbatches.

    Short runs, each a round longer, show what one more round costs; when that has stayed the same it is taken for the
    rest. Equal stages are at their pace at once and give what simulating everything gives; uneven ones may drift for
    some rounds, which are walked as long as they are cheap, and tests hold what is left.
    """

    def total_s(count: int) -> float:
        return simulate(_built(name, stages, count, interleave), times).total_s

    schedule, simulated = find(name), _SETTLED_ROUNDS * stages + microbatches % stages
    if microbatches <= simulated + stages or schedule.why_not(stages, simulated) is not None:
        return total_s(microbatches)
    even = all(len({*taken}) == 1 for taken in (times.forward_s, times.input_s, times.weight_s))
    even = even and schedule.bubble is not None
    walked = 2 * stages * interleave * simulated
    taken_s = total_s(simulated)
    rounds_s: list[float] = []
    while simulated < microbatches:
        simulated += stages
        longer_s = total_s(simulated)
        rounds_s.append(longer_s - taken_s)
        taken_s = longer_s
        walked += 2 * stages * interleave * simulated
        last = rounds_s[-_STEADY_ROUNDS:]
        if even or walked > _CHEAP_PASSES or (len(last) == _STEADY_ROUNDS and max(last) - min(last) <= _SAME * taken_s):
            break
    paced_s = taken_s + rounds_s[-1] * ((microbatches - simulated) // stages)
    shortest_s = least_s(name, stages, microbatches, interleave, times)
    return shortest_s if shortest_s > paced_s * (1 + _SAME) else paced_s


def least_s(name: str, stages: int, microbatches: int, interleave: int, times: StepTimes) -> float:
    """What no order of passes is shorter than: a rank's work, after the first input has come to it and, where backward
    passes are whole, before the last gradient has left it. A rank that is busiest by little sets the pace only after
    many rounds."""
    schedule = find(name)
    placement = schedule.placement(stages, interleave)
    if len(placement.directions) > 1:
        return 0.0

    def work_s(chunks: Sequence[int]) -> float:
        return sum(times.forward_s[chunk] + times.input_s[chunk] + times.weight_s[chunk] for chunk in chunks)

    return max(
        sum(times.forward_s[: own_chunks[0]])
        + microbatches * work_s(own_chunks)
        + (0.0 if schedule.is_split else sum(times.input_s[: own_chunks[0]]) + sum(times.weight_s[: own_chunks[0]]))
        for own_chunks in placement.held
    )


@functools.lru_cache(maxsize=32)
def _built(name: str, stages: int, microbatches: int, interleave: int, slices: int = 1) -> StepProgram:
    return find(name).build(PipeShape(stages, microbatches, interleave, slices))
