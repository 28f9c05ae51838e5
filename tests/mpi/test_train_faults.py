"""Real processes and real faults: ranks killed at any moment, hung, interrupted; the run goes on as if nothing was."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tilemesh.comm import run_threads
from tilemesh.launch.job import Outcome
from tilemesh.launch.start import find_mpiexec
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.manifest import WRITING, Manifest, checkpoints
from tilemesh.runs.metrics import latest, lines_of
from tilemesh.runs.names import CHECKPOINTS, CONFIG
from tilemesh.train.check import JobRequest
from tilemesh.train.config import TrainConfig
from tilemesh.train.job import launch_ranks
from tilemesh.train.load import load
from tilemesh.train.rank import train_here

# Bounds are for a machine that others use as well; alone on two cores each test takes a quarter of a minute.
pytestmark = pytest.mark.timeout(400)
NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
ENDS_WITHIN_S = 30.0
SMALL = (
    "model.layers=2,model.width=32,model.heads=2,model.kv_heads=2,model.mlp_width=64,model.context=32,"
    "train.steps=40,train.batch=8,checkpoint.every=1,evaluate.every=0,evaluate.sequences=4,sample.tokens=0,"
    "optimizer.warmup=2,train.trace_steps=0,train.device=cpu"
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"{number} times the same line is {number * 3} lines\n" for number in range(900)))
    return load(mesh="dp=2", sets=[SMALL, f"data.source={text}"])


class Trained(NamedTuple):
    """What a run came to: the loss of each step, and the digests of its last checkpoint (weights, moments)."""

    losses: dict[int, float]
    step: int
    digests: tuple[str, ...]


def trained(folder: Path) -> Trained:
    step, path = checkpoints(folder / CHECKPOINTS)[0]
    return Trained(losses(folder), step, tuple(file.sha256 for file in Manifest.read(path).files))


@pytest.fixture(scope="module")
def undisturbed(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of a run that nothing happened to. Two replicas: a sum of two is the same in any order."""
    folder = new_run(TRAIN, config.to_toml(), tmp_path_factory.mktemp("undisturbed") / "run")
    run_threads(2, lambda comm: train_here(config, folder, comm, emit=lambda event: None))
    return trained(folder)


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in latest(folder) if line["kind"] == "step"}


def rank_pids(folder: Path) -> dict[int, int]:
    """Rank and process number of every rank of the run that lives."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().split(b"\0")
            if b"tilemesh.train.rank" not in words or str(folder).encode() not in words or b"mpiexec" in words[0]:
                continue
            entries = (place / "environ").read_bytes().split(b"\0")
            environ = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            rank = environ.get(b"OMPI_COMM_WORLD_RANK", environ.get(b"RANK"))
            if rank is not None:
                found[int(rank)] = int(place.name)
    return found


def until(true: Callable[[], Any], within_s: float = 120.0, pause_s: float = 0.05) -> Any:
    """Looks seldom enough to leave the cores to the ranks."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if found := true():
            return found
        time.sleep(pause_s)
    raise AssertionError("it did not happen in time")


class Started:
    """A run on ranks of its own, in the background."""

    def __init__(self, config: TrainConfig, folder: Path, **options: Any) -> None:
        self.said: list[tuple[float, str]] = []
        self.printed: list[str] = []
        self.outcome: Outcome | None = None
        self.folder = folder

        def main() -> None:
            self.outcome = launch_ranks(
                config,
                folder,
                JobRequest(**options),
                sink=lambda rank, stream, line: self.printed.append(line.decode(errors="replace")),
                say=lambda text: self.said.append((time.monotonic(), text)),
            )

        self.thread = threading.Thread(target=main)
        self.thread.start()

    def reached(self, step: int) -> bool:
        return max(losses(self.folder), default=0) >= step

    def restarts(self) -> list[str]:
        return [text for _, text in self.said if "starting again" in text]

    def wait(self, within_s: float = 180.0) -> Outcome:
        self.thread.join(within_s)
        assert self.outcome is not None, "the job did not end"
        return self.outcome


