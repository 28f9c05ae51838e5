"""Products in 8 bits, predicted: how much faster layers become with their casts, and which of them stay in 16."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from tilemesh.core.calibration import Rates
from tilemesh.core.config import to_dict
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import DEVICES, parse_cluster
from tilemesh.core.plan import Fp8Scales, ParallelPlan
from tilemesh.model.config import preset
from tilemesh.model.work.operations import Operation, Product, layer_work
from tilemesh.model.work.passes import CAST_BYTES, MemoryPass
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import is_wide_for_fp8, why_not
from tilemesh.plan.choose import search
from tilemesh.plan.grade import RunSummary, grade
from tilemesh.plan.prediction import trainable
from tilemesh.plan.space import Pins
from tilemesh.plan.speed import speed_of
from tilemesh.plan.step import predict
from tilemesh.plan.why import why
from tilemesh.train.predict import calibrated_peak
from tilemesh.train.rows import _datasheet_peak

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


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_a_runs_limit_has_each_product_at_its_own_peak(scales: Fp8Scales, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ParallelPlan(dp=8, zero=3, accumulation=4, precision="fp8", fp8_scales=scales)
    cluster, device = parse_cluster("8xh100"), DEVICES["h100"]
    predicted = predict(LLAMA, cluster, plan, 8192)
    work = layer_work(LLAMA, Task(plan.batch, 8192, 8192, precision="fp8", fp8_scales=scales, code="eager"))
    narrow = LLAMA.layers * sum(op.cost.flops for op in (*work.forward, *work.backward) if is_narrow(op))
    assert narrow > 0.4 * predicted.model_flops
    rest = predicted.model_flops - narrow
    limit_s = (narrow / device.peak("fp8") + rest / device.peak("bf16")) / 8
    summary = {"step_time_s": None, "model": to_dict(LLAMA), "context": 8192, "world": 8, "cluster": "8xh100"}
    summary |= {"plan": plan.to_dict(), "device": device.name, "machine": "here"}
    grade_of_step = grade(RunSummary("run", LLAMA, plan, 8192, "8xh100", summary), cluster).find("step time")
    assert grade_of_step.limit == pytest.approx(limit_s)
    assert _datasheet_peak(summary) == predicted.peak_flops_per_s == 8 * device.peak("fp8")
    # The same of the rates that were measured, and none where those in 8 bits were not.
    rates = Rates({"bf16": 6e14, "fp8": 1e15})
    monkeypatch.setattr("tilemesh.core.calibration.find", lambda name: SimpleNamespace(gpu=rates))
    peak, _ = calibrated_peak(summary)
    assert peak == pytest.approx(8 * predicted.model_flops / (narrow / 1e15 + rest / 6e14))
    rates = Rates({"bf16": 6e14})
    assert calibrated_peak(summary) == (None, "no matmul in fp8 was calibrated on this machine")


def is_narrow(op: Operation) -> bool:
    return isinstance(op, Product) and op.fp8


def test_it_is_planned_where_a_gpu_has_it_and_says_what_stays_in_16_bits() -> None:
    found = search(LLAMA, "8xh100", batch=64, pins=Pins.parse(["precision=fp8"]))
    assert {prediction.plan.precision for prediction in found.predictions} == {"fp8"}
    assert "In fp8 the layers' products take 8 bits; the head and attention stay in 16." in why(found)
    assert trainable(found.best.plan) == "yes"
    narrow = search(preset("gpt2-124m"), "8xh100", batch=64, pins=Pins.parse(["precision=fp8"]))
    assert any("whose casts would take longer than their products save" in line for line in why(narrow))
    usual = search(LLAMA, "8xh100", batch=64)
    assert any("In fp8 this layout would take" in line for line in why(usual))
    with pytest.raises(UsageError, match="a100-80 has no matmul peak for dtype 'fp8'"):
        search(LLAMA, "8xa100", batch=64, pins=Pins.parse(["precision=fp8"]))


def test_scales_that_are_fixed_are_those_of_the_plan() -> None:
    rows, blocks = (Pins.parse([f"precision=fp8,fp8_scales={scales},microbatch=1"]) for scales in ("row", "block"))
    found = search(LLAMA, "8xh100", batch=64, pins=rows)
    assert {prediction.settled_plan.fp8_scales for prediction in found.predictions} == {"row"}
    assert 'fp8_scales = "row"' in found.to_toml()
    cut = search(preset("tinyllama-1.1b"), "8xh100", batch=64, pins=blocks)
    assert {point.layout.fp8_scales for point in cut.points} == {"block"}
    assert 8 not in {point.layout.tp for point in cut.points}


def test_with_scales_by_rows_a_weights_gradient_stays_in_16_bits() -> None:
    work = layer_work(LLAMA, Task(1, 8192, 8192, precision="fp8", fp8_scales="row"))
    assert not any(op.fp8 for op in work.weight_gradients if isinstance(op, Product))
    assert sum(op.fp8 for op in (*work.forward, *work.backward) if isinstance(op, Product)) == 2 * len(
        work.weight_gradients
    )  # queries, keys and values are one product here


def test_casts_cost_more_than_narrow_products_save() -> None:
    """H200, 16,384 tokens, three products with their casts over bf16: 0.87 and 0.85, 1.03 and 1.02; by rows 0.95 and
    0.94, 1.10."""
    assert not any(is_wide_for_fp8(*sizes) for sizes in ((1024, 1024), (512, 4096)))
    assert all(is_wide_for_fp8(*sizes) for sizes in ((768, 3072), (2048, 1024), (1536, 1536)))
    assert not any(is_wide_for_fp8(*sizes, "row") for sizes in ((1536, 1536), (768, 3072)))
    assert is_wide_for_fp8(2048, 2048, "row")
    work = layer_work(preset("gpt2-124m"), Task(1, 1024, 1024, precision="fp8", fp8_scales="row"))
    assert not any(op.fp8 for op in (*work.forward, *work.backward) if isinstance(op, Product))


def test_blocks_are_not_cut_by_tp() -> None:
    plan = ParallelPlan(tp=8, precision="fp8", fp8_scales="block")
    assert why_not(LLAMA, plan) is None
    assert why_not(preset("tinyllama-1.1b"), plan) == (
        "tp is 8: blocks of 128 of the MLP in would lie on two ranks; use fp8_scales=row"
    )
