"""From losses to gradients that an optimizer can use: one protocol, and everything all its implementations share.

A step calls `backward` for each microbatch and `finish` once; then every `.grad` is the mean over all counted tokens of
the mesh, clipped, or will be once the optimizer has divided it by `GradientStep.divisor`. The implementation is chosen
when the model is laid (`apply.lay(..., gradients=...)`) and never changes:

    bucketed   summed over the ranks in a few flat buffers, while backward still runs (`buckets.py`)
    zero       of the sums each rank gets its own rows alone, and its optimizer steps these (`zero.py`)
    naive      one blocking all_reduce per parameter, after backward: to read first, and to compare with
    local      a model on one process: nothing is exchanged, and nothing makes the host wait for the device

`settle` is the only place that divides and clips. What a step came to may be read late: on a device, loss and norm are
tensors that are still being computed, and `read` waits once for any number of steps.

Other methods plug in by subclassing the bucketed one (`methods/`). *Compressed* gradients replace `exchange`: compress,
exchange, expand into `bucket.flat`. *Local updates* leave `exchange` out, let `kept`
count copies within the replica, set `counted` to the replica's axes, and average weights themselves every few
steps. None of them needs other calls than these; tests/mpi/test_backward.py has each in a few lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.axes import BATCH, Blocks, strided
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import Shard
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.norms import norms_of
from tilemesh.parallel.shard import Held

_EPSILON = 1e-6  # as torch's clip_grad_norm_ has it


@dataclass(frozen=True)
class GradientStep:
    """What one step came to over the whole mesh; the same on every rank. Tensors where it is not waited for."""

    loss: float | Tensor
    """Mean nats per token."""
    tokens: int
    norm: float | Tensor
    """Of the mean gradient of the whole model, before clipping."""
    divisor: Tensor | None = None
    """What gradients are yet to be divided by, where that was left to the optimizer."""
    scale: float = 1.0
    """What the summed loss was multiplied by, and gradients divided by again; in fp16 it decides what becomes 0."""

    def copied(self) -> GradientStep:
        """Loss and norm in memory of their own: where a captured step leaves them, its next replay writes."""
        loss, norm = (value.clone() if isinstance(value, Tensor) else value for value in (self.loss, self.norm))
        return replace(self, loss=loss, norm=norm, divisor=None)


class StepFigures(NamedTuple):
    """What a step came to, as numbers."""

    step: int
    loss: float
    norm: float
    tokens: int


def read(steps: Sequence[GradientStep]) -> list[tuple[float, float]]:
    """(loss, norm) of some steps as numbers, with one wait for all of them."""
    if not steps:
        return []
    pairs = [[torch.as_tensor(value, dtype=torch.float64) for value in (step.loss, step.norm)] for step in steps]
    return [(loss, norm) for loss, norm in torch.stack([torch.stack(pair) for pair in pairs]).tolist()]


class Recall(Protocol):
    """Reads this rank's part of a tensor that a checkpoint keeps; None where it has none that fits."""

    def __call__(self, name: str, shard: Shard, *, by_replica: bool = False) -> Tensor | None:
        """`by_replica`: it was written with `shard.by_replica()`; of other replicas than there are now, the mean."""