def kill_when(run: Started, victim: int, ready: Callable[[], Any]) -> float:
    """SIGKILL to a rank as soon as it is ready; returns when."""
    pid = until(lambda: rank_pids(run.folder).get(victim))
    until(ready, pause_s=0.002)  # what it waits for may be over in no time
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def kill_in_turn(run: Started, kills: Sequence[tuple[int, int]]) -> None:
    """SIGKILL to each of these ranks once its step is reached, in the attempt that the kill before led to."""
    killed: set[int] = set()
    for number, (victim, step) in enumerate(kills):
        until(lambda: rank_pids(run.folder).get(victim) not in (None, *killed) and run.reached(step))  # noqa: B023
        pid = rank_pids(run.folder)[victim]
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
        until(lambda: len(run.restarts()) > number)  # noqa: B023
        assert f"rank {victim} was killed by SIGKILL" in run.restarts()[number]


@NEEDS_MPI
@pytest.mark.usefixtures("warm")
def test_killed_twice_and_the_loss_is_that_of_an_undisturbed_run(
    config: TrainConfig, undisturbed: Trained, tmp_path: Path
) -> None:
    """Once in the middle of steps, once while a checkpoint is being written."""
    folder = new_run(TRAIN, config.to_toml(), tmp_path / "run")
    run = Started(config, folder, restarts=2)
    first = kill_when(run, 1, lambda: run.reached(5))
    until(lambda: run.said)
    assert run.said[0][0] - first < ENDS_WITHIN_S
    assert re.search(r"rank 1 was killed by SIGKILL .*at: step \d+: \w+", run.said[0][1])
    resumed = max(losses(folder))
    until(lambda: run.reached(resumed + 3))
    second = kill_when(run, 0, lambda: list((folder / CHECKPOINTS).glob(WRITING + "*")))
    until(lambda: len(run.said) > 1)
    assert run.said[1][0] - second < ENDS_WITHIN_S
    assert "rank 0 was killed by SIGKILL" in run.said[1][1]
    outcome = run.wait()
    assert outcome.failure is None
    assert outcome.attempts == 3
    assert trained(folder) == undisturbed
    # Why it was started again stays with the run.
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reasons = [line["why"] for line in lines if line["kind"] == "restart"]
    assert [reason.split(" (")[0] for reason in reasons] == [f"rank {rank} was killed by SIGKILL" for rank in (1, 0)]


@NEEDS_MPI
@pytest.mark.usefixtures("warm")
def test_a_rank_that_dies_at_every_start_is_done_without_until_there_is_a_checkpoint(
    config: TrainConfig, tmp_path: Path
) -> None:
    """Twice before the first checkpoint: one rank goes on alone, and when it dies too, both are there again."""
    two = load(mesh="dp=2", sets=[SMALL, f"data.source={config.data.source},plan.precision=fp64,checkpoint.every=8"])
    folder = new_run(TRAIN, two.to_toml(), tmp_path / "run")
    run = Started(two, folder, restarts=3, min_ranks=1)
    kill_in_turn(run, [(1, 0), (1, 0), (0, 12)])
    outcome = run.wait()
    assert (outcome.failure, outcome.attempts) == (None, 4)
    fewer, back = (line["text"] for line in lines_of(folder) if line["kind"] == "mesh")
    assert fewer.startswith("fewer ranks: 2 ranks as dp 2 x tp 1")
    assert "now 1 rank as dp 1 x tp 1" in fewer
    assert back.startswith("ranks are back: 1 rank as dp 1 x tp 1")
    quiet = new_run(TRAIN, two.to_toml(), tmp_path / "quiet")
    run_threads(2, lambda comm: train_here(two, quiet, comm, emit=lambda event: None))
    assert losses(folder) == pytest.approx(losses(quiet), rel=1e-10)


