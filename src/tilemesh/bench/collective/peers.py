"""The library's own collectives, called as its users would at their best: the peers of a bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError

Native = Callable[[], object]


def peer_call(comm: Communicator, collective: str, x: Any, out: Any) -> Native:
    """A call of the library's own on these arrays, blocking, with nothing of ours in between."""
    if comm.backend == "mpi":
        return _mpi(comm, collective, x, out)
    if comm.backend == "torch":
        return _torch(comm, collective, x, out)
    raise UsageError(f"{comm.backend} has no collectives of its own")


def _mpi(comm: Communicator, collective: str, x: Any, out: Any) -> Native:
    group: Any = comm.transport.comm  # type: ignore[attr-defined]
    calls: dict[str, Native] = {
        "all_reduce": lambda: group.Allreduce(x, out),
        "reduce_scatter": lambda: group.Reduce_scatter_block(x, out),
        "all_gather": lambda: group.Allgather(x, out),
        "all_to_all": lambda: group.Alltoall(x, out),
        "broadcast": lambda: group.Bcast(x),
    }
    return calls[collective]


def _torch(comm: Communicator, collective: str, x: Any, out: Any) -> Native:
    import torch
    import torch.distributed as dist

    group: Any = comm.transport.group  # type: ignore[attr-defined]
    tensor, result = (torch.from_numpy(array) if not torch.is_tensor(array) else array for array in (x, out))
    parts = list(result.chunk(comm.size)) if collective == "all_gather" else []
    if collective == "reduce_scatter" and not tensor.is_cuda:
        raise UsageError("gloo has no reduce_scatter of its own")
    calls: dict[str, Native] = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(result, tensor, group=group),
        "all_gather": lambda: dist.all_gather(parts, tensor, group=group),
        "all_to_all": lambda: dist.all_to_all_single(result, tensor, group=group),
        "broadcast": lambda: dist.broadcast(tensor, group_src=0, group=group),
    }
    return calls[collective]
