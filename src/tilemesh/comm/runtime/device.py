"""Collectives on GPU memory, by nccl: the tensor never leaves the device, and its stream orders everything.

`wait()` here means what it means in torch: work that is put on the current stream afterwards sees the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tilemesh.comm.runtime.engine import Running
from tilemesh.comm.runtime.transport import Token
from tilemesh.comm.schedules.collectives import REDUCING

if TYPE_CHECKING:
    from tilemesh.comm.runtime.call_parts import Call

OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_LOGIC: dict[str, Any] = {  # nccl does not add bools: as bytes of 0 and 1, "or" is the larger and "and" the smaller
    "sum": dist.ReduceOp.MAX,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.MIN,
    "min": dist.ReduceOp.MIN,
}


class TorchWork:
    """A collective of torch's under way: unlike a message, it can be asked whether it is done."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def test(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.work.wait()


class DeviceCollectives:
    """nccl over one group of ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def running(self, call: Call, x: Any, has_result: bool) -> Running:
        """The call under way; `x` is None on ranks that contribute nothing."""
        device = call.like.device  # this rank's own, also where it contributes nothing
        dtype = getattr(torch, call.like.dtype)
        source = torch.empty(0, dtype=dtype, device=device) if x is None else x.detach()
        if source.ndim and x is not None:
            source = source.movedim(call.axis, 0)
        source = source.contiguous().reshape(-1)
        straight = has_result and _may_arrive_in(call, source)
        length = call.length if has_result else 0
        result = call.out.view(-1) if straight else torch.empty(length, dtype=dtype, device=device)
        is_logic = dtype == torch.bool
        if is_logic:
            source, result = source.view(torch.uint8), result.view(torch.uint8)
        op = (_LOGIC if is_logic else OPS)[call.op]
        if call.wire is not call.like:  # an average of 16-bit floats: their sum could be too large for them
            source, result = source.float(), result.float()

        def steps() -> Iterator[Token]:
            work = self._start(call, source, result, op)
            if work is not None:
                yield TorchWork(work)

        def finish() -> Any:
            if straight:
                return call.out
            typed = result.view(dtype) if is_logic else result
            return _shaped(call, typed, self.group.size(), has_result, dtype)

        return Running(steps(), finish)

    def message(self, is_send: bool, tensor: Any, peer: int) -> Running:
        """A message of known size under way. nccl knows no tags: two ranks begin their messages in the same order."""

        def steps() -> Iterator[Token]:
            if is_send:
                work = dist.isend(tensor, group=self.group, group_dst=peer)
            else:
                work = dist.irecv(tensor, group=self.group, group_src=peer)
            if work is not None:
                yield TorchWork(work)

        return Running(steps(), lambda: None if is_send else tensor)

    def _start(self, call: Call, source: Any, result: Any, op: Any) -> Any:
        options: dict[str, Any] = {"group": self.group, "async_op": True}
        is_root = self.group.rank() == call.root
        if call.collective in ("all_reduce", "reduce"):
            target = result if result.numel() else source.clone()
            target.copy_(source)
            if call.collective == "all_reduce":
                return dist.all_reduce(target, op, **options)
            return dist.reduce(target, group_dst=call.root, op=op, **options)
        if call.collective == "broadcast":
            if is_root:
                result.copy_(source)
            return dist.broadcast(result, group_src=call.root, **options)
        is_even = len({*call.sizes}) == 1  # lists of parts are copied once more
        if call.collective == "reduce_scatter" and is_even:
            with_op = dist.ReduceScatterOptions()
            with_op.reduceOp = op
            return self.group._reduce_scatter_base(result, source, with_op)
        if call.collective == "all_gather" and is_even:
            return self.group._allgather_base(result, source)
        if call.collective == "reduce_scatter":
            return dist.reduce_scatter(result, list(source.split(call.sizes)), op, **options)
        if call.collective == "all_gather":
            return dist.all_gather(list(result.split(call.sizes)), source, **options)
        sent, received = list(call.sizes), list(call.received)
        # torch's own gather and scatter want equal parts: these are exchanges in which only the root gets or gives.
        if call.collective == "gather":
            sent, received = self._only(call.root, source), sent if is_root else self._only(call.root, result)
        elif call.collective == "scatter":
            sent, received = sent if is_root else self._only(call.root, source), self._only(call.root, result)
        return dist.all_to_all_single(result, source, received, sent, **options)

    def _only(self, root: int, array: Any) -> list[int]:
        """An array that goes to the root or comes from it, as parts by rank."""
        return [array.numel() if rank == root else 0 for rank in range(self.group.size())]


def _may_arrive_in(call: Call, source: Any) -> bool:
    """Whether what arrives can be written where it is wanted: as it lies there, and not over what is sent."""
    out = call.out
    if out is None or call.axis or call.op == "avg" or out.dtype == torch.bool or not out.is_contiguous():
        return False
    return bool(out.untyped_storage().data_ptr() != source.untyped_storage().data_ptr())


def _shaped(call: Call, result: Any, ranks: int, has_result: bool, dtype: Any) -> Any:
    if not has_result:
        return None
    if call.op == "avg" and call.collective in REDUCING:
        result = (result / ranks).to(dtype)
    if call.shape:
        rest = (*call.shape[: call.axis], *call.shape[call.axis + 1 :])
        result = result.reshape(call.shape[call.axis], *rest).movedim(0, call.axis)
    else:
        result = result.reshape(())
    if call.out is None:
        return result.contiguous()
    call.out.copy_(result)
    return call.out
