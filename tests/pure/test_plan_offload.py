"""Offloading: what it saves and costs, and that the planner says when it pays."""

from __future__ import annotations

import dataclasses

import pytest

from tilemesh.core.calibration import Rates
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import OFFLOAD_PART_BYTES, ParallelPlan
from tilemesh.model.config import preset
from tilemesh.model.work.weights import count_parameters, shard_parameters
from tilemesh.plan.choose import NothingFitsError, search
from tilemesh.plan.memory import Room
from tilemesh.plan.offload import HostRates, MovedBytes, RankPassTimes, host_rates, offload_s
from tilemesh.plan.space import Pins
from tilemesh.plan.step import predict
from tilemesh.plan.why import why

MODEL = preset("llama-3-8b")
PLAN = ParallelPlan(precision="bf16-master", recompute="full", accumulation=4)
CLUSTER = parse_cluster("1xh200")


def test_optimizer_states_cross_the_link_in_both_directions_at_once() -> None:
    moved = dataclasses.replace(PLAN, offload="optimizer")
    whole, less = predict(MODEL, CLUSTER, PLAN, 2048), predict(MODEL, CLUSTER, moved, 2048)
    states = 12 * count_parameters(MODEL).total
    assert whole.memory.optimizer_bytes == states
    # They come part by part when activations are gone: counted is what they take more than these did.
    parts = 3 * 12 * shard_parameters(MODEL, 1).layer
    assert less.memory.optimizer_bytes == parts - less.memory.activations_bytes - less.memory.logits_bytes
    seconds = (states + OFFLOAD_PART_BYTES) / host_rates(CLUSTER.device).both - whole.times.optimizer_s
    assert less.times.offload_s == pytest.approx(seconds)
    assert less.step_time_s == pytest.approx(whole.step_time_s + seconds)


def test_a_measured_link_counts_and_not_its_datasheet() -> None:
    measured = Rates(host_link_bytes_per_s={"in": 40e9, "out": 30e9, "both": 20e9})
    assert host_rates(CLUSTER.device, measured) == HostRates(40e9, 30e9, 20e9)
    assert (
        host_rates(CLUSTER.device, Rates(host_link_bytes_per_s={"in": 40e9})).outward == host_rates(CLUSTER.device)[1]
    )


def test_what_travels_beside_passes_costs_what_they_do_not_cover() -> None:
    plan = dataclasses.replace(PLAN, offload="activations,weights")
    rates = HostRates(10, 10, 8)  # bytes per second
    times = RankPassTimes(2.0, 2.5, 0.0)
    assert offload_s(plan, rates, MovedBytes(0, 10, 0), times) == 0.0
    # Three seconds of activations beside passes of two and two and a half, four times.
    assert offload_s(plan, rates, MovedBytes(0, 30, 0), times) == pytest.approx(4 * 1.5)
    # Weights leave beside the first forward pass, and come back for each pass after it.
    assert offload_s(plan, rates, MovedBytes(0, 0, 30), times) == pytest.approx(4 * 1.5)
    # Both: out together first, then one comes while the other goes.
    both = offload_s(plan, rates, MovedBytes(0, 20, 20), times)
    assert both == pytest.approx((4 - 2) + 3 * (2.5 - 2) + 4 * (4 - 2.5))
    assert offload_s(PLAN, rates, MovedBytes(10, 10, 10), RankPassTimes(0.0, 0.0, 0.0)) == 0.0


def test_whether_it_pays_is_said() -> None:
    fits = search(MODEL, "1xh200", batch=4, context=2048, pins=Pins.parse(["offload=optimizer,precision=bf16-master"]))
    assert "does not pay" in " ".join(why(fits))
    needs = search(
        preset("llama-3-8b"),
        "1xh100",
        batch=4,
        context=2048,
        pins=Pins.parse(["offload=optimizer,precision=bf16-master"]),
    )
    assert "which pays, as it would not fit otherwise" in " ".join(why(needs))


@pytest.mark.parametrize("pp", [1, 2])
def test_on_a_cpu_the_host_has_no_memory_of_its_own(pp: int) -> None:
    cluster, model = parse_cluster("2xcpu"), preset("gpt2-124m")
    cut = (6, 6) if pp == 2 else ()
    plan = ParallelPlan(dp=2 // pp, pp=pp, accumulation=4, precision="fp32", chunk_layers=cut)
    alone = predict(model, cluster, plan, 256)
    states = predict(model, cluster, dataclasses.replace(plan, offload="optimizer"), 256)
    assert states.memory == alone.memory  # nothing moves ...
    assert states.times.offload_s == 0.0  # ... so nothing takes time
    kept = predict(model, cluster, dataclasses.replace(plan, offload="activations"), 256)
    assert kept.times.offload_s > 0
    # What comes back has two copies for a moment: of one of 12 layers, or of a chunk of which 1F1B holds two.
    room, counts = Room(model, cluster, 256), cut or (12,)
    before, after = (
        room.stages(dataclasses.replace(plan, offload=what), counts)[0].activations_bytes
        for what in ("", "activations")
    )
    assert after == pytest.approx(before * (1 + 1 / 12 if pp == 1 else 1.5), rel=1e-6)
    if pp == 1:
        # A copy stays on the host: beside all weights at the end of a step, where activations are gone, and beside two
        # of 12 layers at work when they are most.
        for context, copies in ((256, 2), (1024, 1 + 2 / 12)):
            weights = predict(model, cluster, dataclasses.replace(plan, offload="weights"), context).memory
            passed = weights.activations_bytes + weights.logits_bytes if context == 256 else 0
            assert weights.weights_bytes == pytest.approx(alone.memory.weights_bytes * copies - passed, abs=1)
    assert room.fullest(dataclasses.replace(plan, offload="optimizer"), counts) == room.fullest(plan, counts)


def test_offload_is_named_where_nothing_fits_without_it() -> None:
    with pytest.raises(NothingFitsError, match="with --fix offload=optimizer it fits here"):
        search(preset("llama-3-70b"), "8xh200", batch=8)
    with pytest.raises(NothingFitsError) as fixed:
        search(preset("llama-3-70b"), "1xh200", batch=8, pins=Pins.parse(["offload=optimizer"]))
    assert "--fix offload" not in str(fixed.value)
    with pytest.raises(NothingFitsError) as on_cpu:
        search(preset("llama-3-70b"), "8xcpu", batch=8)
    assert "offload" not in str(on_cpu.value)
