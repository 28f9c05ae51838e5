"""Published figures and exact formulas of memory and arithmetic: checkpointing, GPT-3's table, activations, caches."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.book import build
from tilemesh.core.step.memory import StepBytes, memory_peaks
from tilemesh.core.step.passes import recompute
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.exchanges import replica_exchanges
from tilemesh.model.work.kept import kept_bytes
from tilemesh.model.work.operations import Product, forward_flops, hardware_flops, layer_work, model_flops
from tilemesh.model.work.task import Task
from tilemesh.plan import memory
from tilemesh.plan.step import predict

# ---- checkpointing -----------------------------------------------------------------------------------------------


def checkpointed_peak(layers: int, every: int) -> float:
    """Of N layers whose activations take one each, every K-th boundary kept: by liveness of the actions."""
    chunks = layers // every
    program = recompute(build("breadth-first", 1, 1, per_rank=chunks))
    return memory_peaks(program, StepBytes(kept=[every] * chunks, inputs=[1] * chunks))[0]


@pytest.mark.parametrize("layers", [16, 36, 64, 144])
def test_checkpoints_every_k_layers_hold_n_by_k_and_k_and_least_at_the_square_root(layers: int) -> None:
    # N/K boundaries, the last of which gives way to the K layers computed again.
    peaks = {every: checkpointed_peak(layers, every) for every in range(1, layers + 1) if layers % every == 0}
    assert peaks == {every: layers / every + every - 1 for every in peaks}
    assert min(peaks, key=lambda every: peaks[every]) ** 2 == layers


@given(st.integers(1, 8), st.sampled_from([64, 512]), st.integers(1, 48), st.sampled_from([256, 1024]))
def test_full_recomputation_makes_model_flops_three_quarters(b: int, s: int, layers: int, width: int) -> None:
    """MFU = 3/4 HFU for the layers: forward, forward again and a backward pass of two, of which three had to be."""
    model = ModelConfig(layers=layers, width=width, heads=8, vocabulary=1, context=s)
    head = 3 * forward_flops(model, b, s).logits
    had_to_be, done = model_flops(model, b, s) - head, hardware_flops(model, b, s, "full") - head
    assert 4 * had_to_be == 3 * done


def test_mfu_and_hfu_of_a_plan_that_recomputes_everything() -> None:
    plan = ParallelPlan(dp=8, zero=3, recompute="full", precision="bf16-master", accumulation=2)
    model = preset("llama-3-8b")
    found = predict(model, parse_cluster("8xh100"), plan)
    logits = forward_flops(model, plan.batch, model.context).logits
    assert found.mfu / found.hfu == pytest.approx(
        found.model_flops / ((found.model_flops - 3 * logits) * 4 / 3 + 3 * logits)
    )


# ---- GPT-3 -------------------------------------------------------------------------------------------------------


def test_gpt3s_memory_table() -> None:
    """175e9 parameters: 350 GB in 16 bits; 2,100 GB of optimizer (12 bytes per parameter); 3.2 M tokens with the
    boundaries of 96 layers kept: 7,549.7 GB."""
    weights, gradients, optimizer = memory.state_bytes(175 * 10**9, "bf16-master")
    assert (weights, gradients, optimizer) == (350 * 10**9, 350 * 10**9, 2100 * 10**9)
    model = preset("gpt3-175b")
    task = Task(1, 2048, 2048, precision="bf16-master")
    boundary, _ = kept_bytes(model, task, "full")
    per_token = model.layers * boundary / task.tokens
    assert per_token * 3_200_000 / 1e9 == pytest.approx(7549.7, abs=0.05)
    assert per_token == 96 * 12288 * 2


# ---- activations ---------------------------------------------------------------------------------------------------


@given(*[st.integers(1, 32)] * 5)
def test_results_of_products_and_convolutions(b: int, c: int, h: int, w: int, k: int) -> None:
    """A matrix product of B matrices M x N with N x P gives B M P elements; a convolution, which is a product of C
    filters with the patches of H W places, B C H W."""
    assert Product("matmul", b, h, w, k, "bf16").outputs == b * h * w
    assert Product("convolution", b, c, h * w, k, "bf16").outputs == b * c * h * w


@given(st.integers(1, 8), st.sampled_from([64, 2048]), st.sampled_from([(8, 512), (16, 4096)]))
def test_a_layers_activation_is_b_l_h(b: int, length: int, shape: tuple[int, int]) -> None:
    heads, width = shape
    model = ModelConfig(layers=2, width=width, heads=heads, vocabulary=16, context=length)
    work = layer_work(model, Task(b, length, length, precision="bf16-master"))
    assert work.kept[0].elements == b * length * width
    ends_a_block = [op for op in work.forward if isinstance(op, Product) and op.name.endswith(("projection", "out"))]
    assert [op.outputs for op in ends_a_block] == [b * length * width] * 2


@given(
    st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from(["relu", "gelu", "swiglu"]), st.sampled_from([2, 4, 8])
)
def test_between_the_halves_of_a_backward_pass_each_weight_gradient_has_its_operands(
    tp: int, biases: bool, activation: str, kv_heads: int
) -> None:
    """Elements of all operands, an input that several matrices share once."""
    model = ModelConfig(
        layers=1, width=64, heads=8, kv_heads=kv_heads, vocabulary=16, context=32, biases=biases,
        activation=activation, mlp_width=128,
    )  # fmt: skip
    work = layer_work(model, Task(2, 32, 32, tp=tp, precision="fp32", code="eager", gpu=False))
    products = [op for op in work.weight_gradients if isinstance(op, Product)]
    assert set(products) <= {op for op in work.backward if isinstance(op, Product)}
    # A weight gradient is k x T by T x n: k inputs, shared by q, k, v and by a gate with what it opens; n outputs.
    tokens, width, hidden = 64, model.width, model.mlp_width
    gradients = sum(op.n * op.k for op in products)
    expected = 4 * (2 * tokens * width + tokens * (width + hidden) // tp + gradients)
    assert sum(one.nbytes for one in work.kept_for_weights) == expected


# ---- ZeRO and caches -------------------------------------------------------------------------------------------------


def test_zero_sends_two_per_parameter_and_stage_3_half_as_much_again() -> None:
    """In units of one parameter's bytes and of large N: an all_reduce is 2, a scatter-sum and a gather 1 each."""
    unit = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    sent = [sum(unit[x.collective] * x.times for x in itertools.chain(*replica_exchanges(z, 1))) for z in range(4)]
    assert sent == [2, 2, 2, 3]


def test_bytes_of_a_kv_cache() -> None:
    """OPT-13B: 800 KiB per token; Llama-2-70B: 10.7 GB for 32k tokens."""
    opt = ModelConfig(layers=40, width=5120, heads=40, vocabulary=50272, context=2048)
    assert memory.kv_cache_bytes(opt, 1) == 800 * 1024
    llama = ModelConfig(layers=80, width=8192, heads=64, kv_heads=8, vocabulary=32000, context=32768)
    assert memory.kv_cache_bytes(llama, 32768) / 1e9 == pytest.approx(10.7, abs=0.05)
