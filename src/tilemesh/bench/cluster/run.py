"""Ranks of a job measure every link and one another (`links.rounds`); all of them get all readings.

Messages lie in the memory that training would send: a GPU's where each rank has one of its own, else the host's.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tilemesh.bench.cluster.links import Fault, Kind, LinkReading, RankSeat, faults, kind_of, rounds
from tilemesh.bench.harness import Estimate, make_row
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.context import membership
from tilemesh.core.hardware import device_for, make_node
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.parallel.agree import tell_all

PINGS = 200
_UNTIMED = 20
LEAST_BYTES, MOST_BYTES = 1 << 20, 256 << 20
LEAST_S = 0.05  # of the large message that counts
_WIDTHS = {"cpu": (512, torch.float32), "cuda": (8192, torch.bfloat16)}
_PRODUCTS = 10


@dataclass(frozen=True)
class ClusterReading:
    """What the ranks of a job read of one another."""

    seats: Sequence[RankSeat]
    links: Sequence[LinkReading]
    flops_per_s: Mapping[int, float]
    facts: Sequence[Mapping[str, str]]
    """Of each rank: versions and what moves its tensors."""
    gpu: str
    """What each rank computes on; empty: cores."""

    @property
    def promised(self) -> dict[Kind, float]:
        """Bytes per second between two GPUs of a node of this kind, by its datasheet."""
        device = device_for(self.gpu) if self.gpu else None
        return {} if device is None else {"inside a host": make_node(device, 2).intra.bytes_per_s}

    def faults(self) -> list[Fault]:
        return [*self._differing(), *faults(self.seats, self.links, self.flops_per_s, self.promised)]

    def _differing(self) -> list[Fault]:
        """Versions that are not those of most ranks."""
        faults = []
        for name in sorted({name for facts in self.facts for name in facts}):
            values = [facts.get(name, "none") for facts in self.facts]
            usual = statistics.mode(values)
            faults += [
                Fault(seat.words, f"{name} {value}, where the others have {usual}")
                for seat, value in zip(self.seats, values, strict=True)
                if value != usual
            ]
        return faults


def read_cluster(comm: Communicator, say: Callable[[str], None] = lambda text: None) -> ClusterReading:
    """A collective call: every rank gets the same."""
    device = _device(comm)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    facts = {"torch": torch.__version__, "moved by": comm.backend}
    if gpu:
        facts |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "GPU": gpu}  # type: ignore[no-untyped-call]
    here = {
        "host": socket.gethostname(),
        "network": _network(),
        "device": f"{gpu} {device.index}" if gpu else "cores",
        "facts": facts,
    }
    ranks = [json.loads(text) for text in tell_all(comm, json.dumps(here))]
    seats = _seats(ranks)
    hosts = len({seat.host for seat in seats})
    say(f"{comm.size} rank{'s' * (comm.size > 1)} on {hosts} host{'s' * (hosts > 1)}, over {comm.backend}")
    speed = _flops_per_s(device)
    comm.barrier()
    speeds = comm.all_gather(np.array([max(speed, _flops_per_s(device))]))
    groups = rounds(seats)
    count = sum(map(len, groups))
    say(f"{count} link{'s' * (count != 1)} in {len(groups)} round{'s' * (len(groups) != 1)}")
    mine = np.zeros((count, 3))
    number = 0
    for pairs in groups:
        comm.barrier()
        for pair in pairs:
            if comm.rank in pair:
                mine[number] = _measure(comm, pair, device)
            number += 1
    read = comm.all_reduce(mine, "max")  # the ends of a link each have a reading: the longer way counts
    links = [
        LinkReading(a, b, float(latency), float(slow), 1 / float(seconds_per_byte))
        for (a, b), (latency, slow, seconds_per_byte) in zip(
            (pair for pairs in groups for pair in pairs), read, strict=True
        )
    ]
    return ClusterReading(seats, links, dict(enumerate(map(float, speeds))), [each["facts"] for each in ranks], gpu)


def _device(comm: Communicator) -> torch.device:
    """The GPU that this rank would train on, where nccl moves its tensors; else the host's memory is what travels."""
    if comm.transport.device is None or not torch.cuda.is_available():
        return torch.device("cpu")
    member = membership()
    local = comm.rank if member is None else member.local_rank
    return torch.device("cuda", local % torch.cuda.device_count())


