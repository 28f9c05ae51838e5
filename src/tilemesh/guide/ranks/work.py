"""What the ranks of chapter 1 run. A rank imports this file, so each function can be named to `launch.call`."""

from __future__ import annotations

import os

import numpy as np

from tilemesh.comm import Communicator, connect

_counter = 0  # every process has one of its own


def hello() -> dict[str, int]:
    """Who am I? The rank's number, how many there are, and the number the operating system gave this process."""
    comm = connect()
    return {"rank": comm.rank, "world": comm.size, "pid": os.getpid()}


def count_up() -> int:
    """Add 1 to a global variable of this process, and say what it holds now."""
    global _counter
    _counter += 1
    return _counter


def add_up() -> int:
    """Every rank gives its number and gets the sum of all of them."""
    comm = connect()
    return int(comm.all_reduce(np.array([comm.rank]))[0])


def in_groups(comm: Communicator, tp: int) -> dict[str, list[int]]:
    """Make a group of each row and each column of the mesh, and gather who is in mine."""
    row = comm.split(color=comm.rank // tp)  # ranks with the same color form a group
    column = comm.split(color=comm.rank % tp)
    assert row is not None  # it would be None on a rank that gave no color
    assert column is not None
    mine = np.array([comm.rank])
    return {"row": row.all_gather(mine).tolist(), "column": column.all_gather(mine).tolist()}
