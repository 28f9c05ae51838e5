"""The job's folder: board, output pipes and the MPI library's own files, all removed with the job.

The folder's path also marks the job's processes: whatever a rank starts inherits it in its environment, so that
what is left of a failed job can be found, even what has made a session of its own.

It lies in memory (/dev/shm) where there is such a place. A launcher that was itself killed cannot
clean up, so each folder is locked by its owner, and the next launcher removes those whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tilemesh.core.context import JOB_VARIABLE

_PREFIX = "tilemesh-job-"
_LOCK = "lock"
_ROOM_BYTES = 64 << 20  # the board and the pipes need next to nothing; the MPI library keeps its segments here too


def base_folder() -> Path:
    """Shared memory, unless there is none, or next to none free."""
    shared = Path("/dev/shm")
    try:
        roomy = shutil.disk_usage(shared).free >= _ROOM_BYTES and os.access(shared, os.W_OK)
    except OSError:
        roomy = False
    return shared if roomy else Path(tempfile.gettempdir())


@contextlib.contextmanager
def job_folder(base: Path | None = None) -> Iterator[Path]:
    """A fresh folder for one job, gone afterwards whatever happens."""
    base = base or base_folder()
    sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep(base: Path) -> list[Path]:
    """Remove the folders of launchers that are gone; returns what was removed."""
    removed = []
    for folder in base.glob(_PREFIX + "*"):
        # Between a folder's creation and its lock lies a moment: one without a lock file is somebody's first instant.
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kill_processes_of(folder)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
            finally:
                os.close(lock)
    return removed


def kill_processes_of(folder: Path) -> list[int]:
    """End every process that carries this job's folder in its environment (Linux); returns their numbers."""
    mark = f"{JOB_VARIABLE}={folder}".encode()
    killed = []
    for place in Path("/proc").glob("[0-9]*"):
        pid = int(place.name)
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if pid != os.getpid() and mark in (place / "environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed
