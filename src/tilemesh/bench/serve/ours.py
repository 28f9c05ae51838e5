"""Our engine under a load: all requests at once, or each at its time; and its steps timed for a prediction.

The prediction of a load is made before the load runs: step times are fitted to a few steps of other requests
(`timed_steps`), and the simulator drives the real scheduler with them.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence

from tilemesh.bench.serve.load import Lengths, LoadRequest, make_load, to_simulate
from tilemesh.core.errors import RunError
from tilemesh.model.work.decoding import SequencePart
from tilemesh.plan.serving_clock import FittedSteps, StepClock
from tilemesh.serve.engine import Engine
from tilemesh.serve.history import RequestRecord, ServeHistory
from tilemesh.serve.jobs import AnswerPart
from tilemesh.serve.replicas import Replicas
from tilemesh.serve.request import FinishReason, Sampling
from tilemesh.serve.scheduler import QueueFullError
from tilemesh.serve.simulate import predicted, simulate, simulate_with

_LONGEST_S = 3600.0
_ARRIVING, _ARRIVING_OUTPUT, _STEPS_APART = 12, 12, (4, 12)
"""Requests that arrive while others are answered, to fit step times to: how many, tokens of each answer, and how many
steps of a single sequence one comes after the other, on average."""


def run_load(engine: Engine | Replicas, load: Sequence[LoadRequest], watched: bool = True) -> ServeHistory:
    """Each request at its time; returns when all have ended. Greedy, and no token ends an answer early.

    `watched`: with all steps. That takes the host's time for each sequence and step; on a GPU, where the host's time
    may count, requests alone are timed, by whoever hears their tokens; so are those of several replicas.
    """
    history = ServeHistory()
    observed = engine if watched and isinstance(engine, Engine) else None
    if observed is not None:
        observed.watch(history)
    done = threading.Semaphore(0)
    errors: list[str] = []

    def tell(part: AnswerPart, record: RequestRecord | None = None) -> None:
        if record is not None:
            record.output += part.tokens
            record.token_ns += [time.monotonic_ns()] * len(part.tokens)
            record.finish = part.finish
        if part.finish is not None:
            if part.finish is FinishReason.ERROR:
                errors.append(part.error or "no reason given")
            done.release()

    began, submitted = time.monotonic(), 0
    for number, request in enumerate(load):
        wait = began + request.at_s - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        sampling = Sampling(max_tokens=request.output, temperature=0, ignore_eos=True)
        heard = tell
        if observed is None:
            now = time.monotonic_ns()
            record = RequestRecord(f"{number + 1}/0", now, now, number, request.prompt, request.output)
            history.requests[record.name] = record
            heard = functools.partial(tell, record=record)
        try:
            engine.submit(request.prompt, sampling, heard)
            submitted += 1
        except QueueFullError:
            history.refused += 1
    for _ in range(submitted):
        if not done.acquire(timeout=_LONGEST_S):
            raise RunError(f"the engine did not answer {submitted} requests within {_LONGEST_S:.0f} s")
    if observed is not None:
        observed.watch(None)
    if errors:
        raise RunError(f"the engine could not answer {len(errors)} of {submitted} requests: {errors[0]}")
    return history


def timed_steps(
    engine: Engine, batches: Sequence[int], seed: int = 1000, until: float = math.inf
) -> list[tuple[list[SequencePart], float]]:
    """Steps of warm engines: so many sequences decoding at short and longer lengths, chunks of prompts alone, and the
    mixed steps of requests that arrive one after the other. After `until` (`time.monotonic`)
    no more than the first of these is begun."""
    longest = engine.limits.context
    short, long = max(1, min(24, longest // 4)), max(1, min(384, longest // 2))
    timed: list[tuple[list[SequencePart], float]] = []
    for number, batch in enumerate(batches):
        for length in (short, long) if not timed or time.monotonic() < until else ():
            load = make_load(
                batch, Lengths(length, length), Lengths(6, 6), engine.config.vocabulary, seed=seed + number
            )
            history = run_load(engine, load)
            timed += [(step.works, step.seconds) for step in history.steps]
    prompts = sorted({min(length, max(1, longest // 2)) for length in (16, 64, 200, 600)})
    for length in prompts if time.monotonic() < until else ():
        load = make_load(1, Lengths(length, length), Lengths(1, 1), engine.config.vocabulary, seed=seed - length)
        timed += [(step.works, step.seconds) for step in run_load(engine, load).steps]
    # Steps of one or two sequences with a prompt beside them are what an engine that is not busy does all the time.
    alone = [seconds for parts, seconds in timed if len(parts) == 1 and parts[0].queries == 1]
    for number, apart in enumerate(_STEPS_APART if time.monotonic() < until else ()):
        rate = 1 / (apart * (statistics.median(alone) if alone else 0.02))
        some = (Lengths(short, max(short, long // 3)), Lengths(_ARRIVING_OUTPUT, _ARRIVING_OUTPUT))
        load = make_load(_ARRIVING, *some, engine.config.vocabulary, rate=rate, seed=seed + 500 + number)
        timed += [(step.works, step.seconds) for step in run_load(engine, load).steps]
    return timed


def fit_engine(engine: Engine, batches: Sequence[int], until: float = math.inf) -> FittedSteps:
    """Step times of this engine, from a few of its steps; the first round warms it up and is not counted."""
    timed_steps(engine, batches[-1:] if until == math.inf else batches[:1], seed=5000, until=until)
    return FittedSteps.of(timed_steps(engine, batches, until=until))


def predict_load(
    engine: Engine, load: Sequence[LoadRequest], clock: Callable[[Sequence[SequencePart]], float]
) -> ServeHistory:
    """What the engine will do, by the simulator."""
    if isinstance(clock, StepClock) and engine.launches_ahead:
        return simulate_with(clock, engine.limits, to_simulate(load))
    return simulate(engine.limits, to_simulate(load), predicted(clock))


def fitting_batches(running: int) -> list[int]:
    """1, 4, 16, ... up to what runs at a time."""
    batches = [1]
    while batches[-1] * 4 < running:
        batches.append(batches[-1] * 4)
    return [*batches, running] if batches[-1] != running else batches
