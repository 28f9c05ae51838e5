"""All that is under way: calls are generators that yield what must be done before they can go on.

A blocking call waits for each thing that it yields, a background call tests. The engine moves *all* that is under way
whenever somebody waits, because two ranks may wait for their handles in different orders.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tilemesh.comm.runtime.observe import TEST, WAIT, clock
from tilemesh.comm.runtime.transport import Token
from tilemesh.comm.runtime.watch import Watch
from tilemesh.core.errors import RunError


class Running:
    """A collective under way."""

    def __init__(self, steps: Iterator[Token], finish: Callable[[], Any]) -> None:
        self.steps = steps
        self.finish = finish
        self.owner: object = None  # whoever started it in the background
        self.name = ""  # what to call it when nobody waits for it
        self.token: Token | None = None
        self.is_claimed = False  # a thread is blocked in its token: nobody else may touch it
        self.is_napping = False  # who waits for it leaves its core to others meanwhile
        self.is_free = False  # one step that the library ends by itself: only who asks for it looks at it
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def advance(self, is_asked_for: bool = False) -> bool:
        """Go on as far as possible without waiting; True when anything moved. What goes wrong is kept for `wait`."""
        moved, looks = False, is_asked_for or not self.is_free
        try:
            while not self.is_done and (self.token is None or (looks and self.token.test())):
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
# A library moves at most a few hundred KiB of a message each time it is asked; looking takes some 10 us.
_MOVED_EVERY_S = 200e-6


class CallEngine:
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

    def progress(self, asked_for: Running | None = None) -> bool:
        """Move all that is under way as far as it goes; True when anything moved."""
        with self.lock:
            # All of them, not up to the first.
            moved = sum(running.advance(running is asked_for) for running in self.pending if not running.is_claimed)
            self.unheard += [running for running in self.pending if running.error is not None]
            self.pending[:] = [running for running in self.pending if not running.is_done]
        return moved > 0

    def wait(self, running: Running) -> Any:
        idle = 0  # rounds in a row in which nothing moved
        while not running.is_done:
            if self._claims(running):
                try:
                    running.token.wait()  # type: ignore[union-attr]  # nothing else needs anybody
                    if running.is_free:
                        running.token = None
                except Exception as error:
                    running.error, running.is_done = error, True
                finally:
                    running.is_claimed = False
            if self.progress(running):
                idle = 0
            elif not running.is_done:
                idle += 1
                time.sleep(0 if idle < _SPINS else _NAP_S)
        if running.error is not None:
            with self.lock:
                self.unheard = [other for other in self.unheard if other is not running]
            raise running.error
        return running.result

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Inside, a thread moves what is under way while this one computes."""
        over = threading.Event()

        def move() -> None:
            while not over.wait(_MOVED_EVERY_S):
                if self.pending:
                    self.progress()

        mover = threading.Thread(target=move, name="tilemesh-mover", daemon=True)
        mover.start()
        try:
            yield
        finally:
            over.set()
            mover.join()

    @property
    def dropped(self) -> list[str]:
        """What was begun and has neither ended well nor been waited for."""
        return [running.name for running in (*self.unheard, *self.pending)]

    def _claims(self, running: Running) -> bool:
        """Whether nothing else under way needs anybody, so that this thread may block; until it is back, it alone has
        this one."""
        with self.lock:
            is_alone = all(other is running or other.is_free for other in self.pending)
            if not is_alone or running.is_napping or running.token is None or running.is_claimed:
                return False
            if running not in self.pending:
                return False
            running.is_claimed = True
            return True


class Handle:
    """What `wait=False` returns. Until `wait()` has returned, neither input nor result is yours.

    `wait()` returns the result; `test()` moves all that is under way and says whether this one is done.

    There is no thread in the background, unless the caller is inside `Communicator.moving()`: things move inside
    `test()`, `wait()` and other calls of the communicator.
    """

    def __init__(self, engine: CallEngine, running: Running, watch: Watch, doing: tuple[int, str, int]) -> None:
        self._engine = engine
        self._running = running
        self._watch = watch
        self._doing = doing

    def test(self) -> bool:
        if not self._running.is_done:
            self._engine.progress(self._running)
        return self._running.is_done

    def wait(self) -> Any:
        if self._running.is_done and self._running.error is None:
            return self._running.result
        self._watch.enter(*self._doing)
        try:
            return self._engine.wait(self._running)
        finally:
            self._watch.leave()

    def __repr__(self) -> str:
        sequence, name, _ = self._doing
        what = f"{name} #{sequence}" if sequence >= 0 else name
        return f"<{what} of {self._watch.label}: {'done' if self._running.is_done else 'under way; call wait()'}>"


class ObservedHandle(Handle):
    """The handle of an observed call. `tell(began_s, phase)`: a test or a wait that began then is over."""

    def __init__(
        self,
        engine: CallEngine,
        running: Running,
        watch: Watch,
        doing: tuple[int, str, int],
        tell: Callable[[float, str], None],
    ) -> None:
        super().__init__(engine, running, watch, doing)
        self._tell = tell

    def test(self) -> bool:
        began_s = clock()
        is_done = super().test()
        self._tell(began_s, TEST)
        return is_done

    def wait(self) -> Any:
        began_s = clock()
        result = super().wait()
        self._tell(began_s, WAIT)
        return result


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
