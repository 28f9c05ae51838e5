"""Offloading: what it saves and costs, and that the planner says when it pays."""

from __future__ import annotations

import dataclasses

import pytest

from tilemesh.core.hardware import DEVICES, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import preset
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.choose import search
from tilemesh.plan.offload import MovedBytes, host_bytes_per_s, offload_s
from tilemesh.plan.space import Pins
from tilemesh.plan.step import predict
from tilemesh.plan.why import why

MODEL = preset("llama-3-8b")
PLAN = ParallelPlan(precision="bf16-master", recompute="full", accumulation=4)
CLUSTER = parse_cluster("1xh200")


def test_optimizer_states_cross_the_link_twice_and_two_layers_of_them_stay() -> None:
    moved = dataclasses.replace(PLAN, offload="optimizer")
    whole, less = predict(MODEL, CLUSTER, PLAN, 2048), predict(MODEL, CLUSTER, moved, 2048)
    states = 12 * count_parameters(MODEL).total
    assert whole.memory.optimizer_bytes == states
    assert less.memory.optimizer_bytes == pytest.approx(states * 2 / MODEL.layers, abs=1)
    seconds = 2 * states / host_bytes_per_s(CLUSTER.device)
    assert less.times.offload_s == pytest.approx(seconds)
    assert less.step_time_s == pytest.approx(whole.step_time_s + seconds)


def test_what_travels_beside_passes_costs_what_they_do_not_cover() -> None:
    device, rate = DEVICES["h100"], host_bytes_per_s(DEVICES["h100"])
    plan = dataclasses.replace(PLAN, offload="activations,weights")
    second = int(rate)  # of bytes
    assert offload_s(plan, device, MovedBytes(0, second, 0), 2.0, 2.0) == 0.0
    assert offload_s(plan, device, MovedBytes(0, 3 * second, 0), 2.0, 2.5) == pytest.approx(4 * 1.5, rel=1e-6)
    assert offload_s(plan, device, MovedBytes(0, 0, second), 2.0, 2.0) == pytest.approx(1.0, rel=1e-6)
    assert offload_s(PLAN, device, MovedBytes(second, second, second), 0.0, 0.0) == 0.0


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
