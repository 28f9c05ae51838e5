"""ZeRO 1 and 2: replicas share optimizer states and gradients instead of each holding all of them.

The one idea: every parameter is cut by its rows over the replicas, one cut more in its `Shard`, and everything else
follows from that value: what the optimizer steps, what a checkpoint stores, whose norm counts how often. Gradients
travel in buckets whose numbers lie rank after rank, so that one reduce_scatter leaves each rank the sum of its rows,
and one all_gather brings everybody's new rows back after the update.

    ZeRO-1   gradients add up over the microbatches of a step and are scattered once
    ZeRO-2   they are scattered after every microbatch; a rank never holds more of them than its rows and a few buckets

A gradient is copied into its bucket when backward has made it, and its own memory goes. With `zero_group` rows are cut
over neighbouring replicas alone (those of one node); the sums of their rows are then added over the groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.core.axes import Axes, Blocks, block_name, members, size_of
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import Cut, Shard
from tilemesh.parallel.buckets import BUCKET_BYTES, Bucket, Bucketed
from tilemesh.parallel.gradients import GradientStep, Parts
from tilemesh.parallel.shard import Held
from tilemesh.parallel.whole import shard_views

AXIS, SHARED = "dp", "cp"
"""Replicas stand along the first; the ranks along the second hold one replica's weights too, for other tokens."""
UNDER_WAY = 2
"""Buckets that are exchanged at once: as many are in memory at most, and the next waits for the first of them."""


