"""This machine as a cluster: what a rank gets of its measured rates, and what the code that runs a layer changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilemesh.core import calibration
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan, Precision
from tilemesh.measure.machine import this_machine
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.kept import loss_tensors
from tilemesh.model.work.operations import Product
from tilemesh.model.work.passes import logit_columns
from tilemesh.model.work.task import Code, Task, default_code
from tilemesh.plan.choose import NothingFitsError, search
from tilemesh.plan.constants import HOPPER_TILES
from tilemesh.plan.local import crowding, local_cpu, local_gpu, local_machine, rank_rates
from tilemesh.plan.speed import group, narrow_fraction, shape_fraction, speed_of
from tilemesh.plan.step import Estimator, predict

ONE = Rates(
    {"fp32": 40e9, "bf16": 1e8}, copy_bytes_per_s=30e9, launch_s=8e-6, elementwise_bytes_per_s=25e9,
    exponentials_per_s=3e8, attention_flops_per_s={"forward-32": 8e9, "backward-32": 9e9},
)  # fmt: skip
ALL = Rates(
    {"fp32": 80e9, "bf16": 2e8}, copy_bytes_per_s=50e9, launch_s=8e-6, elementwise_bytes_per_s=45e9,
    exponentials_per_s=6e8, attention_flops_per_s={"forward-32": 16e9, "backward-32": 18e9},
)  # fmt: skip
HERE = Calibration("id", "a box", "today", one_core=ONE, all_cores=ALL)
MEMORY = 8 << 30


def test_a_rank_gets_its_cores() -> None:
    assert rank_rates(ONE, ALL, 1, 2).matmul_flops_per_s["fp32"] == pytest.approx(80e9)
    assert rank_rates(ONE, ALL, 2, 2).matmul_flops_per_s["fp32"] == pytest.approx(40e9)
    turns = rank_rates(ONE, ALL, 4, 2)  # two ranks a core
    assert turns.matmul_flops_per_s["fp32"] == pytest.approx(20e9)
    assert turns.attention_flops_per_s["backward-32"] == pytest.approx(4.5e9)
    assert turns.launch_s == pytest.approx(16e-6)


def test_bandwidth_is_shared_by_all_ranks() -> None:
    assert rank_rates(ONE, ALL, 2, 2).copy_bytes_per_s == pytest.approx(25e9)  # not 30: two copy at once
    assert rank_rates(ONE, ALL, 1, 2).copy_bytes_per_s == pytest.approx(50e9)


def test_between_one_core_and_all_rates_lie_between() -> None:
    found = rank_rates(ONE, ALL, 4, 16).matmul_flops_per_s["fp32"]
    assert 40e9 < found < 80e9


def test_a_process_bound_to_some_cores_is_not_promised_the_rates_of_all() -> None:
    box = replace(HERE, words="a box, 16 cores, 32 GiB, no GPU")
    bound, whole = local_cpu(box, 1, 2, MEMORY).rates, local_cpu(box, 1, 16, MEMORY).rates
    assert whole.matmul_flops_per_s["fp32"] == pytest.approx(80e9)
    # Two of sixteen cores: a quarter of the way, as powers go.
    assert bound.matmul_flops_per_s["fp32"] == pytest.approx(40e9 * 2**0.25)
    assert bound.copy_bytes_per_s == pytest.approx(30e9 * (50 / 30) ** 0.25)


def test_two_ranks_a_core_take_about_twice_as_long() -> None:
    plans = {ranks: ParallelPlan(dp=ranks, microbatch=8, precision="fp32") for ranks in (2, 4)}
    steps = {}
    for ranks, plan in plans.items():
        here = local_cpu(HERE, ranks, 2, MEMORY)
        steps[ranks] = predict(preset("tiny"), here.cluster, plan, rates=here.rates)
    assert 1.9 < steps[4].step_time_s / steps[2].step_time_s < 2.6
    # Between CPU ranks an exchange is work: nothing hides it.
    assert steps[2].times.dp_s >= 2 * preset_gradient_bytes() / 2 / (50e9 / 2)


def preset_gradient_bytes() -> int:
    return predict(preset("tiny"), parse_cluster("2xcpu"), ParallelPlan(dp=2, precision="fp32")).exchanges["dp"][
        "all_reduce"
    ]


def test_a_search_on_this_machine() -> None:
    here = local_cpu(HERE, 2, 2, MEMORY)
    found = search("tiny", here.cluster, batch=8, rates=here.rates)
    assert found.cluster.name == "2xlocal"
    assert found.best.plan.precision == "fp32"  # not the emulated bf16, however measured
    with pytest.raises(NothingFitsError, match=r"the least a rank needs is .* a larger machine is needed"):
        search("llama-2-7b", here.cluster, batch=8, rates=here.rates)


def test_what_was_not_calibrated_is_refused() -> None:
    with pytest.raises(UsageError, match="run `tilemesh calibrate`"):
        local_cpu(Calibration("id", "a box", "today", one_core=Rates(), all_cores=Rates()), 2, 2, MEMORY)
    with pytest.raises(UsageError, match="one rank per GPU"):
        local_gpu(HERE, 2, ("NVIDIA H200",))
    with pytest.raises(UsageError, match="no datasheet of 'NVIDIA GeForce 256'"):
        local_gpu(HERE, 1, ("NVIDIA GeForce 256",))


def test_measured_rates_move_the_prediction_one_by_one() -> None:
    plan = ParallelPlan(microbatch=8, precision="fp32")
    here = local_cpu(HERE, 1, 2, MEMORY)
    base = predict(preset("tiny"), here.cluster, plan, rates=here.rates).step_time_s
    for name in ("elementwise_bytes_per_s", "exponentials_per_s"):
        slower = Rates(**{**vars(here.rates), name: getattr(here.rates, name) / 4})
        assert predict(preset("tiny"), here.cluster, plan, rates=slower).step_time_s > 1.02 * base
    # What is measured apart goes before the figure that stood for it.
    elementwise, launch = here.rates.elementwise_bytes_per_s, here.rates.launch_s
    assert elementwise is not None
    assert launch is not None
    for changes in (
        {"rows_bytes_per_s": elementwise / 2},
        {"halves_bytes_per_s": elementwise / 2},
        {"operation_s": 3 * launch},
        {"projection_flops_per_s": {"forward-128": 0.8 * 80e9, "backward-128": 0.9 * 80e9}},
    ):
        slower = Rates(**{**vars(here.rates), **changes})
        assert predict(preset("tiny"), here.cluster, plan, rates=slower).step_time_s > 1.01 * base


def test_narrow_products_run_at_the_rate_measured_for_them() -> None:
    rates = Rates({"fp32": 40e9}, projection_flops_per_s={"forward-32": 20e9, "forward-128": 30e9, "backward-32": 10e9})
    speed = speed_of(local_cpu(HERE, 2, 2, MEMORY).cluster.device, "fp32", rates, "eager")
    forward, backward = speed.narrow
    widths = (8, 32, 64, 128, 1024, 4096)
    fractions = [narrow_fraction(forward, Product("x", 1, 4096, 8192, width, "fp32")) for width in widths]
    assert fractions == pytest.approx([0.5, 0.5, 0.625, 0.75, 1.0, 1.0])
    assert narrow_fraction(backward, Product("x", 1, 32, 4096, 512, "fp32", True)) == pytest.approx(0.25)
    assert speed_of(parse_cluster("1xh200").device, "bf16", H200.rates, "compiled").narrow == (
        (),
        (),
    )  # tiles say it there


def test_ranks_that_take_turns_pay_more_for_a_call_too() -> None:
    one, whole = (Rates(**{**vars(rates), "operation_s": 1e-5}) for rates in (ONE, ALL))
    assert rank_rates(one, whole, 4, 2).operation_s == pytest.approx(2e-5)


def test_computing_beside_other_ranks_takes_as_much_longer_as_was_measured() -> None:
    """Four ranks on two cores take turns, which is twice as long; a layer took 2.2 times as long, so 10 % were lost."""

    def here(ranks: int, **fit: object) -> Calibration:
        return HERE.with_section("collectives", {f"mpi/{ranks}/2": {"curves": {}, **fit}})

    assert crowding(here(4, layer_s=[0.1, 0.22]), 4, 2) == pytest.approx(1.1)
    assert crowding(here(2, layer_s=[0.1, 0.103]), 2, 2) == pytest.approx(1.03)
    assert crowding(here(4, layer_s=[0.1, 0.19]), 4, 2) == 1.0  # no rank is quicker for company
    for damaged in ({}, {"layer_s": [0.0, 1.0]}, {"layer_s": ["x", 1.0]}, {"layer_s": [1.0, float("nan")]}):
        assert crowding(here(4, **damaged), 4, 2) == 1.0
    assert crowding(HERE, 4, 2) == crowding(here(4, layer_s=[0.1, 0.22]), 1, 2) == 1.0
    plain, crowded = (local_cpu(one, 4, 2, MEMORY).rates for one in (HERE, here(4, layer_s=[0.1, 0.22])))
    assert crowded.matmul_flops_per_s["fp32"] == pytest.approx(plain.matmul_flops_per_s["fp32"] / 1.1)
    assert crowded.copy_bytes_per_s == plain.copy_bytes_per_s  # measured with all cores at it


def test_a_stage_that_waits_leaves_its_core_to_the_others() -> None:
    """Two replicas of two stages on two cores: while one stage waits, the other replica's has the core, so there is no
    bubble; with a core for every rank there is one."""
    plan = ParallelPlan(dp=2, pp=2, microbatch=2, accumulation=4, precision="fp32", chunk_layers=(2, 2))
    shared, own = (
        predict(preset("tiny"), here.cluster, plan, 128, rates=here.rates)
        for here in (local_cpu(HERE, 4, 2, MEMORY), local_cpu(HERE, 4, 4, MEMORY))
    )
    assert own.times.bubble_s > 0.1 * own.times.compute_s
    assert shared.times.bubble_s < 0.05 * shared.times.compute_s
    assert shared.step_time_s > own.step_time_s


def test_a_calibration_of_a_busy_machine_says_so() -> None:
    busy = HERE.with_section("busy", {"others": 0.4, "stolen": 0.0, "load": 1.0, "spread": 1.1})
    assert "while it was busy (other work used 40% of the cores)" in local_cpu(busy, 2, 2, MEMORY).words
    assert "busy" not in local_cpu(HERE, 2, 2, MEMORY).words


def fitted(ranks: int, points: dict[str, list[list[float]]]) -> Calibration:
    return HERE.with_section("collectives", {f"mpi/{ranks}/2": {"curves": points}})


def test_a_fit_gives_the_link_between_ranks() -> None:
    """With 2 and with 4 ranks the planner's all_reduce takes what was measured, small and large."""
    for ranks in (2, 4):
        found = fitted(
            ranks,
            {
                "all_reduce/native": [[16, 30e-6], [1 << 20, 700e-6]],
                "all_reduce/flat": [[16, 20e-6], [1 << 20, 900e-6]],
                "all_reduce/direct": [[16, 1e-9], [1 << 20, 2e-9]],  # needs arrays that a model's are not
                "all_gather/flat": [[16, 1e-6], [1 << 20, 2e-6]],
            },
        )
        axis = group(local_cpu(found, ranks, 2, MEMORY).cluster, ranks, 1)
        assert axis.all_reduce_s(16) == pytest.approx(20e-6, rel=0.01)
        assert axis.all_reduce_s(1 << 20) == pytest.approx(700e-6)


