"""Constraints in the engine, with a model that would rather write something else; and the bytes of real tokenizers."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import RunError, UsageError
from tilemesh.data.tokenizer import Bytes, FileTokenizer
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.jobs import AnswerPart
from tilemesh.serve.load import ServedModel
from tilemesh.serve.replies import chat_logprobs, echoed_logprobs, text_logprobs
from tilemesh.serve.request import FinishReason
from tilemesh.serve.sampling import TokenLogprobs
from tilemesh.serve.text import Spelling, TokenTexts

pytest.importorskip("llguidance")

CONFIG = ModelConfig(
    layers=2, width=32, heads=4, kv_heads=2, vocabulary=260, context=96, norm="rmsnorm", positions="rotary",
    activation="swiglu", biases=False, tied=False,
)  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def small() -> ServedModel:
    model = Transformer(CONFIG, seed=1, dtype=torch.float64).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
    return ServedModel("small", model, Bytes(), frozenset({0}))


def is_person(text: str) -> bool:
    found = json.loads(text)
    known = list(found) in (["name", "age"], ["name", "age", "alive"]) and isinstance(found.get("alive", True), bool)
    return known and bool(re.fullmatch("[A-Z][a-z]{1,6}", found["name"])) and 0 <= found["age"] <= 120


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**48))
def test_an_answer_matches_and_is_the_same_under_any_company(small: ServedModel, seed: int) -> None:
    """Preemption, guesses, chunks, several answers, penalties: the constrained answer stays what it would be alone."""
    draw = random.Random(seed)
    regex = r"(?:ab|é€|[x-z]\d){2,6}(?: end)?"
    checks = {"json_schema": is_person, "regex": lambda text: re.fullmatch(regex, text), "seed": lambda text: True}
    asked = []
    for kind in draw.choices(list(checks), k=3):
        sampling = Sampling(
            max_tokens=40, temperature=draw.choice((0.0, 1.0, 3.0)), n=draw.choice((1, 2)),
            repetition_penalty=draw.choice((1.0, 1.3)), frequency_penalty=draw.choice((0.0, 0.5)),
            top_k=draw.choice((0, 5)), top_p=draw.choice((1.0, 0.9)), ignore_eos=draw.random() < 0.3,
            **{"seed": 1, kind: {"json_schema": PERSON, "regex": regex, "seed": draw.randrange(2**40)}[kind]},
        )  # fmt: skip
        asked.append((list(draw.choices(b"the cat sat", k=draw.choice((1, 9, 20)))), sampling, checks[kind]))
    made: list[dict[int, list[AnswerPart]]] = [{} for _ in asked]
    left, done = sum(sampling.n for _, sampling, _ in asked), threading.Event()

    def teller(number: int) -> Callable[[AnswerPart], None]:
        def tell(part: AnswerPart) -> None:
            nonlocal left
            made[number].setdefault(part.answer, []).append(part)
            left -= part.finish is not None
            if left == 0:
                done.set()

        return tell

    options = {"chunk_tokens": draw.choice((3, 64)), "swap_pages": draw.choice((0, 40))}
    options["speculate"] = draw.choice((0, 4))
    with Engine(small, pages=20, page_tokens=4, **options) as crowded:
        for number, (prompt, sampling, _) in enumerate(asked):
            crowded.submit(prompt, sampling, teller(number))
        assert done.wait(100)
        assert crowded.status.pages_used == 0
    with Engine(small, pages=200, share_prefixes=False) as alone:
        for (prompt, sampling, check), parts in zip(asked, made, strict=True):
            for number, answer in enumerate(next(alone.generate([prompt], sampling)).answers):
                assert tuple(token for part in parts[number] for token in part.tokens) == answer.tokens
                assert parts[number][-1].finish is answer.finish
                if answer.finish is FinishReason.STOP:
                    assert check(answer.text), answer


def test_a_complete_answer_ends_by_itself_and_guesses_do_not_run_past_it(small: ServedModel) -> None:
    sampling = Sampling(max_tokens=40, temperature=0, regex="(abc){6}", ignore_eos=True)
    seen = []
    for guesses in (0, 8):
        with Engine(small, pages=40, page_tokens=4, speculate=guesses) as engine:
            (answer,) = next(engine.generate(["abcabcabc"], sampling)).answers
            seen.append((answer.text, len(answer.tokens), answer.finish, engine.status.pages_used))
            steps = engine.status.steps
    assert seen == [("abc" * 6, 18, FinishReason.STOP, 0)] * 2
    assert steps < 18


def test_a_guess_that_no_text_has_is_wrong_and_a_constraint_that_fails_ends_its_request_alone(
    small: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's vocabulary is larger than the tokenizer's, and a prompt may have such a token."""
    prompt, bound, free = [*b"xa", 258, *b"x"], Sampling(max_tokens=9, regex="(ab){4}"), Sampling(max_tokens=9)
    with Engine(small, pages=40, speculate=4) as engine:
        assert next(engine.generate([prompt], bound)).text == "abababab"
        assert engine.status.guessed > 0
        monkeypatch.setattr("tilemesh.serve.core.Cursor.ahead", lambda cursor, guesses: [][0])
        made = engine.generate([b"x", prompt], [free, bound])
        assert next(made).answers
        with pytest.raises(RunError, match="IndexError: list index"):
            next(made)