KILLS = 5  # of one run; ten runs are fifty kills


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=NEEDS_MPI), "torch"])
@pytest.mark.parametrize("seed", range(5))
def test_fifty_kills_at_seeded_moments(
    config: TrainConfig, undisturbed: Trained, tmp_path: Path, seed: int, transport: str
) -> None:
    """Anywhere: while ranks start, between steps, inside a checkpoint's writing, towards the end."""
    draw = random.Random(seed)
    folder = new_run(TRAIN, config.to_toml(), tmp_path / "run")
    run = Started(config, folder, restarts=KILLS, transport=transport)
    killed: set[int] = set()

    def is_ready(moment: float, step: int, victim: int) -> bool:
        """Whether this is the moment to kill a rank that was not killed before."""
        if rank_pids(folder).get(victim) in (None, *killed) or (moment >= 0.2 and not run.reached(step)):
            return False
        return moment < 0.6 or bool(list((folder / CHECKPOINTS).glob(WRITING + "*")))

    for number in range(KILLS):
        victim, moment, step = draw.randrange(2), draw.random(), 1 + number * 4 + draw.randrange(4)
        until(lambda: is_ready(moment, step, victim))  # noqa: B023  called before the loop goes on
        pid = rank_pids(folder)[victim]
        os.kill(pid, signal.SIGKILL)
        at = time.monotonic()
        killed.add(pid)
        until(lambda: len(run.said) > number)  # noqa: B023
        assert run.said[number][0] - at < ENDS_WITHIN_S
        assert f"rank {victim} was killed by SIGKILL" in run.said[number][1]
    outcome = run.wait(300)
    assert (outcome.failure, outcome.attempts) == (None, KILLS + 1)
    assert trained(folder) == undisturbed


EXACT = "model.layers=4,plan.precision=fp64,train.steps=12"
PIPED = ("dp=2,pp=2", "plan.schedule=zb-h1,plan.zero=2")
# Where a killed run goes on: in its own layout, and in others.
ONWARD = {
    "same": PIPED,
    "tp 2, ZeRO-1": ("dp=2,tp=2", "plan.zero=1"),
    "a V": ("pp=2", "plan.schedule=zb-v"),
    "dp 4, ZeRO-3": ("dp=4", "plan.zero=3"),
}


