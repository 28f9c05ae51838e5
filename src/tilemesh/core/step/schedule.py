"""What a pipeline schedule is: one value that says all that is asked of a schedule, by whom ever.

The one idea: a schedule is a file in `schedules/`, or of another package, that makes such a value. The configuration,
the planner, the simulator, memory, drawings, the runtime, the gate and the documents find it in `book.py` and ask it.
An author writes the passes of every rank and a placement of chunks. What a rank keeps and how long a step takes follow
from the lists; a closed form, where there is one, only answers sooner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action, StepProgram
from tilemesh.core.step.placement import ChunkPlacement, loop
from tilemesh.core.step.simulate import StepTimes


class PipeShape(NamedTuple):
    """What lists are made for: p stages, m microbatches, v chunks per stage where the schedule leaves that open, and
    slices of each sequence where it cuts them."""

    stages: int
    microbatches: int
    interleave: int = 1
    slices: int = 1


class RankLoad(NamedTuple):
    """What closed forms need of a pipeline's times: one microbatch's work on the busiest rank, on all the others
    together, and of that the parts F, I and W; the longest of an average rank's F, I and W; and a message's time."""

    slowest_s: float
    others_s: float
    forward_s: float
    input_s: float
    weight_s: float
    longest_s: float
    transfer_s: float

    @classmethod
    def of(cls, chunks: Sequence[Sequence[int]], times: StepTimes, ways: int = 1) -> RankLoad:
        """For ranks that hold these chunks. `ways`: with two directions each sees half of the microbatches."""
        parts = [
            [sum([taken[chunk] for chunk in mine]) / ways for mine in chunks]
            for taken in (times.forward_s, times.input_s, times.weight_s)
        ]
        work = [sum(each) for each in zip(*parts, strict=True)]
        f, i, w = (sum(each) - max(each) for each in parts)
        return cls(max(work), sum(work) - max(work), f, i, w, max(map(sum, parts)) / len(chunks), times.transfer_s)


class Bubble(NamedTuple):
    """The idle part of all ranks' time where all chunks take equally long, F, I and W too."""

    formula: str
    """For people, with p, m and v as in `PipeShape`."""
    fraction: Callable[[PipeShape], float]


class WeightUpdates(NamedTuple):
    """How an asynchronous schedule updates weights while microbatches are under way: UPDATE is in its lists."""

    microbatches: Callable[[int], int]
    """Of one update, by the number of stages."""
    versions: Callable[[int], int]
    """Of a chunk's weights that a rank holds at most, by the number of stages."""
    keeps_versions: bool
    """Whether a microbatch goes back through the weights that it came through."""
    is_corrected: bool = False
    """Whether the learning rate is divided by the delay at first, and the way back takes an estimate of the weights of
    the way forth, for which ranks remember the mean change of their weights."""


def any_number(stages: int) -> tuple[int, int]:
    return 1, 1


def never(stages: int, microbatches: int) -> None:
    return None


@dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """One pipeline schedule. Only the first three fields have no default."""

    name: str
    meaning: str
    """In a few words, for the documents."""
    lists: Callable[[PipeShape], Iterable[Iterable[Action]]]
    """The passes (F, B, I, W, FB) of every rank, in order."""
    place: Callable[..., ChunkPlacement] = loop
    """Which rank has which chunk, by the number of stages and, where `interleaves` says so, of chunks per stage."""
    interleaves: tuple[int, ...] = ()
    """Chunks per stage that a search tries, for schedules that leave it to `plan.interleave`; empty for the others."""
    is_searched: bool = False
    """Whether a search for the fastest layout tries it where no schedule is fixed."""
    is_split: bool = False
    """Whether some or all backward passes are done in two halves, I and W."""
    is_settling: bool = True
    """Whether what a rank keeps stays the same after two rounds of as many microbatches as stages, instead of growing
    with each."""
    cuts_sequences: bool = False
    """Whether it takes `plan.slices`."""
    microbatches: Callable[[int], tuple[int, int]] = any_number
    """How many microbatches it takes, by the number of stages: at least so many, and a multiple of so many."""
    refuses: Callable[[int, int], str | None] = never
    """Why it cannot be made for so many stages and microbatches, beyond that; None: it can."""
    bubble: Bubble | None = None
    """None: simulated."""
    waits_s: Callable[[PipeShape, RankLoad], float] | None = None
    """What a step lasts longer than the busiest rank computes, messages between neighbours apart; None: by the
    bubble."""
    updates: WeightUpdates | None = None
    """Of an asynchronous schedule, whose gradients are of older weights: it does not compute what one process
    computes. None: one update, at the end of a step."""

    def placement(self, stages: int, interleave: int = 1) -> ChunkPlacement:
        """Which rank has which chunk, without making lists."""
        return _placed(self, stages, interleave)

    def why_not(self, stages: int, microbatches: int) -> str | None:
        """Why it cannot be made for so many stages and microbatches, with the nearest that can; None: it can."""
        reason = self.refuses(stages, microbatches)
        if reason:
            return reason
        nearest = self.microbatches_from(stages, microbatches)
        if nearest == microbatches:
            return None
        least, multiple = self.microbatches(stages)
        taken = f"at least {least}" if multiple == 1 else f"a multiple of {multiple}, at least {least}"
        return (
            f"{self.name} with pp {stages} takes {taken} microbatches: accumulation is {microbatches}, {nearest} is "
            "the next that can"
        )

    def microbatches_from(self, stages: int, count: int) -> int:
        """The least number of microbatches that it takes, of those not below a count."""
        least, multiple = self.microbatches(stages)
        return max(least, -(-count // multiple) * multiple)

    def checked_lists(self, shape: PipeShape) -> Iterable[Iterable[Action]]:
        """The passes of every rank, which are perhaps not made before they are asked for."""
        reason = self.why_not(shape.stages, shape.microbatches)
        if reason:
            raise UsageError(f"schedule {reason}")
        return self.lists(shape)

    def build(self, shape: PipeShape) -> StepProgram:
        """Its lists for so many stages, microbatches, chunks and slices."""
        return StepProgram(
            self.name,
            self.placement(shape.stages, shape.interleave),
            shape.microbatches,
            tuple(tuple(actions) for actions in self.checked_lists(shape)),
            shape.slices,
            versions=self.updates.versions(shape.stages) if self.updates else 1,
            keeps_versions=self.updates.keeps_versions if self.updates else True,
        )


@functools.cache
def _placed(schedule: PipelineSchedule, stages: int, interleave: int) -> ChunkPlacement:
    return schedule.place(stages, interleave) if schedule.interleaves else schedule.place(stages)


def even_stages(name: str) -> Callable[[int, int], str | None]:
    """A schedule of that name refuses odd numbers of stages."""

    def refuses(stages: int, microbatches: int) -> str | None:
        if stages % 2 == 0:
            return None
        return f"{name} takes an even number of stages: pp is {stages}, the next that can is {stages + 1}"

    return refuses
