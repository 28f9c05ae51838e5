"""A user's function that scores answers, in a process of its own: `FILE.py:FUNCTION(prompt, answer, case)`.

The one idea: what a verifier does to itself it cannot do to a run. It may crash, hang, print or return nonsense; the
answer is then worth nothing, the reason is counted, and the process is started again. JSON crosses the pipe.

`python -m tilemesh.align.verifier FILE.py:FUNCTION` is the other end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tilemesh.core.errors import RunError, UsageError

MAIN = "score"
"""The part that a verifier's single number is."""
_START_S = 60.0
"""That a verifier may take to import what it needs."""


class Scored(NamedTuple):
    """What an answer was found to be worth."""

    parts: Mapping[str, float]
    """By name; `score` is what is paid."""
    failure: str = ""
    """Why it could not be scored."""


def read_parts(value: Any) -> Scored:
    """A verifier's word as numbers; whatever is none pays nothing."""
    parts = value if isinstance(value, Mapping) else {MAIN: value}
    numbers = {}
    for name, part in parts.items():
        is_number = isinstance(part, int | float) and not isinstance(part, complex)
        if not is_number or not math.isfinite(part):
            return Scored({}, f"{name} is {str(part)[:60]}: expected a number")
        numbers[str(name)] = float(part)
    if MAIN not in numbers:
        return Scored({}, f"has no part '{MAIN}': expected a number, or numbers by name with that one among them")
    return Scored(numbers)


def split_name(spec: str) -> tuple[Path, str]:
    """File and function of FILE.py:FUNCTION."""
    file, colon, function = spec.rpartition(":")
    if not colon or not function.isidentifier() or not file.endswith(".py"):
        raise UsageError(f"'{spec}' is no verifier: expected FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise UsageError(f"'{spec}': {file} is not there; expected a Python file with a function {function}")
    return Path(file).resolve(), function


class Verifier:
    """The process, from here. Answers are scored one after the other, each within `deadline_s`."""

    def __init__(self, spec: str, deadline_s: float) -> None:
        file, function = split_name(spec)
        self._spec, self._deadline_s = f"{file}:{function}", deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._left = b""

    def __call__(self, items: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[Scored]:
        return [self._score(item) for item in items]

    def _score(self, item: tuple[str, str, Mapping[str, Any]]) -> Scored:
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(item).encode() + b"\n")
            process.stdin.flush()
            line = self._line(self._deadline_s)
        except (BrokenPipeError, OSError):
            line = b""
        if line is None:
            self.close()
            return Scored({}, f"no answer within {self._deadline_s:g} s")
        if not line:
            self.close()
            return Scored({}, "its process ended")
        try:
            reply = json.loads(line)
        except ValueError:
            self.close()
            return Scored({}, "its process wrote something else than its score")
        return Scored({}, reply["failure"]) if "failure" in reply else read_parts(reply["value"])

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

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", "tilemesh.align.verifier", self._spec]
            self._process, self._left = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE), b""
            line = self._line(_START_S)
            if not line or json.loads(line) != "ready":
                self.close()
                raise RunError(
                    f"the verifier {self._spec} could not be started: {(line or b'it took too long').decode()}"
                )
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None


def main(spec: str) -> int:
    """Score what comes on standard input. What the function prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def reply(value: Any) -> None:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            text = json.dumps({"failure": f"{str(value)[:200]} is no JSON"})
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
    except BaseException as error:
        reply(f"{type(error).__name__}: {error}")
        return 1
    reply("ready")
    for line in sys.stdin:
        prompt, answer, case = json.loads(line)
        try:
            reply({"value": function(prompt, answer, case)})
        except Exception as error:
            reply({"failure": f"{type(error).__name__}: {error}"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
