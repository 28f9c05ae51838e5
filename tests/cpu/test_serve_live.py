"""Weights that change while an engine serves: it answers as one that was started with them, and says who made what."""

from __future__ import annotations

import functools
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilemesh as tm
from tilemesh.core.errors import RunError, UsageError
from tilemesh.data.tokenizer import Bytes
from tilemesh.model import huggingface
from tilemesh.model.cache import DenseCache
from tilemesh.model.config import ModelConfig
from tilemesh.model.packed import packs
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Answer, Engine, Sampling
from tilemesh.serve.answers import collect
from tilemesh.serve.attention import StoredPages
from tilemesh.serve.jobs import AnswerPart, PromptJob
from tilemesh.serve.live import WhileRunning
from tilemesh.serve.load import ServedModel, load_served
from tilemesh.serve.request import FinishReason

CONFIG = ModelConfig(
    layers=2, width=32, heads=4, kv_heads=2, vocabulary=256, context=96, norm="rmsnorm", positions="rotary",
    activation="swiglu", biases=False, tied=False,
)  # fmt: skip
PROMPT = list(b"a prompt of more than one page of tokens")
ASKED = Sampling(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True, logprobs=0)


def model_of(seed: int, dtype: torch.dtype = torch.float64, config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config, seed=seed, dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
    return model


def served(seed: int, dtype: torch.dtype = torch.float64) -> ServedModel:
    return ServedModel("small", model_of(seed, dtype), Bytes(), frozenset({0}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one kind, exported."""
    path = tmp_path_factory.mktemp("live")
    for seed in (1, 2):
        huggingface.save(model_of(seed), path / str(seed))
    return path / "1", path / "2"


def answer_of(engine: Engine) -> Answer:
    ((answer,),) = (completion.answers for completion in engine.generate([PROMPT], ASKED))
    return answer


@functools.cache
def fresh_answer(seed: int, **settings: object) -> Answer:
    """Of an engine that was started with these weights."""
    with Engine(served(seed), pages=60, page_tokens=4, **settings) as engine:
        return answer_of(engine)


def same(ours: Answer, theirs: Answer) -> bool:
    """Tokens, and log-probabilities as far as float64 gives them in batches of any shape."""
    values = [told.logprob for told in theirs.logprobs]
    return ours.tokens == theirs.tokens and [told.logprob for told in ours.logprobs] == pytest.approx(values, abs=1e-10)


class Listening:
    """A job that can be caught in the middle of its answer."""

    def __init__(self, engine: Engine, asked: Sampling = ASKED, after: int = 3, whole: bool = False) -> None:
        self.parts: list[AnswerPart] = []
        self.midway, self.done = threading.Event(), threading.Event()
        self.go_on = threading.Event()
        self._after = after
        self.job: PromptJob = engine.submit(PROMPT, asked, self._tell, whole=whole)

    def _tell(self, part: AnswerPart) -> None:
        self.parts.append(part)
        if len(self.parts) == self._after:
            self.midway.set()
            assert self.go_on.wait(60)  # the engine's thread: no step is taken meanwhile
        if part.finish is not None:
            self.done.set()

    def answer(self) -> Answer:
        assert self.done.wait(60)
        return collect(self.job, self.parts).answers[0]


def ask_midway(engine: Engine, listening: Listening, call: Callable[[], object]) -> threading.Thread:
    """Have the engine asked for something while it is in the middle of an answer, which then goes on."""
    waiting = len(engine._inbox)  # its thread is held: nothing is taken from there
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while len(engine._inbox) == waiting:
        assert time.monotonic() < end
        time.sleep(0.001)
    listening.go_on.set()
    return thread


# From where -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"invariant": True}, {"launch_ahead": True}, {"speculate": 3}])
def test_an_engine_with_new_weights_is_one_that_was_started_with_them(settings: dict[str, bool]) -> None:
    before, after = fresh_answer(1, **settings), fresh_answer(2, **settings)
    with Engine(served(1), pages=60, page_tokens=4, **settings) as engine:
        assert same(answer_of(engine), before)
        memory = {name: tensor.data_ptr() for name, tensor in engine.served.model.named_parameters()}
        assert engine.update_weights(dict(model_of(2).named_parameters()), 7) == 7
        assert memory == {name: tensor.data_ptr() for name, tensor in engine.served.model.named_parameters()}
        changed = answer_of(engine)
        assert same(changed, after)
        assert not same(changed, before)
        if "invariant" in settings:
            assert changed.logprobs == after.logprobs  # bit for bit
        assert changed.versions == (7,) * 24
        assert engine.update_weights(model_of(1)) == 8  # a model, the next version
        assert same(answer_of(engine), before)


def test_weights_come_from_folders_and_are_cast_once(folders: tuple[Path, Path]) -> None:
    with Engine(folders[0], pages=60, page_tokens=4, dtype="fp32") as engine, Engine(folders[1], dtype="fp32") as other:
        engine.update_weights(folders[1])
        for (name, ours), theirs in zip(
            engine.served.model.named_parameters(), other.served.model.parameters(), strict=True
        ):
            assert ours.dtype == torch.float32
            assert torch.equal(ours, theirs), name


def test_tensors_that_are_the_engines_memory_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that steps the weights that serve: nothing is copied, and everything computed from them is dropped."""
    expected = fresh_answer(2)
    with Engine(served(1), pages=60, page_tokens=4) as engine:
        answer_of(engine)
        owned = dict(engine.served.model.named_parameters())
        for name, tensor in model_of(2).named_parameters():
            owned[name].data.copy_(tensor)  # .data: no version of torch's counts it
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", lambda *args, **more: pytest.fail("copied"))
            engine.update_weights(owned)
        assert same(answer_of(engine), expected)


@pytest.mark.skipif(not packs(torch.float32), reason="this CPU has no products of weights laid out before")
def test_packed_copies_follow() -> None:
    with Engine(served(2, torch.float32), pages=60, packed=True) as engine:
        expected = answer_of(engine)
    with Engine(served(1, torch.float32), pages=60, packed=True) as engine:
        owned = dict(engine.served.model.named_parameters())
        assert not same(answer_of(engine), expected)
        for name, tensor in model_of(2, torch.float32).named_parameters():
            owned[name].data.copy_(tensor)
        engine.update_weights(owned)
        assert answer_of(engine).logprobs == expected.logprobs  # the same batches: the same bits


def test_nothing_that_older_weights_computed_is_found() -> None:
    expected = fresh_answer(2)
    with Engine(served(1), pages=60, page_tokens=4) as engine:
        answer_of(engine)
        (again,) = engine.generate([PROMPT], ASKED)
        assert again.found_tokens == 36
        engine.update_weights(model_of(2))
        assert engine.status.pages_idle == 0
        (changed,) = engine.generate([PROMPT], ASKED)
        assert changed.found_tokens == 0
        assert same(changed.answers[0], expected)
        (again,) = engine.generate([PROMPT], ASKED)
        assert again.found_tokens == 36  # and what the new ones computed is


def test_weights_come_from_runs_at_a_step_and_with_adapters_merged(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    fixed = "train.batch=2,train.device=cpu,plan.dp=1,plan.tp=1,evaluate.every=0,sample.tokens=0,train.context=16"
    runs = []
    for name, more in (
        ("all", "optimizer.lr=0.05,checkpoint.every=1,train.steps=2"),
        ("low", "lora.rank=2,train.steps=1"),
    ):
        sets = [fixed, more, f"data.source={tmp_path / 'text.txt'}"]
        config = tm.train.load_config(sets=sets, init=folders[0])
        runs.append(tm.train.fit(config, run=tmp_path / name, init=folders[0]).folder)
    with Engine(runs[0], step=1) as engine:
        for run, step in ((runs[0], None), (runs[1], None), (runs[0], 1)):
            engine.update_weights(run, step=step)
            expected = load_served(run, step=step).model
            for (name, ours), theirs in zip(engine.served.model.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(ours, theirs.to(ours.dtype)), name
        with pytest.raises(UsageError, match="no checkpoint of step 9"):
            engine.update_weights(runs[0], step=9)


# Requests under way -------------------------------------------------------------------------------------------------


def caught(under_way: WhileRunning, asked: Sampling = ASKED, **settings: int) -> tuple[Answer, Answer]:
    """An answer during which weights changed, and one that was asked for just before."""
    with Engine(served(1), pages=60, page_tokens=4, **settings) as engine:
        first = Listening(engine, asked)
        assert first.midway.wait(60)
        second = Listening(engine, asked, after=100)
        thread = ask_midway(engine, first, lambda: engine.update_weights(model_of(2), 5, running=under_way))
        answers = first.answer(), second.answer()
        thread.join(60)
        assert engine.version == 5
        return answers


@pytest.mark.parametrize("settings", [{}, {"speculate": 3}])
def test_requests_finish_with_old_weights_and_those_that_wait_begin_with_new_ones(settings: dict[str, int]) -> None:
    first, second = caught("finish", **settings)
    assert same(first, fresh_answer(1))
    assert first.versions == (0,) * 24
    assert same(second, fresh_answer(2))
    assert second.versions == (5,) * 24


def test_requests_are_computed_again_and_go_on_with_new_weights() -> None:
    first, second = caught("recompute")
    old = fresh_answer(1)
    kept = first.versions.index(5)
    assert 0 < kept < 24
    assert first.versions == (0,) * kept + (5,) * (24 - kept)
    assert first.tokens[:kept] == old.tokens[:kept]
    # What follows is what the new model writes after prompt and beginning: whatever was in pages is its own.
    with Engine(served(2), pages=60, page_tokens=4) as engine:
        parts: list[AnswerPart] = []
        done = threading.Event()

        def tell(part: AnswerPart) -> None:
            parts.append(part)
            if part.finish is not None:
                done.set()

        rest = Sampling(max_tokens=24 - kept, temperature=0.8, seed=4, ignore_eos=True, logprobs=0)
        job = engine.submit([*PROMPT, *first.tokens[:kept]], rest, tell, drawn=kept)
        assert done.wait(60)
        expected = collect(job, parts).answers[0]
    assert same(replace(first, tokens=first.tokens[kept:], logprobs=first.logprobs[kept:]), expected)
    assert same(second, fresh_answer(2))


@pytest.mark.parametrize("under_way", ["finish", "carry", "recompute"])
def test_a_step_that_was_launched_ahead_is_of_the_weights_that_it_was_launched_with(under_way: WhileRunning) -> None:
    plain = Sampling(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True)
    (first, second), (ahead, ahead_second) = (caught(under_way, plain, launch_ahead=ahead) for ahead in (False, True))
    old = fresh_answer(1).tokens
    changed = ahead.versions.count(0)
    assert ahead.tokens[:changed] == old[:changed]
    assert (ahead.tokens == old) == (under_way == "finish")
    assert ahead_second.tokens == second.tokens == fresh_answer(2).tokens
    if changed == first.versions.count(0):  # a step ahead, it may have drawn one more
        assert ahead.tokens == first.tokens


def test_requests_are_carried_over_with_their_pages() -> None:
    """The oracle is the model itself, with a cache that both weights fill in turn."""
    first, second = caught("carry", running=1)  # so the second begins when the first has left its pages
    kept = first.versions.index(5)
    whole = [*PROMPT, *first.tokens]
    cache, values = DenseCache(1, 96), list[float]()
    for model, begin, end in ((model_of(1), 0, len(PROMPT) + kept - 1), (model_of(2), len(PROMPT) + kept - 1, 63)):
        logits = model(torch.tensor([whole[begin:end]]), cache=cache.extend(end - begin))[0]
        logprobs = torch.log_softmax(logits, -1)
        values += [float(logprobs[at, whole[begin + at + 1]]) for at in range(end - begin)]
    assert [told.logprob for told in first.logprobs] == pytest.approx(values[len(PROMPT) - 1 :], abs=1e-10)
    assert same(second, fresh_answer(2))  # and finds nothing of the one that was carried


def test_a_carried_request_that_was_swapped_out_publishes_nothing() -> None:
    asked = Sampling(max_tokens=50, temperature=0.8, seed=4, ignore_eos=True)
    with Engine(served(1), pages=24, page_tokens=4, swap_pages=24) as engine:
        heard = [Listening(engine, asked, after=25 if number == 0 else 100) for number in range(3)]
        assert heard[0].midway.wait(60)
        thread = ask_midway(engine, heard[0], lambda: engine.update_weights(model_of(2), running="carry"))
        for listening in heard:
            listening.answer()
        thread.join(60)
        assert engine.status.preemptions > 0
        assert same(answer_of(engine), fresh_answer(2))


def test_an_answer_that_is_told_as_a_whole_has_the_version_of_every_token() -> None:
    plain = Sampling(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True)
    with Engine(served(1), pages=60, page_tokens=4) as engine:
        silent = Listening(engine, plain, after=100, whole=True)
        gate = Listening(engine, plain)
        assert gate.midway.wait(60)
        thread = ask_midway(engine, gate, lambda: engine.update_weights(model_of(2), running="carry"))
        assert set(gate.answer().versions) == {0, 1}
        answer = silent.answer()
        thread.join(60)
        assert len(silent.parts) == 2
        assert answer.versions == tuple(sorted(answer.versions))
        assert set(answer.versions) == {0, 1}
        assert len(answer.versions) == len(answer.tokens) == 24


# Refused ------------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_change_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    whole = dict(model_of(2).named_parameters())
    name = "layers.1.attention.fc_k.weight"
    huggingface.save(model_of(2, config=ModelConfig(**{**vars(CONFIG), "rotary_base": 5000.0})), tmp_path / "other")
    huggingface.save(model_of(2), tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused: list[tuple[object, str]] = [
        ({key: value for key, value in whole.items() if key != name}, f"{name} is missing; nothing was changed"),
        ({**whole, "more.weight": whole[name]}, "more.weight is no parameter of this model"),
        ({**whole, name: whole[name][:4]}, r"fc_k.weight is floating point of shape \(4, 32\), expected .* \(16, 32\)"),
        ({**whole, name: whole[name].int()}, "is int32 of shape"),
        ({**whole, name: whole[name].to("meta")}, "expected a tensor that has values"),
        ({**whole, name: whole[name].numpy()}, "expected a tensor that has values"),
        (tmp_path / "other", "rotary_base is 5000.0, expected 10000.0"),
        (tmp_path / "cut", "not a whole safetensors file"),
        (tmp_path / "nowhere", "nowhere"),
    ]
    before = fresh_answer(1)
    with Engine(served(1), pages=60, page_tokens=4) as engine:
        for source, words in refused:
            with pytest.raises((UsageError, RunError), match=words) as told:
                engine.update_weights(source)  # type: ignore[arg-type]
            assert "\n" not in str(told.value)
        with pytest.raises(UsageError, match="running"):
            engine.update_weights(whole, running="stop")  # type: ignore[arg-type]
        engine.update_weights(model_of(1), 3)
        with pytest.raises(UsageError, match="version is 3"):
            engine.update_weights(whole, 3)
        assert engine.version == 3
        assert same(answer_of(engine), before)


def test_weights_that_break_off_stop_the_engine_until_whole_ones_come() -> None:
    def breaking(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        yield next(tensors)
        raise OSError("the disk is gone")

    with Engine(served(1), pages=60, page_tokens=4) as engine:
        source = engine.open_weights(model_of(2))
        with pytest.raises(RunError, match=r"the disk is gone.*requests wait until update_weights"):
            engine.write_weights(replace(source, tensors=breaking(source.tensors)), None, "finish")
        with pytest.raises(RunError, match="written in part"):
            answer_of(engine)
        assert engine.update_weights(model_of(2)) == 1
        assert same(answer_of(engine), fresh_answer(2))


# Asleep -------------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory a process has")
def test_memory_goes_back_to_the_system_and_answers_are_the_same_afterwards(tmp_path: Path) -> None:
    wide = replace(CONFIG, width=512, heads=8, kv_heads=8, head_width=64, mlp_width=1024)
    huggingface.save(model_of(1, torch.float32, wide), tmp_path / "wide")
    with Engine(tmp_path / "wide", pages=400, packed=False) as engine:
        expected = answer_of(engine)
        weights = sum(parameter.nbytes for parameter in engine.served.model.parameters())
        parts = [part for stored in engine._core.runner.cache._stored.values() for part in stored.parts]
        pages = sum(part.nbytes for part in parts)
        assert min(weights, pages) > 20 << 20
        with torch.inference_mode():
            for part in parts:
                part.add_(0)  # until it is written, it takes no memory
        for level, given_back in ((1, pages), (2, weights)):  # few pages are touched again in between
            before = resident_bytes()
            engine.sleep(level)
            assert engine.asleep == level
            assert before - resident_bytes() > 0.9 * given_back
            engine.wake()
            assert engine.asleep == 0
            assert answer_of(engine).logprobs == expected.logprobs
            assert next(engine.generate([PROMPT], ASKED)).found_tokens == 32


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory a process has")
def test_pages_take_memory_when_they_are_written() -> None:
    before = resident_bytes()
    stored = StoredPages.empty((2, 1 << 11, 16, 8, 64), torch.float32, torch.device("cpu"), "")
    assert resident_bytes() - before < stored.held.nbytes / 10
    assert not stored.held[0, -1].any()
    stored.held[0, :1024] = 1
    assert resident_bytes() - before > stored.held.nbytes / 5


def test_requests_wait_for_an_engine_that_sleeps(folders: tuple[Path, Path]) -> None:
    before, after = fresh_answer(1), fresh_answer(2)
    with Engine(folders[0], pages=60, page_tokens=4) as engine:
        first = Listening(engine)
        assert first.midway.wait(60)
        ask_midway(engine, first, lambda: engine.sleep(2)).join(60)
        second = Listening(engine, after=100)
        assert not second.done.wait(0.2)
        with pytest.raises(UsageError, match="1 requests under way cannot"):
            engine.update_weights(folders[1])
        engine.wake()
        assert same(first.answer(), before)
        assert same(second.answer(), before)
        # In its sleep it may be given others; it sleeps on.
        engine.sleep(2)
        engine.update_weights(folders[1])
        assert engine.asleep == 2
        engine.wake()
        assert same(answer_of(engine), after)
        engine.update_weights(model_of(1))
        engine.sleep(2)
        with pytest.raises(UsageError, match="are in no folder: call update_weights before wake"):
            engine.wake()
        engine.update_weights(model_of(2))
        engine.wake()
        assert same(answer_of(engine), after)
        engine.sleep()
        waiting = Listening(engine, after=100)
    assert waiting.answer().finish is FinishReason.ABORT  # by closing


def test_what_cannot_sleep_says_why() -> None:
    with Engine(served(1), pages=60, page_tokens=4) as engine:
        with pytest.raises(UsageError, match="belong to whoever gave the model"):
            engine.sleep(2)
        with pytest.raises(UsageError, match="level is 3"):
            engine.sleep(3)
        engine.sleep()
        engine.wake()
        engine.wake()
        assert same(answer_of(engine), fresh_answer(1))


def test_a_draft_model_sleeps_along(folders: tuple[Path, Path]) -> None:
    with Engine(folders[0], pages=60, page_tokens=4, draft=folders[0], speculate=3) as engine:
        assert same(answer_of(engine), fresh_answer(1))
        engine.sleep(2)
        engine.update_weights(folders[1])
        engine.wake()
        assert same(answer_of(engine), fresh_answer(2))
