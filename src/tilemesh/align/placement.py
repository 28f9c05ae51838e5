"""Placements of a run that learns from feedback: what the planner is asked, and what of its answers this room runs."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import Any, Literal

from tilemesh.align.config import AlignConfig
from tilemesh.align.formulas.algorithms import ALGORITHMS
from tilemesh.align.inputs import read_scorers
from tilemesh.align.tasks import TASKS
from tilemesh.core.config import to_dict
from tilemesh.core.conflicts import PLAN_CONFLICTS, refusals
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.hardware import device_for, parse_cluster
from tilemesh.core.placement import ACTOR, CRITIC, ENGINE, REFERENCE, REWARD, AlignWork, Placement, Pool
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.plan_file import ALIGN, plan_text
from tilemesh.data.cases import read_cases
from tilemesh.measure.machine import stamp, this_machine
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.task import Code
from tilemesh.plan.align import AlignEstimator, PlacementPrediction, placement_figures
from tilemesh.plan.local import local_machine
from tilemesh.plan.placements import search_placements
from tilemesh.plan.space import Pins
from tilemesh.train.predict import predict_run

_LOOKED_AT = 16
"""Prompts whose length is looked at before a run."""
_LETTERS = 4
"""Of a token, where tokens are not bytes."""


def work_of(work: AlignWork) -> AlignWork:
    """With what it leaves open as its algorithm's row says."""
    if work.algorithm not in ALGORITHMS:
        raise unknown("algorithm", work.algorithm, ALGORITHMS)
    row = ALGORITHMS[work.algorithm]
    if work.critic in ("head", "own") and not row.has_critic:
        raise UsageError(f"critic={work.critic} and algorithm={work.algorithm}: no critic says what its rewards are "
                         "compared with; set critic=none or algorithm=ppo")  # fmt: skip
    epochs = work.epochs or row.epochs
    critic = work.critic or ("head" if row.has_critic else "none")
    needs_old = epochs * work.minibatches > 1 or critic != "none" or row.kl == "reward"
    return dataclasses.replace(
        work, epochs=epochs, critic=critic, old=needs_old if work.old is None else work.old,
        reference=row.has_reference if work.reference is None else work.reference,
    )  # fmt: skip


def why_not_run(placement: Placement) -> str:
    """Why `tilemesh align` does not run a placement; empty where it does."""
    pools = placement.pools
    engine, actor = placement.pool(ENGINE), placement.pool(ACTOR)
    plan = actor.plan
    assert plan is not None
    if plan.tp % engine.rollout_tp if len(pools) == 1 else engine.rollout_tp > 1:
        return "a rank of an engine joins whole parts of ranks that train, and one on ranks of its own is one rank"
    if len(pools) > 1 and len(engine.models) > 1:
        return "models beside the engine lie on the ranks that train"
    return "" if can_align(plan) else "a layout that feedback is not trained with"


def can_align(plan: ParallelPlan) -> bool:
    """Whether a model may learn from feedback in this layout: see `config.CONFLICTS`."""
    is_plain = plan.pp == plan.cp == plan.ep == 1 and plan.zero < 3 and plan.offload in ("", "optimizer")
    return is_plain and not list(refusals(PLAN_CONFLICTS, plan))


# ---- a run's own ---------------------------------------------------------------------------------------------------


