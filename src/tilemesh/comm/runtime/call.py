"""One collective call from checked arguments to its result: choose, run, and give the result its shape back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilemesh.comm.runtime import debug
from tilemesh.comm.runtime.arguments import TAGS, out_array
from tilemesh.comm.runtime.arithmetic import divide
from tilemesh.comm.runtime.choose import Request, choose
from tilemesh.comm.runtime.handle import Handle
from tilemesh.comm.runtime.memory import Like, opened, store
from tilemesh.comm.runtime.native import native_steps
from tilemesh.comm.runtime.plan import Planner, Shape
from tilemesh.comm.runtime.run import Engine, Running
from tilemesh.comm.runtime.transport import Array, Message, NativeCall, Token, Transport
from tilemesh.comm.runtime.watch import Watch
from tilemesh.comm.schedules.schedule import DATA


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

    def __init__(
        self, transport: Transport, engine: Engine, watch: Watch, label: str, node_size: int | None = None
    ) -> None:
        self.transport = transport
        self.engine = engine
        self.watch = watch
        self.label = label
        self.planner = Planner(transport, node_size)
        self.sequence = 0
        self.is_debugging = debug.is_on()

    def run(self, call: Call, x: Any, algorithm: str, wait: bool) -> Any:
        """`x`: what this rank contributes; None: nothing."""
        has_result = call.collective not in ("reduce", "gather") or self.transport.rank == call.root
        target = self._target(call) if has_result else None
        uneven = len(set(call.sizes)) > 1
        # Ranks may know different sizes in a private exchange, and all must choose alike: size must not matter then.
        nbytes = 0 if call.private else call.nbytes
        request = Request(call.collective, nbytes, call.like.dtype, call.op, uneven, call.private)
        name = choose(request, algorithm, self.transport).algorithm
        self._begin(call.collective, call.words(algorithm) if self.is_debugging else "")
        device = self.transport.device if call.like.is_cuda and algorithm in ("auto", "native") else None
        if device is not None:
            running = device.running(call, x, has_result)
        else:
            given = np.empty(0, call.like.carrier) if x is None else flattened(opened(x)[0], call.axis)
            make = self._native if name == "native" else self._scheduled
            running = make(call, name, given, target, has_result, wait)
        doing = (self.label, self.sequence, call.collective, call.nbytes)
        if not wait:
            self.watch.note(self.label, self.sequence)
            self.engine.start(running)
            return Handle(self.engine, running, self.watch, doing)
        self.watch.enter(*doing)
        try:
            return self.engine.run(running)
        finally:
            self.watch.leave()

    def _begin(self, name: str, words: str) -> None:
        """One more call of this communicator; in debug mode the ranks compare theirs first."""
        self.sequence += 1
        if self.is_debugging:
            with self.watch.during(self.label, self.sequence, name, 0):
                debug.compare_calls(self.transport, words, 2 * TAGS + self.sequence % TAGS)

    def _target(self, call: Call) -> Array | None:
        """`out` as a flat array, when the result can be written there as it comes."""
        array = out_array(call.out, call.shape, call.like)
        if array is None or not array.flags.c_contiguous:
            return None
        moved = call.axis == 0 or all(length == 1 for length in call.shape[: call.axis])
        return array.reshape(-1) if moved else None

    def _native(
        self, call: Call, name: str, given: Array, target: Array | None, has_result: bool, wait: bool
    ) -> Running:
        length = _length(call) if has_result else 0
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
        bound = self.planner.bound(shape, given, None if is_block else target, keeps=wait)
        data = bound.memory.spaces[DATA]
        is_ours = target is None and not is_block and shape not in self.planner.free and bound.memory.arena is None

        def finish() -> Any:
            result = None
            if has_result:
                part = data[lo : lo + _length(call)]
                result = part if is_ours else target
                if result is None:
                    result = part.copy()
                elif result is not part and result.__array_interface__ != part.__array_interface__:
                    np.copyto(result, part)
            self.planner.done(shape, bound)
            return self._finish(call, result)

        return Running(bound.steps(TAGS + self.sequence % TAGS), finish)

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

        running = Running(steps(), finish)
        self.engine.start(running)
        return Handle(self.engine, running, self.watch, (self.label, -1, name, message.nbytes))

    def tell(self, text: str, root: int) -> str:
        """The root's text, to everybody."""
        self._begin("scatter", f"scatter(root={root})")
        with self.watch.during(self.label, self.sequence, "scatter", 0):
            return debug.spread_text(self.transport, text, root, 3 * TAGS + self.sequence % TAGS)

    def ask(self, name: str, text: str) -> list[str]:
        """Every rank's text, on every rank."""
        self._begin(name, f"{name}()")
        with self.watch.during(self.label, self.sequence, name, 0):
            return debug.exchange_text(self.transport, text, 3 * TAGS + self.sequence % TAGS)


def _length(call: Call) -> int:
    length = 1
    for part in call.shape:
        length *= part
    return length
