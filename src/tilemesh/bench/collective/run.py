"""Rows and fits of collectives, from the process that starts the ranks: calls `ranks.py` there, stores fits."""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from tilemesh.comm.runtime.fit import SECTION, Fit, key_of
from tilemesh.core.busy import Busyness, replaces
from tilemesh.core.calibration import Calibration, find
from tilemesh.core.errors import UsageError, unknown
from tilemesh.launch import call
from tilemesh.launch.job import check_ranks
from tilemesh.measure.busy import OtherWork, again_while_busy
from tilemesh.measure.machine import command, stamp, this_machine
from tilemesh.measure.row import Row

TRANSPORTS = {"auto": "auto", "mpi": "mpi", "gloo": "torch", "nccl": "torch"}

# Without these the library's large collectives lose a third of their time to fresh pages at each call.
MALLOC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2000000000:glibc.malloc.top_pad=268435456"


@dataclass(frozen=True)
class CollectiveJob:
    """What the ranks are to do. `algorithms`: names; none of them means all."""

    command: str
    collectives: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    algorithms: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ("ordinary", "empty")
    fit: bool = False
    overlap: bool = True
    repeats: int = 15
    seconds: float = 0.5


def check_transport(transport: str, ranks: Sequence[int]) -> None:
    """Refuse what cannot be started, before anything is."""
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    for count in ranks:
        check_ranks(count)
    if transport == "nccl":
        import torch

        have = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if have < max(ranks):
            raise UsageError(f"--transport nccl with {max(ranks)} ranks: it needs a GPU for each, and there are {have}")


def collective_rows(
    collectives: Sequence[str],
    ranks: int,
    sizes: Sequence[int],
    *,
    transport: str = "auto",
    algorithms: Sequence[str] = (),
    quick: bool = False,
) -> list[Row]:
    """Ours beside the library's own, a row per collective, size, algorithm and whose memory it is."""
    repeats, seconds = (5, 0.1) if quick else (15, 0.5)
    job = CollectiveJob(
        command(), tuple(collectives), tuple(sizes), tuple(algorithms), repeats=repeats, seconds=seconds
    )
    return [Row.from_json(line) for line in _in_ranks(job, ranks, transport)]


def fit_ranks(ranks: int, most_bytes: int, transport: str, *, quick: bool, warn: Callable[[str], None]) -> Fit:
    """What `auto` predicts from on so many ranks, measured again while something else keeps the machine busy."""
    job = CollectiveJob(command(), sizes=(most_bytes,), fit=True, seconds=0.1 if quick else 0.4)

    def once() -> tuple[Fit, Busyness]:
        others = OtherWork()
        (line,) = _in_ranks(job, ranks, transport)
        fit = Fit.from_dict(json.loads(line))
        busy = replace(others.busyness(), spread=0.0 if fit.busy is None else fit.busy.spread)
        return replace(fit, busy=busy), busy

    return again_while_busy(once, warn)[0]


def store(fit: Fit) -> str:
    """Keep a fit beside those for other ranks; where it is, or why one from a quieter machine stays instead."""
    machine = this_machine()
    calibration = find(machine.id)
    if calibration is None:
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        calibration = Calibration(machine.id, machine.words, now, stamp()["versions"])
    section, key = dict(calibration.extra.get(SECTION, {})), key_of(fit.transport, fit.ranks, fit.cores)
    before = section.get(key)
    before = before if isinstance(before, dict) else {}
    if fit.busy is not None and not replaces(fit.busy, Busyness.from_dict(before.get("busy"))):
        return f"not stored: the fit of {before.get('when')} was measured on a quieter machine, and stays"
    section[key] = fit.to_dict()
    return f"stored in {calibration.with_section(SECTION, section).save()}"


def _in_ranks(job: CollectiveJob, ranks: int, transport: str) -> list[str]:
    """What rank 0 found, an object of JSON each."""

    def sink(rank: int, stream: str, line: bytes) -> None:
        if stream == "err":
            sys.stderr.write(line.decode(errors="replace") + "\n")
            sys.stderr.flush()

    lines: list[list[str]] = call(
        "tilemesh.bench.collective.ranks:measure", ranks, asdict(job), transport=TRANSPORTS[transport],
        environ={"GLIBC_TUNABLES": MALLOC} | os.environ, sink=sink,
    )  # fmt: skip
    return lines[0]
