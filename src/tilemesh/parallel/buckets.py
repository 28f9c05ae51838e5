"""The bucketed exchange of gradients: summed over replicas while backward still runs.

The one idea: gradients lie in a few flat buffers (buckets), of which each parameter's `.grad` is a view, in the order
backward makes them. A bucket's global-sum starts when it is full *and all before it have started*: an order that is the
same on every rank by construction, where an order of readiness would let two ranks wait for different buckets.
What was not used in backward counts as zeros. Only the last microbatch of a step exchanges anything.

A hook runs on the thread that runs backward: on the CPU the caller's own, on CUDA one of autograd's, while the caller
waits in `backward()`. So communicators are used from two threads, never at once: MPI must be initialised
thread-multiple (mpi4py does), and nothing else may use this mesh's communicators during backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from tilemesh.core.axes import Blocks
from tilemesh.core.errors import UsageError
from tilemesh.parallel.gradients import Exchanging, GradientStep, Parts, batch_summed, copies_summed
from tilemesh.parallel.shard import Held
from tilemesh.parallel.whole import shard_views

BUCKET_BYTES = 8 << 20


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients travel together: all of them are held and summed by the same ranks."""

    copies: int
    """Ranks of the mesh that hold the same."""
    batch_summed: Blocks
    """Those of them that take other parts of the batch: summed while backward still runs."""
    copies_summed: Blocks
    """Those that take the same part and each have a part of the gradient: summed at the end."""
    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    chunk: int = 0
    """Of a pipeline, whose parameters these are."""
    holders: tuple[int, ...] = ()
    """Stages that hold the same parameters, as `Shard.holders`: summed at the end."""
    missing: int = 0
    """Gradients that are still to come in this backward."""
    is_started: bool = False
    has_come: list[bool] = field(default_factory=list)
    handle: Any = None

    @classmethod
    def of(cls, held: Sequence[Held], chunk: int, flat: Tensor, views: list[Tensor], **more: Any) -> Self:
        """Of parameters that are all held and summed alike."""
        mine, parameters = held[0].shard, [parameter.tensor for parameter in held]
        sums = (mine.copies, batch_summed(mine), copies_summed(mine))
        return cls(*sums, parameters, flat, views, chunk, mine.holders, **more)


