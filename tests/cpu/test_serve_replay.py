"""A watched engine beside the simulator: given its arrivals, outputs and durations the schedule is the engine's."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from tilemesh.data.tokenizer import Bytes
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.history import ServeHistory
from tilemesh.serve.jobs import AnswerPart
from tilemesh.serve.load import ServedModel
from tilemesh.serve.request import FinishReason
from tilemesh.serve.simulate import replay
from tilemesh.serve.speculate import NgramGuesser

CONFIG = ModelConfig(
    layers=2, width=32, heads=4, kv_heads=2, vocabulary=256, context=96, norm="rmsnorm", positions="rotary",
    activation="swiglu", biases=False, tied=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def small() -> ServedModel:
    model = Transformer(CONFIG, seed=1).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
    return ServedModel("small", model, Bytes(), frozenset({0}))


@pytest.mark.parametrize("speculate", [0, 4])
@pytest.mark.parametrize(("pages", "swap_pages"), [(200, 0), (16, 0), (16, 12)])
def test_the_simulators_schedule_is_the_engines_step_for_step(
    small: ServedModel, speculate: int, pages: int, swap_pages: int
) -> None:
    draw = random.Random(pages + swap_pages + speculate)
    history = ServeHistory()
    done = threading.Semaphore(0)

    def tell(part: AnswerPart) -> None:
        if part.finish is not None:
            done.release()

    shared = [draw.randrange(1, 256) for _ in range(20)]
    with Engine(
        small, pages=pages, page_tokens=4, step_tokens=24, running=6, swap_pages=swap_pages, speculate=speculate,
        history=history,
    ) as engine:  # fmt: skip
        asked = 30
        for number in range(asked):
            tail = [draw.randrange(1, 256) for _ in range(draw.randint(1, 20))]
            prompt = shared[: draw.choice([0, 8, 20])] + tail + (tail[:3] * 4 if number % 3 == 0 else [])
            sampling = Sampling(
                max_tokens=draw.randint(1, 18),
                temperature=draw.choice([0.0, 1.0]),
                stop=("e", "t") if number % 5 == 0 else (),
                n=1,
            )
            job = engine.submit(prompt[:45], sampling, tell, priority=draw.choice([0, 0, 1]))
            if number % 7 == 3:
                time.sleep(draw.random() * 0.01)
                engine.abort(job)
            time.sleep(draw.choice([0, 0, 0.004]))
        for _ in range(asked):
            assert done.acquire(timeout=60)
        limits = engine.limits
    assert len(history.requests) == asked
    assert {record.finish for record in history.requests.values()} >= {FinishReason.LENGTH}
    if pages == 16:
        assert any(step.preempted for step in history.steps)
    again = replay(history, limits, NgramGuesser(speculate) if speculate else None)
    assert [step.schedule for step in again.steps] == [step.schedule for step in history.steps]
    assert [step.sampled for step in again.steps] == [step.sampled for step in history.steps]
    for name, record in history.requests.items():
        other = again.requests[name]
        assert (other.output, other.finish, other.token_ns) == (record.output, record.finish, record.token_ns)
        assert other.first_token_s == record.first_token_s


def test_requests_that_cannot_be_computed_replay_too(small: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    history = ServeHistory()
    with Engine(small, pages=60, page_tokens=4, step_tokens=8, running=2, history=history) as engine:
        run, calls = engine._core.runner.run, 0

        def broken(*args: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise torch.OutOfMemoryError("no memory, said the test")
            return run(*args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(engine._core.runner, "run", broken)
        ended: list[FinishReason] = []
        done = threading.Event()

        def tell(part: AnswerPart) -> None:
            if part.finish is not None:
                ended.append(part.finish)
                if len(ended) == 4:
                    done.set()

        for number in range(4):
            engine.submit([number + 1] * 9, Sampling(max_tokens=5, ignore_eos=True), tell)
        assert done.wait(60)
        limits = engine.limits
    assert FinishReason.ERROR in ended
    assert FinishReason.LENGTH in ended
    again = replay(history, limits)
    assert [step.schedule for step in again.steps] == [step.schedule for step in history.steps]
    assert [step.failed for step in again.steps] == [step.failed for step in history.steps]


def test_a_change_that_waits_is_done_when_the_last_request_ends(small: ServedModel) -> None:
    """And not when the next one comes: an engine with nothing else to do slept on it."""
    with Engine(small, pages=60, page_tokens=4, step_tokens=24, running=4) as engine:
        core, done = engine._core, threading.Event()
        assert not core.busy
        core.changes.append((True, done.set))  # as where the request that it waited for has ended in this step
        assert core.busy
        with engine._lock:
            engine._lock.notify()
        assert done.wait(60)


@pytest.mark.parametrize("running", ["finish", "carry", "recompute"])
def test_a_history_over_new_weights_is_replayed(small: ServedModel, running: str) -> None:
    """Prefixes of older weights are not found, requests wait for others to end, pages are lost: step for step alike."""
    history, draw, opening = ServeHistory(), random.Random(3), list(range(1, 25))
    other, done = Transformer(CONFIG, seed=5), threading.Semaphore(0)

    def tell(part: AnswerPart) -> None:
        if part.finish is not None:
            done.release()

    with Engine(small, pages=60, page_tokens=4, step_tokens=24, running=4, history=history) as engine:
        for number in range(18):
            prompt = [*opening, *(draw.randrange(1, 256) for _ in range(draw.randint(1, 9)))]
            engine.submit(prompt, Sampling(max_tokens=draw.randint(4, 18), ignore_eos=True), tell)
            if number % 6 == 4:
                time.sleep(0.01)
                engine.update_weights(other, running=running)  # type: ignore[arg-type]
        for _ in range(18):
            assert done.acquire(timeout=60)
        limits = engine.limits
    again = replay(history, limits)
    assert sum(change.kind == "renew" for change in history.changes) == 3
    assert [step.schedule for step in again.steps] == [step.schedule for step in history.steps]
    assert {name: record.found for name, record in again.requests.items()} == {
        name: record.found for name, record in history.requests.items()
    }
