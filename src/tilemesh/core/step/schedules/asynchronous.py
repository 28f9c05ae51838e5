"""Asynchronous pipelines: no flush between updates, so passes read weights of different versions, which the lists say.

All four run passes in the order of 1F1B and never wait for the pipeline to empty. They differ in when a rank updates
its chunk and which version a pass reads:

    pipedream      an update after every backward pass; a microbatch goes back through the weights that it came through,
                   so rank r of p keeps p - r versions (Narayanan et al. 2019)
    pipedream-2bw  an update after every p microbatches, from gradients of the version before: two versions, all passes
                   of microbatch k (from 0) read max(k // p - 1, 0) (Narayanan et al. 2021)
    ampnet         an update after every backward pass and one version: a microbatch goes back through weights that have
                   changed since (Gaunt et al. 2017)
    pipemare       the same lists; the runtime divides the learning rate by the delay at first, and takes for the way
                   back an estimate of the weights of the way forth (Yang et al. 2019)
"""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.core.step.action import Action
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape, WeightUpdates
from tilemesh.core.step.schedules import one_f_one_b


def stashing(shape: PipeShape) -> Iterator[list[Action]]:
    """Both passes of a microbatch read the weights that are newest in its forward pass."""
    return _updating(shape, keeps=True)


def newest(shape: PipeShape) -> Iterator[list[Action]]:
    """Every pass reads the newest weights."""
    return _updating(shape, keeps=False)


def _updating(shape: PipeShape, keeps: bool) -> Iterator[list[Action]]:
    for rank, order in enumerate(one_f_one_b.lists(shape)):
        actions: list[Action] = []
        read: dict[int, int] = {}
        version = 0
        for action in order:
            if action.kind == "F" or not keeps:
                read[action.microbatch] = version
            actions.append(action._replace(version=read[action.microbatch]))
            if action.kind == "B":
                version += 1
                actions.append(Action("UPDATE", rank, version=version, of="weights"))
        yield actions


def double_buffered(shape: PipeShape) -> Iterator[list[Action]]:
    """An update for every p microbatches, whose passes all read the version before the newest."""
    for rank, order in enumerate(one_f_one_b.lists(shape)):
        actions: list[Action] = []
        for action in order:
            group, within = divmod(action.microbatch, shape.stages)
            actions.append(action._replace(version=max(group - 1, 0)))
            if action.kind == "B" and within == shape.stages - 1:
                actions.append(Action("UPDATE", rank, version=group + 1, of="weights"))
        yield actions


def _one(stages: int) -> int:
    return 1


SCHEDULES = (
    PipelineSchedule(
        "pipedream",
        "an update after every backward pass; microbatches go back through the weights that they came through",
        stashing,
        bubble=one_f_one_b.FILLING,
        waits_s=one_f_one_b.filling_s,
        updates=WeightUpdates(_one, lambda stages: stages, keeps_versions=True),
    ),
    PipelineSchedule(
        "pipedream-2bw",
        "an update for every pp microbatches, and two versions of the weights",
        double_buffered,
        microbatches=lambda stages: (stages, stages),
        bubble=one_f_one_b.FILLING,
        waits_s=one_f_one_b.filling_s,
        updates=WeightUpdates(lambda stages: stages, lambda stages: 2, keeps_versions=True),
    ),
    PipelineSchedule(
        "ampnet",
        "an update after every backward pass, and one version of the weights",
        newest,
        bubble=one_f_one_b.FILLING,
        waits_s=one_f_one_b.filling_s,
        updates=WeightUpdates(_one, _one, keeps_versions=False),
    ),
    PipelineSchedule(
        "pipemare",
        "AMPNet with rates divided by the delay at first, and old weights estimated for the way back",
        newest,
        bubble=one_f_one_b.FILLING,
        waits_s=one_f_one_b.filling_s,
        updates=WeightUpdates(_one, _one, keeps_versions=False, is_corrected=True),
    ),
)
