"""A parallel plan refuses what cannot be and survives a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core import config
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import DTYPE_BYTES
from tilemesh.core.plan import ParallelPlan, Precision


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    small = st.integers(1, 64)
    tp, pp = draw(small), draw(small)
    schedules = ["gpipe", "1f1b", "interleaved"] if pp > 1 else ["gpipe", "1f1b"]
    schedule = draw(st.sampled_from(schedules))
    return ParallelPlan(
        dp=draw(small),
        tp=tp,
        pp=pp,
        sequence_parallel=draw(st.booleans()) if tp > 1 else False,
        zero=draw(st.integers(0, 3)),
        microbatch=draw(small),
        accumulation=draw(small),
        schedule=schedule,
        interleave=draw(st.integers(2, 8)) if schedule == "interleaved" else 1,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        attention=draw(st.sampled_from(["fused", "materialized"])),
        precision=draw(st.sampled_from(get_args(Precision))),
    )


@settings(deadline=None)
@given(plans())
def test_toml_round_trip(plan: ParallelPlan) -> None:
    assert ParallelPlan.from_toml(plan.to_toml()) == plan
    assert config.from_dict(ParallelPlan, plan.to_dict()) == plan


@settings(deadline=None)
@given(plans())
def test_description_is_one_line(plan: ParallelPlan) -> None:
    assert "\n" not in plan.describe()
    assert f"= {plan.world} rank" in plan.describe()


def test_a_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(ParallelPlan(dp=2, tp=4).to_toml())
    assert config.load(ParallelPlan, file=path, sets=["zero=1"]) == ParallelPlan(dp=2, tp=4, zero=1)


def test_the_published_530b_layout() -> None:
    plan = ParallelPlan(
        tp=8,
        pp=35,
        sequence_parallel=True,
        accumulation=280,
        schedule="interleaved",
        interleave=3,
        recompute="selective",
        attention="materialized",
        precision="bf16-master",
    )
    assert (plan.world, plan.batch, plan.compute_dtype) == (280, 280, "bf16")
    assert plan.describe() == (
        "dp 1 x tp 8 x pp 35 = 280 ranks, sequence parallel, batch 280 (280 x 1 per replica), interleaved 3, "
        "selective recomputation, materialized attention, bf16-master"
    )


def test_world_and_batch_count_replicas() -> None:
    plan = ParallelPlan(dp=2, tp=3, pp=5, microbatch=7, accumulation=11)
    assert (plan.world, plan.batch) == (30, 154)


def test_the_plain_plan_says_only_what_matters() -> None:
    described = ParallelPlan().describe()
    assert described == "dp 1 x tp 1 x pp 1 = 1 rank, batch 1 (1 x 1 per replica), fused attention, bf16"
    assert "ZeRO-2" in ParallelPlan(dp=4, zero=2).describe()


@pytest.mark.parametrize("precision", get_args(Precision))
def test_every_precision_computes_in_a_known_dtype(precision: Any) -> None:
    assert ParallelPlan(precision=precision).compute_dtype in DTYPE_BYTES


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 0}, "dp is 0: expected a whole number, between 1 and 2,147,483,647"),
        ({"tp": 2.0}, "tp is 2.0: expected a whole number, between 1 and 2,147,483,647"),
        ({"pp": True}, "pp is True: expected a whole number, between 1 and 2,147,483,647"),
        ({"microbatch": -1}, "microbatch is -1: expected a whole number, between 1 and 2,147,483,647"),
        ({"accumulation": 0}, "accumulation is 0: expected a whole number, between 1 and 2,147,483,647"),
        ({"interleave": "2"}, "interleave is '2': expected a whole number, between 1 and 2,147,483,647"),
        ({"zero": -1}, "zero is -1: expected a whole number, between 0 and 3"),
        ({"zero": 4}, "zero is 4: expected a whole number, between 0 and 3"),
        ({"tp": 2, "sequence_parallel": "yes"}, "sequence_parallel is 'yes': expected true or false"),
        (
            {"sequence_parallel": True},
            "sequence_parallel splits the sequence over tp ranks and tp is 1: set tp above 1 or leave it off",
        ),
        ({"pp": 2, "interleave": 2}, "interleave is 2 and schedule is 1f1b: set schedule=interleaved"),
        (
            {"pp": 2, "schedule": "interleaved"},
            "schedule is interleaved and interleave is 1: set interleave to 2 or more, or use 1f1b",
        ),
        (
            {"schedule": "1b1f"},
            "unknown schedule '1b1f': did you mean '1f1b'? known are 1f1b, breadth-first, "
            "chimera, dualpipe, dualpipe-v, gpipe, interleaved, terapipe, v-half, v-min, zb-h1, zb-h2, zb-v, ampnet, "
            "pipedream, pipedream-2bw, pipemare",
        ),
        (
            {"recompute": "some"},
            "unknown recompute 'some': did you mean 'none'? known are none, selective, operators, full",
        ),
        (
            {"attention": "flash"},
            "unknown attention 'flash': known are fused, materialized",
        ),
        (
            {"precision": "int8"},
            "unknown precision 'int8': known are fp32, bf16, bf16-master, fp16, fp64, fp8",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ParallelPlan(**fields)
    assert str(caught.value) == message


def test_from_toml_refuses_an_unknown_key_and_bad_syntax() -> None:
    with pytest.raises(UsageError) as caught:
        ParallelPlan.from_toml("dpp = 2\n", "best.toml")
    assert str(caught.value) == (
        "best.toml: unknown key 'dpp': did you mean 'dp'? known are dp, tp, pp, ep, expert_tp, cp, cp_exchange, "
        "sequence_parallel, zero, zero_group, interleave, chunk_layers, microbatch, accumulation, schedule, slices, "
        "recompute, recompute_every, recompute_stages, prefetch, offload, attention, precision, fp8_scales"
    )
    with pytest.raises(UsageError) as caught:
        ParallelPlan.from_toml("dp = 1\ntp =\n")
    assert str(caught.value) == "plan:2: not valid TOML: invalid value"


def test_what_has_no_effect_is_left_out_of_the_words() -> None:
    assert ParallelPlan().describe().startswith("dp 1 x tp 1 x pp 1 = 1 rank, batch 1 (1 x 1 per replica)")
    assert "1f1b" not in ParallelPlan().describe().lower()
    assert ", 1f1b," in ParallelPlan(pp=2, accumulation=4).describe()
    assert "interleaved 2" in ParallelPlan(pp=2, accumulation=4, schedule="interleaved", interleave=2).describe()
    assert "layers 2+3" in ParallelPlan(pp=2, accumulation=4, chunk_layers=(2, 3)).describe()
    assert "layers" not in ParallelPlan(pp=2, accumulation=4, chunk_layers=(3, 3)).describe()
    one, two = (ParallelPlan(dp=workers).describe(workers) for workers in (1, 2))
    assert one.startswith("1 worker (dp) + 1 server = 2 ranks")
    assert two.startswith("2 workers (dp) + 2 servers = 4 ranks")
