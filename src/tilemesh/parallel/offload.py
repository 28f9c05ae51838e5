"""Activations and weights in the host's memory while no pass needs them: what OUT and IN of a step's list do.

The one idea: when something goes and comes is in the list (`core/step/passes.py`), so it can be checked, timed and its
memory foreseen; here it is done. An action begins its copies and the pass that needs them waits, so on a GPU they run
beside the passes between (`host.py`).

Activations are what autograd keeps of a chunk's forward pass: hooks put each such tensor into a holder of ours, which
lets go of the tensor's memory after OUT and has it again after IN. Others that hold the same tensor keep it, so a move
can never take memory from somebody who reads it. Weights are the tensors that modules have; they keep their shape and
lose their memory, and autograd, which kept the very same tensors, finds it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.core.errors import RunError
from tilemesh.parallel.host import HostLink, Mark

Place = tuple[int, int, int]
"""Chunk, microbatch and slice."""


class NotHereError(RunError):
    """A pass reads what is in the host's memory: an IN is missing in the step's list, or comes too late."""


class HostActivations:
    """Activations of a rank's chunks. `stays`: tensors that autograd keeps too and that are not moved: weights."""

    def __init__(self, link: HostLink, stays: Iterable[Tensor]) -> None:
        self.link = link
        self._stays = {_key(tensor) for tensor in stays}
        self._kept: dict[Place, list[weakref.ref[_KeptTensor]]] = {}
        self._away: dict[Place, list[_MovedStorage]] = {}
        self._marks: dict[Place, Mark] = {}
        self._spare: dict[int, list[tuple[Tensor, Mark]]] = {}
        """Memory on the host that was used before, by its size, and the copy after which it may be used again. Locking
        is what takes long: where nothing is locked (a CPU, whose memory this is) it is given back."""

    def keeping(self, place: Place) -> Any:
        """Inside `with`, what autograd keeps is of this place."""
        holders = self._kept[place] = []

        def pack(tensor: Tensor) -> Tensor | _KeptTensor:
            if tensor.device.type != self.link.device.type or _key(tensor) in self._stays:
                return tensor  # a number that an operator keeps beside tensors of a GPU is on the host already
            holder = _KeptTensor(place, tensor)
            holders.append(weakref.ref(holder))
            return holder

        return torch.autograd.graph.saved_tensors_hooks(pack, _given)

    def out(self, place: Place) -> None:
        """OUT: begin to copy what is kept of this place to the host, and let go of it here."""
        storages: dict[int, _MovedStorage] = {}
        pairs, after = [], []
        for holder in self._holders(place):
            assert holder.tensor is not None
            key = _key(holder.tensor)
            if key not in storages:
                flat = _bytes_of(holder.tensor)
                home, free = self._home(flat.numel())
                after.append(free)
                pairs.append((flat, home))
                storages[key] = _MovedStorage(home)
            storages[key].views.append(_View(holder))
            holder.tensor = None
        self._marks[place] = self.link.out(pairs, *after)
        self._away[place] = list(storages.values())

    def into(self, place: Place) -> None:
        """IN: begin to copy it back."""
        pairs = []
        for moved in self._away.pop(place):
            flat = torch.empty(moved.home.numel(), dtype=torch.uint8, device=self.link.device)
            pairs.append((flat, moved.home))
            for view in moved.views:
                view.put(flat)
        mark = self.link.into(pairs, self._marks.pop(place))
        self._marks[place] = mark
        for _, home in pairs if self.link.memory.is_locked else ():
            self._spare.setdefault(home.numel(), []).append((home, mark))

    def ready(self, place: Place) -> None:
        """Before a backward pass: let it wait for what comes back."""
        self._kept.pop(place, None)
        if place not in self._away:
            self.link.wait(self._marks.pop(place, None))

    def here(self) -> Iterator[Tensor]:
        """All that is kept on the device now."""
        for place in self._kept:
            for holder in self._holders(place):
                if holder.tensor is not None:
                    yield holder.tensor

    def _holders(self, place: Place) -> Iterator[_KeptTensor]:
        for reference in self._kept.get(place, ()):
            holder = reference()
            if holder is not None:
                yield holder

    def _home(self, nbytes: int) -> tuple[Tensor, Mark]:
        if not self.link.memory.is_locked:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), None
        spare = self._spare.get(nbytes)
        if spare:
            return spare.pop(0)
        like = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        return self.link.memory.like([like])[0], None


class _KeptTensor:
    """A tensor in autograd's hands: while it is on the host there is none."""

    __slots__ = ("__weakref__", "place", "tensor")

    def __init__(self, place: Place, tensor: Tensor) -> None:
        self.place = place
        self.tensor: Tensor | None = tensor


