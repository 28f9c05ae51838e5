"""One training step: a batch, forward, backward, the exchange, the update. What comes between steps is `loop.py`.

A step is a function of its number, the seed and the state a checkpoint keeps. Its batch follows from the number alone,
so a batch can be made again at any time, by whoever asks what it was.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.data.order import Order, rows_of
from tilemesh.data.stream import Corpus, batch
from tilemesh.model.dropout import Place, fold_seed
from tilemesh.parallel.data import Gradients, Step, loss_shard
from tilemesh.parallel.laid import Laid
from tilemesh.train.alone import LateStep, LocalGradients, Pace
from tilemesh.train.config import NO_GRAPH, TrainConfig
from tilemesh.train.graph import StepGraph
from tilemesh.train.memory import Saved, storage_bytes
from tilemesh.train.optimizer import LossScale, Optimizer
from tilemesh.train.record import DATA, Recorder
from tilemesh.train.schedule import rate

Batch = list[tuple[Tensor, Tensor, int]]  # for each microbatch inputs, targets, the first row's place in the batch


class Inputs(NamedTuple):
    """All that differs from step to step."""

    batches: Batch
    seed: Tensor | None
    """Of dropout."""
    rate: float | Tensor


@dataclass(frozen=True)
class Done:
    """What a step came to. On a GPU alone, loss and norm may still be on their way: `read` waits for them."""

    step: int
    loss: float | Tensor
    norm: float | Tensor


def read(done: list[Done]) -> list[tuple[int, float, float]]:
    """(step, loss, norm) of some steps, with one wait for all of them."""
    both = [[torch.as_tensor(value, dtype=torch.float64) for value in (one.loss, one.norm)] for one in done]
    values = torch.stack([torch.stack(pair) for pair in both]).tolist() if both else []
    return [(one.step, loss, norm) for one, (loss, norm) in zip(done, values, strict=True)]


class Stepper:
    """One rank's steps."""

    def __init__(
        self,
        config: TrainConfig,
        laid: Laid,
        corpus: Corpus,
        optimizer: Optimizer,
        recorder: Recorder,
        late: bool | None = None,
    ) -> None:
        self.config, self.laid, self.corpus, self.optimizer, self.recorder = config, laid, corpus, optimizer, recorder
        self.device = next(laid.module.parameters()).device
        self.order = Order(corpus.train.samples(config.context), config.train.seed)
        self.scale = LossScale(config.plan.precision == "fp16")
        if config.train.compile and config.plan.tp > 1:
            laid.seams.stay_out_of_graphs()
        self.loss: Any = torch.compile(laid.loss) if config.train.compile else laid.loss
        alone = config.plan.world == 1 and not self.scale.on
        self.is_late = alone and (self.device.type == "cuda" if late is None else late)
        """Whether steps are not waited for: on one GPU alone, or where asked for."""
        self.gradients: Any = laid.gradients
        if self.is_late:
            if isinstance(laid.gradients, Gradients):
                laid.gradients.close()
            self.gradients = LocalGradients(laid.module.parameters(), config.tokens_per_step)
            laid.gradients = self.gradients  # the buffers for an exchange that never comes are given back
        self.replay: StepGraph | None = None
        if self._replays():
            self.replay = StepGraph(self._move, optimizer.capturing, always=config.train.graph is True)
        self._pace = Pace()
        self._now: Inputs | None = None
        self.steps, self.position = 0, 0  # after so many steps so many samples had been taken
        self._ready: tuple[int, Batch] | None = None
        self.gradients_bytes: int | None = None
        self.activations_bytes: int | None = None
        """What autograd kept for the backward pass of the first step; of compiled code that is not known."""

    def __call__(self, number: int) -> Done:
        """Step `number`, counted from 1."""
        with self.recorder.span("data", DATA):
            batches = self._take(number)
        done = self._late(number, batches) if self.is_late else self._met(number, batches)
        return Done(number, done.loss, done.norm)

    def _met(self, number: int, batches: Batch) -> Step:
        """A step whose ranks meet in its gradients, and whose loss is known when it ends."""
        config, recorder = self.config, self.recorder
        self._passes(batches, self._seed(number))
        if self.device.type == "cuda":
            self._fetch_ahead(number)  # while the GPU is still at it
        with recorder.span("gradients"):
            done: Step = self.gradients.finish(config.optimizer.clip or None)
        overflowed = not math.isfinite(done.norm)
        with recorder.span("optimizer"):
            if not overflowed:
                self.optimizer.step(self._rate(number))
            self.scale.update(overflowed)
            self._count_gradients()
        return done

    def _late(self, number: int, batches: Batch) -> LateStep:
        """A step that nobody waits for, replayed where it can be."""
        if self.replay is None:
            self._now = Inputs(batches, self._seed(number), self._rate(number))
            done = self._move()
        else:
            if self._now is None:
                self._now = Inputs(
                    [(tokens.clone(), targets.clone(), row) for tokens, targets, row in batches],
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

    def _move(self) -> LateStep:
        """A whole step with what `_now` holds."""
        assert self._now is not None
        batches, seed, rate_now = self._now
        self._passes(batches, seed)
        with self.recorder.span("gradients"):
            done: LateStep = self.gradients.finish(
                self.config.optimizer.clip or None, divide=not self.optimizer.divides
            )
        with self.recorder.span("optimizer"):
            self.optimizer.move(rate_now, done.divisor)
            self._count_gradients()
            self.gradients.clear()
        return done

    def _passes(self, batches: Batch, seed: Tensor | None) -> None:
        """Forward and backward for each microbatch."""
        with self._counted():
            for turn, (tokens, targets, row) in enumerate(batches):
                # Without dropout nothing that changes is handed to a compiled model.
                dropping = {} if seed is None else {"dropout_seed": seed, "place": Place(row=row)}
                with self.recorder.span("forward"):
                    total, count = self.loss(tokens, targets, **dropping)
                with self.recorder.span("backward"):
                    is_last = turn == len(batches) - 1
                    self.gradients.backward(total, count, last=is_last, scale=self.scale.value)

    def _write(self, held: Inputs, number: int, batches: Batch) -> None:
        """What is new in a step, into the tensors that a captured step reads."""
        for kept, new in zip(held.batches, batches, strict=True):
            kept[0].copy_(new[0])
            kept[1].copy_(new[1])
        assert isinstance(held.rate, Tensor)
        held.rate.fill_(self._rate(number))
        if held.seed is not None:
            held.seed.fill_(self._folded(number))

    @property
    def is_replayed(self) -> bool:
        """Whether steps have become one CUDA graph."""
        return self.replay is not None and self.replay.captured is not None

    def _replays(self) -> bool:
        """Whether steps are to become one CUDA graph; UsageError where that was asked for and cannot be."""
        wanted = self.config.train.graph
        able = self.is_late and self.device.type == "cuda" and self.optimizer.is_capturable
        if wanted and not able:
            raise UsageError(NO_GRAPH)
        return able and wanted is not False

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """The first step, which nobody times, is also counted: what its forward passes keep."""
        if self.activations_bytes is not None or self.config.train.compile:
            yield
            return
        with Saved(self.laid.module.parameters()) as saved:
            yield
        self.activations_bytes = saved.peak

    def is_bad(self, loss: float, norm: float) -> bool:
        """Whether a step came to no number; with a loss scale a gradient that overflows is only passed over."""
        return not math.isfinite(loss) or (not math.isfinite(norm) and not self.scale.on)

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
            self.gradients_bytes = storage_bytes(one.grad for one in self.laid.module.parameters())

    # Data ---------------------------------------------------------------------------------------------------------

    def _take(self, number: int) -> Batch:
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] == number else self.fetch(number)

    def _fetch_ahead(self, number: int) -> None:
        if number < self.config.train.steps:
            with self.recorder.span("data", DATA):
                self._ready = (number + 1, self.fetch(number + 1))

    def fetch(self, number: int) -> Batch:
        """This replica's microbatches of a step."""
        config, plan, dp = self.config, self.config.plan, self.laid.mesh.dp
        position = self.position + (number - 1 - self.steps) * config.batch
        made = []
        for micro in range(plan.accumulation):
            rows = rows_of(config.batch, plan.dp, dp.index, plan.accumulation, micro)
            tokens = batch(self.corpus.train, self.order, position, rows, config.context)
            made.append((*self.on_device(tokens), rows.start))
        return made

    def on_device(self, tokens: Any) -> tuple[Tensor, Tensor]:
        """Inputs and targets out of sequences of one token more."""
        vocabulary, largest = self.config.model.vocabulary, int(tokens.max())
        if largest >= vocabulary:  # shards from elsewhere; a GPU would end the process without a word on why
            raise UsageError(
                f"the data has token {largest} and the model's vocabulary is {vocabulary}: set model.vocabulary, or "
                "prepare the data with another tokenizer"
            )
        whole = torch.from_numpy(tokens)
        if self.device.type == "cuda":
            whole = whole.pin_memory().to(self.device, non_blocking=True)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss of the first held-out sequences, the same ones each time, divided among the replicas."""
        held, config, mesh = self.corpus.held_out, self.config, self.laid.mesh
        count = min(config.evaluate.sequences, held.samples(config.context))
        if not count:
            return None
        sums = torch.zeros(2, dtype=torch.float64)
        self.laid.module.eval()
        with self.recorder.span("held-out", "evaluate"):
            mine = range(mesh.dp.index, count, mesh.dp.size)
            for begin in range(0, len(mine), config.plan.microbatch):
                rows = mine[begin : begin + config.plan.microbatch]
                tokens = np.stack([held.sample(row, config.context) for row in rows])
                total, targets = self.laid.loss(*self.on_device(tokens))
                sums += torch.tensor([float(total), float(targets)], dtype=torch.float64) / loss_shard(mesh).alike
        self.laid.module.train()
        total_sum, targets_sum = mesh.comm.all_reduce(sums.numpy()).tolist()
        return float(total_sum / targets_sum)
