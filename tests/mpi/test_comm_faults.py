"""What a communicator over processes does when a rank goes wrong: the job ends, and the rank is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilemesh.comm.runtime.meeting import START_S
from tilemesh.launch.job import Outcome, launch
from tilemesh.launch.start import find_mpiexec, mpi_environment

pytestmark = pytest.mark.usefixtures("shared_memory_left_clean", "warm")
HERE = Path(__file__).parent
NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
PROCESSES = [pytest.param("mpi", marks=NEEDS_MPI), "torch"]
RANKS = {"mpi": 3, "torch": 2}  # importing torch is most of what a short job costs
ENDS_WITHIN_S = 30.0  # on a machine that others use as well; ranks that nobody ends wait for at least a minute


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


@NEEDS_MPI
def test_the_deadlock_on_processes_ends_with_its_explanation() -> None:
    said = Said()
    command = [str(HERE.parents[1] / "examples" / "deadlock.py"), "wrong"]
    outcome = launch(command, ranks=2, transport="mpi", sink=said)
    assert outcome.exit_code == 1
    words = [line for line in said.of("err") if line.startswith("tilemesh: rank")]
    assert words
    for line in words:  # of rank 0, unless rank 1 has waited a second longer
        (me, other), text = ("01", line) if "rank 0 has waited" in line else ("10", line)
        assert (
            f"in send to rank {other} of world (7.63 MiB); meanwhile: rank {other} is in send to rank {me} of" in text
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
        outcome, _ = self.fault(transport, RANKS[transport], "kill")
        assert outcome.failure is not None
        assert outcome.failure.rank == 1
        assert "was killed by SIGKILL" in outcome.failure.reason

    # Over torch also in test_call.py.
    @pytest.mark.parametrize("transport", [PROCESSES[0], pytest.param("torch", marks=pytest.mark.slow)])
    def test_a_rank_that_raises(self, transport: str) -> None:
        outcome, said = self.fault(transport, RANKS[transport], "raise")
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
        # Rank 0 speaks; rank 2 only if that did not end the job at once, in the same words or of rank 0, which is gone.
        words = [line for line in words if not line.endswith("is gone while others wait for it")]
        assert words
        for line in words:
            assert re.match(
                r"tilemesh: rank ([02]) has waited \d+\.\d s in all_reduce #3 of world \(4 KiB\); not arrived: rank 1 "
                r"is in no collective, at comm_fault_script\.py:\d+ in daydream[^;]*; arrived: (?!\1)[02]; "
                r"ending the job after 2 s",
                line,
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
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode != 0
        assert re.search(
            r"not arrived: rank 1 is in no collective, at comm_fault_script\.py:\d+ in daydream", done.stderr
        )

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

    @NEEDS_MPI
    def test_a_random_kill(self) -> None:
        self.random_kill("mpi", 1)

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