class Gradients(Protocol):
    """How gradients are made, exchanged, divided and clipped. The defaults are for replicas that have the same
    weights after every step and remember nothing."""

    is_late: bool = False
    """Whether `finish` returns before the device is done: its loss and norm are tensors."""

    states_differ: bool = False
    """Whether each replica has optimizer states of its own."""

    stepped: Mapping[str, Held]
    """What an optimizer steps, with its gradient after `finish`: the parameters, or under ZeRO this rank's rows."""

    @property
    def buffers(self) -> list[Tensor]:
        """The memory of all gradients."""

    def backward(self, loss_sum: Tensor, count: Tensor | int, *, last: bool = True, scale: float = 1.0) -> None:
        """Gradients of one microbatch's summed loss over `count` targets, added to the step's.

        `last`: no microbatch follows, so an exchange may begin. `scale`: a factor on the loss, taken out by `finish`.
        """

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> GradientStep:
        """End the step: every `.grad` is the mean over the mesh, clipped to `max_norm`.

        Without `divide` gradients may be left as they are, with `GradientStep.divisor` for the optimizer to divide them
        by on its way, which saves a pass over all of them.
        """

    def updated(self) -> None:
        """After the update, or after weights were read into `stepped`: the model's weights are whole again."""
        return

    def clear(self) -> None:
        """After the update: give back what the next step makes anew."""
        return

    def close(self) -> None:
        """Take hooks off the parameters."""
        return

    def meets(self, step: int) -> bool:
        """Whether all replicas have the same weights after this step; until then none waits for another."""
        return True

    def over_replicas(self, steps: Sequence[StepFigures]) -> Sequence[StepFigures]:
        """The steps since replicas last met, over all of them (a collective call, when they meet)."""
        return steps

    def remembered(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """(name, shard, tensor) of what a checkpoint keeps besides weights and an optimizer's states: all that decides
        later steps, so that taking it changes nothing (a collective call)."""
        return iter(())

    def recall(self, read: Recall) -> None:
        """Take up what `remembered` gave, as far as a checkpoint has it."""
        return

    def go_on(self, step: int) -> None:
        """A run goes on after so many steps; what was remembered has been read."""
        return

    def figures(self) -> dict[str, Any]:
        """What a run's summary says of the method."""
        return {}


@dataclass(frozen=True)
class Parts:
    """What an implementation is made from."""

    held: Mapping[str, Held]
    mesh: Mesh
    algorithm: str = "auto"
    """Of every exchange, as a communicator takes it."""
    reads: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Names of the parameters that the passes of each chunk read."""
    frozen: Mapping[str, Held] = field(default_factory=dict)
    """Parameters that no gradient is computed for."""
    chunks: Mapping[str, int] = field(default_factory=dict)
    """The chunk of a pipeline that a parameter is of, where there are several."""
    holders: Mapping[tuple[int, ...], Communicator] = field(default_factory=dict)
    """Ranks of other stages that hold the same parameters, by `Shard.holders`."""
    compares: bool = False
    """Whether ranks of tp may compute other losses: of a user's own module, by its dropout or by other rows."""


Way = Callable[[Parts], Gradients]


def loss_shard(mesh: Mesh) -> Shard:
    """A step's loss as a value on the mesh: a part of it along the axes of the batch, the same along all others.

    Along pp it is a part too: of a stage without the head, nothing.
    """
    return Shard("loss", (), mesh.shape, mesh.comm.rank, partial=(*BATCH, "pp"))


def batch_summed(mine: Shard) -> Blocks:
    """The ranks whose gradients are summed because they took other parts of the batch."""
    return tuple((name, count) for name, count in mine.summed if strided(name)[0] in BATCH)


def within_replica(blocks: Blocks) -> Blocks:
    """Of ranks that took other parts of the batch, those of one replica: they took other tokens of the same rows."""
    return tuple((name, count) for name, count in blocks if strided(name)[0] != "dp")


def over_replicas(blocks: Blocks) -> Blocks:
    """The others of them: ranks of other replicas."""
    return tuple((name, count) for name, count in blocks if strided(name)[0] == "dp")


def copies_summed(mine: Shard) -> Blocks:
    """The ranks that took the same part of the batch, hold the same, and each have a part of its gradient."""
    return tuple((name, count) for name, count in mine.summed if strided(name)[0] not in BATCH)


def clip_factor(norm: float, max_norm: float) -> float:
    """What clips a gradient of this norm; 1 where the norm is no number, which others look at."""
    return min(1.0, max_norm / (norm + _EPSILON)) if math.isfinite(norm) else 1.0


def settle(
    gradients: Sequence[Tensor],
    loss: float | Tensor,
    tokens: int,
    norm: float | Tensor,
    *,
    factor: float = 1.0,
    max_norm: float | None = None,
    divide: bool = True,
) -> GradientStep:
    """Make gradients means and clip them: the one place that does.

    `factor`: what turns them into means, 1 where the loss was divided before backward; `norm`: of the means, a number,
    or a tensor that is still being computed, for which nothing here waits.
    """
    divisor = None
    if isinstance(norm, Tensor):
        if max_norm is not None:
            divisor = ((norm + _EPSILON) / max_norm).clamp(min=1.0)
        if factor != 1.0:
            divisor = (torch.ones_like(norm) if divisor is None else divisor) / factor
        if divide and divisor is not None:
            torch._foreach_mul_(list(gradients), divisor.reciprocal().to(gradients[0].dtype))
            divisor = None
        return GradientStep(loss, tokens, norm, divisor)
    if max_norm is not None:
        factor *= clip_factor(norm, max_norm)
    if divide:
        for gradient in gradients:
            gradient.mul_(factor)
    else:
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        divisor = torch.tensor(1 / factor, dtype=wide, device=gradients[0].device)
    return GradientStep(loss, tokens, norm, divisor)


class Exchanging(Gradients):
    """What implementations over a mesh share: the step's totals, the sums, and the numbers that `settle` needs."""

    def __init__(self, parts: Parts) -> None:
        self.held, self.mesh, self.algorithm = dict(parts.held), parts.mesh, parts.algorithm
        self.stepped: Mapping[str, Held] = self.held
        self._totals: Tensor | None = None
        self._scale = 1.0
        self._alike = loss_shard(parts.mesh).alike
        self.counted: Blocks = tuple(block for block in parts.mesh.shape if block[1] > 1)
        """The ranks over which a step's loss, tokens and norm are summed: all, or those of some axes."""
        shards = [mine.shard for mine in self.held.values()]
        wanted = {blocks(mine) for mine in shards for blocks in (batch_summed, copies_summed)}
        wanted |= {part(batch_summed(mine)) for mine in shards for part in (within_replica, over_replicas)}
        # Asked for now, in the same order on every rank: making a group is a collective call.
        self.groups = {blocks: parts.mesh.among(blocks) for blocks in sorted(wanted)}
        self.holders = parts.holders
        self._compares = parts.compares and parts.mesh.tp.size > 1
        self._sign = {0: 1, 1: -1}.get(parts.mesh.tp.index, 0) * self._compares

    @property
    def counted_over(self) -> Communicator:
        """The first time a collective call, where it is not all ranks."""
        everyone = tuple(block for block in self.mesh.shape if block[1] > 1)
        return self.mesh.comm if self.counted == everyone else self.mesh.among(self.counted)

    def count(self, loss_sum: Tensor, count: Tensor | int, scale: float) -> None:
        """Add a microbatch to the step's totals."""
        if self._totals is not None and scale != self._scale:
            raise UsageError(f"scale {scale} after {self._scale} in one step: expected the same for all microbatches")
        now = torch.stack([loss_sum.detach().double(), torch.as_tensor(count, device=loss_sum.device).double()])
        self._totals = now if self._totals is None else self._totals + now
        self._scale = scale

    def settled(self, summed: list[tuple[Tensor, int]], max_norm: float | None, divide: bool) -> GradientStep:
        """`summed`: gradients that have been exchanged, each with how many ranks of the mesh hold the same."""
        norms = norms_of([flat for flat, _ in summed]).double()
        parts = [norm.square() / copies for norm, (_, copies) in zip(norms, summed, strict=True)]
        loss_sum, tokens, squares = self.totals(torch.stack(parts).sum())
        factor = 1 / (max(tokens, 1) * self._scale)
        norm = math.sqrt(squares) * factor if math.isfinite(squares) else squares
        gradients, loss = [flat for flat, _ in summed], loss_sum / max(tokens, 1)
        step = settle(gradients, loss, tokens, norm, factor=factor, max_norm=max_norm, divide=divide)
        return replace(step, scale=self._scale)

    def totals(self, squares: Tensor) -> tuple[float, int, float]:
        """The step's summed loss, its tokens, and a sum of squares that each rank has a part of, over all ranks."""
        assert self._totals is not None
        # Read in one go: on a GPU each reading waits for all that was started.
        loss_sum, count, mine = torch.cat([self._totals, squares[None]]).tolist()
        self._totals = None
        # One small exchange for all. What several ranks have alike counts once, and two of them leave nothing.
        compared = [self._sign * loss_sum] * self._compares
        parts = np.array([loss_sum / self._alike, count / self._alike, mine, *compared])
        sums = self.counted_over.all_reduce(parts, algorithm=self.algorithm).tolist()
        loss_sum, count, squares_sum, apart = sums if self._compares else (*sums, 0.0)
        if abs(apart) > 1e-5 * (abs(loss_sum) + count):
            raise UsageError(
                f"ranks of tp computed other losses of the same rows ({apart / max(count, 1):.2g} apart per token), so "
                "their weights would drift apart: give them the same rows (mesh.dp says which), and have dropout "
                "between a column and a row layer alone, or use place"
            )
        return loss_sum, round(count), squares_sum

    def sum_over(self, blocks: Blocks, flat: Tensor) -> None:
        """Sum gradients over a group of ranks, in place."""
        if blocks:
            self.groups[blocks].all_reduce(flat, out=flat, algorithm=self.algorithm)


class Naive(Exchanging):
    """The plainest exchange: after backward, one blocking all_reduce per parameter."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._is_open = self._is_last = False

    @property
    def buffers(self) -> list[Tensor]:
        return [mine.tensor.grad for mine in self.held.values() if mine.tensor.grad is not None]

    def backward(self, loss_sum: Tensor, count: Tensor | int, *, last: bool = True, scale: float = 1.0) -> None:
        if not self._is_open:
            self._is_open = True
            for mine in self.held.values():
                mine.tensor.grad = None
        self._is_last = last
        self.count(loss_sum, count, scale)
        torch.autograd.backward(loss_sum * scale)

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> GradientStep:
        if not self._is_last:
            raise UsageError("finish() before the last microbatch: call backward(…, last=True)")
        summed = []
        for tensor, shard in self.held.values():
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            self.sum_over(batch_summed(shard), tensor.grad)
            self.sum_over(copies_summed(shard), tensor.grad)
            summed.append((tensor.grad, shard.copies))
        self._is_open = self._is_last = False
        return self.settled(summed, max_norm, divide)


class LocalGradients(Gradients):
    """Gradients of a model on one process, for steps that the host does not wait for.

    An exchange over a mesh ends in numbers that every rank must know before it goes on. On one process mean and
    clipping stay on the device: the next step is on its way while this one computes, and its loss is read some steps
    later. `tokens`: targets of a whole step, all of which count, so the loss is divided before backward.
    """

    is_late = True

    def __init__(self, parts: Parts, tokens: int) -> None:
        if parts.mesh.comm.size > 1:
            raise UsageError(f"local gradients on a mesh of {parts.mesh}: they are for one process; use 'bucketed'")
        self.stepped: Mapping[str, Held] = parts.held
        self.parameters = [mine.tensor for mine in parts.held.values()]
        self.tokens = tokens
        self._total: Tensor | None = None

    @property
    def buffers(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def backward(self, loss_sum: Tensor, count: Tensor | int, *, last: bool = True, scale: float = 1.0) -> None:
        if scale != 1.0:
            raise UsageError(f"a loss scale of {scale} with local gradients: whether one overflows is not waited for")
        mean = loss_sum / self.tokens
        self._total = mean.detach() if self._total is None else self._total + mean.detach()
        torch.autograd.backward(mean)

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> GradientStep:
        if self._total is None:
            raise UsageError("finish() before the last microbatch: call backward(…, last=True)")
        gradients = self.buffers
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        norm = torch.linalg.vector_norm(norms_of(gradients)).to(wide)
        total, self._total = self._total, None
        return settle(gradients, total, self.tokens, norm, max_norm=max_norm, divide=divide)

    def clear(self) -> None:
        # Autograd then hands over its own tensors instead of adding to old ones.
        for parameter in self.parameters:
            parameter.grad = None
