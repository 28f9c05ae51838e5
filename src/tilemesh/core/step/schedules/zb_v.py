"""ZB-V (Qi et al. 2024, "controllable memory"): two chunks per rank on a V. It keeps as much as 1F1B and never waits
between a rank's first and last pass when F, I and W take equally long."""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.core.step.action import Action
from tilemesh.core.step.placement import vee
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape


def lists(shape: PipeShape) -> Iterator[list[Action]]:
    """Forward passes until the first microbatch is through the V, then all six passes of it in turn."""
    ranks, microbatches, *_ = shape
    count = max(microbatches, 2 * ranks - 1)  # with fewer the order is the same, with passes left out
    for rank in range(ranks):
        yield [action for action in _actions(rank, ranks, count) if action.microbatch < microbatches]


def _actions(rank: int, ranks: int, count: int) -> list[Action]:
    chunks = (rank, 2 * ranks - 1 - rank)
    done = {(kind, leg): 0 for kind in "FIW" for leg in (0, 1)}
    actions: list[Action] = []

    def do(kinds: str, leg: int) -> None:
        for kind in kinds:
            actions.append(Action(kind, chunks[leg], done[kind, leg]))  # type: ignore[arg-type]
            done[kind, leg] += 1

    do("F" * (2 * (ranks - rank) - 1), 0)
    for _ in range(rank):
        do("F", 1)
        do("F", 0)
    for _ in range(ranks - rank):
        do("FIW", 1)
    while done["F", 1] < count:
        do("FIW" if done["F", 0] < count else "IW", 0)
        do("FIW", 1)
    for _ in range(rank):
        do("I", 0)
        do("I", 1)
    for _ in range(ranks - rank):
        do("IW", 0)
    for leg in (1, 0):
        do("W" * (count - done["W", leg]), leg)
    return actions


SCHEDULES = (
    PipelineSchedule(
        "zb-v",
        "1F1B's memory and no waiting between a rank's first and last pass, on a V of two chunks per stage",
        lists,
        vee,
        is_searched=True,
        is_split=True,
        waits_s=lambda shape, load: max(load.forward_s / 2, load.input_s / 2, load.input_s - load.weight_s),
    ),
)
