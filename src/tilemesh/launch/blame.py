"""Which rank's failure ended a job, and why: the cause among its consequences.

When one rank dies the others fail too, a moment later: connections break, barriers are aborted. The
rules are here, apart from the watching, because they are a pure function of what was seen.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tilemesh.core.exhausted import limit_words
from tilemesh.launch.board import FAILED, INTERRUPTED, RUNNING, Record

_SIGNALLED = re.compile(r"process rank (\d+) with PID \d+.*?signal\s+(\d+)", re.S)
_EXITED = re.compile(r"Process name: \[[^\]]*,\s*(\d+)\]\s+Exit code:\s+(\d+)")
_IMPROPER = re.compile(r"due to process rank (\d+) with PID \d+.*?exiting\s+improperly", re.S)

# No exit codes of a process. LEFT: a rank left without finalising MPI, whatever its code. GONE: it ended first, and
# mpiexec said nothing of it before all ended.
LEFT, GONE = 256, 257


@dataclass(frozen=True)
class Death:
    """A rank's process that ended, not by our hand: its exit code, negative for a signal."""

    rank: int
    code: int


@dataclass(frozen=True)
class Failure:
    """The rank that failed first (None: no rank could be named), why, and at what it was for how long."""

    rank: int | None
    reason: str
    at: str
    at_seconds: float

    def sentence(self) -> str:
        who = "the job" if self.rank is None else f"rank {self.rank}"
        doing = f", at: {self.at} (for {self.at_seconds:.1f} s)" if self.at else ""
        return f"{who} {self.reason}{doing}" if self.rank is not None else self.reason


def blame(records: Sequence[Record], deaths: Sequence[Death]) -> Failure | None:
    """The first cause, or None when nothing failed. A death is the end of a process, with whatever code.

    `deaths` come in the order seen. A rank that dies without a word leaves the others to raise because it is gone, so
    the first silent death comes before any report; one that left with code 0 only if anything failed at all. Then
    whoever reported earliest.
    """
    ended = [(record.ended_ns, rank) for rank, record in enumerate(records) if record.state in (FAILED, INTERRUPTED)]
    reported = sorted(ended)
    reporting = {rank for _, rank in reported}
    silent = [death for death in deaths if death.rank not in reporting]
    trouble = bool(reported) or any(death.code != 0 for death in silent)
    for death in silent:
        left = death.code == 0 and records[death.rank].state == RUNNING and trouble
        if left or death.code != 0:
            return failure_of(records, death.rank, death_reason(death.code))
    if reported:
        rank = reported[0][1]
        return failure_of(records, rank, records[rank].reason)
    return None


def death_reason(code: int) -> str:
    """Words for an exit code; a negative one is a signal."""
    if code in (0, LEFT):
        return "left in the middle of the job without failing"
    if code == GONE:
        return "ended without a word: it was killed, or it exited in the middle of the job"
    if code > 0:
        return f"exited with code {code}{limit_words()}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (by hand, or by the kernel when memory ran out)" if code == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def mpi_deaths(said: str, code: int, vanished: Sequence[int]) -> list[Death]:
    """What mpiexec's own words and exit code tell of ranks that ended without a record.

    `vanished`: ranks whose processes went without reporting, in the order seen; the first of them is
    the best guess where mpiexec names nobody.
    """
    if match := _SIGNALLED.search(said):
        return [Death(int(match[1]), -int(match[2]))]
    if match := _EXITED.search(said):
        return [Death(int(match[1]), int(match[2]))]
    if match := _IMPROPER.search(said):
        return [Death(int(match[1]), LEFT)]
    if code != 0 and vanished:
        return [Death(vanished[0], 128 - code if code > 128 else code)]
    return []


def last_words(said: str) -> str:
    """What mpiexec's complaint comes down to: its first paragraph between rulers, else its last line."""
    lines = [line.strip() if any(map(str.isalnum, line)) else "" for line in said.splitlines()]
    ruler = next((number for number, line in enumerate(said.splitlines()) if line.startswith("-----")), None)
    if ruler is not None:
        paragraph = itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines[ruler:]))
        return " ".join(paragraph) or "it said nothing"
    return next((line for line in reversed(lines) if line), "it said nothing")


def failure_of(records: Sequence[Record], rank: int, reason: str) -> Failure:
    """The failure of that rank, with what its record says it was at."""
    record = records[rank]
    ended_ns = record.ended_ns or time.monotonic_ns()
    seconds = (ended_ns - record.since_ns) / 1e9 if record.at else 0.0
    return Failure(rank, reason, record.at, max(0.0, seconds))
