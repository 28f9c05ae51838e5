"""Two hosts for real: two network namespaces on one machine, a cable between them, torchrun on each."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tilemesh
from tilemesh.comm import run_threads
from tilemesh.runs.files import read_object
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import latest, lines_of
from tilemesh.train.load import load
from tilemesh.train.rank import train_here

SETS = (
    "model.layers=2,model.width=32,model.heads=2,model.kv_heads=2,model.mlp_width=64,model.context=32,train.steps=6,"
    "train.batch=8,checkpoint.every=3,evaluate.every=0,sample.tokens=4,optimizer.warmup=2"
)
ADDRESSES = ("10.201.77.1", "10.201.77.2")
PORT = "29517"


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces with a virtual cable between them; each has its own loopback and nothing else."""
    names = [f"tilemesh-{os.getpid()}-{letter}" for letter in "ab"]
    cables = [f"tm{os.getpid() % 100000}{letter}" for letter in "ab"]
    try:
        made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs the program `ip`")
    if made.returncode:
        pytest.skip(f"making a network namespace is not permitted here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [*names, *cables]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_hosts_by_torchrun_learn_what_one_machine_learns(hosts: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} hosts are {number * 2} ends of a cable\n" for number in range(500)))
    sets = f"{SETS},data.source={text}"
    assert tilemesh.__file__ is not None
    started = []
    for rank, (name, cable) in enumerate(zip(hosts[:2], hosts[2:], strict=True)):
        environ = os.environ | {
            "PYTHONPATH": str(Path(tilemesh.__file__).parents[1]),
            "GLOO_SOCKET_IFNAME": cable,
            "OMP_NUM_THREADS": "1",
        }
        run = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
        run += ["--master-addr", ADDRESSES[0], "--master-port", PORT, "-m", "tilemesh", "train", "--mesh", "dp=2"]
        run += ["--out", str(tmp_path / "run"), "--set", sets]
        command = ["ip", "netns", "exec", name, sys.executable, *run]
        started.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "to improve:" in said[0]
    found = read_object(tmp_path / "run" / "summary.json")
    assert (found["world"], found["backend"], found["step"]) == (2, "torch", 6)
    config = load(mesh="dp=2", sets=[sets])
    alone = new_run(TRAIN, config.to_toml(), tmp_path / "alone")
    run_threads(2, lambda comm: train_here(config, alone, comm, emit=lambda event: None))
    ours, theirs = (
        [line["loss"] for line in latest(folder) if line["kind"] == "step"] for folder in (tmp_path / "run", alone)
    )
    assert ours == theirs  # a sum of two has one order


ELASTIC = f"{SETS},train.steps=500,checkpoint.every=1,plan.precision=fp64,train.timeout_s=6,train.trace_steps=0"


