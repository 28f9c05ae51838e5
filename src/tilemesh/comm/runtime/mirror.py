"""One rank of many, alone: every other rank is taken for a copy of this one, and nothing is sent.

For what a rank of a large job computes and holds, on the one device at hand. A collective gives at once what it would
give if all ranks called it with this one's array: a sum is that array times the number of ranks, a gather that array as
often. A message that is waited for is what this rank sent in the same moment, if it has that size, and else zeros. So
shapes, memory and the order of calls are those of the job; values are those of no job.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from tilemesh.comm.runtime.call_parts import Call
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.device import DeviceCollectives
from tilemesh.comm.runtime.engine import CallEngine, Running
from tilemesh.comm.runtime.records import private_board
from tilemesh.comm.runtime.transport import DONE, MIRROR, TAGS, Bytes, Caps, Common, Message, NativeCall, Sent, Token
from tilemesh.comm.runtime.watch import Watch, Watchdog
from tilemesh.comm.schedules.collectives import COLLECTIVES
from tilemesh.core.errors import RunError, UsageError


def mirror(ranks: int, rank: int = 0, *, node_size: int | None = None) -> Communicator:
    """The communicator of rank `rank` of `ranks`, the others being copies of it."""
    if not 0 <= rank < ranks:
        raise UsageError(f"rank {rank} of {ranks}: expected 0 to {ranks - 1}")
    transport = MirrorTransport(rank, ranks)
    process = Watchdog(rank, private_board(ranks), transport.abort)
    return Communicator(transport, CallEngine(), Watch(process, range(ranks)), node_size)


class MirrorTransport:
    name = MIRROR
    caps = Caps(native=frozenset(COLLECTIVES), moves_alone=True)
    staged_because = ""
    tags = TAGS

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.names: Sequence[int] = range(size)
        self.sent = Sent()
        self.device: Any = MirrorDevice(rank, size)

    def view(self, region: Bytes) -> Bytes:
        return region

    def post(self, messages: Sequence[Message], tag: int, *, exact: bool = False) -> Token:
        leaving = {message.nbytes: message.view for message in messages if message.is_send}
        for message in messages:
            if message.is_send:
                self.sent.messages += 1
                self.sent.nbytes += message.nbytes
            else:
                message.view[:] = leaving.get(message.nbytes, 0)
        return DONE

    def lacks(self, collective: str, dtype: str, op: str, uneven: bool) -> str | None:
        return None

    def native(self, call: NativeCall) -> Token:
        reflect(call, self.rank, self.size)
        return DONE

    def ready_native(self, call: Any, x: Any, pending: Sequence[object], watch: Any) -> None:
        return None

    def common(self, nbytes: int) -> Common | None:
        return None

    def split(self, members: Sequence[int], label: str) -> MirrorTransport:
        return MirrorTransport(members.index(self.rank), len(members))

    def close(self) -> None:
        return None

    def abort(self, reason: str) -> NoReturn:
        raise RunError(reason)


def reflect(call: NativeCall, rank: int, size: int) -> None:
    """Into the call's target: what its collective gives if all ranks bring its source. For arrays and tensors alike."""
    source, target, counts = call.source, call.target, call.counts
    if call.collective in ("all_reduce", "reduce"):
        if len(target):
            target[:] = _combined(source, call.op, size)
    elif call.collective == "reduce_scatter":
        target[:] = _combined(_part(source, counts, rank), call.op, size)
    elif call.collective == "broadcast":
        target[:] = source if len(source) else 0
    elif call.collective == "scatter":
        target[:] = _part(source, counts, rank) if len(source) else 0
    elif call.collective in ("all_gather", "gather"):
        if len(target):
            _repeat(source, target, counts)
    elif call.collective == "all_to_all":
        _repeat(_part(source, counts, rank), target, call.received or (counts[rank],) * size)


def _combined(source: Any, op: str, size: int) -> Any:
    if "bool" in str(source.dtype) or op in ("min", "max"):
        return source
    return source**size if op == "prod" else source * size


def _part(source: Any, counts: Sequence[int], rank: int) -> Any:
    begin = sum(counts[:rank])
    return source[begin : begin + counts[rank]]


def _repeat(block: Any, target: Any, counts: Sequence[int]) -> None:
    """One block after the other, cut to its length or filled up with zeros."""
    if set(counts) == {len(block)}:
        target.reshape(len(counts), -1)[:] = block
        return
    for begin, count in zip(itertools.accumulate(counts, initial=0), counts, strict=False):
        have = min(count, len(block))
        target[begin : begin + have] = block[:have]
        target[begin + have : begin + count] = 0


class MirrorDevice(DeviceCollectives):
    """The same for tensors on a GPU, put on the current stream."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(_Place(rank, size))

    def message(self, is_send: bool, tensor: Any, peer: int) -> Running:
        def steps() -> Iterator[Token]:
            if not is_send:  # products of zeros take less power, and so less time
                tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
            yield DONE

        return Running(steps(), lambda: None if is_send else tensor)

    def _start(self, call: Call, source: Any, result: Any, op: Any) -> None:
        same_call = NativeCall(call.collective, source, result, call.op, call.root, call.sizes, call.received)
        reflect(same_call, self.group.rank(), self.group.size())


class _Place:
    """What `DeviceCollectives` asks of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size
