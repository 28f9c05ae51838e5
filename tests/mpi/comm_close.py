"""Communicators that come and go on a rank: a second connect, and groups closed as often as they are made."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np

from tilemesh.comm import connect

GROUPS = 24
AT_ONCE = 40  # more would need more descriptors than many machines allow a process


def come_and_go() -> list[Any]:
    first = connect(timeout_s=30.0)
    second = connect(timeout_s=40.0)
    assert (first.label, second.label) == ("world", "world:2")
    assert (first.watch.timeout_s, second.watch.timeout_s) == (30.0, 40.0)
    n, me = first.size, first.rank

    # Both number their calls from 1, so the same tags are under way in both at once.
    one = first.all_reduce(np.full(500, 1.0), algorithm="ring", wait=False)
    two = second.all_reduce(np.full(500, 2.0), algorithm="ring", wait=False)
    assert two.wait()[0] == 2 * n
    assert one.wait()[0] == n

    watchdogs = [thread.name for thread in threading.enumerate() if thread.name.startswith("tilemesh-watch")]
    assert watchdogs == [f"tilemesh-watch-{me}"], watchdogs
    process = first.watch.process
    assert second.watch.process is process
    process.look()
    record = process.board.read(me)
    assert record is not None
    assert record.seen == {"world": 1, "world:2": 1}, record

    for number in range(GROUPS):
        with first.split((me + number) % 2) as group:
            assert group.all_reduce(np.ones(3))[0] == group.size
            assert group.all_reduce(np.ones(3), algorithm="ring")[0] == group.size
    assert sorted(process.watches) == ["world", "world:2"]
    if first.backend == "mpi":
        from mpi4py import MPI

        assert group.transport.comm == MPI.COMM_NULL

    # Ranks may be in unequally many groups.
    alone = first.split(0 if me == 0 else None)  # noqa: F841  kept open
    both = first.split(0)
    assert both.all_reduce(np.ones(1))[0] == n

    first.close()
    assert second.all_reduce(np.ones(2))[0] == n
    second.close()
    third = connect()
    assert third.all_gather(np.array([me])).tolist() == list(range(n))
    return [GROUPS, third.backend]


def drop_unclosed(total: int) -> list[int]:
    """How many descriptors and threads so many groups leave that nobody closed, once they are dropped."""

    def counted() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    gc.freeze()  # what was imported is not looked at in each of the collections below
    comm = connect(timeout_s=30.0)
    first = comm.split(0)
    assert first is not None
    first.all_reduce(np.ones(3), algorithm="ring")
    before = counted()
    for _ in range(total // AT_ONCE):
        groups = [comm.split(0) for _ in range(AT_ONCE)]
        assert all(group.all_reduce(np.ones(3), algorithm="ring")[0] == comm.size for group in groups)
        assert comm.backend == "mpi" or counted()[0] > before[0] + 2 * AT_ONCE
        del groups
        gc.collect()
        comm.all_reduce(np.ones(3), algorithm="ring")  # the communicator they came from goes on
    return [now - then for now, then in zip(counted(), before, strict=True)]
