"""Memory: the published figures exactly, and what must hold for any model and layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step import pace
from tilemesh.core.step.memory import StepBytes, memory_curve, memory_peaks
from tilemesh.core.step.program import step_program
from tilemesh.kernels.linear_cross_entropy.cost import CHUNK_BYTES
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.kept import kept_bytes, loss_kept_bytes, loss_tensors
from tilemesh.model.work.task import STATE_BYTES, Code, Task
from tilemesh.model.work.weights import count_parameters, layer_weights, shard_parameters
from tilemesh.plan import memory
from tilemesh.plan.cut import spread
from tilemesh.plan.memory import Room
from tilemesh.plan.space import Pins, candidates
from tilemesh.plan.step import Estimator, predict

GIB = 2**30
MEGATRON = {"vocabulary": 51200, "context": 2048, "dropout": 0.1}
M22B = ModelConfig(layers=48, width=6144, heads=64, **MEGATRON)
M530B = ModelConfig(layers=105, width=20480, heads=128, **MEGATRON)


def megatron(**fields: Any) -> ParallelPlan:
    return ParallelPlan(**{"tp": 8, "attention": "materialized", "precision": "bf16-master", **fields})


# ---- published -------------------------------------------------------------------------------------------------


def test_gpt3_takes_350_gb_of_weights_and_2100_gb_of_adam_states() -> None:
    weights, _, optimizer = memory.state_bytes(175 * 10**9, "bf16-master")
    assert (weights, optimizer) == (350 * 10**9, 2100 * 10**9)
    exact = count_parameters(preset("gpt3-175b")).total
    weights, _, optimizer = memory.state_bytes(exact, "bf16-master")
    assert (weights, optimizer) == (2 * exact, 12 * exact)


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_the_zero_table(ranks: int) -> None:
    m = 64 * 10**6
    table = [sum(memory.state_bytes(m, "bf16-master", stage, ranks)) for stage in range(4)]
    assert table == [16 * m, 4 * m + 12 * m // ranks, 2 * m + 14 * m // ranks, 16 * m // ranks]


@given(
    st.sampled_from([512, 1024, 2048]), st.integers(1, 4), st.sampled_from([(16, 1024), (32, 4096), (64, 6144)]),
    st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_a_layer_keeps_what_the_paper_says(s: int, b: int, shape: tuple[int, int], t: int) -> None:
    """Korthikanti et al. 2022, table 2: exact in integers, as all sizes divide."""
    a, h = shape
    model = ModelConfig(layers=1, width=h, heads=a, vocabulary=1, context=s, dropout=0.1)
    sbh = s * b * h

    def kept(**fields: Any) -> int:
        plan = megatron(tp=t, microbatch=b, **fields)
        return kept_bytes(model, Task.of(plan, s), plan.recompute)[0]

    scores = 5 * a * s * s * b // t
    assert kept() == 10 * sbh + 24 * sbh // t + scores
    assert kept(recompute="selective") == 10 * sbh + 24 * sbh // t
    assert kept(recompute="full") == 2 * sbh
    if t > 1:
        assert kept(sequence_parallel=True) == 34 * sbh // t + scores
        assert kept(sequence_parallel=True, recompute="selective") == 34 * sbh // t


def test_22b_activations() -> None:
    """Four sequences in one microbatch and one stage: every layer holds one microbatch."""
    plain = predict(M22B, parse_cluster("8xa100"), megatron(microbatch=4))
    assert plain.memory.activations_bytes / GIB == pytest.approx(59.25, abs=0.005)
    assert not plain.fits  # which is why the paper recomputes
    both = megatron(microbatch=4, sequence_parallel=True, recompute="selective")
    found = predict(M22B, parse_cluster("8xa100"), both)
    assert found.memory.activations_bytes / GIB == pytest.approx(9.5625, abs=1e-9)
    assert found.fits


def test_530b_activations() -> None:
    """Microbatches of one sequence; the first of 35 stages holds 139 passes of one-layer chunks: 105 (1 + 34/105)."""
    fields = {"pp": 35, "schedule": "interleaved", "interleave": 3, "accumulation": 280}
    program = pace.program_for_memory("interleaved", 35, 280, 3)
    assert memory_peaks(program, StepBytes.activations(program.chunks))[0] == 139
    plain = predict(M530B, parse_cluster("280xa100"), megatron(**fields))
    assert plain.memory.activations_bytes / GIB == pytest.approx(114.0, abs=0.05)
    both = megatron(**fields, sequence_parallel=True, recompute="selective")
    found = predict(M530B, parse_cluster("280xa100"), both)
    assert found.memory.activations_bytes / GIB == pytest.approx(23.1, abs=0.05)
    assert found.memory.activations_bytes == 139 * 34 * 2048 * 20480 // 8


# ---- always ----------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    heads = draw(st.sampled_from([8, 16]))
    activation = draw(st.sampled_from(["relu", "gelu", "swiglu"]))
    return ModelConfig(
        layers=draw(st.integers(8, 24)),
        width=heads * draw(st.sampled_from([16, 64, 128])),
        heads=heads,
        kv_heads=draw(st.sampled_from([2, 8])),
        vocabulary=draw(st.sampled_from([256, 50264])),
        context=draw(st.sampled_from([64, 1024])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        activation=activation,
        mlp_width=draw(st.sampled_from([1024, 4096])),
        biases=draw(st.booleans()),
        tied=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )


PRECISIONS = st.sampled_from(["fp32", "bf16", "bf16-master", "fp16", "fp64"])


@given(models(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 8))
def test_shards_sum_to_the_whole(model: ModelConfig, tp: int, pp: int) -> None:
    """Over tp, less what is repeated, and over stages, less a tied head's second copy."""
    shards = shard_parameters(model, tp)
    parts = count_parameters(model)
    repeated = max(1, tp // model.kv_heads)  # kv heads fewer than ranks
    kv = 2 * model.kv_width * (model.width + (1 if model.biases else 0))
    replicated = sum(weight.replicated() for weight in layer_weights(model))
    assert tp * (shards.layer - replicated) - (repeated - 1) * kv + replicated == parts.layer
    counts = [model.layers // pp + (stage < model.layers % pp) for stage in range(pp)]
    stages = [shards.stage(n, s == 0, s == pp - 1) for s, n in enumerate(counts)]
    again = shards.tied_head if pp > 1 else 0
    assert sum(stages) - again == shards.stage(model.layers, True, True)
    if tp == 1:
        assert sum(stages) - again == parts.total


@given(models(), PRECISIONS, st.booleans(), st.sampled_from(["fused", "materialized"]))
def test_more_tensor_parallelism_never_needs_more(
    model: ModelConfig, precision: str, full: bool, attention: str
) -> None:
    totals = []
    for tp in (1, 2, 4, 8):
        plan = ParallelPlan(tp=tp, precision=precision, recompute="full" if full else "none", attention=attention)
        totals.append(Room(model, parse_cluster("8xh100"), model.context).fullest(plan, (model.layers,)).total_bytes)
    assert totals == sorted(totals, reverse=True)


@given(st.integers(1, 10**9), PRECISIONS, st.integers(1, 512))
def test_more_zero_never_needs_more_and_shards_cover_the_whole(parameters: int, precision: str, dp: int) -> None:
    totals = [sum(memory.state_bytes(parameters, precision, stage, dp)) for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    whole, shard = totals[0], totals[3]
    assert whole <= dp * shard < whole + dp * sum(STATE_BYTES[precision])


@given(models(), PRECISIONS, st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from(["fused", "materialized"]))
def test_more_recomputation_keeps_less_and_sequence_parallelism_too(
    model: ModelConfig, precision: str, tp: int, sp: bool, attention: str
) -> None:
    def kept(recompute: str, parallel: bool) -> int:
        plan = ParallelPlan(
            tp=tp, sequence_parallel=parallel and tp > 1, recompute=recompute, attention=attention, precision=precision
        )
        return kept_bytes(model, Task.of(plan, model.context), recompute)[0]

    assert kept("none", sp) >= kept("selective", sp) >= kept("full", sp) > 0
    assert kept("none", True) <= kept("none", False)


@st.composite
def pipelines(draw: st.DrawFn) -> ParallelPlan:
    name = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "breadth-first", "zb-v", "v-half"]))
    pp = draw(st.integers(2, 4))
    interleave = draw(st.integers(2, 3)) if name in ("interleaved", "breadth-first") else 1
    fields = {"recompute": draw(st.sampled_from(["none", "full"])), "precision": "bf16-master"}
    return ParallelPlan(
        pp=pp, schedule=name, interleave=interleave, accumulation=pp * draw(st.integers(2, 4)), **fields
    )


