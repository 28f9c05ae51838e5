"""Many tensors in one launch: a table of their addresses on the device, and which of them each program's block is of.

A row of the table is the tensors' addresses, the number of the first block, the number of elements, and the weight
decay as the bits of a float64. The rows' layout is fixed by the sizes; addresses may change from call to call, and a
table is kept for each set of addresses that was seen lately.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tilemesh.core.errors import RunError, UsageError
from tilemesh.kernels.launch.tensors import FLOATS, check_tensors, dtype_name

BLOCK, WARPS = 1024, 8  # of a step; measured on an H200: 0.98 of the copy limit; 2048 0.9, 4096 0.7
NORM_BLOCK, NORM_WARPS = 8192, 8
MOST_KEPT = 8  # tables; gradients of a training loop come back at the same few addresses


class BlockTable:
    """Rows for groups of tensors of equal sizes: `columns` addresses per row, then begin, size and a number."""

    def __init__(self, sizes: Sequence[int], block: int, device: torch.device, numbers: Sequence[float]) -> None:
        self.device, self.block = device, block
        counts = [-(-size // block) for size in sizes]
        begins = list(itertools.accumulate(counts, initial=0))[:-1]
        self.blocks = sum(counts)
        bits = [struct.unpack("<q", struct.pack("<d", number))[0] for number in numbers]
        self.ends = list(zip(begins, sizes, bits, strict=True))
        owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(counts))
        self.owners = owners.to(device)
        self._kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._captured: list[tuple[Tensor, Tensor]] = []  # as long as a graph may be replayed
        self._spare: Tensor | None = None

    def rows(self, tensors: Sequence[Sequence[Tensor]]) -> Tensor:
        """The table on the device for these tensors, given by column."""
        addresses = tuple([tensor.data_ptr() for column in tensors for tensor in column])
        pair = self._kept.get(addresses)
        if pair is None:
            pair = self._made(addresses)
        return pair[1]

    def _made(self, addresses: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        count = len(self.ends)
        host = torch.tensor([[*addresses[at::count], *self.ends[at]] for at in range(count)], dtype=torch.int64)
        if self.device.type != "cuda":
            made = (host, host.to(self.device))
        elif torch.cuda.is_current_stream_capturing():
            # A captured graph copies the table again at each replay, from pinned memory that stays; none can be had
            # while capturing, so there is some left from before.
            pinned, self._spare = self._spare, None
            if pinned is None or pinned.shape != host.shape:
                raise RunError("a step over many tensors was captured before it had run once: call it first")
            pinned.copy_(host)
            made = (pinned, pinned.to(self.device, non_blocking=True))
            self._captured.append(made)
            return made
        else:
            if self._spare is None:
                self._spare = torch.empty_like(host).pin_memory()
            host = host.pin_memory()
            made = (host, host.to(self.device, non_blocking=True))
        if len(self._kept) >= MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[addresses] = made
        return made


def is_aligned(*tensors: Tensor) -> bool:
    """Whether kernels may load 16 bytes at once: by the addresses, and by the first one's number of elements."""
    return tensors[0].numel() % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def check_lists(lists: Mapping[str, Sequence[Tensor]]) -> None:
    """Lists of as many tensors, of equal shapes, floating point, on one device."""
    (first, parameters), *_ = lists.items()
    for name, tensors in lists.items():
        if len(tensors) != len(parameters):
            raise UsageError(f"{len(tensors)} {name} for {len(parameters)} {first}: expected as many")
        for at, (tensor, parameter) in enumerate(zip(tensors, parameters, strict=True)):
            check_tensors({f"{name}[{at}]": tensor})
            if tensor is None or tensor.shape != parameter.shape or tensor.dtype not in FLOATS:
                shown = "None" if tensor is None else f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
                raise UsageError(f"{name}[{at}] is {shown}: expected floating point {tuple(parameter.shape)}")
            if tensor.device != parameters[0].device:
                raise UsageError(f"{name}[{at}] is on {tensor.device}: expected {parameters[0].device}, as {first}[0]")
