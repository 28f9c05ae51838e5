"""The host's floor: measured figures put together, and never below what the GPU takes."""

from __future__ import annotations

import dataclasses

import pytest

from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.units import format_seconds
from tilemesh.model.config import preset
from tilemesh.plan import constants
from tilemesh.plan.choose import SearchResult, search
from tilemesh.plan.clock import host_step_s, kind_of
from tilemesh.plan.prediction import Times
from tilemesh.plan.space import Pins
from tilemesh.plan.step import Estimator, predict
from tilemesh.plan.why import runner_up, why
from tilemesh.report.plan_page import TIMES, memory_parts

COSTS = {
    "gpt-compiled-passes": 2e-3, "gpt-compiled-passes-layer": 1e-3, "gpt-compiled-update": 1e-3,
    "gpt-compiled-update-layer": 1e-4,
}  # fmt: skip
BARE = Rates({"bf16": 8e14}, copy_bytes_per_s=4e12, launch_s=7e-6)
SLOW = dataclasses.replace(BARE, host_s=COSTS)
GPT, TWO = preset("gpt2-124m").replace(dropout=0.0), parse_cluster("2xh200")


def test_passes_count_for_each_microbatch_and_the_update_once() -> None:
    assert host_step_s(COSTS, GPT, "compiled", 12, 1) == pytest.approx(14e-3 + 2.2e-3)
    assert host_step_s(COSTS, GPT, "compiled", 12, 4) == pytest.approx(4 * 14e-3 + 2.2e-3)
    assert host_step_s(COSTS, GPT, "eager", 12, 1) == 0  # not measured
    assert host_step_s(COSTS, preset("tinyllama-1.1b"), "compiled", 12, 1) == 0
    assert [kind_of(preset(name)) for name in ("gpt3-175b", "llama-2-7b", "tiny")] == ["gpt", "llama", "llama"]


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"dp": 2}, 0),
        ({"tp": 2}, 4),
        ({"tp": 2, "sequence_parallel": True}, 8),
        ({"dp": 2, "zero": 3}, 3),
        ({"tp": 2, "accumulation": 4}, 16),
    ],
)
def test_the_host_calls_other_ranks_in_every_layer(settings: dict[str, int], calls: int) -> None:
    """Of a layer: two sums each way; cut along the sequence a gather and a scattering sum for each; with ZeRO-3 two
    gathers and a scattering sum."""
    plan = ParallelPlan(**settings, precision="bf16")  # type: ignore[arg-type]
    own = host_step_s(COSTS, GPT, "compiled", 12, plan.accumulation)
    found = Estimator(GPT, TWO, rates=SLOW, code="compiled").host_s(plan)
    assert found - own == pytest.approx(12 * calls * constants.EXCHANGE_HOST_S)


@pytest.mark.parametrize(("batch", "waits"), [(1, True), (32, False)])
def test_a_step_is_the_longer_of_the_two(batch: int, waits: bool) -> None:
    plan = ParallelPlan(dp=2, microbatch=batch, precision="bf16")
    bare, found = (predict(GPT, TWO, plan, rates=rates, code="compiled") for rates in (BARE, SLOW))
    assert found.step_time_s == pytest.approx(max(bare.step_time_s, 16.2e-3))
    assert (found.step_time_s > bare.step_time_s) is waits
    assert found.times.total_s == pytest.approx(found.step_time_s)
    assert dataclasses.replace(found.times, host_s=0.0) == bare.times
    estimator = Estimator(GPT, TWO, rates=SLOW, code="compiled")
    assert estimator.rank(plan).step_s == pytest.approx(found.step_time_s)


