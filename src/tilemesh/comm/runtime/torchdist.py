"""torch.distributed: gloo between CPUs (and, for tensors on a GPU, nccl).

Messages are bytes in torch's clothes. gloo cannot be asked whether a message has come, only be waited for; where a
call must not block, a helper thread does the waiting.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tilemesh.comm.runtime.device import Device
from tilemesh.comm.runtime.transport import (
    Arena,
    Bytes,
    Caps,
    Done,
    Lazy,
    Message,
    NativeCall,
    Sent,
    Token,
    as_bytes,
)
from tilemesh.comm.schedules.collectives import REDUCING

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_NATIVE = frozenset({"all_reduce", "all_gather", "all_to_all", "broadcast", "reduce", "barrier"})
# float16 and bfloat16 arrive widened.
_GLOO_DTYPES = ("float32", "float64", "int8", "uint8", "int32", "int64", "float16", "bfloat16")


class _Works:
    """Messages under way."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works
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


class _Collective:
    """A collective of gloo's own, which, unlike a message, can be asked whether it is done."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def test(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.work.wait()


class TorchTransport:
    caps = Caps(native=_NATIVE)

    def __init__(self, group: Any, device: Device | None = None) -> None:
        self.group = group
        self.device = device
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.name = "torch"
        self.sent = Sent()

    def view(self, region: Bytes) -> Any:
        # torch warns of memory it may not write to, and a send only reads it: our own copy is as good.
        return torch.from_numpy(region if region.flags.writeable else region.copy())

    def post(self, messages: Sequence[Message], tag: int) -> Token:
        group, sent = self.group, self.sent
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
        if collective == "all_gather" and uneven:
            return "gloo gathers blocks of equal size only"
        return None

    def native(self, call: NativeCall) -> Token:
        if call.collective in ("all_gather", "all_to_all") and call.target.size == 0 and call.source.size == 0:
            return Done()
        return Lazy(lambda: self._call(call, False), lambda: _Collective(self._call(call, True)))

    def _call(self, call: NativeCall, is_async: bool) -> Any:
        options: dict[str, Any] = {"group": self.group, "async_op": is_async}
        if call.collective == "barrier":
            return dist.barrier(**options)
        if call.collective in ("all_reduce", "reduce"):
            # gloo combines in place; a reduce leaves something on every rank, which must not be the caller's input.
            target = call.target if call.target.size else call.source.copy()
            target[:] = call.source
            tensor = torch.from_numpy(target)
            if call.collective == "all_reduce":
                return dist.all_reduce(tensor, _OPS[call.op], **options)
            return dist.reduce(tensor, group_dst=call.root, op=_OPS[call.op], **options)
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

    def arena(self, nbytes: int) -> Arena | None:
        return None

    def split(self, members: Sequence[int], label: str) -> TorchTransport:
        ranks = [dist.get_global_rank(self.group, member) for member in members]
        # The label is the same on all members and on them alone: groups made side by side must not meet in the store.
        group = dist.new_group(ranks, use_local_synchronization=True, group_desc=label, sort_ranks=False)
        return TorchTransport(group, Device(group) if self.device else None)

    def abort(self, reason: str) -> NoReturn:
        print(f"tilemesh: {reason}", file=sys.stderr, flush=True)
        os._exit(1)
