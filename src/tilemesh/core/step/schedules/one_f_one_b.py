"""1F1B (PipeDream, Narayanan et al. 2019) and, over several chunks per rank, interleaved 1F1B (Narayanan et al. 2021).

As few forward passes ahead as keep all ranks busy, then one forward and one backward pass in turn. Interleaved, a rank
takes its chunks in turn, each for a group of p microbatches: the bubble is v times shorter.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.core.step.action import Action
from tilemesh.core.step.schedule import Bubble, PipelineSchedule, PipeShape, RankLoad

CHUNKS = (2, 3, 4, 5, 6, 8)
"""Per stage: what a search tries."""


def filling(shape: PipeShape) -> float:
    p, m, v, _ = shape
    return (p - 1) / (v * m + p - 1)


FILLING = Bubble("(p - 1) / (m + p - 1)", filling)
"""Of a pipeline that is filled and emptied once."""


def filling_s(shape: PipeShape, load: RankLoad) -> float:
    """What filling and emptying the pipeline takes, v times less where a stage has v chunks."""
    return load.others_s / shape.interleave


def lists(shape: PipeShape) -> Iterator[Iterator[Action]]:
    return (_alternating(shape, rank) for rank in range(shape.stages))


def _alternating(shape: PipeShape, rank: int) -> Iterator[Action]:
    """Warm-up, one forward and one backward in turn, the rest of the backward passes."""
    ranks, microbatches, per_rank, _ = shape
    forwards, backwards = [], []
    for turn in range(microbatches * per_rank):
        group, within = divmod(turn, ranks * per_rank)
        local, m = within // ranks, group * ranks + within % ranks
        forwards.append(Action("F", local * ranks + rank, m))
        backwards.append(Action("B", (per_rank - 1 - local) * ranks + rank, m))
    # With several chunks: all but the last for the first group, and twice the distance to the last rank, there and
    # back. The forward pass that directly precedes the first backward pass is not counted.
    distance = ranks - 1 - rank
    ahead = distance if per_rank == 1 else (per_rank - 1) * ranks + 2 * distance
    ahead = min(ahead, len(forwards) - 1)
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


SCHEDULES = (
    PipelineSchedule(
        "1f1b",
        "a forward and a backward pass in turn, as few microbatches ahead as keep all ranks busy",
        lists,
        is_searched=True,
        bubble=FILLING,
        waits_s=filling_s,
    ),
    PipelineSchedule(
        "interleaved",
        "1F1B over several chunks per stage: a shorter bubble, more messages and activations",
        lists,
        interleaves=CHUNKS,
        is_searched=True,
        microbatches=lambda stages: (stages, stages),
        bubble=Bubble("(p - 1) / (v m + p - 1)", filling),
        waits_s=lambda shape, load: (
            filling_s(shape, load) + 2 * shape.stages * (shape.interleave - 1) * load.transfer_s
        ),
    ),
)
