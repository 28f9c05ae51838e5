"""One collective call from checked arguments to its result: choose, run, and give the result its shape back."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from tilemesh.comm.runtime import debug
from tilemesh.comm.runtime.arena import Arena, open_arena, private_arena
from tilemesh.comm.runtime.arena import Shape as Placing
from tilemesh.comm.runtime.arguments import TAGS, out_array
from tilemesh.comm.runtime.arithmetic import divide
from tilemesh.comm.runtime.choose import Choice, Request, choose
from tilemesh.comm.runtime.fast import ReadyCalls, ready_call
from tilemesh.comm.runtime.handle import Handle
from tilemesh.comm.runtime.memory import Like, opened, store
from tilemesh.comm.runtime.native import native_steps
from tilemesh.comm.runtime.plan import Planner, Shape
from tilemesh.comm.runtime.run import Engine, Running
from tilemesh.comm.runtime.sharing import SharedCall, Sharing
from tilemesh.comm.runtime.transport import Array, Message, NativeCall, Token, Transport
from tilemesh.comm.runtime.watch import Watch
from tilemesh.comm.schedules.book import is_shared
from tilemesh.comm.schedules.schedule import DATA
from tilemesh.core.errors import UsageError
from tilemesh.measure.machine import memory_bytes

_ARENA_TAG = 6 * TAGS
_THREADS_BYTES = 1 << 30  # of blocks for ranks that are threads: taken from the machine when used


@dataclass(frozen=True)
class Call:
    """A collective as asked for. `shape`: of this rank's result; `sizes`, `received`: elements, as for `layout`."""

    collective: str
    like: Like
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    received: tuple[int, ...] = ()
    op: str = "sum"
    root: int = 0
    axis: int = 0
    out: Any = None
    private: bool = False

    @property
    def nbytes(self) -> int:
        """The payload that all ranks agree on: the whole vector, or all blocks together."""
        total = sum(self.received) if self.private else sum(self.sizes)
        return total * self.like.carrier.itemsize

    @property
    def length(self) -> int:
        """Elements of the result."""
        return math.prod(self.shape)

    def words(self, algorithm: str) -> str:
        sizes = "any sizes" if self.private else f"{sum(self.sizes)} elements"
        if len(set(self.sizes)) > 1 and not self.private:
            sizes += f" in {list(self.sizes)}"
        return f"{self.collective}({sizes} of {self.like.dtype}, op={self.op}, root={self.root}, algorithm={algorithm})"


def flattened(array: Array, axis: int = 0) -> Array:
    """The elements in a row, `axis` slowest; the same memory where it already lies so."""
    return np.ascontiguousarray(np.moveaxis(array, axis, 0) if axis else array).reshape(-1)


