"""Finding the other ranks: MPI, torch.distributed or nobody, from the environment, and a communicator over them."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tilemesh.comm.runtime.arguments import seconds, whole
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.engine import CallEngine, Running
from tilemesh.comm.runtime.gpus import gpu_of, why_staged
from tilemesh.comm.runtime.meeting import meeting
from tilemesh.comm.runtime.records import leave_verdict, private_board, shared_board
from tilemesh.comm.runtime.texts import Steps, exchange, spread
from tilemesh.comm.runtime.threads import ThreadTransport, World, run_ranks
from tilemesh.comm.runtime.transport import TAG_KINDS, Token, Transport
from tilemesh.comm.runtime.watch import TIMEOUT_S, Watch, Watchdog
from tilemesh.core.context import JOB_VARIABLE, Membership, membership, torch_environment
from tilemesh.core.errors import UsageError, unknown
from tilemesh.measure.machine import visible_gpus

if TYPE_CHECKING:
    from tilemesh.comm.runtime.mpi import MpiTransport
    from tilemesh.comm.runtime.torchdist import TorchTransport

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

            world = MpiTransport.world()
            # Where srun was not told of MPI, each rank is a world of its own; SLURM's variables serve torch.
            if member is None or transport == "mpi" or member.starter != "srun" or world.size == member.size:
                _put_nccl_beside(world, member, timeout_s)
                return _over(world, timeout_s, node_size)
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
        _watchdog = Watchdog(transport.rank, board, end)
        _watchdog.start()
        atexit.register(_watchdog.stop)
    return _watchdog


def _told(steps: Steps[T]) -> Running:
    heard: list[T] = []

    def keep() -> Iterator[Token]:
        heard.append((yield from steps))

    return Running(keep(), lambda: heard[0])


def _found(member: Membership | None) -> str:
    if member is None:
        return "alone"
    if member.starter == "torchrun":
        return "torch"
    return "mpi" if member.starter == "mpiexec" or find_spec("mpi4py") is not None else "torch"


def _put_nccl_beside(world: MpiTransport, member: Membership | None, timeout_s: float) -> None:
    """MPI moves the host's memory; where each rank has a GPU of its own, a transport of torch's moves theirs."""
    if world.size == 1:
        return
    place = member or Membership("mpiexec", world.rank, world.size, world.rank, world.size)
    mine = gpu_of(place.local_rank, visible_gpus()) if find_spec("torch") is not None else ""
    tag = (TAG_KINDS - 1) * world.tags
    world.staged_because = why_staged(CallEngine().run(_told(exchange(world, mine, tag))))
    if not world.staged_because:
        is_one_node = place.local_size == place.size
        store = _store_of_first(
            world.rank, is_one_node, lambda text: CallEngine().run(_told(spread(world, text, 0, tag)))
        )
        world.put_beside(_torch_world(place, timeout_s, store))


def _store_of_first(rank: int, is_one_node: bool, tell: Callable[[str], str]) -> Callable[[int, timedelta], Any]:
    """Where ranks that MPI has brought together meet again: a file of the first one's, or on several nodes its port."""
    import torch.distributed

    dist: Any = torch.distributed
    if is_one_node:
        path = tell(str(Path(tempfile.mkdtemp(prefix="tilemesh-"), "comm-store")) if rank == 0 else "")
        if rank == 0:
            atexit.register(shutil.rmtree, Path(path).parent, ignore_errors=True)
        return lambda size, limit: dist.FileStore(path, size)
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    first = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    name, _, port = tell(f"{host} {first.port}" if first is not None else "").partition(" ")
    return lambda size, limit: first or dist.TCPStore(name, int(port), is_master=False, timeout=limit)


def _torch_world(
    member: Membership, timeout_s: float, store_of: Callable[[int, timedelta], Any] | None = None
) -> TorchTransport:
    """`store_of`: where the ranks meet, given their number and how long to wait; by default as the environment says."""
    import torch
    import torch.distributed as dist

    from tilemesh.comm.runtime.torchdist import TorchTransport

    # Also bounds the meeting itself. Longer than ours, whose message says more than torch's.
    limit = timedelta(seconds=min(2 * timeout_s + 30, 1e6))
    is_first = not dist.is_initialized()
    staged_because = "torch.distributed was initialised without NCCL"
    if is_first:
        store = store_of(member.size, limit) if store_of else _rendezvous(member, limit)
        can_use = torch.cuda.is_available() and dist.is_nccl_available()
        uuids = [_uuid(index) for index in range(torch.cuda.device_count())] if can_use else []
        store.set(f"tilemesh/gpu/{member.rank}", gpu_of(member.local_rank, uuids))
        staged_because = why_staged([store.get(f"tilemesh/gpu/{rank}").decode() for rank in range(member.size)])
        if not staged_because:
            torch.cuda.set_device(member.local_rank % torch.cuda.device_count())
        backend = "gloo" if staged_because else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=member.rank, world_size=member.size, timeout=limit)
        atexit.register(_leave_torch)
    world = TorchTransport.world(limit, is_shared=not is_first)
    world.staged_because = staged_because if world.device is None else ""
    return world


def _uuid(index: int) -> str:
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _rendezvous(member: Membership, limit: timedelta) -> Any:
    """Where ranks meet that torchrun, srun or our launcher has started."""
    from torch.distributed.rendezvous import rendezvous

    folder = os.environ.get(JOB_VARIABLE)
    if folder is not None:
        # Through a file: torch's own server would listen on every interface of the machine.
        method = Path(folder, "comm-store").as_uri()
    else:
        method = "env://"
        os.environ.update(torch_environment())
    store, _, _ = next(rendezvous(method, member.rank, member.size, timeout=limit))
    store.set_timeout(limit)
    return store


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
