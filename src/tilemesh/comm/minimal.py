"""All-reduce and all-to-all the naive way, in twenty lines each: to read first, and to compare the others with.

Everybody sends everything to everybody. Right for any rank count, array and operation; n-1 times the bytes needed.
Posting the receives before the sends, and waiting only then, is what keeps it from the send/send deadlock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilemesh.comm.runtime.communicator import Communicator


def all_reduce(comm: Communicator, x: np.ndarray[Any, Any], op: str = "sum") -> np.ndarray[Any, Any]:
    """The combination of all ranks' arrays, the same on every rank."""
    combine = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    from_rank = [x if rank == comm.rank else np.empty(x.shape, x.dtype) for rank in range(comm.size)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]

    receives = [comm.irecv(from_rank[rank], rank) for rank in others]
    sends = [comm.isend(x, rank) for rank in others]
    for handle in receives + sends:
        handle.wait()

    # In rank order on every rank: floating-point sums depend on the order, and all must get the same bits.
    result = from_rank[0].copy()
    for array in from_rank[1:]:
        combine(result, array, out=result)
    return result


def all_to_all(comm: Communicator, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Part d of every rank's array, split along axis 0, goes to rank d; what comes is joined in rank order."""
    parts = np.array_split(x, comm.size)
    mine = parts[comm.rank]
    from_rank = [mine if rank == comm.rank else np.empty(mine.shape, x.dtype) for rank in range(comm.size)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]

    receives = [comm.irecv(from_rank[rank], rank) for rank in others]
    sends = [comm.isend(parts[rank], rank) for rank in others]
    for handle in receives + sends:
        handle.wait()

    return np.concatenate(from_rank)
