"""MPI through mpi4py: upper-case buffer calls only, so that nothing is ever pickled.

Every communicator works on a duplicate of its own, so that its messages cannot meet those of a program that also uses
MPI by itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import accumulate
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import numpy as np
from mpi4py import MPI

from tilemesh.comm.runtime.arithmetic import is_complex, orders, widens
from tilemesh.comm.runtime.call_parts import Call
from tilemesh.comm.runtime.memory import as_bytes, fits
from tilemesh.comm.runtime.transport import (
    Array,
    Bytes,
    Caps,
    Common,
    Lazy,
    Message,
    NativeCall,
    ReadyCall,
    Sent,
    Token,
    tags_below,
    wrong_size,
)
from tilemesh.comm.runtime.watch import Watch
from tilemesh.comm.schedules.collectives import COLLECTIVES, REDUCING
from tilemesh.core.errors import RunError, UsageError

if TYPE_CHECKING:
    from tilemesh.comm.runtime.torchdist import TorchTransport

_OPS = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
_LOGIC = {"sum": MPI.LOR, "max": MPI.LOR, "prod": MPI.LAND, "min": MPI.LAND}  # MPI does not add bools

_LONG_DOUBLES = (
    "longdouble",
    "float128",
    "float96",
    "complex256",
    "complex192",
)  # numpy names it after its bits, which differ by machine

_MOST = 2**31 - 1  # what MPI's int counts

_READY = {
    "all_reduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter_block",
    "all_gather": "Allgather",
    "all_to_all": "Alltoall",
}

_EVEN = {"all_gather": "Allgather", "all_to_all": "Alltoall"}  # quicker than those that take vectors of counts

_isend, _irecv = MPI.Comm.Isend, MPI.Comm.Irecv
_waitall, _testall = MPI.Request.Waitall, MPI.Request.Testall


class _Requests:
    def __init__(self, requests: list[Any]) -> None:
        self.requests = requests

    def test(self) -> bool:
        return bool(_testall(self.requests))

    def wait(self) -> None:
        _waitall(self.requests)


class _Receipt:
    """A message whose size only its sender knows: what came must be what was expected."""

    def __init__(self, request: Any, expected: int, source: int, rank: int) -> None:
        self.request = request
        self.expected = expected
        self.source = source
        self.rank = rank
        self.status = MPI.Status()
        self.is_done = False

    def test(self) -> bool:
        return self.is_done or self._ask(lambda: self.request.Test(self.status))

    def wait(self) -> None:
        if not self.is_done:
            self._ask(lambda: self.request.Wait(self.status))

    def _ask(self, ask: Callable[[], bool]) -> bool:
        expected, source = self.expected, self.source
        try:
            self.is_done = ask()
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            raise RunError(f"rank {source} sent more to rank {self.rank} than the {expected} bytes expected") from None
        if self.is_done and expected <= _MOST:  # beyond that MPI does not say
            got = self.status.Get_count(MPI.BYTE)  # asked once: a request that is over has forgotten it
            if got != expected:
                raise RunError(wrong_size(source, got, self.rank, expected))
        return self.is_done


class _Made:
    """A blocking call that a worker makes."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.over = threading.Event()
        self.error: BaseException | None = None

    def test(self) -> bool:
        if self.over.is_set() and self.error is not None:
            raise self.error
        return self.over.is_set()

    def wait(self) -> None:
        self.over.wait()
        self.test()


