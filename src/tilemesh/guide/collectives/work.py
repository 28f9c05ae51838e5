"""What the ranks of chapter 3 run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from tilemesh.comm import Communicator, connect, minimal
from tilemesh.guide import on_gpu
from tilemesh.guide.clock import repeated


def inverses(comm: Communicator) -> dict[str, bool]:
    """Which collective undoes which, tried out on arrays of small whole numbers."""
    x = np.arange(comm.size * 2) + 100 * comm.rank
    root = np.arange(comm.size * 2)
    scattered = comm.scatter(root if comm.rank == 0 else None, root=0)
    gathered = comm.gather(scattered, root=0)
    part = comm.reduce_scatter(x)
    there = comm.all_to_all(x)
    return {
        "gather undoes scatter": comm.rank != 0 or np.array_equal(gathered, root),
        "reduce_scatter, then all_gather, is all_reduce": np.array_equal(comm.all_gather(part), comm.all_reduce(x)),
        "all_to_all undoes itself": np.array_equal(comm.all_to_all(there), x),
        "broadcast, then reduce, multiplies by the number of ranks": _broadcast_reduce(comm, root),
    }


def _broadcast_reduce(comm: Communicator, root: Any) -> bool:
    copy = comm.broadcast(root if comm.rank == 0 else np.empty_like(root), root=0)
    total = comm.reduce(copy, root=0)
    return comm.rank != 0 or np.array_equal(total, comm.size * root)


def minimal_and_built_in(comm: Communicator) -> dict[str, bool]:
    """The minimal version of each collective beside the built-in one: the same result?"""
    x = np.arange(comm.size * 3, dtype=np.float64) + comm.rank
    pairs: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        name: (getattr(minimal, name), getattr(comm, name))
        for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
    }
    return {name: np.array_equal(ours(comm, x), built_in(x)) for name, (ours, built_in) in pairs.items()}


def traffic_of(comm: Communicator, algorithm: str, nbytes: int) -> tuple[int, int]:
    """Messages and bytes that this rank sends in one all-reduce; `minimal`: the version of comm/minimal.py."""
    x = np.ones(nbytes // 4, np.float32)
    messages, sent = comm.sent.messages, comm.sent.nbytes
    if algorithm == "minimal":
        minimal.all_reduce(comm, x)
    else:
        comm.all_reduce(x, algorithm=algorithm)
    return comm.sent.messages - messages, comm.sent.nbytes - sent


def all_reduce_seconds(nbytes: int, algorithm: str, rounds: int = 3) -> list[float]:
    """Seconds of all-reduces of so many bytes on this rank, after one that does not count."""
    comm = connect()
    x, out = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    times = repeated(lambda: comm.all_reduce(x, out=out, algorithm=algorithm), rounds, before=comm.barrier)
    assert out[0] == comm.size
    return times


def explained(nbytes: int) -> str:
    """What this rank's communicator would pick for an all-reduce of so many bytes, and why."""
    return connect().explain("all_reduce", nbytes)


def gpu_all_reduce_seconds(nbytes: int, device: str) -> list[float]:
    """The same of tensors on a GPU, which the ranks share where there are fewer GPUs than ranks."""
    return seconds_on(connect(), nbytes, device)


def seconds_on(comm: Communicator, nbytes: int, device: str) -> list[float]:
    """By a ring, whose messages go through the host's memory; ranks with a GPU each would use NCCL instead."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    x = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    total = comm.all_reduce(x, algorithm="ring")
    assert total.device.type == x.device.type
    assert float(total[0]) == comm.size
    wait = partial(on_gpu.finish, device)
    wait()
    return repeated(lambda: comm.all_reduce(x, algorithm="ring"), 3, before=comm.barrier, after=wait)
