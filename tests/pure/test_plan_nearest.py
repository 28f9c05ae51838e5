"""The nearest layout that works is one that works, on as many ranks, and as near as can be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.plan import ParallelPlan
from tilemesh.core.runnable import lacks
from tilemesh.model.config import preset
from tilemesh.model.work.weights import why_not
from tilemesh.plan.nearest import advice, changes, nearest_layout

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
    assert words in advice(TINY, plan)
    found = nearest_layout(TINY, plan)
    assert found is not None
    assert (found.world, why_not(TINY, found), list(lacks(found))) == (plan.world, None, [])


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2))
def test_it_is_the_plan_itself_where_that_works(dp: int, tp: int, pp: int, accumulation: int, zero: int) -> None:
    plan = ParallelPlan(dp=dp, tp=tp, pp=pp, accumulation=accumulation, zero=zero, precision="fp32")
    found = nearest_layout(TINY, plan)
    works = why_not(TINY, plan) is None and not list(lacks(plan))
    assert found is not None
    assert found.world == plan.world
    if works:
        assert found == plan
        assert advice(TINY, plan) == changes(plan, found) == ""
