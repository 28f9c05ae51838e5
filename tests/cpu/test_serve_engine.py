"""The engine over a real small model: batched, alone and plain sampling give the same tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.cli.commands.serve import ServeOptions
from tilemesh.core.errors import RunError, UsageError
from tilemesh.data.tokenizer import Bytes
from tilemesh.kernels.lowbit.codes import rounded
from tilemesh.kernels.lowbit.formats import Scheme
from tilemesh.model.cache import DenseCache
from tilemesh.model.config import ModelConfig
from tilemesh.model.kinds import FewBits
from tilemesh.model.sampling import sample
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.gate.alone import compress_all
from tilemesh.serve import Engine, EngineConfig, QueueFullError, Sampling, memory
from tilemesh.serve.answers import Completion
from tilemesh.serve.jobs import AnswerPart
from tilemesh.serve.load import ServedModel
from tilemesh.serve.request import FinishReason, ServeRequest
from tilemesh.serve.runner import Runner
from tilemesh.serve.scheduler import Scheduler, ServeLimits
from tilemesh.serve.write import generate, generate_tokens

CONTEXT = 48
LLAMA = ModelConfig(
    layers=2, width=32, heads=4, kv_heads=2, vocabulary=256, context=CONTEXT, norm="rmsnorm", positions="rotary",
    activation="swiglu", biases=False, tied=False,
)  # fmt: skip
GPT = ModelConfig(layers=2, width=32, heads=4, vocabulary=256, context=CONTEXT)


def served(config: ModelConfig = LLAMA, dtype: torch.dtype = torch.float64) -> ServedModel:
    model = Transformer(config, seed=1, dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)  # fresh weights say next to nothing; these have opinions
    return ServedModel("small", model, Bytes(), frozenset({0}))


@pytest.fixture(scope="module")
def small() -> ServedModel:
    return served()


@pytest.fixture
def engine(small: ServedModel) -> Iterator[Engine]:
    with Engine(small, pages=40, page_tokens=4) as made:
        yield made


def test_one_configuration_serves_python_and_the_command(small: ServedModel) -> None:
    """Keywords are fields of the configuration, over those of one that is given; the command's options extend it."""
    config = EngineConfig(pages=40, page_tokens=4, running=2)
    with Engine(small, config, waiting=3) as one, Engine(small, pages=40, page_tokens=4, running=2, waiting=3) as other:
        assert one.limits == other.limits
        assert (one.limits.running, one.limits.waiting) == (2, 3)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"running": 0}, "running is 0: expected a whole number"),
        ({"kv_cache": "int4"}, "unknown kv_cache 'int4': did you mean 'int8'?"),
        ({"pages": 4, "memory": 0.5}, "pages and memory were both given"),
        ({"ranks": -1}, "ranks is -1: expected"),
    ]
    for wrong, reason in refused:
        with pytest.raises(UsageError, match=re.escape(reason)):
            Engine(small, **wrong)
    with pytest.raises(TypeError, match="runing"):
        Engine(small, runing=3)
    options = ServeOptions(source="run", running=2, share_prefixes=False)
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    same = EngineConfig(**{name: getattr(options, name) for name in names})
    assert same == EngineConfig(running=2, share_prefixes=False)


def test_a_context_beyond_the_models_is_said(small: ServedModel) -> None:
    said: list[str] = []
    with Engine(small, pages=40, page_tokens=4, context=CONTEXT + 100, say=said.append) as engine:
        assert engine.limits.context == CONTEXT
    assert any(f"served with {CONTEXT}" in line for line in said)


def plain(model: ServedModel, prompt: Sequence[int], tokens: int, temperature: float, seed: int) -> list[int]:
    """What `model.sampling` draws, up to the end token."""
    found = sample(
        lambda x, cache: model.model(x, cache=cache),
        prompt,
        tokens,
        context=CONTEXT,
        temperature=temperature,
        seed=seed,
    )
    return found[: found.index(0) + 1] if 0 in found else found


# Attention over pages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        LLAMA, GPT, LLAMA.replace(kv_heads=1), LLAMA.replace(kv_heads=4), LLAMA.replace(window=7, full_layers=(1,)),
        LLAMA.replace(window=7), LLAMA.replace(window=7, full_layers=(1,), score_cap=2.0, logit_cap=6.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("invariant", "kernel"), [(False, "auto"), (True, "auto"), (False, "torch")])
