"""How much memory this rank has taken at most, and for what.

In all: on a GPU what torch allocated, on a CPU the peak resident set. By kind: weights, gradients and optimiser
state are tensors that can be asked for; what a forward pass keeps for its backward pass goes through autograd's hands,
where `SavedBytes` counts it during one step. Storage is counted once, however many tensors are views of it.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of all of them together, each storage once."""
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None
    }
    return sum(sizes.values())


class SavedBytes:
    """Inside `with`, what autograd keeps for backward passes: `peak` bytes at most, without `but` (the weights).

    Stretches that are computed again in backward keep only their input; what comes back meanwhile is not seen here.
    """

    def __init__(self, but: Iterable[Tensor]) -> None:
        self.peak = 0
        self._now = 0
        self._but = {_key(tensor) for tensor in but}
        self._held: dict[int, int] = {}  # storage: how many saved tensors lie in it
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(self, tensor), _Kept.give)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def now(self, beside: Iterable[Tensor] = ()) -> int:
        """Bytes kept at this moment, those of other tensors with them."""
        others = (tensor for tensor in beside if tensor.untyped_storage().data_ptr() not in self._held)
        return self._now + storage_bytes(others)

    def take(self, key: int, nbytes: int) -> None:
        if key in self._but:
            return
        self._held[key] = self._held.get(key, 0) + 1
        if self._held[key] == 1:
            self._now += nbytes
            self.peak = max(self.peak, self._now)

    def leave(self, key: int, nbytes: int) -> None:
        if key in self._but:
            return
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
            self._now -= nbytes


def _key(tensor: Tensor) -> int:
    """Of the storage itself: its memory may go and come back elsewhere (ZeRO-3)."""
    return int(tensor.untyped_storage()._cdata)


class _Kept:
    """A tensor in autograd's hands: when autograd lets go of this, it has let go of the tensor."""

    def __init__(self, saved: SavedBytes, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        self.key, self.nbytes = _key(tensor), tensor.untyped_storage().nbytes()
        saved.take(self.key, self.nbytes)

    def give(self) -> Tensor:
        return self.tensor

    def __del__(self) -> None:
        self.saved.leave(self.key, self.nbytes)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
