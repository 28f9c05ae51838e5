"""The parent's side of `fuzz_server.py`: start it, learn which cases there are, run them one at a time, report."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import hostile

_ROOT = Path(__file__).resolve().parents[2]


class Server:
    """Use with `with`. Several that are made one after the other come up at the same time: only `cases` waits."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT / "src"), os.environ.get("PYTHONPATH")]))
        environ = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fuzz_server.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True,
        )  # fmt: skip

    @functools.cached_property
    def cases(self) -> list[tuple[str, str]]:
        """(name, group) pairs: the first line that the process writes, when it has imported everything."""
        return [(name, group) for name, group in json.loads(self._line())]

    def run(self, name: str) -> dict[str, Any]:
        assert self.cases
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        outcome: dict[str, Any] = json.loads(self._line())
        return outcome

    def run_calmly(self, name: str) -> dict[str, Any]:
        """A case, once more if it was slow: the machine may have been busy, and what is slow is slow again."""
        outcome = self.run(name)
        if any("took" in why or "still ran" in why for why in outcome["wrong"]):
            outcome = self.run(name)
        return outcome

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fuzzer's server ended with code {self._process.wait()}")
        return line

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def shuffled(names: Iterable[str]) -> list[str]:
    """Always in the same order, in which neighbours have nothing to do with each other."""
    return sorted(names, key=lambda name: zlib.crc32(f"{hostile.SEED}{name}".encode()))


def report(outcome: dict[str, Any]) -> str:
    """What is wrong with a case, what it said last, and the line that repeats it."""
    last = (outcome.get("err", "").strip().splitlines() or [""])[-1][:300]
    again = f"python {Path(__file__).with_name('fuzz_run.py').relative_to(_ROOT)} '{outcome['name']}'"
    return f"{'; '.join(outcome['wrong'])}: {last}\n    {again}"