@settings(max_examples=40)
@given(pipelines(), st.integers(12, 17))
def test_activations_are_those_of_liveness(plan: ParallelPlan, layers: int) -> None:
    """The peak that a plan is judged by, in the search and after it, is that of the memory curve of its actions."""
    model = ModelConfig(layers=layers, width=256, heads=4, vocabulary=4096, context=512)
    room = Room(model, parse_cluster(f"{plan.pp}xh100"), model.context)
    counts = spread(layers, plan.chunks, 0.0, 0.0)
    sizes = room.step_bytes(plan, counts)
    program = step_program(dataclasses.replace(plan, chunk_layers=counts), layers).program
    curves = memory_curve(program, sizes)
    stages = room.stages(plan, counts)
    loss = min(room.microbatch(plan).logits, loss_kept_bytes(model, room.task(plan)))
    for curve, stage in zip(curves, stages, strict=True):
        assert stage.activations_bytes + (loss if stage.logits_bytes else 0) == max(curve)
    assert room.fullest(plan, counts).total_bytes == max(stage.total_bytes for stage in stages)


def test_autocast_counts_fp32_weights_and_their_copies() -> None:
    plan = ParallelPlan(precision="bf16")
    found = predict(preset("gpt2-124m"), parse_cluster("1xh200"), plan)
    parts = count_parameters(preset("gpt2-124m"))
    assert found.memory.weights_bytes == 4 * parts.total
    assert found.memory.working_bytes == 2 * (parts.total - parts.position_embedding)  # a table nobody multiplies with
    untied = count_parameters(preset("tinyllama-1.1b"))
    found = predict(preset("tinyllama-1.1b"), parse_cluster("1xh200"), plan)
    assert found.memory.working_bytes == 2 * (untied.total - untied.token_embedding)


