"""Calls in which rank 1 differs from the others, in debug mode: each is refused on every rank, and then all goes on."""

from __future__ import annotations

import os

import numpy as np

from tilemesh.comm import Communicator, connect
from tilemesh.core.debug import VARIABLE
from tilemesh.core.errors import UsageError


def on_a_rank() -> list[str]:
    """Debug mode is for this connection alone: the rank is kept for other tests."""
    os.environ[VARIABLE] = "collectives"
    try:
        with connect(timeout_s=60.0) as comm:
            return refusals(comm)
    finally:
        del os.environ[VARIABLE]


def refusals(comm: Communicator) -> list[str]:
    """What each wrong call raised on this rank, and a sum that comes out right after all of them."""
    told = []
    odd = comm.rank == 1
    calls = [
        lambda: comm.barrier() if odd else comm.all_reduce(np.ones(4)),
        lambda: comm.all_reduce(np.ones(5 if odd else 4)),
        lambda: comm.all_reduce(np.ones(4, np.int32 if odd else np.int64)),
        lambda: comm.broadcast(np.ones(4), root=int(odd)),
        lambda: comm.all_reduce(np.ones(4), "max" if odd else "sum"),
        lambda: comm.all_reduce(np.ones(4), algorithm="tree" if odd else "ring"),
        lambda: comm.all_reduce(np.ones((2, 2) if odd else 4)),
        lambda: comm.all_gather(np.ones((2, 2)), axis=int(odd)),
        lambda: comm.all_gather(np.ones(comm.rank), counts=[0, 1, 2] if not odd else [0, 1, 3]),
        lambda: exchange(comm, [1, 1, 1], [1, 1, 2 if odd else 1]),
    ]
    for call in calls:
        try:
            call()
        except UsageError as error:
            told.append(str(error))
    return [*told, f"sum {comm.all_reduce(np.ones(2))[0]:g}"]


def exchange(comm: Communicator, sends: list[int], receives: list[int]) -> None:
    comm.all_to_all(np.ones(sum(sends)), send_counts=sends, recv_counts=receives)
