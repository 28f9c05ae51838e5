"""What all calls of one communicator share: its transport, what is under way, its memory, its fit, who looks on.

A group begins with a few texts among its ranks (do they share memory, which fit is theirs). From then on it offers what
every kind of call needs: tags of its own, a place in the order of calls, a start in the background, a watchdog's note.
The calls themselves are in `call.py` (collectives), `ready.py` (the same, made before) and `messages.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from tilemesh.comm.runtime.arena import Arena, Regions, open_arena, private_arena
from tilemesh.comm.runtime.choose import Choice, Choices
from tilemesh.comm.runtime.engine import CallEngine, Handle, ObservedHandle, Running, Turns
from tilemesh.comm.runtime.fit import Fit, stored_fit
from tilemesh.comm.runtime.flags import MARK_BITS, CallDigest
from tilemesh.comm.runtime.lower import Planner
from tilemesh.comm.runtime.memory import Like
from tilemesh.comm.runtime.observe import Observers, Stopwatch
from tilemesh.comm.runtime.sharing import Sharing
from tilemesh.comm.runtime.texts import (
    Steps,
    compare_calls,
    exchange,
    have_same_mark,
    is_debugging,
    raise_differences,
)
from tilemesh.comm.runtime.transport import MIRROR, Lazy, ReadyCall, Token, Transport
from tilemesh.comm.runtime.watch import Watch
from tilemesh.comm.schedules.book import is_shared
from tilemesh.core.cores import available_cores, cores_here, cores_together
from tilemesh.core.errors import UsageError
from tilemesh.measure.machine import memory_bytes

_THREADS_BYTES = 1 << 30  # of blocks for ranks that are threads: taken from the machine when used
_MOST_READY = 1024
_MOST_COMPARED = 4096  # kinds of calls that are known to have been compared
T = TypeVar("T")
Comparison: TypeAlias = Callable[[], Steps[None]]  # of the calls of all ranks: see `Group.comparison`
Tell: TypeAlias = Callable[[float, str], None]  # what a handle tells observers by: (began_s, phase)


class ReadyCalls(dict[tuple[Any, ...], ReadyCall]):
    """Ready calls by (collective, operation or root, algorithm, dtype, shape)."""

    def keep(self, key: tuple[Any, ...], ready: ReadyCall | None) -> None:
        if ready is not None:
            if len(self) >= _MOST_READY:
                del self[next(iter(self))]
            self[key] = ready


class Group:
    """The ranks of one communicator, as its calls see them."""

    def __init__(
        self, transport: Transport, engine: CallEngine, watch: Watch, observers: Observers, node_size: int | None = None
    ) -> None:
        self.transport = transport
        self.engine = engine
        self.watch = watch
        self.observers = observers
        self.choices: tuple[Choices, str] | None = None  # what `auto` keeps to, and this group's name in it
        self.stopwatch: Stopwatch | None = None  # of the call whose parts are timed: see `breakdown`
        self.planner = Planner(transport, node_size)
        self.is_debugging = is_debugging()
        self.turns = Turns()
        transport.names = watch.members
        self.ready = ReadyCalls()
        is_one_process = transport.size == 1 or transport.name in ("threads", MIRROR)
        self.cores = available_cores() if is_one_process else cores_together(self._texts(cores_here()))
        arena = self._open_arena()
        self.sharing = None if arena is None else Sharing(arena, self.planner.program, transport)
        self.digests: dict[tuple[Any, ...], CallDigest] = {}
        self.compared: set[int] = set()  # marks of calls that the ranks have compared by a meeting or messages
        self.comparisons = 0
        if arena is not None:
            arena.flags.disagreement = self._disagreement
        self.fit = self._stored_fit()

    def device_for(self, is_cuda: bool) -> Any:
        """What moves GPU memory, for a tensor there; where nothing does, the first rank says so once, and why."""
        device, process = self.transport.device, self.watch.process
        if is_cuda and device is None and self.transport.size > 1 and not process.has_staged:
            process.has_staged = True
            if process.rank == 0:
                why = self.transport.staged_because
                print(f"tilemesh: GPU tensors go through the host's memory: {why}", file=sys.stderr, flush=True)
        return device if is_cuda else None

    def _open_arena(self) -> Arena | None:
        """Memory shared with all ranks of this communicator, where they are on one node. A collective call."""
        transport = self.transport
        if transport.name == MIRROR:
            return None
        is_alone = transport.size == 1  # an array of its own is as good as a block: no address space is reserved
        threads_bytes = 0 if is_alone else _THREADS_BYTES
        common = transport.common(Regions(transport.size, threads_bytes).nbytes)
        if common is not None:
            return private_arena(common, transport.size, transport.rank, threads_bytes, self.cores)
        blocks_bytes = 0 if is_alone else memory_bytes() // 2
        arena = open_arena(transport.rank, transport.size, self._texts, blocks_bytes=blocks_bytes, cores=self.cores)
        if arena is not None:
            arena.flags.watch = self.watch
            transport.caps = replace(transport.caps, arena=True, crowded=transport.size > self.cores)
        return arena

    def _stored_fit(self) -> Fit | None:
        """The machine's fit for as many ranks and cores, read by one rank for all: they must choose alike."""
        transport = self.transport
        if transport.size == 1 or transport.name in ("threads", MIRROR):
            return None
        text = self._texts(stored_fit(transport.name, transport.size, self.cores) if transport.rank == 0 else "")[0]
        return Fit.from_dict(json.loads(text)) if text else None

    def _texts(self, text: str) -> list[str]:
        """Every rank's text before any call has been made."""
        texts: list[str] = []

        def steps() -> Iterator[Token]:
            texts.extend((yield from exchange(self.transport, text, self.tag(3, 0))))

        self.carry_out(Running(steps(), lambda: None), (0, "connect", 0))
        return texts

    # What every kind of call needs --------------------------------------------------------------------------------

    def tag(self, kind: int, sequence: int) -> int:
        """Collectives' own messages lie above the user's tags: 1 schedules, 2 comparisons, 3 words; 4 sizes."""
        tags = self.transport.tags
        return kind * tags + sequence % tags

    def carry_out(self, running: Running, doing: tuple[int, str, int]) -> Any:
        """To its end, blocking. `doing`: the call's number, name and bytes, for the watchdog."""
        self.watch.enter(*doing)
        try:
            return self.engine.run(running)
        finally:
            self.watch.leave()

    def start(self, running: Running, doing: tuple[int, str, int], tell: Tell | None) -> Handle:
        """In the background. `tell`: what its handle tells observers by; None: there are none."""
        running.owner = self
        running.name = f"{doing[1]} #{doing[0]} of {self.watch.label}" if doing[0] >= 0 else doing[1]
        self.engine.start(running)
        if tell is None:
            return Handle(self.engine, running, self.watch, doing)
        return ObservedHandle(self.engine, running, self.watch, doing, tell)

    def teller(self, operation: str, nbytes: int, algorithm: str = "", peer: int = -1) -> Tell | None:
        """What tells observers of the stretches of a call; None: there are no observers."""
        observers = self.observers
        if not observers:
            return None
        return lambda began_s, phase: observers.tell(began_s, operation, phase, nbytes, algorithm, peer)

    def later(self, first: Steps[T], then: Callable[[T], Running], comparison: Comparison | None = None) -> Running:
        """A call that begins when `first` is through and those made before it have begun.

        `comparison`: comes before all of it, in the call's turn, because it has its place among the calls of the arena.
        """
        turn = self.turns.take()
        begun: list[Running] = []

        def steps() -> Iterator[Token]:
            try:
                if comparison is not None:
                    yield turn
                    yield from comparison()
                heard = yield from first
                yield turn
                begun.append(then(heard))
                token = next(begun[0].steps, None)
                if isinstance(token, Lazy):
                    token.test()  # which starts it: before the next one's turn
            finally:
                turn.release()
            if token is not None:
                yield token
                yield from begun[0].steps

        return Running(steps(), lambda: begun[0].finish())

    def agree(self, words: str, sequence: int, sent: Sequence[int] = (), expected: Sequence[int] = ()) -> Steps[None]:
        """In debug mode: all ranks make the same call, or all raise."""
        yield from compare_calls(self.transport, words, self.tag(2, sequence), sent, expected)

    # Do all ranks make the same call? ---------------------------------------------------------------------------

    def comparison(self, digest: CallDigest, *, always: bool = False) -> Comparison | None:
        """What makes the steps in which ranks compare a call that does not go through shared memory, as those all do.

        None: calls like it have been compared before. Threads compare every call: a meeting costs them little.
        """
        if self.transport.size == 1:
            return None
        if not always and digest.mark in self.compared and self.transport.name != "threads":
            return None
        if len(self.compared) >= _MOST_COMPARED:  # on every rank alike
            self.compared.clear()
        self.compared.add(digest.mark)
        sharing = self.sharing
        if sharing is not None:
            return lambda: self._remembered(digest, sharing.compare(digest))
        self.comparisons += 1
        tag = self.tag(2, self.comparisons)
        return lambda: self._remembered(digest, self._by_messages(digest, tag))

    def _remembered(self, digest: CallDigest, steps: Iterator[Token]) -> Steps[None]:
        try:
            yield from steps
        except UsageError:
            self.compared.discard(digest.mark)  # as on the ranks that asked for something else
            raise

    def _by_messages(self, digest: CallDigest, tag: int) -> Iterator[Token]:
        if not (yield from have_same_mark(self.transport, digest.mark, tag)):
            yield from raise_differences(self.transport, digest.words, tag)

    def _disagreement(self) -> Iterator[Token]:
        """What follows when the flags of a meeting differ: all ranks tell their calls, and raise."""
        assert self.sharing is not None
        arena = self.sharing.arena
        meeting = arena.flags.epoch >> MARK_BITS  # the same on every rank
        arena.staged = meeting  # so are the halves of the stage from here on, whoever used one
        yield from raise_differences(self.transport, arena.flags.digest.words, self.tag(2, meeting))

    def goes_shared(self, choice: Choice) -> bool:
        """Through the arena; or natively, after a look whether all arrays lie there."""
        if self.sharing is None:
            return False
        return is_shared(choice.algorithm) or (choice.direct is not None and self.sharing.arena.live > 0)

    @property
    def under_way(self) -> int:
        """Calls of this communicator that have been begun and not finished."""
        return sum(running.owner is self for running in self.engine.pending)

    # Groups, memory, and a look inside ----------------------------------------------------------------------------

    def ask(self, name: str, text: str) -> list[str]:
        """Every rank's text, on every rank."""
        self.watch.sequence += 1
        sequence, words = self.watch.sequence, f"{name}()"
        comparison = None if self.is_debugging else self.comparison(CallDigest.of(name, 0, words), always=True)

        def steps() -> Steps[list[str]]:
            if self.is_debugging:
                yield from self.agree(words, sequence)
            return (yield from exchange(self.transport, text, self.tag(3, sequence)))

        def running(texts: list[str]) -> Running:
            return Running(_at_once(), lambda: texts)

        answers: list[str] = self.carry_out(self.later(steps(), running, comparison), (sequence, name, 0))
        return answers

    def split(self, members: Sequence[int], label: str) -> Transport:
        """A transport among the members, for which they wait for one another."""
        with self.watch.during(self.watch.sequence, "split", 0):  # all have been heard of: nobody is waited for long
            return self.transport.split(members, label)

    def empty(self, shape: tuple[int, ...], like: Like) -> Any:
        """Memory of the arena, for all ranks of the communicator."""
        sharing = self.sharing
        if sharing is None or self.transport.size == 1:
            return like.back(np.empty(shape, like.carrier))
        self.watch.sequence += 1

        digest = CallDigest.of("empty", 0, f"empty({shape}, {like.dtype})")

        def running(_: None = None) -> Running:
            steps, arrays = sharing.empty(shape, like.carrier, digest)
            return Running(steps, lambda: arrays[0])

        # Its turn in the arena comes after those of calls that have not begun yet, as it does on the other ranks.
        allocation = running() if self.turns.is_free else self.later(_at_once(), running)
        block = self.carry_out(allocation, (self.watch.sequence, "empty", 0))
        if sharing.arena.live == 1:
            self.ready.clear()  # calls made ready before did not look whether arrays lie there
        return like.back(block)

    def breakdown(self, call: Callable[[], object]) -> dict[str, float]:
        """Seconds by part inside one blocking call. It goes the ordinary way: ready calls have no parts to time."""
        ready, stopwatch = dict(self.ready), Stopwatch()
        self.ready.clear()
        self._time_parts(stopwatch)
        try:
            call()
        finally:
            self._time_parts(None)
            self.ready.update(ready)
        return stopwatch.seconds

    def _time_parts(self, stopwatch: Stopwatch | None) -> None:
        self.stopwatch = stopwatch
        if self.sharing is not None:
            self.sharing.stopwatch = stopwatch


def _at_once() -> Steps[None]:
    """Nothing to hear from the others first."""
    yield from ()


class Closed:
    """Stands where a closed communicator's group stood: any use says so, and open ones pay nothing for the check."""

    def __init__(self, label: str) -> None:
        self._label = label

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(f"communicator {self._label} is closed")
