"""Offloading: what it saves and costs, and that the planner says when it pays."""

from __future__ import annotations

import dataclasses

import pytest

from tilemesh.core.calibration import Rates
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import OFFLOAD_PART_BYTES, ParallelPlan
from tilemesh.model.config import preset
from tilemesh.model.work.weights import count_parameters, shard_parameters
from tilemesh.plan.choose import search
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
