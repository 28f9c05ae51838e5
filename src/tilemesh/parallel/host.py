"""The host's memory as a second place for tensors: page-locked buffers, and copies that run beside computing.

The one idea: on a GPU there is one stream for each direction. A copy waits for what was begun on the computing stream
before it and gives a mark; whoever reads its result lets the computing stream wait for that mark. The host waits only
where it reads the memory itself (`settle`). On a CPU a move is a copy into other memory of the same machine: the same
calls, done at once, so that tests without a GPU prove the order of moves and the values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilemesh.core.errors import RunError
from tilemesh.core.units import format_bytes

Mark = Any
"""The end of some copies: a `torch.cuda.Event`; None on a CPU, where they are over."""
_ALIGNMENT = 256  # bytes: kernels may load 16 at once, and copies start at a cache line


class HostMemory:
    """Buffers in the host's memory, page-locked where a GPU copies from them, for as long as this object lives.

    torch's own page-locked memory is not used: it rounds each tensor up to a power of two, which for states of 100 GiB
    may be 50 GiB too many.
    """

    def __init__(self, is_locked: bool) -> None:
        self.is_locked = is_locked
        self.nbytes = 0
        self._buffers: list[Tensor] = []
        weakref.finalize(self, _unlock, self._buffers if is_locked else []).atexit = False

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Memory for tensors of these shapes and dtypes, contiguous, all in one buffer."""
        buffer = torch.empty(packed_bytes(tensors), dtype=torch.uint8, device="cpu")
        if self.is_locked and buffer.numel():
            buffer.zero_()  # gives it its pages by all threads; locking would do so one by one
            failed = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))  # type: ignore[no-untyped-call]
            if failed:
                raise RunError(
                    f"the host does not lock {format_bytes(buffer.numel())} more of its memory after "
                    f"{format_bytes(self.nbytes)} (CUDA error {failed}): offload less, or raise `ulimit -l`"
                )
        self._buffers.append(buffer)
        self.nbytes += buffer.numel()
        return packed_into(buffer, tensors)


def packed_bytes(tensors: Iterable[Tensor]) -> int:
    """Of a buffer that `packed_into` carves tensors like these out of."""
    return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


def packed_into(buffer: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Contiguous tensors of these shapes and dtypes, one after the other in a buffer of bytes."""
    views, begin = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        views.append(buffer[begin : begin + nbytes].view(tensor.dtype).view(tensor.shape))
        begin += _aligned(nbytes)
    return views


class HostLink:
    """Copies between a device and its host's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = HostMemory(device.type == "cuda")
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def out(self, pairs: Iterable[tuple[Tensor, Tensor]], *after: Mark, keeps: bool = False) -> Mark:
        """Begin to copy (tensor, memory on the host) after these marks and all that was begun on the device so far.

        `keeps`: the tensors' memory stays what it is until the copies are over. Otherwise it may be given back at once:
        the device does not use it for anything else before.
        """
        if self._streams is None:
            for tensor, home in pairs:
                home.copy_(tensor)
            return None
        stream, _ = self._streams
        self._begin(stream, after)
        with torch.cuda.stream(stream):
            for tensor, home in pairs:
                home.copy_(tensor, non_blocking=True)
                if not keeps:
                    tensor.record_stream(stream)
        return stream.record_event()

    def into(self, pairs: Iterable[tuple[Tensor, Tensor]], *after: Mark) -> Mark:
        """Begin to copy (tensor, memory on the host) to the device, after these marks.

        It waits for what was begun on the device so far too, whose memory the tensors may have been.
        """
        if self._streams is None:
            for tensor, home in pairs:
                tensor.copy_(home)
            return None
        _, stream = self._streams
        self._begin(stream, after)
        with torch.cuda.stream(stream):
            for tensor, home in pairs:
                tensor.copy_(home, non_blocking=True)
        return stream.record_event()

    def _begin(self, stream: torch.cuda.Stream, after: Iterable[Mark]) -> None:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for mark in set(after) - {None}:
            stream.wait_event(mark)

    def wait(self, mark: Mark) -> None:
        """What is begun on the device from now on comes after these copies."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def settle(self) -> None:
        """Wait, on the host, until everything that was begun is over."""
        for stream in self._streams or ():
            stream.synchronize()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _unlock(buffers: list[Tensor]) -> None:
    for buffer in buffers:
        if buffer.numel():
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]
