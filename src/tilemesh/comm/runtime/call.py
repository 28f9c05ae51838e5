"""One collective call from checked arguments to its result: choose, run, and give the result its shape back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn, TypeVar

import numpy as np

from tilemesh.comm.runtime.arena import Arena, Regions, open_arena, private_arena
from tilemesh.comm.runtime.arguments import out_array
from tilemesh.comm.runtime.arithmetic import divide
from tilemesh.comm.runtime.asked import Call, Decided, Made, Scatter
from tilemesh.comm.runtime.choose import Choice, Choices, Request, choose
from tilemesh.comm.runtime.engine import Engine, Handle, ObservedHandle, Running, Turns
from tilemesh.comm.runtime.fast import ReadyCalls, native_codes, ready_call
from tilemesh.comm.runtime.fit import Fit, stored_fit
from tilemesh.comm.runtime.lower import Planner, ProgramKey
from tilemesh.comm.runtime.memory import Like, opened, store
from tilemesh.comm.runtime.native import narrow, native_steps, widened
from tilemesh.comm.runtime.observe import BEGIN, CALL, Observers, Stopwatch, clock
from tilemesh.comm.runtime.sharing import SharedCall, Sharing
from tilemesh.comm.runtime.texts import Steps, compare_calls, exchange, is_debugging, spread
from tilemesh.comm.runtime.transport import Array, Lazy, Message, NativeCall, Token, Transport, as_bytes, wrong_size
from tilemesh.comm.runtime.watch import Watch
from tilemesh.comm.schedules.book import is_shared
from tilemesh.comm.schedules.schedule import DATA
from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure.machine import memory_bytes

_THREADS_BYTES = 1 << 30  # of blocks for ranks that are threads: taken from the machine when used
T = TypeVar("T")
Tell = Callable[[float, str], None]  # what a handle tells observers by: (began_s, phase)


def flattened(array: Array, axis: int = 0) -> Array:
    """The elements in a row, `axis` slowest; the same memory where it already lies so.

    One that lies across its elements' boundaries (a view of bytes) is copied: mpi4py does not take it as numbers.
    """
    if not array.flags.aligned:
        array = array.copy()
    return np.ascontiguousarray(np.moveaxis(array, axis, 0) if axis else array).reshape(-1)


class Caller:
    """Carries out the calls of one communicator."""

    def __init__(
        self, transport: Transport, engine: Engine, watch: Watch, observers: Observers, node_size: int | None = None
    ) -> None:
        self.transport = transport
        self.engine = engine
        self.watch = watch
        self.observers = observers
        self.choices: tuple[Choices, str] | None = None  # what `auto` keeps to, and this group's name in it
        self.stopwatch: Stopwatch | None = None
        self.planner = Planner(transport, node_size)
        self.is_debugging = is_debugging()
        self.turns = Turns()
        self.receipts: dict[tuple[int, int], Turns] = {}
        transport.names = watch.members
        self.kept = ReadyCalls()
        arena = self._arena()
        self.sharing = None if arena is None else Sharing(arena, self.planner.program)
        self.fit = self._fit()

    def run(self, call: Call, x: Any, algorithm: str, wait: bool, key: tuple[Any, ...] | None = None) -> Any:
        """`x`: what this rank contributes; None: nothing. `key`: under which calls like it may be kept ready."""
        began_s = clock() if self.observers else 0.0
        decided = self._decide(call, x, algorithm, wait)
        sequence = self.watch.sequence + 1
        is_native = (decided.name == "native" and not self._goes_shared(decided.choice)) or decided.device is not None
        if self.is_debugging or not self.turns.is_free:
            first = self._compared(call, algorithm, sequence)
            running = self._later(first, lambda _: self._running(decided, sequence))
        else:
            running = self._running(decided, sequence)
        if key is not None and wait and decided.device is None and self.stopwatch is None:
            self._keep(key, decided)
        self.watch.sequence = sequence  # from here on the call counts: what fails before leaves the ranks in step
        if wait and is_native:
            result = self.engine.run(running)  # the watchdog knows of it from this frame: see `watched_call`
        else:
            result = self._carried_out(running, (sequence, call.collective, call.nbytes), wait, decided.used)
        if self.observers:
            self.observers.tell(began_s, call.collective, CALL if wait else BEGIN, call.nbytes, decided.used)
        return result

    def _keep(self, key: tuple[Any, ...], decided: Decided) -> None:
        """Keep the quick way for calls like this one, where there is one; observed, if this communicator is."""
        quick, call = ready_call(self, decided.call, decided.x, decided.choice), decided.call
        if quick is not None and self.observers:
            quick = self.observers.wrapped(quick, call.collective, call.nbytes, decided.name)
        self.kept.keep(key, quick)

    def breakdown(self, call: Callable[[], object]) -> dict[str, float]:
        """Seconds by part inside one blocking call. It goes the ordinary way: ready calls have no parts to time."""
        decided, stopwatch = dict(self.kept), Stopwatch()
        self.kept.clear()
        self.stopwatch = stopwatch
        if self.sharing is not None:
            self.sharing.stopwatch = stopwatch
        try:
            call()
        finally:
            self.stopwatch = None
            if self.sharing is not None:
                self.sharing.stopwatch = None
            self.kept.update(decided)
        return stopwatch.seconds

    def scatter(self, told: Callable[[], str], made: Callable[[str], Made], given: Scatter) -> Any:
        """A collective that only the root knows: it tells all `told()`, of which every rank makes the call."""
        began_s = clock()
        self.watch.sequence += 1
        sequence = self.watch.sequence
        known: tuple[int, str] = (0, "")  # bytes and algorithm, for observers, once the root has spoken

        def first() -> Steps[str]:
            if self.is_debugging:
                yield from self._agree(given.words(), sequence)
            text = told() if self.transport.rank == given.root else ""
            return (yield from spread(self.transport, text, given.root, self._tag(3, sequence)))

        def running(text: str) -> Running:
            nonlocal known
            call, x, refusal = made(text)
            decided = self._decide(call, x, given.algorithm, given.wait)
            known = (call.nbytes, decided.used)
            running = self._running(decided, sequence)
            return running if refusal is None else running.ending_in(refusal)

        def tell(began_s: float, phase: str) -> None:
            self.observers.tell(began_s, "scatter", phase, *known)

        later, doing = self._later(first(), running), (sequence, "scatter", 0)
        is_observed = bool(self.observers)
        result = (
            self._carried_out(later, doing, wait=True)
            if given.wait
            else self._start(later, doing, tell if is_observed else None)
        )
        if is_observed:
            tell(began_s, CALL if given.wait else BEGIN)
        return result

    def _decide(self, call: Call, x: Any, algorithm: str, wait: bool) -> Decided:
        """All that can be refused has been when this returns, and nothing has been sent."""
        has_result = call.collective not in ("reduce", "gather") or self.transport.rank == call.root
        target = self._target(call) if has_result else None
        uneven = len(set(call.sizes)) > 1
        # Ranks may know different sizes in a private exchange, and all must choose alike: size must not matter then.
        nbytes = 0 if call.private else call.nbytes
        request = Request(call.collective, nbytes, call.like.dtype, call.op, uneven, call.private)
        device = self.transport.device if call.like.is_cuda and algorithm in ("auto", "native") else None
        # What the device's library does is its own, and private sizes must not matter: neither is kept to.
        if algorithm == "auto" and self.choices is not None and device is None and not call.private:
            choices, group = self.choices
            algorithm = choices.pick(
                group, request, lambda: choose(request, "auto", self.transport, self.fit).algorithm
            )
        choice = choose(request, algorithm, self.transport, self.fit)
        return Decided(call, x, choice, device, target, has_result, wait)

    def _running(self, decided: Decided, sequence: int) -> Running:
        """Memory is taken, and nothing sent."""
        try:
            return self._with_memory(decided, sequence)
        except (MemoryError, ValueError, OverflowError) as error:
            if isinstance(error, UsageError):
                raise
            call = decided.call
            words = f"{call.collective} with a result of {call.length:,} elements of {call.like.dtype}"
            raise UsageError(f"{words}: no memory for it here ({error})") from None

    def _with_memory(self, decided: Decided, sequence: int) -> Running:
        call = decided.call
        if decided.device is not None:
            running: Running = decided.device.running(call, decided.x, decided.has_result)
            return running
        given = np.empty(0, call.like.carrier) if decided.x is None else flattened(opened(decided.x)[0], call.axis)
        if call.wire is not call.like:
            given = widened(given, call.like.dtype)
        if self._goes_shared(decided.choice):
            return self._shared(decided, given)
        if decided.name == "native":
            return self._native(decided, given)
        return self._scheduled(decided, given, self._tag(1, sequence))

    def _carried_out(self, running: Running, doing: tuple[int, str, int], wait: bool, algorithm: str = "") -> Any:
        if not wait:
            return self._start(running, doing, self._tells(doing[1], doing[2], algorithm))
        self.watch.enter(*doing)
        try:
            return self.engine.run(running)
        finally:
            self.watch.leave()

    def _compared(self, call: Call, algorithm: str, sequence: int) -> Steps[None]:
        """In debug mode the ranks compare their calls first."""
        if not self.is_debugging:
            return
        counts = (call.sizes, call.received) if call.private else ((), ())
        yield from self._agree(call.words(algorithm), sequence, *counts)

    def _agree(self, words: str, sequence: int, sent: Sequence[int] = (), expected: Sequence[int] = ()) -> Steps[None]:
        yield from compare_calls(self.transport, words, self._tag(2, sequence), sent, expected)

    def _later(self, first: Steps[T], then: Callable[[T], Running]) -> Running:
        """A call that begins when `first` is through and those made before it have begun."""
        turn = self.turns.take()
        begun: list[Running] = []

        def steps() -> Iterator[Token]:
            try:
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

    def _tag(self, kind: int, sequence: int) -> int:
        """Collectives' own messages lie above the user's tags: 1 schedules, 2 comparisons, 3 words; 4 sizes."""
        tags = self.transport.tags
        return kind * tags + sequence % tags

    def _start(
        self, running: Running, doing: tuple[int, str, int], tell: Callable[[float, str], None] | None
    ) -> Handle:
        running.owner = self
        running.name = f"{doing[1]} #{doing[0]} of {self.watch.label}" if doing[0] >= 0 else doing[1]
        self.engine.start(running)
        if tell is None:
            return Handle(self.engine, running, self.watch, doing)
        return ObservedHandle(self.engine, running, self.watch, doing, tell)

    def _tells(self, operation: str, nbytes: int, algorithm: str = "", peer: int = -1) -> Tell | None:
        """What the handle of an observed call tells the observers by; None: there are none."""
        observers = self.observers
        if not observers:
            return None
        return lambda began_s, phase: observers.tell(began_s, operation, phase, nbytes, algorithm, peer)

    @property
    def under_way(self) -> int:
        """Calls of this communicator that have been begun and not finished."""
        return sum(running.owner is self for running in self.engine.pending)

    def _target(self, call: Call) -> Array | None:
        """`out` as a flat array, when the result can be written there as it comes."""
        array = out_array(call.out, call.shape, call.like)
        if array is None or not array.flags.carray or call.wire is not call.like:
            return None
        moved = call.axis == 0 or all(length == 1 for length in call.shape[: call.axis])
        return array.reshape(-1) if moved else None

    def _native(self, decided: Decided, given: Array) -> Running:
        call, target = decided.call, decided.target
        length = call.length if decided.has_result else 0
        result = target if target is not None else np.empty(length, call.wire.carrier)
        if target is not None and np.may_share_memory(given, target) and given.size:
            given = given.copy()
        native = native_of(call, given, result)
        steps = native_steps(self.transport, native, call.wire.dtype)
        if self.stopwatch is not None:
            steps = _as_wire(steps, self.stopwatch)
        return Running(steps, lambda: self._finish(call, result if decided.has_result else None))

    def _scheduled(self, decided: Decided, given: Array, tag: int) -> Running:
        call, target = decided.call, decided.target
        key = ProgramKey(call.collective, decided.name, call.root, call.sizes, call.received, call.wire, call.op)
        is_block = call.collective in ("reduce_scatter", "scatter")
        lo = sum(call.sizes[: self.transport.rank]) if is_block else 0
        bound = self.planner.bound(key, given, None if is_block else target)
        data = bound.spaces.arrays[DATA]
        is_ours = target is None and not is_block and key not in self.planner.free

        def finish() -> Any:
            result = None
            if decided.has_result:
                part = data[lo : lo + call.length]
                result = part if is_ours else target
                if result is None:
                    result = part.copy()
                elif result is not part and result.__array_interface__ != part.__array_interface__:
                    np.copyto(result, part)
            self.planner.done(key, bound)
            return self._finish(call, result)

        return Running(bound.steps(tag, self.stopwatch), finish)

    def _goes_shared(self, choice: Choice) -> bool:
        """Through the arena; or natively, after a look whether all arrays lie there."""
        if self.sharing is None:
            return False
        return is_shared(choice.algorithm) or (choice.direct is not None and self.sharing.arena.live > 0)

    def _shared(self, decided: Decided, given: Array) -> Running:
        assert self.sharing is not None
        call, has_result = decided.call, decided.has_result
        result = decided.target
        if result is None:
            result = np.empty(call.length if has_result else 0, call.wire.carrier)
        steps = self.sharing.steps(self.shared_call(call, decided.choice), given, result)
        return Running(steps, lambda: self._finish(call, result if has_result else None))

    def shared_call(self, call: Call, choice: Choice) -> SharedCall:
        """What all calls like this one have in common."""
        name, dtype = choice.algorithm, call.wire.dtype
        key = ProgramKey(call.collective, name, call.root, call.sizes, call.received, call.wire, call.op)
        is_block = call.collective in ("reduce_scatter", "scatter")
        lo = sum(call.sizes[: self.transport.rank]) if is_block else 0

        def natively(given: Array, result: Array) -> Iterator[Token]:
            if np.may_share_memory(given, result) and given.size:
                given = given.copy()
            native = native_of(call, given, result)
            steps = native_steps(self.transport, native, dtype)
            return steps if self.stopwatch is None else _as_wire(steps, self.stopwatch)

        return SharedCall(key, lo, choice.direct, natively if name == "native" else None)

    def empty(self, shape: tuple[int, ...], like: Like) -> Any:
        """Memory of the arena, for all ranks of the communicator."""
        sharing = self.sharing
        if sharing is None:
            return like.back(np.empty(shape, like.carrier))
        self.watch.sequence += 1

        def running(_: None = None) -> Running:
            steps, made = sharing.empty(shape, like.carrier)
            return Running(steps, lambda: made[0])

        # Its turn in the arena comes after those of calls that have not begun yet, as it does on the other ranks.
        allocation = running() if self.turns.is_free else self._later(_at_once(), running)
        block = self._carried_out(allocation, (self.watch.sequence, "empty", 0), wait=True)
        return like.back(block)

    def _arena(self) -> Arena | None:
        """Memory shared with all ranks of this communicator, where they are on one node. A collective call."""
        transport = self.transport
        common = transport.common(Regions(transport.size, _THREADS_BYTES).nbytes)
        if common is not None:
            return private_arena(common, transport.size, transport.rank, _THREADS_BYTES)
        arena = open_arena(transport.rank, transport.size, self._texts, blocks_bytes=memory_bytes() // 2)
        if arena is not None:
            arena.flags.watch = self.watch
            transport.caps = replace(transport.caps, arena=True)
        return arena

    def _fit(self) -> Fit | None:
        """The machine's fit for this many ranks, read by one of them for all: they must choose alike."""
        transport = self.transport
        if transport.size == 1 or transport.name == "threads":
            return None
        text = self._texts(stored_fit(transport.name, transport.size) if transport.rank == 0 else "")[0]
        return Fit.from_dict(json.loads(text)) if text else None

    def _texts(self, text: str) -> list[str]:
        """Every rank's text before any call has been made."""
        told: list[str] = []

        def steps() -> Iterator[Token]:
            told.extend((yield from exchange(self.transport, text, self._tag(3, 0))))

        self._carried_out(Running(steps(), lambda: None), (0, "connect", 0), wait=True)
        return told

    def _finish(self, call: Call, result: Array | None) -> Any:
        if result is None or call.collective == "barrier":
            return None
        if call.op == "avg":
            divide(result, call.wire.dtype, self.transport.size)
        if call.wire is not call.like:
            total, result = result, np.empty(result.shape, call.like.carrier)
            narrow(total, result, call.like.dtype)
        if call.axis == 0:
            shaped = result.reshape(call.shape)
        else:
            rest = (*call.shape[: call.axis], *call.shape[call.axis + 1 :])
            shaped = np.moveaxis(result.reshape(call.shape[call.axis], *rest), 0, call.axis)
        if call.out is not None:
            store(shaped, call.out)
            return call.out
        return call.like.back(np.ascontiguousarray(shaped) if call.shape else shaped)

    # Messages -----------------------------------------------------------------------------------------------------

    def start_message(self, name: str, message: Message, tag: int, finish: Callable[[], Any]) -> Handle:
        if self.transport.caps.tells_sizes:
            steps = self._plain_message(message, tag)
        else:
            steps = self._sized_send(message, tag) if message.is_send else self._sized_receive(message, tag)
        operation = "send" if message.is_send else "recv"
        began_s = clock() if self.observers else 0.0
        tell = self._tells(operation, message.nbytes, peer=message.peer)
        handle = self._start(Running(steps, finish), (-1, name, message.nbytes), tell)
        if tell is not None:
            tell(began_s, BEGIN)
        return handle

    def _plain_message(self, message: Message, tag: int) -> Iterator[Token]:
        yield self.transport.post([message], tag, exact=True)

    def _header(self, message: Message, tag: int) -> tuple[Array, Token]:
        """The size travels under a tag of its own: receipts of one tag may be begun before the first has come."""
        size = np.array([message.nbytes], np.int64)
        header = Message(message.is_send, message.peer, self.transport.view(as_bytes(size)), size.nbytes)
        return size, self.transport.post([header], self._tag(4, tag))

    def _sized_send(self, message: Message, tag: int) -> Iterator[Token]:
        size, told = self._header(message, tag)
        sent = self.transport.post([message], tag) if message.nbytes else None
        yield told
        del size  # the library read it until here
        if sent is not None:
            yield sent

    def _sized_receive(self, message: Message, tag: int) -> Iterator[Token]:
        """Messages of one source and tag come in the order in which they were asked for, so each waits its turn."""
        key = (message.peer, tag)
        turns = self.receipts.setdefault(key, Turns())
        turn = turns.take()
        try:
            size, told = self._header(message, tag)
            yield told
            yield turn
            nbytes = int(size[0])
            if nbytes != message.nbytes:
                # Taken all the same: the sender waits for it, and it must not be taken for the next one.
                unwanted = self.transport.view(np.empty(nbytes, np.uint8))
                landing = Message(False, message.peer, unwanted, nbytes)
            else:
                landing = message
            come = self.transport.post([landing], tag) if nbytes else None
        finally:
            turn.release()
            if turns.is_free:
                self.receipts.pop(key, None)
        if come is not None:
            yield come
        names = self.transport.names
        if nbytes != message.nbytes:
            raise RunError(wrong_size(names[message.peer], nbytes, names[self.transport.rank], message.nbytes))

    def ask(self, name: str, text: str) -> list[str]:
        """Every rank's text, on every rank."""
        self.watch.sequence += 1
        sequence, told = self.watch.sequence, []

        def steps() -> Iterator[Token]:
            if self.is_debugging:
                yield from self._agree(f"{name}()", sequence)
            told.extend((yield from exchange(self.transport, text, self._tag(3, sequence))))

        self._carried_out(Running(steps(), lambda: None), (sequence, name, 0), wait=True)
        return told

    def split(self, members: Sequence[int], label: str) -> Transport:
        """A transport among the members, for which they wait for one another."""
        with self.watch.during(self.watch.sequence, "split", 0):  # all have been heard of: nobody is waited for long
            return self.transport.split(members, label)


