"""Gradients over the whole mesh: summed over replicas while backward still runs, made a mean over tokens, clipped.

The one idea: gradients lie in a few flat buffers (buckets), of which each parameter's `.grad` is a view, in the order
backward makes them. A bucket's global-sum starts when it is full *and all before it have started*: an order that is the
same on every rank by construction, where an order of readiness would let two ranks wait for different buckets.
What was not used in backward counts as zeros. Only the last microbatch of a step exchanges anything.

A hook runs on the thread that runs backward: on the CPU the caller's own, on CUDA one of autograd's, while the caller
waits in `backward()`. So communicators are used from two threads, never at once: MPI must be initialised
thread-multiple (mpi4py does), and nothing else may use this mesh's communicators during backward.
`NaiveGradients` is the same in the plainest way: one all_reduce a parameter, after backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilemesh.core.axes import BATCH, Blocks
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import Shard
from tilemesh.parallel.mesh import Mesh

BUCKET_BYTES = 8 << 20
_EPSILON = 1e-6  # as torch's clip_grad_norm_ has it


@dataclass(frozen=True)
class Step:
    """What one step came to over the whole mesh; the same on every rank."""

    loss: float
    """Mean nats a token."""
    tokens: int
    norm: float
    """Of the mean gradient of the whole model, before clipping."""


@dataclass
class Bucket:
    """Parameters whose gradients travel together: all of them are held and summed by the same ranks."""

    copies: int
    """Ranks of the mesh that hold the same."""
    copies_summed: Blocks
    """Those of them, beside the replicas that take other parts of the batch, whose gradients are summed as well."""
    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    missing: int = 0
    """Gradients that are still to come in this backward."""
    has_come: list[bool] = field(default_factory=list)
    handle: Any = None


class _Exchange:
    """What the two versions share: the step's totals, the sum among copies, the mean and the clipping."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shards: Mapping[str, Shard], mesh: Mesh, algorithm: str = "auto"
    ) -> None:
        self.parameters = dict(parameters)
        self.shards = shards
        self.mesh = mesh
        self.algorithm = algorithm
        self.loss = loss_shard(mesh)
        self._totals: Tensor | None = None
        self._scale = 1.0
        # Asked for now, in the same order on every rank: making a group is a collective call.
        self._copies = {
            blocks: mesh.among(blocks) for blocks in sorted({copies_summed(mine) for mine in shards.values()})
        }

    def _count(self, loss_sum: Tensor, count: Tensor | int, scale: float) -> None:
        if self._totals is not None and scale != self._scale:
            raise UsageError(f"scale {scale} after {self._scale} in one step: expected the same for all microbatches")
        now = torch.stack([loss_sum.detach().double(), torch.as_tensor(count, device=loss_sum.device).double()])
        self._totals = now if self._totals is None else self._totals + now
        self._scale = scale

    def _finish(self, flats: list[tuple[Tensor, int]], max_norm: float | None) -> Step:
        """`flats`: summed gradients, each with how many ranks hold the same."""
        assert self._totals is not None
        parts = [torch.linalg.vector_norm(flat).double().square() / copies for flat, copies in flats]
        # Read in one go: on a GPU each reading waits for all that was started.
        loss_sum, count, squares = torch.cat([self._totals, torch.stack(parts).sum()[None]]).tolist()
        # One small exchange for all. What several ranks have alike counts once.
        mine = np.array([loss_sum / self.loss.alike, count / self.loss.alike, squares])
        loss_sum, count, squares = self.mesh.comm.all_reduce(mine, algorithm=self.algorithm).tolist()
        tokens = round(count)
        factor = 1 / (max(tokens, 1) * self._scale)
        norm = math.sqrt(squares) * factor if math.isfinite(squares) else squares
        if max_norm is not None:
            factor *= min(1.0, max_norm / (norm + _EPSILON)) if math.isfinite(norm) else 1.0
        for flat, _ in flats:
            flat.mul_(factor)
        self._totals = None
        return Step(loss_sum / max(tokens, 1), tokens, norm)

    def _sum_copies(self, flat: Tensor, blocks: Blocks) -> None:
        if blocks:
            self._copies[blocks].all_reduce(flat, out=flat, algorithm=self.algorithm)


