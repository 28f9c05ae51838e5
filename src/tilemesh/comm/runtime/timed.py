"""Where the time of one call went: the same program, with the clock read between its instructions.

What is left of a call's whole time after copy, wire (messages, or the library's own collective), reduce and wait
(meetings) is set-up. Reading the clock costs about 0.1 µs an instruction, so this is for reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tilemesh.comm.runtime import run, shared

if TYPE_CHECKING:
    from tilemesh.comm.runtime.communicator import Communicator

PARTS = ("copy", "wire", "reduce", "wait")

_SHARED = {
    shared._MEET: "wait",
    shared._PUT: "copy",
    shared._GET: "copy",
    shared._OWN: "copy",
    shared._REDUCE: "reduce",
    shared._REDUCE_ON_STAGE: "reduce",
    shared._ADD_TO_OWN: "reduce",
}
_MESSAGES = {run._POST: "wire", run._WAIT: "wire", run._COPY: "copy", run._REDUCE: "reduce"}


def where(comm: Communicator, call: Callable[[], object]) -> dict[str, float]:
    """Seconds inside one call's program by part, on this rank. The call must have been made before, and be blocking."""
    spent = dict.fromkeys(PARTS, 0.0)
    programs = 0

    def shared_steps(self: Any, given: Any, data: Any, *, is_met: bool = False) -> Any:
        nonlocal programs
        programs += 1
        half = self.arena.half() if self.uses_stage else 0
        for code, one, two in self.code[half]:
            began = time.perf_counter()
            if code != shared._MEET:
                self._do(code, one, two, given, data)
            elif not is_met:
                self.arena.flags.meet()
            if code == shared._MEET:
                is_met = False
            spent[_SHARED[code]] += time.perf_counter() - began
        yield from ()

    def message_steps(self: Any, tag: int) -> Any:
        nonlocal programs
        programs += 1
        tokens: list[Any] = [None] * self.posts
        for code, first, second in self.code:
            began = time.perf_counter()
            if code == run._POST:
                tokens[first] = self.transport.post(second, tag)
            elif code == run._WAIT:
                tokens[first].wait()
            elif code == run._REDUCE:
                self.combine(first, second)
            else:
                first[...] = second
            spent[_MESSAGES[code]] += time.perf_counter() - began
        yield from ()

    def last_steps(self: Any, given: Any, data: Any) -> Any:
        nonlocal programs
        programs += 1
        flags, half = self.arena.flags, self.arena.half()
        clock = [time.perf_counter()]
        self.mine[half][:] = given
        clock.append(time.perf_counter())
        is_last = flags.is_last()
        if not is_last:
            flags.await_published()
        clock.append(time.perf_counter())
        if is_last:
            self.add(half)
        clock.append(time.perf_counter())
        data[:] = self.parts[half][flags.published()]
        clock.append(time.perf_counter())
        for part, (began, ended) in zip(("copy", "wait", "reduce", "copy"), pairwise(clock), strict=True):
            spent[part] += ended - began
        yield from ()

    kept = (shared.Bound.steps, run.Bound.steps, dict(comm._ready), shared.ByLast.steps)
    comm._ready.clear()  # ready calls have no steps to look at
    shared.Bound.steps, run.Bound.steps = shared_steps, message_steps  # type: ignore[method-assign]
    shared.ByLast.steps = last_steps  # type: ignore[method-assign]
    try:
        began = time.perf_counter()
        call()
        total = time.perf_counter() - began
    finally:
        shared.Bound.steps, run.Bound.steps = kept[0], kept[1]  # type: ignore[method-assign]
        shared.ByLast.steps = kept[3]  # type: ignore[method-assign]
        comm._ready.update(kept[2])
    if not programs:
        spent["wire"] = total  # the library's own: it does not say
    return spent
