"""Watching over `connect`: the library's own start can wait for ever for a rank that never comes.

There is no transport yet to ask. Where the launcher has made a folder for the job, each rank leaves a mark in it when
it begins to connect, and so those who have not can be named.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tilemesh.comm.runtime.records import leave_verdict
from tilemesh.comm.runtime.watch import ranges
from tilemesh.core.context import JOB_VARIABLE, Membership

_MARKS = "connecting"  # a folder in the job's: an empty file for each rank that has come
_times = 0  # how often this process has connected


@contextlib.contextmanager
def meeting(member: Membership | None, timeout_s: float) -> Iterator[None]:
    """While the ranks find one another: past the timeout the job ends, and whoever has not come is named."""
    global _times
    if member is None or member.size == 1:
        yield
        return
    _times += 1
    marks = _leave_mark(member.rank, _times)
    met = threading.Event()

    def watch() -> None:
        if not met.wait(timeout_s):
            _end(_words(member, marks, timeout_s))

    if timeout_s <= threading.TIMEOUT_MAX:
        threading.Thread(target=watch, name="tilemesh-connect", daemon=True).start()
    try:
        yield
    finally:
        met.set()


def _words(member: Membership, marks: Path | None, timeout_s: float) -> str:
    head = f"rank {member.rank} has waited {timeout_s:g} s in connect() for {member.size} ranks"
    if marks is None:
        return f"{head}; ending the job"
    here = {int(path.name) for path in marks.iterdir()}
    missing = sorted(set(range(member.size)) - here)
    if not missing:
        return f"{head}; all have come: the network holds it up; ending the job"
    return f"{head}; not arrived: {ranges(missing)}; ending the job"


def _leave_mark(rank: int, times: int) -> Path | None:
    folder = os.environ.get(JOB_VARIABLE)
    if folder is None or not Path(folder).is_dir():
        return None
    marks = Path(folder, f"{_MARKS}-{times}")
    marks.mkdir(mode=0o700, exist_ok=True)
    (marks / str(rank)).touch()
    return marks


def _end(reason: str) -> None:
    """This process goes, and its launcher sees to the others: the library cannot end what it has not begun."""
    leave_verdict(reason)
    print(f"tilemesh: {reason}", file=sys.stderr, flush=True)
    os._exit(1)
