"""Step time: the published steps, held out but for one pair, and what must hold for any layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tilemesh.core.calibration import Rates
from tilemesh.core.conflicts import PLAN_CONFLICTS, refusals
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.program import step_program
from tilemesh.core.step.simulate import simulate
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.weights import count_parameters, why_not
from tilemesh.plan.choose import search
from tilemesh.plan.constants import HIDDEN_COST, MATMUL_FRACTION
from tilemesh.plan.prediction import pins_to_train, prediction_figures, trainable
from tilemesh.plan.space import Pins, candidates
from tilemesh.plan.step import Estimator, predict


def megatron(layers: int, width: int, heads: int) -> ModelConfig:
    return ModelConfig(layers=layers, width=width, heads=heads, vocabulary=51200, context=2048, dropout=0.1)


# Korthikanti et al. 2022, tables 3 and 5, A100-80GB: seconds with full recomputation, and with sequence parallelism and
# selective recomputation; MFU of the latter.
PUBLISHED: dict[str, tuple[ModelConfig, str, dict[str, Any], float, float, float]] = {
    "22B": (megatron(48, 6144, 64), "8xa100", {"microbatch": 4}, 1.42, 1.10, 0.415),
    "175B": (
        megatron(96, 12288, 96), "64xa100",
        {"pp": 8, "accumulation": 64, "schedule": "interleaved", "interleave": 3}, 18.13, 13.75, 0.514,
    ),
    "530B": (
        megatron(105, 20480, 128), "280xa100",
        {"pp": 35, "accumulation": 280, "schedule": "interleaved", "interleave": 3}, 49.05, 37.83, 0.560,
    ),
    "1T": (megatron(128, 25600, 160), "512xa100", {"pp": 64, "accumulation": 512}, 94.42, 71.49, 0.563),
}  # fmt: skip
FULL: dict[str, Any] = {"recompute": "full"}
SELECTIVE: dict[str, Any] = {"recompute": "selective", "sequence_parallel": True}


def step_s(name: str, recipe: dict[str, Any]) -> float:
    model, cluster, fields, _, _, _ = PUBLISHED[name]
    plan = ParallelPlan(tp=8, attention="materialized", precision="bf16-master", **fields, **recipe)
    return predict(model, parse_cluster(cluster), plan).step_time_s


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_steps_within_five_percent(name: str) -> None:
    _, _, _, full_s, selective_s, _ = PUBLISHED[name]
    assert step_s(name, FULL) == pytest.approx(full_s, rel=0.05)
    assert step_s(name, SELECTIVE) == pytest.approx(selective_s, rel=0.05)


@pytest.mark.parametrize("name", PUBLISHED)
def test_mfu_is_defined_as_published(name: str) -> None:
    """With the published step time, our count of FLOPs gives the published MFU."""
    model, cluster, fields, _, selective_s, mfu = PUBLISHED[name]
    plan = ParallelPlan(tp=8, attention="materialized", precision="bf16-master", **fields, **SELECTIVE)
    found = predict(model, parse_cluster(cluster), plan)
    assert found.mfu * found.step_time_s / selective_s == pytest.approx(mfu, abs=0.003)


@pytest.mark.parametrize(("gpus", "accumulation", "published"), [(8192, 32, 430e12), (16384, 16, 400e12)])
def test_another_papers_model_on_another_gpu(gpus: int, accumulation: int, published: float) -> None:
    """Llama 3 405B on H100, "The Llama 3 Herd of Models", table 4: FLOP/s a GPU.

    Nothing was fitted to it. The paper does not say how many chunks a stage has; 126 layers on 16 stages allow 7.
    """
    model = preset("llama-3-70b").replace(layers=126, width=16384, heads=128, kv_heads=8, mlp_width=53248)
    plan = ParallelPlan(
        dp=gpus // 128, tp=8, pp=16, sequence_parallel=True, zero=1, accumulation=accumulation,
        schedule="interleaved", interleave=7, precision="bf16-master",
    )  # fmt: skip
    found = predict(model, parse_cluster(f"{gpus}xh100"), plan)
    by_6n = 6 * count_parameters(model).total * found.tokens / found.step_time_s / gpus
    assert by_6n == pytest.approx(published, rel=0.05)


def test_the_fitted_constant_is_the_best_for_its_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least squares of the 22B pair's relative errors: a little more or less is worse."""

    def badness(fraction: float) -> float:
        monkeypatch.setitem(MATMUL_FRACTION, "a100-80", fraction)  # type: ignore[arg-type]
        return (step_s("22B", FULL) / 1.42 - 1) ** 2 + (step_s("22B", SELECTIVE) / 1.10 - 1) ** 2

    fitted = MATMUL_FRACTION["a100-80"]
    assert badness(fitted) < min(badness(fitted - 0.003), badness(fitted + 0.003))


