"""A first day on a cluster: three network namespaces as hosts, the cable of one made slow, which is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilemesh

HOSTS = 3
PORT = "29541"


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Namespaces whose cables end in a router, which is one too; the cable of the last carries 80 Mbit/s."""
    names = [f"tmc-{os.getpid()}-{number}" for number in range(HOSTS)]
    router = f"tmc-{os.getpid()}-router"
    try:
        added = subprocess.run(["ip", "netns", "add", router], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs the program `ip`")
    if added.returncode:
        pytest.skip(f"making a network namespace is not permitted here: {added.stderr.strip()}")
    try:
        run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "add", "cable", "type", "veth", "peer", "name", f"p{number}", "netns", router)
            run("ip", "-n", router, "addr", "add", f"10.202.{number}.1/24", "dev", f"p{number}")
            run("ip", "-n", router, "link", "set", f"p{number}", "up")
            run("ip", "-n", name, "addr", "add", f"10.202.{number}.2/24", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "route", "add", "default", "via", f"10.202.{number}.1")
        slow = [
            "tc",
            "qdisc",
            "add",
            "dev",
            "cable",
            "root",
            "tbf",
            "rate",
            "80mbit",
            "burst",
            "64kbit",
            "latency",
            "1s",
        ]
        if subprocess.run(["ip", "netns", "exec", names[-1], *slow], capture_output=True).returncode:
            pytest.skip("needs the program `tc` with tbf")
        yield names
    finally:
        for name in (*names, router):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_host_with_the_slow_cable_is_named(hosts: list[str], tmp_path: Path) -> None:
    assert tilemesh.__file__ is not None
    environ = os.environ | {
        "PYTHONPATH": str(Path(tilemesh.__file__).parents[1]), "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = []
    for number, name in enumerate(hosts):
        words = ["-m", "torch.distributed.run", "--nnodes", str(HOSTS), "--node-rank", str(number)]
        words += ["--nproc-per-node", "1", "--master-addr", "10.202.0.2", "--master-port", PORT]
        words += ["-m", "tilemesh", "doctor", "--cluster", "--out", str(tmp_path / "run"), "--json"]
        words += [str(tmp_path / f"{number}.json")]
        command = ["ip", "netns", "exec", name, sys.executable, *words]
        started.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [process.communicate(timeout=280)[0] for process in started]
    found = json.loads((tmp_path / "0.json").read_text())
    named = [fault["who"] for fault in found["faults"] if "every link between hosts" in fault["what"]]
    assert [name.endswith("#2") for name in named] == [True], said[0]
    assert found["layouts"] == {"tried": found["layouts"]["tried"], "wrong": []}
    assert len(found["links"]) == 3
    assert "step time" in said[0]  # of the short run
