"""Products in 8 bits, predicted: how much faster layers become with their casts, and that nothing runs them yet."""

from __future__ import annotations

import dataclasses

import pytest

from tilemesh.core.conflicts import PLAN_CONFLICTS, refusals
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import DEVICES, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import preset
from tilemesh.model.work.operations import Product, layer_work
from tilemesh.model.work.passes import CAST_BYTES, MemoryPass
from tilemesh.model.work.task import Task
from tilemesh.plan.choose import search
from tilemesh.plan.prediction import trainable
from tilemesh.plan.space import Pins
from tilemesh.plan.speed import speed_of
from tilemesh.plan.step import predict
from tilemesh.plan.why import why

LLAMA = preset("llama-3-8b")


@pytest.mark.parametrize(
    ("inputs", "outputs", "measured"), [(2048, 5632, 1.33), (3072, 8192, 1.37), (4096, 14336, 1.56), (4096, 4096, 1.41)]
)
def test_a_linear_layer_gains_what_was_measured_with_its_casts(inputs: int, outputs: int, measured: float) -> None:
    """H200, torch.compile's casts, 16,384 tokens, the three products of a layer: within 7 %."""
    speed, tokens = speed_of(DEVICES["h200"], "bf16", code="compiled"), 16384
    forward = Product("forward", 1, tokens, outputs, inputs, "bf16")
    three = [forward, forward._replace(n=inputs, k=outputs), forward._replace(m=inputs, k=tokens)]
    cast = MemoryPass("casts", CAST_BYTES["compiled"] * (tokens * inputs + tokens * outputs + inputs * outputs))
    narrow_s = sum(speed.matmul_s(op._replace(fp8=True)) for op in three) + speed.op_s(cast)
    assert sum(map(speed.matmul_s, three)) / narrow_s == pytest.approx(measured, rel=0.07)


def test_layers_are_narrow_and_the_head_attention_and_memory_are_not() -> None:
    plan = ParallelPlan(dp=8, zero=3, accumulation=4, precision="bf16-master")
    wide, narrow = (
        predict(LLAMA, parse_cluster("8xh100"), dataclasses.replace(plan, precision=precision))
        for precision in ("bf16-master", "fp8")
    )
    assert 1.1 < wide.step_time_s / narrow.step_time_s < 1.6
    assert narrow.memory == wide.memory  # torchao's runs: 47.7 GB each
    assert narrow.peak_flops_per_s == 8 * DEVICES["h100"].peak("fp8")
    work = layer_work(LLAMA, Task(1, 8192, 8192, precision="fp8"))
    assert all(op.fp8 for op in (*work.forward, *work.backward) if isinstance(op, Product))


def test_it_is_planned_where_a_gpu_has_it_and_said_to_be_a_prediction() -> None:
    found = search(LLAMA, "8xh100", batch=64, pins=Pins.parse(["precision=fp8"]))
    assert {prediction.plan.precision for prediction in found.predictions} == {"fp8"}
    assert any("predicted; it cannot run here yet" in line for line in why(found))
    line = trainable(found.best.plan)
    assert "precision is fp8: products in 8 bits are predicted; they cannot run here yet" in line
    (refused,) = refusals(PLAN_CONFLICTS, ParallelPlan(precision="fp8"))
    assert refused.instead == "precision=bf16-master"
    usual = search(LLAMA, "8xh100", batch=64)
    assert any("In fp8 this layout would take" in line for line in why(usual))
    with pytest.raises(UsageError, match="a100-80 has no matmul peak for dtype 'fp8'"):
        search(LLAMA, "8xa100", batch=64, pins=Pins.parse(["precision=fp8"]))
