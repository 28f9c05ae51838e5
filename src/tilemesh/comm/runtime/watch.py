"""The watchdog: past the timeout it says which rank has not come and what that rank does instead, and ends the job.

Where it was asked to (`tell_waits`), every rank says so after a few seconds already, and goes on waiting.

Our own calls note what they are and since when (`Watch.note`); the library's collectives, which may take a microsecond,
what they are alone (`Watch.native`). A thread that wakes a few times per second looks at both, publishes what it saw,
together with the line of the program that the rank is at, and looks at the clock.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from tilemesh.comm.runtime.records import CallBoard, CallRecord, Doing
from tilemesh.core.units import format_bytes

TICK_S = 0.2
TIMEOUT_S = 60.0
_SILENT_S = 5.0  # a rank that looks every TICK_S and has said nothing for so long is not merely busy
_STOP_S = 1.0  # it may be in the middle of ending the job
_TURN_S = 1.0  # the lowest waiting rank speaks first; the others only if it did not end the job
_NOTICE_S = 6.0  # longer than _SILENT_S, so that a rank that was stopped is said to be
_MOST_NAMED = 4  # ranks outside a group that are said to have stopped
_DIFFERENT_S = 2.0  # a wait after which it is worth looking whether the others make another call

_TILEMESH = str(Path(__file__).parents[2])
_STANDARD = sysconfig.get_path("stdlib")
_ASKING = threading.Lock()


_YIELDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

# (sequence, name, nbytes, since_ns) of a call under way, as in `Doing`; a bare tuple, because every call makes one.
Note: TypeAlias = tuple[int, str, int, int]


class Watchdog:
    """What one rank publishes and watches over, for all its communicators."""

    def __init__(self, rank: int, board: CallBoard, end: Callable[[str], object], pids: bool = True) -> None:
        self.rank = rank
        self.board = board
        self.end = end
        self.pids = pids
        self.stage = ""  # what the program says it is at ("step 12: backward"), for the others to read
        self.worlds = 0  # how often this rank has connected
        self.has_staged = False  # GPU tensors have gone through the host's memory
        self.watches: dict[str, Watch] = {}
        self.natives: dict[Watch, Note] = {}
        self.seen: dict[str, int] = {}
        self.owner = threading.get_ident()
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None
        self.tell: Callable[[str], object] | None = None
        self.patience_s = _NOTICE_S

    def start(self) -> None:
        """Begin to watch; a single rank has nobody to wait for."""
        if self.board.ranks > 1:
            self.look()
            self.thread = threading.Thread(target=self._watch, name=f"tilemesh-watch-{self.rank}", daemon=True)
            self.thread.start()

    def tell_waits(self, tell: Callable[[str], object], after_s: float = _NOTICE_S) -> None:
        """Let somebody know of a wait before it ends the job: after so many seconds, then each time it has doubled.

        A later wait is told of where it is twice as long as the longest before, so that usual ones are not.
        """
        self.tell, self.patience_s = tell, after_s

    def stop(self) -> None:
        self.stopped.set()
        if self.thread is not None:
            self.thread.join(_STOP_S)
        # Whoever waits for this rank from now on waits for nothing.
        self.board.write(self.rank, CallRecord(os.getpid(), time.monotonic_ns(), seen=self._seen(), is_over=True))

    def _watch(self) -> None:
        while not self.stopped.wait(self._tick_s()):
            waiting = self.look()
            if waiting is None:
                continue
            watch, note = waiting
            since_ns = note[3]
            waited_s = (time.monotonic_ns() - since_ns) / 1e9
            if waited_s > _DIFFERENT_S + _TURN_S * self._turn(since_ns):
                words = watch.different_calls(note)
                if words is not None and self._still(watch, note):
                    self.end(words)
                    return
            if waited_s > watch.timeout_s + _TURN_S * self._turn(since_ns) and self._still(watch, note):
                self.end(watch.report(note, waited_s))
                return
            if self.tell is not None and waited_s > self.patience_s and self._still(watch, note):
                self.patience_s = 2 * waited_s
                self.tell(watch.report(note, waited_s, f"the job ends after {watch.timeout_s:g} s"))

    def _tick_s(self) -> float:
        return min([TICK_S, *(watch.timeout_s / 4 for watch in self._open())])

    def _open(self) -> list[Watch]:
        return [*self.watches.values()]  # copied in one step: the rank may be making or closing a group meanwhile

    def look(self) -> tuple[Watch, Note] | None:
        """Publish what this rank is doing; returns the call that will be the first to have waited too long, if any."""
        now = time.monotonic_ns()
        watches = self._open()
        notes = [(watch, watch.note) for watch in watches]
        self.natives = self._natives(now)
        with Stacks() as frames:
            place = _where(frames.get(self.owner))
        under_way = [*self.natives.items(), *((watch, note) for watch, note in notes if note is not None)]
        waiting = min(under_way, key=lambda call: call[1][3] + call[0].timeout_s * 1e9, default=None)
        doing = None if waiting is None else Doing(waiting[0].label, *waiting[1])
        where = ", ".join(filter(None, [self.stage, place]))
        self.board.write(self.rank, CallRecord(os.getpid(), now, where, doing, self._seen()))
        return waiting

    def _seen(self) -> dict[str, int]:
        """How far this rank has come in each communicator, those that moved last at the end."""
        now = {watch.label: watch.sequence for watch in self._open()}
        still = {label: number for label, number in self.seen.items() if now.get(label) == number}
        self.seen = still | {label: number for label, number in now.items() if label not in still}
        return self.seen

    def _natives(self, now: int) -> dict[Watch, Note]:
        """The library's collectives that this rank is inside of, since the look that first saw them."""
        result: dict[Watch, Note] = {}
        for watch in self._open():
            sequence, call = watch.sequence, watch.native  # in this order: a call's own number, or an earlier one
            if call is not None:
                before = self.natives.get(watch)
                if before is None or before[0] != sequence:
                    before = (sequence, *call, now)
                result[watch] = before
        return result

    def _still(self, watch: Watch, note: Note) -> bool:
        """Whether the call did not end while this thread was thinking about it."""
        return watch.note is note or self._natives(0).get(watch) is note

    def _turn(self, since_ns: int) -> int:
        """How many ranks that have waited about as long as this one come before it in speaking up."""
        waiting = 0
        for rank in range(self.rank):
            record = self.board.read(rank)
            if record and record.doing and record.doing.since_ns < since_ns + _TURN_S * 1e9:
                waiting += 1
        return min(waiting, 3)


