"""The launcher with real ranks: output, deaths, Ctrl-C, restarts, joining, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from started import is_running, ranks_of, wait_until

from tilemesh.core.context import outside_any_job
from tilemesh.core.cores import available_cores, threads_for
from tilemesh.core.errors import UsageError
from tilemesh.launch.folder import base_folder, sweep
from tilemesh.launch.job import Outcome, launch
from tilemesh.launch.start import find_mpiexec, mpi_environment

SCRIPT = str(Path(__file__).parent / "rank_script.py")
NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
TRANSPORTS = [pytest.param("mpi", marks=NEEDS_MPI), "torch"]
ENDS_WITHIN_S = 30.0  # on a machine that others use as well; ranks that nobody ends wait for one another for good


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No folder of a job that is over; one that somebody else's job holds locked is none of our business."""
    sweep(base_folder())
    yield
    assert sweep(base_folder()) == []


class Said:
    """A sink that keeps what the ranks print."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []

    def __call__(self, rank: int, stream: str, line: bytes) -> None:
        self.lines.append((rank, stream, line.decode()))

    def of(self, rank: int, stream: str) -> list[str]:
        return [line for who, where, line in self.lines if (who, where) == (rank, stream)]


def job(
    transport: str, behaviour: str, *rest: str, ranks: int = 3, restarts: int = 0
) -> tuple[Outcome, Said, list[str]]:
    said, words = Said(), list[str]()
    command = [SCRIPT, transport, behaviour, *rest]
    outcome = launch(command, ranks=ranks, transport=transport, restarts=restarts, sink=said, say=words.append)
    return outcome, said, words


@pytest.mark.parametrize("transport", [TRANSPORTS[0], pytest.param("torch", marks=pytest.mark.slow)])
def test_ranks_meet_and_their_output_carries_their_number(transport: str) -> None:
    outcome, said, _ = job(transport, "well", ranks=2)
    assert (outcome.failure, outcome.exit_code, outcome.attempts) == (None, 0, 1)
    for rank in range(2):
        assert said.of(rank, "out") == [f"hello from {rank}", f"goodbye from {rank}"]


DEATHS = {
    "raise": "raised ValueError: the widget is bent",
    "exit": "exited with code 3",
    "vanish": "exited with code 5",
    "abort": "was killed by SIGABRT",
    "interrupt": "was interrupted",
    "kill": "was killed by SIGKILL",
    "leave": "left in the middle of the job",
}
OVER_GLOO = ("kill", "leave")  # whose ranks import torch, in rank_script.py


@pytest.mark.parametrize(
    ("transport", "behaviour"),
    [
        *(pytest.param("mpi", behaviour, marks=NEEDS_MPI) for behaviour in DEATHS),
        *(("torch", behaviour) for behaviour in DEATHS if behaviour != "kill"),
        pytest.param("torch", "kill", marks=pytest.mark.slow),  # also in test_comm_faults.py, inside a collective
    ],
)
def test_a_rank_that_fails_ends_the_job_and_is_named(transport: str, behaviour: str) -> None:
    require_named(transport, transport, behaviour)


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", [behaviour for behaviour in DEATHS if behaviour not in OVER_GLOO])
def test_a_rank_that_fails_among_gloos_connections(behaviour: str) -> None:
    """The others raise as well, over connections that broke; those that in `make test` do without torch."""
    require_named("torch", "gloo", behaviour)


def require_named(transport: str, met_by: str, behaviour: str) -> None:
    reason = DEATHS[behaviour]
    ranks = 2 if transport == "torch" and behaviour in OVER_GLOO else 3
    hellos: list[float] = []

    def sink(rank: int, stream: str, line: bytes) -> None:
        if line.startswith(b"hello"):
            hellos.append(time.monotonic())
        if (rank, stream) == (1, "err"):
            errors.append(line.decode())

    errors: list[str] = []
    outcome = launch([SCRIPT, met_by, behaviour], ranks=ranks, transport=transport, sink=sink)
    assert time.monotonic() - hellos[0] < ENDS_WITHIN_S
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert reason in outcome.failure.reason
    assert outcome.failure.at == "step 7: misbehaving"
    last_line = outcome.sentence(ranks)
    assert re.match(
        rf"rank 1 {re.escape(reason)}.*, at: step 7: misbehaving \(for [\d.]+ s\); job of {ranks} ranks ended",
        last_line,
    )
    if behaviour == "raise":
        trace = [line for line in errors if "rank_script.py" in line or "ValueError" in line]
        assert trace[-1] == "ValueError: the widget is bent"
        assert not any("runpy" in line or "launch/rank.py" in line for line in errors), (
            "the launcher's own frames are noise"
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_failed_rank_had_started_ends_with_it(transport: str, tmp_path: Path) -> None:
    outcome, _, _ = job(transport, "child", str(tmp_path / "pid"))
    assert outcome.failure is not None
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(child))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_job_is_started_again(transport: str) -> None:
    outcome, said, words = job(transport, "fail-once", ranks=2, restarts=2)
    assert (outcome.exit_code, outcome.attempts) == (0, 2)
    assert said.of(0, "out").count("goodbye from 0") == 1
    assert len(words) == 1
    assert "rank 1 exited with code 1" in words[0]
    assert "starting again (1 of 2)" in words[0]


def pids_told(folder: Path, ranks: int) -> list[int]:
    """What each rank wrote of itself, when all have."""
    files = [folder / str(rank) for rank in range(ranks)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("behaviour", "signals"), [("sleep", 1), ("stubborn", 2)])
def test_ctrl_c_ends_every_rank(transport: str, behaviour: str, signals: int, tmp_path: Path) -> None:
    """As a user would: the command in a process of its own, SIGINT to it; a second one kills those who will not."""
    line = ["launch", "--ranks", "2", "--transport", transport, "--", SCRIPT, transport, behaviour, str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "tilemesh", *line], stderr=subprocess.PIPE, text=True)
    pids = pids_told(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("SIGINT: asking 2 ranks to stop" in told for told in iter(process.stderr.readline, ""))
    if signals == 2:  # two at once would be one
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1].startswith("tilemesh: interrupted after ")
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_die_with_a_launcher_that_is_killed(transport: str, tmp_path: Path) -> None:
    line = ["launch", "--ranks", "2", "--transport", transport, "--", SCRIPT, transport, "sleep", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "tilemesh", *line], stderr=subprocess.DEVNULL)
    pids = pids_told(tmp_path, 2)
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids), ENDS_WITHIN_S)
    launch(["true"], ranks=1, transport="torch")  # the next launcher sweeps the folder that was left


def test_any_program_can_be_launched() -> None:
    said = Said()
    outcome = launch(["sh", "-c", "echo $RANK of $WORLD_SIZE; printf unended"], ranks=2, transport="torch", sink=said)
    assert outcome.exit_code == 0
    assert said.of(1, "out") == ["1 of 2", "unended"]
    outcome = launch(["sh", "-c", "exit $RANK"], ranks=2, transport="torch", sink=said)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.reason) == (1, "exited with code 1")


def test_threads_are_shared_out_unless_the_user_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launch(["sh", "-c", "echo $OMP_NUM_THREADS"], ranks=4, transport="torch", sink=said)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launch(["sh", "-c", "echo $OMP_NUM_THREADS"], ranks=1, transport="torch", sink=said)
    assert said.of(3, "out")[0] == str(threads_for(4, available_cores()))
    assert said.of(0, "out")[1] == "7"


def test_a_progress_bar_a_long_line_and_an_unended_one_all_arrive() -> None:
    said = Said()
    code = "import sys; w = sys.stdout.write; w('1 %\\r2 %\\r\\n'); w('x' * 200_000 + '\\n'); w('end')"
    launch([sys.executable, "-c", code], ranks=1, transport="torch", sink=said)
    lines = said.of(0, "out")
    assert lines[:2] == ["1 %", "2 %"]
    assert "".join(lines[2:]) == "x" * 200_000 + "end"
    assert lines[-1] == "end"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_may_choose_the_encoding_of_what_it_prints(transport: str, tmp_path: Path) -> None:
    said, script = Said(), tmp_path / "speak.py"
    lines = ["import sys", "for stream in (sys.stdout, sys.stderr):", "    stream.reconfigure(encoding='utf-8')"]
    script.write_text("\n".join([*lines, "    print('5 µs', file=stream)"]))
    outcome = launch([str(script)], ranks=1, transport=transport, sink=said)
    assert outcome.failure is None
    assert (said.of(0, "out"), said.of(0, "err")) == (["5 µs"], ["5 µs"])


def test_a_rank_that_exits_with_words_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("import sys; sys.exit('no data here')")
    outcome = launch([str(script)], ranks=1, transport="torch", sink=Said())
    assert outcome.failure is not None
    assert outcome.failure.reason == "exited with code 1: no data here"


def test_a_module_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    said = Said()
    outcome = launch(["-m", "no.such.module"], ranks=1, transport="torch", sink=said)
    assert outcome.exit_code == 1
    assert len(said.of(0, "err")) == 1
    assert "No module named 'no'" in said.of(0, "err")[0]


def test_the_environment_that_is_given_counts_not_the_callers() -> None:
    """A launcher inside somebody's job starts ranks of its own when told so."""
    inside = os.environ | {"RANK": "0", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    with pytest.raises(UsageError, match="inside a job of 4 ranks"):
        launch(["true"], ranks=1, transport="torch", environ=inside)
    assert launch(["true"], ranks=1, transport="torch", environ=outside_any_job(inside)).exit_code == 0


def test_more_ranks_than_files_may_be_open_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="expected at most"):
        launch(["true"], ranks=10_000_000, transport="torch")
    monkeypatch.setattr("resource.getrlimit", lambda which: (100, 100))
    with pytest.raises(UsageError, match="open files"):
        launch(["true"], ranks=100, transport="torch")


