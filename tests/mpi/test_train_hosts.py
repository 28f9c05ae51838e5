"""Two hosts for real: two network namespaces on one machine, a cable between them, torchrun on each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilemesh
from tilemesh.comm import run_threads
from tilemesh.runs.files import read_object
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import latest
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
