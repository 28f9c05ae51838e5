"""Training by an asynchronous pipeline: weights are updated within a step, while other microbatches are under way.

The one idea: a step is what lies between two moments at which no microbatch is under way. Within it every UPDATE of the
list (`core/step/schedules/asynchronous.py`) is a step of the run's optimizer on this rank's chunk, so a step of m
microbatches makes m updates (PipeDream-2BW: m / p). Between steps there is one version of the weights, which is what an
evaluation reads and a checkpoint keeps: a resumed run is the run that never stopped. The more microbatches a step has,
the rarer the pipeline is emptied.

An optimizer steps tensors of its own that share the newest version's memory: what autograd remembers of the model's
parameters does not see their updates. No rank knows the norm of the whole gradient at an update, so nothing is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilemesh.core.shard import Shard
from tilemesh.core.step.versions import delays, held_versions
from tilemesh.methods.versions import VersionedChunk, WeightUpdate, version_services, versioned
from tilemesh.model.loss import IGNORED
from tilemesh.parallel.buckets import Bucketed
from tilemesh.parallel.gradients import GradientStep, Parts, Recall
from tilemesh.parallel.norms import norms_of
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.parallel.shard import Held
from tilemesh.train.optimizer import Optimizer
from tilemesh.train.source import Microbatch
from tilemesh.train.steps import Batch, Stepper

CHANGE = "mean_change"
"""What PipeMare remembers of a parameter."""


class PipelinedGradients(Bucketed):
    """Gradients that become updates within the step. `stepped`: the newest version of each parameter."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.stepped = {
            name: Held(nn.Parameter(mine.tensor.data, requires_grad=mine.tensor.requires_grad), mine.shard)
            for name, mine in self.held.items()
        }
        self._newest = {id(mine.tensor): self.stepped[name].tensor for name, mine in self.held.items()}
        self.rate = 0.0
        """Of the optimizer, in this step."""
        self.counts: list[float] = []
        """Targets that count, of each of the step's updates, over all replicas."""
        self.versioned: dict[int, VersionedChunk] = {}
        self._squares = torch.zeros((), dtype=torch.float64)
        self._told: dict[str, Any] = {}

    def join(self, laid: Pipeline, optimizer: Optimizer, warmup: int) -> None:
        """Let a laid model's step run by versions, and this optimizer make them. `warmup`: of PipeMare, in updates."""
        program, modules = laid.step.program, {number: part.module for number, part in laid.parts.items()}
        self.versioned = versioned(
            program, dict(laid.passers), modules, lambda parameters: self._move(parameters, optimizer), warmup
        )
        laid.run_by(self.versioned, version_services(self.versioned))
        self._told = {
            "schedule": program.name,
            "versions": held_versions(program),
            "delays": delays(program),
            "updates_per_step": sum(action.kind == "UPDATE" for action in program.actions[0]),
        }

    @property
    def updates_per_step(self) -> int:
        return int(self._told["updates_per_step"])

    def begin(self, scale: float) -> None:
        super().begin(scale)
        self._squares = torch.zeros((), dtype=torch.float64, device=self.buckets[0].flat.device)
        for chunk in self.versioned.values():
            chunk.begin()

    def _move(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> WeightUpdate:
        """An update of the chunk that has these parameters."""
        newest = [self._newest[id(parameter)] for parameter in parameters]

        def move(values: Sequence[Tensor], number: int, divisor: float) -> None:
            tokens = max(self.counts[number % self.updates_per_step], 1)
            for bucket in self.buckets:
                self.sum_over(bucket.batch_summed, bucket.flat)
                self.sum_over(bucket.copies_summed, bucket.flat)
                bucket.flat.div_(tokens)
                self._squares += norms_of([bucket.flat])[0].double().square() / bucket.copies
            for parameter, own, value in zip(parameters, newest, values, strict=True):
                own.data, own.grad = value, parameter.grad
            optimizer.step(self.rate / divisor)
            for bucket in self.buckets:
                bucket.flat.zero_()

        return move

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> GradientStep:
        """What the step came to; the norm is the root of the mean square over its updates."""
        for chunk in self.versioned.values():
            chunk.end()
        loss_sum, tokens, squares = self.totals(self._squares)
        norm = math.sqrt(squares / self.updates_per_step) if math.isfinite(squares) else squares
        return GradientStep(loss_sum / max(tokens, 1), tokens, norm)

    def updated(self) -> None:
        """After weights were read into `stepped`."""
        for mine in self.held.values():
            mine.tensor.data = self._newest[id(mine.tensor)].data

    def go_on(self, step: int) -> None:
        for chunk in self.versioned.values():
            chunk.versions.updates = step * self.updates_per_step

    def remembered(self) -> Iterator[tuple[str, Shard, Tensor]]:
        names = {id(mine.tensor): name for name, mine in self.held.items()}
        for chunk in self.versioned.values():
            for parameter, change in zip(chunk.versions.parameters, chunk.versions.changes, strict=False):
                name = names[id(parameter)]
                yield f"{CHANGE}:{name}", self.held[name].shard, change

    def recall(self, read: Recall) -> None:
        for name, shard, change in self.remembered():
            kept = read(name, shard)
            if kept is not None:
                change.copy_(kept)

    def figures(self) -> dict[str, Any]:
        updates = max((chunk.versions.updates for chunk in self.versioned.values()), default=0)
        divergence = max((chunk.versions.divergence for chunk in self.versioned.values()), default=0.0)
        return {**self._told, "updates": updates, "divergence": divergence}


class AsynchronousStepper(Stepper):
    """Steps whose list makes the updates."""

    def _met(self, number: int, batches: Batch) -> GradientStep:
        gradients = self.gradients
        assert isinstance(gradients, PipelinedGradients)
        gradients.rate, gradients.counts = self._rate(number), self._counts(batches, gradients)
        self._passes(batches, self._seed(number))
        with self.recorder.span("gradients"):
            done = gradients.finish()
        self._count_gradients()
        return done

    def _counts(self, batches: Sequence[Microbatch], gradients: PipelinedGradients) -> list[float]:
        """Targets that count, of each update: its microbatches follow one another."""
        per_update = len(batches) // gradients.updates_per_step
        mine = np.array([float((tensors[1] != IGNORED).sum()) for tensors, _ in batches])
        summed = mine.reshape(-1, per_update).sum(axis=1)
        dp = self.laid.mesh.dp
        return list((summed if dp.size == 1 else dp.comm.all_reduce(summed)).tolist())
