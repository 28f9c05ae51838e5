"""A draft model: answers are what they are without one, whatever it guesses; guesses are made where they pay."""

from __future__ import annotations

import random
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.data.tokenizer import Bytes
from tilemesh.model.config import ModelConfig
from tilemesh.model.sampling import shares
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.load import ServedModel
from tilemesh.serve.memory import choose_pages
from tilemesh.serve.speculate import DraftLengths

HAS_GUIDANCE = find_spec("llguidance") is not None  # which constrains answers
CONFIG = ModelConfig(
    layers=3, width=32, heads=4, kv_heads=2, vocabulary=256, context=80, norm="rmsnorm", positions="rotary",
    activation="swiglu", biases=False, tied=False,
)  # fmt: skip


def served(layers: int = 3, config: ModelConfig = CONFIG, doubt: float = 0.02) -> ServedModel:
    """Models of one and three layers that mostly agree: the layers after the first add little."""
    whole = Transformer(config, seed=1, dtype=torch.float64)
    model = Transformer(config.replace(layers=layers), seed=1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
        for name, parameter in model.named_parameters():
            parameter.copy_(whole.get_parameter(name))
        for layer in list(model.layers)[1:]:
            for name, parameter in layer.named_parameters():
                if name.endswith(("fc_o.weight", "fc_out.weight")):
                    parameter.mul_(doubt)
    return ServedModel("small", model.eval().requires_grad_(False), Bytes(), frozenset({0}))


@pytest.fixture(scope="module")
def target() -> ServedModel:
    return served()


@pytest.fixture(scope="module")
def small_draft() -> ServedModel:
    return served(1)


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**48))
def test_answers_are_those_without_a_draft_model(target: ServedModel, small_draft: ServedModel, seed: int) -> None:
    """Greedy and sampled, with filters, penalties and constraints, under preemption, swapping, chunks and hits."""
    draw = random.Random(seed)
    opening = [draw.randrange(1, 256) for _ in range(9)]
    prompts = [[*opening, *(draw.randrange(1, 256) for _ in range(draw.choice((1, 3, 14))))] for _ in range(5)]
    sampling = Sampling(
        max_tokens=24, temperature=draw.choice((0.0, 0.8)), seed=draw.randrange(2**40), n=draw.choice((1, 2)),
        top_p=draw.choice((1.0, 0.9)), repetition_penalty=draw.choice((1.0, 1.2)), logprobs=1,
        regex=draw.choice((None, None, "[a-f]+ (x|yz){3}" if HAS_GUIDANCE else None)), ignore_eos=draw.random() < 0.5,
    )  # fmt: skip
    options = {"page_tokens": 4, "chunk_tokens": draw.choice((3, 64)), "swap_pages": draw.choice((0, 30))}
    other = draw.choice((small_draft, served(1, doubt=3.0), served(3, doubt=0.02)))
    with Engine(
        target, pages=draw.choice((24, 100)), draft=other, speculate=draw.choice((1, 3, 6)), **options
    ) as engine:
        made = list(engine.generate(prompts, sampling))
        assert engine.status.pages_used == 0
        assert engine.status.guessed > 0
    with Engine(target, pages=200, share_prefixes=False) as engine:
        alone = list(engine.generate(prompts, sampling))
    for one, other_one in zip(made, alone, strict=True):
        assert [answer.tokens for answer in one.answers] == [answer.tokens for answer in other_one.answers]
        assert [answer.finish for answer in one.answers] == [answer.finish for answer in other_one.answers]