@pytest.fixture(scope="module")
def alone(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one process that nothing happened to, in float64."""
    quiet = load(mesh="dp=1", sets=[SMALL, EXACT, f"data.source={config.data.source}"])
    folder = new_run(TRAIN, quiet.to_toml(), tmp_path_factory.mktemp("alone") / "run")
    run_threads(1, lambda comm: train_here(quiet, folder, comm))
    return losses(folder)


LONG_S = 280.0
"""For a run of four ranks on two cores that others use, too: three such waits are less than a slow test's limit."""


def killed_and_gone_on(config: TrainConfig, folder: Path, onward: str, victim: int, step: int, wait_s: float) -> None:
    """A pipeline over ZeRO-2's replicas loses a rank in the middle of a step and goes on elsewhere."""
    source = f"data.source={config.data.source}"
    piped = load(mesh=PIPED[0], sets=[SMALL, EXACT, source, PIPED[1]])
    new_run(TRAIN, piped.to_toml(), folder)
    run = Started(piped, folder)
    until(lambda: run.reached(step), within_s=LONG_S, pause_s=0.002)
    time.sleep(wait_s)
    pid = rank_pids(folder).get(victim)
    if pid is not None:  # it may have come to its end before
        os.kill(pid, signal.SIGKILL)
    run.wait(LONG_S)
    mesh, sets = ONWARD[onward]
    then = load(mesh=mesh, sets=[SMALL, EXACT, source, sets])
    (folder / CONFIG).write_text(then.to_toml())  # ranks read there what they are, as `fit` writes it
    assert Started(then, folder, resume=folder).wait(LONG_S).failure is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@NEEDS_MPI
@pytest.mark.parametrize("seed", range(20))
def test_twenty_kills_of_a_pipeline(config: TrainConfig, alone: dict[int, float], tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    onward, victim, step = draw.choice(list(ONWARD)), draw.randrange(4), draw.randrange(1, 9)
    killed_and_gone_on(config, tmp_path / "run", onward, victim, step, wait_s=0.2 * draw.random())
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@NEEDS_MPI
@pytest.mark.parametrize("seed", range(4))
def test_twenty_kills_of_workers_and_servers(config: TrainConfig, tmp_path: Path, seed: int) -> None:
    """Two workers and two servers under BSP, five kills of a run: nothing is lost but the steps since a checkpoint."""
    draw = random.Random(seed)
    served = load(
        mesh="dp=2", sets=[SMALL, f"data.source={config.data.source}", "train.method=server,method.servers=2"]
    )
    quiet = new_run(TRAIN, served.to_toml(), tmp_path / "quiet")
    run_threads(served.ranks, lambda comm: train_here(served, quiet, comm))
    folder = new_run(TRAIN, served.to_toml(), tmp_path / "run")
    run = Started(served, folder, restarts=KILLS)
    kill_in_turn(run, [(draw.randrange(served.ranks), 1 + number * 4 + draw.randrange(4)) for number in range(KILLS)])
    outcome = run.wait(300)
    assert (outcome.failure, outcome.attempts) == (None, KILLS + 1)
    assert trained(folder) == trained(quiet)


EXACT_METHODS = {
    "local": ("dp=2", "train.method=local,method.period=2,checkpoint.every=4,evaluate.every=0"),
    "powersgd": ("dp=2", "method.compress=powersgd,method.rank=1"),
    "pipedream": ("pp=2", "model.tied=false,optimizer.clip=0,plan.schedule=pipedream"),
    "pipemare": ("pp=2", "model.tied=false,optimizer.clip=0,plan.schedule=pipemare"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@NEEDS_MPI
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", EXACT_METHODS)
def test_a_killed_run_of_another_method_is_the_run_that_was_not(
    config: TrainConfig, tmp_path: Path, name: str, seed: int
) -> None:
    mesh, sets = EXACT_METHODS[name]
    made = load(mesh=mesh, sets=[SMALL, f"data.source={config.data.source}", sets])
    quiet = new_run(TRAIN, made.to_toml(), tmp_path / "quiet")
    run_threads(made.ranks, lambda comm: train_here(made, quiet, comm))
    folder = new_run(TRAIN, made.to_toml(), tmp_path / "run")
    run = Started(made, folder, restarts=3)
    draw = random.Random(seed)
    kill_in_turn(run, [(draw.randrange(2), 1 + number * 9 + draw.randrange(9)) for number in range(3)])
    outcome = run.wait(300)
    assert (outcome.failure, outcome.attempts) == (None, 4)
    assert trained(folder) == trained(quiet)


_ASYNCHRONOUS = "train.method=server,method.servers=2,method.staleness=2,method.consistency="
METHODS = EXACT_METHODS | {name: ("dp=2", _ASYNCHRONOUS + name) for name in ("ssp", "asp")}


@pytest.mark.slow
@pytest.mark.timeout(900)
@NEEDS_MPI
@pytest.mark.parametrize("name", METHODS)
def test_a_command_that_is_killed_takes_its_ranks_along_and_its_run_is_resumed(
    config: TrainConfig, tmp_path: Path, name: str
) -> None:
    """As when a machine runs out of memory: nobody is left to tidy up. The lock that stays keeps nobody waiting."""
    mesh, sets = METHODS[name]
    folder, source = tmp_path / "run", f"data.source={config.data.source}"
    base = [sys.executable, "-m", "tilemesh", "train"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [_source(), os.environ.get("PYTHONPATH")]))}
    process = subprocess.Popen(
        [*base, "--run", str(folder), "--mesh", mesh, "--set", f"{SMALL},{source},{sets}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ, cwd=tmp_path,
    )  # fmt: skip
    try:
        until(lambda: max(losses(folder), default=0) >= 7, within_s=240)
    finally:
        process.kill()
    process.wait()
    until(lambda: not rank_pids(folder), within_s=ENDS_WITHIN_S)
    done = subprocess.run(
        [*base, "--resume", str(folder)], capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if name in EXACT_METHODS:
        made = load(mesh=mesh, sets=[SMALL, source, sets])
        quiet = new_run(TRAIN, made.to_toml(), tmp_path / "quiet")
        run_threads(made.ranks, lambda comm: train_here(made, quiet, comm))
        assert trained(folder) == trained(quiet)
    else:
        assert json.loads((folder / "summary.json").read_text())["step"] == 40


@pytest.mark.slow
@pytest.mark.timeout(900)
@NEEDS_MPI
@pytest.mark.parametrize("consistency", ["ssp", "asp"])
def test_a_killed_asynchronous_run_comes_to_its_end(config: TrainConfig, tmp_path: Path, consistency: str) -> None:
    """What is promised: every worker goes on at worker 0's step, so all steps of the last attempt are applied."""
    served = f"train.method=server,method.servers=2,method.consistency={consistency},method.staleness=2"
    made = load(mesh="dp=2", sets=[SMALL, f"data.source={config.data.source}", served])
    folder = new_run(TRAIN, made.to_toml(), tmp_path / "run")
    run = Started(made, folder, restarts=2)
    kill_in_turn(run, [(1, 6), (3, 13)])  # a worker, then a server
    outcome = run.wait(300)
    assert (outcome.failure, outcome.attempts) == (None, 3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    began = [line["step"] for line in lines if line["kind"] == "resumed"]
    told = json.loads((folder / "summary.json").read_text())["method"]["servers"]
    for server in told:
        assert sum(count for _, count in server["staleness"]) == 2 * (made.train.steps - began[-1])


@NEEDS_MPI
def test_a_rank_that_hangs_is_named_with_its_step(config: TrainConfig, tmp_path: Path) -> None:
    quick = load(mesh="dp=2", sets=[SMALL, f"data.source={config.data.source}", "train.timeout_s=8"])
    folder = new_run(TRAIN, quick.to_toml(), tmp_path / "run")
    run = Started(quick, folder)
    until(lambda: run.reached(3))
    pid = until(lambda: rank_pids(folder).get(1))
    os.kill(pid, signal.SIGSTOP)
    outcome = run.wait()
    assert outcome.failure is not None
    words = outcome.failure.sentence()
    assert re.search(r"rank 0 has waited \d+\.\d s in all_reduce", words), words
    # Stopped between two collectives, or in the middle of one.
    assert re.search(r"at step \d+: \w+.*; (not arrived|arrived, and went no further): rank 1 is in", words), words


@NEEDS_MPI
def test_a_stalled_stage_is_named_within_seconds_and_waited_for(config: TrainConfig, tmp_path: Path) -> None:
    """With the usual timeout: what the other rank says comes long before the job would end."""
    made = load(mesh="pp=2", sets=[SMALL, f"data.source={config.data.source}"])
    folder = new_run(TRAIN, made.to_toml(), tmp_path / "run")
    run = Started(made, folder)
    until(lambda: run.reached(3))
    pid = until(lambda: rank_pids(folder).get(1))
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        words = until(lambda: next((line for line in run.printed if "rank 0 has waited" in line), ""))
        assert time.monotonic() - stopped < 30  # 6 s, and what a busy machine adds
    finally:
        os.kill(pid, signal.SIGCONT)
    assert re.search(r"at step \d+: \w+.*rank 1 is in .*: stopped, or in code .*; the job ends after 60 s", words), (
        words
    )
    assert run.wait().failure is None


@NEEDS_MPI
@pytest.mark.usefixtures("warm")
def test_ctrl_c_leaves_a_checkpoint_and_the_line_that_resumes(
    config: TrainConfig, undisturbed: Trained, tmp_path: Path
) -> None:
    """By the command line, as a user does it."""
    base = [sys.executable, "-m", "tilemesh", "train"]
    sets = f"{SMALL},data.source={config.data.source},checkpoint.every=0"
    folder = tmp_path / "run"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [_source(), os.environ.get("PYTHONPATH")]))}
    process = subprocess.Popen(
        [*base, "--run", str(folder), "--mesh", "dp=2", "--set", sets],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, cwd=tmp_path,
    )  # fmt: skip
    until(lambda: max(losses(folder), default=0) >= 3)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert said.rstrip().splitlines()[-1].endswith(f"tilemesh train --resume {folder}")
    steps = [step for step, _ in checkpoints(folder / CHECKPOINTS)]
    assert len(steps) == 1
    assert f"checkpoint of step {steps[0]} written" in said
    done = subprocess.run(
        [*base, "--resume", str(folder)], capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert f"going on from step {steps[0]}" in done.stdout
    # Where the signal came late, too few steps are left to say anything of.
    assert "to improve:" in done.stdout or config.train.steps - steps[0] < 10
    assert "written:" in done.stdout
    assert trained(folder) == undisturbed


SERVED = {
    "one worker": ("bsp", signal.SIGINT, None),
    "bsp": ("bsp", signal.SIGINT, None),
    "ssp, SIGTERM": ("ssp", signal.SIGTERM, None),
    "asp": ("asp", signal.SIGINT, None),
    "bsp, a worker alone": ("bsp", signal.SIGINT, 1),
    "asp, a server alone": ("asp", signal.SIGINT, 3),
}


@NEEDS_MPI
@pytest.mark.parametrize(
    "case", ["one worker", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SERVED)[1:])]
)
@pytest.mark.usefixtures("warm")
def test_a_run_with_servers_that_is_asked_to_stop_leaves_a_checkpoint(
    config: TrainConfig, tmp_path: Path, case: str
) -> None:
    """By the command line: the command gets a signal, as Ctrl-C or a scheduler sends it, or one rank alone gets it.
    Under BSP what goes on from there is the run that nobody stopped."""
    consistency, number, rank = SERVED[case]
    count = 1 if case == "one worker" else 2
    method = f"train.method=server,method.servers={count},method.consistency={consistency},checkpoint.every=0"
    method += ",train.steps=120"  # more than a run makes before a busy machine looks at it
    made = load(mesh=f"dp={count}", sets=[SMALL, f"data.source={config.data.source}", method])
    folder = tmp_path / "run"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [_source(), os.environ.get("PYTHONPATH")]))}
    base = [sys.executable, "-m", "tilemesh", "train"]
    process = subprocess.Popen(
        [*base, "--run", str(folder), "--mesh", f"dp={count}", "--set",
         f"{SMALL},data.source={config.data.source},{method}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, cwd=tmp_path,
    )  # fmt: skip
    try:
        until(lambda: max(losses(folder), default=0) >= 3, within_s=240)
        if rank is None:
            process.send_signal(number)
        else:
            os.kill(rank_pids(folder)[rank], number)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == (130 if rank is None else 0), said
    ((step, _),) = checkpoints(folder / CHECKPOINTS)
    assert 3 <= step < 120
    if rank is None:
        assert f"checkpoint of step {step} written" in said
        assert said.rstrip().splitlines()[-1].endswith(f"tilemesh train --resume {folder}")
    stopped = json.loads((folder / "summary.json").read_text())
    assert stopped["interrupted"]
    names = [f"{kind} {number}" for kind in ("worker", "server") for number in range(count)]
    assert [one["name"] for one in stopped["ranks"]] == names
    run_threads(made.ranks, lambda comm: train_here(made, folder, comm, resume=True))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["step"], summary["interrupted"]) == (120, False)
    if consistency == "bsp":
        quiet = new_run(TRAIN, made.to_toml(), tmp_path / "quiet")
        run_threads(made.ranks, lambda comm: train_here(made, quiet, comm))
        assert trained(folder) == trained(quiet)


