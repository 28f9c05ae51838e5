"""One set of bits: an engine in invariant mode and a pass that is differentiated give the same log probabilities."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.data.tokenizer import Bytes
from tilemesh.kernels.paged_attention.reference import paged_attention, prompt_tile
from tilemesh.model import attend_alone, huggingface
from tilemesh.model.attend_alone import attend_by_tiles, starts_of
from tilemesh.model.config import ModelConfig
from tilemesh.model.linear import one_tile_product
from tilemesh.model.programs.prepare import Prepared, prepare
from tilemesh.model.programs.program import Use
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.agree import everyones
from tilemesh.parallel.apply import lay
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.answers import Completion
from tilemesh.serve.load import ServedModel
from tilemesh.serve.rank import LeadingRunner, follow_steps, following_runner

LLAMA = ModelConfig(
    layers=2, width=48, heads=6, kv_heads=2, vocabulary=259, context=150, norm="rmsnorm", positions="rotary",
    activation="swiglu", biases=False, tied=False,
)  # fmt: skip
GPT = ModelConfig(
    layers=2, width=40, heads=5, vocabulary=259, context=150, norm="layernorm", positions="learned",
    activation="gelu", biases=True, tied=True,
)  # fmt: skip
WINDOWS = replace(
    LLAMA, layers=3, window=24, full_layers=(1,), rotary_local_base=1e4, rotary_base=1e6, qk_norm="head",
    norm_place="sandwich", tied=True, scaled_embedding=True, norm_offset=True, activation="geglu", score_cap=4.0,
    logit_cap=9.0, score_sink=True,
)  # fmt: skip
EXPERTS = replace(LLAMA, experts=4, experts_per_token=2, shared_width=24, shared_gate=True)
INVARIANT = Use(trains=True, invariant=True)
WORLDS: list[dict[str, Any]] = [
    {"pages": 400, "running": 1, "share_prefixes": False},
    {"pages": 400, "running": 64, "chunk_tokens": 7, "page_tokens": 4},
    {"pages": 20, "page_tokens": 5, "running": 16, "step_tokens": 50, "swap_pages": 8},
]
ASKED = Sampling(max_tokens=9, temperature=1, seed=4, logprobs=0, ignore_eos=True)
ALL = replace(ASKED, prompt_logprobs=0)  # which shares no prefixes


def model_of(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    model = Transformer(config, seed=1, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # fresh weights say next to nothing; these have opinions
    return model


def prompts_of(count: int, longest: int = 24) -> list[list[int]]:
    draw = random.Random(5)
    opening = [draw.randrange(1, 256) for _ in range(33)]
    return [
        [*opening[: draw.choice((0, 20, 33))], *(draw.randrange(1, 256) for _ in range(draw.randrange(1, longest)))]
        for _ in range(count)
    ]


def served(model: Transformer) -> ServedModel:
    return ServedModel("small", copy.deepcopy(model).eval().requires_grad_(False), Bytes(), frozenset({0}))


def told(completion: Completion, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """All tokens of a request, and log probabilities of the last of them: of the answer, or of all but the first."""
    (answer,) = completion.answers
    logprobs = [entry.logprob for entry in (*completion.prompt_logprobs, *answer.logprobs)]
    return [*prompt, *answer.tokens], logprobs


def own_logprobs(logits_TV: Tensor, tokens: Sequence[int]) -> Tensor:
    shares_TV = functional.log_softmax(logits_TV[: len(tokens) - 1].float(), -1)
    return shares_TV.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[7] * (longest - len(row))] for row in rows])


def check_bits(programs: Prepared, pairs: Sequence[tuple[list[int], list[float]]], batch: int) -> int:
    """How many tokens were compared: rows of a padded batch against what the engine said."""
    count = 0
    for begin in range(0, len(pairs), batch):
        some = pairs[begin : begin + batch]
        logits_BTV = programs(padded([tokens for tokens, _ in some]))
        assert logits_BTV.requires_grad
        for logits_TV, (tokens, expected) in zip(logits_BTV, some, strict=True):
            assert own_logprobs(logits_TV, tokens)[-len(expected) :].tolist() == expected
            count += len(expected)
    return count


@pytest.mark.parametrize(
    ("config", "dtype", "requests"),
    [
        (LLAMA, torch.float32, 24),
        pytest.param(LLAMA, torch.float32, 64, marks=pytest.mark.slow),
        (replace(LLAMA, layers=1, mlp_width=48), torch.bfloat16, 5),
        pytest.param(LLAMA, torch.bfloat16, 24, marks=pytest.mark.slow),
        (GPT, torch.float32, 6),
        (WINDOWS, torch.float32, 6),
        (EXPERTS, torch.float32, 6),
    ],
    ids=["llama", "llama 64", "llama bf16", "llama bf16 24", "gpt", "windows", "experts"],
)
def test_an_engine_and_a_pass_that_trains_have_the_same_bits(
    config: ModelConfig, dtype: torch.dtype, requests: int
) -> None:
    """In batches of one and of up to 64, with chunks, prefix hits, preemption and swapping."""
    model, prompts = model_of(config, dtype), prompts_of(requests, 50 if requests == 64 else 24)
    programs = prepare(model, INVARIANT)
    preempted = shared = 0
    for number, world in enumerate(WORLDS):
        some = prompts[: (3, requests, requests)[number]]
        with Engine(served(model), invariant=True, **world) as engine:
            completions = list(engine.generate(some, ALL if number == 0 else ASKED))
            preempted += engine.status.preemptions
        shared += sum(completion.found_tokens for completion in completions)
        pairs = [told(completion, prompt) for completion, prompt in zip(completions, some, strict=True)]
        expected = sum(map(len, some)) + 8 * len(some) if number == 0 else 9 * len(some)
        assert check_bits(programs, pairs, 1 if number == 0 else 5) == expected
    assert preempted > 0
    assert shared > 0


def test_packed_documents_have_the_same_bits_too() -> None:
    model, prompts = model_of(WINDOWS, torch.float32), prompts_of(4)
    programs = prepare(model, replace(INVARIANT, marked=True))
    with Engine(served(model), invariant=True, pages=100) as engine:
        pairs = [told(made, prompt) for made, prompt in zip(engine.generate(prompts, ALL), prompts, strict=True)]
    row = [mark for tokens, _ in pairs[:3] for mark in (-1 - tokens[0], *tokens[1:])]
    logits_TV = programs(torch.tensor([row]), marked=True)[0]
    begin = 0
    for tokens, expected in pairs[:3]:
        assert own_logprobs(logits_TV[begin : begin + len(tokens)], tokens).tolist() == expected
        begin += len(tokens)


@pytest.mark.parametrize("config", [LLAMA, GPT, WINDOWS, EXPERTS], ids=["llama", "gpt", "windows", "experts"])
def test_gradients_are_those_of_the_ordinary_pass(config: ModelConfig) -> None:
    """Float64: the same sums in another order differ by 1e-16 times a few hundred terms and a few layers."""
    plain, tokens_BT = model_of(config, torch.float64), padded(prompts_of(3))
    invariant = copy.deepcopy(plain)
    programs = prepare(invariant, INVARIANT)
    for logits_BTV in (plain(tokens_BT), programs(tokens_BT)):
        functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
    for (name, ours), theirs in zip(invariant.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        # A key's bias moves all scores of a query alike: its gradient is zero but for rounding.
        largest = max(1e-3, float(theirs.grad.norm()))
        assert (ours.grad - theirs.grad).norm() <= 1e-11 * largest, name


def lay_over(comm: Communicator, model: Transformer) -> Laid:
    plan = ParallelPlan(tp=2, precision="fp32")
    return lay(copy.deepcopy(model), Mesh(comm, tp=2), plan, gradients="naive", use=INVARIANT)


@pytest.mark.parametrize("requests", [6, pytest.param(64, marks=pytest.mark.slow)])
def test_an_engine_over_ranks_that_train_has_their_bits(requests: int) -> None:
    """A sum of two partial products is the same in either order; both sides are cut alike, on the same memory: in
    batches of one and of up to 64, with chunks, prefix hits, preemption and swapping."""
    model, prompts = model_of(replace(LLAMA, heads=4), torch.float32), prompts_of(requests)

    def counted(comm: Communicator) -> tuple[int, int, int]:
        laid, compared, preempted, shared = lay_over(comm, model), 0, 0, 0
        for number, world in enumerate(WORLDS):
            part = lay_over(comm, model)
            for ours, theirs in zip(part.module.parameters(), laid.module.parameters(), strict=True):
                ours.data = theirs.data
            some, rows = prompts[: (3, requests, requests)[number]], list[bytes]()
            if comm.rank:
                follow_steps(following_runner(part, torch.device("cpu"), invariant=True))
            else:
                part.model.requires_grad_(False)
                given = ServedModel("small", part.model, Bytes(), frozenset({0}))
                with Engine(given, invariant=True, make_runner=partial(LeadingRunner, part), **world) as engine:
                    completions = list(engine.generate(some, ALL if number == 0 else ASKED))
                    preempted += engine.status.preemptions
                    part_runner = engine._core.runner
                    assert isinstance(part_runner, LeadingRunner)
                    part_runner.release()
                shared += sum(completion.found_tokens for completion in completions)
                rows = [json.dumps(told(*each)).encode() for each in zip(completions, some, strict=True)]
            pairs = [json.loads(row) for row in everyones(comm, b"\n".join(rows))[0].split(b"\n")]
            size = 1 if number == 0 else 5
            for begin in range(0, len(pairs), size):
                logits_BTV = laid.logits(padded([tokens for tokens, _ in pairs[begin : begin + size]]))
                for logits_TV, (tokens, expected) in zip(logits_BTV, pairs[begin : begin + size], strict=True):
                    assert own_logprobs(logits_TV, tokens)[-len(expected) :].tolist() == expected
                    compared += len(expected)
        return compared, preempted, shared

    (compared, preempted, shared), (again, *_) = run_threads(2, counted, timeout_s=300.0)
    assert compared == again == sum(map(len, prompts[:3])) + 8 * 3 + 2 * 9 * requests
    assert preempted > 0
    assert shared > 0


@pytest.mark.slow
def test_two_processes_have_the_same_bits(tmp_path: Path) -> None:
    config = replace(LLAMA, heads=4, kv_heads=2)
    model, prompts = model_of(config, torch.float32), prompts_of(6)
    huggingface.save(model, tmp_path)
    settings = {"pages": 40, "page_tokens": 4, "swap_pages": 12, "chunk_tokens": 9}
    with Engine(tmp_path, ranks=2, invariant=True, **settings) as engine:  # type: ignore[arg-type]
        pairs = [told(made, prompt) for made, prompt in zip(engine.generate(prompts, ALL), prompts, strict=True)]

    def logits_of(comm: Communicator) -> Tensor:
        return lay_over(comm, model).logits(padded([tokens for tokens, _ in pairs]))

    for logits_BTV in run_threads(2, logits_of, timeout_s=60.0):
        for logits_TV, (tokens, expected) in zip(logits_BTV, pairs, strict=True):
            assert own_logprobs(logits_TV, tokens).tolist() == expected


def test_what_would_round_otherwise_is_refused() -> None:
    model = model_of(LLAMA, torch.float32)
    for use, word in ((replace(INVARIANT, casts=True), "autocast"), (replace(INVARIANT, compiled=True), "compile")):
        with pytest.raises(UsageError, match=f"an invariant pass under .*{word}: .*fp32"):
            prepare(model, use)
    plan = ParallelPlan(precision="bf16")
    with pytest.raises(UsageError, match="an invariant pass under autocast"):
        run_threads(1, lambda comm: lay(model, Mesh(comm), plan, use=INVARIANT))


# What a GPU computes with, in the interpreter -------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, pytest.param(30, marks=pytest.mark.slow)])
def test_tiles_of_whole_sequences_have_the_bits_of_tiles_over_pages(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end to end against the same tokens one by one, in pages that lie anywhere."""
    monkeypatch.setattr(attend_alone, "EVEN_SPLIT", 64)
    generator = torch.Generator().manual_seed(0)
    lengths, heads, kv_heads, width, page = [5, 66], 1, 1, 16, 8
    starts = torch.tensor([0, 5, 71])
    q, k, v = (torch.randn(71, count, width, generator=generator) for count in (heads, kv_heads, kv_heads))
    ours = attend_by_tiles(q, k, v, starts, 66, window, implementation="interpret")
    tile = prompt_tile(heads // kv_heads, width, 4)
    order = torch.randperm(20, generator=generator)
    keys, values = (torch.randn(20, page, kv_heads, width, generator=generator) for _ in range(2))
    for sequence, length in enumerate(lengths):
        begin, pages = int(starts[sequence]), order[: -(-length // page)]
        order = order[len(pages) :]
        places = (pages[:, None] * page + torch.arange(page)).flatten()[:length]
        keys.view(-1, kv_heads, width)[places] = k[begin : begin + length]
        values.view(-1, kv_heads, width)[places] = v[begin : begin + length]
        for at in (0, length - 1):
            tiles = torch.tensor([[0, 0, 1, at]], dtype=torch.int32)
            alone = paged_attention(
                q[begin + at : begin + at + 1], keys, values, pages[None].int(), tiles, tile=tile, split=64,
                longest=length, window=window, implementation="interpret",
            )  # fmt: skip
            assert torch.equal(alone[0], ours[begin + at])


def test_one_tile_gives_a_row_the_same_bits_among_any_others() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(37, 80, generator=generator), torch.randn(50, 80, generator=generator)
    bias = torch.randn(50, generator=generator)
    whole = one_tile_product(x, weight, bias, "interpret")
    assert torch.allclose(whole, functional.linear(x, weight, bias), atol=1e-4)
    for rows in (slice(0, 1), slice(5, 30), slice(36, 37)):
        assert torch.equal(one_tile_product(x[rows], weight, bias, "interpret"), whole[rows])
    both = one_tile_product(x, torch.cat((weight, -weight)), torch.cat((bias, bias)), "interpret")
    assert torch.equal(both[:, :50], whole)  # so projections of the same activations may be computed by one product


def test_starts_of_rows_of_one_length() -> None:
    assert starts_of(3, 5, torch.device("cpu")).tolist() == [0, 5, 10, 15]