class Host:
    """One namespace as a host whose power can be cut: torchrun's elastic agent with two ranks on it."""

    def __init__(self, name: str, cable: str, address: str, folder: Path, sets: str) -> None:
        self.name, self.cable, self.folder = name, cable, folder
        # In a namespace an agent does not find itself by the machine's name.
        conf = (
            f"is_host={int(address == ADDRESSES[0])},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        )
        self.command = [
            *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-conf", conf),
            *("--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--local-addr", address, "--max-restarts", "9"),
            *("-m", "tilemesh", "train", "--mesh", "dp=2,tp=2", "--min-ranks", "2"),
            *("--out", str(folder / "run"), "--set", sets),
        ]
        self.start()

    def start(self) -> None:
        assert tilemesh.__file__ is not None
        environ = os.environ | {
            "PYTHONPATH": str(Path(tilemesh.__file__).parents[1]), "GLOO_SOCKET_IFNAME": self.cable,
            "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        with (self.folder / self.name).open("ab") as log:
            self.process = subprocess.Popen(self.command, env=environ, stdout=log, stderr=log)

    def cut_power(self) -> None:
        """Nothing says goodbye: the cable first, then every process."""
        ip("-n", self.name, "link", "set", self.cable, "down")
        self.kill()

    def kill(self) -> None:
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.process.wait(20)

    def come_back(self) -> None:
        ip("-n", self.name, "link", "set", self.cable, "up")
        self.start()


def until(reached: Callable[[], object], host: Host, within_s: float = 120.0) -> None:
    end = time.monotonic() + within_s
    while not reached():
        log = (host.folder / host.name).read_text(errors="replace")[-3000:]
        assert host.process.poll() is None, log
        assert time.monotonic() < end, log
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20))
def test_a_host_without_power_is_gone_on_without_and_is_taken_in_again(
    hosts: list[str], tmp_path: Path, seed: int
) -> None:
    """Four ranks of two hosts; the second dies at a seeded step, and comes back when two ranks go on without it."""
    draw = random.Random(seed)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} hosts are {number * 2} ends of a cable\n" for number in range(500)))
    sets = f"{ELASTIC},data.source={text}"

    def lines() -> list[dict[str, Any]]:
        return lines_of(tmp_path / "run")

    def done() -> int:
        return max((line["step"] for line in lines() if line["kind"] == "step"), default=0)

    def changes() -> list[str]:
        return [line["text"] for line in lines() if line["kind"] == "mesh"]

    stays, goes = (
        Host(name, cable, address, tmp_path, sets)
        for name, cable, address in zip(hosts[:2], hosts[2:], ADDRESSES, strict=True)
    )
    try:
        dies_at = draw.randrange(1, 60)
        until(lambda: done() >= dies_at, stays)
        time.sleep(0.1 * draw.random())
        goes.cut_power()
        until(changes, stays)
        goes.come_back()
        until(lambda: len(changes()) == 2, stays)
        assert (stays.process.wait(400), goes.process.wait(60)) == (0, 0), (tmp_path / stays.name).read_text()[-3000:]
    finally:
        for host in (stays, goes):
            host.kill()
    fewer, back = changes()
    assert fewer.startswith("fewer ranks: 4 ranks as dp 2 x tp 2")
    assert back.startswith("ranks are back: 2 ranks")
    assert "now 4 ranks as dp 2 x tp 2" in back
    config = load(mesh="dp=2,tp=2", sets=[sets])
    alone = new_run(TRAIN, config.to_toml(), tmp_path / "alone")
    run_threads(4, lambda comm: train_here(config, alone, comm, emit=lambda event: None))
    ours, theirs = (
        {line["step"]: line["loss"] for line in latest(folder) if line["kind"] == "step"}
        for folder in (tmp_path / "run", alone)
    )
    assert ours == pytest.approx(theirs, rel=1e-10)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_that_slurm_queues_again_goes_on_with_the_tasks_that_it_gets(tmp_path: Path) -> None:
    """As srun starts tasks, by its variables: four, then three (of which two have a place in a layout), then four."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} tasks are {number * 2} halves of a job\n" for number in range(500)))
    sets = f"{SETS},train.steps=12,plan.precision=fp64,train.trace_steps=0,data.source={text}"
    assert tilemesh.__file__ is not None
    for attempt, (tasks, stop) in enumerate([(4, 4), (3, 8), (4, 12)]):
        shared = os.environ | {
            "PYTHONPATH": str(Path(tilemesh.__file__).parents[1]), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": str(tasks), "MASTER_ADDR": "127.0.0.1",
            "SLURM_JOB_ID": str(os.getpid() + attempt), "SLURM_RESTART_COUNT": str(attempt),
        }  # fmt: skip
        command = [sys.executable, "-m", "tilemesh", "train", "--mesh", "dp=2,tp=2", "--min-ranks", "2"]
        command += ["--out", str(tmp_path / "run"), "--set", sets, "--stop-after", str(stop)]
        started = [
            subprocess.Popen(
                command, env=shared | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for task in range(tasks)
        ]  # fmt: skip
        said = [process.communicate(timeout=200)[0] for process in started]
        assert [process.returncode for process in started] == [0] * tasks, said
    changes = [line["text"] for line in lines_of(tmp_path / "run") if line["kind"] == "mesh"]
    assert [words.split(":")[0] for words in changes] == ["fewer ranks", "ranks are back"]
    assert "now 2 ranks" in changes[0]
    config = load(mesh="dp=2,tp=2", sets=[sets])
    alone = new_run(TRAIN, config.to_toml(), tmp_path / "alone")
    run_threads(4, lambda comm: train_here(config, alone, comm, emit=lambda event: None))
    ours, theirs = (
        {line["step"]: line["loss"] for line in latest(folder) if line["kind"] == "step"}
        for folder in (tmp_path / "run", alone)
    )
    assert ours == pytest.approx(theirs, rel=1e-10)
