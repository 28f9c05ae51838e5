"""Ranks that disagree about a call are told so, all of them, and by what each of them asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import comm_disagree
from comm_disagree import PAIRS
from started import ranks_of

from tilemesh.comm import Communicator, run_threads
from tilemesh.comm.runtime.group import Group
from tilemesh.core.errors import RunError, UsageError
from tilemesh.launch.start import find_mpiexec

NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
PROCESSES = [pytest.param("mpi", marks=NEEDS_MPI), "torch"]
SHARED = tuple(name for name in PAIRS if name.startswith("flat") or name == "memory")  # compared each time


def require_told(results: list[dict[str, str]], names: tuple[str, ...]) -> None:
    for name in names:
        words = {result[name] for result in results}
        assert len(words) == 1, f"{name}: ranks were told different things: {words}"
        assert words.pop().startswith("the ranks disagree: rank 1 calls "), name


def test_the_example_of_the_issue_on_threads() -> None:
    with pytest.raises(UsageError, match=r"rank 1 calls all_reduce\(float64, op=sum.*5 elements.*rank 2 calls") as seen:
        run_threads(3, lambda comm: comm.all_reduce(np.ones(4 + comm.rank)))
    assert "\n" not in str(seen.value)


@pytest.mark.parametrize("is_repeated", [False, True])
def test_threads_compare_every_call(is_repeated: bool) -> None:
    results = run_threads(3, lambda comm: comm_disagree.all_told(comm, is_repeated=is_repeated), timeout_s=20.0)
    require_told(results, tuple(PAIRS))


@pytest.mark.parametrize("transport", PROCESSES)
def test_processes_compare_the_first_call_of_each_kind(transport: str) -> None:
    results = ranks_of(transport, 3).call("comm_disagree:on_a_rank", False, True, list(PAIRS))
    require_told(results, tuple(PAIRS))


@pytest.mark.parametrize("transport", PROCESSES)
def test_processes_compare_every_call_through_shared_memory(transport: str) -> None:
    results = ranks_of(transport, 3).call("comm_disagree:on_a_rank", True, True, list(SHARED))
    require_told(results, SHARED)


@pytest.mark.parametrize("transport", PROCESSES)
def test_ranks_that_share_no_memory_compare_the_first_call_of_each_kind(transport: str) -> None:
    names = tuple(name for name in PAIRS if name not in (*SHARED, "background"))
    results = ranks_of(transport, 3).call("comm_disagree:on_a_rank", False, False, list(names))
    require_told(results, names)


def test_ranks_that_wait_in_different_calls_are_ended_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no comparison has seen, the watchdog sees once a rank waits: here nothing is compared at all."""
    monkeypatch.setattr(Group, "comparison", lambda *_, **__: None)

    def main(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(np.ones(4))  # waits for the others' flags
        else:
            comm.all_gather(np.ones(4), algorithm="ring")  # waits for a message of rank 0

    with pytest.raises(
        RunError,
        match=r"the ranks disagree in call #1 of world: rank 0 calls all_reduce \(32 B\); rank 1 calls all_gather",
    ):
        run_threads(3, main, timeout_s=30.0)
