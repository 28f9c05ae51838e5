"""The simulator over the real scheduler: the clock, queueing, and loads whose answer is known without it."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.hardware import parse_cluster
from tilemesh.model.config import preset
from tilemesh.model.work.decoding import SequencePart
from tilemesh.plan.serving_clock import StepClock
from tilemesh.serve.history import ServeHistory
from tilemesh.serve.request import FinishReason
from tilemesh.serve.scheduler import ServeLimits
from tilemesh.serve.simulate import NS, SimRequest, fresh_requests, poisson_arrivals, predicted, replay, simulate
from tilemesh.serve.speculate import NgramGuesser

MS = 1_000_000


def test_one_request_alone_takes_its_steps() -> None:
    limits = ServeLimits(pages=64, context=200, chunk_tokens=40, step_tokens=512)
    history = simulate(limits, fresh_requests([5 * MS], [100], [4]), lambda plan: MS)
    (record,) = history.requests.values()
    # Three chunks, of which the last gives the first token, then three decode steps.
    assert [step.prefill_tokens for step in history.steps] == [40, 40, 20, 0, 0, 0]
    assert [step.decode_tokens for step in history.steps] == [0, 0, 0, 1, 1, 1]
    assert record.token_ns == [8 * MS, 9 * MS, 10 * MS, 11 * MS]
    assert record.first_token_s == pytest.approx(3e-3)
    assert record.gaps_s == pytest.approx([1e-3] * 3)
    assert record.finish is FinishReason.LENGTH


def test_requests_that_come_during_a_step_wait_for_its_end() -> None:
    history = simulate(
        ServeLimits(pages=64, context=200), fresh_requests([0, 3, 10], [4] * 3, [3] * 3), lambda plan: 10
    )
    assert [record.taken_ns for record in history.requests.values()] == [0, 10, 10]
    assert [record.asked_ns for record in history.requests.values()] == [0, 3, 10]
    assert [len(step.parts) for step in history.steps] == [1, 3, 3, 2]


def test_ahead_whoever_comes_during_a_step_waits_for_the_one_that_was_launched() -> None:
    asked = fresh_requests([0, 5], [4] * 2, [4] * 2)
    history = simulate(ServeLimits(pages=64, context=200), asked, lambda plan: 10, launching=lambda plan: 1)
    first, second = history.requests.values()
    assert first.token_ns == [10, 20, 30, 40]  # steps follow each other as if nothing were launched ahead
    assert second.taken_ns == 10
    assert second.token_ns == [30, 40, 50, 60]  # the second step was launched at 1, before it came
    slow = simulate(ServeLimits(pages=64, context=200), asked, lambda plan: 10, launching=lambda plan: 15)
    # The host is what steps wait for: tokens are read when the next step has been launched.
    assert next(iter(slow.requests.values())).token_ns == [30, 45, 60, 75]
    assert [record.finish for record in (first, second)] == [FinishReason.LENGTH] * 2
    assert [len(step.parts) for step in history.steps] == [1, 1, 2, 2, 1, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_ahead_every_request_gets_its_tokens_and_never_sooner(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    arrivals = sorted(draw.randrange(200) for _ in range(count))
    sizes = [[draw.randint(1, 30) for _ in range(count)] for _ in range(2)]
    limits = ServeLimits(pages=draw.choice((8, 20, 200)), context=64, page_tokens=8, step_tokens=16, running=8)
    plain, ahead = (
        simulate(limits, fresh_requests(arrivals, *sizes), lambda plan: 1 + sum(entry.count for entry in plan.entries),
                 launching=how) for how in (None, lambda plan: 2)
    )  # fmt: skip
    for history in (plain, ahead):
        assert [len(record.output) for record in history.requests.values()] == sizes[1]
        assert all(record.finish is FinishReason.LENGTH for record in history.requests.values())
    assert ahead.steps[-1].ended_ns >= sum(sizes[0]) // 16
    for name, record in plain.requests.items():
        assert ahead.requests[name].output == record.output


def test_a_full_queue_refuses_and_an_abort_frees() -> None:
    limits = ServeLimits(pages=8, context=100, running=1, waiting=1)
    asked = fresh_requests([0, 0, 0], [4] * 3, [50] * 3)
    history = simulate(limits, asked, lambda plan: MS)
    assert history.refused == 1
    assert len(history.requests) == 2
    stopped = SimRequest("1/0", 0, range(4), range(10, 60), 50, aborted_ns=5 * MS)
    history = simulate(limits, [stopped, asked[1]], lambda plan: MS)
    first, second = history.requests.values()
    assert first.finish is FinishReason.ABORT
    assert len(first.output) == 5
    assert second.token_ns[0] == 6 * MS


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_simulated_history_replays_to_itself(seed: int) -> None:
    """Whatever happened: shared prefixes, preemption, swapping, aborts, text that ends early, guesses."""
    draw = random.Random(seed)
    limits = ServeLimits(
        pages=draw.randint(7, 20),
        context=60,
        page_tokens=4,
        step_tokens=draw.randint(8, 40),
        chunk_tokens=draw.randint(1, 30),
        running=draw.randint(1, 8),
        swap_pages=draw.choice([0, 8]),
        share_prefixes=draw.random() < 0.8,
    )
    requests = []
    for number in range(draw.randint(1, 12)):
        prompt = [draw.randint(0, 1) for _ in range(draw.randint(1, 16))]
        output = [draw.randint(0, 1) for _ in range(draw.randint(1, 8))]
        more = draw.choice([0, 0, 3])  # tokens that it might have had, but for a stop string
        aborted = draw.randint(0, 80) if draw.random() < 0.2 else None
        at = draw.randint(0, 60)
        requests.append(
            SimRequest(
                f"{number}/0",
                at,
                prompt,
                output,
                len(output) + more,
                stops=more > 0,
                aborted_ns=None if aborted is None else at + aborted,
            )
        )
    durations = random.Random(seed + 1)
    guesses = draw.random() < 0.5
    first = simulate(limits, requests, lambda plan: durations.randint(1, 9), NgramGuesser(4) if guesses else None)
    again = replay(first, limits, NgramGuesser(4) if guesses else None)
    assert [step.schedule for step in again.steps] == [step.schedule for step in first.steps]
    assert [(step.began_ns, step.ended_ns) for step in again.steps] == [(s.began_ns, s.ended_ns) for s in first.steps]
    assert {name: (r.output, r.finish, r.token_ns) for name, r in again.requests.items()} == {
        name: (r.output, r.finish, r.token_ns) for name, r in first.requests.items()
    }


def test_littles_law_holds_in_a_simulation() -> None:
    """Mean requests in the system = rate x mean time in it, over a whole history that begins and ends empty."""
    clock = StepClock(preset("tinyllama-1.1b"), parse_cluster("1xh200"))
    arrivals = poisson_arrivals(20.0, 60, seed=3)
    history = simulate(
        ServeLimits(pages=4000, context=2048), fresh_requests(arrivals, [300] * 60, [40] * 60), predicted(clock)
    )
    events = sorted(
        [(r.asked_ns, 1) for r in history.requests.values()] + [(r.token_ns[-1], -1) for r in history.requests.values()]
    )
    inside, area, last = 0, 0, events[0][0]
    for at, change in events:
        area += inside * (at - last)
        inside, last = inside + change, at
    span = events[-1][0] - events[0][0]
    mean_whole = sum(r.whole_s or 0 for r in history.requests.values()) / 60
    assert area / span == pytest.approx(60 / (span / NS) * mean_whole)


def test_a_longer_queue_means_later_first_tokens() -> None:
    clock = StepClock(preset("llama-3-8b"), parse_cluster("1xh200"))
    limits = ServeLimits(pages=40_000, context=8192, running=64)

    def median(history: ServeHistory) -> float:
        times = sorted(r.first_token_s or 0 for r in history.requests.values())
        return times[len(times) // 2]

    slow, fast = (
        simulate(limits, fresh_requests(poisson_arrivals(rate, 40), [1000] * 40, [30] * 40), predicted(clock))
        for rate in (1.0, 60.0)
    )
    assert median(fast) > 2 * median(slow)
    # A prompt alone: two chunks of 512 tokens.
    alone = clock([SequencePart(512, 512, 0)]) + clock([SequencePart(488, 1000, 1)])
    assert median(slow) == pytest.approx(alone, rel=0.5)


def test_ahead_the_step_of_a_request_that_left_is_still_read() -> None:
    (request,) = fresh_requests([0], [4], [8])
    left = dataclasses.replace(request, aborted_ns=12)
    history = simulate(ServeLimits(pages=64, context=200), [left], lambda plan: 10, launching=lambda plan: 1)
    (record,) = history.requests.values()
    assert record.finish is FinishReason.ABORT
    assert record.token_ns == [10, 20]  # the step that ran when it left was launched before