def test_an_exchange_after_computing_takes_what_was_measured_more() -> None:
    """Every exchange of a step: two per layer and pass, and those of the embedding and the loss."""
    curves = {"all_reduce/flat": [[16, 20e-6], [1 << 20, 900e-6]]}
    plain = fitted(2, curves)
    worked = plain.with_section("collectives", {"mpi/2/2": {"curves": curves, "worked_s": 3e-4}})
    plan = ParallelPlan(tp=2, microbatch=8, precision="fp32")
    quick, slow = (
        predict(preset("tiny"), here.cluster, plan, rates=here.rates).step_time_s
        for here in (local_cpu(one, 2, 2, MEMORY) for one in (plain, worked))
    )
    exchanges = (slow - quick) / 3e-4
    assert exchanges == pytest.approx(round(exchanges))
    assert exchanges >= 4 * 4  # four layers, two forward and two back each
    axis = group(local_cpu(worked, 2, 2, MEMORY).cluster, 2, 1)
    assert axis.exchange_s("all_reduce", 16) == pytest.approx(20e-6 + 3e-4, rel=0.01)
    assert group(local_cpu(worked, 2, 2, MEMORY).cluster, 1, 1).exchange_s("all_reduce", 16) == 0.0


@pytest.mark.parametrize(
    "curves", [{}, {"all_reduce/flat": [[16, 1e-5]]}, {"all_reduce/flat": "no"}, {"all_reduce/flat": [[0, 1], [9, 2]]}]
)
def test_a_fit_that_says_nothing_is_as_none(curves: dict[str, list[list[float]]]) -> None:
    assert local_cpu(fitted(2, curves), 2, 2, MEMORY).cluster == local_cpu(HERE, 2, 2, MEMORY).cluster
    assert local_cpu(fitted(4, curves), 2, 2, MEMORY).cluster == local_cpu(HERE, 2, 2, MEMORY).cluster


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_torchs_own_operators_keep_more(kind: str) -> None:
    """A token of a layer of tiny: attention's result 128, norms 2 x (128 and their scale; on a GPU the latter alone),
    gate 512."""
    plan, here = ParallelPlan(microbatch=8, precision="fp32"), local_cpu(HERE, 1, 2, MEMORY)
    cluster, rates = (here.cluster, here.rates) if kind == "cpu" else (parse_cluster("1xh200"), None)
    eager, fused = (
        predict(preset("tiny"), cluster, plan, rates=rates, code=code).memory.activations_bytes
        for code in ("eager", "fused")
    )
    norm = 128 if kind == "cpu" else 0
    assert eager - fused == 4 * 8 * 128 * 4 * (128 + 2 * (norm + 1) + 512)