def test_a_stop_token_is_only_drawn_where_the_answer_may_end(small: ServedModel) -> None:
    sampling = Sampling(
        max_tokens=30, temperature=5.0, seed=3, n=20, regex="[ab]{2}c*", stop_tokens=(ord("a"), ord("c"))
    )
    with Engine(small, pages=200) as engine:
        for answer in next(engine.generate(["x"], sampling)).answers:
            assert answer.finish is FinishReason.STOP
            assert answer.text == "bb"  # neither is text, and "a" would have ended it too early
            assert answer.stopped_by in (0, ord("a"), ord("c"))


def test_tokens_that_no_text_has_are_never_drawn(small: ServedModel) -> None:
    """The model's vocabulary is larger than the tokenizer's: the rest has no bytes."""
    sampling = Sampling(max_tokens=20, temperature=50.0, seed=1, n=8, regex=r"(.|\n){20}", ignore_eos=True)
    with Engine(small, pages=200) as engine:
        for answer in next(engine.generate(["x"], sampling)).answers:
            assert all(0 < token < 256 for token in answer.tokens)
            if answer.finish is FinishReason.LENGTH:
                continue
            assert len(answer.text) == 20


def test_a_vocabulary_that_cannot_spell_it_fails_that_request_alone(small: ServedModel) -> None:
    class NoDigits(Bytes):
        def spell(self, beginning: bool) -> list[bytes | None]:
            return [None if 48 <= byte <= 57 else bytes([byte]) for byte in range(256)]

    with Engine(ServedModel("less", small.model, NoDigits(), frozenset({0})), pages=40) as engine:
        with pytest.raises(UsageError, match=r"no token of this vocabulary|no text at all"):
            next(engine.generate(["a"], Sampling(max_tokens=9, regex="a{3}1")))
        assert next(engine.generate(["a"], Sampling(max_tokens=9, regex="a{3}"))).text == "aaa"
        with pytest.raises(UsageError, match="look-around"):
            engine.generate(["a"], Sampling(regex="(?=a)"))
        with pytest.raises(UsageError, match="leave one"):
            Sampling(regex="a", json_schema={})


# Tokenizers -----------------------------------------------------------------------------------------------------------


def _tokenizer(kind: str, path: Path) -> FileTokenizer:
    tokenizers = pytest.importorskip("tokenizers")
    models, decoders, trainers = tokenizers.models, tokenizers.decoders, tokenizers.trainers
    texts = ["the cat sat on the mat", "naïve café €uro", "def f(x):\n    return x + 1", '{"a": [1, 2]}'] * 5
    if kind == "bytes":
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        inner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    elif kind == "fallback":  # as Llama 2 has it
        pieces = ["▁", "the", "▁the", "▁cat", "▁▁", "é", "a", '"', "{", "▁{"]
        words = [*(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        inner = tokenizers.Tokenizer(
            models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True)
        )
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        words = ["▁", "the", "▁the", "▁cat", "▁▁", "▁▁a", "a", "é", "<unk>"]
        inner = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "<unk>"))
        inner.decoder = decoders.Metaspace() if kind == "metaspace" else decoders.WordPiece()
    inner.add_special_tokens(["</s>"])
    inner.add_tokens(["plain added"])
    inner.save(str(path))
    return FileTokenizer(path)