def _seats(ranks: Sequence[Mapping[str, str]]) -> list[RankSeat]:
    """Hosts by their names; where two networks have one name, as containers may, with a number."""
    networks: dict[str, list[str]] = {}
    for each in ranks:
        known = networks.setdefault(each["host"], [])
        if each["network"] not in known:
            known.append(each["network"])

    def name(each: Mapping[str, str]) -> str:
        known = networks[each["host"]]
        return each["host"] + (f"#{known.index(each['network'])}" if len(known) > 1 else "")

    return [RankSeat(rank, name(each), each["device"]) for rank, each in enumerate(ranks)]


def _network() -> str:
    """Which network this process sees, where the system says: containers of one host may have their own."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _measure(comm: Communicator, pair: tuple[int, int], device: torch.device) -> tuple[float, float, float]:
    """Median and slow seconds of a small message one way, and seconds per byte of large ones, at this end."""
    is_first, peer = comm.rank == pair[0], pair[1] if comm.rank == pair[0] else pair[0]

    def bounce(buffer: torch.Tensor) -> float:
        began = time.perf_counter()
        for sends in (is_first, not is_first):
            if sends:
                comm.isend(buffer, peer, sized=False).wait()
            else:
                comm.irecv(buffer, peer, sized=False).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / 2

    small = torch.zeros(8, dtype=torch.uint8, device=device)
    times = [bounce(small) for _ in range(_UNTIMED + PINGS)][_UNTIMED:]
    nbytes, seconds = LEAST_BYTES, 0.0
    while True:
        large = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        bounce(large)
        seconds = min(bounce(large) for _ in range(3))
        # Both ends decide by one end's clock, or one would wait for a message that the other does not send.
        enough = np.array([seconds > LEAST_S or nbytes >= MOST_BYTES], np.uint8)
        if is_first:
            comm.send(enough, peer)
        else:
            comm.recv(enough, peer)
        if enough[0]:
            return statistics.median(times), sorted(times)[-1 - PINGS // 100], seconds / nbytes
        nbytes *= 4


def _flops_per_s(device: torch.device) -> float:
    """Of a matrix product, the best of some."""
    width, dtype = _WIDTHS[device.type]
    a, b = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    best = 0.0
    for _ in range(_PRODUCTS):
        began = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * width**3 / (time.perf_counter() - began))
    return best


def cluster_rows(reading: ClusterReading) -> list[Row]:
    """The median link and the slowest of each kind, and the quickest and slowest rank's computing."""
    rows = []
    silent = Estimate(None, "nothing is predicted of a cluster that was not seen before")
    for kind in ("inside a host", "between hosts"):
        links = [link for link in reading.links if kind_of(reading.seats, link.a, link.b) == kind]
        if not links:
            continue
        slowest = min(links, key=lambda link: link.bytes_per_s)
        case: dict[str, CaseValue] = {"links": len(links), "slowest": f"{slowest.a}-{slowest.b}"}
        rates, latencies = (
            Sample.of(values) for values in zip(*((link.bytes_per_s, link.latency_s) for link in links), strict=True)
        )
        promised = Estimate(reading.promised.get(kind), "no datasheet of this link is known here")
        rows += [
            make_row(
                f"bandwidth {kind}", case, rates, unit="B/s", predicted=silent, limit=promised,
                no_peers="the other links are",
            ),
            make_row(
                f"latency {kind}", case, latencies, predicted=silent, limit=Estimate(None, "no datasheet says"),
                no_peers="the other links are",
            ),
        ]  # fmt: skip
    device = device_for(reading.gpu) if reading.gpu else None
    limit = Estimate(None if device is None else device.peak_flops_per_s.get("bf16"), "not calibrated")
    slow = min(reading.flops_per_s, key=lambda rank: reading.flops_per_s[rank])
    speeds = make_row(
        "matrix product of a rank", {"slowest": str(slow)}, Sample.of(reading.flops_per_s.values()), unit="FLOP/s",
        predicted=silent, limit=limit, no_peers="the other ranks are",
    )  # fmt: skip
    return [*rows, speeds]
