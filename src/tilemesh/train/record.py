"""What a rank does when: spans for the trace, totals for the summary, and the record the launcher reads after a death.

The one idea: an exchange is seen where it happens. The mesh's communicators are wrapped so that each collective adds
its seconds and bytes under its axis and name; whoever calls them (layers, the gradient exchange) knows nothing of it.
The wrapper also notes which algorithm `auto` picked for each size, and repeats those picks in a resumed run, since
another algorithm adds in another order.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from tilemesh.comm.runtime.choose import Request, choose
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.measure.trace import Trace
from tilemesh.parallel.mesh import Mesh

# What the seconds of a step are divided into; the rest of a step is compute.
EXCHANGE, DATA, IDLE = "exchange", "data", "idle"


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
        self.seconds: dict[str, float] = {}
        self.moved: dict[tuple[str, str], Moved] = {}
        self.choices: dict[str, str] = {}

    def at(self, what: str) -> None:
        self._at(f"step {self.step}: {what}")

    @contextmanager
    def span(self, name: str, kind: str = "compute") -> Iterator[None]:
        """A stretch of this step; its seconds count for its kind."""
        self._at(f"step {self.step}: {name}")
        began = time.perf_counter()
        with self.trace.span(name, kind=kind, step=self.step):
            yield
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - began

    def exchanged(self, axis: str, operation: str, nbytes: int, seconds: float, calls: int = 1) -> None:
        moved = self.moved.setdefault((axis, operation), Moved())
        moved.calls += calls
        moved.nbytes += nbytes
        moved.seconds += seconds
        moved.step_seconds += seconds if self.is_in_step else 0.0

    def exchange_s(self) -> float:
        """Seconds in collectives so far, without the waiting at the end of a step."""
        return sum(one.seconds for one in self.moved.values())

    def bytes_by_axis(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (axis, operation), one in self.moved.items():
            found.setdefault(axis, {})[operation] = one.nbytes
        return found


def watch_mesh(mesh: Mesh, recorder: Recorder, choices: Mapping[str, str]) -> None:
    """Record what this mesh's communicators do from now on; `choices` of an earlier run are kept to."""
    for name, axis in mesh.axes.items():
        _watch(axis.comm, name, recorder, choices)
    _watch(mesh.comm, "control", recorder, choices)


def _watch(comm: Communicator, axis: str, recorder: Recorder, choices: Mapping[str, str]) -> None:
    if comm.size > 1:
        comm._ready.clear()
        comm._caller = cast(Any, _WatchedCaller(comm._caller, axis, recorder, choices))


class _WatchedCaller:
    """Stands where a communicator's caller stands; all but `run` passes through."""

    def __init__(self, inner: Any, axis: str, recorder: Recorder, choices: Mapping[str, str]) -> None:
        self._inner, self._axis, self._recorder, self._choices = inner, axis, recorder, choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, call: Any, x: Any, algorithm: str, wait: bool, key: Any = None) -> Any:
        """Without the key: a call that is kept ready would pass by here the next time, unseen."""
        recorder, operation, nbytes = self._recorder, call.collective, call.nbytes
        if algorithm == "auto":
            algorithm = self._chosen(call)
        began = time.perf_counter()
        with recorder.trace.span(operation, kind=EXCHANGE, bytes=nbytes, group=self._axis, algorithm=algorithm):
            result = self._inner.run(call, x, algorithm, wait)
        recorder.exchanged(self._axis, operation, nbytes, time.perf_counter() - began)
        return result if wait else _WatchedHandle(result, operation, self._axis, nbytes, recorder)

    def _chosen(self, call: Any) -> str:
        """The algorithm for this kind of call: that of the run it continues, else what `auto` picks now."""
        key = f"{self._axis} {call.collective} {call.nbytes} {call.like.dtype} {call.op}"
        found = self._recorder.choices.get(key)
        if found is None:
            uneven = len(set(call.sizes)) > 1
            if call.private or (call.like.is_cuda and self._inner.transport.device is not None):
                found = "auto"  # what the device's library does is its own
            else:
                request = Request(call.collective, call.nbytes, call.like.dtype, call.op, uneven, call.private)
                found = self._choices.get(key) or self._now(request)
            self._recorder.choices[key] = found
        return found

    def _now(self, request: Request) -> str:
        return choose(request, "auto", self._inner.transport, self._inner.fit).algorithm


class _WatchedHandle:
    def __init__(self, inner: Any, operation: str, axis: str, nbytes: int, recorder: Recorder) -> None:
        self._inner, self._operation, self._axis, self._nbytes = inner, operation, axis, nbytes
        self._recorder = recorder

    def test(self) -> bool:
        began = time.perf_counter()
        done: bool = self._inner.test()
        self._recorder.exchanged(self._axis, self._operation, 0, time.perf_counter() - began, calls=0)
        return done

    def wait(self) -> Any:
        began = time.perf_counter()
        details = {"bytes": self._nbytes, "group": self._axis}
        with self._recorder.trace.span(f"wait {self._operation}", kind=EXCHANGE, **details):
            result = self._inner.wait()
        self._recorder.exchanged(self._axis, self._operation, 0, time.perf_counter() - began, calls=0)
        return result
