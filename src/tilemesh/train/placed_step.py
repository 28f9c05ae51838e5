"""A placed module as training has models: with its shards, and gradients that its own programs have reduced.

The one idea: what ranks exchange stands in the module's programs, so that nothing is left to exchange after a backward
pass but the norm. Buffers that the module changes are kept as weights are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Shard
from tilemesh.graph.joint import JointTrace
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
        self.placed, self.microbatches, self.loss = placed, microbatches, 0.0
        used = {name for trace in _traces(placed) for name in trace.gradients}  # torch steps no others, nor decays them
        self.stepped = {name: mine for name, mine in trained(placed, placed.shards).items() if name in used}

    @property
    def buffers(self) -> list[Tensor]:
        return [mine.tensor.grad for mine in self.stepped.values() if mine.tensor.grad is not None]

    def backward(self, loss_sum: Tensor, count: Tensor | int, *, last: bool = True, scale: float = 1.0) -> None:
        mean = loss_sum / self.microbatches
        self.loss += float(mean.detach())
        if mean.requires_grad:  # else stages have made both passes
            torch.autograd.backward(mean)

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> GradientStep:
        has_gradient = {name for name, value in self.placed.named_parameters() if value.grad is not None}
        if changed := sorted(has_gradient ^ self.stepped.keys()):
            raise UsageError(f"the loss depends on {changed[0]} in some steps alone: let it do so in all, or in none")
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
            if (stored := read(f"{WEIGHT}:{name}", self.placed.shards[name])) is not None:
                value.copy_(stored)

    def _kept(self) -> Iterator[tuple[str, Tensor]]:
        """What no optimizer steps: buffers, and parameters that are frozen or not used."""
        own = [*self.placed.named_buffers(), *self.placed.named_parameters()]
        yield from ((name, value) for name, value in own if name in self.placed.shards.keys() - self.stepped.keys())


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
        seconds, sent = placed.figures(cost)
    else:
        run = next(iter(placed.programs.values()))
        seconds, sent = (microbatches * each for each in cost.of_program(*run.programs))
    graphs = [trace.graph for trace in _traces(placed)]
    updated = UPDATE_WORDS * sum(p.numel() * p.element_size() for p in placed.parameters() if p.requires_grad)
    seconds += cost.pass_s(MemoryPass("update", updated))
    return ProgramFigures(seconds, sent, microbatches * sum(map(cost.least_s, graphs)))


def _traces(placed: PlacedModule | StagedCall) -> list[JointTrace]:
    """Of the first kind of call of each module here."""
    modules = placed.placed if isinstance(placed, StagedCall) else (placed,)
    return [next(iter(each.programs.values())).trace for each in modules]
