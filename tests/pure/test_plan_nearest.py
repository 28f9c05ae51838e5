"""The nearest layout that works is one that works, on as many ranks, and as near as can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.conflicts import is_runnable
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import preset
from tilemesh.model.work.weights import why_not
from tilemesh.plan.nearest import _distance, advice, changes, nearest_layouts, smaller_microbatches
from tilemesh.train.load import load, settled

TINY = preset("tiny")  # 4 layers, 4 heads


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 8}, "plan.tp=4"),  # a mesh that does not divide the model
        ({"pp": 8, "accumulation": 8}, "plan.pp=4"),  # more stages than layers
        ({"pp": 2, "schedule": "interleaved", "interleave": 2, "accumulation": 3}, "plan.accumulation=4"),
        ({"pp": 4, "schedule": "dualpipe", "accumulation": 2}, "plan.schedule=1f1b"),  # too few microbatches
        ({"zero": 2, "tp": 2}, "plan.zero=0"),  # one replica
        ({"pp": 2, "accumulation": 4, "recompute": "full", "recompute_stages": (2,)}, "plan.recompute_stages=[]"),
        ({"pp": 2, "accumulation": 4, "offload": "weights"}, "plan.offload="),  # nothing would move
    ],
)
def test_what_to_set_instead(fields: dict[str, Any], words: str) -> None:
    plan = ParallelPlan(precision="fp32", **fields)
    assert words in advice(TINY, plan, plan.batch, lambda text: "accumulation" in text or "accumulation" not in words)
    found = next(nearest_layouts(TINY, plan))
    assert (found.world, why_not(TINY, found), is_runnable(found)) == (plan.world, None, True)


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2))
def test_it_is_the_plan_itself_where_that_works(dp: int, tp: int, pp: int, accumulation: int, zero: int) -> None:
    plan = ParallelPlan(dp=dp, tp=tp, pp=pp, accumulation=accumulation, zero=zero, precision="fp32")
    found = next(nearest_layouts(TINY, plan))
    works = why_not(TINY, plan) is None and is_runnable(plan)
    assert found.world == plan.world
    if works:
        assert found == plan
        assert changes(plan, found) == ""


@pytest.mark.parametrize("by_mesh", [True, False], ids=["mesh", "settings"])
@pytest.mark.parametrize(
    ("dp", "tp", "pp", "sets"),
    [
        (1, 1, 5, []),  # no layout on five ranks divides the batch of 16
        (1, 1, 8, []),
        (1, 3, 1, []),
        (3, 1, 2, []),
        (2, 3, 1, ["plan.zero=2"]),
        (5, 1, 5, ["train.batch=18"]),
        (1, 8, 3, []),
        (2, 1, 3, ["plan.schedule=dualpipe"]),
        (1, 1, 8, ["plan.accumulation=4"]),
    ],
)
def test_what_a_refusal_offers_is_accepted_beside_what_was_typed(
    dp: int, tp: int, pp: int, sets: list[str], by_mesh: bool
) -> None:
    """Whether the mesh was typed as --mesh or as settings."""
    mesh = f"dp={dp},tp={tp},pp={pp}" if by_mesh else None
    sets = sets if by_mesh else [*sets, f"plan.dp={dp},plan.tp={tp},plan.pp={pp}"]
    with pytest.raises(UsageError) as refused:
        load("tiny", mesh=mesh, sets=sets)
    _, _, offered = str(refused.value).partition("; the nearest layout that works: --set ")
    assert offered, refused.value
    found = load("tiny", mesh=mesh, sets=[*sets, offered])
    assert found.plan.world <= dp * tp * pp
    assert found.plan.batch == found.train.batch


def test_a_configuration_made_in_python_is_advised_too() -> None:
    made = load("tiny")
    wrong = replace(made, plan=replace(made.plan, dp=1, tp=1, pp=8, accumulation=16, microbatch=1))
    with pytest.raises(UsageError, match=r"pp 4 at most; the nearest layout that works: --set plan\.dp=2,plan\.pp=4"):
        settled(wrong)


def test_settings_go_over_the_mesh() -> None:
    assert load("tiny", mesh="pp=8", sets=["plan.dp=2,plan.pp=4"]).plan.axes == {"dp": 2, "tp": 1, "pp": 4}


def test_smaller_microbatches_keep_the_batch() -> None:
    plan = ParallelPlan(dp=2, microbatch=12, accumulation=3)
    smaller = list(smaller_microbatches(plan))
    assert [(other.microbatch, other.accumulation) for other in smaller] == [(6, 6), (3, 12)]
    assert {other.batch for other in smaller} == {plan.batch}


def test_a_setting_that_differs_is_one_step_away() -> None:
    plan = ParallelPlan(dp=2, tp=2)
    assert _distance(plan, plan) == 0.0
    assert _distance(plan, replace(plan, sequence_parallel=True)) == 1.0
    assert _distance(plan, replace(plan, zero=1)) == 1.0
    assert _distance(plan, replace(plan, recompute="full")) == 1.0
    assert _distance(plan, replace(plan, microbatch=2)) == 2.0  # twice the batch
    assert _distance(plan, replace(plan, dp=4)) == 4.0 + 2.0  # a factor of two along an axis, and of the batch
