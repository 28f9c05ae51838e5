"""Compressed gradients: the bucketed exchange with something smaller on the wire, and what was left out kept for later.

The one idea: a scheme replaces `exchange` of a bucket. It adds what earlier steps left out (the residual) to the
gradients, sends a small form of the sum, and keeps the difference: error feedback (Karimireddy et al. 2019), without
which 1-bit and top-k do not converge. Gradients travel as sums over a step's targets, of which steps may count more or
fewer; a residual is kept as a mean, so a step exchanges nothing before the ranks know how many there are.

    top-k      the k largest values with their places, gathered; summed densely where that is fewer bytes (`is_dense`)
    random-k   k values at places that a seed gives to all ranks alike: only values travel
    int8       values in steps of max/127, one-bit: signs with their mean size; both summed by all_to_all and all_gather
    powersgd   each matrix as P Qᵀ of rank r by one power iteration (Vogels et al. 2019); vectors travel whole
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.schedules.book import algorithms
from tilemesh.core.axes import coordinates, size_of
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Cut, Shard
from tilemesh.parallel.buckets import Bucket, Bucketed
from tilemesh.parallel.gradients import Parts, Recall, over_replicas, within_replica
from tilemesh.parallel.norms import norm_of, norms_of
from tilemesh.parallel.zero import Zero
from tilemesh.parallel.zero3 import ZeroWeights

Scheme = Literal["top-k", "random-k", "one-bit", "int8", "powersgd"]
SCHEMES: tuple[Scheme, ...] = ("top-k", "random-k", "one-bit", "int8", "powersgd")
QUANTISED: tuple[Scheme, ...] = ("one-bit", "int8")
RESIDUAL = "mean_residual"  # of earlier versions "residual", which was a sum
ERROR, FACTOR = "sum_error", "factor"
_MEASURED = 8  # steps of which one is measured
_PLACE_BYTES = 4  # of a value's place


@dataclass(frozen=True)
class Compression:
    """A scheme and its settings. `keep`: the part of values that top-k and random-k send; `rank`: PowerSGD's."""

    scheme: Scheme
    keep: float = 0.1
    rank: int = 4
    feedback: bool = True
    seed: int = 0
    start: int = 0
    """So many steps send whole gradients first."""

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES or not 0 < self.keep <= 1 or self.rank < 1:
            raise UsageError(
                f"compression {self.scheme!r} of {self.keep} at rank {self.rank}: expected one of "
                f"{', '.join(SCHEMES)}, a part above 0 and at most 1, and a rank of at least 1"
            )

    def kept(self, length: int) -> int:
        return max(1, math.ceil(self.keep * length))

    def is_dense(self, ranks: int, width: int) -> bool:
        """Whether top-k sums a dense vector of values of `width` bytes: gathering k of them with their places (4 bytes)
        from p ranks, (p-1) k (w+4) bytes, would be no fewer than 2 (p-1)/p n w. In float32 from k/n = 1/p on."""
        return self.keep * ranks * (width + _PLACE_BYTES) >= 2 * width


def summed_bytes(nbytes: float, ranks: int) -> float:
    """What one rank sends for an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) / ranks * nbytes


def sent_bytes(compression: Compression | None, shapes: Sequence[Sequence[int]], ranks: int, width: int = 4) -> float:
    """What one rank sends in a step for gradients of these shapes, as one bucket. None: uncompressed."""
    length = sum(math.prod(shape) for shape in shapes)
    if compression is None or ranks == 1:
        return summed_bytes(length * width, ranks) if ranks > 1 else 0.0
    kept = compression.kept(length)
    match compression.scheme:
        case "top-k" if compression.is_dense(ranks, width):
            return summed_bytes(length * width, ranks)
        case "top-k":
            return (ranks - 1) * kept * (width + _PLACE_BYTES)
        case "random-k":
            return summed_bytes(kept * width, ranks)
        case "powersgd":
            factors = [_factor_rank(shape, compression.rank) for shape in shapes]
            unfactored = sum(math.prod(shape) for shape, rank in zip(shapes, factors, strict=True) if not rank)
            sides = sum(rank * sum(_sides(shape)) for shape, rank in zip(shapes, factors, strict=True) if rank)
            return summed_bytes((unfactored + sides) * width, ranks)
    part = _part(length, ranks)
    packed = part / 8 if compression.scheme == "one-bit" else part
    return 2 * (ranks - 1) * (packed + 4)


def _part(length: int, ranks: int) -> int:
    """What one rank sums of so many values, in whole bytes of signs."""
    return -(-length // (8 * ranks)) * 8


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _orthonormal(columns: Tensor) -> Tensor:
    """Of the same span. QR is in float32 at least: torch has none of 16-bit numbers."""
    wide = columns.to(torch.promote_types(columns.dtype, torch.float32))
    basis: Tensor = torch.linalg.qr(wide).Q
    return basis.to(columns.dtype)


def _factor_rank(shape: Sequence[int], rank: int) -> int:
    """The rank of a matrix's factors; 0 where the whole is no larger than they are, or it is not a matrix."""
    if len(shape) < 2:
        return 0
    rows, columns = _sides(shape)
    return rank if rank * (rows + columns) < rows * columns else 0


