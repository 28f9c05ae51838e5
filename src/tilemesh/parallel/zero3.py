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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.core.errors import RunError
from tilemesh.parallel.buckets import BUCKET_BYTES, packed, readers
from tilemesh.parallel.gradients import Parts
from tilemesh.parallel.shard import Held
from tilemesh.parallel.zero import RowsOfRanks, Zero, ZeroBucket, held_rows


def give_memory_back(tensors: Sequence[Tensor]) -> None:
    """Leave tensors their shape and take their memory."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


class NotWholeError(RunError):
    """A pass reads weights that are not whole: the list frees a chunk too early, or gathers it too late."""


@dataclass(eq=False)
class CutWeights:
    """Weights that are gathered together: whole, or on their way, while a chunk wants them."""

    parameters: Sequence[nn.Parameter]
    rows: RowsOfRanks
    own: Tensor
    """This rank's numbers of them."""
    flat: Tensor
    """Where they arrive; without memory while they do not."""
    chunks: set[int] = field(default_factory=set)
    """Those that want them."""
    handle: Any = None
    """Of the gathering, until a pass has waited for it."""


class ZeroWeights(Zero):
    """Gradients, states and weights cut by rows over replicas, the weights of a chunk whole from GATHER to FREE."""

    def __init__(self, parts: Parts, group: int = 0, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._cut_of: dict[nn.Parameter, CutWeights] = {}
        super().__init__(parts, 3, group, bucket_bytes)
        self.rows: dict[str, Held] = dict(self.stepped)
        """This rank's rows of every parameter, also of those that are not trained."""
        for names in packed(parts.frozen, bucket_bytes, parts.chunks, readers(parts.reads)):
            frozen = [parts.frozen[name] for name in names]
            rows = RowsOfRanks([mine.shard for mine in frozen], self.group)
            self.rows |= held_rows(rows, self._cut([mine.tensor for mine in frozen], rows), trained=False)
        tensors = {name: mine.tensor for name, mine in (*self.held.items(), *parts.frozen.items())}
        self.reads: dict[int, list[CutWeights]] = {
            chunk: list(dict.fromkeys(self._cut_of[tensors[name]] for name in names))
            for chunk, names in parts.reads.items()
        }

    def rows_of(self, bucket: ZeroBucket) -> list[Tensor]:
        return self._cut(bucket.parameters, bucket.rows)

    def _cut(self, parameters: Sequence[nn.Parameter], rows: RowsOfRanks) -> list[Tensor]:
        """Keep this rank's rows of some weights, and give the memory of the whole back. NaN where it had none."""
        unset = torch.nan if parameters[0].is_floating_point() else 0
        own = parameters[0].new_full((rows.counts[rows.index],), unset, requires_grad=False)
        views = rows.split(own)
        for number, (view, parameter) in enumerate(zip(views, parameters, strict=True)):
            if parameter.untyped_storage().nbytes():
                view.copy_(rows.rows(number, parameter))
        give_memory_back(parameters)
        self._cut_of |= dict.fromkeys(parameters, CutWeights(parameters, rows, own, own.new_empty(0)))
        return views

    def gather(self, chunk: int) -> None:
        """Begin to make a chunk's weights whole."""
        for weights in self.reads[chunk]:
            if not weights.chunks:
                weights.flat = self._memory(weights.rows.numel, weights.own)
                out, counts = weights.flat[: weights.rows.numel], weights.rows.counts
                weights.handle = self.sharing[weights.rows.spread].all_gather(
                    weights.own, counts=counts, out=out, algorithm=self.algorithm, wait=False
                )
            weights.chunks.add(chunk)

    def ready(self, chunk: int) -> None:
        """Wait until a chunk's weights, whose gathering has begun, are whole."""
        for weights in self.reads[chunk]:
            if not weights.chunks:
                # Every rank is here: what it has begun can end.
                weights_begun = [cut.handle for cut in dict.fromkeys(self._cut_of.values())]
                for handle in (*weights_begun, *(bucket.handle for bucket in self.buckets)):
                    if handle is not None:
                        handle.wait()
                raise NotWholeError(
                    f"chunk {chunk} is read and its weights are not whole: an early FREE in the step's list, or a "
                    "GATHER that is missing"
                )
            self._arrive_whole(weights)

    @torch.no_grad()
    def _arrive_whole(self, weights: CutWeights) -> None:
        if weights.handle is None:
            return
        weights.handle.wait()
        weights.handle = None
        for parameter in weights.parameters:
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
        # By `.data`: nothing has changed that autograd should know of.
        weights.rows.empty_into(weights.flat, [parameter.data for parameter in weights.parameters])
        self._keep(weights.flat)
        weights.flat = weights.flat.new_empty(0)

    def free(self, chunk: int) -> None:
        """Give a chunk's weights back, but for those that another chunk still wants."""
        for weights in self.reads[chunk]:
            weights.chunks.remove(chunk)
            if not weights.chunks:
                self._arrive_whole(weights)  # where no pass has read it
                give_memory_back(weights.parameters)

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
            sum(parameter.untyped_storage().nbytes() for parameter in weights.parameters)
            or weights.rows.numel * weights.own.element_size() * bool(weights.flat.numel())
            for weights in dict.fromkeys(self._cut_of.values())
        )
