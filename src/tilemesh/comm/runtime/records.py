"""Where each rank keeps what it is doing, for the others to read when somebody has not come.

One record a rank in memory that all of a node map: in the launcher's job folder where there is one, otherwise an
anonymous file of rank 0 that the others reach through procfs, so that nothing stays behind after a kill. A record is
written now and then by the rank's watchdog, never by a call, so it is for people and may be a moment old.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tilemesh.core.context import JOB_VARIABLE, VERDICT_FILE

FILE = "calls"

_BYTES = 32 << 10  # of which only what is written is ever memory
_LENGTH = struct.Struct("<I")
_TRIES = 3


@dataclass(frozen=True)
class Doing:
    """A call under way: the `sequence`-th collective of a communicator (-1: a message), since when (monotonic)."""

    label: str
    sequence: int
    name: str
    nbytes: int
    since_ns: int


@dataclass(frozen=True)
class CallRecord:
    """What a rank last published: its call, how far it has come in each communicator, and where its program is.

    `seen`: the communicators used last come last. `is_cut`: there were more of them than a record holds.
    `is_over`: the rank's program has returned.
    """

    pid: int
    at_ns: int
    where: str = ""
    doing: Doing | None = None
    seen: dict[str, int] = field(default_factory=dict)
    is_cut: bool = False
    is_over: bool = False


class CallBoard:
    """All ranks' records, over whatever memory they share."""

    def __init__(self, memory: mmap.mmap | bytearray, ranks: int) -> None:
        self.memory = memory
        self.ranks = ranks

    def write(self, rank: int, record: CallRecord) -> None:
        raw = json.dumps(asdict(record)).encode()
        while len(raw) > _BYTES - _LENGTH.size:  # very many groups: the later half, until it fits
            kept = list(record.seen.items())[(len(record.seen) + 1) // 2 :]
            record = replace(record, where=record.where[:200], seen=dict(kept), is_cut=True)
            raw = json.dumps(asdict(record)).encode()
        at = rank * _BYTES
        self.memory[at : at + _LENGTH.size + len(raw)] = _LENGTH.pack(len(raw)) + raw

    def read(self, rank: int) -> CallRecord | None:
        """None: nothing there yet, or on another node."""
        for _ in range(_TRIES):
            raw = bytes(self.memory[rank * _BYTES : (rank + 1) * _BYTES])
            (length,) = _LENGTH.unpack_from(raw)
            if length == 0:
                return None
            with contextlib.suppress(ValueError):  # caught in the middle of a write
                return _record(json.loads(raw[_LENGTH.size : _LENGTH.size + length]))
            time.sleep(0.001)
        return None


def _record(fields: dict[str, Any]) -> CallRecord:
    doing = fields.pop("doing")
    return CallRecord(**fields, doing=Doing(**doing) if doing else None)


def shared_board(rank: int, ranks: int, tell: Callable[[str], str]) -> CallBoard:
    """The board of this job, or one that only this rank sees. `tell(text)`: rank 0's text, on every rank."""
    folder = os.environ.get(JOB_VARIABLE)
    nbytes = ranks * _BYTES
    if folder is not None and Path(folder).is_dir():
        handle = os.open(Path(folder, FILE), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.ftruncate(handle, nbytes)  # the same for all: whoever comes first makes it
    else:
        handle = _anonymous(nbytes) if rank == 0 else -1
        host, path = tell(f"{socket.gethostname()} /proc/{os.getpid()}/fd/{handle}").split(" ")
        if rank != 0:
            handle = _open(path) if host == socket.gethostname() else -1
    if handle < 0:
        return private_board(ranks)
    try:
        return CallBoard(mmap.mmap(handle, nbytes), ranks)
    finally:
        if rank != 0 or folder is not None:
            os.close(handle)  # rank 0 keeps its anonymous file open: the others may still be on their way to it


def leave_verdict(reason: str) -> None:
    """Put the reason where the launcher can find it; without a launcher this does nothing."""
    folder = os.environ.get(JOB_VARIABLE)
    if folder is not None:
        with contextlib.suppress(OSError):
            Path(folder, VERDICT_FILE).write_text(reason + "\n", encoding="utf-8")


def private_board(ranks: int) -> CallBoard:
    """For ranks of one process, and for a rank that shares no memory with the others."""
    return CallBoard(bytearray(ranks * _BYTES), ranks)


def _anonymous(nbytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        return -1
    handle = os.memfd_create("tilemesh-calls", os.MFD_CLOEXEC)
    os.ftruncate(handle, nbytes)
    return handle


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