def run_work(config: AlignConfig, on_gpu: bool = False) -> AlignWork:
    """What a step of this run does, as the planner is asked: answers of the longest that they may have."""
    align, row = config.align, config.align.row
    cases = [TASKS[align.task].case(0, place) for place in range(_LOOKED_AT)] if align.task in TASKS else []
    if align.prompts_file is not None:
        cases = read_cases(align.prompts_file)[:_LOOKED_AT]
    letters = max((len(str(case.get("prompt") or case.get("messages"))) for case in cases), default=1)
    prompt = letters if config.training.data.tokenizer is None else -(-letters // _LETTERS)
    critic: Literal["none", "own", "head"] = "none"
    if row.has_critic:
        critic = "own" if align.critic == "own" else "head"
    most = config.training.context - align.longest
    return AlignWork(
        prompts=align.prompts, answers=align.answers, prompt=max(1, min(prompt, most)),
        tokens=align.longest, algorithm=align.algorithm, minibatches=align.minibatches, epochs=row.epochs,
        critic=critic, reference=align.has_reference, lora=config.training.lora.rank, running=align.running,
        old=align.steps_per_batch > 1 or row.has_critic or row.kl == "reward",
        packed=not (config.train.compile or align.invariant),
        repacks=not (on_gpu or align.invariant or config.is_small) and platform.machine() in ("aarch64", "arm64"),
        reward="model" if any(each.is_model for each in read_scorers(align).values()) else "function",
    )  # fmt: skip


def rank_placements(config: AlignConfig, gpus: Sequence[str]) -> list[PlacementPrediction]:
    """Placements of a run on as many ranks of this machine as it has, and with its layout but for dp; the quickest
    first. RunError or UsageError where none is possible, or this machine was not measured."""
    plan, estimator = config.plan, _estimator(config, gpus)
    pins = Pins(tp=plan.tp, pp=1, cp=1, zero=plan.zero, precision=plan.precision)
    return search_placements(estimator, pins=pins, accepts=can_align, runs=lambda each: not why_not_run(each))


def predict_feedback(config: AlignConfig, gpus: Sequence[str]) -> dict[str, Any]:
    """Seconds of a step and of its phases, and memory, as the planner sees the run's own placement; or why it cannot.
    Of pairs of answers, as of text."""
    if config.align.is_of_pairs:
        return predict_run(config.training, gpus)
    try:
        prediction, kind = predict_run_placement(config, gpus)
    except UsageError as error:
        return {"missing": f"the planner: {error}", **stamp()}
    return {**stamp(), **placement_figures(prediction, config.align.steps_per_batch, kind)}


def predict_run_placement(config: AlignConfig, gpus: Sequence[str]) -> tuple[PlacementPrediction, str]:
    """Of the run's own placement, and the kind of device; UsageError where the planner cannot."""
    estimator = _estimator(config, gpus)
    return estimator.predict(run_placement(config)), estimator.cluster.device.kind


def run_placement(config: AlignConfig) -> Placement:
    """Of the run itself."""
    plan, work = config.plan, run_work(config)
    beside = (CRITIC,) * (work.critic == "own") + (REFERENCE,) * bool(work.reference)
    beside += (REWARD,) * (work.reward == "model")
    pools = [Pool(plan.world, (ACTOR, ENGINE, *beside), plan, config.align.rollout_tp or plan.tp)]
    if config.align.ranks_beside:
        pools = [Pool(plan.world, (ACTOR, *beside), plan), Pool(config.align.ranks_beside, (ENGINE,))]
    return Placement(tuple(pools), config.align.batches_ahead if len(pools) > 1 else 0)


def _estimator(config: AlignConfig, gpus: Sequence[str]) -> AlignEstimator:
    """For all ranks of a run, on this machine."""
    world = config.plan.world + config.align.ranks_beside
    on_gpu = bool(gpus) and config.train.device != "cpu"
    try:
        here = local_machine(f"{world}xlocal" + ("" if on_gpu else "-cpu"), this_machine())
        cluster, rates = here.cluster, here.rates
    except UsageError:
        if not on_gpu:
            raise
        device = device_for(gpus[0])
        if device is None:
            raise
        cluster, rates = parse_cluster(f"{world}x{device.name}"), None
    code: Code = "compiled" if config.train.compile else "eager"
    return AlignEstimator(config.training.model, cluster, run_work(config, on_gpu), rates, code)


def settings_of(placement: Placement) -> list[str]:
    """That make a run this placement."""
    plan = placement.pool(ACTOR).plan
    assert plan is not None
    return [f"plan.dp={plan.dp}", *(f"align.{name}={value}" for name, value in _drawing(placement).items())]


def _drawing(placement: Placement) -> dict[str, Any]:
    """Settings of `align` that say which ranks draw, and when."""
    engine, ahead = placement.pool(ENGINE), {"ahead": placement.ahead} if placement.ahead > 1 else {}
    size = {"rollout_ranks": engine.ranks} if len(placement.pools) > 1 else {"rollout_tp": engine.rollout_tp}
    return {"placement": placement.kind, **size, **ahead}


def placement_text(placement: Placement, work: AlignWork, model: ModelConfig, note: str) -> str:
    """A placement that `why_not_run` allows, and the work it is for, as the file that `load` takes as a plan."""
    actor = placement.pool(ACTOR).plan
    assert actor is not None
    align = {name: getattr(work, name) for name in ("algorithm", "prompts", "answers", "minibatches", "running")}
    align |= {"max_tokens": work.tokens, "epochs": work.epochs or 0, **_drawing(placement)}
    align |= {"critic": "own"} if work.critic == "own" else {}
    sections = {ALIGN: align, "lora": {"rank": work.lora}, "model": to_dict(model)}
    return plan_text(ALIGN, note, actor.to_dict(), **sections)


def placement_words(config: AlignConfig) -> str:
    """What lies where, in a line."""
    beside, ahead = config.align.ranks_beside, config.align.batches_ahead
    if not beside:
        several = f"{config.plan.world} ranks draw answers and train"
        return f"colocated: {'1 rank draws answers and trains' if config.plan.world == 1 else several} in turn"
    when = "one batch ahead of the update" if ahead else "while the others wait"
    if config.align.streams:
        when = f"batch after batch, at most {ahead} ahead of the update"
    return f"{config.align.placement}: {config.plan.world} train, {beside} more draw answers {when}"
