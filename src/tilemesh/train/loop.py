"""The loop: from a laid model and its data to trained weights, one step after the other.

The one idea: at the end of every step the ranks meet once, in a few numbers (the pulse): who was asked to stop, whose
part of a checkpoint is on the disk, whose is not. Whatever follows from these is decided alike everywhere, so no rank
ever waits for one that went another way. Everything a step does is a function of the step's number, the seed and the
state that a checkpoint keeps; that is why a resumed run is the run that never stopped.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilemesh.core.errors import RunError
from tilemesh.measure.sample import Sample
from tilemesh.model.dropout import Place, fold_seed
from tilemesh.parallel.data import Step
from tilemesh.parallel.laid import Laid
from tilemesh.train import checkpoint, data
from tilemesh.train.config import TrainConfig
from tilemesh.train.data import Corpus
from tilemesh.train.folder import Journal
from tilemesh.train.memory import peak_bytes
from tilemesh.train.optimizer import LossScale, Optimizer
from tilemesh.train.order import Order, rows_of
from tilemesh.train.record import DATA, IDLE, Recorder
from tilemesh.train.schedule import rate

Bytes = dict[str, dict[str, int]]  # axis: operation: bytes

_WARM_UP_STEPS = 3  # first ones are slower: pages are touched, connections made, kernels compiled
_SPEED_STEPS = 20  # the shown speed is that of the last ones


@dataclass
class Progress:
    """Where a run stands; what a checkpoint keeps besides tensors."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Samples taken from the data, over all epochs."""
    loss: float = math.nan
    held_out: float | None = None

    def values(self, scale: LossScale, optimizer: Optimizer, fingerprint: str) -> dict[str, Any]:
        return {
            "position": self.position, "optimizer_steps": optimizer.steps, "scale": scale.state(),
            "loss": self.loss if math.isfinite(self.loss) else None, "data": fingerprint,
        }  # fmt: skip


@dataclass
class Timing:
    """Seconds of ordinary steps: without warm-up, evaluation and checkpoints."""

    steps: list[float] = field(default_factory=list)
    exchange: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    checkpoint_steps: list[float] = field(default_factory=list)
    """Of steps during which a checkpoint was taken or being written, the taking included."""
    first_step_at: float | None = None

    def sample(self) -> Sample | None:
        return Sample.of(self.steps) if self.steps else None