def test_a_draft_that_is_the_model_itself_is_always_right(target: ServedModel) -> None:
    """Sampled, too: both draw with the same random number."""
    for temperature in (0.0, 1.0):
        sampling = Sampling(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
        with Engine(target, pages=40, page_tokens=16, draft=target, speculate=4) as engine:
            engine._guesser.best = lambda right, most: most  # type: ignore[union-attr, method-assign]
            next(engine.generate(["to be or not"], sampling))
            assert engine.status.guessed_right > 20
            assert engine.status.steps < 25
            # The last guesses are judged when the request comes again, which a request that has ended does not.
            assert engine.status.guessed - engine.status.guessed_right <= 4


def test_sampled_tokens_come_as_often_as_the_model_says(target: ServedModel, small_draft: ServedModel) -> None:
    """Chi-squared over the second token of 1,500 answers: the first is a guess's place, the second what follows it.

    With 8 classes (7 degrees of freedom) a value above 29.9 has a probability of 1e-4 in a sound sampler; the seeds are
    fixed, so it either always passes or never."""
    prompt, seeds = list(b"ab"), range(1500)
    with Engine(target, pages=4000, draft=small_draft, speculate=3, running=64, waiting=2000, seed=9) as engine:
        engine._guesser.best = lambda right, most: most  # type: ignore[union-attr, method-assign]
        sampling = Sampling(max_tokens=3, temperature=1.0, ignore_eos=True, n=100)
        pairs = [
            answer.tokens[:2]
            for number in range(0, len(seeds), 100)
            for answer in next(engine.generate([prompt], Sampling(**{**sampling.__dict__, "seed": number}))).answers
        ]
        assert engine.status.guessed > 1000
    first = shares(target.model(torch.tensor([prompt]))[0, -1:], torch.tensor([1.0]))[0]
    ranked = first.argsort(descending=True)[:7].tolist()
    expected = [float(first[token]) for token in ranked]
    expected.append(1 - sum(expected))
    counts = Counter(pair[0] if pair[0] in ranked else -1 for pair in pairs)
    seen = [*(counts[token] for token in ranked), counts[-1]]
    chi = sum(
        (count - len(pairs) * share) ** 2 / (len(pairs) * share) for count, share in zip(seen, expected, strict=True)
    )
    assert chi < 29.9
    most = max(counts, key=lambda token: counts[token] if token >= 0 else 0)
    second = shares(target.model(torch.tensor([[*prompt, most]]))[0, -1:], torch.tensor([1.0]))[0]
    top = second.argsort(descending=True)[:3].tolist()
    after = Counter(pair[1] if pair[1] in top else -1 for pair in pairs if pair[0] == most)
    total = sum(after.values())
    odds = [float(second[token]) for token in top]
    odds.append(1 - sum(odds))
    seen = [*(after[token] for token in top), after[-1]]
    chi = sum((count - total * share) ** 2 / (total * share) for count, share in zip(seen, odds, strict=True))
    assert chi < 21.1  # 3 degrees of freedom, 1e-4


def test_what_does_not_fit_is_refused_and_pages_count_both_models(target: ServedModel) -> None:
    with pytest.raises(UsageError, match="vocabulary of 300 and the served one of 256"):
        Engine(target, pages=9, draft=served(1, CONFIG.replace(vocabulary=300)))
    with pytest.raises(UsageError, match="context is 40 tokens, and requests may have 80"):
        Engine(target, pages=9, draft=served(1, CONFIG.replace(context=40)))
    with pytest.raises(UsageError, match="nowhere"):
        Engine(target, pages=9, draft=Path("nowhere"))
    alone, both = (
        choose_pages(CONFIG, torch.float32, 16, 2**40, 0.5, torch.device("cpu"), draft)
        for draft in (None, CONFIG.replace(layers=1))
    )
    assert both == pytest.approx(alone * 3 / 4, rel=0.05)  # memory that others take or give back meanwhile


def test_as_many_are_guessed_as_pay() -> None:
    """Tokens per second by the formula, with times that are made up."""
    lengths = DraftLengths(8)
    assert lengths.best(0.9, 8) == 2  # nothing is timed yet
    for tokens in (1, 3, 5, 9):
        lengths.observe(1, tokens, 0.010 + 0.0001 * tokens, 2, 0.002)  # passes cost a tenth of a step
    assert lengths.pass_s == pytest.approx(0.001)
    assert lengths._line() == pytest.approx((0.010, 0.0001), rel=1e-6)
    for right in (0.1, 0.5, 0.8, 0.95):
        speeds = [sum(right**n for n in range(k + 1)) / (0.010 + 0.0001 * (1 + k) + 0.001 * k) for k in range(9)]
        assert lengths.best(right, 8) == max(range(9), key=lambda k: speeds[k])
    assert lengths.best(0.05, 8) == 0  # it does not pay
    assert lengths.best(0.95, 8) == 8
    crowded = DraftLengths(8)
    for tokens in (64, 128, 192):
        crowded.observe(64, tokens, 0.001 * tokens, 2, 0.002)  # every token costs as much as a token
    assert crowded.best(0.9, 8) in (0, 2)
    crowded.observe(64, 64, 0.064, 2, 0.002)
    assert crowded.best(0.9, 8) == 0


def test_a_draft_model_that_is_wrong_is_soon_asked_no_more(target: ServedModel) -> None:
    wrong = served(1, doubt=1.0)
    with torch.no_grad():
        assert wrong.model.output is not None
        wrong.model.output.weight.neg_()
    sampling = Sampling(max_tokens=70, temperature=0, ignore_eos=True)
    with Engine(target, pages=40, draft=wrong, speculate=4) as engine:
        lengths = engine._guesser
        assert isinstance(lengths, DraftLengths)
        lengths.observe = lambda *told: None  # type: ignore[method-assign]
        lengths._timed, lengths._sums, lengths.pass_s = 9, [1, 1, 0.01, 1, 0.01], 0.004
        next(engine.generate(["x"], sampling))
        assert engine.status.guessed < 20
        assert engine.status.guessed_right == 0
