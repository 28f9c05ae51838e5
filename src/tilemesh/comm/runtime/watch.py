"""The watchdog: past the timeout it says which rank has not come and what that rank does instead, and ends the job.

A call only notes what it is (a tuple in this process); a thread that wakes a few times a second publishes the note,
together with the line of the program that the rank is at, and looks at the clock. So a call costs a fraction of a
microsecond whatever is underneath, and it works just as well for the library's own collectives.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from tilemesh.comm.runtime.records import Board, Doing, Record
from tilemesh.core.units import format_bytes

TICK_S = 0.2
TIMEOUT_S = 60.0
_TURN_S = 1.0  # the lowest waiting rank speaks first; the others only if it did not end the job

_TILEMESH = str(Path(__file__).parents[2])
_STANDARD = sysconfig.get_path("stdlib")


class Process:
    """What one rank publishes and watches over, for all its communicators. `board` None: nobody to tell."""

    def __init__(
        self, rank: int, board: Board | None, timeout_s: float, end: Callable[[str], object], pids: bool = True
    ) -> None:
        self.rank = rank
        self.board = board
        self.timeout_s = timeout_s
        self.end = end
        self.pids = pids
        self.doing: tuple[Watch, str, int, str, int, int] | None = None
        self.seen: dict[str, int] = {}
        self.owner = threading.get_ident()
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None
        self.published: object = ()

    def start(self) -> None:
        """Begin to watch; a single rank has nobody to wait for."""
        if self.board is not None and self.board.ranks > 1:
            self.publish()
            self.thread = threading.Thread(target=self._watch, name=f"tilemesh-watch-{self.rank}", daemon=True)
            self.thread.start()

    def stop(self) -> None:
        self.stopped.set()

    def _watch(self) -> None:
        while not self.stopped.wait(min(TICK_S, self.timeout_s / 4)):
            self.publish()
            doing = self.doing
            if doing is None:
                continue
            waited_s = (time.monotonic_ns() - doing[5]) / 1e9
            if waited_s > self.timeout_s + _TURN_S * self._turn(doing[5]) and self.doing is doing:
                self.end(doing[0].report(doing[1:], waited_s))
                return

    def publish(self) -> None:
        assert self.board is not None
        doing, frame = self.doing, sys._current_frames().get(self.owner)
        now = time.monotonic_ns()
        current = Doing(*doing[1:]) if doing else None
        self.board.write(self.rank, Record(os.getpid(), now, _where(frame), current, dict(self.seen)))

    def _turn(self, since_ns: int) -> int:
        """How many ranks that have waited about as long as this one come before it in speaking up."""
        waiting = 0
        for rank in range(self.rank):
            record = self.board.read(rank) if self.board else None
            if record and record.doing and record.doing.since_ns < since_ns + _TURN_S * 1e9:
                waiting += 1
        return min(waiting, 3)


class Watch:
    """The watchdog as one communicator sees it: its members are these ranks of the world."""

    def __init__(self, process: Process, members: Sequence[int]) -> None:
        self.process = process
        self.members = tuple(members)

    def of(self, members: Sequence[int]) -> Watch:
        """For a group of this communicator's ranks."""
        return Watch(self.process, [self.members[member] for member in members])

    def enter(self, label: str, sequence: int, name: str, nbytes: int) -> None:
        process = self.process
        if sequence > process.seen.get(label, -1):
            process.seen[label] = sequence
        process.doing = (self, label, sequence, name, nbytes, time.monotonic_ns())

    def leave(self) -> None:
        self.process.doing = None

    def note(self, label: str, sequence: int) -> None:
        """A call that has begun without anybody waiting for it."""
        self.process.seen[label] = max(sequence, self.process.seen.get(label, -1))

    @contextlib.contextmanager
    def during(self, label: str, sequence: int, name: str, nbytes: int) -> Iterator[None]:
        self.enter(label, sequence, name, nbytes)
        try:
            yield
        finally:
            self.leave()

    def report(self, call: tuple[str, int, str, int, int], waited_s: float) -> str:
        """What to tell the user about a call that never ends."""
        label, sequence, name, nbytes, _ = call
        me = self.members.index(self.process.rank)
        what = f"{name} #{sequence}" if sequence >= 0 else name
        head = f"rank {me} has waited {waited_s:.1f} s in {what} of {label} ({format_bytes(nbytes)})"
        board = self.process.board
        records = [board.read(rank) if board else None for rank in self.members]
        missing, here = [], []
        for rank, record in enumerate(records):
            if rank == me:
                continue
            if record is not None and sequence >= 0 and record.seen.get(label, -1) >= sequence:
                here.append(str(rank))
            else:
                missing.append(f"rank {rank} {self._instead(record)}")
        parts = [head, "no rank is missing: the network, or a rank that died, holds it up"]
        if missing:
            parts[1] = f"{'not arrived' if sequence >= 0 else 'meanwhile'}: {'; '.join(missing)}"
        if here:
            parts.append(f"arrived: {', '.join(here)}")
        return "; ".join([*parts, f"ending the job after {self.process.timeout_s:g} s"])

    def _instead(self, record: Record | None) -> str:
        if record is None:
            return "(no word from it: not connected yet, or on another node)"
        if self.process.pids and not _is_alive(record.pid):
            return f"(its process {record.pid} is gone)"
        at = f", at {record.where}" if record.where else ""
        if record.doing is not None:
            doing = record.doing
            for_s = (time.monotonic_ns() - doing.since_ns) / 1e9
            number = f" #{doing.sequence}" if doing.sequence >= 0 else ""
            return f"is in {doing.name}{number} of {doing.label} for {for_s:.1f} s{at}"
        return f"is in no collective{at}"


def _where(frame: FrameType | None) -> str:
    """The innermost line of the program: neither ours, nor the standard library's, nor an installed package's."""
    innermost = frame
    while frame is not None and not _is_program(frame.f_code.co_filename):
        frame = frame.f_back
    shown = frame or innermost
    return f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} in {shown.f_code.co_name}" if shown else ""


def _is_program(file: str) -> bool:
    if file.startswith(_TILEMESH):
        return not file.startswith(str(Path(_TILEMESH, "comm")))  # a training loop of tilemesh is the program, too
    return not file.startswith((_STANDARD, "<")) and "site-packages" not in file


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