# ---- what runs it ----------------------------------------------------------------------------------------------


def test_compiled_is_faster_and_smaller_than_eager() -> None:
    model, cluster = preset("gpt2-124m").replace(dropout=0.0), parse_cluster("1xh200")
    plan = ParallelPlan(microbatch=32, precision="bf16")
    compiled, eager = (predict(model, cluster, plan, code=code) for code in ("compiled", "eager"))
    assert compiled.step_time_s < 0.8 * eager.step_time_s
    assert 2.8 < eager.memory.logits_bytes / compiled.memory.logits_bytes < 3.0
    assert default_code(cluster.device, "bf16") == "compiled"
    assert default_code(cluster.device, "bf16-master") == "fused"


def test_rows_that_tensor_cores_cannot_load_cost() -> None:
    even, odd = (preset("gpt2-124m").replace(vocabulary=size) for size in (50304, 50257))
    compiled = Task(8, 1024, 1024, precision="bf16", code="compiled")
    assert {loss_tensors(model, compiled)[0].element_bytes for model in (even, odd)} == {4}

    def ratio(code: Code, tp: int) -> float:
        plan, cluster = ParallelPlan(tp=tp, microbatch=8, precision="bf16"), parse_cluster(f"{tp}xh200")
        slow, quick = (predict(model, cluster, plan, code=code).step_time_s for model in (odd, even))
        return slow / quick

    # Whole on a GPU, logits are computed in rows of a rounded length; operation by operation that is another copy.
    assert 0.99 < ratio("compiled", 1) < 1.001
    assert 1.005 < ratio("eager", 1) < 1.05
    # Split over two, 25,129 columns stay as they are, and only a compiler pads them.
    assert 1.2 < ratio("eager", 2) < 2.5
    assert 1.02 < ratio("compiled", 2) < 1.2


