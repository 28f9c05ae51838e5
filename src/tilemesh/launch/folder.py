"""The job's folder: board, output pipes and the MPI library's own files, all removed with the job.

The folder's path also marks the job's processes: whatever a rank starts inherits it in its environment, so that
what is left of a failed job can be found, even what has made a session of its own.

It lies in memory (/dev/shm) where there is such a place. A launcher that was itself killed cannot clean up, so each
folder is locked by its owner, and the next launcher removes those whose lock is free. A folder gets the name by which
others find it only when it is locked already: nobody ever sees one whose owner lives and whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tilemesh.core.context import JOB_VARIABLE

_PREFIX = "tilemesh-job-"
_NEW_PREFIX = ".tilemesh-new-"  # not locked yet
_NEW_S = 600.0  # locking takes microseconds: one that is new for so long was left by a launcher that was killed
_LOCK = "lock"
_PF_EXITING = 0x4  # of a process's flags in /proc/PID/stat: include/linux/sched.h
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
    folder, lock = _locked_folder(base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(base: Path) -> tuple[Path, int]:
    """A folder under its final name, and the descriptor that holds its lock."""
    new = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX, dir=base))
    folder = base / (_PREFIX + new.name.removeprefix(_NEW_PREFIX))
    lock = None
    try:
        lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(new, folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        raise
    return folder, lock


def sweep(base: Path) -> list[Path]:
    """Remove the folders of launchers that are gone; returns what was removed."""
    removed = []
    for folder in (*base.glob(_PREFIX + "*"), *base.glob(_NEW_PREFIX + "*")):
        with contextlib.suppress(OSError):
            status = folder.stat()
            is_new = folder.name.startswith(_NEW_PREFIX)
            if status.st_uid != os.getuid() or (is_new and time.time() - status.st_mtime < _NEW_S):
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT * is_new | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its owner may have removed it before we had the lock: then this name is nobody's, or another folder's.
                if os.path.samestat(os.fstat(lock), os.stat(folder / _LOCK)):
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


def is_leaving(pid: int, processes: Path = Path("/proc")) -> bool:
    """Whether a process is being ended and still has memory to give back (Linux); its parent cannot see that yet."""
    try:
        state, *fields = (processes / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state != "Z" and bool(int(fields[5]) & _PF_EXITING)