def _as_wire(steps: Iterator[Token], stopwatch: Stopwatch) -> Iterator[Token]:
    """The library's own collective, timed as a whole: it does not say what it does."""
    stopwatch.begin("wire")
    yield from steps
    stopwatch.begin(None)


def _at_once() -> Steps[None]:
    """Nothing to hear from the others first."""
    yield from ()


def native_of(call: Call, given: Array, result: Array) -> NativeCall:
    return NativeCall(call.collective, given, result, call.op, call.root, call.sizes, call.received, call.private)


def watched_call(frame: FrameType) -> tuple[Watch, str, int] | None:
    """What the watchdog makes of a frame: `Caller.run`, or a ready call, inside one of the library's collectives.

    These calls then cost nothing for being watched, which for one of a few microseconds is worth reading locals for.
    """
    if frame.f_code in native_codes:
        watched: tuple[Watch, str, int] = frame.f_locals["watched"]
        return watched
    if frame.f_code is not Caller.run.__code__:
        return None
    known = frame.f_locals
    if not known.get("is_native") or "running" not in known or not known["wait"]:
        return None
    caller, call = known["self"], known["call"]
    return caller.watch, call.collective, call.nbytes


class Closed:
    """Stands where a closed communicator's caller stood: any use says so, and open ones pay nothing for the check."""

    def __init__(self, label: str) -> None:
        self._label = label

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(f"communicator {self._label} is closed")
