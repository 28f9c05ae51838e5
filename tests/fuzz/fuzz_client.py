"""The parent's side of `fuzz_server.py`: start it, learn which cases there are, run them one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


class Server:
    """Use with `with`; `cases` are (name, group) pairs."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT / "src"), os.environ.get("PYTHONPATH")]))
        environ = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fuzz_server.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True,
        )  # fmt: skip
        self.cases: list[tuple[str, str]] = [(name, group) for name, group in json.loads(self._line())]

    def run(self, name: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        outcome: dict[str, Any] = json.loads(self._line())
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
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
