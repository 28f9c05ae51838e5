"""What each rank did when: spans that Perfetto and chrome://tracing show, one lane per rank.

    trace = Trace(folder, rank=comm.rank)
    with trace.span("all_reduce", kind="exchange", bytes=buffer.nbytes): ...
    trace.close()
    merge(folder)                                  # once, by anybody: FOLDER/trace.json

A span costs two clock reads and an append. Each rank writes a file of its own, JSON lines of some events each, so a
job that dies keeps what it wrote: all of it after an exception, all but the last quarter of a second after a kill.
`merge` makes one trace of the files. The trace is handed to whoever records; `Trace(None)` is one that records nothing.
A job that goes on after it was stopped adds to what is there (`resume=True`): nothing recorded is written over.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tilemesh.core.errors import UsageError
from tilemesh.core.files import replacing

RANK_FILE = "trace-rank{rank}.jsonl"
MERGED_FILE = "trace.json"
EARLIER_PREFIX = "earlier-"  # of another boot's file, whose clock does not compare: it is put aside, and not merged

# Whichever comes first, events go to the file.
FLUSH_EVENTS = 4096
FLUSH_NS = 250_000_000


class Trace:
    """The recorder of one rank. Threads may share it; each gets a lane within the rank's."""

    def __init__(
        self,
        folder: str | Path | None,
        *,
        rank: int = 0,
        name: str | None = None,
        resume: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.on = folder is not None
        self._clock = clock
        self._events: list[tuple[Any, ...]] = []
        self._threads: set[int | str] = set()
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._file: TextIO | None = None
        if folder is not None:
            path = Path(folder) / RANK_FILE.format(rank=rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume:
                _make_ready(path)
            self._file = path.open("a" if resume else "w", encoding="utf-8")
            head = {
                "rank": rank,
                "name": name or f"rank {rank}",
                "boot": _boot_id(),
                "clock_ns": clock(),
                "wall_ns": time.time_ns(),
            }
            self._file.write(json.dumps(head) + "\n")
            self._file.flush()
            # By a thread, because a rank that has gone quiet (in a long call, in a hang) must keep its last spans too.
            threading.Thread(target=self._keep_flushing, name="trace", daemon=True).start()

    def span(self, name: str, *, kind: str = "work", **details: Any) -> contextlib.AbstractContextManager[object]:
        """A stretch of time, as a context manager; `details` show when it is clicked."""
        return RecordedSpan(self, name, kind, details) if self.on else _NOTHING

    def add(
        self, name: str, began_s: float, ended_s: float, *, kind: str = "work", lane: str = "", **details: Any
    ) -> None:
        """A stretch of time that somebody else has timed, by `time.perf_counter`. `lane`: of what runs beside the
        thread, and may begin in one of its spans and end in another."""
        if self.on:
            ended_ns, lasted_ns = round(ended_s * 1e9), round((ended_s - began_s) * 1e9)
            self._add(("X", name, lane or threading.get_ident(), ended_ns, lasted_ns, kind, details))

    def counter(self, name: str, value: float) -> None:
        """A value that is drawn over time: bytes allocated, loss, queue length."""
        if self.on:
            self._add(("C", name, self._clock(), value))

    def mark(self, name: str, **details: Any) -> None:
        """A moment: a step begins, a fault was injected."""
        if self.on:
            self._add(("i", name, threading.get_ident(), self._clock(), details))

    def flush(self) -> None:
        """Write what is recorded so far."""
        with self._writing:
            if self._file is None:
                return
            count = len(self._events)
            batch = self._events[:count]
            del self._events[:count]  # others only append, so what came meanwhile stays
            if batch:
                # One line a batch: encoding events one by one would cost several times as much.
                line = _ENCODER.encode([*self._new_threads(batch), *batch]) + "\n"
                try:
                    self._file.write(line)
                    self._file.flush()
                except OSError:  # a full disk must not end what is being recorded; the file ends with half a line
                    self.on = False

    def _keep_flushing(self) -> None:
        while not self._closed.wait(FLUSH_NS / 1e9):
            self.flush()

    def close(self) -> None:
        """Write the rest and record nothing further."""
        self.on = False
        self._closed.set()
        self.flush()
        with self._writing:
            if self._file is not None:
                with contextlib.suppress(OSError):  # what a full disk did not take
                    self._file.close()
                self._file = None

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        self.close()

    def _add(self, event: tuple[Any, ...]) -> None:
        self._events.append(event)
        if len(self._events) >= FLUSH_EVENTS:
            self.flush()

    def _new_threads(self, batch: list[tuple[Any, ...]]) -> list[tuple[str, int | str, str]]:
        """The names of threads, and lanes beside them, that appear for the first time."""
        unnamed = {event[2] for event in batch if event[0] != "C"} - self._threads
        self._threads |= unnamed
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lanes = {ident: ident for ident in unnamed if isinstance(ident, str)}
        return [("T", ident, lanes.get(ident) or names.get(ident, f"thread {ident}")) for ident in unnamed]


class RecordedSpan:
    """An open stretch of time; it becomes an event when it closes, with the error's name if one passed through."""

    __slots__ = ("_began_ns", "_details", "_kind", "_name", "_trace")

    def __init__(self, trace: Trace, name: str, kind: str, details: dict[str, Any]) -> None:
        self._trace, self._name, self._kind, self._details = trace, name, kind, details
        self._began_ns = 0

    def __enter__(self) -> RecordedSpan:
        self._began_ns = self._trace._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        ended_ns = self._trace._clock()
        if kind is not None:
            self._details["error"] = kind.__name__
        self._trace._add(
            ("X", self._name, threading.get_ident(), ended_ns, ended_ns - self._began_ns, self._kind, self._details)
        )


_NOTHING = contextlib.nullcontext()
_ENCODER = json.JSONEncoder(default=str, separators=(",", ":"))


@dataclass(frozen=True)
class _RankFile:
    rank: int
    name: str
    boot: str
    clock_ns: int
    wall_ns: int
    events: list[list[Any]]


def merge(folder: str | Path, out: str | Path | None = None, *, offsets_ns: Mapping[int, int] | None = None) -> Path:
    """Make one trace, `FOLDER/trace.json`, of all ranks' files; time 0 is when the first rank began to record.

    Ranks on one host share a clock. Ranks on several are aligned by wall clock, good to what NTP gives, unless
    `offsets_ns` says what to add to a rank's clock.
    """
    paths = sorted(Path(folder).glob(RANK_FILE.format(rank="*")))
    if not paths:
        raise UsageError(f"no {RANK_FILE.format(rank='N')} in {folder}: nothing was traced there")
    files = sorted((_read(path) for path in paths), key=lambda trace: trace.rank)
    shifts = _shifts(files, offsets_ns or {})
    zero_ns = min(trace.clock_ns + shifts[trace.rank] for trace in files)
    target = Path(out) if out is not None else Path(folder) / MERGED_FILE
    try:
        with replacing(target) as part, part.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            events = (event for trace in files for event in _browser_events(trace, shifts[trace.rank] - zero_ns))
            file.write(",\n".join(json.dumps(_finite(event), allow_nan=False) for event in events))
            file.write("\n]}\n")
    except (ValueError, TypeError, KeyError, IndexError, ArithmeticError) as error:  # an event that nobody wrote so
        raise UsageError(f"a trace in {folder} is damaged: {error!r}") from None
    return target


def _shifts(files: list[_RankFile], offsets_ns: Mapping[int, int]) -> dict[int, int]:
    """What to add to each rank's clock so that all tell the same time."""
    one_host = len({file.boot for file in files}) == 1 and files[0].boot != ""
    by_wall = {file.rank: 0 if one_host else file.wall_ns - file.clock_ns for file in files}
    return {rank: offsets_ns.get(rank, shift) for rank, shift in by_wall.items()}


def _browser_events(rank_file: _RankFile, shift_ns: int) -> Iterator[dict[str, Any]]:
    """A rank's events in the Trace Event Format, which counts microseconds."""
    yield {"ph": "M", "name": "process_name", "pid": rank_file.rank, "args": {"name": rank_file.name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank_file.rank, "args": {"sort_index": rank_file.rank}}
    lanes: dict[int | str, int] = {}  # thread idents are huge; a lane is a small number, in order of appearance
    named: dict[str, list[int]] = {}
    for event in rank_file.events:
        base: dict[str, Any] = {"ph": event[0], "name": event[1], "pid": rank_file.rank}
        match event:
            case ["X", _, thread, ended_ns, lasted_ns, kind, details]:
                began_us = (ended_ns - lasted_ns + shift_ns) / 1e3
                yield base | {
                    "tid": lanes[thread],
                    "ts": began_us,
                    "dur": lasted_ns / 1e3,
                    "cat": kind,
                    "args": details,
                }
            case ["i", _, thread, at_ns, details]:
                yield base | {"tid": lanes[thread], "ts": (at_ns + shift_ns) / 1e3, "s": "t", "args": details}
            case ["C", name, at_ns, float(value)] if not math.isfinite(value):  # cannot be drawn: a moment says it
                yield base | {"ph": "i", "ts": (at_ns + shift_ns) / 1e3, "s": "p", "name": f"{name} is {value}"}
            case ["C", name, at_ns, value]:
                yield base | {"ts": (at_ns + shift_ns) / 1e3, "args": {name: value}}
            case ["R", at_ns]:
                lanes = {}  # another process: its idents are its own, and its threads take up the lanes of their names
                yield base | {"ph": "i", "ts": (at_ns + shift_ns) / 1e3, "s": "p", "name": "resumed"}
            case ["T", thread, name]:
                if thread not in lanes:
                    free = [lane for lane in named.get(name, []) if lane not in lanes.values()]
                    lanes[thread] = free[0] if free else sum(map(len, named.values()))
                    if not free:
                        named.setdefault(name, []).append(lanes[thread])
                lane = lanes[thread]
                yield {"ph": "M", "name": "thread_name", "pid": rank_file.rank, "tid": lane, "args": {"name": name}}


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity: such a number becomes its name."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(path: Path) -> _RankFile:
    try:
        # What follows the last newline was cut off when the rank died; everything before is whole.
        head, *batches = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        # A further head is a process that went on where another had stopped; on the same clock.
        events = [[["R", batch["clock_ns"]]] if isinstance(batch, dict) else batch for batch in batches]
        rank_file = _RankFile(**head, events=[event for batch in events for event in batch])
        for name, kind in (("rank", int), ("name", str), ("boot", str), ("clock_ns", int), ("wall_ns", int)):
            if not isinstance(getattr(rank_file, name), kind):
                raise ValueError(f"{name} is {getattr(rank_file, name)!r}")
        return rank_file
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is not a rank's trace: {error}") from None


def _make_ready(path: Path) -> None:
    """For more to be added: half a line at its end is cut off; what another boot's clock timed is put aside."""
    with contextlib.suppress(FileNotFoundError):
        raw = path.read_bytes()
        complete = raw[: raw.rfind(b"\n") + 1]
        try:
            boot = json.loads(complete.split(b"\n", 1)[0])["boot"]
        except (ValueError, TypeError, KeyError, RecursionError):
            boot = None
        if boot != _boot_id():
            os.replace(path, path.with_name(EARLIER_PREFIX + path.name))
        elif len(complete) < len(raw):
            os.truncate(path, len(complete))


def _boot_id() -> str:
    """Two processes with the same boot id read the same monotonic clock; empty when that cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