def test_gradients_that_come_after_the_fullest_moment() -> None:
    """Alone, with one microbatch, a step of torch's begins without gradients; at its end all of them are there."""
    cluster = parse_cluster("1xh200")

    def found(model: str, **fields: Any) -> memory.RankMemory:
        return predict(preset(model), cluster, ParallelPlan(precision="bf16", **fields), code="compiled").memory

    large = found("gpt2-124m", microbatch=32)
    assert large.later_bytes == large.gradients_bytes
    parts = large.weights_bytes + large.optimizer_bytes + large.activations_bytes + large.logits_bytes
    assert large.total_bytes == parts + large.working_bytes + large.reserved_bytes
    assert found("gpt2-124m", microbatch=8, accumulation=4).later_bytes == 0
    small = predict(
        preset("tinyllama-1.1b"), cluster, ParallelPlan(precision="bf16"), context=16, code="compiled"
    ).memory
    assert small.later_bytes == small.activations_bytes + small.logits_bytes < small.gradients_bytes
    assert small.dominant == "optimizer"
    plan = ParallelPlan(precision="bf16", microbatch=32)
    eager, fused = (predict(preset("gpt2-124m"), cluster, plan, code=code).memory for code in ("eager", "fused"))
    assert eager.later_bytes == eager.gradients_bytes
    assert fused.later_bytes == 0
    replicas = [
        predict(
            preset("gpt2-124m"), parse_cluster("2xh200"), ParallelPlan(dp=2, precision="bf16", **more), code="eager"
        )
        for more in ({}, {"zero": 1}, {"zero": 2}, {"zero": 1, "accumulation": 2})
    ]
    assert [bool(each.memory.later_bytes) for each in replicas] == [False, True, False, False]  # buffers stay
    alone = [
        predict(preset("gpt2-124m"), parse_cluster("1xh200"), ParallelPlan(**more), code="eager")
        for more in ({"precision": "bf16"}, {"precision": "fp16"}, {"precision": "bf16", "offload": "activations"})
    ]
    assert [bool(each.memory.later_bytes) for each in alone] == [True, False, False]


