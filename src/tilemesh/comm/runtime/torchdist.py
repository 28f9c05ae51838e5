"""torch.distributed: gloo between CPUs (and, for tensors on a GPU, nccl).

Messages are bytes in torch's clothes. gloo cannot be asked whether a message has come, only be waited for; where a
call must not block, a helper thread does the waiting.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist

from tilemesh.comm.runtime.arithmetic import is_complex
from tilemesh.comm.runtime.device import OPS, DeviceCollectives, TorchWork
from tilemesh.comm.runtime.memory import as_bytes
from tilemesh.comm.runtime.transport import (
    TAGS,
    Bytes,
    Caps,
    Common,
    Done,
    Lazy,
    Message,
    NativeCall,
    Sent,
    Token,
)
from tilemesh.comm.schedules.collectives import REDUCING

# Groups end in `close`, with the process, or when their communicator was dropped: then on the main thread or with the
# next message, never in another thread's garbage collection. The end of the process may cut that thread off, and C++
# then ends with an abort.
_open: set[Any] = set()
_dropped: list[Any] = []  # groups of communicators that are gone, to be ended at the next opportunity
_transports: WeakSet[TorchTransport] = WeakSet()
_under_way: WeakSet[_Works] = WeakSet()
_worlds = count(2)  # the first world is torch's own group
_END_S = 1.0
_NATIVE = frozenset({"all_reduce", "all_gather", "all_to_all", "broadcast", "reduce", "barrier"})
# float16 and bfloat16 arrive widened.
_GLOO_DTYPES = (
    "float32",
    "float64",
    "int8",
    "uint8",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
)


class _Works:
    """Messages under way."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works
        _under_way.add(self)
        self.waiter: threading.Thread | None = None
        self.error: Exception | None = None

    def test(self) -> bool:
        if self.waiter is None:
            # A daemon: one that waits for a rank that is gone must not keep this process from ending.
            self.waiter = threading.Thread(target=self._wait, name="tilemesh-gloo", daemon=True)
            self.waiter.start()
        if self.waiter.is_alive():
            return False
        self._raise()
        return True

    def wait(self) -> None:
        if self.waiter is None:
            self._wait()
        else:
            self.waiter.join()
        self._raise()

    def _wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except Exception as error:
            self.error = error

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


