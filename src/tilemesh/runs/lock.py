"""One job at a time in a run's folder: a lock that says who holds it, and that no crash leaves behind for good.

The one idea: the lock is a file with its owner in it (machine, process, when that process started), so that whoever
finds one can tell whether the owner still lives. Where process numbers mean the same as to the owner, the process is
looked up. From anywhere else the file's age decides: the owner touches it every few seconds, and one that nobody has
touched for a minute is stale. Both times of an age come from the file system, so clocks of machines need not agree.

Making the file is atomic on any file system, also over NFS. A stale one is taken over under `flock` on the folder;
where there is none (NFS), whoever replaced the file last has it, after a moment in which others could. What begins as
no lock of ours does is somebody else's file, and stays.
Not promised: a job that was suspended for more than a minute may lose its folder to a job on another machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure.machine import command
from tilemesh.runs.files import NotThere, Unread, read_text
from tilemesh.runs.jsontext import from_text
from tilemesh.runs.names import LOCK

BEAT_S = 5.0
"""How often an owner touches its lock."""
STALE_S = 60.0
"""Without a touch for so long, a lock whose owner cannot be looked up is nobody's."""
_POLL_S = 0.5
_SETTLE_S = 1.0  # without flock: how long another process may need from judging a lock stale to replacing it
_OPENING = '{\n "host": "'  # of every lock, also of one that was cut short


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    host: str
    scope: str
    """Where its process number means the same: one boot of one machine, one namespace of processes."""
    pid: int
    started: str
    """When the process began, as the system tells it: a number is given to another process sooner or later."""
    since: str
    command: str
    token: str
    """Of this one lock."""

    @classmethod
    def me(cls) -> Owner:
        pid = os.getpid()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        started = process_start(pid) or ""
        return cls(socket.gethostname(), _scope(), pid, started, since, command(), secrets.token_hex(8))

    def is_here(self) -> bool:
        """Whether this process can look the owner up."""
        return self.scope == _scope()

    def lives(self) -> bool:
        """Of an owner that is here."""
        now = process_start(self.pid)
        return now is not None and (not now or not self.started or now == self.started)


@dataclass(frozen=True)
class Found:
    """A lock as it was seen: who holds it (None where it does not say so), and when it was last touched."""

    owner: Owner | None
    touched_ns: int
    is_foreign: bool = False
    """Whether it is nothing that a job wrote."""


class RunLock:
    """The lock of a run's folder, held while this is entered; a folder that a living job holds is refused."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self.say = folder, say
        self.path = folder / LOCK
        self.owner = Owner.me()
        self._mine = folder / f".{LOCK}.{self.owner.token}"
        self._inode = 0
        self._ended = threading.Event()

    def __enter__(self) -> RunLock:
        try:
            try:
                self._mine.write_text(json.dumps(dataclasses.asdict(self.owner), indent=1) + "\n", encoding="utf-8")
                while not (self._make() or self._replace()):
                    pass
                self._inode = self.path.stat().st_ino
            finally:
                self._mine.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}") from None
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._ended.set()
        with contextlib.suppress(OSError), _alone_in(self.folder):
            if self._is_mine():
                self.path.unlink()

    def _make(self) -> bool:
        """Where there is none yet. A link is made or not, also where the folder lies on another machine."""
        try:
            os.link(self._mine, self.path)
        except FileExistsError:
            return False
        except PermissionError:  # a file system without links
            try:
                with self.path.open("x", encoding="utf-8") as file:
                    file.write(self._mine.read_text(encoding="utf-8"))
            except FileExistsError:
                return False
        return True

    def _replace(self) -> bool:
        """One that is stale; whether this one stands in its place. A living owner is an error."""
        stale = self._stale()
        if stale is None:
            return False
        with _alone_in(self.folder) as is_alone:
            if _read(self.path) != stale:
                return False
            self.say(f"{self.path} was left by {_words(stale.owner)}, which is gone: taken over")
            os.replace(self._mine, self.path)
        if not is_alone:
            time.sleep(_SETTLE_S)
        if _token(self.path) == self.owner.token:
            return True
        raise UsageError(f"{self.folder} is in use: another job took it over in this moment; give another folder")

    def _stale(self) -> Found | None:
        """The lock there is, once it is known to be stale, or None where it has gone; a living owner is refused."""
        first = latest = _read(self.path)
        has_said = False
        while first is not None and latest is not None:
            if latest.is_foreign:
                raise UsageError(f"{self.path} is no lock that tilemesh wrote: move it away, or name another folder")
            owner = latest.owner
            if owner is not None and owner.is_here():
                if not owner.lives():
                    return latest
                break
            os.utime(self._mine)
            age_s = (self._mine.stat().st_mtime_ns - latest.touched_ns) / 1e9
            if age_s > STALE_S:
                return latest
            if latest != first:
                break
            if not has_said:
                has_said = True
                self.say(
                    f"{self.path} is of {_words(owner)}, which cannot be looked up from here: waiting for at most "
                    f"{STALE_S - age_s:.0f} s to see whether it lives"
                )
            time.sleep(_POLL_S)
            latest = _read(self.path)
        if latest is None:
            return None
        raise UsageError(
            f"{self.folder} is in use by {_words(latest.owner)}: wait until it ends, stop it, or give another folder"
        )

    def _is_mine(self) -> bool:
        return self.path.stat().st_ino == self._inode and _token(self.path) == self.owner.token

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                if self._is_mine():
                    os.utime(self.path)


def process_start(pid: int) -> str | None:
    """When a process began, in the system's own words; "" where it hides that, None where there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if words[0] in "ZX" else words[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        return ""
    try:
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _scope() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _words(owner: Owner | None) -> str:
    if owner is None:
        return "a job that has not said who it is"
    return f"process {owner.pid} on {owner.host} ({owner.command}), since {owner.since}"


def _read(path: Path) -> Found | None:
    """The lock there is, if any."""
    try:
        touched_ns = path.lstat().st_mtime_ns
        text = read_text(path)
    except (FileNotFoundError, NotThere):
        return None
    except Unread:
        return Found(None, touched_ns, is_foreign=True)
    try:
        content = from_text(text)
        owner = Owner(**{field.name: content[field.name] for field in dataclasses.fields(Owner)})
        return Found(owner if isinstance(owner.pid, int) and owner.pid > 0 else None, touched_ns)
    except (ValueError, RecursionError, TypeError, KeyError):  # cut short, with NULs by a power failure, or no lock
        is_ours = _OPENING.startswith(text.strip("\0")[: len(_OPENING)])
        return Found(None, touched_ns, is_foreign=not is_ours)


def _token(path: Path) -> str | None:
    holder = _read(path)
    return holder.owner.token if holder is not None and holder.owner is not None else None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Under a lock that the kernel frees; False where the file system has none for folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    is_alone = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            is_alone = False
        yield is_alone
    finally:
        os.close(descriptor)