def test_a_vocabulary_is_rounded_up_where_the_code_does() -> None:
    def columns(tp: int, precision: Precision, code: Code, gpu: bool = True) -> int:
        return logit_columns(preset("gpt2-124m"), Task(1, 8, 8, tp, precision=precision, code=code, gpu=gpu))

    assert columns(1, "bf16", "compiled") == columns(1, "fp32", "eager") == 50304
    assert columns(2, "bf16", "compiled") == 25136
    asis = columns(1, "bf16", "fused"), columns(1, "fp32", "eager", gpu=False), columns(1, "fp64", "eager")
    assert asis == (50257, 50257, 50257)


def test_alone_on_a_gpu_the_optimiser_clips_on_its_way() -> None:
    def moved(plan: ParallelPlan, cluster: str, code: Code | None = None) -> int:
        return Estimator(preset("gpt2-124m"), parse_cluster(cluster), code=code).optimizer_bytes(plan)

    alone, two = ParallelPlan(precision="bf16"), ParallelPlan(dp=2, precision="bf16")
    assert (moved(alone, "1xh200"), moved(alone, "1xh200", "eager"), moved(two, "2xh200")) == (36, 36, 40)
    assert moved(alone, "1xh200", "fused") == 40
    assert moved(ParallelPlan(precision="fp16"), "1xh200") == 48  # a loss scale is looked at first
    assert moved(ParallelPlan(precision="fp32"), "1xcpu") == 40


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = local_gpu(calibration.load(RESULTS / "calibration-h200.json"), 1, ("NVIDIA H200",))
OURS = [
    row
    for row in map(json.loads, (RESULTS / "steps-h200.jsonl").read_text().splitlines())
    # By the code as it is, and not waiting for the host: replayed, or a step of more than some 25 ms of kernels.
    if not row.get("of") and (row.get("graph") or row["step_time_s"]["median"] > 0.03)
]
"""Steps of our Transformer on one H200, compiled and eager."""
THEIRS = [
    (file.name, row["case"], row["peers"]["PyTorch + torch.compile"]["median"], row["unit"])
    for file in sorted(RESULTS.glob("train_h200*.jsonl"))
    for row in map(json.loads, file.read_text().splitlines())
    if row["name"] in ("train", "train memory")
]
"""Ordinary PyTorch beside ours in `bench train`: tokens/s, and peak bytes that were allocated."""
_PEER_MODELS = {
    12: preset("gpt2-124m"),
    22: preset("tinyllama-1.1b"),
    28: preset("tinyllama-1.1b").replace(layers=28, width=3072, heads=24, kv_heads=8, mlp_width=8192),
}


