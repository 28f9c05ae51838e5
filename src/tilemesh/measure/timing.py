"""The harness: several candidates timed against each other in one run, interleaved.

    result = compare({"ours": f, "numpy": g}, sets=8)      # f(i), g(i): a call on input set i
    result["ours"].median, result.missing                  # seconds per call; who could not be timed, and why

There is one interleaving, here, for every clock. A *timer* knows how to make one candidate ready
and how to take one reading: `LoopTimer` below times a host loop (a CPU call, a CUDA call with
synchronised ends, a call all ranks make together); `gpu.KernelTimer` replays a captured graph.

Each round takes one reading of every candidate, in an order shuffled anew (from a fixed seed), so
that neither drift nor a habit of following the same neighbour favours one of them. The budget
counts seconds read, not seconds passed: ranks that agree on readings agree on when to stop.
"""

from __future__ import annotations

import gc
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure.sample import Sample

# One call of a candidate; it is given the index of the input set to work on, and its result is kept until checked.
Call = Callable[[int], object]

# Below this many rounds a median means nothing; the budget never cuts further.
FEWEST_ROUNDS = 3

# One reading on the host lasts at least this long: 2000 times what reading the clock costs.
MIN_READING_S = 200e-6

MOST_CALLS = 1 << 20


class Reading(NamedTuple):
    """Seconds a call, averaged over `calls` calls made back to back."""

    seconds: float
    calls: int


class Ready(Protocol):
    """A candidate that is warm. `read` takes one reading; `last` is then its last result and that result's set."""

    def read(self) -> Reading: ...

    def last(self) -> tuple[object, int]: ...


class Timer(Protocol):
    """Makes a candidate ready to be read: warms it up, finds how many calls a reading needs."""

    def prepare(self, call: Call, *, sets: int, warmup: int) -> Ready: ...


@dataclass(frozen=True)
class Check:
    """Trust in what was timed: `poison` spoils a candidate's result before, `verify` raises if it is wrong after.

    Both are given the candidate's name and its latest result; `verify` also the input set it came from.
    """

    poison: Callable[[str, object], None]
    verify: Callable[[str, object, int], None]


class Comparison(dict[str, Sample]):
    """Seconds a call by candidate. `missing` says why a candidate is not there; asking for it raises just that."""

    def __init__(self, samples: Mapping[str, Sample], failures: Mapping[str, Exception]) -> None:
        super().__init__(samples)
        self.failures = dict(failures)

    @property
    def missing(self) -> dict[str, str]:
        """Candidate to reason, ready to be a row's `missing`."""
        return {name: reason_of(error) for name, error in self.failures.items()}

    def __missing__(self, name: str) -> Sample:
        if name in self.failures:
            raise RunError(f"{name} could not be timed: {self.missing[name]}") from self.failures[name]
        raise KeyError(name)


def compare(
    candidates: Mapping[str, Call],
    *,
    timer: Timer | None = None,
    repeats: int = 30,
    warmup: int = 3,
    seconds: float = 10.0,
    sets: int = 1,
    check: Check | None = None,
    on_error: Literal["missing", "raise"] = "missing",
) -> Comparison:
    """Time every candidate against the others.

    `repeats` rounds, or fewer once the readings add up to `seconds`. A candidate that raises while it warms up
    (or is captured, or is verified) is left out and its reason kept, unless `on_error` is "raise".
    """
    if not candidates:
        raise UsageError("compare was given no candidates: expected a mapping of names to calls")
    if repeats < 1 or warmup < 0 or sets < 1 or seconds <= 0:
        raise UsageError(
            f"compare(repeats={repeats}, warmup={warmup}, seconds={seconds}, sets={sets}): "
            "expected repeats and sets from 1, warmup from 0, seconds above 0"
        )
    timer = timer or LoopTimer()
    trouble = _Trouble(raises=on_error == "raise")
    ready: dict[str, Ready] = {}
    for name, call in candidates.items():
        with trouble.of(name):
            prepared = timer.prepare(call, sets=sets, warmup=warmup)
            if check is not None:
                check.poison(name, prepared.last()[0])
            ready[name] = prepared
    gc.collect()  # in the middle of a reading it would be billed to whoever happened to run
    with without_collection():
        readings = _rounds(ready, trouble, repeats, seconds)
    if check is not None:
        for name in list(readings):
            with trouble.of(name):
                check.verify(name, *ready[name].last())
    return Comparison({n: Sample.of(v) for n, v in readings.items() if n not in trouble.failures}, trouble.failures)