def compressed_gradients(parts: Parts, compression: Compression, plan: ParallelPlan) -> CompressedGradients:
    """As a plan cuts them."""
    if plan.zero == 3:
        return CompressedWeights(parts, compression, plan.zero_group)
    if plan.zero:
        return CompressedRows(parts, compression, plan.zero, plan.zero_group)
    return CompressedGradients(parts, compression)


class CompressedGradients(Bucketed):
    """The bucketed exchange by a compression. With another `Bucketed` behind it in a class, such as ZeRO's, that one
    says what becomes of the sum: a step exchanges gradients once, and what is left of them is of whole ones."""

    def __init__(self, parts: Parts, compression: Compression, *options: Any, **settings: Any) -> None:
        """`options`, `settings`: of what is behind it."""
        super().__init__(parts, *options, **settings)
        self.overlap = False
        self.compression, self.steps = compression, 0
        self._divisor = 1.0  # what turns the sums of the step at work into means
        self._is_bad = False  # whether some rank's gradients overflowed: nothing is kept of them
        self._shapes = {id(bucket): [parameter.shape for parameter in bucket.parameters] for bucket in self.buckets}
        self.residuals = {
            id(bucket): bucket.flat.new_zeros(sum(math.prod(shape) for shape in self._shapes[id(bucket)]))
            for bucket in self.buckets
        }
        self.factors: dict[int, dict[int, Tensor]] = {}
        self.own_errors: dict[int, Tensor] = {}
        self.sent_bytes, self.exchanged = 0.0, 0
        """What this rank has sent, as computed, and in how many steps."""
        self._names = {id(mine.tensor): name for name, mine in self.held.items()}
        self.left_out: dict[int, tuple[float, float]] = {}
        """Of each bucket, at the step that was measured last: the norms of what was left out and of all there was."""

    @property
    def is_sending(self) -> bool:
        """Not before `finish`, which knows how many targets there are: in a pipeline the last stage alone counts them,
        until its last pass."""
        return False

    @property
    def _is_whole(self) -> bool:
        """Whether the step at work sends gradients as they are."""
        return self._is_bad or self.steps < self.compression.start

    def sum_over_copies(self, bucket: Bucket, flat: Tensor) -> None:
        """Nothing at the end: `exchange` begins with it, so that ranks that hold the same leave out the same."""

    def _replicas(self, bucket: Bucket) -> Communicator:
        """Over which what is compressed is summed: the ranks of a replica have summed theirs before."""
        return self.groups[over_replicas(bucket.batch_summed)]

    def exchange(self, bucket: Bucket) -> Any:
        super().sum_over_copies(bucket, bucket.flat)
        if not bucket.batch_summed:
            return None
        group, residual = self._replicas(bucket), self.residuals[id(bucket)]
        if self._is_whole:
            self.sent_bytes += 0 if self._is_bad else summed_bytes(residual.nbytes, group.size)
            return super().exchange(bucket)
        wanted = self.unpacked(bucket)
        self.sum_over(within_replica(bucket.batch_summed), wanted)
        if self.compression.feedback:
            wanted.add_(residual, alpha=self._divisor)
        is_measured = self.steps % _MEASURED == 0
        size = norm_of(wanted) if is_measured else 0.0
        match self.compression.scheme:
            case "top-k" | "random-k":
                self._chosen(bucket, wanted, residual, group)
            case "powersgd":
                self._factored(bucket, wanted, residual, group)
            case _:
                self._quantised(bucket, wanted, residual, group)
        if is_measured:
            self.left_out[id(bucket)] = norm_of(residual), size
        residual /= self._divisor
        self.keep_sum(bucket, wanted)
        return None

    def reduce(self, chunk: int) -> None:
        """Nothing yet, as `is_sending` says."""

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> Any:
        self._require_last()
        assert self._totals is not None
        gradients = [mine.tensor.grad for mine in self.held.values() if mine.tensor.grad is not None]
        bad = bool(gradients) and not bool(torch.isfinite(norms_of(gradients)).all())
        mine = np.array([float(self._totals[1]) / self._alike, bad])
        count, bad_ranks = self.counted_over.all_reduce(mine, algorithm=self.algorithm).tolist()
        self._divisor, self._is_bad = max(count, 1.0) * self._scale, bad_ranks > 0
        step = super().finish(max_norm, divide=divide)
        self.steps += not self._is_bad
        self.exchanged += not self._is_bad
        return step

    # Schemes ------------------------------------------------------------------------------------------------------

    def _chosen(self, bucket: Bucket, wanted: Tensor, residual: Tensor, group: Communicator) -> None:
        kept = self.compression.kept(wanted.numel())
        if self.compression.scheme == "random-k":
            draw = torch.Generator().manual_seed(self.compression.seed * 1_000_003 + self.steps)
            places = torch.randperm(wanted.numel(), generator=draw)[:kept].to(wanted.device)
            values = self._sum(wanted[places], group)
            residual.copy_(wanted)
            residual[places] = 0
            wanted.zero_()
            wanted[places] = values
            return
        places = wanted.abs().topk(kept, sorted=False).indices
        values = wanted[places]
        residual.copy_(wanted)
        residual[places] = 0
        wanted.zero_()
        if self.compression.is_dense(group.size, wanted.element_size()):
            wanted[places] = values
            self._sum(wanted, group)
            return
        everyone = self._gather(values, group), self._gather(places.to(torch.int32), group)
        wanted.index_add_(0, everyone[1].long(), everyone[0])

    def _factored(self, bucket: Bucket, wanted: Tensor, residual: Tensor, group: Communicator) -> None:
        """PowerSGD: P of all matrices in one sum, Q of all in another, everything that is not a matrix beside P."""
        ranks, pieces = self._factor_ranks(bucket), self._split(bucket, wanted)
        views = {number: view.reshape(view.shape[0], -1) for number, view in enumerate(pieces) if ranks[number]}
        unfactored = [view for number, view in enumerate(pieces) if not ranks[number]]
        known = self.factors.setdefault(id(bucket), {})
        for number, matrix in views.items() if not known else ():
            draw = torch.Generator().manual_seed(self.compression.seed + number)
            shape = (matrix.shape[1], ranks[number])
            known[number] = torch.randn(shape, generator=draw, dtype=matrix.dtype).to(matrix.device)
        residual.copy_(wanted)
        left = [matrix @ known[number] for number, matrix in views.items()]
        summed = self._sum_all([*left, *unfactored], group)
        bases = dict(zip(views, [_orthonormal(p) for p in summed[: len(left)]], strict=True))
        right = self._sum_all([matrix.T @ bases[number] for number, matrix in views.items()], group)
        for (number, matrix), q in zip(views.items(), right, strict=True):
            known[number] = q
            matrix.copy_(bases[number] @ q.T)
        for view, total in zip(unfactored, summed[len(left) :], strict=True):
            view.copy_(total)
        # What the mean of the ranks got of this rank's gradients is what it need not send again.
        residual.sub_(wanted, alpha=1 / group.size)
        for number, left_over in enumerate(self._split(bucket, residual)):
            if not ranks[number]:
                left_over.zero_()

    def _quantised(self, bucket: Bucket, wanted: Tensor, residual: Tensor, group: Communicator) -> None:
        """Each rank sums one part of what all have sent it, and sends the sum to all, both in few bits."""
        ranks, length = group.size, wanted.numel()
        part = _part(length, ranks)
        padded = torch.zeros(ranks * part, dtype=wanted.dtype, device=wanted.device)
        padded[:length] = wanted
        packed, scales = zip(*(self._encode(piece, max(0, min(part, length - n * part)))
                               for n, piece in enumerate(padded.view(ranks, part))), strict=True)  # fmt: skip
        kept = torch.cat([self._decode(code, scale, part) for code, scale in zip(packed, scales, strict=True)])
        residual.copy_(wanted - kept[:length])
        came = self._to_all(torch.cat(packed), group).view(ranks, -1)
        came_scales = self._to_all(torch.stack(scales), group)
        error = self.own_errors.setdefault(id(bucket), torch.zeros_like(padded[:part]))
        mine = error * self._divisor
        mine += sum(self._decode(code, scale, part) for code, scale in zip(came, came_scales, strict=True))
        real = max(0, min(part, length - group.rank * part))
        code, scale = self._encode(mine, real)
        if self.compression.feedback:
            error.copy_(mine - self._decode(code, scale, part)).div_(self._divisor)
            error[real:] = 0
        codes, everyone = self._gather(code, group).view(ranks, -1), self._gather(scale[None], group)
        decoded = torch.cat([self._decode(code, size, part) for code, size in zip(codes, everyone, strict=True)])
        wanted.copy_(decoded[:length])

    def _encode(self, piece: Tensor, real: int) -> tuple[Tensor, Tensor]:
        """Bytes and a scale. `real`: of the piece, what is not padding."""
        if self.compression.scheme == "int8":
            scale = (piece.abs().max() / 127).float()
            steps = piece / scale.clamp(min=torch.finfo(torch.float32).tiny)
            return steps.round().clamp(-127, 127).to(torch.int8).view(torch.uint8), scale
        scale = (piece[:real].abs().sum() / max(1, real)).float()
        weights = 2 ** torch.arange(8, dtype=torch.uint8, device=piece.device)
        return ((piece >= 0).view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8), scale

    def _decode(self, code: Tensor, scale: Tensor, length: int) -> Tensor:
        wide = self.buckets[0].flat.dtype
        if self.compression.scheme == "int8":
            return code.view(torch.int8).to(wide) * scale
        weights = 2 ** torch.arange(8, dtype=torch.uint8, device=code.device)
        bits = (code[:, None] & weights) > 0
        return (bits.to(wide) * 2 - 1).view(-1)[:length] * scale

    # Sums ---------------------------------------------------------------------------------------------------------

    def _sum(self, values: Tensor, group: Communicator) -> Tensor:
        self.sent_bytes += summed_bytes(values.nbytes, group.size)
        summed: Tensor = group.all_reduce(values, out=values, algorithm=self.algorithm)
        return summed

    def _gather(self, values: Tensor, group: Communicator) -> Tensor:
        self.sent_bytes += (group.size - 1) * values.nbytes
        gathered: Tensor = group.all_gather(values, algorithm=self.algorithm)
        return gathered

    def _to_all(self, values: Tensor, group: Communicator) -> Tensor:
        self.sent_bytes += (group.size - 1) / group.size * values.nbytes
        algorithm = self.algorithm
        if algorithm != "auto" and algorithm not in algorithms("all_to_all"):  # a ring, say: messages, as it is
            algorithm = "pairwise"
        received: Tensor = group.all_to_all(values, algorithm=algorithm)
        return received

    def _sum_all(self, tensors: Sequence[Tensor], group: Communicator) -> list[Tensor]:
        if not tensors:
            return []
        flat = self._sum(torch.cat([tensor.reshape(-1) for tensor in tensors]), group)
        pieces = flat.split_with_sizes([tensor.numel() for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]

    def _split(self, bucket: Bucket, flat: Tensor) -> list[Tensor]:
        shapes = self._shapes[id(bucket)]
        pieces = flat.split_with_sizes([math.prod(shape) for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _factor_ranks(self, bucket: Bucket) -> list[int]:
        return [_factor_rank(shape, self.compression.rank) for shape in self._shapes[id(bucket)]]

    # What outlives a step -----------------------------------------------------------------------------------------

    def go_on(self, step: int) -> None:
        self.steps = step

    def figures(self) -> dict[str, Any]:
        shapes = [shape for bucket in self.buckets for shape in self._shapes[id(bucket)]]
        ranks, width = self.mesh.dp.size, self.buckets[0].flat.element_size()
        plain = sent_bytes(None, shapes, ranks, width)
        left = math.hypot(*(left for left, _ in self.left_out.values()))
        wanted = math.hypot(*(size for _, size in self.left_out.values()))
        return {
            "compress": self.compression.scheme, "whole_bytes": plain, "left_out": left / wanted if wanted else 0.0,
            "sent_bytes": self.sent_bytes / max(1, self.exchanged),
        }  # fmt: skip

    def remembered(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """What each rank has not sent yet; what it lost of the sum of its part, which is no other rank's; and factors,
        which begin the next step's."""
        for bucket in self.buckets:
            if not bucket.batch_summed:
                continue
            named = [self._names[id(parameter)] for parameter in bucket.parameters]
            for name, piece in zip(named, self._split(bucket, self.residuals[id(bucket)]), strict=True):
                kind, shard = self._kept_as(RESIDUAL, name)
                yield kind, shard.by_replica(), piece[None]
            error, group = self.own_errors.get(id(bucket)), self._replicas(bucket)
            if error is not None:
                errors = torch.zeros_like(self.residuals[id(bucket)])
                mine = errors[group.rank * len(error) :][: len(error)]
                mine += error[: len(mine)]
                group.all_reduce(errors, out=errors, algorithm=self.algorithm)
                for name, piece in zip(named, self._split(bucket, errors), strict=True):
                    yield *self._kept_as(ERROR, name), piece
            for number, factor in self.factors.get(id(bucket), {}).items():
                yield *self._factor_as(named[number], factor.shape), factor[None]

    def recall(self, read: Recall) -> None:
        for bucket in self.buckets:
            if not bucket.batch_summed:
                continue
            named = [self._names[id(parameter)] for parameter in bucket.parameters]
            for name, piece in zip(named, self._split(bucket, self.residuals[id(bucket)]), strict=True):
                kept = read(*self._kept_as(RESIDUAL, name), by_replica=True)
                if kept is not None:
                    piece.copy_(kept)
            errors = [read(*self._kept_as(ERROR, name)) for name in named]
            if self.compression.scheme in QUANTISED and all(error is not None for error in errors):
                group, length = self._replicas(bucket), self.residuals[id(bucket)].numel()
                part = _part(length, group.size)
                mine = torch.zeros(part, dtype=bucket.flat.dtype, device=bucket.flat.device)
                joined = torch.cat([error.reshape(-1) for error in errors if error is not None])
                own = joined[group.rank * part :][:part]
                mine[: len(own)] = own
                self.own_errors[id(bucket)] = mine
            self._recall_factors(bucket, named, read)

    def _recall_factors(self, bucket: Bucket, named: Sequence[str], read: Recall) -> None:
        """All of a bucket, or none: the first step then draws them."""
        shapes = zip(self._shapes[id(bucket)], self._factor_ranks(bucket), strict=True)
        sizes = {number: (_sides(shape)[1], rank) for number, (shape, rank) in enumerate(shapes) if rank}
        kept = {number: read(*self._factor_as(named[number], size)) for number, size in sizes.items()}
        if self.compression.scheme == "powersgd" and all(factor is not None for factor in kept.values()):
            device = bucket.flat.device
            self.factors[id(bucket)] = {n: factor[0].to(device) for n, factor in kept.items() if factor is not None}

    def _kept_as(self, kind: str, name: str) -> tuple[str, Shard]:
        """Under which name and of which shard: each stage that holds a parameter has its own part of its gradient."""
        shard = self.held[name].shard
        if len(shard.holders) < 2:
            return f"{kind}:{name}", shard
        place = coordinates(shard.rank, shard.axes)["pp"]
        return f"{kind}@{place}:{name}", replace(shard, holders=(place,))

    def _factor_as(self, name: str, size: Sequence[int]) -> tuple[str, Shard]:
        """Ranks along tp have a factor each, of their part of the matrix."""
        kind, shard = self._kept_as(FACTOR, name)
        shape = (size_of(shard.axes, "tp"), *size)
        return kind, replace(shard, whole=shape, cuts=(Cut("tp", 0),))


class CompressedRows(CompressedGradients, Zero):
    """Beside ZeRO-1 and 2: of the sum a rank keeps its rows."""


class CompressedWeights(CompressedGradients, ZeroWeights):
    """Beside ZeRO-3."""
