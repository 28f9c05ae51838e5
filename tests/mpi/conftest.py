"""What rank tests share: how they are dealt out to workers, and that they leave nothing in shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilemesh.launch.folder import base_folder

# Tests that call the same kept ranks, by the beginning of their ids: those of models four of MPI and two of gloo
# (parallel_cases.RANKS), those of collectives three of each.
SAME_RANKS = {
    "models": (
        *(f"test_{part}.py" for part in ("forward", "backward", "gate", "sharding", "groups")),
        "test_comm.py::TestEveryTransport::test_processes_taken_for_two_nodes_of_two",
        "test_comm.py::test_the_examples_on_processes",
    ),
    "collectives": (
        *("test_comm.py::TestEveryTransport", "test_disagree.py", "test_numbers.py"),
        "test_comm_cuda.py::test_the_path_of_gpu_tensors",
        "test_launch.py::test_ranks_of_one_machine_listen",
    ),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByRanks(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            name = nodeid.partition("[")[0].rpartition("/")[2]
            shared = (group for group, beginnings in SAME_RANKS.items() if name.startswith(beginnings))
            return next(shared, str(super()._split_scope(nodeid)))

    return ByRanks(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture
def shared_memory_left_clean() -> Iterator[None]:
    """Others may use the machine too: a folder whose launcher lives is theirs, and their other files go with them."""
    before = set(base_folder().iterdir())
    yield
    left = set(base_folder().iterdir()) - before
    end = time.monotonic() + 30
    while (there := [path for path in left if is_left(path)]) and time.monotonic() < end:
        time.sleep(0.5)  # another test may be about to remove what its killed launcher left
    assert there == []


def is_left(path: Path) -> bool:
    if path.name.endswith("0000.0"):  # MPI's segment of job number 0: a process that neither a test nor mpiexec started
        return False
    return is_stale(path) if path.name.startswith("tilemesh-job-") else path.exists() and not is_mapped(path)


def is_mapped(path: Path) -> bool:
    """Whether a process that lives has it in memory: MPI's own files of ranks that are kept for the next test."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # of a process that has ended meanwhile
            if path.name in maps.read_text():
                return True
    return False


def is_stale(path: Path) -> bool:
    """A job's folder whose launcher no longer holds its lock."""
    try:
        with (path / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return path.exists()