@pytest.mark.parametrize(
    ("model", "mesh", "more", "measured_gib"),
    [
        ("llama-3-8b", {"dp": 64, "zero": 3}, {}, 63.89),
        ("llama-3-8b", {"dp": 8, "tp": 8, "accumulation": 4}, {}, 19.73),
        ("llama-3-8b", {"dp": 4, "cp": 2, "tp": 8}, {}, 11.594),
        ("mixtral-8x7b", {"dp": 64, "ep": 8}, {"layers": 2, "context": 8192}, 10.378),
    ],
)
def test_memory_of_one_rank_of_64_is_what_an_h200_allocated(
    model: str, mesh: dict[str, Any], more: dict[str, Any], measured_gib: float
) -> None:
    """benchmarks/results/one_rank_five_h200.jsonl; the last two were first predicted without their formula."""
    plan = ParallelPlan(**{"zero": 1, "sequence_parallel": "tp" in mesh, "precision": "bf16", **mesh})
    chosen = dataclasses.replace(preset(model), **more)
    room = Estimator(chosen, parse_cluster("8x8xh200"), 8192, code="compiled", chunked_loss=True, imbalance=1.0).room
    seen = room.fullest(plan, (chosen.layers,)).seen_bytes("gpu")
    assert seen / 2**30 == pytest.approx(measured_gib, rel=0.03)


def test_a_kv_cache_by_hand() -> None:
    assert memory.kv_cache_bytes(preset("llama-3-70b"), 8192) == 2 * 80 * 8 * 128 * 8192 * 2


def test_a_loss_that_makes_logits_of_some_rows_at_a_time_holds_no_others() -> None:
    """gpt2-124m, 32 x 1024 tokens: 3.3 GB of logits and as much of their gradient, or 0.5 GiB at a time."""
    model = preset("gpt2-124m")
    plan = ParallelPlan(microbatch=32, precision="bf16")
    whole, chunked = (
        sum(one.nbytes for one in loss_tensors(model, Task.of(plan, 1024, "compiled", True, way)))
        for way in (False, True)
    )
    tokens, width, vocabulary = 32 * 1024, model.width, model.vocabulary
    assert whole >= 2 * 2 * tokens * vocabulary
    ends = tokens * width * (4 + 2 * 2) + vocabulary * width * (2 + 2 + 4)
    assert ends < chunked <= ends + CHUNK_BYTES + 128 * 2 * vocabulary
    # A table that ranks share is not multiplied in chunks.
    assert not Task.of(dataclasses.replace(plan, tp=2), 1024, "compiled", True, True).chunked_loss


@pytest.mark.parametrize("cluster", ["4xh100", "4xcpu"])
@pytest.mark.parametrize("offload", ["", "optimizer", "weights", "optimizer+weights", "activations+optimizer+weights"])
def test_what_is_quickly_beyond_a_limit_is_beyond_it(cluster: str, offload: str) -> None:
    """The quick answer says no sooner than the fullest rank does, and up to the limit it is that rank's."""
    estimator = Estimator(preset("llama-3-8b"), parse_cluster(cluster), context=2048)
    plans = [plan for group in candidates(estimator, 16, Pins(offload=offload)) for plan in group][::11]
    ranks = [estimator.room.stages(plan, estimator._counts(plan)) for plan in plans]  # all of them
    exact = [max(rank.total_bytes for rank in each) for each in ranks]
    for limit in sorted(exact)[:: len(exact) // 6]:
        quick = [estimator.total_bytes(plan, limit) for plan in plans]
        assert [nbytes > limit for nbytes in quick] == [nbytes > limit for nbytes in exact]
        assert [nbytes for nbytes in quick if nbytes <= limit] == [nbytes for nbytes in exact if nbytes <= limit]


@pytest.mark.parametrize("code", ["fused", "compiled", "eager"])
def test_what_was_asked_before_changes_no_answer(code: Code) -> None:
    """ZeRO-3 in torch's own code keeps more of each norm: one estimator for both says so too."""
    model, cluster = preset("llama-3-8b"), parse_cluster("8xh100")
    plans = [ParallelPlan(dp=8, zero=zero) for zero in (0, 3)]
    estimator = Estimator(model, cluster, code=code)
    alone = [Estimator(model, cluster, code=code).predict(plan).memory for plan in plans]
    assert [estimator.predict(plan).memory for plan in plans] == alone
    assert (alone[0].activations_bytes < alone[1].activations_bytes) == (code == "eager")
