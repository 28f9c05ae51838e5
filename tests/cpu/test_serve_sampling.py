"""Tokens from logits, and text from tokens: what a request asked for, whatever else is in the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.data.tokenizer import Bytes, FileTokenizer
from tilemesh.model.config import ModelConfig
from tilemesh.model.sampling import keyed_uniform, keyed_uniforms, pick, stream_key
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Engine
from tilemesh.serve import sampling as drawn_rows
from tilemesh.serve.load import ServedModel
from tilemesh.serve.request import Sampling
from tilemesh.serve.sampling import TokenDraw, draw_tokens, logprobs_of
from tilemesh.serve.text import TextStream
from tilemesh.serve.write import generate

V = 50


def drawing(sampling: Sampling, number: int = 0, tokens: Sequence[int] = (), prompt: int = 0) -> TokenDraw:
    return TokenDraw(sampling, sampling.seed or 0, 0, number, tokens, prompt)


def reference_shares(logits: Sequence[float], drawn: TokenDraw) -> list[float]:
    """What a token is drawn by, by the definition, one number at a time; they need not add up to 1."""
    ask, scores = drawn.sampling, list(logits)
    for token, bias in ask.logit_bias.items():
        scores[token] += bias
    for token in set(drawn.tokens):
        scores[token] = scores[token] / ask.repetition_penalty if scores[token] > 0 else (
            scores[token] * ask.repetition_penalty)  # fmt: skip
    output = list(drawn.tokens[drawn.prompt :])
    for token in set(output):
        scores[token] -= ask.presence_penalty + ask.frequency_penalty * output.count(token)
    if ask.temperature == 0:
        likeliest = max(range(len(scores)), key=lambda token: (scores[token], -token))
        return [float(token == likeliest) for token in range(len(scores))]
    top = max(scores)
    shares = [math.exp((score - top) / ask.temperature) for score in scores]
    least = ask.min_p * max(shares)
    shares = [share if share >= least else 0 for share in shares]
    if 0 < ask.top_k < len(shares):
        least = sorted(shares, reverse=True)[ask.top_k - 1]
        shares = [share if share >= least else 0 for share in shares]
    reached = 0.0
    for share in sorted(shares, reverse=True):
        reached += share
        if reached >= ask.top_p * sum(shares):
            shares = [other if other >= share else 0 for other in shares]
            break
    return shares


def reference(logits: Sequence[float], drawn: TokenDraw) -> int:
    shares = reference_shares(logits, drawn)
    at = keyed_uniform(drawn.seed, drawn.answer, drawn.number) * sum(shares)
    for token, end in enumerate(itertools.accumulate(shares)):
        if at < end:
            return token
    raise AssertionError("no token")


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    some = st.sampled_from
    return Sampling(
        temperature=draw(some([0.0, 0.3, 1.0, 2.5])), top_k=draw(some([0, 0, 1, 3, 10, 99])),
        top_p=draw(some([1.0, 1.0, 0.9, 0.3, 0.01])), min_p=draw(some([0.0, 0.0, 0.05, 0.5])),
        repetition_penalty=draw(some([1.0, 1.0, 1.7, 0.6])), presence_penalty=draw(some([0.0, 0.0, 1.1, -0.4])),
        frequency_penalty=draw(some([0.0, 0.0, 0.7, -0.2])), seed=draw(st.integers(0, 2**63 - 1)),
        logit_bias=draw(st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=3)),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(samplings(), min_size=1, max_size=6), st.integers(0, 2**31))
def test_each_row_is_drawn_from_by_its_own_definition(asked: list[Sampling], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(asked), V, generator=generator, dtype=torch.float64) * 3
    drawings = []
    for number, sampling in enumerate(asked):
        tokens = torch.randint(0, V, (number * 3,), generator=generator).tolist()
        drawings.append(drawing(sampling, number, tokens, number))
    together = draw_tokens(logits, drawings)
    assert together == [reference(row, one) for row, one in zip(logits.tolist(), drawings, strict=True)]
    assert together == [draw_tokens(logits[row : row + 1], [one])[0] for row, one in enumerate(drawings)]
    for row, told in enumerate(logprobs_of(logits, together, 4, drawings)):
        shares = reference_shares(logits[row].tolist(), drawings[row])
        logs = {token: math.log(share / sum(shares)) for token, share in enumerate(shares) if share > 0}
        assert told.sampled == pytest.approx(logs[together[row]], abs=1e-12)
        assert [value for _, value in told.sampled_top] == pytest.approx(sorted(logs.values())[::-1][:4], abs=1e-12)
        assert all(value == pytest.approx(logs[token], abs=1e-12) for token, value in told.sampled_top)
        own = torch.log_softmax(logits[row], -1)
        assert told.logprob == pytest.approx(float(own[together[row]]), abs=1e-12)


def test_tokens_come_as_often_as_they_should() -> None:
    """A chi-squared test over 20,000 keyed draws; beyond 1 in a million for 7 degrees of freedom."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -1.0, 1.5, 0.2]])
    shares = torch.softmax(logits[0].double(), 0)
    uniform = torch.tensor([keyed_uniform(7, 0, number) for number in range(20_000)], dtype=torch.float64)
    drawn = pick(shares.expand(len(uniform), -1), uniform)
    expected = shares * len(uniform)
    found = torch.bincount(drawn, minlength=len(shares))
    assert float(((found - expected) ** 2 / expected).sum()) < 40.5