def test_logits_over_pages_are_those_of_contiguous_memory(
    config: ModelConfig, invariant: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64 against the dense cache; sums of up to 128 products of size 10 in another order: 1e-12 at most."""
    if config.window:  # blocks of keys that lie before a window, and ones that a window does not reach into
        monkeypatch.setattr("tilemesh.model.attend_alone.KEY_BLOCK", 4)
    model, draw = served(config).model, random.Random(3)
    pages = 24 if config.window and not config.full_layers else 60  # pages behind the window serve again
    local = 20 if config.full_layers else 0
    limits = ServeLimits(
        pages, CONTEXT, page_tokens=4, step_tokens=33, chunk_tokens=13, running=6, window=config.window,
        local_pages=local,
    )  # fmt: skip
    scheduler, runner = Scheduler(limits), Runner(model, limits, invariant=invariant, implementation=kernel)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in (1, 3, 9, 9, 30, 41)]
    requests = [ServeRequest(str(number), list(prompt), 6) for number, prompt in enumerate(prompts)]
    found: dict[str, list[torch.Tensor]] = {request.name: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        plan = scheduler.plan()
        logits = runner.run(plan, lambda request: True)
        for entry in plan.entries:
            found[entry.request.name].append(logits[entry.request.name].logits_NV)
        scheduler.commit(plan, {entry.request.name: [draw.randrange(256)] for entry in plan.entries if entry.samples})
    for request in requests:
        tokens = torch.tensor([request.tokens[:-1]])
        expected = model(tokens, cache=DenseCache(1, CONTEXT).extend(tokens.shape[1]))[0]
        made = torch.cat(found[request.name])
        assert len(made) >= len(expected) - request.found
        torch.testing.assert_close(made, expected[len(expected) - len(made) :], rtol=0, atol=1e-12)
    if local:
        held = {layer: stored.held.shape[1] - 1 for layer, stored in runner.cache._stored.items()}
        assert held == {layer: local if config.window_of(layer) else pages for layer in range(config.layers)}


@pytest.mark.parametrize(("speculate", "full"), [(0, ()), (4, ()), (0, (1,)), (4, (0,))])
def test_a_window_model_answers_long_prompts_in_few_pages(speculate: int, full: tuple[int, ...]) -> None:
    """Ten windows of prompt in pages for less than seven, beside requests that share its beginning and preempt; where
    a layer has no window, those of the other."""
    config = LLAMA.replace(window=24, context=400, full_layers=full)
    one, draw = served(config), random.Random(5)
    prompts = [[draw.randrange(1, 256) for _ in range(300)]]
    prompts += [prompts[0][:200] + [7, 8, 9] * 8, prompts[0][:40], [5] * 120]
    sampling = Sampling(max_tokens=40, temperature=0, ignore_eos=True)
    few: dict[str, Any] = {"pages": 10, "swap_pages": 4}
    if full:
        few = {"pages": 34, "running": 2, "step_tokens": 64}
    with Engine(one, page_tokens=16, chunk_tokens=48, speculate=speculate, **few) as engine:
        assert engine.limits.local_pages == (12 if full else 0)
        answers = [completion.answers[0].tokens for completion in engine.generate(prompts, sampling)]
        again = [completion.answers[0].tokens for completion in engine.generate(prompts, sampling)]
        assert engine.status.pages_used == 0
        assert again == answers
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer]])
        expected = one.model(tokens, cache=DenseCache(1, 400).extend(tokens.shape[1]))[0]
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == list(answer)


@pytest.mark.parametrize("scheme", ["int8", "int4-g16-affine"])
def test_a_compressed_model_serves_with_its_projections_side_by_side(scheme: str) -> None:
    """Rows of weights are multiplied apart from one another: laying matrices side by side changes no bit."""
    plain, one = served(dtype=torch.float32), served(dtype=torch.float32)
    for made in (plain, one):
        compress_all(made.model, scheme)
    prompts, asked = [[3, 5, 8], [13] * 9], Sampling(max_tokens=5, temperature=0.0)
    with Engine(one, pages=20, page_tokens=4) as engine:
        found = [answer.answers[0].tokens for answer in engine.generate(prompts, asked)]
        heads = engine._core.runner.programs.groups[0].heads
    assert isinstance(heads.layer.kind, FewBits)
    assert heads.widths == [32, 16, 16]
    assert one.model.state_dict().keys() == plain.model.state_dict().keys()
    for prompt, made_tokens in zip(prompts, found, strict=True):
        cache, tokens = DenseCache(1, CONTEXT), list(prompt)
        logits = plain.model(torch.tensor([tokens]), cache=cache.extend(len(tokens)))
        for token in made_tokens:
            # Passes of other sizes add up in another order: the token found is as likely as the likeliest.
            assert logits[0, -1, token] >= logits[0, -1].max() - 1e-4
            logits = plain.model(torch.tensor([[token]]), cache=cache.extend(1))


class RoundingCache(DenseCache):
    """Keys and values as they come back from 8 bits, in one piece of memory."""

    code = "int8"

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int = 0) -> torch.Tensor:
        k, v = (rounded(x.flatten(0, 2), Scheme(self.code)).view(x.shape) for x in (k, v))
        return super().attend(layer, q, k, v, window=window)


@pytest.mark.parametrize(("code", "invariant"), [("int8", False), ("int8", True), ("fp8", False)])
def test_keys_and_values_in_8_bits_are_rounded_and_nothing_else(
    small: ServedModel, code: str, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, swapped pages and shared prefixes change nothing: a token's codes follow from itself."""
    monkeypatch.setattr(RoundingCache, "code", code)
    draw = random.Random(5)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in (1, 9, 30)]
    asked = Sampling(max_tokens=6, temperature=0.0)
    options = {"page_tokens": 4, "chunk_tokens": 7, "step_tokens": 33, "running": 3, "swap_pages": 30, "pages": 16}
    with Engine(small, kv_cache=code, invariant=invariant, **options) as engine:  # type: ignore[arg-type]
        found = [answer.answers[0].tokens for answer in engine.generate(prompts, asked)]
    for prompt, made in zip(prompts, found, strict=True):
        cache, tokens = RoundingCache(1, CONTEXT), list(prompt)
        logits = small.model(torch.tensor([tokens]), cache=cache.extend(len(tokens)))
        for token in made:
            assert token == int(logits[0, -1].argmax())
            logits = small.model(torch.tensor([[token]]), cache=cache.extend(1))
    with pytest.raises(UsageError, match="kv_cache"):
        Engine(small, kv_cache="int4", pages=4)


