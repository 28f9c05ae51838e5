"""Finding the other ranks: MPI, torch.distributed or nobody, from the environment, and a communicator over them."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tilemesh.comm.runtime.arguments import seconds, whole
from tilemesh.comm.runtime.call import watched_call
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.engine import CallEngine, Running
from tilemesh.comm.runtime.meeting import meeting
from tilemesh.comm.runtime.records import leave_verdict, private_board, shared_board
from tilemesh.comm.runtime.texts import Steps, spread
from tilemesh.comm.runtime.threads import ThreadTransport, World, run_ranks
from tilemesh.comm.runtime.transport import TAG_KINDS, Token, Transport
from tilemesh.comm.runtime.watch import TIMEOUT_S, Watch, Watchdog
from tilemesh.core.context import JOB_VARIABLE, Membership, membership, torch_environment
from tilemesh.core.errors import UsageError, unknown

_LAST_S = 0.5  # for what is still under way when the program ends
TRANSPORTS = ("auto", "mpi", "torch", "alone")
MOST_THREADS = 4096

T = TypeVar("T")


def connect(transport: str = "auto", *, timeout_s: float = TIMEOUT_S, node_size: int | None = None) -> Communicator:
    """The communicator of the ranks that mpiexec, srun, torchrun or `tilemesh launch` started; else of this process.

    `timeout_s`: how long a call may wait for the others before the watchdog says who is missing and ends the job;
    this one is given 20 s at the least.
    `node_size`: for tests and experiments, how many ranks the hierarchical schedules take for one node.
    A collective call; each returns a communicator of its own, whose messages do not meet those of the others.
    """
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    timeout_s = seconds(timeout_s, "timeout_s")
    node_size = _node_size(node_size)
    member = membership()
    name = _found(member) if transport == "auto" else transport
    if node_size is None and member is not None and member.local_size > 1:
        node_size = member.local_size
    if name == "alone":
        return _over(ThreadTransport(World(), 0, 1), timeout_s, node_size)
    if name == "torch" and member is None:
        raise UsageError(
            "transport 'torch' in a process that nobody started as a rank: use torchrun or `tilemesh launch`"
        )
    with meeting(member, timeout_s, is_first_mpi=name == "mpi" and "mpi4py.MPI" not in sys.modules):
        if name == "mpi":
            from tilemesh.comm.runtime.mpi import MpiTransport

            return _over(MpiTransport.world(), timeout_s, node_size)
        assert member is not None
        return _over(_torch_world(member, timeout_s), timeout_s, node_size)


def run_threads(
    ranks: int, main: Callable[[Communicator], T], *, timeout_s: float = TIMEOUT_S, node_size: int | None = None
) -> list[T]:
    """`main(comm)` on `ranks` threads of this process, each a rank: for notebooks and tests. Results in rank order.

    `node_size`: how many ranks the hierarchical schedules take for one node.
    """
    ranks = whole(ranks, "ranks")
    if not 1 <= ranks <= MOST_THREADS:
        raise UsageError(f"{ranks} ranks: expected 1 to {MOST_THREADS} threads of this process")
    if not callable(main):
        raise UsageError(f"main is {main!r}: expected a function of a communicator")
    timeout_s = seconds(timeout_s, "timeout_s")
    node_size = _node_size(node_size)
    board = private_board(ranks)

    def body(transport: ThreadTransport) -> T:
        process = Watchdog(transport.rank, board, transport.world.fail, pids=False)
        watch = Watch(process, range(ranks), timeout_s=timeout_s)
        engine = CallEngine()
        process.start()
        try:
            result = main(Communicator(transport, engine, watch, node_size))
            say_dropped(transport.rank, engine)
            return result
        finally:
            process.stop()

    return run_ranks(ranks, body)


# A rank has one record for the others to read, so its communicators share one watchdog, whoever connected them.
_watchdog: Watchdog | None = None


def _over(transport: Transport, timeout_s: float, node_size: int | None) -> Communicator:
    process = _watchdog_of(transport)
    process.worlds += 1
    label = "world" if process.worlds == 1 else f"world:{process.worlds}"
    watch = Watch(process, range(transport.size), label, timeout_s)
    engine = CallEngine()
    if transport.size > 1:
        atexit.register(say_dropped, transport.rank, engine)
    return Communicator(transport, engine, watch, node_size)


def say_dropped(rank: int, engine: CallEngine) -> None:
    """A program may end without waiting for what it began; but that is seldom what was meant."""
    if hasattr(sys, "last_value"):  # it ends by an exception, which says more
        return
    end = time.monotonic() + _LAST_S
    while engine.pending and time.monotonic() < end:
        if not engine.progress():
            time.sleep(0.01)
    if engine.dropped:
        names = ", ".join(engine.dropped)
        print(f"tilemesh: rank {rank} ended without wait() for {names}", file=sys.stderr, flush=True)


def _watchdog_of(transport: Transport) -> Watchdog:
    global _watchdog
    if transport.size == 1:
        return Watchdog(0, private_board(1), transport.abort)  # nobody to wait for
    if _watchdog is None:

        def tell(text: str) -> str:
            return str(CallEngine().run(_told(spread(transport, text, 0, (TAG_KINDS - 1) * transport.tags))))

        def end(reason: str) -> NoReturn:
            leave_verdict(reason)
            transport.abort(reason)

        board = shared_board(transport.rank, transport.size, tell)
        _watchdog = Watchdog(transport.rank, board, end, watched_call)
        _watchdog.start()
        atexit.register(_watchdog.stop)
    return _watchdog


def _told(steps: Steps[str]) -> Running:
    heard: list[str] = []

    def keep() -> Iterator[Token]:
        heard.append((yield from steps))

    return Running(keep(), lambda: heard[0])


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

    from tilemesh.comm.runtime.torchdist import end_waiting, let_go

    end_waiting()
    let_go()
    if dist.is_initialized():
        dist.destroy_process_group()


def _node_size(value: Any) -> int | None:
    if value is None:
        return None
    node_size = whole(value, "node_size")
    if node_size < 1:
        raise UsageError(f"node_size {node_size}: expected at least 1 rank per node")
    return node_size