def test_random_numbers_are_keyed_by_seed_answer_and_place() -> None:
    keys = list(itertools.product((0, 1, 2**63 - 1), (0, 1), (0, 1, 2)))
    assert len({keyed_uniform(*key) for key in keys}) == len(keys)
    assert all(0 <= keyed_uniform(*key) < 1 for key in keys)
    streams = np.array([stream_key(seed, answer) for seed, answer, _ in keys], np.uint64)
    together = keyed_uniforms(streams, np.array([number for *_, number in keys]))
    assert together.tolist() == [keyed_uniform(*key) for key in keys]


def test_random_numbers_are_splitmix64s() -> None:
    """Its first numbers from 0 on, as its authors' program (`java.util.SplittableRandom`) gives them."""
    assert keyed_uniforms(np.zeros(3, np.uint64), np.arange(3)).tolist() == [
        (bits >> 11) / 2**53 for bits in (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    ]


def test_a_token_without_a_share_is_never_picked() -> None:
    shares = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    assert pick(shares, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 1, 1]


def test_of_a_large_vocabulary_the_sum_that_top_p_looks_at_may_need_all_of_it() -> None:
    even = torch.zeros(1, 5000)
    asked = [drawing(Sampling(top_p=0.9, seed=seed)) for seed in range(20)]
    assert draw_tokens(even.expand(20, -1).contiguous(), asked) == draw_tokens(
        even.expand(20, -1).contiguous(), [drawing(Sampling(seed=seed)) for seed in range(20)]
    )  # all are as likely as the last one kept: none is dropped


def test_the_smallest_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert draw_tokens(logits, [drawing(Sampling(temperature=1e-320, seed=1))]) == [1]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 5.0]])
    first, second = logprobs_of(logits, [2, 0], 2)
    expected = torch.log_softmax(logits, -1)
    assert first.logprob == pytest.approx(float(expected[0, 2]))
    assert [token for token, _ in first.top] == [1, 2]
    assert second.top[0] == (2, pytest.approx(float(expected[1, 2])))
    assert logprobs_of(logits, [0, 0], 0)[0].top == ()
    assert first.sampled is None  # nobody drew it
    drawn = logprobs_of(logits, [2, 0], 2, [drawing(Sampling(top_k=9)), drawing(Sampling(temperature=0.5))])
    # Where nothing stands between the model and the draw, both are the same bits.
    assert (drawn[0].sampled, drawn[0].sampled_top) == (drawn[0].logprob, drawn[0].top) == (first.logprob, first.top)
    assert drawn[1].sampled == pytest.approx(float(torch.log_softmax(2 * logits[1], -1)[0]))


# Text -----------------------------------------------------------------------------------------------------------------