def test_measured_rates_go_before_the_datasheet() -> None:
    model, cluster, plan = preset("tiny"), parse_cluster("1xcpu"), ParallelPlan(microbatch=32, precision="fp32")
    slow = Rates(matmul_flops_per_s={"fp32": 1e10}, copy_bytes_per_s=5e9)
    measured = Estimator(model, cluster, rates=slow).predict(plan)
    assert measured.step_time_s > measured.model_flops / 1e10
    assert measured.step_time_s > 5 * predict(model, cluster, plan).step_time_s


def test_closed_form_and_simulation_agree() -> None:
    estimator = Estimator(preset("llama-3-8b"), parse_cluster("32xh100"))
    compared = 0
    for found in candidates(estimator, 64, Pins(zero=1, microbatch=1, recompute="full")):
        quick, full = estimator.rank(found[0]).step_s, estimator.predict(found[0]).step_time_s
        assert quick == pytest.approx(full, rel=0.25 if found[0].schedule == "v-half" else 0.06)
        compared += 1
    assert compared > 20


def test_parts_sum_to_the_step() -> None:
    for found in search("llama-3-8b", "16xh100", batch=64).predictions:
        assert found.times.total_s == pytest.approx(found.step_time_s)
        assert min(vars(found.times).values()) >= 0
        assert found.mfu <= found.hfu < 1


