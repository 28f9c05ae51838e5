"""GPipe (Huang et al. 2019): all forward passes, then all backward passes."""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.core.step.action import Action
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape
from tilemesh.core.step.schedules.one_f_one_b import FILLING, filling_s


def lists(shape: PipeShape) -> Iterator[list[Action]]:
    for rank in range(shape.stages):
        yield [Action(kind, rank, m) for kind in ("F", "B") for m in range(shape.microbatches)]


SCHEDULES = (
    PipelineSchedule(
        "gpipe",
        "all forward passes, then all backward passes; keeps the activations of every microbatch",
        lists,
        is_settling=False,
        bubble=FILLING,
        waits_s=filling_s,
    ),
)
