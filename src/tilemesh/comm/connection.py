"""Finding the other ranks: MPI, torch.distributed or nobody, from the environment, and a communicator over them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TypeVar

from tilemesh.comm.runtime.call import native_call
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


def connect(transport: str = "auto", *, timeout_s: float = TIMEOUT_S, node_size: int | None = None) -> Communicator:
    """The communicator of the ranks that mpiexec, srun, torchrun or `tilemesh launch` started; else of this process.

    `timeout_s`: how long a call may wait for the others before the watchdog says who is missing and ends the job.
    `node_size`: for tests and experiments, how many ranks the hierarchical schedules take for one node.
    A collective call; each returns a communicator of its own, whose messages do not meet those of the others.
    """
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    _require_timeout(timeout_s)
    _require_node_size(node_size)
    member = membership()
    name = _found(member) if transport == "auto" else transport
    if node_size is None and member is not None and member.local_size > 1:
        node_size = member.local_size
    if name == "alone":
        return _over(ThreadTransport(World(), 0, 1), timeout_s, node_size)
    if name == "mpi":
        from tilemesh.comm.runtime.mpi import MpiTransport

        return _over(MpiTransport.world(), timeout_s, node_size)
    if member is None:
        raise UsageError(
            "transport 'torch' in a process that nobody started as a rank: use torchrun or `tilemesh launch`"
        )
    return _over(_torch_world(member, timeout_s), timeout_s, node_size)


def run_threads(
    ranks: int, main: Callable[[Communicator], T], *, timeout_s: float = TIMEOUT_S, node_size: int | None = None
) -> list[T]:
    """`main(comm)` on `ranks` threads of this process, each a rank: for notebooks and tests. Results in rank order.

    `node_size`: how many ranks the hierarchical schedules take for one node.
    """
    if ranks < 1:
        raise UsageError(f"{ranks} ranks: expected at least 1")
    _require_timeout(timeout_s)
    _require_node_size(node_size)
    board = private_board(ranks)

    def body(transport: ThreadTransport) -> T:
        process = Process(transport.rank, board, transport.world.fail, pids=False)
        watch = Watch(process, range(ranks), timeout_s=timeout_s)
        process.start()
        try:
            return main(Communicator(transport, Engine(), watch, node_size))
        finally:
            process.stop()

    return run_ranks(ranks, body)


# A rank has one record for the others to read, so its communicators share one watchdog, whoever connected them.
_watchdog: Process | None = None


def _over(transport: Transport, timeout_s: float, node_size: int | None) -> Communicator:
    process = _watchdog_of(transport)
    process.worlds += 1
    label = "world" if process.worlds == 1 else f"world:{process.worlds}"
    watch = Watch(process, range(transport.size), label, timeout_s)
    return Communicator(transport, Engine(), watch, node_size)


def _watchdog_of(transport: Transport) -> Process:
    global _watchdog
    if transport.size == 1:
        return Process(0, private_board(1), transport.abort)  # nobody to wait for
    if _watchdog is None:

        def tell(text: str) -> str:
            return spread_text(transport, text, 0, _RECORDS_TAG)

        def end(reason: str) -> NoReturn:
            leave_verdict(reason)
            transport.abort(reason)

        board = shared_board(transport.rank, transport.size, tell)
        _watchdog = Process(transport.rank, board, end, native_call)
        _watchdog.start()
        atexit.register(_watchdog.stop)
    return _watchdog


def _found(member: Membership | None) -> str:
    if member is None:
        return "alone"
    if member.starter == "torchrun":
        return "torch"
    return "mpi" if member.starter == "mpiexec" or find_spec("mpi4py") is not None else "torch"


def _torch_world(member: Membership, timeout_s: float) -> Transport:
    import torch
    import torch.distributed as dist

    from tilemesh.comm.runtime.torchdist import TorchTransport

    # Also bounds the meeting itself. Longer than ours, whose message says more than torch's.
    limit = timedelta(seconds=min(2 * timeout_s + 30, 1e6))
    is_first = not dist.is_initialized()
    if is_first:
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
        dist.init_process_group(backend, init_method=method, rank=member.rank, world_size=member.size, timeout=limit)
        atexit.register(_leave_torch)
    return TorchTransport.world(limit, is_shared=not is_first)


def _leave_torch() -> None:
    import torch.distributed as dist

    from tilemesh.comm.runtime.torchdist import let_go

    let_go()
    if dist.is_initialized():
        dist.destroy_process_group()


def _require_node_size(node_size: int | None) -> None:
    if node_size is not None and node_size < 1:
        raise UsageError(f"node_size {node_size}: expected at least 1 rank a node")


def _require_timeout(timeout_s: float) -> None:
    if not timeout_s > 0:
        raise UsageError(f"timeout_s {timeout_s}: expected a number of seconds above 0")