class Bucketed(Exchanging):
    """The bucketed exchange, in pieces of about `bucket_bytes`.

    overlap: whether a bucket is exchanged as soon as it is full; without it nothing starts before `finish`.
    """

    def __init__(self, parts: Parts, bucket_bytes: int = BUCKET_BYTES, *, overlap: bool = True) -> None:
        super().__init__(parts)
        self.overlap, self.chunks = overlap, parts.chunks
        self.buckets = [
            self.make_bucket(names) for names in packed(self.held, bucket_bytes, parts.chunks, readers(parts.reads))
        ]
        self._next = 0  # the first bucket that has not started
        self._is_last = False
        self._is_open = False
        self._hooks: list[Any] = []
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(self._hook(bucket, place)))

    def make_bucket(self, names: Sequence[str]) -> Bucket:
        """A bucket of these parameters, with its memory."""
        held = [self.held[name] for name in names]
        first = held[0].tensor
        flat = torch.empty(sum(p.numel() for p, _ in held), dtype=first.dtype, device=first.device)
        return Bucket.of(held, self.chunks.get(names[0], 0), flat, shard_views(flat, [shard for _, shard in held]))

    @property
    def is_sending(self) -> bool:
        """Whether gradients of the microbatch at work are exchanged: here those of the last one alone."""
        return self._is_last

    @property
    def buffers(self) -> list[Tensor]:
        """Flat, in the order of the exchange."""
        return [bucket.flat for bucket in self.buckets]

    def backward(self, loss_sum: Tensor, count: Tensor | int, *, last: bool = True, scale: float = 1.0) -> None:
        if not self._is_open:
            self._open()
        if self._is_last:
            raise UsageError("backward after the last microbatch of a step: call finish() first")
        self._is_last = last
        self._begin_backward()
        self.count(loss_sum, count, scale)
        torch.autograd.backward(loss_sum if scale == 1.0 else loss_sum * scale)

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> GradientStep:
        self._require_last()
        self._start_rest()
        for bucket in self.buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None
            self.sum_over_copies(bucket, bucket.flat)
            self.sum_over_holders(bucket, bucket.flat)
        self._is_open = self._is_last = False
        return self.settled([self.kept(bucket) for bucket in self.buckets], max_norm, divide)

    def sum_over_copies(self, bucket: Bucket, flat: Tensor) -> None:
        """Sum over the ranks that took the same part of the batch and each have a part of the gradient, in place."""
        self.sum_over(bucket.copies_summed, flat)

    def sum_over_holders(self, bucket: Bucket, flat: Tensor) -> None:
        """Sum over the stages of a pipeline that hold the same parameters, in place."""
        if len(bucket.holders) > 1:
            self.holders[bucket.holders].all_reduce(flat, out=flat, algorithm=self.algorithm)

    def begin(self, scale: float) -> None:
        """Open a step whose passes a list of actions makes: gradients are added to zeroed buffers, by whoever has them.

        Its exchange is started by `reduce`, chunk by chunk, or else by `finish`.
        """
        device = self.buckets[0].flat.device
        self._totals, self._scale = torch.zeros(2, dtype=torch.float64, device=device), scale
        self._is_last = True
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.is_started, bucket.has_come = False, [True] * len(bucket.parameters)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def reduce(self, chunk: int) -> None:
        """All gradients of a chunk are there: begin to sum them over replicas."""
        for bucket in self.buckets:
            if bucket.chunk == chunk and not bucket.is_started:
                self._start(bucket)

    def exchange(self, bucket: Bucket) -> Any:
        """Begin to sum a full bucket over the ranks that took other parts of the batch; a handle to wait for, or None.

        What another method changes: it may send something else, as long as `bucket.flat` holds the sum when the handle
        has been waited for. Called for every bucket, in the same order on every rank.
        """
        if not bucket.batch_summed:
            return None
        flat = bucket.flat
        return self.groups[bucket.batch_summed].all_reduce(flat, out=flat, algorithm=self.algorithm, wait=False)

    def unpacked(self, bucket: Bucket) -> Tensor:
        """For `exchange`: this rank's gradients of a full bucket, one parameter after another."""
        return bucket.flat

    def keep_sum(self, bucket: Bucket, flat: Tensor) -> None:
        """What `unpacked` gave is now the sum over all replicas."""

    def kept(self, bucket: Bucket) -> tuple[Tensor, int]:
        """What this rank keeps of an exchanged bucket, and how many ranks of `counted_over` hold the same."""
        return bucket.flat, bucket.copies

    def take(self, bucket: Bucket, place: int) -> None:
        """A gradient that backward has made: into the bucket, of which `.grad` then is a view."""
        parameter, view = bucket.parameters[place], bucket.views[place]
        if parameter.grad is not view:
            assert parameter.grad is not None
            if bucket.has_come[place]:  # someone set .grad to None between microbatches
                view.add_(parameter.grad)
            else:
                view.copy_(parameter.grad)
            parameter.grad = view
        bucket.has_come[place] = True

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _open(self) -> None:
        """A new step. Gradients begin as None: autograd then hands over its own tensor instead of adding to zeros."""
        self._is_open, self._next = True, 0
        for bucket in self.buckets:
            bucket.is_started, bucket.has_come = False, [False] * len(bucket.parameters)
            for parameter in bucket.parameters:
                parameter.grad = None

    def _begin_backward(self) -> None:
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _require_last(self) -> None:
        if not self._is_last:
            raise UsageError("finish() before the last microbatch: call backward(…, last=True)")

    def _start_rest(self) -> None:
        """Exchange what has not been: buckets of which backward has not reached every parameter."""
        for bucket in self.buckets:
            if not bucket.is_started:
                self._start(bucket)

    def _hook(self, bucket: Bucket, place: int) -> Any:
        def arrived(parameter: Tensor) -> None:
            if not self._is_open:
                return  # somebody else's backward
            self.take(bucket, place)
            bucket.missing -= 1
            if self.overlap and self.is_sending:
                self._launch()

        return arrived

    def _launch(self) -> None:
        """Start what is full, in order, and give what is under way a push: nothing moves by itself over MPI."""
        started = self._next
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._start(self.buckets[self._next])
            self._next += 1
        if self._next == started > 0 and self.buckets[started - 1].handle is not None:
            self.buckets[started - 1].handle.test()

    def _start(self, bucket: Bucket) -> None:
        bucket.is_started = True
        for place, parameter in enumerate(bucket.parameters):
            if not bucket.has_come[place]:
                bucket.views[place].zero_()
                parameter.grad = bucket.views[place]
        bucket.handle = self.exchange(bucket)


def readers(reads: Mapping[int, Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """The chunks whose passes read each parameter: one, or of a tied table two."""
    chunks_of: dict[str, tuple[int, ...]] = {}
    for chunk, names in reads.items():
        for name in names:
            chunks_of[name] = (*chunks_of.get(name, ()), chunk)
    return chunks_of


def packed(
    held: Mapping[str, Held],
    bucket_bytes: int,
    chunks: Mapping[str, int],
    read_by: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> list[list[str]]:
    """Names of parameters in the order backward comes to them, the last one first, packed by chunk, kind and size.

    What other chunks read too lies apart: gathering it for them brings nothing else.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes is {bucket_bytes}: expected at least 1")
    full: list[tuple[int, list[str]]] = []  # (place of its last parameter, names)
    filling: dict[Any, tuple[int, list[str], int]] = {}
    for place, (name, (parameter, shard)) in enumerate(list(held.items())[::-1]):
        sums = (shard.copies, batch_summed(shard), copies_summed(shard), chunks.get(name, 0), shard.holders)
        kind = (sums, read_by.get(name), parameter.dtype, parameter.device)
        _, names, nbytes = filling.get(kind, (0, [], 0))
        names.append(name)
        nbytes += parameter.numel() * parameter.element_size()
        filling[kind] = (place, names, nbytes)
        if nbytes >= bucket_bytes:
            full.append((place, filling.pop(kind)[1]))
    full += [(place, names) for place, names, _ in filling.values()]
    return [names for _, names in sorted(full, key=lambda entry: entry[0])]
