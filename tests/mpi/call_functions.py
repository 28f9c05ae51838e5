"""Functions that tests/mpi/test_call.py calls on ranks. Rank 1 is the one that misbehaves."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tilemesh.launch import this_rank


def my_rank() -> int:
    return this_rank().rank


def given(*arguments: Any, **options: Any) -> dict[str, Any]:
    return {"rank": my_rank(), "pid": os.getpid(), "arguments": arguments, "options": options}


def my_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def total(length: int) -> Any:
    from tilemesh.comm import connect

    with connect(timeout_s=30.0) as comm:
        return comm.all_reduce(np.full(length, comm.rank + 1.0))


def counted(upto: int) -> Iterator[int]:
    for number in range(upto):
        yield my_rank() * 100 + number


def said(text: str) -> None:
    print(text)


def sleep(folder: str) -> None:
    Path(folder, f"{os.getpid()}.pid").touch()
    time.sleep(300)


def unsendable() -> Any:
    return {"a": [1, 2, 3, {4}]}


def raise_while_connected() -> None:
    from tilemesh.comm import connect

    with connect(timeout_s=30.0) as comm:
        comm.barrier()
        if comm.rank == 1:
            raise ValueError("the widget is bent")


def misbehave(how: str) -> str:
    if my_rank() == 1 and how == "exit":
        sys.exit(0)
    if how == "all raise" or (my_rank() == 1 and how in ("raise", "raise alone")):
        raise ValueError("the widget is bent\nand more")
    if my_rank() == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if my_rank() == 1 and how == "leave":
        os._exit(0)
    if (my_rank() == 1 and how == "hang") or how in ("kill", "leave", "raise alone"):
        time.sleep(300)
    return how


def linger(seconds: float) -> int:
    """Answers at once, and ends late."""
    atexit.register(time.sleep, seconds)
    return my_rank()
