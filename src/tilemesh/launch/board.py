"""The board: a small file in which every rank keeps a record of what it is doing.

When a rank dies without a word, its last record is what the launcher has to show. One record a rank,
each with a single writer, in memory that all of them map; a write costs about a microsecond and
nobody waits for anybody. It is for people to read after a fault: it is not a channel between ranks.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilemesh.core.context import JOB_VARIABLE, membership
from tilemesh.core.errors import RunError

BOARD_FILE = "board"

_RECORD_BYTES = 1024
_HEAD = struct.Struct("<qqqqHH")  # pid, state, since_ns, ended_ns, length of `at`, length of `reason`
_AT_BYTES = 256
_REASON_BYTES = _RECORD_BYTES - _HEAD.size - _AT_BYTES

# BECAME: the process has turned into a program that keeps no record, so its silence means nothing.
EMPTY, RUNNING, DONE, FAILED, INTERRUPTED, BECAME = range(6)


@dataclass(frozen=True)
class Record:
    """What one rank last said of itself. Times are CLOCK_MONOTONIC, the same for all processes of a machine."""

    pid: int
    state: int
    since_ns: int
    ended_ns: int
    at: str
    reason: str


class Board:
    """Every rank's record, as the launcher reads them."""

    def __init__(self, folder: Path, ranks: int, *, create: bool = False) -> None:
        path = folder / BOARD_FILE
        if create:
            path.write_bytes(bytes(ranks * _RECORD_BYTES))
        if path.stat().st_size != ranks * _RECORD_BYTES:
            raise RunError(f"{path}: {path.stat().st_size} bytes, expected {ranks} records of {_RECORD_BYTES}")
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)

    def read(self, rank: int) -> Record:
        raw = self.memory[rank * _RECORD_BYTES : (rank + 1) * _RECORD_BYTES]
        pid, state, since_ns, ended_ns, at_length, reason_length = _HEAD.unpack_from(raw)
        at = raw[_HEAD.size :][: min(at_length, _AT_BYTES)]
        reason = raw[_HEAD.size + _AT_BYTES :][: min(reason_length, _REASON_BYTES)]
        # A record may be half written when its rank dies: then a character may be damaged, and is shown as such.
        return Record(pid, state, since_ns, ended_ns, at.decode(errors="replace"), reason.decode(errors="replace"))

    def close(self) -> None:
        self.memory.close()


class Status:
    """This rank's own record. Without a board (a process nobody launched) it does nothing, at no cost."""

    def __init__(self, board: Board | None = None, rank: int = 0) -> None:
        self._memory = None if board is None else board.memory
        self._base = rank * _RECORD_BYTES
        self._pid = os.getpid()
        self._at = b""
        self._since_ns = time.monotonic_ns()
        if self._memory is not None:
            self._write(RUNNING, 0, b"")

    def at(self, text: str) -> None:
        """Say what this rank is doing now: `status.at("step 12: backward")`."""
        if self._memory is None:
            return
        self._at = _clip(text, _AT_BYTES)
        self._since_ns = time.monotonic_ns()
        self._write(RUNNING, 0, b"")

    def became(self, program: str) -> None:
        """This process is about to turn into another program."""
        if self._memory is not None:
            self._at = _clip(program, _AT_BYTES)
            self._write(BECAME, 0, b"")

    def end(self, state: int, reason: str = "") -> None:
        """The last word: DONE, FAILED or INTERRUPTED, and why."""
        if self._memory is not None:
            self._write(state, time.monotonic_ns(), _clip(reason, _REASON_BYTES))

    def _write(self, state: int, ended_ns: int, reason: bytes) -> None:
        assert self._memory is not None
        head = _HEAD.pack(self._pid, state, self._since_ns, ended_ns, len(self._at), len(reason))
        text = head + self._at.ljust(_AT_BYTES, b"\0") + reason if reason else head + self._at
        self._memory[self._base : self._base + len(text)] = text


@cache
def my_status() -> Status:
    """The record of this process: on the launcher's board where there is one, else a silent one."""
    folder = os.environ.get(JOB_VARIABLE)
    member = membership()
    if folder is None or member is None or not Path(folder, BOARD_FILE).exists():
        return Status()
    return Status(Board(Path(folder), member.size), member.rank)


def _clip(text: str, limit: int) -> bytes:
    """UTF-8 of the text, cut between characters so that it fits."""
    raw = text.encode()
    return raw if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore").encode() + "…".encode()