class Caller:
    """Carries out the calls of one communicator."""

    def __init__(self, transport: Transport, engine: Engine, watch: Watch, node_size: int | None = None) -> None:
        self.transport = transport
        self.engine = engine
        self.watch = watch
        self.planner = Planner(transport, node_size)
        arena = self._arena()
        self.sharing = None if arena is None else Sharing(arena, self.planner.program)
        if arena is not None:
            arena.flags.watch = watch
        self.ready = ReadyCalls()
        self.is_debugging = debug.is_on()

    def run(self, call: Call, x: Any, algorithm: str, wait: bool, key: tuple[Any, ...] | None = None) -> Any:
        """`x`: what this rank contributes; None: nothing. `key`: under which later calls like it may be kept ready."""
        has_result = call.collective not in ("reduce", "gather") or self.transport.rank == call.root
        target = self._target(call) if has_result else None
        uneven = len(set(call.sizes)) > 1
        # Ranks may know different sizes in a private exchange, and all must choose alike: size must not matter then.
        nbytes = 0 if call.private else call.nbytes
        request = Request(call.collective, nbytes, call.like.dtype, call.op, uneven, call.private)
        choice = choose(request, algorithm, self.transport)
        name = choice.algorithm
        if key is not None and wait:
            self.ready.keep(key, ready_call(self, call, x, choice))
        self._begin(call.collective, call.words(algorithm) if self.is_debugging else "")
        device = self.transport.device if call.like.is_cuda and algorithm in ("auto", "native") else None
        is_native = device is not None or name == "native"
        if device is not None:
            running = device.running(call, x, has_result)
        else:
            given = np.empty(0, call.like.carrier) if x is None else flattened(opened(x)[0], call.axis)
            if self.sharing is not None and (
                is_shared(name) or (choice.direct is not None and self.sharing.arena.live)
            ):
                running = self._shared(call, choice, given, target, has_result)
                is_native = False
            elif is_native:
                running = self._native(call, given, target, has_result)
            else:
                running = self._scheduled(call, name, given, target, has_result, wait)
        if wait and is_native:
            return self.engine.run(running)  # the watchdog knows of it from this frame: see `native_call`
        doing = (self.watch.sequence, call.collective, call.nbytes)
        if not wait:
            return self._start(running, doing)
        self.watch.enter(*doing)
        try:
            return self.engine.run(running)
        finally:
            self.watch.leave()

    def _begin(self, name: str, words: str) -> None:
        """One more call of this communicator; in debug mode the ranks compare theirs first."""
        self.watch.sequence += 1
        if self.is_debugging:
            with self.watch.during(self.watch.sequence, name, 0):
                debug.compare_calls(self.transport, words, self._tag(2))

    def _tag(self, kind: int) -> int:
        """Collectives' own messages lie above the user's tags: 1 schedules, 2 comparisons, 3 words."""
        return kind * TAGS + self.watch.sequence % TAGS

    def _start(self, running: Running, doing: tuple[int, str, int]) -> Handle:
        running.owner = self
        self.engine.start(running)
        return Handle(self.engine, running, self.watch, doing)

    @property
    def under_way(self) -> int:
        """Calls of this communicator that have been begun and not finished."""
        return sum(running.owner is self for running in self.engine.pending)

    def _target(self, call: Call) -> Array | None:
        """`out` as a flat array, when the result can be written there as it comes."""
        array = out_array(call.out, call.shape, call.like)
        if array is None or not array.flags.c_contiguous:
            return None
        moved = call.axis == 0 or all(length == 1 for length in call.shape[: call.axis])
        return array.reshape(-1) if moved else None

    def _native(self, call: Call, given: Array, target: Array | None, has_result: bool) -> Running:
        length = call.length if has_result else 0
        result = target if target is not None else np.empty(length, call.like.carrier)
        if target is not None and np.may_share_memory(given, target) and given.size:
            given = given.copy()
        native = NativeCall(call.collective, given, result, call.op, call.root, call.sizes, call.received)
        steps = native_steps(self.transport, native, call.like.dtype)
        return Running(steps, lambda: self._finish(call, result if has_result else None))

    def _scheduled(
        self, call: Call, name: str, given: Array, target: Array | None, has_result: bool, wait: bool
    ) -> Running:
        shape = Shape(call.collective, name, call.root, call.sizes, call.received, call.like, call.op)
        is_block = call.collective in ("reduce_scatter", "scatter")
        lo = sum(call.sizes[: self.transport.rank]) if is_block else 0
        bound = self.planner.bound(shape, given, None if is_block else target)
        data = bound.memory.spaces[DATA]
        is_ours = target is None and not is_block and shape not in self.planner.free

        def finish() -> Any:
            result = None
            if has_result:
                part = data[lo : lo + call.length]
                result = part if is_ours else target
                if result is None:
                    result = part.copy()
                elif result is not part and result.__array_interface__ != part.__array_interface__:
                    np.copyto(result, part)
            self.planner.done(shape, bound)
            return self._finish(call, result)

        return Running(bound.steps(self._tag(1)), finish)

    def _goes_shared(self, choice: Choice) -> bool:
        """Through the arena; or natively, after a look whether all arrays lie there."""
        if self.sharing is None:
            return False
        return is_shared(choice.algorithm) or (choice.direct is not None and self.sharing.arena.live > 0)

    def _shared(self, call: Call, choice: Choice, given: Array, target: Array | None, has_result: bool) -> Running:
        assert self.sharing is not None
        result = np.empty(call.length if has_result else 0, call.like.carrier) if target is None else target
        steps = self.sharing.steps(self.shared_call(call, choice), given, result)
        return Running(steps, lambda: self._finish(call, result if has_result else None))

    def shared_call(self, call: Call, choice: Choice) -> SharedCall:
        """What all calls like this one have in common."""
        name, dtype = choice.algorithm, call.like.dtype
        shape = Shape(call.collective, name, call.root, call.sizes, call.received, call.like, call.op)
        is_block = call.collective in ("reduce_scatter", "scatter")
        lo = sum(call.sizes[: self.transport.rank]) if is_block else 0

        def natively(given: Array, result: Array) -> Iterator[Token]:
            if np.may_share_memory(given, result) and given.size:
                given = given.copy()
            native = NativeCall(call.collective, given, result, call.op, call.root, call.sizes, call.received)
            return native_steps(self.transport, native, dtype)

        return SharedCall(shape, lo, choice.direct, natively if name == "native" else None)

    def empty(self, shape: tuple[int, ...], like: Like) -> Any:
        """Memory of the arena, for all ranks of the communicator."""
        self._begin("empty", f"empty({shape} of {like.dtype})")
        if self.sharing is None:
            return like.back(np.empty(shape, like.carrier))
        steps, made = self.sharing.empty(shape, like.carrier)
        with self.watch.during(self.watch.sequence, "empty", 0):
            self.engine.run(Running(steps, lambda: None))
        return like.back(made[0])

    def _arena(self) -> Arena | None:
        """Memory shared with all ranks of this communicator, where they are on one node. A collective call."""
        transport = self.transport
        if transport.caps.arena:  # threads
            shape = Placing(transport.size, _THREADS_BYTES)
            held: Any = transport.arena(shape.nbytes)
            memory = held.of(0)

            def pause() -> None:
                held.shared.world.require_whole()
                time.sleep(0)

            return private_arena(memory, transport.size, transport.rank, _THREADS_BYTES, pause)
        numbers = itertools.count(_ARENA_TAG)

        def exchange(text: str) -> list[str]:
            with self.watch.during(self.watch.sequence, "connect", 0):
                return debug.exchange_text(transport, text, next(numbers))

        arena = open_arena(transport.rank, transport.size, exchange, blocks_bytes=memory_bytes() // 2)
        if arena is not None:
            transport.caps = replace(transport.caps, arena=True)
        return arena

    def _finish(self, call: Call, result: Array | None) -> Any:
        if result is None or call.collective == "barrier":
            return None
        if call.op == "avg":
            divide(result, call.like.dtype, self.transport.size)
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
        def steps() -> Iterator[Token]:
            if message.nbytes:
                yield self.transport.post([message], tag)

        return self._start(Running(steps(), finish), (-1, name, message.nbytes))

    def tell(self, text: str, root: int) -> str:
        """The root's text, to everybody."""
        self._begin("scatter", f"scatter(root={root})")
        with self.watch.during(self.watch.sequence, "scatter", 0):
            return debug.spread_text(self.transport, text, root, self._tag(3))

    def ask(self, name: str, text: str) -> list[str]:
        """Every rank's text, on every rank."""
        self._begin(name, f"{name}()")
        with self.watch.during(self.watch.sequence, name, 0):
            return debug.exchange_text(self.transport, text, self._tag(3))

    def split(self, members: Sequence[int], label: str) -> Transport:
        """A transport among the members, for which they wait for one another."""
        with self.watch.during(self.watch.sequence, "split", 0):
            return self.transport.split(members, label)


def native_call(frame: FrameType) -> tuple[Watch, str, int] | None:
    """What the watchdog makes of a frame: that of `Caller.run` while it is inside one of the library's collectives.

    These calls then cost nothing for being watched, which for one of a few microseconds is worth reading locals for.
    """
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
