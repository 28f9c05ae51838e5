"""A reader's code in a process of its own: for a bounded time, in bounded memory, and nothing it does ends ours.

The process is a fork, so that a function of a notebook can be judged like one of a file. What comes back is text.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tilemesh.core.errors import UsageError

LIMIT_S = 20.0
"""Every exercise is judged in about a second on free cores; beyond this the answer does not end."""
PATIENCE_S = 2.0  # a rank that waits so long has met a deadlock; a rank of a busy machine may wait for a second
MEMORY_BYTES = 4 << 30  # on top of what this process has already


def judged_apart(judge: Callable[[], str | None]) -> str | None:
    """What `judge` returns, or the correction of an answer that does not end; its UsageError is raised here."""
    reading, writing = os.pipe()
    sys.stdout.flush()  # or what waits there would be written twice
    sys.stderr.flush()
    with warnings.catch_warnings():
        # The child has one thread: none of the others' work is its own, and it leaves without their clean-up.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _answer(judge, reading, writing)
    os.close(writing)
    try:
        said = _read(reading, LIMIT_S)
    finally:
        os.close(reading)
        for end in (os.kill, os.killpg):  # it, and what it began: they have said everything, or never will
            with contextlib.suppress(ProcessLookupError):
                end(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if said is None:
        return (
            f"Your function did not end within {LIMIT_S:g} s and was stopped: look for a loop whose condition never "
            "becomes false, or for work that grows without need."
        )
    if not said:
        return f"Your function ended the whole Python process ({_ending(status)}): let it return instead."
    try:
        (verdict,) = json.loads(said).items()
    except (ValueError, AttributeError):
        return "Your function began another process or wrote where it should not: let it only return its answer."
    if verdict[0] == "refused":
        raise UsageError(verdict[1])
    why: str | None = verdict[1]
    return why


def _answer(judge: Callable[[], str | None], reading: int, writing: int) -> NoReturn:
    """In the child: judge, say what came out, and leave at once."""
    try:
        os.close(reading)
        os.setpgid(0, 0)  # so that what the answer begins ends with it
        # A question of the function's (`input()`) has nobody to answer it.
        sys.stdin = io.StringIO()
        _limit_memory()
        try:
            body = {"why": judge()}
        except UsageError as error:
            body = {"refused": str(error)}
        except BaseException as error:  # also SystemExit: all of it is the answer's doing
            body = {"why": f"The function raised {type(error).__name__}: {error}"}
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with os.fdopen(writing, "w", encoding="utf-8") as out:
            json.dump(body, out)
    finally:
        os._exit(0)


def _limit_memory() -> None:
    sizes = Path("/proc/self/statm")
    if not sizes.exists():  # no Linux: the time alone is bounded
        return
    most = int(sizes.read_text(encoding="ascii").split()[0]) * resource.getpagesize() + MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _read(reading: int, limit_s: float) -> str | None:
    """All that the child says; None where it says nothing until the time is over."""
    until, pieces = time.monotonic() + limit_s, list[bytes]()
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        piece = os.read(reading, 1 << 16)
        if not piece:
            return b"".join(pieces).decode(errors="replace")
        pieces.append(piece)


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"by signal {os.WTERMSIG(status)}"
    return f"with exit code {os.WEXITSTATUS(status)}"