class _Worker:
    """Makes the blocking calls that its rank must not wait in, one after another, on a thread of its own.

    MPI does not match a blocking collective of one rank with a nonblocking one of another, and whether a rank may block
    depends on what it alone has under way. So all of them make the blocking call, which is the quicker one, and a rank
    that has other things to move makes it here.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[_Made | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def start(self, call: Callable[[], object]) -> _Made:
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name="tilemesh-mpi", daemon=True)
            self.thread.start()
        call_of_thread = _Made(call)
        self.calls.put(call_of_thread)
        return call_of_thread

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call.call()
            except BaseException as error:  # whatever it is, it is the caller's
                call.error = error
            call.over.set()

    def end(self) -> None:
        if self.thread is not None:
            self.calls.put(None)


class MpiTransport:
    name = "mpi"
    # Open MPI adds 8- and 16-bit integers with AVX's saturating instructions; which library this is does not matter.
    caps = Caps(native=frozenset(COLLECTIVES), saturating=frozenset({"int8", "uint8", "int16", "uint16"}), spins=True)
    device: Any = None
    staged_because = "MPI moves the host's memory alone"
    beside: TorchTransport | None = None  # among the same ranks, where NCCL moves what is on their GPUs

    def __init__(self, comm: Any, blocks: bool) -> None:
        """`comm` becomes ours: give a duplicate. `blocks`: every rank makes collectives in their blocking form."""
        self.comm = comm
        self.caps = replace(MpiTransport.caps, moved_by_threads=blocks)
        self.blocks = blocks
        self.worker = _Worker()
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.names: Sequence[int] = range(self.size)
        self.sent = Sent()
        self.tags = tags_below(comm.Get_attr(MPI.TAG_UB))

    @classmethod
    def world(cls) -> MpiTransport:
        # A worker's calls beside this thread's: only where MPI lets every rank make calls from several threads.
        blocks = np.array([MPI.Query_thread() == MPI.THREAD_MULTIPLE], np.int32)
        comm = MPI.COMM_WORLD.Dup()
        comm.Allreduce(MPI.IN_PLACE, blocks, MPI.MIN)
        return cls(comm, bool(blocks[0]))

    def view(self, region: Bytes) -> Any:
        if region.nbytes > _MOST:
            return (region, 1, _as_one(region.nbytes))
        return (region, region.nbytes, MPI.BYTE)

    def post(self, messages: Sequence[Message], tag: int, *, exact: bool = False) -> Token:
        comm, sent = self.comm, self.sent
        if exact and not messages[0].is_send:
            (message,) = messages
            names = self.names
            request = _irecv(comm, message.view, message.peer, tag)
            return _Receipt(request, message.nbytes, names[message.peer], names[self.rank])
        requests = []
        for is_send, peer, view, nbytes in messages:
            if is_send:
                requests.append(_isend(comm, view, peer, tag))
                sent.messages += 1
                sent.nbytes += nbytes
            else:
                requests.append(_irecv(comm, view, peer, tag))
        return _Requests(requests)

    def lacks(self, collective: str, dtype: str, op: str, uneven: bool) -> str | None:
        if collective in REDUCING and dtype in _LONG_DOUBLES:
            return "MPI libraries disagree about long double"
        if collective in REDUCING and op == "prod" and is_complex(dtype):
            return "MPI libraries multiply complex infinities in ways of their own"
        return None

    def native(self, call: NativeCall) -> Token:
        """In the form that all ranks use, whatever each has under way: see `_Worker`."""
        name, arguments = _arguments_of(self.comm, call)
        if not self.blocks:
            return _Requests([getattr(self.comm, "I" + name.lower())(*arguments)])
        blocking = partial(getattr(self.comm, name), *arguments)
        return Lazy(blocking, lambda: self.worker.start(blocking))

    def ready_native(self, call: Call, x: Array, pending: Sequence[object], watch: Watch) -> ReadyCall | None:
        """None where the ordinary way puts something around the library's call."""
        dtype = call.like.dtype
        is_wide = widens(call.collective, dtype, call.op, self.caps) is not None
        if is_wide or orders(call.collective, dtype, call.op) or x.dtype == bool or is_complex(dtype):
            return None
        is_even = len(set(call.sizes)) == 1 and call.nbytes <= _MOST
        if not self.blocks or call.collective not in _READY or not is_even:
            return None
        function = getattr(self.comm, _READY[call.collective])
        combines = call.collective in REDUCING
        rest = (_OPS[call.op],) if combines else ()
        unit = MPI.Datatype.fromcode(x.dtype.char) if combines else MPI.BYTE
        return _ready(call, x.dtype, function, rest, unit, self.size, pending, watch)

    def common(self, nbytes: int) -> Common | None:
        return None

    def split(self, members: Sequence[int], label: str) -> MpiTransport:
        everyone = self.comm.Get_group()
        group = everyone.Incl(list(members))
        try:
            transport = MpiTransport(self.comm.Create_group(group), self.blocks)
        finally:
            group.Free()
            everyone.Free()
        transport.staged_because = self.staged_because
        if self.beside is not None:
            transport.put_beside(self.beside.split(members, label))
        return transport

    def put_beside(self, transport: TorchTransport) -> None:
        """Let a transport among the same ranks move what is on GPUs, if it can."""
        self.beside, self.device, self.staged_because = transport, transport.device, transport.staged_because

    def close(self) -> None:
        self.worker.end()
        self.comm.Free()
        if self.beside is not None:
            self.beside.close()

    def abort(self, reason: str) -> NoReturn:
        print(f"tilemesh: {reason}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
        raise RunError(reason)  # Abort does not return


def _arguments_of(comm: Any, call: NativeCall) -> tuple[str, tuple[Any, ...]]:
    """The MPI function and its arguments. What is only moved travels as bytes, what is combined with its type."""
    size = call.source.itemsize
    is_root = comm.Get_rank() == call.root
    if call.collective == "barrier":
        return "Barrier", ()
    if call.collective in REDUCING:
        op = (_LOGIC if call.source.dtype == bool else _OPS)[call.op]
        if call.collective == "all_reduce":
            return "Allreduce", (call.source, call.target, op)
        if call.collective == "reduce":
            return "Reduce", (call.source, call.target if is_root else None, op, call.root)
        if call.is_even:
            return "Reduce_scatter_block", (call.source, call.target, op)
        return "Reduce_scatter", (call.source, call.target, list(call.counts), op)
    mine, result = _plain(call.source), _plain(call.target)
    if call.collective == "broadcast":
        if is_root:
            call.target[:] = call.source
        return "Bcast", (result, call.root)
    if call.is_even and sum(call.counts) * size <= _MOST and call.collective in _EVEN:
        return _EVEN[call.collective], (as_bytes(call.source), as_bytes(call.target))
    if call.collective == "all_gather":
        return "Allgatherv", (mine, _parts(call.target, call.counts, size))
    if call.collective == "gather":
        return "Gatherv", (mine, _parts(call.target, call.counts, size) if is_root else None, call.root)
    if call.collective == "scatter":
        return "Scatterv", (_parts(call.source, call.counts, size) if is_root else None, result, call.root)
    return "Alltoallv", (_parts(call.source, call.counts, size), _parts(call.target, call.received, size))


def _plain(array: Array) -> list[Any]:
    if array.nbytes > _MOST:
        return [as_bytes(array), 1, _as_one(array.nbytes)]
    return [as_bytes(array), array.nbytes, MPI.BYTE]


def _parts(array: Array, counts: Sequence[int], size: int) -> list[Any]:
    """In units of one element, so that MPI's int counts reach as far as they can."""
    if sum(counts) > _MOST:
        raise UsageError(
            f"{sum(counts):,} elements in one native call: MPI counts to {_MOST:,}; use algorithm='pairwise' or 'ring'"
        )
    starts = [0, *accumulate(counts)][:-1]
    return [as_bytes(array), list(counts), starts, _element(size)]


@cache
def _element(size: int) -> Any:
    return MPI.BYTE.Create_contiguous(size).Commit()


@lru_cache(maxsize=64)
def _as_one(nbytes: int) -> Any:
    """That many bytes as one thing, for more than an int can count. MPI keeps it until the process ends."""
    mebibytes, rest = divmod(nbytes, 1 << 20)
    many = MPI.BYTE.Create_contiguous(1 << 20)
    return MPI.Datatype.Create_struct([mebibytes, rest], [0, mebibytes << 20], [many, MPI.BYTE]).Commit()


# Calls kept ready -----------------------------------------------------------------------------------------------------


def _ready(
    call: Call,
    dtype: np.dtype[Any],
    function: Callable[..., object],
    rest: tuple[Any, ...],
    unit: Any,
    ranks: int,
    pending: Sequence[object],
    watch: Watch,
) -> ReadyCall:
    """The same call as `native` makes, with all that does not change made once.

    The same function in the same form, because another rank may make the call in the ordinary way, and MPI matches no
    other. When the same two arrays come again, even what mpi4py finds out about them is kept: where they lie.
    """
    result, is_average = call.shape, call.op == "avg"
    watched = (call.collective, call.nbytes)
    ndarray, combines = np.ndarray, bool(rest)
    count = call.sizes[0] * dtype.itemsize // unit.Get_size()  # of one block, where there are blocks
    seen = (0, 0)
    # The arrays that come again and again; known weakly, so that they are their owner's alone.
    known_x: Callable[[], Any] = _nobody
    known_out: Callable[[], Any] = _nobody
    again: Callable[[], object] = _nobody

    def place(array: Any) -> list[Any]:
        there = MPI.buffer.fromaddress(array.__array_interface__["data"][0], array.nbytes)
        return [there, count, unit]

    def ready(x: Any, out: Any) -> Any:
        nonlocal seen, known_x, known_out, again
        if pending:
            return NotImplemented
        if out is not None and out is known_out() and x is known_x() and out.flags.writeable:
            watch.sequence += 1
            watch.native = watched
            try:
                again()
            finally:
                watch.native = None
        else:
            if type(x) is not ndarray or not x.flags.c_contiguous or not x.flags.aligned:
                return NotImplemented
            if out is None:
                out = np.empty(result, dtype)
            elif not fits(out, result, dtype) or _overlap(x, out):
                return NotImplemented
            elif seen == (id(x), id(out)):
                # An array that is weakly known cannot be resized where it is, so its place holds while it lives.
                known_x, known_out = ref(x), ref(out)
                again = partial(function, place(x), place(out), *rest)
            else:
                seen = (id(x), id(out))
            watch.sequence += 1
            watch.native = watched
            try:
                if combines:
                    function(x, out, *rest)
                else:
                    function([x, count, unit], [out, count, unit])
            finally:
                watch.native = None
        if is_average:
            np.divide(out, ranks, out)
        return out

    return ready


def _nobody() -> None:
    return None


def _overlap(x: Any, out: Any) -> bool:
    # Two arrays that own their memory do not; asking numpy takes longer than to see that.
    return (out is x or x.base is not None or out.base is not None) and np.may_share_memory(x, out)
