"""One training step: a batch, forward, backward, the exchange, the update. What comes between steps is `loop.py`.

A step is a function of its number, the seed and the state a checkpoint keeps. Where batches come from and which loss is
lowered is handed to it (`source.py`); how gradients are exchanged, divided and clipped is the laid model's
(`parallel/gradients.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action
from tilemesh.model.dropout import DropoutPlace, fold_seed
from tilemesh.model.experts import Experts
from tilemesh.parallel.experts import watch_experts
from tilemesh.parallel.gradients import GradientStep
from tilemesh.parallel.laid import Laid, StepPiece
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.train.config import TrainConfig
from tilemesh.train.graph import StepGraph
from tilemesh.train.memory import SavedBytes, storage_bytes
from tilemesh.train.optimizer import LossScale, Optimizer
from tilemesh.train.pace import Pace
from tilemesh.train.record import DATA, Recorder
from tilemesh.train.routers import RouterWatch
from tilemesh.train.schedule import rate
from tilemesh.train.source import Microbatch, Objective, Source

Batch = list[Microbatch]


class StepInputs(NamedTuple):
    """All that differs from step to step."""

    batches: Batch
    seed: Tensor | None
    """Of dropout."""
    rate: float | Tensor


class Stepper:
    """One rank's steps."""

    def __init__(
        self,
        config: TrainConfig,
        laid: Laid,
        optimizer: Optimizer,
        source: Source,
        objective: Objective,
        recorder: Recorder,
    ) -> None:
        self.config, self.laid, self.optimizer, self.recorder = config, laid, optimizer, recorder
        self.source, self.objective, self.gradients = source, objective, laid.gradients
        self.device = next(laid.module.parameters()).device
        self.scale = LossScale(config.plan.precision == "fp16", config.tokens_per_step)
        self.overflowed: list[float] = []
        """Loss scales at which the last step's gradients overflowed, before they did not."""
        self.is_late = laid.gradients.is_late
        """Whether steps are not waited for."""
        self.replay: StepGraph | None = None
        if self._replays():
            self.replay = StepGraph(self._move, optimizer.capturing, always=config.train.graph is True)
        if isinstance(laid, Pipeline):
            laid.watch_actions(recorder.at, recorder.action)
        watch_experts(laid.module, recorder.exchange_within)
        self.routers = RouterWatch(laid, config.train.force_balance)
        self.before: Callable[[int], None] | None = None
        """Called with a step's number before it: what a recipe changes while training."""
        self._pace = Pace()
        self._now: StepInputs | None = None
        self._ready: tuple[int, Batch] | None = None
        self.gradients_bytes: int | None = None
        self.activations_bytes: int | None = None
        """What autograd kept for the backward pass of the first step; not known of compiled code, nor where
        recomputation is by operators."""

    def __call__(self, number: int) -> GradientStep:
        """Step `number`, counted from 1."""
        if self.before is not None:
            self.before(number)
        with self.recorder.span("data", DATA):
            batches = self._take(number)
        return self._late(number, batches) if self.is_late else self._met(number, batches)

    def close(self) -> None:
        """Give back a captured step and the gradients' hooks: they and this object hold one another."""
        self.replay = self._now = None
        self.gradients.close()

    def _met(self, number: int, batches: Batch) -> GradientStep:
        """A step whose ranks meet in its gradients, and whose loss is known when it ends.

        Where gradients overflow in fp16 it is made again at half the loss scale: no batch is passed over, and the
        step's number says how far the schedule is.
        """
        self.overflowed = []
        done = self._gradients(number, batches)
        while math.isfinite(done.loss) and not math.isfinite(done.norm) and self.scale.halve():
            self.overflowed.append(2 * self.scale.value)
            self.gradients.clear()
            done = self._gradients(number, batches)
        with self.recorder.span("optimizer"):
            if math.isfinite(done.norm):
                done = self.optimizer.update(self._rate(number), done)
                self.scale.grow()
            if math.isfinite(done.norm) or self.gradients.states_differ:  # others wait for replicas that made no update
                self.gradients.updated()
            if self.gradients.states_differ and self.gradients.meets(number):
                self.scale.meet(self.laid.mesh.dp.comm)
            self._count_gradients()
            self.gradients.clear()
        return done

    def _gradients(self, number: int, batches: Batch) -> GradientStep:
        self._passes(batches, self._seed(number))
        if self.device.type == "cuda" and not self.overflowed:
            self._fetch_ahead(number)  # while the GPU is still at it
        with self.recorder.span("gradients"):
            max_norm = None if self.optimizer.clips_elsewhere else self.config.optimizer.clip or None
            return self.gradients.finish(max_norm, divide=not self.optimizer.divides_wide)

    def _late(self, number: int, batches: Batch) -> GradientStep:
        """A step that nobody waits for, replayed where it can be."""
        if self.replay is None:
            self._now = StepInputs(batches, self._seed(number), self._rate(number))
            done = self._move()
        else:
            if self._now is None:
                self._now = StepInputs(
                    [Microbatch(tuple(map(torch.clone, tensors)), row) for tensors, row in batches],
                    self._seed(number),
                    # What torch's fused kernels read a rate from.
                    torch.zeros((), dtype=torch.float32, device=self.device),
                )
            self._write(self._now, number, batches)
            with self.recorder.span("step"):
                done = self.replay()
        self.optimizer.steps += 1
        if self.device.type == "cuda":
            mark = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            mark.record()
            self._fetch_ahead(number)
            with self.recorder.span("on the GPU"):
                self._pace(mark)
        return done

    def _move(self) -> GradientStep:
        """A whole step with what `_now` holds."""
        assert self._now is not None
        batches, seed, rate_now = self._now
        self._passes(batches, seed)
        with self.recorder.span("gradients"):
            done = self.gradients.finish(self.config.optimizer.clip or None, divide=not self.optimizer.divides)
        with self.recorder.span("optimizer"):
            self.optimizer.move(rate_now, done.divisor)
            self._count_gradients()
            self.gradients.clear()
        return done

    def _passes(self, batches: Batch, seed: Tensor | None) -> None:
        """Forward and backward for each microbatch."""
        if isinstance(self.laid, Pipeline):
            with self._counted(), self._counted_live(), self.recorder.span("pipeline"):
                pieces = [StepPiece(tokens, targets, row) for (tokens, targets), row in batches]
                self.laid.passes(pieces, dropout_seed=seed, scale=self.scale.factor)
            return
        with self._counted():
            for turn, (tensors, row) in enumerate(batches):
                # Without dropout nothing that changes is handed to a compiled model.
                dropping = {} if seed is None else {"dropout_seed": seed, "place": DropoutPlace(row=row)}
                self.recorder.at_pass = Action("F", 0, turn)
                with self.recorder.span("forward"):
                    total, count = self.objective.loss(*tensors, **dropping)
                self.recorder.holds(self.recorder.at_pass)
                self.recorder.at_pass = Action("B", 0, turn)
                with self.recorder.span("backward"):
                    is_last = turn == len(batches) - 1
                    self.gradients.backward(total, count, last=is_last, scale=self.scale.factor)
                del total  # and the graph behind it
                self.recorder.holds(self.recorder.at_pass)

    def _write(self, inputs: StepInputs, number: int, batches: Batch) -> None:
        """What is new in a step, into the tensors that a captured step reads."""
        for kept, new in zip(inputs.batches, batches, strict=True):
            for tensor, value in zip(kept.tensors, new.tensors, strict=True):
                tensor.copy_(value)
        assert isinstance(inputs.rate, Tensor)
        inputs.rate.fill_(self._rate(number))
        if inputs.seed is not None:
            inputs.seed.fill_(self._folded(number))

    @property
    def is_replayed(self) -> bool:
        """Whether steps have become one CUDA graph."""
        return self.replay is not None and self.replay.captured is not None

    def _replays(self) -> bool:
        """Whether steps are to become one CUDA graph; UsageError where that was asked for and cannot be."""
        wanted = self.config.train.graph
        able = self.is_late and self.device.type == "cuda" and self.optimizer.is_capturable
        experts = (module for module in self.laid.module.modules() if isinstance(module, Experts))
        able = able and not any(block.waits_for_loads for block in experts)
        if wanted and not able:
            raise UsageError(
                "train.graph is true and this step cannot be captured: a graph is for one GPU alone, with a fused "
                "optimiser and experts that are computed together; set train.graph=false, or leave it out"
            )
        return able and wanted is not False

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """The first step, which nobody times, is also counted: what its forward passes keep."""
        by_operator = self.config.plan.recompute == "operators"  # what that keeps, autograd does not know of
        if self.activations_bytes is not None or self.config.train.compile or by_operator:
            yield
            return
        with SavedBytes(self.laid.module.parameters()) as saved:
            self.recorder.live = saved.now
            if isinstance(self.laid, Pipeline):
                laid = self.laid

                def live() -> int:
                    nbytes = saved.now(laid.kept())
                    saved.peak = max(saved.peak, nbytes)  # what may go to the host is kept by others than autograd
                    return nbytes

                self.recorder.live = live
            yield
        self.recorder.live = None
        self.activations_bytes = saved.peak

    @contextlib.contextmanager
    def _counted_live(self) -> Iterator[None]:
        """On a GPU the allocator counts what the actions of a step hold."""
        if self.device.type != "cuda":
            yield
            return
        before = torch.cuda.memory_allocated(self.device)
        self.recorder.live = lambda: torch.cuda.memory_allocated(self.device) - before
        yield
        self.recorder.live = None

    def is_bad(self, loss: float, norm: float) -> bool:
        """Whether a loss or gradient of a step was NaN or infinite."""
        return not (math.isfinite(loss) and math.isfinite(norm))

    def _rate(self, number: int) -> float:
        """As float32 holds it, which a captured step reads it from: launched step by step, the bits are the same."""
        return float(np.float32(rate(number - 1, self.config.train.steps, self.config.optimizer)))

    def _seed(self, number: int) -> Tensor | None:
        """What dropout needs; None without it."""
        if not self.config.model.dropout:
            return None
        # Filled in by a kernel: a copy from the host would wait for all that the GPU has yet to do.
        return torch.full((), self._folded(number), device=self.device)

    def _folded(self, number: int) -> int:
        return fold_seed(self.config.train.seed, number - 1)

    def _count_gradients(self) -> None:
        if self.gradients_bytes is None:
            self.gradients_bytes = storage_bytes(self.gradients.buffers)

    # Data ---------------------------------------------------------------------------------------------------------

    def _take(self, number: int) -> Batch:
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] == number else self.source.fetch(number)

    def _fetch_ahead(self, number: int) -> None:
        if number < self.config.train.steps and not self.source.is_made_of_weights:
            with self.recorder.span("data", DATA):
                self._ready = (number + 1, self.source.fetch(number + 1))

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss of the held-out batches over all replicas; None where there are none."""
        sums = torch.zeros(2, dtype=torch.float64)
        self.laid.module.eval()
        with self.recorder.span("held-out", "evaluate"):
            for batch in self._held_out():
                if batch is None:
                    self.laid.stand_by()
                    continue
                total, targets = self.objective.held_out(*batch.tensors)
                sums += torch.tensor([float(total), float(targets)], dtype=torch.float64) / self.laid.loss_copies
        self.laid.module.train()
        total_sum, targets_sum = self.laid.mesh.comm.all_reduce(sums.numpy()).tolist()
        return float(total_sum / targets_sum) if targets_sum else None

    def _held_out(self) -> Iterator[Microbatch | None]:
        """This replica's held-out batches; where replicas meet in passes, None while others have more."""
        batches = self.source.held_out()
        if not self.laid.meets_in_passes:
            yield from batches
            return
        while True:
            batch = next(batches, None)
            if not self.laid.mesh.comm.max_over_ranks([float(batch is not None)])[0]:
                return
            yield batch