@pytest.mark.slow
@NEEDS_MPI
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_first_worker_that_stood_still_goes_on_where_the_others_are(
    config: TrainConfig, tmp_path: Path, consistency: str
) -> None:
    """Stopped for longer than servers wait for it; the run comes to its last step, and not beyond it."""
    served = f"train.method=server,method.servers=2,method.consistency={consistency},train.timeout_s=16,train.steps=200"
    made = load(mesh="dp=2", sets=[SMALL, f"data.source={config.data.source}", served, "checkpoint.every=50"])
    folder = new_run(TRAIN, made.to_toml(), tmp_path / "run")
    run = Started(made, folder)
    until(lambda: run.reached(3), within_s=240)
    pid = rank_pids(folder)[0]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(14.0)
    os.kill(pid, signal.SIGCONT)
    outcome = run.wait(300)
    assert outcome.failure is None, outcome.failure.sentence()
    assert checkpoints(folder / CHECKPOINTS)[0][0] == 200
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["step"] == 200
    assert max(losses(folder)) == 200
    if consistency == "bsp":  # under ASP nobody waits for it, so that it is never given up and makes all of its own
        assert len(losses(folder)) < 200
    for server in summary["method"]["servers"]:
        assert server["updates"] <= (200 if consistency == "bsp" else 400)


