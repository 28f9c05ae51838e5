"""The job's folder: board, output pipes and the MPI library's own files, all removed with the job.

It lies in memory (/dev/shm) where there is such a place. A launcher that was itself killed cannot
clean up, so each folder is locked by its owner, and the next launcher removes those whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "tilemesh-job-"
_LOCK = "lock"


def base_folder() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


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
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
            finally:
                os.close(lock)
    return removed