def in_turns(calls: Mapping[str, Callable[[], float]], turns: int, warmup: int = 1) -> dict[str, list[float]]:
    """What each call says of itself, one after the other in every turn; what it says in the first turns, which compile,
    connect and fill caches, does not count."""
    figures: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + turns):
        for name, call in calls.items():
            figure = call()
            if turn >= warmup:
                figures[name].append(figure)
    return figures


def reason_of(error: Exception) -> str:
    """An exception as one line: what kind, and the first line of what it said (later lines are advice or traces)."""
    said = str(error).strip().splitlines()
    if isinstance(error, RunError | UsageError) and said:
        return said[0]
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


@dataclass
class _Trouble:
    """Which candidates failed, and with what."""

    raises: bool
    failures: dict[str, Exception] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.raises:
                raise
            _let_go(error)
            self.failures[name] = error


def _let_go(error: BaseException | None) -> None:
    """Drop the local variables an exception's frames hold: after an out-of-memory they are what fills the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _rounds(ready: Mapping[str, Ready], trouble: _Trouble, repeats: int, seconds: float) -> dict[str, list[float]]:
    readings: dict[str, list[float]] = {name: [] for name in ready}
    order = list(ready)
    dice = random.Random(0)
    spent_s = 0.0
    for done in range(repeats):
        if not order or (done >= FEWEST_ROUNDS and spent_s >= seconds):
            break
        dice.shuffle(order)
        for name in list(order):
            with trouble.of(name):
                reading = ready[name].read()
                readings[name].append(reading.seconds)
                spent_s += reading.seconds * reading.calls
            if name in trouble.failures:
                order.remove(name)
    return {name: values for name, values in readings.items() if name not in trouble.failures}


@contextmanager
def without_collection() -> Iterator[None]:
    """Python's collector is off: it may end what nobody holds any more in the middle of a reading or a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def settle(longest_s: float = 2.0) -> float:
    """Wait until no thread of this process computes; seconds waited.

    A thread pool may spin for half a second after its last call, waiting for the next, and take a core from whatever
    is timed then. Interleaving two libraries that each have such a pool measures their quarrel, not their speed.
    """
    began = time.perf_counter()
    while time.perf_counter() - began < longest_s:
        before_s = time.process_time()
        time.sleep(0.02)
        if time.process_time() - before_s < 0.002:
            break
    return time.perf_counter() - began


def _nothing() -> None:
    return None


def _as_it_is(seconds: float) -> float:
    return seconds


@dataclass(frozen=True)
class LoopTimer:
    """Times a host loop of calls: enough of them that the clock's own cost does not matter, averaged.

    `start` runs before the clock starts (a barrier, a device synchronise) and `finish` before it stops;
    `agree` turns this process's seconds into everybody's (ranks: the slowest counts). The loop itself adds
    about 0.05 µs per call.
    """

    clock: Callable[[], float] = time.perf_counter
    start: Callable[[], None] = _nothing
    finish: Callable[[], None] = _nothing
    agree: Callable[[float], float] = _as_it_is
    min_reading_s: float = MIN_READING_S

    def prepare(self, call: Call, *, sets: int, warmup: int) -> Ready:
        """Warm up, then double the number of calls until a reading lasts long enough."""
        loop = _Loop(self, call, sets)
        # Every set once even with warmup=0: a first call compiles, allocates, touches pages, fills caches by address.
        for _ in range(max(warmup, sets)):
            loop.run(1)
        calls = 1
        while (total_s := self.agree(loop.run(calls))) < self.min_reading_s and calls < MOST_CALLS:
            wanted = self.min_reading_s / total_s if total_s > 0 else 2.0
            calls = min(MOST_CALLS, calls * max(2, min(16, round(wanted * 1.2))))
        loop.calls = calls
        return loop


class _Loop:
    def __init__(self, timer: LoopTimer, call: Call, sets: int) -> None:
        self.timer, self.call, self.sets = timer, call, sets
        self.calls = 1
        self.next_set = 0
        self.result: object = None
        self.result_set = 0

    def run(self, calls: int) -> float:
        """Make calls on the next input sets; this process's seconds for all of them."""
        call, timer = self.call, self.timer
        indices = [(self.next_set + i) % self.sets for i in range(calls)]
        self.next_set = (self.next_set + calls) % self.sets
        last = indices.pop()
        self.result = None  # dropped first, so that a call finds the memory a user's call would find
        timer.start()
        began = timer.clock()
        for index in indices:
            call(index)
        result = call(last)
        timer.finish()
        elapsed_s = timer.clock() - began
        self.result, self.result_set = result, last
        return elapsed_s

    def read(self) -> Reading:
        return Reading(self.timer.agree(self.run(self.calls)) / self.calls, self.calls)

    def last(self) -> tuple[object, int]:
        return self.result, self.result_set
