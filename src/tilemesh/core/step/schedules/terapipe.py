"""TeraPipe (Li et al. 2021): sequences pass through the pipeline in slices. How long each is: `core/step/slices.py`."""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.core.step.action import Action
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape
from tilemesh.core.step.schedules.one_f_one_b import filling_s


def lists(shape: PipeShape) -> Iterator[list[Action]]:
    """All slices of all microbatches forward, then backward, a sequence's last slice first."""
    pieces = range(shape.slices)
    for rank in range(shape.stages):
        forwards = [Action("F", rank, m, piece) for m in range(shape.microbatches) for piece in pieces]
        yield forwards + [Action("B", rank, m, piece) for m in range(shape.microbatches) for piece in reversed(pieces)]


SCHEDULES = (
    PipelineSchedule(
        "terapipe",
        "slices of each sequence pass through the stages one after the other",
        lists,
        is_settling=False,
        cuts_sequences=True,
        waits_s=filling_s,
    ),
)