def test_logprobs_have_the_bytes_that_tokens_have_in_the_text(tmp_path: Path) -> None:
    """A part of a character is no text, a leading blank is one, and of two tokens with one text the likelier counts."""
    tokenizer = _tokenizer("fallback", tmp_path / "tokenizer.json")
    number = tokenizer._inner.get_vocab()
    the, cat, first, second = (number[text] for text in ("▁the", "▁cat", "<0xC3>", "<0xA9>"))
    top = ((first, -0.1), (second, -3.0), (cat, -4.0), (number["the"], -5.0), (the, -6.0))
    drawn = [TokenLogprobs(token, -1.0, top) for token in (the, first, second, cat)]
    spelling = Spelling(tokenizer)
    told = chat_logprobs(drawn, TokenTexts(spelling))["content"]
    assert b"".join(bytes(one["bytes"]) for one in told) == "theé cat".encode()
    assert [one["token"] for one in told] == ["the", "\ufffd", "\ufffd", " cat"]
    told = text_logprobs(drawn, TokenTexts(spelling, 10))
    assert told["text_offset"] == [10, 13, 13, 14]
    assert told["top_logprobs"][0] == {"\ufffd": -0.1, "cat": -4.0, "the": -5.0}
    assert told["top_logprobs"][1] == {"\ufffd": -0.1, " cat": -4.0, "the": -5.0, " the": -6.0}
    prompt = [number["</s>"], the, cat]  # of which the text has no beginning
    told = echoed_logprobs(prompt, drawn[:1] + drawn[3:], " the cat", spelling)
    assert (told["tokens"], told["text_offset"]) == (["</s>", " the", " cat"], [0, 0, 4])
    assert told["token_logprobs"] == [None, -1.0, -1.0]


@pytest.mark.parametrize("kind", ["bytes", "fallback", "metaspace"])
def test_the_bytes_of_tokens_are_what_the_tokenizer_decodes(kind: str, tmp_path: Path) -> None:
    tokenizer, draw = _tokenizer(kind, tmp_path / "tokenizer.json"), random.Random(4)
    first, later = tokenizer.spell(True), tokenizer.spell(False)
    assert len(first) == len(later) == tokenizer.vocabulary
    assert first[tokenizer.end] is None
    usual = [token for token, content in enumerate(later) if content and first[token]]
    for _ in range(500):
        tokens = draw.choices(usual, k=draw.choice((1, 2, 5)))
        content = (first[tokens[0]] or b"") + b"".join(later[token] or b"" for token in tokens[1:])
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue  # decoders differ in how many characters they put for broken ones
        assert text == tokenizer.decode(tokens), tokens


def test_a_decoder_that_has_no_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="WordPiece"):
        _tokenizer("wordpiece", tmp_path / "tokenizer.json").spell(True)


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_json_comes_out_of_a_real_vocabulary(kind: str, tmp_path: Path) -> None:
    tokenizer = _tokenizer(kind, tmp_path / "tokenizer.json")
    model = Transformer(CONFIG.replace(vocabulary=tokenizer.vocabulary + 7), seed=3).eval().requires_grad_(False)
    served = ServedModel("small", model, tokenizer, frozenset({tokenizer.end}))
    with Engine(served, pages=300) as engine:
        sampling = Sampling(max_tokens=60, temperature=1.0, seed=5, n=8, json_schema=PERSON)
        finished = [one for one in next(engine.generate([[5, 6]], sampling)).answers if one.finish is FinishReason.STOP]
        assert finished
        assert all(is_person(answer.text) for answer in finished)
