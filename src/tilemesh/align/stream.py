"""Batches that an engine draws one after the other while others train: begun as early as they may be, by the newest
weights there are, which change while answers are under way.

The one idea: all that happens to the engine happens before one of its steps: weights of a version, a batch begun, a
turn of its conversations, prompts that are held out. What it draws is a function of these events and the weights, so
they are written down; who is given them does the same again, whenever weights come and however long anything takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from torch import Tensor

from tilemesh.align.answers import Answers, DrawnPart
from tilemesh.align.record import BATCH, HELD_OUT, WEIGHTS, EngineEvent
from tilemesh.core.errors import RunError
from tilemesh.serve.answers import collect
from tilemesh.serve.engine import Engine
from tilemesh.serve.jobs import AnswerPart, PromptJob
from tilemesh.serve.load import WeightSource

_FIRST = -1000
"""The priority of what somebody waits for."""
Weights = Mapping[str, Tensor] | Callable[[], Iterator[tuple[str, Tensor]]]
"""Tensors by name, or what gives those of now."""
Key = tuple[str, int]


class AnswerStream:
    """One engine's part of all batches."""

    def __init__(self, engine: Engine, answers: Answers, part: int, parts: int) -> None:
        self._engine, self._answers, self._part, self._parts = engine, answers, part, parts
        self._changed = threading.Condition()
        self._weights: dict[int, Weights] = {}
        self._version = 0
        self._next, self._end = 0, 0  # batches that may be begun
        self._ready: list[tuple[str, int, int]] = []  # what is held out, and turns that follow
        self._under_way: dict[Key, tuple[DrawnPart, list[PromptJob]]] = {}
        self._left: dict[Key, int] = {}  # answers that have not ended
        self._drawn: dict[Key, Future[bytes]] = {}
        self._to_do: list[EngineEvent] | None = None
        self._events: list[EngineEvent] = []
        self._begun_at: int | None = 0
        """How many steps the engine had taken; None: begins when the engine has nothing to do."""
        self._lacks = 0
        """The version that is waited for where events say what to do."""
        self._life = 0
        self._problem: BaseException | None = None
        self._closing = False
        self._beside = ThreadPoolExecutor(1, "tilemesh-answers")
        engine.drive(self._before)

    # ---- from whoever trains ---------------------------------------------------------------------------------------

    def begin(self, first: int, to_do: Sequence[EngineEvent] | None = None) -> None:
        """From this batch on; what is under way is dropped. `to_do`: the events of a run that is repeated."""
        with self._changed:
            for job in (job for _, jobs in self._under_way.values() for job in jobs):
                self._engine.abort(job)
            self._life += 1
            self._under_way, self._drawn, self._ready, self._events = {}, {}, [], []
            self._begun_at, self._version, self._lacks = None, 0, 0
            if self._engine.version:
                self._weights.setdefault(self._engine.version, {})  # it has them
            self._next = self._end = first
            self._to_do = None if to_do is None else list(to_do)

    def give(self, version: int, weights: Weights | None, end: int) -> None:
        """Weights of a version, if they were not given before; batches before `end` may be begun."""
        with self._changed:
            self._end = end
            if weights is not None:
                self._weights[version] = weights
            self._lacks = 0 if version >= self._lacks else self._lacks
            self._changed.notify_all()
        self._engine.wake_up()

    def ask_held_out(self, version: int) -> None:
        """Answers by weights of just this version, which have been given."""
        with self._changed:
            if self._to_do is None:
                self._ready.append((HELD_OUT, version, 0))
        self._engine.wake_up()

    def collect(self, kind: str, number: int) -> bytes:
        """A batch, or what is held out, when all of it has been drawn and scored."""
        with self._changed:
            while (kind, number) not in self._drawn:
                is_going = (kind, number) in self._going()
                if self._to_do == [] and not is_going:
                    raise RunError(
                        f"align.repeats: that run ended before {kind} {number} was drawn: set train.steps lower"
                    )
                if self._lacks and (self._left.get((kind, number)) or not is_going):
                    raise RunError(
                        f"events to repeat want weights of version {self._lacks} before {kind} {number} ends"
                    )
                self._wait()
            future = self._drawn.pop((kind, number))
        while not future.done():
            wait([future], 1.0)
            self._check()
        return future.result()

    def wait_stalled(self) -> None:
        """Until nothing more can be done with the weights that were given: the engine then takes no step."""
        with self._changed:
            while not self._lacks and (self._to_do or self._going()):
                self._wait()

    def happened(self) -> list[EngineEvent]:
        """Since this was asked last."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._engine.close()
        self._beside.shutdown()

    def _going(self) -> set[Key]:
        """What is under way, and not between turns: without an event that begins the next one it stays there."""
        return self._under_way.keys() - {turn[:2] for turn in self._ready}

    def _wait(self) -> None:
        self._check()
        self._changed.wait(1.0)

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem
        if not self._engine.alive:
            raise RunError("the engine that draws answers has ended")

    # ---- in the engine's thread ------------------------------------------------------------------------------------

    def _before(self, taken: int, busy: bool) -> None:
        with self._changed:
            if self._closing or self._problem is not None:
                return
            if self._begun_at is None:
                if busy:
                    return
                self._begun_at = taken
            step = taken - self._begun_at
            if self._to_do and not busy and self._to_do[0].step > step:
                event = self._to_do[0]
                words = f"events to repeat have {event}, and the engine has nothing to do at step {step}"
                self._problem = RunError(words)
            try:
                for event in self._due(step) if self._to_do is None else self._again(step, self._to_do):
                    self._events.append(event)
                    self._do(event)
            except Exception as error:  # said by whoever waits
                self._problem = error
            self._changed.notify_all()

    def _due(self, step: int) -> Iterator[EngineEvent]:
        """What may happen now."""
        newest = max(self._weights, default=0)
        if newest > self._version:
            yield EngineEvent(step, WEIGHTS, newest)
        for key in list(self._ready):
            yield EngineEvent(step, *key)
        while self._next < self._end:
            yield EngineEvent(step, BATCH, self._next)

    def _again(self, step: int, to_do: list[EngineEvent]) -> Iterator[EngineEvent]:
        """What happened before this step, as soon as there is what it takes."""
        while to_do and to_do[0].step == step and not self._closing and to_do is self._to_do:
            event = to_do[0]
            if event.kind == WEIGHTS and event.number not in self._weights:
                self._lacks = event.number
            elif not event.turn or event[1:] in self._ready:
                yield to_do.pop(0)
                continue
            elif event[1:3] not in self._under_way:
                self._problem = RunError(f"events to repeat have {event}, and its conversations ended before")
            self._changed.notify_all()
            self._changed.wait()

    def _do(self, event: EngineEvent) -> None:
        _, kind, number, turn = event
        if kind == WEIGHTS:
            given = self._weights[number]
            self._engine.change_weights(WeightSource({}, given() if callable(given) else iter(given.items())), number)
            self._version = number
            self._weights = {version: each for version, each in self._weights.items() if version > number}
            return
        if event[1:] in self._ready:
            self._ready.remove(event[1:])
        if not turn:
            batch = self._answers.batch(number) if kind == BATCH else self._answers.held_out()
            self._under_way[kind, number] = (self._answers.begin(batch, self._part, self._parts), [])
            self._next = max(self._next, number + 1) if kind == BATCH else self._next
        self._submit((kind, number), turn)

    def _submit(self, key: Key, turn: int) -> None:
        part, jobs = self._under_way[key]
        asked, life = part.asked(turn), self._life
        if not asked:
            self._finish(key)
            return
        heard: list[list[AnswerPart]] = [[] for _ in asked]
        self._left[key] = sum(sampling.n for _, sampling in asked)

        def tell(own: list[AnswerPart], told: AnswerPart) -> None:
            own.append(told)
            if told.finish is None or self._closing or life != self._life:
                return
            self._left[key] -= 1
            if not self._left[key]:
                self._beside.submit(self._ended, life, key, turn, jobs[-len(asked) :], heard)

        with self._engine.together():
            for own, (tokens, sampling) in zip(heard, asked, strict=True):
                priority = _FIRST if key[0] == HELD_OUT else 0
                jobs.append(self._engine.submit(tokens, sampling, partial(tell, own), priority=priority, whole=True))

    # ---- beside it -------------------------------------------------------------------------------------------------

    def _ended(self, life: int, key: Key, turn: int, jobs: list[PromptJob], heard: list[list[AnswerPart]]) -> None:
        """A turn is over: another one follows, or all of it is scored."""
        with self._changed:
            if life != self._life:
                return
            part, _ = self._under_way[key]
        try:
            part.add(turn, [collect(job, own) for job, own in zip(jobs, heard, strict=True)])
            goes_on, problem = part.hear(turn + 1), None
        except BaseException as error:
            goes_on, problem = False, error
        with self._changed:
            if life != self._life:
                return
            if problem is not None:
                self._problem = problem
            elif goes_on:
                self._ready.append((*key, turn + 1))
            else:
                self._finish(key)
            self._changed.notify_all()
        self._engine.wake_up()

    def _finish(self, key: Key) -> None:
        part, _ = self._under_way.pop(key)
        self._drawn[key] = self._beside.submit(part.scored)