# Killed under a pipeline and ZeRO, resumed in other layouts ---------------------------------------------------------

SHARED = "plan.zero=2,plan.precision=fp64,train.steps=12,checkpoint.every=2,plan.microbatch=1"


@pytest.fixture(scope="module")
def shared(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, dict[int, float]]:
    """A run on two stages by two replicas under ZeRO-2, and its losses when nothing happens to it."""
    made = load(mesh="dp=2,pp=2", sets=[SMALL, f"data.source={config.data.source}", SHARED])
    folder = new_run(TRAIN, made.to_toml(), tmp_path_factory.mktemp("shared") / "run")
    run_threads(4, lambda comm: train_here(made, folder, comm, emit=lambda event: None))
    return made, losses(folder)


def killed(made: TrainConfig, folder: Path, victim: int, step: int, delay_s: float, transport: str) -> None:
    """Train on processes until one of them is killed in the middle of a step."""
    run = Started(made, new_run(TRAIN, made.to_toml(), folder), transport=transport)
    kill_when(run, victim, lambda: run.reached(step) and (time.sleep(delay_s) or True))
    outcome = run.wait()
    assert outcome.failure is not None
    assert f"rank {victim} was killed by SIGKILL" in outcome.failure.sentence()


def resumed(folder: Path, **how: Any) -> dict[int, float]:
    """The run that was killed, to its end on threads, which choose anew where processes took a library's collective."""
    made = load(resume=folder, **how)
    run_threads(made.plan.world, lambda comm: train_here(made, folder, comm, resume=True, emit=lambda event: None))
    return losses(folder)


OTHERS: list[dict[str, Any]] = [
    {"mesh": "dp=2,tp=2", "sets": ["plan.zero=1"]},
    {"mesh": "dp=4", "sets": ["plan.zero=3"]},
]


@pytest.mark.usefixtures("warm")
def test_killed_under_zero_in_a_pipeline_and_resumed_in_other_layouts(
    shared: tuple[TrainConfig, dict[int, float]], tmp_path: Path
) -> None:
    """In others within 1e-10, in the same one bit for bit: a sum of two replicas is the same in any order."""
    made, wanted = shared
    killed(made, tmp_path / "run", 3, 5, 0.0, "torch")
    for number, how in enumerate((*OTHERS, {})):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", folder)
        found = resumed(folder, **how)
        assert list(found) == list(wanted)
        if how:
            assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-10)
        else:
            assert found == wanted


def _source() -> str:
    import tilemesh

    assert tilemesh.__file__ is not None
    return str(Path(tilemesh.__file__).parents[1])
