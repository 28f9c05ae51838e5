"""Chimera (Li and Hoefler 2021): two 1F1B pipelines, one from either end, p microbatches at a time, each pass on a slot
of its own.

Slots are those of equally long passes. On the way down, F of the k-th microbatch of a round is on rank r at slot
r + 2k and B at 2p - 1 - r + 2k; on the way up r counts from the other end. p being even, the two never meet.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.core.step.action import Action
from tilemesh.core.step.placement import two_ways
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape, RankLoad, even_stages


def lists(shape: PipeShape) -> Iterator[list[Action]]:
    ranks, microbatches, *_ = shape
    for rank in range(ranks):
        slots: list[tuple[int, Action]] = []
        for m in range(microbatches):
            turn, within = divmod(m, ranks)
            chunk = ranks - 1 - rank if within % 2 else rank
            begin = 2 * ranks * turn + 2 * (within // 2)
            slots.append((begin + chunk, Action("F", chunk, m)))
            slots.append((begin + 2 * ranks - 1 - chunk, Action("B", chunk, m)))
        yield [action for _, action in sorted(slots)]


def waits_s(shape: PipeShape, load: RankLoad) -> float:
    return (load.forward_s + load.input_s + load.weight_s) * (shape.stages - 2) / (shape.stages - 1)


SCHEDULES = (
    PipelineSchedule(
        "chimera",
        "two 1F1B pipelines, one from either end, which share the ranks; weights are held twice",
        lists,
        two_ways,
        microbatches=lambda stages: (2, 2),
        refuses=even_stages("chimera"),
        waits_s=waits_s,
    ),
)