@pytest.mark.parametrize(("precision", "waits"), [("bf16", False), ("fp16", True)])
def test_a_step_that_is_replayed_waits_for_no_host(precision: str, waits: bool) -> None:
    """On one GPU alone a step is a CUDA graph; with a loss scale, which is looked at in each step, it is not."""
    rates = dataclasses.replace(SLOW, matmul_flops_per_s={"bf16": 8e14, "fp16": 8e14})
    plan = ParallelPlan(precision=precision)
    found = predict(GPT, parse_cluster("1xh200"), plan, rates=rates, code="compiled")
    assert (found.times.host_s > 0) is waits
    assert predict(GPT, parse_cluster("1xh200"), plan, rates=rates, code="compiled", graph=False).times.host_s > 0
    if not waits:
        assert not any("host" in line for line in why(searched(SLOW, 1, "1xh200")))


def test_a_gpu_that_is_nearly_full_replays_nothing() -> None:
    alone = Estimator(GPT, parse_cluster("1xh200"), rates=SLOW, code="compiled")
    sizes = [size for size in range(16, 320, 8) if alone.fits(ParallelPlan(microbatch=size, precision="bf16"))]
    replayed = [alone.replays(ParallelPlan(microbatch=size, precision="bf16")) for size in sizes]
    assert replayed == sorted(replayed, reverse=True)
    assert {True, False} == set(replayed)


def test_a_stage_launches_its_own_layers() -> None:
    plan = ParallelPlan(pp=2, accumulation=4, precision="bf16")
    found = predict(GPT, parse_cluster("2xh200"), plan, context=32, rates=SLOW, code="compiled")
    assert found.step_time_s == pytest.approx(host_step_s(COSTS, GPT, "compiled", max(found.chunk_layers), 4))


def test_a_calibration_from_before_has_no_floor() -> None:
    old = Calibration("id", "a box", "today", gpu=BARE).to_dict()
    assert "host_s" not in old["gpu"]
    loaded = Calibration.from_dict(old)
    assert loaded.gpu == BARE
    new = Calibration("id", "a box", "today", gpu=SLOW)
    assert Calibration.from_dict(new.to_dict()) == new
    assert new.to_dict()["gpu"]["host_s"] == COSTS


def searched(rates: Rates | None, batch: int, cluster: str = "2xh200") -> SearchResult:
    return search("gpt2-124m", cluster, batch=batch, rates=rates, code="compiled", pins=Pins(precision="bf16"))


def test_words_say_what_of_the_host_is_in_the_figures() -> None:
    assert "waits" in why(searched(SLOW, 1))[-1]
    assert why(searched(SLOW, 32))[-1] == "The host needs 16.2 ms to launch a step, while the GPU works."
    assert "more waiting for the host" in runner_up(searched(SLOW, 2))
    assert why(searched(BARE, 8))[-1].startswith("Not in these figures: the host's time")
    # Long steps hide it whatever it is; on one GPU there are no others.
    said = why(search("tinyllama-1.1b", "1xh200", batch=8))
    assert not any("host" in line or "others" in line for line in said)


def test_a_page_shows_all_of_a_step_and_no_more_memory_than_there_is() -> None:
    assert set(TIMES) == {field.name for field in dataclasses.fields(Times)}
    memory = searched(SLOW, 8, "1xh200").best.memory
    assert memory.later_bytes > 0
    assert sum(memory_parts(memory).values()) == memory.total_bytes


def test_layers_of_a_stage_are_those_of_all_its_chunks() -> None:
    """Chimera's stages have two chunks each, which half of the microbatches pass."""
    pins = Pins.parse(["schedule=chimera,tp=1,pp=4,microbatch=1"])
    found = search("tinyllama-1.1b", "4xh100", batch=16, pins=pins)
    held = [sum(found.best.chunk_layers[chunk] for chunk in each) for each in found.best.plan.placement.held]
    words = " ".join(why(found))
    assert f"gives each stage {min(held)} to {max(held)} layers" in words or f"each stage {held[0]} layers" in words
    layer_s = found.best.step_time_s / (16 / 2 * found.estimator().busiest_layers(found.best.plan)[0])
    assert f"At {format_seconds(layer_s)} per layer" in words
