"""One collective call from checked arguments to its result: choose, run, and give the result its shape back.

A call is decided upon (which algorithm, in whose memory), becomes something that can be carried out (`Running`), and is
waited for or started. There are four ways: the library's own collective, GPU memory, the node's shared memory, and a
schedule of messages. `Call` and `Decided`, the call as values, are in `call_parts.py`: `ready.py`, `sharing.py` and the
transports take them too, and this file imports those. What a call like it will need the next time is kept
(`ready.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilemesh.comm.runtime.arithmetic import divide, is_complex
from tilemesh.comm.runtime.call_parts import Call, Decided, Made, Scatter
from tilemesh.comm.runtime.choose import Request, choose, refuses
from tilemesh.comm.runtime.engine import Running
from tilemesh.comm.runtime.flags import CallDigest
from tilemesh.comm.runtime.group import Group
from tilemesh.comm.runtime.memory import flattened, opened, out_array, store
from tilemesh.comm.runtime.native import narrow, native_steps, widened
from tilemesh.comm.runtime.observe import BEGIN, CALL, clock
from tilemesh.comm.runtime.ready import ready_call
from tilemesh.comm.runtime.texts import Steps, spread
from tilemesh.comm.runtime.transport import Array
from tilemesh.comm.schedules.schedule import DATA
from tilemesh.core.errors import UsageError

_MOST_DIGESTS = 4096  # kinds of calls whose words are kept


class Caller(Group):
    """Carries out the collectives of one communicator."""

    def run(self, call: Call, x: Any, algorithm: str, wait: bool, key: tuple[Any, ...] | None = None) -> Any:
        """`x`: what this rank contributes; None: nothing. `key`: under which calls like it may be kept ready."""
        is_observed = self.observers.attached  # the list itself: asking an object would cost every call a function
        began_s = clock() if is_observed else 0.0
        call = call._replace(digest=self._digest(call, algorithm))
        decided = self._decide(call, x, algorithm, wait)
        sequence = self.watch.sequence + 1
        is_shared = decided.device is None and self.goes_shared(decided.choice)
        is_native = (decided.name == "native" and not is_shared) or decided.device is not None
        comparison = None if is_shared or self.is_debugging else self.comparison(call.digest)
        if comparison is not None and wait and self.turns.is_free:
            self.watch.sequence = sequence  # as on ranks that make another call
            self.carry_out(Running(comparison(), lambda: None), (sequence, call.collective, call.nbytes))
            comparison = None
        if comparison is not None or self.is_debugging or not self.turns.is_free:
            first = self._compared(call, sequence)
            running = self.later(first, lambda _: self._running(decided, sequence), comparison)
        else:
            running = self._running(decided, sequence)
        if key is not None and wait and decided.device is None and self.stopwatch is None:
            self._keep(key, decided)
        self.watch.sequence = sequence  # from here on the call counts: what fails before leaves the ranks in step
        if wait and is_native:
            self.watch.native = (call.collective, call.nbytes)
            try:
                result = self.engine.run(running)
            finally:
                self.watch.native = None
        else:
            doing = (sequence, call.collective, call.nbytes)
            if wait:
                result = self.carry_out(running, doing)
            else:
                result = self.start(running, doing, self.teller(call.collective, call.nbytes, decided.used))
        if is_observed:
            self.observers.tell(began_s, call.collective, CALL if wait else BEGIN, call.nbytes, decided.used)
        return result

    def _keep(self, key: tuple[Any, ...], decided: Decided) -> None:
        """Keep the quick way for calls like this one, where there is one; observed, if this communicator is."""
        call = decided.call
        shape = call.shape if decided.x is None else tuple(decided.x.shape)  # a broadcast: who brings nothing knows it
        quick = ready_call(self, call, shape, decided.choice)
        if quick is not None and self.observers:
            quick = self.observers.wrapped(quick, call.collective, call.nbytes, decided.name)
        self.ready.keep(key, quick)

    def scatter(self, describe: Callable[[], str], prepare: Callable[[str], Made], options: Scatter) -> Any:
        """A collective that only the root knows: it tells all `told()`, of which every rank makes the call."""
        began_s = clock()
        self.watch.sequence += 1
        sequence = self.watch.sequence
        known: tuple[int, str] = (0, "")  # bytes and algorithm, for observers, once the root has spoken

        comparison = None if self.is_debugging else self.comparison(CallDigest.of("scatter", 0, options.words()))

        def first() -> Steps[str]:
            if self.is_debugging:
                yield from self.agree(options.words(), sequence)
            text = describe() if self.transport.rank == options.root else ""
            return (yield from spread(self.transport, text, options.root, self.tag(3, sequence)))

        def running(text: str) -> Running:
            nonlocal known
            call, x, refusal = prepare(text)
            decided = self._decide(call, x, options.algorithm, options.wait)
            known = (call.nbytes, decided.used)
            running = self._running(decided, sequence)
            return running if refusal is None else running.ending_in(refusal)

        def tell(began_s: float, phase: str) -> None:
            self.observers.tell(began_s, "scatter", phase, *known)

        later, doing, is_observed = (
            self.later(first(), running, comparison),
            (sequence, "scatter", 0),
            bool(self.observers),
        )
        if options.wait:
            result = self.carry_out(later, doing)
        else:
            result = self.start(later, doing, tell if is_observed else None)
        if is_observed:
            tell(began_s, CALL if options.wait else BEGIN)
        return result

    def _decide(self, call: Call, x: Any, algorithm: str, wait: bool) -> Decided:
        """All that can be refused has been when this returns, and nothing has been sent."""
        has_result = call.collective not in ("reduce", "gather") or self.transport.rank == call.root
        target = self._target(call) if has_result else None
        uneven = len(set(call.sizes)) > 1
        # Ranks may know different sizes in a private exchange, and all must choose alike: size must not matter then.
        nbytes = 0 if call.private else call.nbytes
        request = Request(call.collective, nbytes, call.like.dtype, call.op, uneven, call.private)
        by_device = call.like.is_cuda and algorithm in ("auto", "native") and not is_complex(call.like.dtype)
        device = self.device_for(by_device)
        # What the device's library does is its own, and private sizes must not matter: neither is kept to.
        if algorithm == "auto" and self.choices is not None and device is None and not call.private:
            choices, group = self.choices
            algorithm = choices.pick(
                group,
                request,
                lambda: choose(request, "auto", self.transport, self.fit).algorithm,
                lambda name: refuses(request, name, self.transport) is None,
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
        inputs = np.empty(0, call.like.carrier) if decided.x is None else flattened(opened(decided.x)[0], call.axis)
        if call.wire is not call.like:
            inputs = widened(inputs, call.like.dtype)
        if self.goes_shared(decided.choice):
            return self._shared(decided, inputs)
        if decided.name == "native":
            return self._native(decided, inputs)
        return self._scheduled(decided, inputs, self.tag(1, sequence))

    def _digest(self, call: Call, algorithm: str) -> CallDigest:
        """What every rank must ask for; kept, because the words take longer to make than a small call."""
        key = (*call[:1], call.like.dtype, *call[2:8], call.private, algorithm)
        digest = self.digests.get(key)
        if digest is None:
            if len(self.digests) >= _MOST_DIGESTS:
                self.digests.clear()
            digest = self.digests[key] = CallDigest.of(call.collective, call.nbytes, call.words(algorithm))
        return digest

    def _compared(self, call: Call, sequence: int) -> Steps[None]:
        """In debug mode the ranks compare every call first, in words."""
        if self.is_debugging:
            sent, expected = (call.sizes, call.received) if call.private else ((), ())
            yield from self.agree(call.digest.words, sequence, sent, expected)

    def _target(self, call: Call) -> Array | None:
        """`out` as a flat array, when the result can be written there as it comes."""
        array = out_array(call.out, call.shape, call.like)
        if array is None or not array.flags.carray or call.wire is not call.like:
            return None
        moved = call.axis == 0 or all(length == 1 for length in call.shape[: call.axis])
        return array.reshape(-1) if moved else None

    def _native(self, decided: Decided, inputs: Array) -> Running:
        call, target = decided.call, decided.target
        length = call.length if decided.has_result else 0
        result = target if target is not None else np.empty(length, call.wire.carrier)
        steps = native_steps(self.transport, call, inputs, result, self.stopwatch)
        return Running(steps, lambda: self._finish(call, result if decided.has_result else None))

    def _scheduled(self, decided: Decided, inputs: Array, tag: int) -> Running:
        call, target = decided.call, decided.target
        key, is_block = call.key(decided.name), call.is_block
        lo = call.begins_at(self.transport.rank) if is_block else 0
        bound = self.planner.bound(key, inputs, None if is_block else target)
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

    def _shared(self, decided: Decided, inputs: Array) -> Running:
        assert self.sharing is not None
        call, has_result = decided.call, decided.has_result
        result = decided.target
        if result is None:
            result = np.empty(call.length if has_result else 0, call.wire.carrier)
        steps = self.sharing.steps(self.sharing.call(call, decided.choice), inputs, result)
        return Running(steps, lambda: self._finish(call, result if has_result else None))

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