TEXTS = ["plain", "grüße aus Köln", "日本語 text 😀👍🏽 end", "a\ufffdb", "", "😀"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_become_characters_when_they_are_whole(text: str) -> None:
    stream = TextStream(Bytes())
    given = [stream.add([byte]) for byte in text.encode()]
    given.append(stream.add([], last=True))
    assert "".join(given) == text
    assert all("\ufffd" not in part for part in given) or "\ufffd" in text
    # Nothing is late: after each character's last byte it is there, unless it is the replacement character itself.
    if "\ufffd" not in text:
        ends = list(itertools.accumulate(len(character.encode()) for character in text))
        for number, end in enumerate(ends):
            assert "".join(given[:end]) == text[: number + 1]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.randoms(use_true_random=False))
def test_any_bytes_in_any_portions_become_what_they_decode_to(content: bytes, random: object) -> None:
    stream, given, at = TextStream(Bytes()), "", 0
    while at < len(content):
        step = random.randint(1, 4)  # type: ignore[attr-defined]
        given += stream.add(content[at : at + step])
        at += step
    assert given + stream.add([], last=True) == content.decode(errors="replace")


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab😀c", max_size=25), st.lists(st.text("ab😀", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_stop_strings_are_found_under_every_split(text: str, stops: list[str], random: object) -> None:
    def expected() -> tuple[str, str | None]:
        for end in range(len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found:
                longest = max(found, key=len)
                return text[: end - len(longest)], longest
        return text, None

    content, at, given = text.encode(), 0, ""
    stream = TextStream(Bytes(), stops)
    while at < len(content):
        step = random.randint(1, 7)  # type: ignore[attr-defined]
        given += stream.add(content[at : at + step])
        at += step
        assert text.startswith(given)
    given += stream.add([], last=True)
    assert (given, stream.stopped) == expected()


@pytest.fixture(scope="module")
def trained_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(["to be or not to be, that is the question"] * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return FileTokenizer(path)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_words_and_of_characters_become_text(text: str, trained_tokenizer: FileTokenizer) -> None:
    whole = f"to be {text} question"
    stream = TextStream(trained_tokenizer, ["tion!"])
    tokens = trained_tokenizer.encode(whole.encode()).tolist()
    assert len(tokens) < len(whole.encode())
    assert "".join([*(stream.add([token]) for token in tokens), stream.add([], last=True)]) == whole


def test_a_tokenizer_that_drops_a_leading_space_keeps_those_between_words(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁to": 0, "▁be": 1, "▁or": 2, "x": 3}, unk_token="x"))
    inner.pre_tokenizer, inner.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    stream = TextStream(FileTokenizer(tmp_path / "tokenizer.json"))
    assert "".join(stream.add([token]) for token in (0, 1, 2, 3, 1)) == "to be orx be"
    model = Transformer(ModelConfig(layers=1, width=8, heads=2, vocabulary=4, context=16), seed=0)
    served = ServedModel("words", model.requires_grad_(False), FileTokenizer(tmp_path / "tokenizer.json"), frozenset())
    asked = Sampling(max_tokens=2, temperature=0, logit_bias={1: 100.0})
    with Engine(served, pages=8) as engine:  # an answer goes on with its prompt
        both = engine.generate(["to or"] * 2, [asked, replace(asked, stop=(" be",))])
        assert [completion.text for completion in both] == [" be be", ""]
        (drawn,) = engine.generate("to or", Sampling(max_tokens=3, temperature=0))
    written = generate(served, "to or", tokens=3, temperature=0)  # type: ignore[arg-type]
    assert "to or" + written == served.tokenizer.decode([0, 2, *drawn.answers[0].tokens])


def test_rows_of_exact_mode_are_drawn_together_and_by_as_many_rows_whoever_is_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    draw = drawn_rows.draw_tokens
    monkeypatch.setattr(drawn_rows, "draw_tokens", lambda rows, some: (seen.append(len(rows)), draw(rows, some))[1])
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(3)) * 3
    asked = [drawing(Sampling(temperature=(0.0, 1.0, 1.4)[row % 3], top_k=row % 2 * 9), row) for row in range(40)]
    together = drawn_rows.draw_evenly(logits, asked)
    assert len(seen) == 3  # not 40
    assert together == [drawn_rows.draw_evenly(logits[row : row + 1], asked[row : row + 1])[0] for row in range(40)]
    assert together == draw(logits, asked)
    assert set(seen) == {16}
