"""What the ranks of chapter 2 run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilemesh.comm import Communicator, connect
from tilemesh.guide.clock import repeated


def greet(comm: Communicator) -> int:
    """Rank 0 sends one number to rank 1, which returns it; rank 0 returns what it sent."""
    box = np.zeros(1, np.int64)  # a receive needs a place to put what comes
    if comm.rank == 0:
        box[0] = 42
        comm.send(box, to=1)
    elif comm.rank == 1:
        comm.recv(box, source=0)
    return int(box[0])


def pass_token(comm: Communicator) -> int:
    """A counter goes once round the ring of ranks; each adds 1. Returns what it held when it was last here."""
    token = np.zeros(1, np.int64)
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size  # % closes the circle
    if comm.rank > 0:
        comm.recv(token, source=before)
    token += 1
    comm.send(token, to=after)
    if comm.rank == 0:
        comm.recv(token, source=before)
    return int(token[0])


def everybody_sends_first(comm: Communicator) -> None:
    """The deadlock: no rank comes to its receive before its send is done, and no send is done without a receive."""
    other = 1 - comm.rank
    comm.send(np.full(4, comm.rank), to=other)
    comm.recv(np.empty(4, np.int64), source=other)


def in_turns(comm: Communicator) -> int:
    """One way out: rank 1 receives before it sends."""
    other = 1 - comm.rank
    mine, theirs = np.full(4, comm.rank), np.empty(4, np.int64)
    if comm.rank == 0:
        comm.send(mine, to=other)
        comm.recv(theirs, source=other)
    else:
        comm.recv(theirs, source=other)
        comm.send(mine, to=other)
    return int(theirs[0])


def both_at_once(comm: Communicator) -> int:
    """The other: begin both, then wait for both. `irecv` and `isend` return at once; the i stands for immediate."""
    other = 1 - comm.rank
    theirs = np.empty(4, np.int64)
    receiving = comm.irecv(theirs, source=other)
    sending = comm.isend(np.full(4, comm.rank), to=other)
    receiving.wait()
    sending.wait()
    return int(theirs[0])


def read_too_early(comm: Communicator) -> tuple[int, int]:
    """Rank 1 looks into its box before it has waited, and again afterwards."""
    box = np.full(1, -1)
    if comm.rank == 0:
        comm.recv(np.empty(1, np.int64), source=1)  # sends only when rank 1 has looked
        comm.send(np.array([42]), to=1)
        return 42, 42
    receiving = comm.irecv(box, source=0)
    early = int(box[0])  # the mistake
    comm.send(np.zeros(1, np.int64), to=0)
    receiving.wait()
    return early, int(box[0])


def on_a_device(comm: Communicator, device: str) -> str:
    """Add up a tensor that lies on a device; what came out, or what was refused."""
    import torch

    try:
        return f"sum is {comm.all_reduce(torch.ones(1, device=device)).tolist()}"
    except ValueError as error:
        return f"refused: {error}"


def copy_seconds(nbytes: int) -> float:
    """Seconds to copy so many bytes from one array to another; the quickest of some tries."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return min(repeated(lambda: np.copyto(target, source), 8))


def ping_pong(sizes: Sequence[int], rounds: int = 60) -> list[list[float]]:
    """Seconds that a message of each size takes one way, many times: half of there and back.

    Between ranks 0 and 1; others only look on.
    """
    comm = connect()
    times_by_size: list[list[float]] = []
    if comm.rank > 1:
        return times_by_size
    for size in sizes:
        box, times = np.zeros(size, np.uint8), []
        for _ in range(rounds):
            began = time.perf_counter()
            bounce(comm, box)
            times.append((time.perf_counter() - began) / 2)
        times_by_size.append(times)
    return times_by_size


def bounce(comm: Communicator, box: Any) -> None:
    """There and back: rank 0 sends to rank 1, which sends it back."""
    if comm.rank == 0:
        comm.send(box, to=1)
        comm.recv(box, source=1)
    else:
        comm.recv(box, source=0)
        comm.send(box, to=0)