def on_the_h200(model: ModelConfig, batch: int, code: Code, graph: bool) -> tuple[float, int]:
    """Seconds of a step and allocated bytes, by the machine's calibration."""
    plan = ParallelPlan(microbatch=batch, precision="bf16")
    said = predict(model.replace(dropout=0.0), H200.cluster, plan, rates=H200.rates, code=code, graph=graph)
    return said.step_time_s, said.memory.total_bytes - said.memory.reserved_bytes


@pytest.mark.parametrize("row", OURS, ids=[f"{row['model']} x {row['batch']} {row['code']}" for row in OURS])
def test_our_steps_measured_on_an_h200(row: dict[str, Any]) -> None:
    step_s, allocated = on_the_h200(preset(row["model"]), row["batch"], row["code"], row.get("graph", False))
    assert step_s == pytest.approx(row["step_time_s"]["median"], rel=0.10)
    assert allocated == pytest.approx(row["peak_bytes"], rel=0.02)


def test_the_rows_of_an_h200_are_the_ones_that_are_meant() -> None:
    assert [(row["model"], row["batch"], row["code"]) for row in OURS] == [
        ("gpt2-124m", 32, "compiled"), ("tinyllama-1.1b", 4, "compiled"), ("tinyllama-1.1b", 8, "compiled"),
        ("gpt2-124m", 8, "compiled"), ("gpt2-124m", 8, "eager"),
        ("tinyllama-1.1b", 4, "eager"), ("tinyllama-1.1b", 8, "eager"),
    ]  # fmt: skip
    assert {case["layers"] for _, case, _, _ in THEIRS} == {12, 22, 28}