class TorchTransport:
    caps = Caps(native=_NATIVE, tells_sizes=False, moves_alone=True)
    tags = TAGS
    staged_because = ""

    def __init__(self, group: Any, has_nccl: bool, timeout: timedelta) -> None:
        """`timeout`: torch's own, for this group and those split from it."""
        self.group = group
        self.device = DeviceCollectives(group) if has_nccl else None
        self.timeout = timeout
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.names: Sequence[int] = range(self.size)
        self.name = "torch"
        self.sent = Sent()
        _transports.add(self)
        if group in _open:
            weakref.finalize(self, _drop, group).atexit = False

    @classmethod
    def world(cls, timeout: timedelta, *, is_shared: bool) -> TorchTransport:
        """Over all ranks of torch.distributed. `is_shared`: others use its own group too, so this gets a new one."""
        has_nccl = "nccl" in str(dist.get_backend_config())
        everyone = dist.group.WORLD
        if is_shared:
            label = f"world:{next(_worlds)}"
            everyone = _new_group(label, dist.get_rank(), dist.get_world_size(), has_nccl, timeout)
        return cls(everyone, has_nccl, timeout)

    def view(self, region: Bytes) -> Any:
        # torch warns of memory it may not write to, and a send only reads it: our own copy is as good.
        return torch.from_numpy(region if region.flags.writeable else region.copy())

    def post(self, messages: Sequence[Message], tag: int, *, exact: bool = False) -> Token:
        group, sent = self.group, self.sent
        if _dropped:
            _end_dropped()
        works = []
        for is_send, peer, view, nbytes in messages:
            if is_send:
                works.append(group.send([view], peer, tag))
                sent.messages += 1
                sent.nbytes += nbytes
            else:
                works.append(group.recv([view], peer, tag))
        return _Works(works)

    def lacks(self, collective: str, dtype: str, op: str, uneven: bool) -> str | None:
        if collective not in _NATIVE:
            return f"gloo has no {collective} of its own"
        if collective in REDUCING and dtype not in _GLOO_DTYPES:
            return f"gloo does not combine {dtype}"
        if collective in REDUCING and op == "prod" and is_complex(dtype):
            return "gloo multiplies no complex numbers"
        if collective == "all_gather" and uneven:
            return "gloo gathers blocks of equal size only"
        return None

    def native(self, call: NativeCall) -> Token:
        # Blocks of a gather are alike everywhere; in an exchange one rank may have nothing while others do.
        if call.collective == "all_gather" and call.target.size == 0:
            return Done()
        return Lazy(lambda: self._call(call, False), lambda: TorchWork(self._call(call, True)))

    def _call(self, call: NativeCall, is_async: bool) -> Any:
        options: dict[str, Any] = {"group": self.group, "async_op": is_async}
        if call.collective == "barrier":
            return dist.all_reduce(torch.zeros(1), **options)  # dist.barrier wants groups that torch itself has named
        if call.collective in ("all_reduce", "reduce"):
            # gloo combines in place; a reduce leaves something on every rank, which must not be the caller's input.
            target = call.target if call.target.size else call.source.copy()
            target[:] = call.source
            tensor = torch.from_numpy(target)
            if call.collective == "all_reduce":
                return dist.all_reduce(tensor, OPS[call.op], **options)
            return dist.reduce(tensor, group_dst=call.root, op=OPS[call.op], **options)
        target_bytes = self.view(as_bytes(call.target))
        if call.collective == "broadcast":
            if self.rank == call.root:
                call.target[:] = call.source
            return dist.broadcast(target_bytes, group_src=call.root, **options)
        source_bytes = self.view(as_bytes(call.source))
        if call.collective == "all_gather":
            return dist.all_gather(list(target_bytes.chunk(self.size)), source_bytes, **options)
        size = call.source.itemsize
        sends, receives = [[count * size for count in counts] for counts in (call.counts, call.received)]
        return dist.all_to_all_single(target_bytes, source_bytes, receives, sends, **options)

    def ready_native(self, call: Any, x: Any, pending: Sequence[object], watch: Any) -> None:
        return None

    def common(self, nbytes: int) -> Common | None:
        return None

    def split(self, members: Sequence[int], label: str) -> TorchTransport:
        group = _new_group(label, members.index(self.rank), len(members), self.device is not None, self.timeout)
        transport = TorchTransport(group, self.device is not None, self.timeout)
        transport.staged_because = self.staged_because
        return transport

    def close(self) -> None:
        if self.group is not dist.group.WORLD:  # without it torch has no groups at all: it goes when the process ends
            _open.remove(self.group)
            self.group.shutdown()
            self.group = None

    def abort(self, reason: str) -> NoReturn:
        print(f"tilemesh: {reason}", file=sys.stderr, flush=True)
        os._exit(1)


def _new_group(label: str, rank: int, size: int, has_nccl: bool, timeout: timedelta) -> Any:
    """A group of torch's among the ranks that call this with the same label, which must never have been used before.

    Not `dist.new_group`: that names a group after its ranks and the number of groups this process has, so ranks that
    are in unequally many groups would wait under different names, and a group made after another was closed would
    find the addresses of the old one.
    """
    c10d: Any = dist.distributed_c10d
    store = c10d.PrefixStore(f"tilemesh/{label}/", c10d._get_default_store())
    group = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(c10d.PrefixStore("cpu/", store), rank, size, timeout=timeout)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if has_nccl:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(c10d.PrefixStore("cuda/", store), rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    group._set_default_backend(kinds.NCCL if has_nccl else kinds.GLOO)
    _open.add(group)
    return group


def _drop(group: Any) -> None:
    """The transport of a group is gone without `close`."""
    _dropped.append(group)
    if threading.current_thread() is threading.main_thread():
        _end_dropped()


def _end_dropped() -> None:
    while _dropped:
        group = _dropped.pop()
        if group in _open:  # otherwise it was closed
            _open.remove(group)
            group.shutdown()


def end_waiting() -> None:
    """End the threads that wait for messages nobody will send: one that the end of the process cuts off aborts it.

    gloo gives a message up only when a wait for it runs out, and closes the connection then.
    """
    for call in list(_under_way):
        if call.waiter is not None and call.waiter.is_alive():
            for work in call.works:
                with contextlib.suppress(Exception):
                    work.wait(timedelta(milliseconds=1))
            call.waiter.join(_END_S)


def let_go() -> None:
    """Drop every communicator's group, so that torch can end gloo's threads while Python still runs.

    One of them may be about to release an array of ours, for which it needs the interpreter: once that is being taken
    down, C++ ends the process with an abort.
    """
    for transport in list(_transports):
        transport.group = transport.device = None


@atexit.register
def _close_all() -> None:
    for group in _open:
        group.shutdown()
    _open.clear()
