"""Local updates: replicas step by themselves and average their weights every few steps.

The one idea: between two averages a replica, one rank or a mesh of them, is a run of its own; every `period` steps the
mean of all weights is taken, and an outer step moves the last common weights towards it. With an outer rate of 1 and no
momentum the mean itself is taken: local SGD. `start`: so many steps are synchronous first (post-local SGD, Lin et al.
2020). An outer rate of 0.7 with Nesterov momentum 0.9 is DiLoCo (Douillard et al. 2023). With period 1 gradients are
exchanged instead of weights: as many bytes, and what clips a gradient, or divides it by its past, has the mean before
it. That is data parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.shard import Shard
from tilemesh.parallel.buckets import BUCKET_BYTES, Bucket, Bucketed
from tilemesh.parallel.gradients import GradientStep, Parts, Recall, StepFigures, over_replicas, within_replica

OUTER = "outer_momentum"


@dataclass(frozen=True)
class LocalPeriod:
    """When replicas meet, and how the common weights move. `last`: the run's last step, at which they always meet."""

    period: int
    start: int = 0
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    last: int = 0

    def __post_init__(self) -> None:
        if self.period < 1 or self.start < 0:
            raise UsageError(f"period {self.period} and start {self.start}: expected at least 1 and at least 0")

    def is_alone(self, step: int) -> bool:
        """Whether replicas do not exchange gradients at this step, counted from 1."""
        return step > self.start and self.period > 1

    def meets(self, step: int) -> bool:
        """Whether all replicas have the same weights after this step."""
        return step <= self.start or (step - self.start) % self.period == 0 or step == self.last


