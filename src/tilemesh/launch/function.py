"""A user's function in a process of its own: `FILE.py:FUNCTION`.

The one idea: what it does to itself it cannot do to a run. It may crash, hang, print or return nonsense; the call then
has no value, the reason is told, and the process is started again. JSON crosses the pipe.

`python -m tilemesh.launch.function FILE.py:FUNCTION` is the other end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tilemesh.core.errors import UsageError

_AHEAD_BYTES = 1 << 13
"""Of calls that are sent before those before them have come back: a pipe takes more, so nobody waits to write."""
_START_S = 60.0
"""That a process may take to import what it needs."""


def split_name(spec: str) -> tuple[Path, str]:
    """File and function of FILE.py:FUNCTION."""
    file, colon, function = spec.rpartition(":")
    if not colon or not function.isidentifier() or not file.endswith(".py"):
        raise UsageError(f"'{spec}' is no function: expected FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise UsageError(f"'{spec}': {file} is not there; expected a Python file with a function {function}")
    return Path(file).resolve(), function


class Called(NamedTuple):
    """What a call came to."""

    value: Any
    failure: str = ""
    """Why there is no value."""
    number: int = 0
    """Of the call."""


class FunctionProcess:
    """The process, from here. Calls are made one after the other, each within `deadline_s`."""

    def __init__(self, spec: str, deadline_s: float) -> None:
        file, function = split_name(spec)
        self._spec, self._deadline_s = f"{file}:{function}", deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._left = b""

    def __call__(self, calls: Sequence[Sequence[Any]]) -> list[Called]:
        """The values for these arguments. Some are sent ahead, so that nobody waits; what a process that
        ended had left is sent again."""
        lines, called = [json.dumps(numbered).encode() + b"\n" for numbered in enumerate(calls)], list[Called]()
        sent = ahead = 0
        last: subprocess.Popen[bytes] | None = None
        for number, line in enumerate(lines):
            process = self.start()
            assert process.stdin is not None
            if process is not last:
                last, sent, ahead = process, number, 0
            with contextlib.suppress(BrokenPipeError, OSError):
                while sent < len(lines) and (sent == number or ahead + len(lines[sent]) <= _AHEAD_BYTES):
                    process.stdin.write(lines[sent])
                    sent, ahead = sent + 1, ahead + len(lines[sent])
                process.stdin.flush()
            called.append(self._reply(number)._replace(number=number))
            ahead -= len(line)
        return called

    def _reply(self, number: int) -> Called:
        """To the first call that waits for one, which is this."""
        line = self._line(self._deadline_s)
        if line is None:
            self.close()
            return Called(None, f"no answer within {self._deadline_s:g} s")
        if not line:
            self.close()
            return Called(None, "its process ended")
        try:
            call, reply = json.loads(line)
        except (ValueError, TypeError):
            call = None
        if call != number:  # also where it has become two processes, which both reply
            self.close()
            return Called(None, "its process wrote something else than its value")
        return Called(None, reply["failure"]) if "failure" in reply else Called(reply["value"])

    def _line(self, seconds: float) -> bytes | None:
        """The next line that it writes; empty where it has ended, None where it takes too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        end_at = time.monotonic() + seconds
        while b"\n" not in self._left:
            left_s = end_at - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                return None
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                return b""
            self._left += read
        line, _, self._left = self._left.partition(b"\n")
        return line

    def start(self) -> subprocess.Popen[bytes]:
        """The process, begun where there is none: UsageError where the file has no such function."""
        if self._process is None:
            command = [sys.executable, "-m", "tilemesh.launch.function", self._spec]
            self._process, self._left = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            ), b""  # fmt: skip
            line = self._line(_START_S)
            _, said = json.loads(line) if line else (None, "its process ended")
            if said != "ready":
                self.close()
                why = "it took too long" if line is None else said
                raise UsageError(f"{self._spec} could not be started: {why}; expected a Python file with this function")
        return self._process

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # with what it started, which may never end
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None


def main(spec: str) -> int:
    """Call with what comes on standard input. What the function prints goes to standard error; where it reads, there
    is nothing: calls are not its, nor a process's that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which still asks for this step's answers
    replies = os.fdopen(os.dup(1), "wb")
    calls = os.fdopen(os.dup(0))
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def reply(value: Any, call: int = -1) -> None:
        try:
            text = json.dumps((call, value), default=lambda number: number.item())  # of numpy or torch
        except Exception:
            text = json.dumps((call, {"failure": f"{str(value)[:200]} is no JSON"}))
        replies.write(text.encode() + b"\n")
        replies.flush()

    file, name = split_name(spec)
    module_spec = importlib.util.spec_from_file_location(file.stem, file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[file.stem] = module
    try:
        module_spec.loader.exec_module(module)
        function = getattr(module, name)
        if not callable(function):
            raise TypeError(f"{name} is a value")
    except BaseException as error:
        reply(f"{type(error).__name__}: {error}")
        return 1
    reply("ready")
    for line in calls:
        number, arguments = json.loads(line)
        try:
            reply({"value": function(*arguments)}, number)
        except Exception as error:
            reply({"failure": " ".join(f"{type(error).__name__}: {error}".split())[:300]}, number)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
