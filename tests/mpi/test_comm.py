"""The communicator over every transport: right answers. (What happens when a rank goes wrong: test_comm_faults.py.)"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import comm_cases
import comm_close
from started import ranks_of

from tilemesh.comm import run_threads
from tilemesh.launch import Ranks
from tilemesh.launch.start import find_mpiexec

HERE = Path(__file__).parent
NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
PROCESSES = [pytest.param("mpi", marks=NEEDS_MPI), "torch"]
RANKS = (1, 2, 3, 4, 5, 8)
# Three threads are in `test_in_debug_mode_too`, four in `test_nodes_of_two_threads`, eight in `test_cases_alone`; other
# numbers of processes are `test_all_of_it`, which is slow.
IN_CI = [
    *(("threads", ranks) for ranks in (1, 2, 3)),
    pytest.param("threads", 5, marks=pytest.mark.slow),
    pytest.param("mpi", 3, marks=NEEDS_MPI),
    ("torch", 3),
]
pytestmark = pytest.mark.usefixtures("shared_memory_left_clean", "warm")


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
        """Every collective by every algorithm, and what else goes through all of them."""
        results = run_threads(4, comm_cases.run_every_algorithm, node_size=2)
        assert [failure for _, failures in results for failure in failures] == []

    @pytest.mark.parametrize(("ranks", "node_size"), [(5, 2), (7, 3)])
    def test_nodes_that_are_not_full(self, ranks: int, node_size: int) -> None:
        """The two-level algorithm alone, the only one that knows of nodes."""
        main = functools.partial(comm_cases.run_hierarchical, node_size=node_size)
        results = run_threads(ranks, main, node_size=node_size)
        assert [failure for _, failures in results for failure in failures] == []

    @pytest.mark.slow
    @pytest.mark.parametrize(("ranks", "node_size"), [(4, 2), (5, 2), (7, 3)])
    def test_everything_on_nodes(self, ranks: int, node_size: int) -> None:
        results = run_threads(ranks, lambda comm: comm_cases.run_all(comm, full=False), node_size=node_size)
        assert [failure for _, failures in results for failure in failures] == []

    def test_cases_alone(self) -> None:
        """Eight ranks: every collective by every algorithm; the rest of the surface asks for no more than five."""
        main = lambda comm: comm_cases.failures_of(comm, list(comm_cases.cases(comm, full=False)))  # noqa: E731
        assert [failure for failures in run_threads(8, main) for failure in failures] == []

    @pytest.mark.parametrize(
        "transport", [pytest.param("mpi", marks=NEEDS_MPI), pytest.param("torch", marks=pytest.mark.slow)]
    )
    def test_processes_taken_for_two_nodes_of_two(self, transport: str) -> None:
        assert self.cases_right(transport, 4, "nodes", node_size=2) > 20

    @pytest.mark.parametrize(("transport", "ranks"), IN_CI)
    def test_a_sample(self, transport: str, ranks: int) -> None:
        self.run(transport, ranks, full=False)

    def test_in_debug_mode_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TILEMESH_DEBUG", "collectives")
        run_threads(3, comm_cases.run_surface)

    @pytest.mark.parametrize("transport", PROCESSES)
    def test_mismatched_calls_raise_on_every_rank_in_debug_mode(self, transport: str) -> None:
        for told in ranks_of(transport, 3).call("comm_mismatch:on_a_rank"):
            *refused, last = told
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
            assert last == "sum 3"  # still usable

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
    """On ranks of its own: the communicators of a process are counted from its first, and nobody else changes its
    descriptors and threads."""
    with Ranks(3, transport=transport) as ranks:
        assert ranks.call("comm_close:come_and_go") == [[comm_close.GROUPS, transport]] * 3
        require_nothing_left(ranks.call("comm_close:drop_unclosed", comm_close.AT_ONCE))


@pytest.mark.slow
@pytest.mark.parametrize("transport", PROCESSES)
def test_two_hundred_groups_that_nobody_closes_leave_nothing(transport: str) -> None:
    with Ranks(2, transport=transport) as ranks:
        require_nothing_left(ranks.call("comm_close:drop_unclosed", 200))


def require_nothing_left(counts: list[list[int]]) -> None:
    for descriptors, threads in counts:
        assert descriptors < 10
        assert threads < 6


@NEEDS_MPI
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_examples_on_processes(ranks: int) -> None:
    page = "\n".join(ranks_of("mpi", ranks).call("comm_examples:pages")[0])
    assert f"rank 0 of {ranks} over mpi: all ranks add up to {sum(range(ranks))}" in page
    assert f"the token came back as {list(range(1, ranks + 1))}" in page
    given = " ".join(f"b{block}" for block in range(ranks))
    got = " ".join(f"{letter}1" for letter in "abcdefgh"[:ranks])
    values = " ".join(str(10 * rank + 1) for rank in range(ranks))
    assert f"  rank 1   {given}   →   {got}   =  {values}" in page
    assert ranks < 8 or "[0, 4] [1, 5] [2, 6] [3, 7]" in page
    assert f"(-1.0, {ranks}.0)" in page


@pytest.mark.slow
def test_under_torchrun() -> None:
    """Without our launcher: the meeting goes through torchrun's own store."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = [*torchrun, str(HERE / "comm_script.py")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cases right over torch") == 2
