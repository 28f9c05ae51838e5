"""A placed module as training has models: with its shards, and gradients that its own programs have reduced.

The one idea: what ranks exchange stands in the module's programs, so that nothing is left to exchange after a backward
pass but the norm. Buffers that the module changes are kept as weights are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Shard
from tilemesh.model.work.passes import MemoryPass
from tilemesh.parallel.gradients import Gradients, GradientStep, Recall, clip_factor
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.placed import PlacedModule
from tilemesh.parallel.shard import trained
from tilemesh.parallel.tensor import Seams
from tilemesh.plan.place.cost import MeshCost
from tilemesh.runs.manifest import WEIGHT
from tilemesh.train.module_stages import StagedCall

UPDATE_WORDS = 7
"""That AdamW reads and writes of a parameter: it, its gradient and two moments, and three of them again."""


class PlacedGradients(Gradients):
    """Of a loss that is the mean over the batch already, or over each of equal microbatches, the same on every rank."""

    def __init__(self, placed: PlacedModule | StagedCall, microbatches: int = 1) -> None:
        self.placed, self.stepped, self.microbatches = placed, trained(placed, placed.shards), microbatches
        self.loss = 0.0

    @property
    def buffers(self) -> list[Tensor]:
        return [mine.tensor.grad for mine in self.stepped.values() if mine.tensor.grad is not None]

    def backward(self, loss_sum: Tensor, count: Tensor | int, *, last: bool = True, scale: float = 1.0) -> None:
        mean = loss_sum / self.microbatches
        self.loss += float(mean.detach())
        if mean.requires_grad:  # else stages have made both passes
            torch.autograd.backward(mean)

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> GradientStep:
        for mine in self.stepped.values():
            if mine.tensor.grad is None:  # of what the loss does not depend on
                mine.tensor.grad = torch.zeros_like(mine.tensor)
        norm = self.placed.gradient_norm()
        if max_norm is not None and (factor := clip_factor(norm, max_norm)) < 1:
            torch._foreach_mul_(self.buffers, factor)
        return GradientStep(self.loss, 1, norm)

    def clear(self) -> None:
        self.loss = 0.0
        for mine in self.stepped.values():
            mine.tensor.grad = None

    def remembered(self) -> Iterator[tuple[str, Shard, Tensor]]:
        for name, value in self._kept():
            yield f"{WEIGHT}:{name}", self.placed.shards[name], value.detach()

    @torch.no_grad()
    def recall(self, read: Recall) -> None:
        for name, value in self._kept():
            stored = read(f"{WEIGHT}:{name}", self.placed.shards[name])
            if stored is not None:
                value.copy_(stored)

    def _kept(self) -> Iterator[tuple[str, Tensor]]:
        """What no optimizer steps: buffers, and parameters that are frozen."""
        yield from ((name, value) for name, value in self.placed.named_buffers() if name in self.placed.shards)
        yield from ((name, value) for name, value in self.placed.named_parameters() if name not in self.stepped)


def lay_placed(
    placed: PlacedModule | StagedCall, plan: ParallelPlan, names: Iterable[str], microbatches: int = 1
) -> Laid:
    """`names`: of all parameters, wherever they lie. `microbatches`: that a step calls it with."""
    gradients = PlacedGradients(placed, microbatches)
    return Laid(placed, placed.mesh, plan, placed.shards, Seams(placed.mesh.tp.comm), gradients, names)


@dataclass(frozen=True)
class ProgramFigures:
    """What a rank's step is expected to take and to send; `limit_s`: no placement takes less."""

    seconds: float
    sent_bytes: float
    limit_s: float


def step_figures(placed: PlacedModule | StagedCall, cost: MeshCost, microbatches: int = 1) -> ProgramFigures:
    """Of the programs that are run for the first kind of call, once for each microbatch, and AdamW's update."""
    if isinstance(placed, StagedCall):
        (seconds, sent), modules = placed.figures(cost), placed.placed
    else:
        programs = next(iter(placed.programs.values())).programs
        (seconds, sent), modules = (microbatches * each for each in cost.of_program(*programs)), (placed,)
    graphs = [next(iter(each.programs.values())).trace.graph for each in modules]
    updated = UPDATE_WORDS * sum(p.numel() * p.element_size() for p in placed.parameters() if p.requires_grad)
    seconds += cost.pass_s(MemoryPass("update", updated))
    return ProgramFigures(seconds, sent, microbatches * sum(map(cost.least_s, graphs)))
