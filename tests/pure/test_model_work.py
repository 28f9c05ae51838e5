"""The description of a layer: what its parts add up to, over ranks, codes and lengths."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.plan import Precision
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.exchanges import replica_exchanges
from tilemesh.model.work.kept import kept_bytes
from tilemesh.model.work.operations import (
    FusedAttention,
    Product,
    embedding_work,
    forward_flops,
    head_work,
    layer_work,
    published_flops,
)
from tilemesh.model.work.task import Code, Task
from tilemesh.model.work.weights import count_parameters, layer_weights, shard_parameters, why_not_tp

GPT = ModelConfig(layers=3, width=64, heads=8, vocabulary=96, context=32, dropout=0.1)
LLAMA = ModelConfig(
    layers=3, width=64, heads=8, kv_heads=4, mlp_width=96, vocabulary=96, context=32, norm="rmsnorm",
    positions="rotary", activation="swiglu", biases=False, tied=False,
)  # fmt: skip
MODELS = st.sampled_from([GPT, LLAMA, GPT.replace(norm_place="post", tied=False), LLAMA.replace(kv_heads=8)])
CODES = st.sampled_from(get_args(Code))


def product_flops(work: Any, backward: bool = False) -> int:
    return sum(op.cost.flops for op in (work.backward if backward else work.forward) if isinstance(op, Product))


@given(MODELS, CODES, st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 32))
def test_ranks_and_codes_make_the_products_of_the_whole(
    model: ModelConfig, code: Code, tp: int, sequences: int, tokens: int
) -> None:
    """However they are joined or split: no FLOP is lost, and none is done twice."""
    task = Task(sequences, tokens, tokens, tp, code=code, gpu=False)
    whole = forward_flops(model, sequences, tokens)
    layer, head = layer_work(model, task), head_work(model, task)
    assert tp * model.layers * product_flops(layer) == whole.projections + whole.mlp
    assert product_flops(layer, backward=True) == 2 * product_flops(layer)
    assert tp * product_flops(head) == whole.logits
    assert product_flops(head, backward=True) == 2 * product_flops(head)


@given(MODELS, st.integers(1, 24), st.integers(1, 4))
def test_decoding_token_by_token_adds_up_to_the_causal_half(model: ModelConfig, tokens: int, sequences: int) -> None:
    """Queries and keys are two numbers: a prompt at once, or its tokens one after the other over a growing cache."""

    def attended(task: Task) -> int:
        return sum(op.cost.flops for op in layer_work(model, task).forward if isinstance(op, FusedAttention))

    steps = [Task(sequences, 1, length, gpu=False) for length in range(1, tokens + 1)]
    prompt = Task(sequences, tokens, tokens, gpu=False)
    assert sum(map(attended, steps)) == attended(prompt)
    flops = [forward_flops(model, sequences, 1, length) for length in range(1, tokens + 1)]
    at_once = forward_flops(model, sequences, tokens)
    assert sum(one.projections + one.mlp + one.logits for one in flops) == at_once.total - at_once.scores
    # As MFU counts it, the prompt is the whole square; one new token is a row of it.
    assert flops[-1].scores * tokens == at_once.scores


def test_a_decoding_step_reads_its_keys_and_values_once() -> None:
    model = preset("llama-3-8b")
    (op,) = (one for one in layer_work(model, Task(4, 1, 8192)).forward if isinstance(one, FusedAttention))
    keys = 4 * 8192 * 2 * model.kv_width * 2  # of 16 bits
    assert op.cost.bytes_moved == pytest.approx(keys, rel=0.001)
    assert op.cost.intensity < 8  # far below any ridge: decoding waits for memory


@given(MODELS, st.sampled_from([2, 4]), st.sampled_from(get_args(Precision)))
def test_sequence_parallelism_sends_as_many_bytes_and_keeps_less(
    model: ModelConfig, tp: int, precision: Precision
) -> None:
    def ring_bytes(task: Task) -> float:
        works = (layer_work(model, task), embedding_work(model, task), head_work(model, task))
        laps = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        return sum(laps[one.collective] * one.nbytes for work in works for one in work.exchanges)

    whole, cut = (Task(2, 16, 16, tp, parallel, precision=precision, code="compiled") for parallel in (False, True))
    if cut.stream == cut.size:
        assert ring_bytes(whole) == ring_bytes(cut)
    else:  # what is only gathered travels in 16 bits
        assert ring_bytes(cut) < ring_bytes(whole)
    assert kept_bytes(model, cut, "none")[0] < kept_bytes(model, whole, "none")[0]


@given(MODELS, st.sampled_from([1, 2, 4, 8]))
def test_what_is_held_is_what_is_split_repeated_or_whole(model: ModelConfig, tp: int) -> None:
    if why_not_tp(model, tp):
        return
    copies, weights = max(1, tp // model.kv_heads), layer_weights(model)
    replicated, repeated = sum(each.replicated() for each in weights), sum(each.repeated(tp) for each in weights)
    split = shard_parameters(model, tp).layer - replicated - repeated
    assert tp * split + tp // copies * repeated + replicated == count_parameters(model).layer
    assert {weight.block for weight in layer_weights(model)} == {"attention", "mlp", ""}


@pytest.mark.parametrize(
    ("zero", "sent"), [(0, {"all_reduce": 1}), (1, {"reduce_scatter": 1, "all_gather": 1}),
                       (2, {"reduce_scatter": 4, "all_gather": 1}), (3, {"reduce_scatter": 4, "all_gather": 8})]
)  # fmt: skip
def test_what_zero_exchanges_in_four_microbatches(zero: int, sent: dict[str, int]) -> None:
    counted: dict[str, int] = {}
    for exchanges in replica_exchanges(zero, 4):
        for one in exchanges:
            counted[one.collective] = counted.get(one.collective, 0) + one.times
            assert one.what == ("weights" if one.collective == "all_gather" else "gradients")
    assert counted == sent


def test_published_flops_of_gpt_oss_count_what_windows_let_a_token_see() -> None:
    """By hand: every second layer sees 128 tokens; the mean over a sequence of 4,096 of what a token sees."""
    model, tokens, wide = preset("gpt-oss-20b"), 4096, 64 * 64
    matrices = 24 * (2880 * (2 * wide + 2 * 8 * 64) + 4 * 3 * 2880 * 2880) + 201088 * 2880
    pairs = 12 * tokens**2 / 2 + 12 * sum(min(token + 0.5, 128) for token in range(tokens))
    by_hand = 6 * matrices + 3 * 2 * 2 * wide * pairs / tokens
    assert published_flops(model, tokens) == pytest.approx(by_hand, rel=1e-6)
    whole = published_flops(model.replace(window=0, full_layers=()), tokens)
    assert whole - by_hand == pytest.approx(6 * 12 * wide * (tokens - 2 * 128 + 128**2 / tokens), rel=1e-3)
