"""ZeRO-3: of the weights, too, each replica keeps its own rows, and has a chunk whole only while it works on it.

The one idea: when weights are made whole and given back is in the step's list (GATHER and FREE, `core/step/passes.py`),
so all replicas do it in the same order, and how far ahead is a number of the plan. A model without a pipeline is one
chunk per layer. A gather begins when its action comes, and the first pass that reads the chunk waits for it.

A parameter that is not whole has its shape and no memory: what autograd (or compiled code, through it) kept of it
between a forward and its backward pass is the same tensor or a view of it, which has memory again, with the same
values, once the chunk was gathered again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.core.errors import RunError
from tilemesh.parallel.buckets import BUCKET_BYTES
from tilemesh.parallel.gradients import Parts
from tilemesh.parallel.shard import Held
from tilemesh.parallel.zero import Zero, ZeroBucket


def give_memory_back(tensors: Sequence[Tensor]) -> None:
    """Leave tensors their shape and take their memory."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


class NotWholeError(RunError):
    """A pass reads weights that are not whole: the list frees a chunk too early, or gathers it too late."""


@dataclass
class _Gathered:
    """A bucket whose weights are whole, or are becoming so."""

    chunks: set[int]
    """Those that want it."""
    handle: Any
    flat: Tensor


class ZeroWeights(Zero):
    """Gradients, states and weights cut by rows over replicas, the weights of a chunk whole from GATHER to FREE."""

    def __init__(self, parts: Parts, group: int = 0, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(parts, 3, group, bucket_bytes)
        bucket_of = {id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters}
        self.reads: dict[int, list[ZeroBucket]] = {
            chunk: list(dict.fromkeys(bucket_of[id(self.held[name].tensor)] for name in names if name in self.held))
            for chunk, names in parts.reads.items()
        }
        self._whole: dict[int, _Gathered] = {}  # by the bucket's id
        self._own: dict[int, Tensor] = {}
        stepped: dict[str, Held] = {}
        for bucket in self.buckets:
            own = self._own[id(bucket)] = torch.full_like(bucket.part, torch.nan)
            for number, (view, mine) in enumerate(zip(bucket.rows.split(own), bucket.rows.mine, strict=True)):
                whole = bucket.parameters[number]
                if whole.untyped_storage().nbytes():
                    view.copy_(bucket.rows.rows(number, whole))
                stepped[mine.name] = Held(nn.Parameter(view), mine)
            give_memory_back(bucket.parameters)
        self.stepped = {name: stepped[name] for name in self.held}

    def gather(self, chunk: int) -> None:
        """Begin to make a chunk's weights whole."""
        for bucket in self.reads[chunk]:
            gathered = self._whole.get(id(bucket))
            if gathered is None:
                flat = self._memory(bucket)
                handle = self.sharing.all_gather(
                    self._own[id(bucket)],
                    counts=bucket.rows.counts,
                    out=flat[: bucket.rows.numel],
                    algorithm=self.algorithm,
                    wait=False,
                )
                gathered = self._whole[id(bucket)] = _Gathered(set(), handle, flat)
            gathered.chunks.add(chunk)

    @torch.no_grad()
    def ready(self, chunk: int) -> None:
        """Wait until a chunk's weights, whose gathering has begun, are whole."""
        for bucket in self.reads[chunk]:
            gathered = self._whole.get(id(bucket))
            if gathered is None:
                # Every rank is here: what it has begun can end.
                begun = [
                    *(gathered.handle for gathered in self._whole.values()),
                    *(each.handle for each in self.buckets),
                ]
                for handle in begun:
                    if handle is not None:
                        handle.wait()
                raise NotWholeError(
                    f"chunk {chunk} is read and its weights are not whole: an early FREE in the step's list, or a "
                    "GATHER that is missing"
                )
            if gathered.handle is None:
                continue
            gathered.handle.wait()
            gathered.handle = None
            for parameter in bucket.parameters:
                parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
            # By `.data`: nothing has changed that autograd should know of.
            bucket.rows.empty_into(gathered.flat, [parameter.data for parameter in bucket.parameters])
            self._spare.append(gathered.flat)
            gathered.flat = gathered.flat.new_empty(0)

    def free(self, chunk: int) -> None:
        """Give a chunk's weights back, but for those that another chunk still wants."""
        for bucket in self.reads[chunk]:
            gathered = self._whole[id(bucket)]
            gathered.chunks.discard(chunk)
            if not gathered.chunks:
                if gathered.handle is not None:  # no pass has read it
                    self.ready(chunk)
                give_memory_back(bucket.parameters)
                del self._whole[id(bucket)]

    @contextmanager
    def whole(self, chunk: int) -> Iterator[None]:
        """A chunk's weights for a pass outside of a step. A collective call along dp."""
        self.gather(chunk)
        self.ready(chunk)
        try:
            yield
        finally:
            self.free(chunk)

    def updated(self) -> None:
        """The next gather brings the new rows."""

    @property
    def gathered_bytes(self) -> int:
        """Of weights that are whole now or on their way: in a buffer until a pass waits for them, then in place."""
        return sum(
            sum(p.untyped_storage().nbytes() for p in bucket.parameters)
            or bucket.rows.numel * bucket.part.element_size()
            for bucket in self.buckets
            if id(bucket) in self._whole
        )