@pytest.mark.parametrize(("file", "case", "measured", "unit"), THEIRS)
def test_steps_of_ordinary_pytorch_measured_on_an_h200(
    file: str, case: dict[str, Any], measured: float, unit: str
) -> None:
    step_s, allocated = on_the_h200(_PEER_MODELS[case["layers"]], case["batch"], "compiled", False)
    if unit == "B":
        assert allocated == pytest.approx(measured, rel=0.05)
    else:
        assert case["batch"] * case["context"] / step_s == pytest.approx(measured, rel=0.10)


def test_few_tiles_are_split_along_k() -> None:
    """The weight gradient of a narrow layer: 18 tiles of 256 x 128 would leave six of seven multiprocessors idle."""
    fraction, splits = shape_fraction(1, 768, 768, 32768, 132, HOPPER_TILES)
    assert splits > 1
    assert fraction > 0.8
    assert shape_fraction(1, 8192, 8192, 8192, 132, HOPPER_TILES)[1] == 1
    speed = speed_of(parse_cluster("1xh200").device, "bf16", H200.rates, "compiled")
    narrow_s = speed.matmul_s(Product("w", 1, 768, 768, 32768, "bf16"))
    assert narrow_s == pytest.approx(65e-6, rel=0.15)  # traced: 58 + 7 us


# ---- chunks ----------------------------------------------------------------------------------------------------


def test_a_plans_own_chunks_are_used() -> None:
    model, cluster = preset("tiny"), parse_cluster("2xh100")
    cut = predict(model, cluster, ParallelPlan(pp=2, accumulation=4))
    assert cut.settled_plan.chunk_layers == cut.chunk_layers
    own = predict(model, cluster, ParallelPlan(pp=2, accumulation=4, chunk_layers=(1, 3)))
    assert own.chunk_layers == (1, 3)
    assert own.step_time_s != cut.step_time_s
    assert ParallelPlan.from_toml(own.plan.to_toml()) == own.plan
    assert "layers 1+3" in own.plan.describe()


def test_chunks_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="has 3 numbers and pp 2 is 2 chunks"):
        ParallelPlan(pp=2, chunk_layers=(1, 1, 2))
    with pytest.raises(UsageError, match="chunk_layers is 0: expected a whole number, between 1"):
        ParallelPlan(pp=2, chunk_layers=(0, 4))
    with pytest.raises(UsageError, match="add up to 5 layers, the model has 4"):
        predict(preset("tiny"), parse_cluster("2xh100"), ParallelPlan(pp=2, chunk_layers=(2, 3)))


def test_a_machine_that_was_not_measured_is_told_to_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = this_machine()
    monkeypatch.setattr(calibration, "find", lambda machine_id: None)
    with pytest.raises(UsageError, match="was not measured yet: run `tilemesh calibrate`"):
        local_machine("2xlocal-cpu", machine)
    monkeypatch.setattr(calibration, "find", lambda machine_id: HERE)
    assert local_machine("2xlocal-cpu", machine).cluster.world == 2


def test_stages_that_take_turns_on_a_core_still_wait_for_each_other() -> None:
    """One microbatch over four stages on two cores: a single stage computes at a time, on one of the two."""
    times = predict(preset("tiny"), local_cpu(HERE, 4, 2, MEMORY).cluster, ParallelPlan(pp=4, precision="fp32")).times
    busy_s = times.compute_s + times.recompute_s + times.tp_s + times.pp_s
    assert times.bubble_s == pytest.approx(busy_s, rel=0.35)


def test_between_two_stages_each_sends_one_way_and_in_a_longer_pipeline_both() -> None:
    two, four = (
        predict(preset("tiny"), parse_cluster("4xh100"), ParallelPlan(pp=pp, dp=4 // pp, accumulation=8)).traffic["pp"]
        for pp in (2, 4)
    )
    assert 0 < two == four / 2
