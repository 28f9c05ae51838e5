"""The communicator over every transport: right answers, and what happens when a rank goes wrong."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import comm_cases
from started import ranks_of

from tilemesh.comm import run_threads
from tilemesh.comm.runtime.meeting import START_S
from tilemesh.launch import Ranks, call
from tilemesh.launch.folder import base_folder
from tilemesh.launch.job import Outcome, launch
from tilemesh.launch.start import find_mpiexec, mpi_environment

HERE = Path(__file__).parent
NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
PROCESSES = [pytest.param("mpi", marks=NEEDS_MPI), "torch"]
RANKS = (1, 2, 3, 4, 5, 8)
# Three threads are in `test_in_debug_mode_too`, four in `test_nodes_of_two_threads`, eight in `test_cases_alone`; more
# processes than two cores serve are `test_all_of_it`, which is slow.
IN_CI = [*(("threads", ranks) for ranks in (1, 2, 5)), pytest.param("mpi", 2, marks=NEEDS_MPI)]
IN_CI += [pytest.param("mpi", 3, marks=NEEDS_MPI), ("torch", 3)]
ENDS_WITHIN_S = 8.0


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Others may use the machine too: a folder whose launcher lives is theirs, and their other files go with them."""
    before = set(base_folder().iterdir())
    yield
    left = set(base_folder().iterdir()) - before
    end = time.monotonic() + 30
    while (there := [path for path in left if is_left(path)]) and time.monotonic() < end:
        time.sleep(0.5)  # another test may be about to remove what its killed launcher left
    assert there == []


def is_left(path: Path) -> bool:
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


class Said:
    """A sink that keeps what the ranks print, and when they were first heard."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []
        self.connected: float | None = None

    def __call__(self, rank: int, stream: str, line: bytes) -> None:
        self.lines.append((rank, stream, line.decode()))
        if line == b"connected" and self.connected is None:
            self.connected = time.monotonic()

    def of(self, stream: str) -> list[str]:
        return [line for _, where, line in self.lines if where == stream]


def in_ranks(transport: str, ranks: int, script: str, *arguments: str, **environ: str) -> tuple[Outcome, Said]:
    said = Said()
    command = [str(HERE / script), *arguments]
    outcome = launch(command, ranks=ranks, transport=transport, sink=said, environ=os.environ | environ)
    return outcome, said


class TestEveryTransport:
    """Every collective × algorithm × transport × rank count × dtype against closed-form answers."""

    def run(self, transport: str, ranks: int, *, full: bool) -> None:
        if transport == "threads":
            results = run_threads(ranks, lambda comm: comm_cases.run_all(comm, full=full))
            assert [failure for _, failures in results for failure in failures] == []
            return
        assert self.cases_right(transport, ranks, "full" if full else "sample") > 200

    def cases_right(self, transport: str, ranks: int, which: str, **options: Any) -> int:
        """How many cases every rank had right, on ranks that are kept for the next test."""
        results = ranks_of(transport, ranks).call("comm_cases:on_a_rank", which, **options)
        assert [failure for _, failures, _ in results for failure in failures] == []
        assert {backend for _, _, backend in results} == {transport}
        return min(done for done, _, _ in results)

    def test_nodes_of_two_threads(self) -> None:
        results = run_threads(4, lambda comm: comm_cases.run_all(comm, full=False), node_size=2)
        assert [failure for _, failures in results for failure in failures] == []

    @pytest.mark.parametrize(("ranks", "node_size"), [(5, 2), (7, 3)])
    def test_nodes_that_are_not_full(self, ranks: int, node_size: int) -> None:
        """The two-level algorithm alone, the only one that knows of nodes."""
        main = functools.partial(comm_cases.run_hierarchical, node_size=node_size)
        results = run_threads(ranks, main, node_size=node_size)
        assert [failure for _, failures in results for failure in failures] == []

    @pytest.mark.slow
    @pytest.mark.parametrize(("ranks", "node_size"), [(5, 2), (7, 3)])
    def test_everything_on_nodes_that_are_not_full(self, ranks: int, node_size: int) -> None:
        results = run_threads(ranks, lambda comm: comm_cases.run_all(comm, full=False), node_size=node_size)
        assert [failure for _, failures in results for failure in failures] == []

    def test_cases_alone(self) -> None:
        """Eight ranks: every collective by every algorithm; the rest of the surface asks for no more than five."""
        main = lambda comm: comm_cases.failures_of(comm, list(comm_cases.cases(comm, full=False)))  # noqa: E731
        assert [failure for failures in run_threads(8, main) for failure in failures] == []

    @pytest.mark.parametrize("transport", PROCESSES)
    def test_processes_taken_for_two_nodes_of_two(self, transport: str) -> None:
        assert self.cases_right(transport, 4, "nodes", node_size=2) > 20

    @pytest.mark.parametrize(("transport", "ranks"), IN_CI)
    def test_a_sample(self, transport: str, ranks: int) -> None:
        self.run(transport, ranks, full=False)

    def test_in_debug_mode_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TILEMESH_DEBUG", "collectives")
        run_threads(3, comm_cases.run_surface, timeout_s=20.0)

    @pytest.mark.slow
    @pytest.mark.parametrize("transport", PROCESSES)
    def test_processes_in_debug_mode_too(self, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TILEMESH_DEBUG", "collectives")
        with Ranks(3, transport=transport) as ranks:
            assert min(done for done, _, _ in ranks.call("comm_cases:on_a_rank", "surface")) > 10

    @pytest.mark.slow
    @pytest.mark.timeout(1200)
    @pytest.mark.parametrize("transport", ["threads", *PROCESSES])
    @pytest.mark.parametrize("ranks", RANKS)
    def test_all_of_it(self, transport: str, ranks: int) -> None:
        self.run(transport, ranks, full=True)


@pytest.mark.parametrize("transport", PROCESSES)
def test_communicators_come_and_go(transport: str) -> None:
    """On ranks of its own: the communicators of a process are counted from its first."""
    assert call("comm_close:come_and_go", 3, transport=transport) == [[40, transport]] * 3


def test_groups_that_nobody_closes_end_when_they_are_dropped() -> None:
    """On ranks of its own, whose descriptors and threads nobody else changes."""
    for descriptors, threads in call("comm_close:drop_unclosed", 2, transport="torch"):
        assert descriptors < 10
        assert threads < 6


@NEEDS_MPI
def test_the_examples_on_eight_processes() -> None:
    page = "\n".join(call("comm_examples:pages", 8, transport="mpi")[0])
    assert "rank 0 of 8 over mpi: all ranks add up to 28" in page
    assert "the token came back as [1, 2, 3, 4, 5, 6, 7, 8]" in page
    assert "  rank 1   b0 b1 b2 b3 b4 b5 b6 b7   →   a1 b1 c1 d1 e1 f1 g1 h1   =  1 11 21 31 41 51 61 71" in page
    assert "[0, 4] [1, 5] [2, 6] [3, 7]" in page
    assert "(-1.0, 8.0)" in page


@pytest.mark.slow
def test_under_torchrun() -> None:
    """Without our launcher: the meeting goes through torchrun's own store."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = [*torchrun, str(HERE / "comm_script.py")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cases right over torch") == 2