def test_recomputing_more_takes_longer() -> None:
    cluster, model = parse_cluster("8xa100"), preset("llama-2-7b")
    times = [
        predict(model, cluster, ParallelPlan(tp=8, recompute=recompute, attention="materialized")).step_time_s
        for recompute in ("none", "selective", "full")
    ]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 3, "dp": 8}, "16 ranks|24 ranks"),
        ({"tp": 5}, "5 ranks"),
        ({"pp": 8, "schedule": "interleaved", "interleave": 5}, "needs as many layers, the model has 32: pp 6 at most"),
        (
            {"pp": 8, "schedule": "interleaved", "interleave": 2, "accumulation": 3},
            "takes a multiple of 8, at least 8 microbatches: accumulation is 3, 8 is the next",
        ),
    ],
)
def test_a_layout_that_cannot_be_says_why(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        predict(preset("llama-2-7b"), parse_cluster("8xh100"), ParallelPlan(**fields))


def test_a_context_longer_than_learned_positions_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.context=4096"):
        Estimator(preset("gpt3-175b"), parse_cluster("8xh100"), 4096)


def test_a_tp_that_cannot_be_names_the_nearest_that_can() -> None:
    model = preset("llama-2-7b")  # 32 heads, an MLP of 11,008 = 2^8 x 43
    plans = {tp: why_not(model, ParallelPlan(tp=tp)) for tp in (3, 12, 64)}
    assert plans[3] == "tp is 3: 32 heads are not divisible by it; the nearest that can are 2 and 4"
    assert (plans[12] or "").endswith("the nearest that can are 8 and 16")
    assert (plans[64] or "").endswith("the nearest that can is 32")
    assert why_not(model, ParallelPlan(tp=8)) is None


def test_what_cannot_be_run_is_said_once() -> None:
    plan = ParallelPlan(dp=2, pp=2, recompute="selective", attention="materialized")
    assert trainable(plan) == "no, attention is materialized: attention here is one fused kernel"
    assert pins_to_train(plan) == "attention=fused"
    assert trainable(ParallelPlan(recompute="selective")) == "yes"
    assert trainable(ParallelPlan(dp=2, tp=2, sequence_parallel=True, accumulation=4, recompute="full")) == "yes"


def test_recomputation_of_some_stages_costs_and_saves_what_these_do() -> None:
    estimator = Estimator(preset("gpt2-124m"), parse_cluster("4xa100-80gb"), 1024)
    fields: dict[str, Any] = {"pp": 4, "accumulation": 8, "precision": "bf16", "chunk_layers": (3, 3, 3, 3)}
    none, first, every = (
        ParallelPlan(**fields, **more)
        for more in ({}, {"recompute": "full", "recompute_stages": (0,)}, {"recompute": "full"})
    )
    found = {plan: estimator.predict(plan) for plan in (none, first, every)}
    assert found[none].step_time_s < found[first].step_time_s <= found[every].step_time_s
    stages = {plan: estimator.room.stages(plan, (3, 3, 3, 3)) for plan in found}
    assert stages[first] == [stages[every][0], *stages[none][1:]]
    again = {plan: found[plan].hardware_flops - found[plan].model_flops for plan in found}
    assert again[none] == 0
    assert again[first] == pytest.approx(again[every] / 4, rel=1e-9)
    beyond = replace(first, recompute_stages=(1, 4))
    assert [row.instead for row in refusals(PLAN_CONFLICTS, beyond)] == ["recompute_stages=[1]"]
    both_ways = replace(first, schedule="dualpipe", recompute_stages=(0,))
    assert [row.instead for row in refusals(PLAN_CONFLICTS, both_ways)] == ["recompute_stages=[0,3]"]


def test_the_fullest_rank_is_found_wherever_it_is() -> None:
    estimator = Estimator(preset("mixtral-8x7b"), parse_cluster("32xa100-80gb"), 1024)
    for plan in (
        ParallelPlan(dp=4, tp=2, pp=4, ep=2, microbatch=2, accumulation=4, schedule="pipedream"),
        ParallelPlan(tp=4, pp=8, accumulation=16, recompute="full", recompute_stages=(0, 1)),
        ParallelPlan(tp=4, pp=8, accumulation=16, recompute="full", recompute_stages=(0, 7), schedule="dualpipe"),
    ):
        found = estimator.predict(plan)
        stages = estimator.room.stages(plan, found.chunk_layers)
        assert found.memory.total_bytes == max(stage.total_bytes for stage in stages)


def test_without_stages_no_sequence_is_cut() -> None:
    one = ParallelPlan(dp=2, zero=2, accumulation=2, schedule="terapipe", precision="bf16-master")
    whole, cut = (predict(preset("gpt2-124m"), parse_cluster("2xh100"), replace(one, slices=n)) for n in (1, 4))
    assert (cut.memory, cut.step_time_s, cut.exchanges) == (whole.memory, whole.step_time_s, whole.exchanges)


def test_slices_of_a_sequence_shorten_a_pipeline_and_are_timed_apart() -> None:
    plan = ParallelPlan(pp=4, schedule="terapipe", accumulation=2, precision="bf16-master")
    model, cluster = preset("gpt2-124m"), parse_cluster("4xh100")
    whole = predict(model, cluster, plan)
    cut = predict(model, cluster, replace(plan, slices=4))
    assert whole.passes is not None
    assert cut.passes is not None
    shares = cut.passes.slice_shares
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(1.0)
    # Two microbatches of four slices wait for three slices where two whole ones wait for three microbatches.
    assert cut.times.bubble_s < 0.3 * whole.times.bubble_s
    assert prediction_figures(cut)["pipeline"]["slice_shares"] == list(shares)


def test_rows_to_experts_hide_behind_a_shared_one_and_have_their_places_in_a_pass() -> None:
    """Between GPUs, by our code: one of a layer's two exchanges each way, but for what hiding costs."""
    model = ModelConfig(
        layers=8, width=1024, heads=16, vocabulary=32000, context=2048, mlp_width=1024, norm="rmsnorm", biases=False,
        activation="swiglu", experts=32, experts_per_token=4, tied=False,
    )  # fmt: skip
    shared = model.replace(shared_width=4096)
    plan = ParallelPlan(dp=4, pp=2, ep=4, accumulation=3, microbatch=2, chunk_layers=(4, 4))
    plain, hidden = (predict(each, parse_cluster("8xh100"), plan, code="eager") for each in (model, shared))
    assert hidden.passes is not None
    assert hidden.passes.routed is not None
    forward, backward, weight_s = hidden.passes.routed
    saved_s = 2 * 4 * plan.accumulation * (1 - HIDDEN_COST) * forward.first_s
    assert forward.beside_first_s > forward.first_s == backward.second_s
    assert plain.times.ep_s - hidden.times.ep_s == pytest.approx(saved_s)
    assert prediction_figures(hidden)["pipeline"]["routed"] == [forward, backward, weight_s]
    program = step_program(plan, model.layers, experts=shared.expert_layers).program
    timeline = simulate(program, hidden.passes, keep_slots=True)
    assert len(timeline.exchanges) == 2 * 2 * plan.accumulation * 2 * 4  # ranks, passes, exchanges of four layers
    passes = {(slot.rank, slot.place): slot for slot in timeline.slots}
    for slot in timeline.exchanges:
        within = passes[slot.rank, slot.place]
        assert within.start_s <= slot.start_s < slot.end_s <= within.end_s * (1 + 1e-9)
