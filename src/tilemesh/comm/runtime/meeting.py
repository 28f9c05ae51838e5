"""Watching over `connect`: the library's own start can wait for ever for a rank that never comes.

There is no transport yet to ask. Where the launcher has made a folder for the job, each rank leaves a mark in it when
it begins to connect, and so those who have not can be named. MPI starts inside an import, during which no other thread
of Python runs: there a small process of its own keeps watch, until the rank lets go of its input.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tilemesh.comm.runtime.records import leave_verdict
from tilemesh.comm.runtime.watch import ranges
from tilemesh.core.context import JOB_VARIABLE, Membership

START_S = 20.0  # the least that ranks are given to come: some load what others have loaded already
_MARKS = "connecting"  # a folder in the job's: an empty file for each rank that has come
_times = 0  # how often this process has connected


@contextlib.contextmanager
def meeting(member: Membership | None, timeout_s: float, *, is_first_mpi: bool = False) -> Iterator[None]:
    """While the ranks find one another: past the timeout the job ends, and whoever has not come is named."""
    global _times
    limit_s = max(timeout_s, START_S)
    if member is None or member.size == 1 or limit_s > threading.TIMEOUT_MAX:
        yield
        return
    _times += 1
    marks = _leave_mark(member.rank, _times)
    if is_first_mpi:
        with _guarded(member, marks, limit_s):
            yield
        return
    met = threading.Event()

    def watch() -> None:
        if not met.wait(limit_s):
            _say(_words(member.rank, member.size, marks, limit_s))
            os._exit(1)

    threading.Thread(target=watch, name="tilemesh-connect", daemon=True).start()
    try:
        yield
    finally:
        met.set()


@contextlib.contextmanager
def _guarded(member: Membership, marks: Path | None, limit_s: float) -> Iterator[None]:
    arguments = [member.rank, member.size, marks or "", limit_s, os.getpid()]
    command = [sys.executable, "-m", __name__, *map(str, arguments)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # In a group of its own: Ctrl-C is for the rank, with which its input ends.
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environ, process_group=0)
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def _guard(rank: int, size: int, marks: Path | None, limit_s: float, pid: int) -> None:
    """The small process: ends when its input does, or else the rank."""
    if not select.select([sys.stdin], [], [], limit_s)[0]:
        _say(_words(rank, size, marks, limit_s))
        os.kill(pid, signal.SIGKILL)


def _words(rank: int, size: int, marks: Path | None, limit_s: float) -> str:
    head = f"rank {rank} has waited {limit_s:g} s in connect() for {size} ranks"
    if marks is None:
        return f"{head}; ending the job"
    missing = sorted(set(range(size)) - {int(path.name) for path in marks.iterdir()})
    if not missing:
        return f"{head}; all have come: the network, or a rank that died, holds it up; ending the job"
    return f"{head}; not arrived: {ranges(missing)}; ending the job"


def _leave_mark(rank: int, times: int) -> Path | None:
    folder = os.environ.get(JOB_VARIABLE)
    if folder is None or not Path(folder).is_dir():
        return None
    marks = Path(folder, f"{_MARKS}-{times}")
    marks.mkdir(mode=0o700, exist_ok=True)
    (marks / str(rank)).touch()
    return marks


def _say(reason: str) -> None:
    leave_verdict(reason)
    print(f"tilemesh: {reason}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    _guard(int(words[0]), int(words[1]), Path(words[2]) if words[2] else None, float(words[3]), int(words[4]))
