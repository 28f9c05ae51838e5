"""A reader follows an array through `all_reduce` in at most five files: the files whose functions are handed it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tilemesh.comm import Communicator, run_threads

MOST_FILES = 5
TIMEOUT_S = 20.0


@contextmanager
def files_passed(arrays: Sequence[np.ndarray]) -> Iterator[set[str]]:
    """The files of `comm/` in which a function is given one of these arrays or a view of it, also inside a tuple."""
    files: set[str] = set()

    def holds(value: Any) -> bool:
        if isinstance(value, np.ndarray):
            return any(np.may_share_memory(value, array) for array in arrays)
        return isinstance(value, tuple | list) and any(holds(item) for item in value)

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and path.parts[-3:-1] == ("comm", "runtime"):
            count = code.co_argcount + code.co_kwonlyargcount
            given = [frame.f_locals.get(name) for name in code.co_varnames[:count] if name != "self"]
            # A plain call as a value (`Call`, `Decided`) only carries the array; who takes it out is handed it.
            if any(holds(value) for value in given if not hasattr(value, "_replace")):
                files.add(path.name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield files
    finally:
        sys.setprofile(before)


def passed(algorithm: str, dtype: str = "float32", times: int = 2) -> list[list[set[str]]]:
    """Files by rank and call, of an all_reduce that is made so many times."""

    def main(comm: Communicator) -> list[set[str]]:
        x, out = np.ones(1000, dtype), np.empty(1000, dtype)
        return [_once(lambda: comm.all_reduce(x, out=out, algorithm=algorithm), [x, out]) for _ in range(times)]

    return run_threads(3, main, timeout_s=TIMEOUT_S)


def _once(call: Callable[[], object], arrays: Sequence[np.ndarray]) -> set[str]:
    with files_passed(arrays) as files:
        call()
    return files


@pytest.mark.parametrize("algorithm", ["flat", "flat_one", "flat_slices", "ring", "recursive_doubling", "auto"])
def test_an_array_passes_five_files(algorithm: str) -> None:
    for calls in passed(algorithm):
        for files in calls:
            assert {"communicator.py", "memory.py"} <= files
            assert len(files) <= MOST_FILES, files


def test_a_repeated_call_passes_the_function_that_is_kept_ready_for_it() -> None:
    for first, second, third in passed("flat", times=3):
        assert first == {"communicator.py", "memory.py", "call.py", "sharing.py", "shared.py"}
        assert second == {"communicator.py", "ready.py", "memory.py", "shared.py"}  # does the result fit, and the sum
        assert third == {"communicator.py", "ready.py", "shared.py"}
