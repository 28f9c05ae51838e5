"""What a pass of a serving engine does, as work: against published limits, training's own counts, and by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.cost import Ceiling, limit_s
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.work.decoding import (
    SequencePart,
    attention_operations,
    dense_operations,
    end_operations,
    key_value_bytes,
    least_cost,
    pass_exchanges,
    serving_task,
    weight_bytes,
)
from tilemesh.model.work.exchanges import Exchange
from tilemesh.model.work.operations import Operation, Product, RaggedAttention, forward_flops
from tilemesh.model.work.passes import MemoryPass
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.serving_clock import FittedSteps, StepClock, non_negative_least_squares

MEASURED_H200 = Ceiling("an H200, measured", {"bf16": 800e12}, 4.23e12, 4.23e12, 4.23e12)


@dataclass(frozen=True)
class PassWork:
    """What one rank does in a pass. `layers`: (how many are alike, the operations of one of them)."""

    layers: tuple[tuple[int, tuple[Operation, ...]], ...]
    ends: tuple[Operation, ...]
    """Embedding, final norm, logits."""
    exchanges: tuple[Exchange, ...]
    """Of all layers and both ends."""

    @property
    def operations(self) -> Iterable[tuple[int, Operation]]:
        """Each with how many times it is done."""
        for count, operations in self.layers:
            for operation in operations:
                yield count, operation
        for operation in self.ends:
            yield 1, operation

    @property
    def launches(self) -> int:
        """Kernels, or calls of torch."""
        return sum(count * (op.launches if isinstance(op, MemoryPass) else 1) for count, op in self.operations)


def pass_work(model: ModelConfig, parts: Sequence[SequencePart], task: Task) -> PassWork:
    """All that a rank does for these parts of sequences; `task` as `serving_task` makes it for their tokens."""
    dense = dense_operations(model, task)
    kinds: dict[int, int] = {}
    for layer in range(model.layers):
        kinds[model.window_of(layer)] = kinds.get(model.window_of(layer), 0) + 1
    layers = tuple(
        (count, (*dense, *attention_operations(model, parts, task, window))) for window, count in kinds.items()
    )
    logits = sum(part.logits for part in parts)
    ends = end_operations(model, task, logits)
    return PassWork(layers, ends, pass_exchanges(model, task, logits))


@pytest.mark.parametrize(
    ("name", "batch", "milliseconds"),
    [("tinyllama-1.1b", 1, 0.49), ("tinyllama-1.1b", 64, 0.84), ("llama-3-8b", 1, 3.58), ("llama-3-8b", 64, 5.58)],
)
def test_the_limit_of_a_decode_step_is_its_weights_and_keys_once(name: str, batch: int, milliseconds: float) -> None:
    """1,024 tokens of keys and values a sequence, weights in 16 bits: figures computed by hand elsewhere."""
    parts = [SequencePart(1, 1024, 1)] * batch
    found = limit_s(least_cost(preset(name), parts, serving_task(batch, "bf16")), MEASURED_H200)
    assert found * 1e3 == pytest.approx(milliseconds, rel=0.011)


def test_a_whole_prompt_has_the_flops_of_a_forward_pass() -> None:
    model, tokens = preset("llama-3-8b"), 512
    work = pass_work(model, [SequencePart(tokens, tokens, tokens)], serving_task(tokens, "bf16"))
    products = sum(count * op.cost.flops for count, op in work.operations if isinstance(op, Product))
    square = forward_flops(model, 1, tokens)
    assert products == square.projections + square.mlp + square.logits
    scores = sum(count * op.cost.flops for count, op in work.operations if isinstance(op, RaggedAttention))
    # The square counts masked pairs too; a triangle with its diagonal has (n + 1) / 2n of them.
    assert scores == square.scores * (tokens + 1) // (2 * tokens)


parts_of_steps = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 200), st.booleans()).map(
        lambda t: SequencePart(t[0], t[0] + t[1], int(t[2]))
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(parts_of_steps, st.sampled_from(["1xh200", "2xh200", "1xcpu"]))
def test_a_step_takes_at_least_its_limit_and_more_work_takes_no_less(parts: list[SequencePart], cluster: str) -> None:
    made = parse_cluster(cluster)
    dtype = "bf16" if made.device.kind == "gpu" else "fp32"
    clock = StepClock(preset("tinyllama-1.1b"), made, dtype, tp=made.world)
    assert clock(parts) >= clock.limit(parts)
    assert clock([*parts, SequencePart(1, 100, 1)]) >= clock(parts) - 3e-4  # a chunk alone may lose its launches' wait
    longer = [part._replace(keys=part.keys + 50) for part in parts]
    assert clock.limit(longer) > clock.limit(parts)


def test_chunks_add_up_to_the_whole_prompt() -> None:
    """In pairs and in products; not in bytes, as each chunk reads weights and the keys before it again."""
    model = preset("tinyllama-1.1b")
    whole = least_cost(model, [SequencePart(300, 300, 1)], serving_task(300, "bf16"))
    first = least_cost(model, [SequencePart(100, 100, 0)], serving_task(100, "bf16"))
    second = least_cost(model, [SequencePart(200, 300, 1)], serving_task(200, "bf16"))
    assert first.flops + second.flops == whole.flops
    assert first.bytes_moved + second.bytes_moved > whole.bytes_moved


def test_of_experts_those_are_read_that_a_batch_touches() -> None:
    """By even routing: one token passes 2 of 8, two tokens 8 (1 - (6/8)^2) = 3.5, many all of them."""
    model = preset("mixtral-8x7b")
    one = 3 * model.width * model.mlp_width * model.layers * 2  # bytes of one expert of every layer
    task, part = serving_task(1, "bf16"), SequencePart(1, 1, 1)
    alone, pair, many = (least_cost(model, [part] * batch, task).bytes_read for batch in (1, 2, 4000))
    beside = 2 * model.width + model.layers * 2 * 2 * model.kv_width  # what else a token more reads: its row
    assert abs(pair - alone - 1.5 * one) <= beside
    assert abs(many - alone - 6 * one) <= 4000 * beside


def test_a_window_bounds_what_is_read() -> None:
    model = preset("tinyllama-1.1b").replace(window=64)
    far, near = ([SequencePart(1, keys, 1)] for keys in (2000, 64))
    task = serving_task(1, "bf16")
    assert least_cost(model, far, task) == least_cost(model, near, task)
    half = model.replace(full_layers=tuple(range(11)))
    work = pass_work(half, far, task)
    assert [count for count, _ in work.layers] == [11, 11]


def test_bytes_of_keys_and_of_weights() -> None:
    model = preset("llama-3-8b")
    assert key_value_bytes(model, 2) == 2 * 32 * 8 * 128 * 2
    assert key_value_bytes(model, 2, tp=8) * 8 == key_value_bytes(model, 2)
    assert key_value_bytes(model, 2, tp=16) == key_value_bytes(model, 2, tp=8)  # heads fewer than ranks are repeated
    assert weight_bytes(model, 2) == 2 * count_parameters(model).total
    with pytest.raises(UsageError, match="dtype"):
        serving_task(1, "fp8")


def test_the_exchanges_of_tensor_parallelism_are_two_sums_a_layer() -> None:
    model = preset("tinyllama-1.1b")
    work = pass_work(model, [SequencePart(1, 10, 1)] * 4, serving_task(4, "bf16", tp=2))
    sums = [one for one in work.exchanges if one.collective == "all_reduce"]
    assert len(sums) == 2 * model.layers + 1
    assert {one.nbytes for one in sums} == {4 * model.width * 2}
    assert [one.nbytes for one in work.exchanges if one.collective == "all_gather"] == [4 * model.vocabulary * 2]


def test_a_fit_finds_the_line_that_made_the_times() -> None:
    def made(parts: list[SequencePart]) -> float:
        tokens = sum(part.queries for part in parts)
        read = sum(part.keys for part in parts if part.queries == 1)
        return 2e-3 + 5e-5 * tokens + 1e-4 * sum(part.logits for part in parts) + 2e-7 * read

    steps = [
        [SequencePart(1, keys, 1)] * rows + [SequencePart(chunk, chunk, 1)] * (chunk > 0)
        for rows in (1, 3, 16, 60)
        for keys in (20, 500)
        for chunk in (0, 30, 300)
    ]
    fitted = FittedSteps.of([(parts, made(parts)) for parts in steps])
    assert fitted.error < 0.02
    unseen = [SequencePart(1, 200, 1)] * 30 + [SequencePart(100, 100, 0)]
    assert fitted(unseen) == pytest.approx(made(unseen), rel=0.05)
    # A fifth of the steps, disturbed by other work, takes three times as long: the fit stays with the others.
    slowed = [(parts, made(parts) * (3 if number % 5 == 2 else 1)) for number, parts in enumerate(steps)]
    assert FittedSteps.of(slowed)(unseen) == pytest.approx(made(unseen), rel=0.1)
    with pytest.raises(UsageError, match="timed steps"):
        FittedSteps.of([])


def test_least_squares_without_negative_coefficients() -> None:
    assert non_negative_least_squares([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [1.0, 2.0, 3.0]) == pytest.approx([1, 2])
    assert non_negative_least_squares([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0]) == pytest.approx([1.5, 0.0])


def test_keys_of_a_latent_are_as_wide_as_their_heads() -> None:
    """What is turned and what goes to pages is queries and keys of all heads, whatever these are made of."""
    plain = preset("deepseek-moe-16b")
    latent = plain.replace(latent_width=512, query_latent_width=1536, rotary_fraction=0.5)
    task = serving_task(64, "bf16")
    for tp in (1, 2):
        moved = [
            {op.name: op.nbytes for op in dense_operations(model, dataclasses.replace(task, tp=tp))
             if isinstance(op, MemoryPass)}
            for model in (plain, latent)
        ]  # fmt: skip
        assert moved[0] == moved[1]