class Stacks:
    """Where every thread is, to be walked through without harm: no collection meanwhile, and one thread at a time.

    A collection may free a tensor and so let other threads run, at any line that makes an object. Within
    `sys._current_frames()` that is under a lock of CPython's (gh-106883): the next thread that asks, begins or ends
    waits for it with the interpreter in its hands, for good. Within `f_back` the caller that is being looked up may
    have returned by then, and its memory be gone. (No generator, so that the way out of this one can be followed, too.)
    """

    def __enter__(self) -> dict[int, FrameType]:
        _ASKING.acquire()
        self.is_collecting = gc.isenabled()
        gc.disable()
        return sys._current_frames()

    def __exit__(self, *error: object) -> None:
        if self.is_collecting:
            gc.enable()
        _ASKING.release()


class Watch:
    """The watchdog as one communicator sees it: its members are these ranks of the world.

    `sequence`: how many collectives this communicator has begun, which is how the others know that this rank has come.
    """

    def __init__(
        self, process: Watchdog, members: Sequence[int], label: str = "world", timeout_s: float = TIMEOUT_S
    ) -> None:
        self.process = process
        self.members = tuple(members)
        self.label = label
        self.timeout_s = timeout_s
        self.sequence = 0
        self.note: Note | None = None
        self.native: tuple[str, int] | None = None  # name and bytes of the library's collective that is under way
        process.watches[label] = self

    def of(self, members: Sequence[int], label: str) -> Watch:
        """For a group of this communicator's ranks."""
        return Watch(self.process, [self.members[member] for member in members], label, self.timeout_s)

    def forget(self) -> None:
        """The communicator is closed."""
        del self.process.watches[self.label]

    def enter(self, sequence: int, name: str, nbytes: int) -> None:
        self.note = (sequence, name, nbytes, time.monotonic_ns())

    def leave(self) -> None:
        self.note = None

    @contextlib.contextmanager
    def during(self, sequence: int, name: str, nbytes: int) -> Iterator[None]:
        self.enter(sequence, name, nbytes)
        try:
            yield
        finally:
            self.leave()

    def report(self, note: Note, waited_s: float, then: str = "") -> str:
        """What to tell the user about a call that never ends. `then`: what happens next; by default the end."""
        sequence, name, nbytes, _ = note
        me = self.process.rank
        what = f"{name} #{sequence}" if sequence >= 0 else name
        size = f" ({format_bytes(nbytes)})" if nbytes else ""
        group = f" (ranks {ranges(self.members)})" if len(self.members) < self.process.board.ranks else ""
        stage = f" at {self.process.stage}" if self.process.stage else ""
        missing, here, stopped = [], [], []
        for rank in self.members:
            record = self.process.board.read(rank)
            if rank == me:
                continue
            if record is not None and sequence >= 0 and record.seen.get(self.label, -1) >= sequence:
                here.append(rank)
                if self._is_stopped(record):
                    stopped.append(f"rank {rank} {self._instead(record)}")
            else:
                missing.append(f"rank {rank} {self._instead(record)}")
        parts = [
            f"rank {me} has waited {waited_s:.1f} s in {what} of {self.label}{group}{size}{stage}",
            "no rank is missing: the network, or a rank that died, holds it up",
        ]
        if missing:
            parts[1] = f"{'not arrived' if sequence >= 0 else 'meanwhile'}: {'; '.join(missing)}"
        elif stopped:  # in the middle of the call, after all had come
            parts[1] = f"arrived, and went no further: {'; '.join(stopped)}"
        if here:
            parts.append(f"arrived: {ranges(here)}")
        if beyond := self._stopped_beyond():
            parts.append(f"behind it: {'; '.join(beyond)}")
        return "; ".join([*parts, then or f"ending the job after {self.timeout_s:g} s"])

    def _is_stopped(self, record: CallRecord) -> bool:
        return not record.is_over and (_is_silent(record) or (self.process.pids and not _is_alive(record.pid)))

    def _stopped_beyond(self) -> list[str]:
        """Ranks that are not members and do nothing more: whoever waits for a member may wait for one of them."""
        others = (rank for rank in range(self.process.board.ranks) if rank not in self.members)
        records = ((rank, self.process.board.read(rank)) for rank in others)
        words = [
            f"rank {rank} {self._instead(record)}"
            for rank, record in records
            if record is not None and self._is_stopped(record)
        ]
        return words[:_MOST_NAMED]

    def different_calls(self, note: Note) -> str | None:
        """What to tell the user when another rank's call of the same number is another one; None: none is."""
        sequence, name, nbytes, _ = note
        if sequence < 0:
            return None
        calls = {self.process.rank: (name, nbytes)}
        for rank in self.members:
            record = None if rank == self.process.rank else self.process.board.read(rank)
            if record and record.doing and (record.doing.label, record.doing.sequence) == (self.label, sequence):
                calls[rank] = (record.doing.name, record.doing.nbytes)
        if len({_kind(*call) for call in calls.values()}) == 1:
            return None
        words = [
            f"rank {rank} calls {name}{f' ({format_bytes(nbytes)})' if nbytes else ''}"
            for rank, (name, nbytes) in sorted(calls.items())
        ]
        return f"the ranks disagree in call #{sequence} of {self.label}: {'; '.join(words)}; ending the job"

    def _instead(self, record: CallRecord | None) -> str:
        if record is None:
            return "(no word from it: not connected yet, or on another node)"
        if record.is_over:
            return "has ended: its program returned without this call"
        if self.process.pids and not _is_alive(record.pid):
            return f"(its process {record.pid} is gone)"
        at = f", at {record.where}" if record.where else ""
        maybe = " (it may have arrived: it has too many groups to tell)" if record.is_cut else ""
        if _is_silent(record):
            silent_s = (time.monotonic_ns() - record.at_ns) / 1e9
            maybe += f" (its last word is {silent_s:.0f} s old: stopped, or in code that lets no other thread run)"
        if record.doing is not None:
            doing = record.doing
            for_s = (time.monotonic_ns() - doing.since_ns) / 1e9
            number = f" #{doing.sequence}" if doing.sequence >= 0 else ""
            return f"is in {doing.name}{number} of {doing.label} for {for_s:.1f} s{at}{maybe}"
        return f"is in no collective{at}{maybe}"