def cut_over_replicas(mine: Shard, group: int) -> Shard:
    """What is left of a shard when its rows are cut over so many neighbouring replicas, or those of them that hold
    it, and over all ranks of cp."""
    if not mine.shape:
        raise UsageError(f"{mine.name} has no dim: ZeRO cuts rows; give it shape (1,), or set zero=0")
    every, tokens = mine.apart(AXIS), size_of(mine.axes, SHARED)
    stride = every if group < size_of(mine.axes, AXIS) or every > 1 else None
    mine = mine.cut_over(Cut(AXIS, 0, pieces=group // every, stride=stride))
    if tokens == 1:
        return mine
    apart = mine.apart(SHARED)
    return mine.cut_over(Cut(SHARED, 0, pieces=tokens // apart, stride=apart if apart > 1 else None))


def sharing_blocks(axes: Axes, group: int, spread: Blocks) -> Blocks:
    """The ranks over which rows are cut: in order of rank, which is the order of their rows. `spread`: as `Shard`'s."""
    apart = dict(spread)
    return tuple(
        (block_name(name, apart.get(name, 1)), count // apart.get(name, 1))
        for name, count in ((SHARED, size_of(axes, SHARED)), (AXIS, group))
    )


class RowsOfRanks:
    """How some parameters lie in one flat buffer: rank after rank, and for each rank its rows of every parameter."""

    def __init__(self, shards: Sequence[Shard], group: int) -> None:
        """`shards`: of the whole parameters, as this rank holds them before ZeRO cuts them."""
        rank, axes = shards[0].rank, shards[0].axes
        self.spread = shards[0].spread
        """How far apart the replicas are that share them."""
        blocks = tuple(block for block in sharing_blocks(axes, group, self.spread) if block[1] > 1)
        ranks = members(rank, blocks, axes)
        self.index = ranks.index(rank)
        self.everyone = [[cut_over_replicas(mine.on(other), group) for mine in shards] for other in ranks]
        sizes = [[math.prod(part.shape) for part in rank] for rank in self.everyone]
        self.counts = tuple(map(sum, sizes))
        self.numel = sum(self.counts)
        self.places: list[list[tuple[int, int, int]]] = [[] for _ in shards]
        """For each parameter, by rank: where its rows begin in the buffer, where in the parameter, how many numbers."""
        at, done = 0, [0] * len(shards)
        for of_rank in sizes:
            for number, size in enumerate(of_rank):
                self.places[number].append((at, done[number], size))
                at += size
                done[number] += size
        self.is_even = all(of_rank == sizes[0] for of_rank in sizes)
        """Whether all ranks have as many rows of each: one copy then moves a parameter, and not one for each rank."""

    @property
    def mine(self) -> list[Shard]:
        """What this rank keeps of each."""
        return self.everyone[self.index]

    @property
    def begin(self) -> int:
        """Where this rank's numbers begin in the buffer."""
        return sum(self.counts[: self.index])

    def fill(self, flat: Tensor, number: int, values: Tensor | None) -> None:
        """Put a whole parameter's values, or zeros, where they belong in the buffer."""
        source = None if values is None else values.detach().reshape(-1)
        if source is not None and self.is_even:
            self._of_ranks(flat, number).copy_(source.view(len(self.counts), -1))
            return
        for at, begin, size in self.places[number]:
            if source is None:
                flat[at : at + size].zero_()
            else:
                flat[at : at + size].copy_(source[begin : begin + size])

    def empty_into(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Put everybody's rows where they belong in the whole parameters."""
        for number, tensor in enumerate(tensors):
            target = tensor.detach().view(-1)
            if self.is_even:
                target.view(len(self.counts), -1).copy_(self._of_ranks(flat, number))
                continue
            for at, begin, size in self.places[number]:
                target[begin : begin + size].copy_(flat[at : at + size])

    def _of_ranks(self, flat: Tensor, number: int) -> Tensor:
        """The parts of the buffer that are a parameter's, a rank per row, where all ranks have as many."""
        at, _, size = self.places[number][0]
        return flat[: self.numel].view(len(self.counts), -1)[:, at : at + size]

    def rows(self, number: int, tensor: Tensor) -> Tensor:
        """This rank's rows of a whole parameter, as a view."""
        _, begin, size = self.places[number][self.index]
        return tensor.detach().view(-1)[begin : begin + size].view(self.mine[number].shape)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of this rank's numbers, one for each parameter."""
        return shard_views(flat, self.mine)


@dataclass(eq=False)
class ZeroBucket(Bucket):
    """A bucket of which this rank keeps a part; `flat` has memory from its first gradient until it was exchanged."""

    rows: RowsOfRanks = field(kw_only=True)
    part: Tensor = field(kw_only=True)
    """This rank's numbers of the sum."""
    landing: Tensor | None = None
    """Where a later microbatch's sum arrives before it is added to `part`."""
    has_sum: bool = False
    """Whether `part` holds the sum of an earlier microbatch of this step."""
    is_over_all: bool = False
    """Whether `part` was summed over all replicas, and not over a group of them alone."""


class Zero(Bucketed):
    """Gradients under ZeRO-1 or 2: of each this rank ends up with the sum of its own rows.

    `stepped` is what an optimizer steps: this rank's rows of every parameter, views of the model's own memory. After
    its step `updated` brings the other ranks' rows back.
    """

    buckets: list[ZeroBucket]  # type: ignore[assignment]

    def __init__(
        self, parts: Parts, stage: int, group: int = 0, bucket_bytes: int = BUCKET_BYTES, *, overlap: bool = True
    ) -> None:
        replicas = parts.mesh.axis(AXIS).size
        self.stage, self.group = stage, group or replicas
        if replicas * parts.mesh.cp.size == 1:
            raise UsageError("ZeRO shares among replicas and there is one: set dp to 2 or more, or zero=0")
        if replicas % self.group or group == 1:
            raise UsageError(f"groups of {self.group} replicas do not make up dp {replicas}: give a divisor above 1")
        self._spare: list[Tensor] = []
        self._under_way: list[ZeroBucket] = []
        apart = {mine.shard.spread for mine in (*parts.held.values(), *parts.frozen.values())}
        shape = parts.mesh.shape
        self.sharing = {n: parts.mesh.among(sharing_blocks(shape, self.group, n)) for n in sorted(apart)}
        """The ranks over which rows are cut, by how far apart their replicas are."""
        self.across: Blocks = ((block_name(AXIS, self.group), replicas // self.group),)
        """The replicas that keep the same rows."""
        super().__init__(parts, bucket_bytes, overlap=overlap)
        self.groups_of_replicas = parts.mesh.across(AXIS, self.group)
        rows: dict[str, Held] = {}
        for bucket in self.buckets:
            rows |= held_rows(bucket.rows, self.rows_of(bucket))
        self.stepped = {name: rows[name] for name in self.held}

    def make_bucket(self, names: Sequence[str]) -> ZeroBucket:
        held = [self.held[name] for name in names]
        first = held[0]
        rows = RowsOfRanks([parameter.shard for parameter in held], self.group)
        part = torch.empty(rows.counts[rows.index], dtype=first.tensor.dtype, device=first.tensor.device)
        chunk = self.chunks.get(names[0], 0)
        bucket = ZeroBucket.of(held, chunk, part.new_empty(0), rows.split(part), rows=rows, part=part)
        bucket.copies = rows.mine[0].copies
        return bucket

    def rows_of(self, bucket: ZeroBucket) -> list[Tensor]:
        """This rank's rows of a bucket's weights: what an optimizer steps."""
        return [bucket.rows.rows(number, parameter) for number, parameter in enumerate(bucket.parameters)]

    @property
    def buffers(self) -> list[Tensor]:
        """This rank's part of all gradients."""
        return [bucket.part for bucket in self.buckets]

    @property
    def is_sending(self) -> bool:
        return self._is_last or self.stage > 1

    def backward(self, loss_sum: Tensor, count: Tensor | int, *, last: bool = True, scale: float = 1.0) -> None:
        super().backward(loss_sum, count, last=last, scale=scale)
        if self.is_sending and not last:
            self._start_rest()

    def _begin_backward(self) -> None:
        super()._begin_backward()
        if self.is_sending:
            self._next = 0
            for bucket in self.buckets:
                bucket.is_started, bucket.has_come = False, [False] * len(bucket.parameters)

    def begin(self, scale: float) -> None:
        """Open a step whose passes a list of actions makes: gradients add up in `.grad` until `reduce` takes them."""
        self._totals, self._scale = torch.zeros(2, dtype=torch.float64, device=self.buckets[0].part.device), scale
        self._open()
        self._is_open, self._is_last = False, True  # hooks have nothing to do

    def reduce(self, chunk: int) -> None:
        """What the gradients of a chunk have come to so far: begin to sum it over replicas."""
        for bucket in self.buckets:
            if bucket.chunk == chunk:
                self._start(bucket)

    def _open(self) -> None:
        super()._open()
        for bucket in self.buckets:
            bucket.has_sum = False

    def take(self, bucket: Bucket, place: int) -> None:
        """A gradient that goes into its bucket gives its own memory back; one that is yet added to stays."""
        assert isinstance(bucket, ZeroBucket)
        if not self.is_sending:
            return
        parameter = bucket.parameters[place]
        self._fill(bucket, place, parameter.grad)
        bucket.has_come[place] = True
        parameter.grad = None

    def _fill(self, bucket: ZeroBucket, place: int, gradient: Tensor | None) -> None:
        if bucket.handle is not None:  # of the microbatch before
            self._arrive(bucket)
        if not bucket.flat.numel():
            bucket.flat = self._memory(bucket.rows.numel, bucket.part)
        bucket.rows.fill(bucket.flat, place, gradient)

    def _memory(self, numel: int, like: Tensor) -> Tensor:
        """A buffer of at least so many numbers: one that another bucket has left, if it is large enough."""
        fits = [spare for spare in self._spare if spare.numel() >= numel and spare.dtype == like.dtype]
        if not fits:
            return like.new_empty(numel)
        best = min(fits, key=lambda spare: spare.numel())
        self._spare = [spare for spare in self._spare if spare is not best]
        return best

    def _start(self, bucket: Bucket) -> None:
        assert isinstance(bucket, ZeroBucket)
        bucket.is_started = True
        for place, parameter in enumerate(bucket.parameters):
            if not bucket.has_come[place]:  # made by an earlier microbatch alone, or not at all
                self._fill(bucket, place, parameter.grad)
                parameter.grad = None
        while len(self._under_way) >= UNDER_WAY:
            self._arrive(self._under_way[0])
        bucket.handle = self.exchange(bucket)
        self._under_way.append(bucket)

    def exchange(self, bucket: Bucket) -> Any:
        """Begin to sum a full bucket over the group; of the sum this rank gets its own rows."""
        assert isinstance(bucket, ZeroBucket)
        bucket.is_over_all = self.groups_of_replicas.size == 1 or not self.across
        bucket.landing = torch.empty_like(bucket.part) if bucket.has_sum else None
        out = bucket.part if bucket.landing is None else bucket.landing
        buffer, counts = bucket.flat[: bucket.rows.numel], bucket.rows.counts
        comm = self.sharing[bucket.rows.spread]
        return comm.reduce_scatter(buffer, counts=counts, out=out, algorithm=self.algorithm, wait=False)

    def unpacked(self, bucket: Bucket) -> Tensor:
        assert isinstance(bucket, ZeroBucket)
        whole = bucket.flat.new_empty(bucket.rows.numel)
        bucket.rows.empty_into(bucket.flat, _pieces(bucket, whole))
        return whole

    def keep_sum(self, bucket: Bucket, flat: Tensor) -> None:
        assert isinstance(bucket, ZeroBucket)
        bucket.is_over_all = True
        for number, (view, piece) in enumerate(zip(bucket.views, _pieces(bucket, flat), strict=True)):
            view.copy_(bucket.rows.rows(number, piece))

    def _arrive(self, bucket: ZeroBucket) -> None:
        """Wait for a bucket's sum, add it to what earlier microbatches gave, and give its buffer back."""
        if bucket.handle is not None:
            bucket.handle.wait()
        bucket.handle = None
        self._under_way.remove(bucket)
        if bucket.landing is not None:
            bucket.part.add_(bucket.landing)
            bucket.landing = None
        bucket.has_sum = True
        self._give_back(bucket)

    def _give_back(self, bucket: ZeroBucket) -> None:
        self._keep(bucket.flat)
        bucket.flat = bucket.flat.new_empty(0)

    def _keep(self, buffer: Tensor) -> None:
        """For the next bucket; not on a GPU, where torch's allocator does that and others can have it meanwhile."""
        if not buffer.is_cuda:
            self._spare.append(buffer)

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> GradientStep:
        self._require_last()
        self._start_rest()
        for bucket in list(self._under_way):
            self._arrive(bucket)
        for bucket in self.buckets:
            if not bucket.is_over_all:
                self.groups_of_replicas.all_reduce(bucket.part, out=bucket.part, algorithm=self.algorithm)
            self.sum_over_copies(bucket, bucket.part)
            self.sum_over_holders(bucket, bucket.part)
        self._is_open = self._is_last = False
        for bucket in self.buckets:
            for mine, view in zip(bucket.rows.mine, bucket.views, strict=True):
                self.stepped[mine.name].tensor.grad = view
        return self.settled([self.kept(bucket) for bucket in self.buckets], max_norm, divide)

    def kept(self, bucket: Bucket) -> tuple[Tensor, int]:
        assert isinstance(bucket, ZeroBucket)
        return bucket.part, bucket.copies

    @torch.no_grad()
    def updated(self) -> None:
        """Everybody's rows, as their owners have stepped them, back into the model's weights."""
        waiting: list[tuple[ZeroBucket, Any]] = []
        for bucket in self.buckets:
            if len(waiting) >= UNDER_WAY:
                self._join(*waiting.pop(0))
            mine = torch.cat([rows.reshape(-1) for rows in self.rows_of(bucket)])
            bucket.flat = self._memory(bucket.rows.numel, bucket.part)
            buffer, counts = bucket.flat[: bucket.rows.numel], bucket.rows.counts
            comm = self.sharing[bucket.rows.spread]
            handle = comm.all_gather(mine, counts=counts, out=buffer, algorithm=self.algorithm, wait=False)
            waiting.append((bucket, handle))
        for bucket, handle in waiting:
            self._join(bucket, handle)

    def _join(self, bucket: ZeroBucket, handle: Any) -> None:
        handle.wait()
        bucket.rows.empty_into(bucket.flat, bucket.parameters)
        self._give_back(bucket)


def _pieces(bucket: Bucket, flat: Tensor) -> tuple[Tensor, ...]:
    return flat.split_with_sizes([parameter.numel() for parameter in bucket.parameters])


def held_rows(rows: RowsOfRanks, tensors: Sequence[Tensor], trained: bool = True) -> dict[str, Held]:
    """This rank's rows of some parameters, by name."""
    return {
        mine.name: Held(nn.Parameter(tensor, requires_grad=trained), mine)
        for mine, tensor in zip(rows.mine, tensors, strict=True)
    }