class LocalUpdates(Bucketed):
    """Gradients of a replica's own, and weights that are averaged. `step`: how many were made before."""

    states_differ = True

    def __init__(self, parts: Parts, when: LocalPeriod, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(parts, bucket_bytes)
        self.when, self.step = when, 0
        self._everyone = self.counted
        self._replica = tuple(block for block in self.counted if block[0] != "dp")
        parts.mesh.among(self._replica)  # made now, by all ranks
        self._is_finished = False
        self.values: Mapping[str, Tensor] = {}
        """What an optimizer steps and replicas average: the parameters, or their float32 masters."""
        self.average({name: mine.tensor for name, mine in self.held.items()})
        self.rounds = 0
        self.spread = 0.0
        """How far this replica had gone from the mean at the last meeting, as a part of the weights' norm."""

    def average(self, values: Mapping[str, Tensor], settle: Callable[[], None] = lambda: None) -> None:
        """Let replicas have these in common, by the names of the parameters. `settle`: waits, before they are read,
        until they are where they lie."""
        self.values, self.settle = values, settle
        self.anchor = {name: torch.zeros_like(value.detach()) for name, value in values.items()}
        """The last common weights."""
        self.momentum = {name: torch.zeros_like(value) for name, value in self.anchor.items()}

    def exchange(self, bucket: Bucket) -> Any:
        if not self.when.is_alone(self.step + 1):
            return super().exchange(bucket)
        self.sum_over(within_replica(bucket.batch_summed), bucket.flat)
        return None

    def kept(self, bucket: Bucket) -> tuple[Tensor, int]:
        alone = self.when.is_alone(self.step + 1)
        return bucket.flat, bucket.copies // (self.mesh.dp.size if alone else 1)

    def finish(self, max_norm: float | None = None, *, divide: bool = True) -> GradientStep:
        if not self.step:  # weights were drawn or read after this was made
            self._keep_common()
        alone = self.when.is_alone(self.step + 1)
        self.counted = self._replica if alone else self._everyone
        self._is_finished = True
        return super().finish(max_norm, divide=divide)

    def meets(self, step: int) -> bool:
        return self.when.meets(step)

    def over_replicas(self, steps: Sequence[StepFigures]) -> Sequence[StepFigures]:
        """Losses are means over all targets. Of a step that replicas made alone there is no common gradient: its norm
        is the root mean square of theirs."""
        alone = [figures for figures in steps if self.when.is_alone(figures.step)]
        if not alone:
            return steps
        mine = np.array([[figures.loss * figures.tokens, figures.tokens, figures.norm**2] for figures in alone])
        summed = self.mesh.dp.comm.all_reduce(mine, algorithm=self.algorithm).tolist()
        over = {
            figures.step: StepFigures(
                figures.step, loss_sum / max(tokens, 1), math.sqrt(squares / self.mesh.dp.size), round(tokens)
            )
            for figures, (loss_sum, tokens, squares) in zip(alone, summed, strict=True)
        }
        return [over.get(figures.step, figures) for figures in steps]

    @torch.no_grad()
    def updated(self) -> None:
        """After a step, of which the optimizer made none where gradients were NaN: average where it is time."""
        if not self._is_finished:  # weights were read
            return
        self._is_finished = False
        self.step += 1
        if self.when.meets(self.step):
            if self.step > self.when.start:
                self._average()
            self._keep_common()

    def _average(self) -> None:
        """In the buckets' memory, which holds gradients that nobody needs any more; masters in memory of their own."""
        self.settle()
        self.rounds += 1
        squares = np.zeros(2)  # of what this replica is from the mean, and of the mean
        names = {id(mine.tensor): name for name, mine in self.held.items()}
        plain = self.when.outer_rate == 1 and not self.when.outer_momentum
        for bucket in self.buckets:
            mine = {names[id(parameter)]: self.values[names[id(parameter)]] for parameter in bucket.parameters}
            wide = next(iter(mine.values())).dtype
            flat = bucket.flat if bucket.flat.dtype == wide else torch.empty_like(bucket.flat, dtype=wide)
            pieces = flat.split_with_sizes([value.numel() for value in mine.values()])
            means = [piece.view(value.shape) for piece, value in zip(pieces, mine.values(), strict=True)]
            for value, mean in zip(mine.values(), means, strict=True):
                mean.copy_(value)
            if self.when.is_alone(self.step):
                self.sum_over(over_replicas(bucket.batch_summed), flat)
                flat.div_(self.mesh.dp.size)
            for (name, value), summed in zip(mine.items(), means, strict=True):
                mean = summed.to(value.device)  # masters may lie in the host's memory
                apart, size = (value - mean).square().sum(), mean.square().sum()
                squares += np.array([float(apart), float(size)]) / (bucket.copies // self.mesh.dp.size)
                value.copy_(mean if plain else self._moved(name, mean))
                self.held[name].tensor.copy_(value)
        apart_all, size_all = self.mesh.among(self._replica).all_reduce(squares, algorithm=self.algorithm).tolist()
        self.spread = math.sqrt(apart_all / size_all) if size_all else 0.0

    def _moved(self, name: str, mean: Tensor) -> Tensor:
        """The last common weights after an outer step towards the mean."""
        anchor, momentum = self.anchor[name], self.momentum[name]
        change = anchor - mean
        momentum.mul_(self.when.outer_momentum).add_(change)
        step = change.add_(momentum, alpha=self.when.outer_momentum)  # Nesterov's look ahead
        return anchor.sub_(step, alpha=self.when.outer_rate)

    def go_on(self, step: int) -> None:
        """A run that is resumed after so many steps, at which all replicas had the same weights."""
        self.step = step
        self._keep_common()

    @torch.no_grad()
    def _keep_common(self) -> None:
        self.settle()
        for name, value in self.values.items():
            self.anchor[name].copy_(value)

    def figures(self) -> dict[str, Any]:
        return {"period": self.when.period, "rounds": self.rounds, "steps": self.step, "spread": self.spread}

    def remembered(self) -> Iterator[tuple[str, Shard, Tensor]]:
        if self.when.outer_momentum:
            for name, value in self.momentum.items():
                yield f"{OUTER}:{name}", self.held[name].shard, value

    def recall(self, read: Recall) -> None:
        for name, shard, value in self.remembered():
            kept = read(name, shard)
            if kept is not None:
                value.copy_(kept)
