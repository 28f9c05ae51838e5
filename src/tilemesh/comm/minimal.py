"""The collectives the naive way, in a few lines each: to read first, and to compare the others with.

Every rank sends to every other rank what that one needs, and combines or joins what comes in rank order. Right for any
rank count, numpy array and operation; an all-reduce sends n-1 times the bytes needed. `examples/minimal.py` runs them
and times them beside the built-in ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilemesh.comm.runtime.arithmetic import UFUNCS, require_operation
from tilemesh.comm.runtime.communicator import Communicator

Array = np.ndarray[Any, Any]


def exchange(comm: Communicator, to_rank: Sequence[Array], from_rank: Sequence[Array]) -> None:
    """Send `to_rank[r]` to every other rank r, and receive what it sends here into `from_rank[r]`.

    Posting the receives before the sends, and waiting only then, is what keeps it from the send/send deadlock.
    """
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    receives = [comm.irecv(from_rank[rank], rank) for rank in others]
    sends = [comm.isend(to_rank[rank], rank) for rank in others]
    for handle in receives + sends:
        handle.wait()
    from_rank[comm.rank][...] = to_rank[comm.rank]


def combined(from_rank: Sequence[Array], op: str) -> Array:
    """All ranks' arrays as one: in rank order, so that every rank adds alike and gets the same bits."""
    require_operation(op, from_rank[0].dtype.name)
    result = from_rank[0].copy()
    for array in from_rank[1:]:
        UFUNCS[op](result, array, out=result)
    if op == "avg":
        result /= len(from_rank)
    return result


def all_reduce(comm: Communicator, x: Array, op: str = "sum") -> Array:
    """The combination of all ranks' arrays, the same on every rank (global-sum)."""
    from_rank = [np.empty_like(x) for _ in range(comm.size)]
    exchange(comm, [x] * comm.size, from_rank)
    return combined(from_rank, op)


def reduce_scatter(comm: Communicator, x: Array, op: str = "sum") -> Array:
    """Part r of the combination of all ranks' arrays, split along axis 0, on rank r (scatter-sum)."""
    parts = np.array_split(x, comm.size)
    from_rank = [np.empty_like(parts[comm.rank]) for _ in range(comm.size)]
    exchange(comm, parts, from_rank)
    return combined(from_rank, op)


def all_gather(comm: Communicator, x: Array) -> Array:
    """All ranks' arrays, which must be of one shape, joined along axis 0 in rank order, on every rank (gather-all)."""
    from_rank = [np.empty_like(x) for _ in range(comm.size)]
    exchange(comm, [x] * comm.size, from_rank)
    return np.concatenate(from_rank)


def all_to_all(comm: Communicator, x: Array) -> Array:
    """Part d of every rank's array, split along axis 0, goes to rank d; joined there in rank order (peer-exchange)."""
    parts = np.array_split(x, comm.size)
    from_rank = [np.empty_like(parts[comm.rank]) for _ in range(comm.size)]
    exchange(comm, parts, from_rank)
    return np.concatenate(from_rank)


def broadcast(comm: Communicator, x: Array, root: int = 0) -> Array:
    """The root's array, on every rank; the others' gives shape and dtype."""
    if comm.rank == root:
        for handle in [comm.isend(x, rank) for rank in range(comm.size) if rank != root]:
            handle.wait()
        return x.copy()
    result: Array = comm.recv(np.empty_like(x), root)
    return result
