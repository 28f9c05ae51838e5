"""Shared memory between processes: the order of loads and stores, and what a kill leaves behind."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilemesh.comm.runtime.flags import can_fence
from tilemesh.launch.folder import base_folder
from tilemesh.launch.job import launch
from tilemesh.launch.start import find_mpiexec

HERE = Path(__file__).parent
ENDS_WITHIN_S = 30.0


def seen_out_of_order(pattern: str, rounds: int) -> int:
    line = [sys.executable, str(HERE / "litmus_script.py"), pattern, str(rounds)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not can_fence(), reason=f"{platform.machine()} sends messages instead")
@pytest.mark.parametrize("pattern", ["message_passing", "store_buffering"])
def test_the_fence_keeps_the_order(pattern: str) -> None:
    assert seen_out_of_order(pattern, 40_000) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not can_fence(), reason=f"{platform.machine()} sends messages instead")
@pytest.mark.parametrize("pattern", ["message_passing", "store_buffering"])
def test_the_fence_keeps_the_order_millions_of_times(pattern: str) -> None:
    assert seen_out_of_order(pattern, 5_000_000) == 0


def left_behind() -> set[str]:
    """Names in shared memory that tilemesh or MPI could have left; those of others that run now are theirs."""
    places = [Path("/dev/shm"), base_folder()]
    return {str(path) for place in places if place.is_dir() for path in place.iterdir() if _is_ours(path)}


def _is_ours(path: Path) -> bool:
    return path.name.startswith("tilemesh-arena") or (path.name.startswith("tilemesh-job-") and not _is_held(path))


def _is_held(path: Path) -> bool:
    import fcntl

    try:
        with (path / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return not path.exists()


def kill_once(transport: str, seed: int) -> None:
    dice = random.Random(seed)
    ranks = dice.choice((2, 3, 4))
    who = dice.randrange(ranks)
    said: list[tuple[int, str]] = []
    connected: list[float] = []

    def sink(rank: int, stream: str, line: bytes) -> None:
        said.append((rank, line.decode(errors="replace")))
        if line == b"connected":
            connected.append(time.monotonic())

    command = [str(HERE / "kill_script.py"), str(who), f"{dice.random() * 0.5:.3f}", str(seed)]
    outcome = launch(command, ranks=ranks, transport=transport, sink=sink)
    assert outcome.failure is not None, said
    assert outcome.failure.rank == who, (outcome.failure, said)
    # On a busy machine mpiexec may name only the others, whom the launcher ended.
    assert "SIGKILL" in outcome.failure.reason or "it was killed" in outcome.failure.reason, outcome.failure
    assert connected
    assert time.monotonic() - connected[0] < ENDS_WITHIN_S
    assert not any(line == "survived" for _, line in said)


TRANSPORTS = [
    pytest.param("mpi", marks=pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")),
    pytest.param("torch", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_few_kills_leave_nothing(transport: str) -> None:
    before = left_behind()
    for seed in range(3):
        kill_once(transport, seed)
    assert left_behind() - before == set()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["mpi"])
def test_two_hundred_kills_leave_nothing(transport: str) -> None:
    """TILEMESH_KILLS: how many, or which ("50-100"), so that they can be had in pieces."""
    first, _, end = os.environ.get("TILEMESH_KILLS", "200").rpartition("-")
    before = left_behind()
    for seed in range(int(first or 0), int(end)):
        kill_once(transport, 1000 + seed)
    assert left_behind() - before == set()
