"""Finding the other ranks: MPI, torch.distributed or nobody, from the environment, and a communicator over them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TypeVar

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.debug import spread_text
from tilemesh.comm.runtime.records import leave_verdict, private_board, shared_board
from tilemesh.comm.runtime.run import Engine
from tilemesh.comm.runtime.threads import ThreadTransport, World, run_ranks
from tilemesh.comm.runtime.transport import Transport
from tilemesh.comm.runtime.watch import TIMEOUT_S, Process, Watch
from tilemesh.core.context import JOB_VARIABLE, Membership, membership, torch_environment
from tilemesh.core.errors import UsageError, unknown

TRANSPORTS = ("auto", "mpi", "torch", "alone")
_RECORDS_TAG = 5_000_000

T = TypeVar("T")


def connect(transport: str = "auto", *, timeout_s: float = TIMEOUT_S) -> Communicator:
    """The communicator of the ranks that mpiexec, srun, torchrun or `tilemesh launch` started; else of this process.

    `timeout_s`: how long a call may wait for the others before the watchdog says who is missing and ends the job.
    """
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    _require_timeout(timeout_s)
    member = membership()
    name = _found(member) if transport == "auto" else transport
    if name == "alone":
        return _over(ThreadTransport(World(), 0, 1), timeout_s)
    if name == "mpi":
        from tilemesh.comm.runtime.mpi import MpiTransport

        return _over(MpiTransport.world(), timeout_s, member)
    if member is None:
        raise UsageError(
            "transport 'torch' in a process that nobody started as a rank: use torchrun or `tilemesh launch`"
        )
    return _over(_torch_world(member, timeout_s), timeout_s, member)


def run_threads(
    ranks: int, main: Callable[[Communicator], T], *, timeout_s: float = TIMEOUT_S, node_size: int | None = None
) -> list[T]:
    """`main(comm)` on `ranks` threads of this process, each a rank: for notebooks and tests. Results in rank order.

    `node_size`: how many ranks the hierarchical schedules take for one node.
    """
    if ranks < 1:
        raise UsageError(f"{ranks} ranks: expected at least 1")
    _require_timeout(timeout_s)
    board = private_board(ranks)

    def body(transport: ThreadTransport) -> T:
        process = Process(transport.rank, board, timeout_s, transport.world.fail, pids=False)
        process.start()
        try:
            return main(Communicator(transport, Engine(), Watch(process, range(ranks)), node_size=node_size))
        finally:
            process.stop()

    return run_ranks(ranks, body)


def _over(transport: Transport, timeout_s: float, member: Membership | None = None) -> Communicator:
    board = None
    if transport.size > 1:
        board = shared_board(transport.rank, transport.size, lambda text: spread_text(transport, text, 0, _RECORDS_TAG))

    def end(reason: str) -> NoReturn:
        leave_verdict(reason)
        transport.abort(reason)

    process = Process(transport.rank, board, timeout_s, end)
    process.start()
    node_size = member.local_size if member is not None and member.local_size > 1 else None
    return Communicator(transport, Engine(), Watch(process, range(transport.size)), node_size=node_size)


def _found(member: Membership | None) -> str:
    if member is None:
        return "alone"
    if member.starter == "torchrun":
        return "torch"
    return "mpi" if member.starter == "mpiexec" or find_spec("mpi4py") is not None else "torch"


def _torch_world(member: Membership, timeout_s: float) -> Transport:
    import torch
    import torch.distributed as dist

    from tilemesh.comm.runtime.device import Device
    from tilemesh.comm.runtime.torchdist import TorchTransport

    if not dist.is_initialized():
        folder = os.environ.get(JOB_VARIABLE)
        # nccl needs a GPU for each rank; ranks that share one are served through the host.
        has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= member.local_size
        backend = "cpu:gloo,cuda:nccl" if has_gpus and dist.is_nccl_available() else "gloo"
        if has_gpus:
            torch.cuda.set_device(member.local_rank)
        if folder is not None:
            # Through a file: torch's own server would listen on every interface of the machine.
            method = Path(folder, "comm-store").as_uri()
        else:
            method = "env://"
            os.environ.update(torch_environment())
        # Also bounds the meeting itself. Longer than ours, whose message says more than torch's.
        limit = timedelta(seconds=min(2 * timeout_s + 30, 1e6))
        dist.init_process_group(backend, init_method=method, rank=member.rank, world_size=member.size, timeout=limit)
        atexit.register(_leave_torch)
    has_nccl = "nccl" in str(dist.get_backend_config())
    return TorchTransport(dist.group.WORLD, device=Device(dist.group.WORLD) if has_nccl else None)


def _leave_torch() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _require_timeout(timeout_s: float) -> None:
    if not timeout_s > 0:
        raise UsageError(f"timeout_s {timeout_s}: expected a number of seconds above 0")