# Batched = alone = plain ----------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**48))
def test_batched_is_alone_is_plain_sampling(small: ServedModel, seed: int) -> None:
    """Float64: two logits would have to agree to 14 digits for another order of sums to change a token."""
    draw = random.Random(seed)
    opening = [draw.randrange(1, 256) for _ in range(draw.choice((0, 8, 20)))]
    prompts = [
        [*opening, *(draw.randrange(1, 256) for _ in range(draw.choice((1, 2, 7, 20))))]
        for _ in range(draw.choice((2, 6)))
    ]
    asked = Sampling(max_tokens=draw.choice((3, 8)), temperature=draw.choice((0.0, 1.3)), seed=draw.randrange(2**40))
    options = {
        "page_tokens": draw.choice((2, 4, 16)), "chunk_tokens": draw.choice((1, 5, 64)), "step_tokens": 64,
        "running": draw.choice((2, 8)), "swap_pages": draw.choice((0, 30)), "share_prefixes": draw.random() < 0.7,
    }  # fmt: skip
    pages = -(-CONTEXT // int(options["page_tokens"])) * draw.choice((1, 2))
    with Engine(small, pages=pages, **options) as engine:  # type: ignore[arg-type]
        jobs = [engine.submit(prompt, asked, lambda part: None) for prompt in prompts[:2] if draw.random() < 0.3]
        for job in jobs:
            engine.abort(job)
        batched = [completion.answers[0] for completion in engine.generate(prompts, asked)]
        alone = [next(engine.generate([prompt], asked)).answers[0] for prompt in prompts]
        assert engine.status.pages_used == 0
    expected = [plain(small, prompt, asked.max_tokens or 0, asked.temperature, asked.seed or 0) for prompt in prompts]
    assert [list(answer.tokens) for answer in batched] == expected
    assert [answer.tokens for answer in alone] == [answer.tokens for answer in batched]
    for answer in batched:
        assert answer.finish is (FinishReason.STOP if answer.tokens[-1] == 0 else FinishReason.LENGTH)


def test_float32_draws_what_plain_sampling_draws() -> None:
    model = served(dtype=torch.float32)
    prompts = [list(b"to be or not to be"), list(b"to be or not"), list(b"x"), list(b"whether it is nobler")]
    asked = Sampling(max_tokens=20, temperature=0.8, seed=3)
    with Engine(model, pages=24, page_tokens=4, chunk_tokens=7) as engine:
        made = [list(completion.answers[0].tokens) for completion in engine.generate(prompts, asked)]
    assert made == [plain(model, prompt, 20, 0.8, 3) for prompt in prompts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_invariant_answers_have_the_same_bits_whatever_else_runs(dtype: torch.dtype) -> None:
    """Chunks, prefix hits, preemption, swapping, order and company all change; no bit of a log-probability does."""
    model, draw = served(dtype=dtype), random.Random(11)
    opening = [draw.randrange(1, 256) for _ in range(16)]
    prompts = [[*opening, *(draw.randrange(1, 256) for _ in range(length))] for length in (1, 5, 17, 17, 3)]
    asked = Sampling(max_tokens=9, temperature=0.9, seed=4, logprobs=3, ignore_eos=True)
    seen: list[list[Any]] = []
    worlds: list[dict[str, Any]] = [
        {"pages": 200, "share_prefixes": False, "running": 1},
        {"pages": 200, "chunk_tokens": 5},
        {"pages": 16, "chunk_tokens": 50},
        {"pages": 16, "swap_pages": 40, "chunk_tokens": 3},
    ]
    preempted = 0
    for number, world in enumerate(worlds):
        with Engine(model, page_tokens=4, invariant=True, **world) as engine:
            order = draw.sample(range(len(prompts)), len(prompts))
            made = dict(zip(order, engine.generate([prompts[index] for index in order], asked), strict=True))
            seen.append(
                [(made[index].answers[0].tokens, made[index].answers[0].logprobs) for index in range(len(order))]
            )
            preempted += engine.status.preemptions
        assert seen[number] == seen[0]
    assert preempted > 0


# What a request may ask for -------------------------------------------------------------------------------------------


def only(completions: Iterator[Completion]) -> Completion:
    (completion,) = completions
    return completion


def test_each_prompt_may_have_a_sampling_of_its_own(engine: Engine) -> None:
    prompts = ["to be", "or not", "that is"]
    each = [Sampling(max_tokens=number + 2, seed=number, ignore_eos=True) for number in range(3)]
    together = [completion.answers[0].tokens for completion in engine.generate(prompts, each)]
    alone = [
        only(engine.generate(prompt, asked)).answers[0].tokens for prompt, asked in zip(prompts, each, strict=True)
    ]
    assert together == alone
    assert [len(tokens) for tokens in together] == [2, 3, 4]
    with pytest.raises(UsageError, match="3 prompts and 2 samplings"):
        engine.generate(prompts, each[:2])


def test_an_answer_that_nobody_follows_is_told_in_one_part(engine: Engine) -> None:
    parts: dict[bool, list[AnswerPart]] = {False: [], True: []}
    for whole, heard in parts.items():
        done = threading.Event()

        def tell(part: AnswerPart, heard: list[AnswerPart] = heard, done: threading.Event = done) -> None:
            heard.append(part)
            if part.finish is not None:
                done.set()

        engine.submit(engine.encode("to be"), Sampling(max_tokens=12, seed=4, ignore_eos=True), tell, whole=whole)
        assert done.wait(60)
    (only_part,) = parts[True]
    assert len(parts[False]) > 1
    assert only_part.text == "".join(part.text for part in parts[False])
    assert only_part.tokens == tuple(token for part in parts[False] for token in part.tokens)
    assert only_part.finish is parts[False][-1].finish


def test_several_answers_differ_and_each_repeats(engine: Engine) -> None:
    asked = Sampling(max_tokens=8, n=3, seed=5, ignore_eos=True)
    first, second = only(engine.generate("to be or not", asked)), only(engine.generate("to be or not", asked))
    assert [answer.tokens for answer in first.answers] == [answer.tokens for answer in second.answers]
    assert len({answer.tokens for answer in first.answers}) == 3
    # Answer 0 is the one that n=1 gives.
    assert only(engine.generate("to be or not", Sampling(max_tokens=8, seed=5, ignore_eos=True))).answers[0].tokens == (
        first.answers[0].tokens
    )


def test_replicas_draw_each_other_answers_without_a_seed(small: ServedModel) -> None:
    seeds = []
    for replica in range(3):
        with Engine(small, pages=40, page_tokens=4, shared_by=3, replica=replica) as one:
            jobs = [one.submit([5], Sampling(max_tokens=1), lambda part: None) for _ in range(4)]
            seeds += [job.seed for job in jobs]
    assert len(set(seeds)) == 12


def test_requests_without_a_seed_differ_and_an_engines_seed_repeats_them(small: ServedModel) -> None:
    asked = Sampling(max_tokens=6, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        with Engine(small, pages=40, seed=seed) as engine:
            runs.append([completion.answers[0].tokens for completion in engine.generate(["same", "same"], asked)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_logprobs_of_prompt_and_output_are_the_models(small: ServedModel, engine: Engine) -> None:
    prompt = list(b"the prompt of this test")
    asked = Sampling(max_tokens=4, temperature=0.7, seed=1, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    for _ in range(2):  # the second time its pages are in the cache, and the logits are computed all the same
        completion = only(engine.generate([prompt], asked))
        answer = completion.answers[0]
        whole = torch.tensor([prompt + list(answer.tokens)])
        expected = torch.log_softmax(small.model(whole)[0], -1)
        assert completion.found_tokens == 0
        assert [one.token for one in completion.prompt_logprobs] == prompt[1:]
        for position, one in enumerate([*completion.prompt_logprobs, *answer.logprobs], 1):
            row = expected[position - 1]
            assert one.logprob == pytest.approx(float(row[whole[0, position]]), abs=1e-10)
            assert [token for token, _ in one.top] == row.topk(len(one.top)).indices.tolist()
        assert len(answer.logprobs) == 4
        sampled = torch.log_softmax(small.model(whole)[0, len(prompt) - 1 : -1] / 0.7, -1)
        for row, one in zip(sampled, answer.logprobs, strict=True):
            assert one.sampled == pytest.approx(float(row[one.token]), abs=1e-10)
            assert [token for token, _ in one.sampled_top] == row.topk(2).indices.tolist()


def test_stop_tokens_stop_strings_and_length_end_an_answer_with_the_right_reason(engine: Engine) -> None:
    free = only(engine.generate("go", Sampling(max_tokens=30, seed=9, ignore_eos=True))).answers[0]
    assert (free.finish, free.stopped_by, len(free.tokens)) == (FinishReason.LENGTH, None, 30)
    token = free.tokens[12]
    at = free.tokens.index(token)
    stopped = only(
        engine.generate("go", Sampling(max_tokens=30, seed=9, ignore_eos=True, stop_tokens=(token,)))
    ).answers[0]
    assert (stopped.finish, stopped.stopped_by) == (FinishReason.STOP, token)
    assert stopped.tokens == free.tokens[: at + 1]
    assert stopped.text == Bytes().decode(free.tokens[:at])
    ascii_at = next(index for index, token in enumerate(free.tokens) if 32 < token < 127)
    letter = chr(free.tokens[ascii_at])
    ended = only(engine.generate("go", Sampling(max_tokens=30, seed=9, ignore_eos=True, stop=("zzz", letter)))).answers[
        0
    ]
    assert (ended.finish, ended.stopped_by) == (FinishReason.STOP, letter)
    assert ended.tokens == free.tokens[: free.tokens.index(ord(letter)) + 1]
    assert letter not in ended.text


def test_penalties_survive_preemption(small: ServedModel) -> None:
    asked = Sampling(
        max_tokens=24, temperature=0.6, seed=2, ignore_eos=True, repetition_penalty=1.4, frequency_penalty=0.8,
        presence_penalty=0.3, logit_bias={65: 4.0},
    )  # fmt: skip
    prompts = ["aaaa bbbb", "aaaa cccc", "dddd"]
    with Engine(small, pages=100, page_tokens=4) as engine:
        roomy = [completion.answers[0].tokens for completion in engine.generate(prompts, asked)]
        assert engine.status.preemptions == 0
    with Engine(small, pages=12, page_tokens=4) as engine:
        tight = [completion.answers[0].tokens for completion in engine.generate(prompts, asked)]
        assert engine.status.preemptions > 0
    assert roomy == tight


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_guessing_ahead_changes_no_answer(small: ServedModel, temperature: float) -> None:
    """Sampled answers too: a guess is compared with the token that its own random number draws."""
    phrase = list(b"one two three. ")
    prompts = [phrase * 2, phrase[:9] * 3, list(b"nothing here twice")]
    forced = dict.fromkeys(b"one", 30.0)  # few letters: every pair comes again
    guessed = 0
    for extra in ({}, {"logit_bias": forced}, {"frequency_penalty": 0.5, "stop": ("e",), "logit_bias": forced}):
        asked = Sampling(max_tokens=16, temperature=temperature, seed=3, ignore_eos=True, logprobs=1, **extra)  # type: ignore[arg-type]
        made = []
        for speculate in (0, 6):
            with Engine(small, pages=60, page_tokens=8, speculate=speculate) as engine:
                made.append([completion.answers[0] for completion in engine.generate(prompts, asked)])
                guessed += engine.status.guessed
                assert engine.status.guessed == 0 or speculate
                assert engine.status.pages_used == 0
        for plainly, guessing in zip(*made, strict=True):
            assert plainly.tokens == guessing.tokens
            assert (plainly.text, plainly.finish, plainly.stopped_by) == (
                guessing.text,
                guessing.finish,
                guessing.stopped_by,
            )
            assert [one.logprob for one in plainly.logprobs] == pytest.approx(
                [one.logprob for one in guessing.logprobs]
            )
    assert guessed > 20


def test_a_bias_can_forbid_and_force(engine: Engine) -> None:
    forced = only(engine.generate("a", Sampling(max_tokens=3, temperature=0, logit_bias={90: 100.0}))).answers[0]
    assert forced.text == "ZZZ"


@pytest.mark.parametrize(
    ("prompt", "asked", "words"),
    [
        ("", {}, "an empty prompt"),
        ([], {}, "an empty prompt"),
        ([256], {}, "token 256: expected whole numbers from 0 to 255"),
        ([1, True], {}, "token True"),
        ([1, 2.0], {}, "token 2.0"),
        ([1, -1], {}, "token -1"),
        ("x" * (CONTEXT + 1), {}, f"the prompt has {CONTEXT + 1} tokens and the context is {CONTEXT} tokens"),
        ("x", {"max_tokens": CONTEXT + 1}, f"set max_tokens to at most {CONTEXT}"),
        ("x", {"logit_bias": {300: 1.0}}, "token 300: the vocabulary has 256"),
        ("x", {"stop_tokens": (300,)}, "token 300: the vocabulary has 256"),
    ],
)
def test_what_cannot_be_answered_is_refused(engine: Engine, prompt: Any, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        engine.generate([prompt], Sampling(**asked))
    assert engine.status.running == engine.status.waiting == 0


def test_without_max_tokens_the_context_is_the_end(engine: Engine) -> None:
    answer = only(engine.generate("abc", Sampling(ignore_eos=True, seed=1))).answers[0]
    assert (len(answer.tokens), answer.finish) == (CONTEXT + 1 - 3, FinishReason.LENGTH)


# The engine's life ----------------------------------------------------------------------------------------------------


def test_parts_come_as_they_are_made_and_leaving_the_stream_frees_the_pages(engine: Engine) -> None:
    async def first_two() -> list[AnswerPart]:
        parts = []
        async for part in engine.stream("to be", Sampling(max_tokens=40, seed=1, ignore_eos=True)):
            parts.append(part)
            if len(parts) == 2:
                break
        return parts

    async def whole() -> str:
        return "".join([part.text async for part in engine.stream("to be", Sampling(max_tokens=9, seed=1))])

    parts = asyncio.run(first_two())
    assert [len(part.tokens) for part in parts] == [1, 1]
    wait_until(lambda: engine.status.running == 0)
    assert engine.status.pages_used == 0
    assert asyncio.run(whole()) == only(engine.generate("to be", Sampling(max_tokens=9, seed=1))).text


def wait_until(holds: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


def test_an_aborted_job_says_so_and_others_go_on(engine: Engine) -> None:
    heard: list[AnswerPart] = []
    job = engine.submit([1, 2, 3], Sampling(max_tokens=40, ignore_eos=True, seed=1, n=2), heard.append)
    other = only(engine.generate("other", Sampling(max_tokens=5, seed=1)))
    engine.abort(job)
    wait_until(lambda: sum(part.finish is not None for part in heard) == 2)
    assert {part.finish for part in heard if part.finish} == {FinishReason.ABORT}
    assert engine.status.pages_used == 0
    assert other.answers[0].finish in (FinishReason.LENGTH, FinishReason.STOP)
    engine.abort(job)  # too late, and no harm


def test_a_listener_that_fails_ends_its_own_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    heard: list[AnswerPart] = []

    def hear(part: AnswerPart) -> None:
        heard.append(part)
        raise ValueError("nobody is there")

    engine.submit([1, 2, 3], Sampling(max_tokens=40, ignore_eos=True), hear)
    wait_until(lambda: heard and heard[-1].finish is FinishReason.ABORT and engine.status.pages_used == 0)
    assert engine.alive
    assert only(engine.generate("other", Sampling(max_tokens=5, seed=1))).text
    assert {str(each.exc_value) for each in failed} == {"nobody is there"}


def test_a_full_engine_refuses_and_generate_waits_its_turn(small: ServedModel) -> None:
    with Engine(small, pages=40, running=2, waiting=1) as engine:
        jobs = [engine.submit([1], Sampling(max_tokens=40, ignore_eos=True), lambda part: None) for _ in range(3)]
        with pytest.raises(QueueFullError, match="3 requests are under way, of 3 at most"):
            engine.submit([1], Sampling(), lambda part: None)
        assert engine.retry_after_s >= 1
        for job in jobs:
            engine.abort(job)
        assert len(list(engine.generate(["a", "b", "c", "d", "e", "f"], Sampling(max_tokens=3)))) == 6


def test_a_model_that_gives_nan_fails_its_requests_and_the_engine_goes_on(small: ServedModel) -> None:
    broken = served()
    weight = broken.model.token_embedding
    assert weight is not None
    weight.weight[7] = torch.nan  # whoever reads token 7 gets NaN
    with Engine(broken, pages=40, page_tokens=4) as engine:
        heard: list[AnswerPart] = []
        engine.submit([7], Sampling(max_tokens=3), heard.append)
        wait_until(lambda: heard)
        assert heard[0].finish is FinishReason.ERROR
        assert "NaN" in (heard[0].error or "")
        with pytest.raises(RunError, match="NaN"):
            list(engine.generate([[7]], Sampling(max_tokens=3)))
        asked = Sampling(max_tokens=3, temperature=0, logit_bias={7: -100.0})
        assert only(engine.generate([[5, 6]], asked)).answers[0].finish is not FinishReason.ERROR
        assert engine.status.pages_used == 0


def test_a_step_that_fails_ends_its_requests_and_frees_their_pages(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._core.runner, "run", no_memory)
        with pytest.raises(RunError, match="MemoryError: no room"):
            list(engine.generate("a"))
    assert engine.status.pages_used == 0
    assert only(engine.generate("a", Sampling(max_tokens=2))).answers[0].tokens


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["add", "step"])
def test_an_engine_that_fails_tells_requests_that_it_never_began(
    small: ServedModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    heard: list[AnswerPart] = []

    def fail(*_: object) -> None:
        engine.submit([3], Sampling(n=2), heard.append)  # it comes too late for this step
        raise RunError("ranks were lost 6 times")

    with Engine(small, pages=40) as engine:
        monkeypatch.setattr(engine._core, where, fail)
        with engine.together():
            for prompt in ([1], [2]):
                engine.submit(prompt, Sampling(n=2), heard.append)
        engine._thread.join(20)
    assert sorted(part.answer for part in heard) == [0, 0, 0, 1, 1, 1]
    assert {(part.finish, part.error) for part in heard} == {(FinishReason.ERROR, "RunError: ranks were lost 6 times")}


def test_a_closed_engine_has_told_everyone_and_takes_nothing(small: ServedModel) -> None:
    others = threading.enumerate()
    heard: list[AnswerPart] = []
    engine = Engine(small, pages=40)
    engine.submit([1], Sampling(max_tokens=40, ignore_eos=True), heard.append)
    engine.close()
    assert heard[-1].finish is FinishReason.ABORT
    with pytest.raises(RunError, match="read all that `generate` gives, inside of its `with`"):
        engine.submit([1], Sampling(), heard.append)
    drained: list[AnswerPart] = []
    engine = Engine(small, pages=40)
    engine.submit([1], Sampling(max_tokens=20, ignore_eos=True), drained.append)
    engine.close(drain=True)
    assert drained[-1].finish is FinishReason.LENGTH
    left = [thread for thread in threading.enumerate() if thread not in others]
    assert not any(thread.name == "tilemesh-engine" for thread in left)


def test_many_requests_and_cancellations_leak_nothing(small: ServedModel) -> None:
    draw = random.Random(5)
    with Engine(small, pages=30, page_tokens=4, running=8) as engine:
        ended = itertools.count()
        count = [0]

        def heard(part: AnswerPart) -> None:
            if part.finish is not None:
                count[0] = next(ended) + 1

        jobs = []
        for number in range(200):
            prompt = [draw.randrange(1, 256) for _ in range(draw.choice((1, 9, 17)))]
            jobs.append(engine.submit(prompt, Sampling(max_tokens=draw.choice((1, 4, 9)), seed=number), heard))
            if draw.random() < 0.4:
                engine.abort(draw.choice(jobs))
        wait_until(lambda: count[0] == 200, 60)
        assert engine.status.pages_used == engine.status.running == engine.status.waiting == 0
        assert not engine._core._live


def test_memory_and_pages_are_one_or_the_other(small: ServedModel) -> None:
    with pytest.raises(UsageError, match="pages and memory were both given"):
        Engine(small, pages=3, memory=0.5)
    with pytest.raises(UsageError, match=r"memory is 2: expected above 0 and at most 1"):
        Engine(small, memory=2)
    with pytest.raises(UsageError, match="page_tokens is 0"):
        Engine(small, page_tokens=0)
    for device in ("tpu", ",", "meta", "cuda:99"):
        with pytest.raises(UsageError, match=f"device is '{device}'"):
            Engine(small, device=device)
    with pytest.raises(UsageError, match="dtype is 'int8': expected one of fp32"):
        Engine(small, dtype="int8")
    with Engine(small, running=2) as engine:
        assert engine.limits.pages == 2 * CONTEXT // 16


def test_a_container_has_no_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.free_cpu_bytes() > 0
    monkeypatch.setattr(memory, "memory_bytes", lambda: 1 << 45)
    free = memory.free_cpu_bytes()
    monkeypatch.setattr(memory, "memory_bytes", lambda: free // 2)
    assert 0 <= memory.free_cpu_bytes() < free // 2
    monkeypatch.setattr(memory, "memory_bytes", lambda: 4096)
    assert memory.free_cpu_bytes() == 0


def test_engines_that_share_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_cpu_bytes", lambda: 1 << 20)
    pages = [
        memory.choose_limits(
            EngineConfig(memory=share, shared_by=engines), LLAMA.replace(context=1 << 20), torch.float32, 1 << 20,
            torch.device("cpu"), None,
        ).pages
        for share, engines in [(0.8, 1), (0.8, 4), (None, 1), (None, 4)]
    ]  # fmt: skip
    assert [4 * pages[1], 4 * pages[3]] == pytest.approx([pages[0], pages[2]], abs=4)


def test_generated_text_ends_before_an_end_token_of_the_model(small: ServedModel) -> None:
    """As an answer of the server does, also where the context was full and is read again; unless it is to go on."""

    def drawn(*ends: int, **options: Any) -> list[int]:
        model: Any = dataclasses.replace(small, ends=frozenset(ends))
        with Engine(model, running=1) as engine:
            return generate_tokens(engine, [1, 2, 3], 60, Sampling(temperature=2.0, seed=5, **options))

    endless = drawn()
    assert len(endless) == 60
    first_drawn_at = {token: endless.index(token) for token in endless}
    late = max(first_drawn_at, key=first_drawn_at.__getitem__)
    assert first_drawn_at[late] > CONTEXT
    for end in (endless[0], endless[5], late):
        assert drawn(end) == drawn(end, late) == endless[: first_drawn_at[end]]
        assert drawn(end, ignore_eos=True) == endless
    model: Any = dataclasses.replace(small, ends=frozenset(range(256)))
    assert generate(model, "a", tokens=5) == ""
    assert generate(model, "a", tokens=5, ignore_eos=True) != ""


@pytest.mark.parametrize("asleep", [False, True])
def test_an_answer_whose_time_is_over_ends_with_what_it_has(small: ServedModel, asleep: bool) -> None:
    """Running, waiting in line, or waiting for an engine that sleeps; the others go on."""
    with Engine(small, pages=40, page_tokens=4, running=1) as engine:
        if asleep:
            engine.sleep()
        parts: list[AnswerPart] = []
        ended = threading.Semaphore(0)

        def tell(part: AnswerPart) -> None:
            parts.append(part)
            if not asleep and part.finish is None:
                time.sleep(0.02)  # a slow model
            if part.finish is not None:
                ended.release()

        for _ in range(2):
            engine.submit([1, 2, 3], Sampling(max_tokens=40, ignore_eos=True, deadline_s=0.2), tell)
        assert all(ended.acquire(timeout=20) for _ in range(2))
        assert [part.finish for part in parts if part.finish is not None] == [FinishReason.DEADLINE] * 2
        assert bool(sum(len(part.tokens) for part in parts)) != asleep
        assert engine.status.pages_used == 0
        engine.wake()
        assert len(next(engine.generate([[1, 2, 3]], Sampling(max_tokens=5, ignore_eos=True))).answers[0].tokens) == 5
    with pytest.raises(UsageError, match="deadline_s is 0"):
        Sampling(deadline_s=0)
