"""ZB-H1 and ZB-H2 (Qi et al. 2024): the backward pass is split, and weight gradients are done where 1F1B waits."""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.core.step.action import Action
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape


def _actions(rank: int, microbatches: int, in_flight: int, late: int) -> Iterator[Action]:
    """1F1B with `in_flight` microbatches and the weight gradient `late` microbatches behind the input gradient.

    After the last forward pass, gradients of inputs come first: the rank before waits for them.
    """
    ahead = min(in_flight, microbatches)
    forwards = inputs = weights = 0
    while weights < microbatches:
        if forwards < microbatches and forwards - inputs < ahead:
            yield Action("F", rank, forwards)
            forwards += 1
            continue
        if inputs < microbatches:
            yield Action("I", rank, inputs)
            inputs += 1
        if inputs - weights > late or inputs == microbatches or forwards == microbatches:
            yield Action("W", rank, weights)
            weights += 1


def h1(shape: PipeShape) -> Iterator[Iterator[Action]]:
    """Rank r puts off r weight gradients, to fill the end of the step."""
    p, m, *_ = shape
    return (_actions(rank, m, p - rank, rank) for rank in range(p))


def h2(shape: PipeShape) -> Iterator[Iterator[Action]]:
    """No bubble but in the beginning and the end, which shift into those of the neighbouring steps."""
    p, m, *_ = shape
    return (_actions(rank, m, 2 * (p - rank) - 1, 2 * rank) for rank in range(p))


SCHEDULES = (
    PipelineSchedule(
        "zb-h1",
        "1F1B's memory and a third of its bubble: weight gradients fill the end of the step",
        h1,
        is_searched=True,
        is_split=True,
        waits_s=lambda shape, load: max(load.forward_s, load.forward_s + load.input_s - load.weight_s),
    ),
    PipelineSchedule(
        "zb-h2",
        "no waiting between a rank's first and last pass, for about twice 1F1B's memory",
        h2,
        is_searched=True,
        is_split=True,
        waits_s=lambda shape, load: max(load.forward_s, load.forward_s + load.input_s - 2 * load.weight_s),
    ),
)