def _given(kept: Tensor | _KeptTensor) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if kept.tensor is None:
        chunk, microbatch, _ = kept.place
        raise NotHereError(
            f"the activations of chunk {chunk}, microbatch {microbatch}, are read and lie in the host's memory: an IN "
            "is missing in the step's list, or comes too late"
        )
    return kept.tensor


class _View:
    """What a holder's tensor is of its memory."""

    def __init__(self, holder: _KeptTensor) -> None:
        assert holder.tensor is not None
        tensor = holder.tensor
        self.holder = weakref.ref(holder)
        self.dtype, self.offset, self.shape, self.strides = (
            tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(),
        )  # fmt: skip

    def put(self, flat: Tensor) -> None:
        holder = self.holder()
        if holder is not None:
            made = torch.empty(0, dtype=self.dtype, device=flat.device)
            holder.tensor = made.set_(flat.untyped_storage(), self.offset, self.shape, self.strides)


class _MovedStorage:
    """Memory on the host with the tensors that lie in it."""

    def __init__(self, home: Tensor) -> None:
        self.home = home
        self.views: list[_View] = []


class ChunkEntry(torch.autograd.Function):
    """Where a chunk's graph begins: the input, of which autograd then holds only what the chunk's operations keep.

    A leaf that waits for its gradient would be held, and its memory with it. `taken` gets the gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, taken: list[Tensor]) -> Tensor:
        ctx.taken = taken
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.taken.append(gradients[0])
        return None, None, None


class HostWeights:
    """Weights of a rank's chunks: all on the device when a step begins and when it ends, on the host in between.

    `reads`: the parameters that the passes of each chunk read. One that several read, such as a tied table, is there
    while any of them is. Every step writes each weight to the host once, since the update has changed it.
    """

    def __init__(self, link: HostLink, reads: Mapping[int, Sequence[nn.Parameter]]) -> None:
        self.link = link
        self.reads = {chunk: list(dict.fromkeys(parameters)) for chunk, parameters in reads.items()}
        self._chunks: dict[nn.Parameter, set[int]] = {}
        """Chunks on the device that read a parameter."""
        for chunk, parameters in self.reads.items():
            for parameter in parameters:
                self._chunks.setdefault(parameter, set()).add(chunk)
        self._homes: dict[nn.Parameter, Tensor] = {}
        self._is_written: set[nn.Parameter] = set()
        """Whose values the host has."""
        self._gone: dict[nn.Parameter, Mark] = {}
        self._coming: dict[int, Mark] = {}
        self._out: set[int] = set()

    def begin(self) -> None:
        """A step begins: whatever the host has is of the step before."""
        self._is_written.clear()

    def out(self, chunk: int) -> None:
        """OUT: a chunk's weights go, but for those that a chunk still here reads."""
        self._out.add(chunk)
        leaving = []
        for parameter in self.reads[chunk]:
            self._chunks[parameter].discard(chunk)
            if not self._chunks[parameter]:
                leaving.append(parameter)
        new = [parameter for parameter in leaving if parameter not in self._homes]
        homes = self.link.memory.like([_bytes_of(parameter) for parameter in new])
        for parameter, home in zip(new, homes, strict=True):
            self._homes[parameter] = home
        written = [parameter for parameter in leaving if parameter not in self._is_written]
        mark = self.link.out([(_bytes_of(parameter), self._homes[parameter]) for parameter in written])
        for parameter in written:
            self._is_written.add(parameter)
            self._gone[parameter] = mark
        for parameter in leaving:
            parameter.untyped_storage().resize_(0)

    def into(self, chunk: int) -> None:
        """IN: begin to bring a chunk's weights back."""
        self._out.discard(chunk)
        pairs, after = [], []
        for parameter in self.reads[chunk]:
            if not self._chunks[parameter]:
                home = self._homes[parameter]
                parameter.untyped_storage().resize_(home.numel())
                pairs.append((_bytes_of(parameter), home))
                after.append(self._gone.pop(parameter, None))
            self._chunks[parameter].add(chunk)
        self._coming[chunk] = self.link.into(pairs, *after)

    def ready(self, chunk: int) -> None:
        """Before a pass: let it wait for weights that come."""
        if chunk in self._out:
            raise NotHereError(
                f"chunk {chunk} is read and its weights lie in the host's memory: an IN is missing in the step's list"
            )
        # A parameter that two chunks read may have come for the other one.
        for mark in self._coming.values():
            self.link.wait(mark)
        self._coming.pop(chunk, None)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor lies in, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
