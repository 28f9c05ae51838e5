"""Running a program: binding it to memory once, then stepping through it, blocking or in the background.

`Bound` is a program whose every range has become a view of real memory. `steps` is a generator that yields whatever
has to be waited for: a blocking call waits for each, a background call tests. The engine moves *all* that is under way
whenever somebody waits, because two ranks may wait for their handles in different orders.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilemesh.comm.runtime.arithmetic import Combine
from tilemesh.comm.runtime.lower import LANDING, Instruction, Local, Post, Program, Span, Wait
from tilemesh.comm.runtime.observe import Stopwatch
from tilemesh.comm.runtime.transport import Array, Message, Token, Transport, as_bytes
from tilemesh.comm.schedules.schedule import DATA, INPUT, TEMP
from tilemesh.core.errors import RunError

_POST, _WAIT, _COPY, _REDUCE = range(4)
_PARTS = ("wire", "wire", "copy", "reduce")  # of a stopwatch, by instruction


class Bound:
    """A program with its memory: views made once, used at every call."""

    def __init__(self, program: Program, transport: Transport, combine: Combine | None, memory: Memory) -> None:
        self.transport = transport
        self.combine = combine
        self.memory = memory
        self.posts = 0
        self.code: list[tuple[int, Any, Any]] = []
        for instruction in program.instructions:
            self._bind(instruction)

    def _bind(self, instruction: Instruction) -> None:
        if isinstance(instruction, Post):
            self.posts += 1
            messages = [self._message(*message) for message in instruction.messages]
            self.code.append((_POST, instruction.number, messages))
        elif isinstance(instruction, Wait):
            self.code.append((_WAIT, instruction.number, None))
        elif isinstance(instruction, Local):
            target, source = self.memory.view(instruction.target), self.memory.view(instruction.source)
            if instruction.reduce:
                self.code.append((_REDUCE, target, source))
            elif not _is_same(target, source):
                self.code.append((_COPY, target, source))

    def _message(self, is_send: bool, peer: int, span: Span) -> Message:
        region = as_bytes(self.memory.view(span))
        return Message(is_send, peer, self.transport.view(region), region.nbytes)

    def steps(self, tag: int, stopwatch: Stopwatch | None = None) -> Iterator[Token]:
        """Carry the program out, yielding what must be done before it can go on."""
        post, combine, copy = self.transport.post, self.combine, np.copyto
        tokens: list[Token] = [None] * self.posts  # type: ignore[list-item]
        for code, first, second in self.code:
            if stopwatch is not None:
                stopwatch.begin(_PARTS[code])
            if code == _POST:
                tokens[first] = post(second, tag)
            elif code == _WAIT:
                yield tokens[first]
            elif code == _REDUCE:
                combine(first, second)  # type: ignore[misc]
            else:
                copy(first, second)
        if stopwatch is not None:
            stopwatch.begin(None)


class Memory:
    """The spaces of one rank as flat arrays. Given arrays are used as they are; missing ones are made."""

    def __init__(self, program: Program, carrier: np.dtype[Any], given: Array | None, data: Array | None) -> None:
        lengths = program.lengths
        self.spaces: dict[int, Array] = {
            INPUT: np.empty(lengths[INPUT], carrier) if given is None else given,
            DATA: np.empty(lengths[DATA], carrier) if data is None else data,
            TEMP: np.empty(lengths[TEMP], carrier),
            LANDING: np.empty(lengths[LANDING], carrier),
        }

    def view(self, span: Span) -> Array:
        return self.spaces[span.space][span.lo : span.hi]


class Running:
    """A collective under way."""

    def __init__(self, steps: Iterator[Token], finish: Callable[[], Any]) -> None:
        self.steps = steps
        self.finish = finish
        self.owner: object = None  # whoever started it in the background
        self.name = ""  # what to call it when nobody waits for it
        self.token: Token | None = None
        self.is_claimed = False  # a thread is blocked in its token: nobody else may touch it
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def advance(self) -> bool:
        """Go on as far as possible without waiting; True when anything moved. What goes wrong is kept for `wait`."""
        moved = False
        try:
            while not self.is_done and (self.token is None or self.token.test()):
                self.token = next(self.steps, None)
                moved = True
                if self.token is None:
                    self.complete()
        except Exception as error:
            self.error, self.is_done, moved = error, True, True
        return moved

    def complete(self) -> None:
        self.result = self.finish()
        self.is_done = True

    def ending_in(self, refusal: Exception) -> Running:
        """The same exchange, so that the ranks stay in step, whose end is the refusal."""
        finish = self.finish

        def refuse() -> Any:
            finish()
            raise refusal

        self.finish = refuse
        return self


# A thread that only ever gives the interpreter away for a moment has it back before another is awake: with two of them
# in a rank and more ranks than cores, the threads that end gloo's messages did not run for 20 s.
_SPINS = 10
_NAP_S = 100e-6


class Engine:
    """All that is under way in the communicators that came from one `connect`.

    Several threads may be in here at once, each in calls of a communicator of its own: the lock is held while things
    are moved, never while anybody waits.
    """

    def __init__(self) -> None:
        self.pending: list[Running] = []  # always the same list: ready calls look at it
        self.unheard: list[Running] = []  # went wrong in the background, and nobody has waited for them yet
        self.lock = threading.Lock()

    def run(self, running: Running) -> Any:
        """To its end, blocking."""
        if self.pending:
            self.start(running)
            return self.wait(running)
        for token in running.steps:
            token.wait()
        running.complete()
        return running.result

    def start(self, running: Running) -> None:
        running.advance()
        with self.lock:
            if running.error is not None:
                self.unheard.append(running)
            elif not running.is_done:
                self.pending.append(running)

    def progress(self) -> bool:
        """Move all that is under way as far as it goes; True when anything moved."""
        with self.lock:
            # All of them, not up to the first.
            moved = sum(running.advance() for running in self.pending if not running.is_claimed)
            self.unheard += [running for running in self.pending if running.error is not None]
            self.pending[:] = [running for running in self.pending if not running.is_done]
        return moved > 0

    def wait(self, running: Running) -> Any:
        idle = 0  # rounds in a row in which nothing moved
        while not running.is_done:
            if self._claims(running):
                try:
                    running.token.wait()  # type: ignore[union-attr]  # the only one: no need to keep asking
                except Exception as error:
                    running.error, running.is_done = error, True
                finally:
                    running.is_claimed = False
            if self.progress():
                idle = 0
            elif not running.is_done:
                idle += 1
                time.sleep(0 if idle < _SPINS else _NAP_S)
        if running.error is not None:
            with self.lock:
                self.unheard = [other for other in self.unheard if other is not running]
            raise running.error
        return running.result

    @property
    def dropped(self) -> list[str]:
        """What was begun and has neither ended well nor been waited for."""
        return [running.name for running in (*self.unheard, *self.pending)]

    def _claims(self, running: Running) -> bool:
        """Whether nothing else is under way, so that this thread may block; until it is back, it alone has it."""
        with self.lock:
            if self.pending != [running] or running.token is None or running.is_claimed:
                return False
            running.is_claimed = True
            return True


class Turns:
    """Calls that cannot begin at once begin in the order in which they were made, as the library underneath demands.

    Every rank makes its calls in the same order, but what they must hear from the others first may come in any.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.next = 0
        self.over: set[int] = set()

    @property
    def is_free(self) -> bool:
        return self.next == self.taken

    def take(self) -> Turn:
        self.taken += 1
        return Turn(self, self.taken - 1)


class Turn:
    """A token: its call may begin, because all before it have."""

    def __init__(self, turns: Turns, number: int) -> None:
        self.turns = turns
        self.number = number

    def test(self) -> bool:
        return self.turns.next == self.number

    def wait(self) -> None:
        """Only the engine can move those before, and it waits for one alone only when there are none."""
        if not self.test():
            raise RunError(f"call {self.number} of a communicator waits for its turn, and nothing else is under way")

    def release(self) -> None:
        turns = self.turns
        turns.over.add(self.number)
        while turns.next in turns.over:
            turns.over.remove(turns.next)
            turns.next += 1


def _is_same(one: Array, other: Array) -> bool:
    return bool(one.__array_interface__["data"][0] == other.__array_interface__["data"][0])
