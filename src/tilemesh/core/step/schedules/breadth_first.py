"""Breadth-first (Lamy-Poirier 2023): all microbatches on one chunk before the next, so that a chunk's weights are
gathered, and its gradients summed, once per pass."""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.core.step.action import Action
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape
from tilemesh.core.step.schedules.one_f_one_b import CHUNKS, filling_s


def lists(shape: PipeShape) -> Iterator[list[Action]]:
    ranks, microbatches, per_rank, _ = shape
    for rank in range(ranks):
        own = range(rank, ranks * per_rank, ranks)
        forwards = [Action("F", chunk, m) for chunk in own for m in range(microbatches)]
        yield forwards + [Action("B", chunk, m) for chunk in reversed(own) for m in range(microbatches)]


SCHEDULES = (
    PipelineSchedule(
        "breadth-first",
        "all microbatches on one of a stage's chunks before the next: with ZeRO each is gathered once per pass",
        lists,
        interleaves=CHUNKS,
        is_settling=False,
        waits_s=filling_s,
    ),
)