def _kind(name: str, nbytes: int) -> tuple[str, int]:
    """What is the same on all ranks in one call: duplicates are made as splits, and an exchange's sizes may differ."""
    return ("split" if name == "duplicate" else name, 0 if name == "all_to_all" else nbytes)


def ranges(ranks: Iterable[int]) -> str:
    """0, 1, 2, 3, 7 as "0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _where(frame: FrameType | None) -> str:
    """The innermost line of the program: neither ours, nor the standard library's, nor an installed package's."""
    innermost = frame
    while frame is not None and not _is_program(frame.f_code.co_filename):
        frame = _outer(frame)
    shown = frame or innermost
    return f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} in {shown.f_code.co_name}" if shown else ""


def _outer(frame: FrameType) -> FrameType | None:
    """The caller's frame. Not a generator's: it may yield meanwhile, and Python 3.11 then follows a stale link."""
    return None if frame.f_code.co_flags & _YIELDS else frame.f_back


def _is_program(file: str) -> bool:
    if file.startswith(_TILEMESH):
        return not file.startswith(str(Path(_TILEMESH, "comm")))  # a training loop of tilemesh is the program, too
    return not file.startswith((_STANDARD, "<")) and "site-packages" not in file


def _is_silent(record: CallRecord) -> bool:
    return time.monotonic_ns() - record.at_ns > _SILENT_S * 1e9


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