class Gradients(_Exchange):
    """The bucketed exchange. `backward` for each microbatch, `finish` once a step."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: Mapping[str, Shard],
        mesh: Mesh,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        algorithm: str = "auto",
    ) -> None:
        super().__init__(parameters, shards, mesh, algorithm)
        self.buckets = _buckets(self.parameters, shards, bucket_bytes)
        self._next = 0  # the first bucket that has not started
        self._is_last = False
        self._is_open = False
        self._hooks: list[Any] = []
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(self._hook(bucket, place)))

    @property
    def buffers(self) -> list[Tensor]:
        """The flat memory of all gradients, in the order of the exchange."""
        return [bucket.flat for bucket in self.buckets]

    def backward(self, loss_sum: Tensor, count: Tensor | int, *, last: bool = True, scale: float = 1.0) -> None:
        """Gradients of one microbatch's summed loss, added to the step's; with `last` the exchange begins."""
        if not self._is_open:
            self._open()
        if self._is_last:
            raise UsageError("backward after the last microbatch of a step: call finish() first")
        self._is_last = last
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        self._count(loss_sum, count, scale)
        torch.autograd.backward(loss_sum if scale == 1.0 else loss_sum * scale)

    def finish(self, max_norm: float | None = None) -> Step:
        """Wait for the exchange; every `.grad` is then the mean over all tokens of the mesh, clipped to `max_norm`."""
        if not self._is_last:
            raise UsageError("finish() before the last microbatch: call backward(…, last=True)")
        for bucket in self.buckets[self._next :]:
            self._start(bucket)
        for bucket in self.buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None
            self._sum_copies(bucket.flat, bucket.copies_summed)
        self._is_open = self._is_last = False
        return self._finish([(bucket.flat, bucket.copies) for bucket in self.buckets], max_norm)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _open(self) -> None:
        """A new step. Gradients begin as None: autograd then hands over its own tensor instead of adding to zeros."""
        self._is_open, self._next = True, 0
        for bucket in self.buckets:
            bucket.has_come = [False] * len(bucket.parameters)
            for parameter in bucket.parameters:
                parameter.grad = None

    def _hook(self, bucket: Bucket, place: int) -> Any:
        view = bucket.views[place]

        def arrived(parameter: Tensor) -> None:
            if not self._is_open:
                return  # somebody else's backward
            if parameter.grad is not view:
                assert parameter.grad is not None
                if bucket.has_come[place]:  # someone set .grad to None between microbatches
                    view.add_(parameter.grad)
                else:
                    view.copy_(parameter.grad)
                parameter.grad = view
            bucket.has_come[place] = True
            bucket.missing -= 1
            if self._is_last:
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
        for place, parameter in enumerate(bucket.parameters):
            if not bucket.has_come[place]:
                bucket.views[place].zero_()
                parameter.grad = bucket.views[place]
        if self.mesh.dp.size > 1:
            flat = bucket.flat
            bucket.handle = self.mesh.dp.comm.all_reduce(flat, out=flat, algorithm=self.algorithm, wait=False)


class NaiveGradients(_Exchange):
    """The plainest exchange: after backward, one blocking all_reduce a parameter. To read and to compare with."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: Mapping[str, Shard],
        mesh: Mesh,
        *,
        algorithm: str = "auto",
    ) -> None:
        super().__init__(parameters, shards, mesh, algorithm)
        self._is_open = self._is_last = False

    def backward(self, loss_sum: Tensor, count: Tensor | int, *, last: bool = True, scale: float = 1.0) -> None:
        if not self._is_open:
            self._is_open = True
            for parameter in self.parameters.values():
                parameter.grad = None
        self._is_last = last
        self._count(loss_sum, count, scale)
        torch.autograd.backward(loss_sum * scale)

    def finish(self, max_norm: float | None = None) -> Step:
        if not self._is_last:
            raise UsageError("finish() before the last microbatch: call backward(…, last=True)")
        summed = []
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            if self.mesh.dp.size > 1:
                self.mesh.dp.comm.all_reduce(gradient, out=gradient, algorithm=self.algorithm)
            self._sum_copies(gradient, copies_summed(self.shards[name]))
            summed.append((gradient, self.shards[name].copies))
        self._is_open = self._is_last = False
        return self._finish(summed, max_norm)


def loss_shard(mesh: Mesh) -> Shard:
    """A step's loss, as a value on the mesh: a part of it along the axes of the batch, the same along all others."""
    return Shard("loss", (), mesh.shape, mesh.comm.rank, partial=BATCH)


def copies_summed(mine: Shard) -> Blocks:
    """The ranks that take the same part of the batch, hold the same, and each have a part of its gradient."""
    return tuple((name, count) for name, count in mine.summed if name not in BATCH)


def _buckets(parameters: Mapping[str, nn.Parameter], shards: Mapping[str, Shard], bucket_bytes: int) -> list[Bucket]:
    """Parameters in the order backward comes to them, the last one first, packed by kind, dtype and size."""
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes is {bucket_bytes}: expected at least 1")
    order = list(parameters.items())[::-1]
    packed: list[tuple[int, Any, list[nn.Parameter]]] = []  # (place of its last parameter, kind, parameters)
    filling: dict[Any, tuple[int, list[nn.Parameter], int]] = {}
    for place, (name, parameter) in enumerate(order):
        kind = (shards[name].copies, copies_summed(shards[name]), parameter.dtype, parameter.device)
        _, members, nbytes = filling.get(kind, (0, [], 0))
        members.append(parameter)
        nbytes += parameter.numel() * parameter.element_size()
        filling[kind] = (place, members, nbytes)
        if nbytes >= bucket_bytes:
            packed.append((place, kind, filling.pop(kind)[1]))
    packed += [(place, kind, members) for kind, (place, members, _) in filling.items()]
    return [_bucket(kind[0], kind[1], members) for _, kind, members in sorted(packed, key=lambda entry: entry[0])]


def _bucket(copies: int, blocks: Blocks, parameters: list[nn.Parameter]) -> Bucket:
    first = parameters[0]
    flat = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    views, start = [], 0
    for parameter in parameters:
        views.append(flat[start : start + parameter.numel()].view(parameter.shape))
        start += parameter.numel()
    return Bucket(copies, blocks, parameters, flat, views)
