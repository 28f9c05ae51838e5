"""What a rank does when: spans for the trace, totals for the summary, and the record the launcher reads after a death.

The one idea: an exchange is seen where it happens. The recorder observes the mesh's communicators (`comm.observe`), so
that each collective and message adds its seconds and bytes under its axis and name; whoever calls them (layers, the
gradient exchange) knows nothing of it. A group over several axes counts for them together ("dp+cp"), whatever is split
from a group counts for that group, and what is along no axis (agreements of all ranks) is "control".

Calls and bytes are counted exactly. While steps are traced every call is timed and drawn; after that, of repeated calls
that take less than 10 µs one in 61, which stands for the others: timing all would cost a small all_reduce a tenth.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tilemesh.comm.runtime.observe import EVERY, WAIT, Note, Observer, Seen
from tilemesh.core.step.action import Action, parts
from tilemesh.measure.trace import Trace
from tilemesh.parallel.experts import ExpertRows
from tilemesh.parallel.mesh import Mesh

# What the seconds of a step are divided into; the rest of a step is compute.
EXCHANGE, DATA, IDLE = "exchange", "data", "idle"
EXPERTS = "experts"  # the lane of what passes exchange with experts of other ranks
CONTROL = "control"  # the axis of what all ranks of the mesh exchange


@dataclasses.dataclass
class Moved:
    """What went over one axis by one operation."""

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    """Those within steps: neither of held-out text nor of a sample."""


class Recorder:
    """One rank's record. `at` says what the rank is doing, to whoever asks after a fault."""

    def __init__(self, trace: Trace, at: Callable[[str], None] = lambda text: None) -> None:
        self.trace = trace
        self._at = at
        self.step = 0
        self.is_in_step = False
        self.at_pass = Action("F", 0, 0)
        """The pass that is under way, or was the last."""
        self.live: Callable[[], int] | None = None
        """Bytes alive for the step under way, where they are counted."""
        self.seconds: dict[str, float] = {}
        self.moved: dict[tuple[str, str], Moved] = {}
        self.tell: Callable[[], None] = lambda: None
        """Has this recorder told of calls that were only counted so far."""

    def at(self, what: str) -> None:
        self._at(f"step {self.step}: {what}")

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What is exchanged meanwhile counts for a step."""
        self.tell()
        self.is_in_step = True
        try:
            yield
        finally:
            self.tell()
            self.is_in_step = False

    @contextmanager
    def span(self, name: str, kind: str = "compute") -> Iterator[None]:
        """A stretch of this step; its seconds count for its kind."""
        self._at(f"step {self.step}: {name}")
        began = time.perf_counter()
        with self.trace.span(name, kind=kind, step=self.step):
            yield
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - began

    def action(self, action: Action, do: Callable[[], None]) -> None:
        """An action of a step's list; drawn while steps are traced."""
        self.at_pass = action
        if not self.trace.on:
            do()
            if self.live is not None:
                self.live()
            return
        began = time.perf_counter()
        do()
        ended = time.perf_counter()
        self._draw(action, began, ended, live=None if self.live is None else self.live())

    def holds(self, action: Action) -> None:
        """What is alive after a pass that is not an action of a list: a moment in the trace, where it is counted."""
        if self.live is not None and self.trace.on:
            now = time.perf_counter()
            self._draw(action, now, now, live=self.live())

    def exchange_within(self, what: ExpertRows, began_s: float, ended_s: float) -> None:
        """Rows on their way between experts' ranks: in a lane of their own, since what is computed meanwhile has its
        spans too."""
        if self.trace.on and self.is_in_step:
            now = self.at_pass
            for part in parts(now) if now.kind == "FB" else (now,):
                if (part.kind == "F") == (what.of == "activation"):
                    now = part
            action = now._replace(kind=what.kind, of=what.of, layer=what.layer, version=0, pair=None)
            self._draw(action, began_s, ended_s, lane=EXPERTS, bytes=what.nbytes)

    def _draw(self, action: Action, began_s: float, ended_s: float, lane: str = "", **more: int | None) -> None:
        details: dict[str, Any] = {"step": self.step, "chunk": action.chunk, "microbatch": action.microbatch}
        details |= {name: value for name, value in more.items() if value is not None}
        self.trace.add(str(action), began_s, ended_s, kind="action", lane=lane, action=action.kind, **details)

    def observer(self, mesh: Mesh) -> Observer:
        """What observes the communicators of a mesh. Making groups and memory does not count as exchange."""

        def observe(seen: Seen) -> Note | None:
            is_exchange = bool(seen.algorithm) or seen.peer >= 0
            return self._note(mesh.axes_of(seen.group) or CONTROL, seen) if is_exchange else None

        return observe

    def _note(self, axis: str, seen: Seen) -> Note:
        """Of a call under way only the beginning and the waiting are drawn; the tests in between just add seconds."""
        name = f"wait {seen.operation}" if seen.phase == WAIT else seen.operation
        details: dict[str, Any] = {"bytes": seen.nbytes, "group": axis}
        if seen.is_new:
            details["algorithm"] = seen.algorithm
        is_drawn = seen.is_new or seen.phase == WAIT
        calls, nbytes, trace = int(seen.is_new), seen.nbytes * seen.is_new, self.trace
        moved = self.moved.setdefault((axis, seen.operation), Moved())  # once per kind of call, not once per call

        def note(began_s: float, ended_s: float, number: int) -> None:
            if is_drawn and trace.on and number == 1:
                trace.add(name, began_s, ended_s, kind=EXCHANGE, **details)
            seconds = (ended_s - began_s) * number
            moved.calls += calls * number
            moved.nbytes += nbytes * number
            moved.seconds += seconds
            if self.is_in_step:
                moved.step_seconds += seconds

        return note

    def message(self, axis: str, operation: str, nbytes: int, began_s: float) -> None:
        """An exchange that ended now and that no communicator tells of as one: a pull from servers, a push to them."""
        ended_s, moved = time.perf_counter(), self.moved.setdefault((axis, operation), Moved())
        self.trace.add(operation, began_s, ended_s, kind=EXCHANGE, bytes=nbytes, group=axis)
        moved.calls += 1
        moved.nbytes += nbytes
        moved.seconds += ended_s - began_s
        moved.step_seconds += (ended_s - began_s) * self.is_in_step

    def exchange_s(self) -> float:
        """Seconds in collectives so far, without the waiting at the end of a step."""
        self.tell()
        return sum(transfers.seconds for transfers in self.moved.values())

    def parts_s(self) -> tuple[float, float, float]:
        """Seconds so far in exchanges, waiting included, waiting for data, and waiting for other ranks."""
        return self.exchange_s(), self.seconds.get(DATA, 0.0), self.seconds.get(IDLE, 0.0)

    def bytes_by_axis(self) -> dict[str, dict[str, int]]:
        self.tell()
        nbytes: dict[str, dict[str, int]] = {}
        for (axis, operation), transfers in self.moved.items():
            nbytes.setdefault(axis, {})[operation] = transfers.nbytes
        return nbytes


def observe_mesh(mesh: Mesh, recorder: Recorder) -> None:
    """Record what this mesh's communicators do from now on, those included that are split from them later."""
    observer = recorder.observer(mesh)

    def every() -> int:
        return 1 if recorder.trace.on else EVERY

    for comm in (mesh.comm, *mesh.groups.values()):
        if comm.size > 1:
            comm.observe(observer, every=every)
    recorder.tell = mesh.comm.tell_observers