@NEEDS_MPI
def test_the_deadlock_on_processes_ends_with_its_explanation() -> None:
    said = Said()
    command = [str(HERE.parents[1] / "examples" / "deadlock.py"), "wrong"]
    outcome = launch(command, ranks=2, transport="mpi", sink=said)
    assert outcome.exit_code == 1
    (words,) = [line for line in said.of("err") if line.startswith("tilemesh: rank")]
    assert re.search(
        r"in send to rank 1 of world \(7\.63 MiB\); meanwhile: rank 1 is in send to rank 0 of world", words
    )


class TestFaults:
    """A rank that goes wrong ends the job, is named, and leaves nothing behind."""

    def fault(self, transport: str, ranks: int, *arguments: str, **environ: str) -> tuple[Outcome, Said]:
        outcome, said = in_ranks(transport, ranks, "comm_fault_script.py", *arguments, **environ)
        assert said.connected is not None
        assert time.monotonic() - said.connected < ENDS_WITHIN_S
        assert not any("survived" in line for line in said.of("out"))
        assert outcome.exit_code == 1
        assert outcome.failure is not None
        return outcome, said

    @pytest.mark.parametrize("transport", PROCESSES)
    def test_a_rank_killed_inside_a_collective(self, transport: str) -> None:
        outcome, _ = self.fault(transport, 3, "kill")
        assert outcome.failure is not None
        assert outcome.failure.rank == 1
        assert "was killed by SIGKILL" in outcome.failure.reason

    @pytest.mark.parametrize("transport", PROCESSES)
    def test_a_rank_that_raises(self, transport: str) -> None:
        outcome, said = self.fault(transport, 3, "raise")
        assert outcome.failure is not None
        assert outcome.failure.rank == 1
        assert outcome.failure.reason == "raised ValueError: the widget is bent"
        assert "ValueError: the widget is bent" in said.of("err")

    @pytest.mark.parametrize(
        ("transport", "behaviour"),
        [
            pytest.param("mpi", "never", marks=NEEDS_MPI),
            pytest.param("mpi", "never-native", marks=NEEDS_MPI),
            pytest.param("torch", "never", marks=pytest.mark.slow),
            ("torch", "never-native"),
        ],
    )
    def test_a_rank_that_never_calls_is_named_with_what_it_does_instead(self, transport: str, behaviour: str) -> None:
        outcome, said = self.fault(transport, 3, behaviour)
        assert "not arrived: rank 1 is in no collective" in outcome.sentence(3), "the job's last line says it, too"
        words = [line for line in said.of("err") if line.startswith("tilemesh: rank")]
        assert len(words) == 1, words
        assert re.match(
            r"tilemesh: rank 0 has waited [2-7]\.\d s in all_reduce #3 of world \(4 KiB\); not arrived: rank 1 is in "
            r"no collective, at comm_fault_script\.py:\d+ in daydream; arrived: 2; ending the job after 2 s",
            words[0],
        ), words

    @NEEDS_MPI
    def test_a_rank_in_another_collective_is_named_with_that_one(self) -> None:
        _, said = self.fault("mpi", 2, "elsewhere")
        (words,) = [line for line in said.of("err") if line.startswith("tilemesh: rank")]
        assert re.search(
            r"rank 0 has waited .* in all_reduce #3 of world .*; not arrived: rank 1 is in barrier #1 of world/1\.0",
            words,
        )

    @NEEDS_MPI
    def test_under_somebody_elses_mpiexec_too(self, tmp_path: Path) -> None:
        """Without our launcher there is no job folder: the records lie in an anonymous file."""
        environ = os.environ | mpi_environment(2, tmp_path, os.environ)
        line = [str(find_mpiexec()), "-n", "2", sys.executable, str(HERE / "comm_fault_script.py"), "never"]
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        assert re.search(
            r"not arrived: rank 1 is in no collective, at comm_fault_script\.py:\d+ in daydream", done.stderr
        )

    @pytest.mark.parametrize("transport", PROCESSES)
    def test_mismatched_calls_raise_on_every_rank_in_debug_mode(self, transport: str) -> None:
        outcome, said = in_ranks(transport, 3, "comm_fault_script.py", "mismatch", TILEMESH_DEBUG="collectives")
        assert outcome.failure is None, said.lines
        for rank in range(3):
            mine = [line for who, stream, line in said.lines if (who, stream) == (rank, "out")]
            refused = [line for line in mine if line.startswith("refused")]
            assert len(refused) == 10
            assert all("the ranks disagree: rank 1 calls" in line for line in refused[:9])
            assert "rank 1 calls barrier(" in refused[0]
            assert "shape=(5), 5 elements)" in refused[1]
            assert "int32" in refused[2]
            assert "root=1" in refused[3]
            assert "op=max" in refused[4]
            assert "algorithm=tree" in refused[5]
            assert "shape=(2, 2)" in refused[6]
            assert "axis=1" in refused[7]
            assert "4 elements in [0, 1, 3]" in refused[8]
            assert "rank 2 sends 1 elements to rank 1, which expects 2" in refused[9]
            assert "sum 3" in mine  # still usable

    @pytest.mark.parametrize("transport", PROCESSES)
    def test_handles_that_nobody_waits_for_do_not_fail_the_job(self, transport: str) -> None:
        outcome, said = in_ranks(transport, 2, "comm_fault_script.py", "drop")
        assert outcome.failure is None, said.lines
        assert outcome.exit_code == 0
        assert said.of("out").count("done") == 2
        (words,) = [line for line in said.of("err") if line.startswith("tilemesh")]
        head = "tilemesh: rank 0 ended without wait() for "
        assert words.startswith(head)
        names = sorted(words.removeprefix(head).split(", "))
        assert names == ["all_reduce #2 of world", "recv from rank 1", "send to rank 1"]

    @pytest.mark.parametrize("sizes", [pytest.param("34"), pytest.param("43", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("transport", PROCESSES)
    def test_a_message_of_another_size_than_expected(self, transport: str, sizes: str) -> None:
        outcome, _ = self.fault(transport, 2, "sizes", sizes)
        assert outcome.failure is not None
        sent, expected = (8 * int(size) for size in sizes)
        reason = f"raised RunError: rank 0 sent {sent} bytes to rank 1, which expected {expected}"
        if transport == "mpi" and sent > expected:  # MPI does not say how much more
            reason = f"raised RunError: rank 0 sent more to rank 1 than the {expected} bytes expected"
        assert outcome.failure.reason == reason

    @pytest.mark.slow
    @pytest.mark.parametrize("transport", PROCESSES)
    def test_a_rank_that_never_connects(self, transport: str) -> None:
        start = time.monotonic()
        outcome, said = in_ranks(transport, 3, "comm_fault_script.py", "absent")
        assert time.monotonic() - start < START_S + 2 * ENDS_WITHIN_S
        assert outcome.exit_code == 1
        words = [line for line in said.of("err") if line.startswith("tilemesh: rank")]
        assert words
        for line in words:
            assert re.match(r"tilemesh: rank [02] has waited 20 s in connect\(\) for 3 ranks; not arrived: 1;", line)
        assert "not arrived: 1" in outcome.sentence(3)

    @pytest.mark.parametrize(("transport", "seed"), [pytest.param("mpi", 1, marks=NEEDS_MPI), ("torch", 0)])
    def test_a_random_kill(self, transport: str, seed: int) -> None:
        self.random_kill(transport, seed)

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize(
        ("transport", "seeds"), [pytest.param("mpi", range(100, 130), marks=NEEDS_MPI), ("torch", range(130, 150))]
    )
    def test_fifty_random_kills(self, transport: str, seeds: range) -> None:
        for seed in seeds:
            self.random_kill(transport, seed)

    def random_kill(self, transport: str, seed: int) -> None:
        outcome, _ = self.fault(transport, 2 + seed % 3, "random-kill", str(seed))
        assert outcome.failure is not None
        assert outcome.failure.rank == 1, (seed, outcome)
        assert "was killed by SIGKILL" in outcome.failure.reason