def test_a_job_that_takes_too_long_names_the_rank_that_is_stuck() -> None:
    outcome = launch(["sh", "-c", "sleep $((RANK * 100))"], ranks=2, transport="torch", timeout_s=2.0)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.reason) == (1, "was not done within 2.0 s")


@NEEDS_MPI
def test_inside_mpiexec_it_joins(tmp_path: Path) -> None:
    environ = os.environ | {  # the user's mpiexec leaves a segment when a rank aborts; Open MPI 4 says vader, 5 says sm
        "OMPI_MCA_btl_sm_backing_directory": str(tmp_path),
        "OMPI_MCA_btl_vader_backing_directory": str(tmp_path),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    join = [str(find_mpiexec()), "-n", "2", sys.executable, "-m", "tilemesh", "launch"]
    done = subprocess.run(
        [*join, "--", SCRIPT, "mpi", "well"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"hello from \d", done.stdout)) == ["hello from 0", "hello from 1"]  # lines may interleave
    done = subprocess.run(
        [*join, "--", SCRIPT, "mpi", "raise"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "ValueError: the widget is bent" in done.stderr
    done = subprocess.run(
        [*join, "--ranks", "3", "--", SCRIPT], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--ranks 3 inside a job of 2 ranks that mpiexec started" in done.stderr


def test_inside_torchrun_it_joins() -> None:
    """With ranks that load no torch; those that do are test_comm.py's, which is slow."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    line = [*torchrun, sys.executable, "-m", "tilemesh", "launch", "--", "sh", "-c", "echo hello from $RANK"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"hello from \d", done.stdout)) == ["hello from 0", "hello from 1"]  # lines may interleave


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ([], {"ranks": 2}, "nothing to launch"),
        (["nowhere.py"], {"ranks": 2}, "script nowhere.py does not exist"),
        (["no-such-program"], {"ranks": 2}, "command no-such-program was not found"),
        (["./no-such-program"], {"ranks": 2}, "program ./no-such-program is not there, or not executable"),
        (["-m"], {"ranks": 2}, "-m without a module name"),
        (["true"], {}, "how many ranks"),
        (["true"], {"ranks": 0}, "ranks is 0: expected at least 1"),
        (["true"], {"ranks": 1, "restarts": -1}, "restarts is -1: expected 0 or more"),
        (["true"], {"ranks": 1, "transport": "mpl"}, "unknown transport 'mpl': did you mean 'mpi'?"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(
    command: list[str], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        launch(command, **options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_launches_at_the_same_moment_do_not_touch_one_another() -> None:
    """Each sweeps what dead launchers have left, while the others are making their folders."""
    command = [
        sys.executable,
        "-m",
        "tilemesh",
        "launch",
        "--ranks",
        "1",
        "--transport",
        "torch",
        SCRIPT,
        "torch",
        "quiet",
    ]
    launches = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=outside_any_job())
        for _ in range(6)
    ]
    ends = [(process.communicate(timeout=120)[0], process.returncode) for process in launches]
    assert [code for _, code in ends] == [0] * 6, ends
    assert all("hello from 0" in said for said, _ in ends)


@pytest.mark.skipif(sys.platform != "linux", reason="reads procfs")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_of_one_machine_listen_on_loopback_only(transport: str) -> None:
    for addresses in ranks_of(transport, 3).call("listening:after_messages"):
        assert set(addresses) <= {"0100007F", "00000000000000000000000001000000"}, addresses


def test_mpi_is_told_to_bind_no_rank(tmp_path: Path) -> None:
    """Open MPI 4 binds ranks to cores that who started them may not use (`test_ranks_stay_on_the_cores_…`)."""
    for name in ("PRTE_MCA_hwloc_default_binding_policy", "OMPI_MCA_hwloc_base_binding_policy"):  # Open MPI 5 and 4
        assert mpi_environment(2, tmp_path, {})[name] == "none"
        assert name not in mpi_environment(2, tmp_path, {name: "core"}), "whoever set it knows better"


def test_mpi_keeps_its_tcp_transport_where_ranks_may_be_on_several_machines(tmp_path: Path) -> None:
    assert mpi_environment(2, tmp_path, {})["OMPI_MCA_btl"] == "^tcp"
    assert "OMPI_MCA_btl" not in mpi_environment(2, tmp_path, {"OMPI_MCA_btl": "tcp,self"})
    assert mpi_environment(2, tmp_path, {"SLURM_JOB_NUM_NODES": "1"})["OMPI_MCA_btl"] == "^tcp"
    assert mpi_environment(2, tmp_path, {"SLURM_JOB_NUM_NODES": "", "SLURM_NNODES": "1"})["OMPI_MCA_btl"] == "^tcp"
    for several in (
        {"SLURM_JOB_NUM_NODES": "2"},
        {"SLURM_JOB_NUM_NODES": "²"},
        {"SLURM_NNODES": "many"},
        {"PBS_NODEFILE": "/x"},
        {"PRTE_MCA_prte_default_hostfile": "/x"},
    ):
        assert "OMPI_MCA_btl" not in mpi_environment(2, tmp_path, several)