class Interrupt:
    """Notes the signals that ask a run to stop, until it can: at the end of the step."""

    def __init__(self, numbers: tuple[signal.Signals, ...] = (), stop_after: int | None = None) -> None:
        self.asked = False
        self.stop_after = stop_after
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.asked = True

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Loop:
    """One rank's training. Everything is handed in; `run` trains up to the configured step."""

    def __init__(
        self,
        config: TrainConfig,
        laid: Laid,
        corpus: Corpus,
        optimizer: Optimizer,
        writer: checkpoint.Writer,
        recorder: Recorder,
        journal: Journal,
        folder: Path,
        emit: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.config, self.laid, self.corpus, self.optimizer = config, laid, corpus, optimizer
        self.writer, self.recorder, self.journal, self.folder, self.emit = writer, recorder, journal, folder, emit
        self.mesh = laid.mesh
        self.device = next(laid.module.parameters()).device
        self.order = Order(corpus.train.samples(config.context), config.train.seed)
        self.scale = LossScale(config.plan.precision == "fp16")
        self.progress, self.timing = Progress(), Timing()
        self.fingerprint = corpus.train.fingerprint()
        self.loss = torch.compile(laid.loss) if config.train.compile else laid.loss
        self.interrupted = False
        self._recent: list[float] = []
        self.step_bytes: dict[str, dict[str, int]] = {}
        self._ready: tuple[int, list[tuple[Tensor, Tensor, int]]] | None = None

    # The run ------------------------------------------------------------------------------------------------------

    def run(self, interrupt: Interrupt) -> None:
        config, progress = self.config, self.progress
        while progress.step < config.train.steps and not self.interrupted:
            began = time.perf_counter()
            before, bytes_before = self._clock(), self.recorder.bytes_by_axis()
            was_writing = self.writer.step is not None
            done = self._train_step()
            stop = self._pulse(interrupt.asked or progress.step == interrupt.stop_after)
            seconds = time.perf_counter() - began
            if self.timing.first_step_at is None:
                self.timing.first_step_at = time.time()
                # Every step sends the same: the first one's bytes are any one's.
                self.step_bytes = _difference(self.recorder.bytes_by_axis(), bytes_before)
            is_last = progress.step == config.train.steps
            due = self._is_due(config.checkpoint.every) or is_last or stop
            if self._is_due(config.evaluate.every) or is_last:
                progress.held_out = self.evaluate()
            if due:
                taking = time.perf_counter()
                self._checkpoint()
                seconds += time.perf_counter() - taking
            self._note(done, seconds, before, is_ordinary=not (due or was_writing))
            self.interrupted = stop and not is_last
        self._settle_checkpoint()
        self.writer.close()

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _train_step(self) -> Step:
        """Forward, backward, exchange and update; afterwards one more step is done."""
        config, recorder, progress = self.config, self.recorder, self.progress
        recorder.step = progress.step + 1
        recorder.trace.on = recorder.trace.on and progress.step < config.train.trace_steps
        with recorder.span("data", DATA):
            batches = self._take(progress.step)
        seed = fold_seed(config.train.seed, progress.step)
        for turn, (tokens, targets, row) in enumerate(batches):
            with recorder.span("forward"):
                total, count = self.loss(tokens, targets, dropout_seed=seed, place=Place(row=row))
            with recorder.span("backward"):
                is_last = turn == len(batches) - 1
                self.laid.gradients.backward(total, count, last=is_last, scale=self.scale.value)
        if self.device.type == "cuda" and progress.step + 1 < config.train.steps:
            with recorder.span("data", DATA):  # while the GPU is still at it
                self._ready = (progress.step + 1, self._fetch(progress.step + 1))
        with recorder.span("gradients"):
            done = self.laid.gradients.finish(config.optimizer.clip or None)
        overflowed = not math.isfinite(done.norm)
        if not math.isfinite(done.loss) or (overflowed and not self.scale.on):
            self._refuse(done, batches)
        with recorder.span("optimizer"):
            if not overflowed:
                self.optimizer.step(rate(progress.step, config.train.steps, config.optimizer))
            self.scale.update(overflowed)
        progress.step += 1
        progress.position += config.batch
        progress.loss, progress.held_out = done.loss, None
        return done

    # Data ---------------------------------------------------------------------------------------------------------

    def _take(self, step: int) -> list[tuple[Tensor, Tensor, int]]:
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] == step else self._fetch(step)

    def _fetch(self, step: int) -> list[tuple[Tensor, Tensor, int]]:
        """This replica's microbatches of a step: inputs, targets and the first row's place in the batch."""
        config, plan = self.config, self.config.plan
        position = self.progress.position + (step - self.progress.step) * config.batch
        made = []
        for micro in range(plan.accumulation):
            rows = rows_of(config.batch, plan.dp, self.mesh.dp.index, plan.accumulation, micro)
            tokens = data.batch(self.corpus.train, self.order, position, rows, config.context)
            made.append((*self._on_device(tokens), rows.start))
        return made

    def _on_device(self, tokens: Any) -> tuple[Tensor, Tensor]:
        whole = torch.from_numpy(tokens)
        if self.device.type == "cuda":
            whole = whole.pin_memory().to(self.device, non_blocking=True)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss of the first held-out sequences, the same ones each time, divided among the replicas."""
        held, config, dp = self.corpus.held_out, self.config, self.mesh.dp
        count = min(config.evaluate.sequences, held.samples(config.context))
        if not count:
            return None
        sums = torch.zeros(2, dtype=torch.float64)
        self.laid.module.eval()
        with self.recorder.span("held-out", "evaluate"):
            mine = range(dp.index, count, dp.size)
            for begin in range(0, len(mine), config.plan.microbatch):
                rows = mine[begin : begin + config.plan.microbatch]
                tokens = np.stack([held.sample(row, config.context) for row in rows])
                total, targets = self.laid.loss(*self._on_device(tokens))
                sums += torch.tensor([float(total), float(targets)], dtype=torch.float64) / self.mesh.tp.size
        self.laid.module.train()
        total_s, count_s = self.mesh.comm.all_reduce(sums.numpy()).tolist()
        return float(total_s / count_s)

    # Meeting ------------------------------------------------------------------------------------------------------

    def _pulse(self, asked: bool) -> bool:
        """Meet the other ranks; returns whether anybody was asked to stop, and settles a checkpoint that all wrote."""
        state = self.writer.state
        failed = state == checkpoint.FAILED
        mine = np.array([asked, failed or state == checkpoint.WRITTEN, failed], np.float64)
        with self.recorder.span("meet", IDLE):
            stops, finished, failures = self.mesh.comm.all_reduce(mine).tolist()
        if self.writer.step is not None and round(finished) == self.mesh.comm.size:
            self.writer.settle(failures > 0)
        return bool(stops > 0)

    def _checkpoint(self) -> None:
        self._settle_checkpoint()
        with self.recorder.span("checkpoint", "checkpoint"):
            parts = [
                part
                for kind, name, tensor in self.optimizer.tensors()
                for part in checkpoint.parts_of(f"{kind}:{name}", self.laid.shards[name], tensor)
            ]
            values = self.progress.values(self.scale, self.optimizer, self.fingerprint)
            self.writer.begin(self.progress.step, parts, values)

    def _settle_checkpoint(self) -> None:
        """Wait until the checkpoint under way is written everywhere, or has failed."""
        while self.writer.step is not None:
            self._pulse(False)
            if self.writer.step is not None:
                self.recorder.at("waiting for the last checkpoint to be written")
                time.sleep(0.01)

    # Telling ------------------------------------------------------------------------------------------------------

    def _clock(self) -> tuple[float, float, float]:
        seconds = self.recorder.seconds
        return self.recorder.exchange_s(), seconds.get(DATA, 0.0), seconds.get(IDLE, 0.0)

    def _note(self, done: Step, seconds: float, before: tuple[float, float, float], is_ordinary: bool) -> None:
        config, progress = self.config, self.progress
        exchange, waited, idle = (now - then for now, then in zip(self._clock(), before, strict=True))
        self._recent = [*self._recent[-_SPEED_STEPS + 1 :], seconds]
        timing = self.timing
        if progress.step > _WARM_UP_STEPS and len(self._recent) > _WARM_UP_STEPS:
            if is_ordinary:
                timing.steps.append(seconds)
                # The meeting is an exchange that carries nothing: its seconds are waiting.
                timing.exchange.append(max(0.0, exchange - idle))
                timing.data.append(waited)
                timing.idle.append(idle)
            else:
                timing.checkpoint_steps.append(seconds)
        memory = peak_bytes(self.device)
        median = sorted(self._recent)[len(self._recent) // 2]
        line = {
            "kind": "step", "step": progress.step, "loss": done.loss, "norm": _finite(done.norm),
            "rate": rate(progress.step - 1, config.train.steps, config.optimizer), "seconds": seconds,
            "tokens_per_s": config.tokens_per_step / median, "exchange_s": exchange, "data_s": waited,
            "memory_bytes": memory,
        }  # fmt: skip
        if progress.held_out is not None:
            line["held_out"] = progress.held_out
        self.journal.add(**line)
        self.recorder.trace.counter("loss", done.loss)
        left = (config.train.steps - progress.step) * median
        first = len(self._recent) == 1
        self.emit({**line, "steps": config.train.steps, "left_s": left, "first": first})

    def _refuse(self, done: Step, batches: list[tuple[Tensor, Tensor, int]]) -> None:
        """A loss that is no number: keep the batch for whoever looks into it, and stop everywhere."""
        step = self.progress.step + 1
        name = f"bad-batch-step-{step:08d}-replica-{self.mesh.dp.index}.safetensors"
        if self.mesh.tp.index == 0:
            tokens, targets, _ = zip(*batches, strict=True)
            whole = {"tokens": torch.cat(tokens).cpu(), "targets": torch.cat(targets).cpu()}
            checkpoint.write_tensors(self.folder / name, whole)
        what = f"loss is {done.loss}" if not math.isfinite(done.loss) else f"the gradient's norm is {done.norm}"
        if self.mesh.comm.rank:
            time.sleep(1.0)  # rank 0 speaks for all; this one is only heard if it cannot
        raise RunError(
            f"step {step}: {what}; stopped, the batch is kept in {self.folder}/bad-batch-step-{step:08d}-*; "
            f"a smaller optimizer.lr or optimizer.clip may help"
        )


def _difference(now: Bytes, then: Bytes) -> Bytes:
    """What was moved in between; what was not is left out."""
    found = {
        axis: {name: nbytes - then.get(axis, {}).get(name, 0) for name, nbytes in moved.items()}
        for axis, moved in now.items()
    }
    return {axis: {name: nbytes for name, nbytes in moved.items() if nbytes} for axis, moved in found.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
