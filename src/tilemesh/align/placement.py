"""Placements of a run that learns from feedback: what the planner is asked, and what of its answers this room runs."""

from __future__ import annotations

import dataclasses

from tilemesh.align.formulas.algorithms import ALGORITHMS
from tilemesh.core.conflicts import PLAN_CONFLICTS, refusals
from tilemesh.core.errors import unknown
from tilemesh.core.placement import ACTOR, ENGINE, AlignWork, Placement
from tilemesh.core.plan import ParallelPlan


def work_of(work: AlignWork) -> AlignWork:
    """With what it leaves open as its algorithm's row says."""
    if work.algorithm not in ALGORITHMS:
        raise unknown("algorithm", work.algorithm, ALGORITHMS)
    row = ALGORITHMS[work.algorithm]
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
    if placement.ahead > 1:
        return "answers are drawn at most one batch ahead"
    if engine.rollout_tp > 1:
        return "an engine is one rank"
    if len(pools) > 1 and len(engine.models) > 1:
        return "models beside the engine lie on the ranks that train"
    if len(pools) == 1 and plan.tp > 1:
        return "only the first rank of a replica has an engine"
    return "" if can_align(plan) else "a layout that feedback is not trained with"


def can_align(plan: ParallelPlan) -> bool:
    """Whether a model may learn from feedback in this layout: see `config.CONFLICTS`."""
    is_plain = plan.pp == plan.cp == plan.ep == 1 and plan.zero < 3 and plan.offload in ("", "optimizer")
    return is_plain and not list(refusals(PLAN_CONFLICTS, plan))
