"""What `wait=False` returns: a call under way. Until `wait()` has returned, neither input nor result is yours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilemesh.comm.runtime.observe import TEST, WAIT, clock
from tilemesh.comm.runtime.run import Engine, Running
from tilemesh.comm.runtime.watch import Watch


class Handle:
    """`wait()` returns the result; `test()` moves all that is under way and says whether this one is done.

    There is no thread in the background: things move inside `test()`, `wait()` and other calls of the communicator.
    """

    def __init__(self, engine: Engine, running: Running, watch: Watch, doing: tuple[int, str, int]) -> None:
        self._engine = engine
        self._running = running
        self._watch = watch
        self._doing = doing

    def test(self) -> bool:
        if not self._running.is_done:
            self._engine.progress()
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
        engine: Engine,
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
