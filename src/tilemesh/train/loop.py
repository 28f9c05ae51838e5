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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilemesh.comm.runtime.choose import Choices
from tilemesh.core.errors import RunError
from tilemesh.core.shard import Shard
from tilemesh.kernels.context import default_context
from tilemesh.measure.gpu import energy_meter
from tilemesh.measure.sample import Sample
from tilemesh.parallel.gradients import GradientStep, StepFigures, read
from tilemesh.runs import checkpoint
from tilemesh.runs.journal import Journal
from tilemesh.runs.manifest import WEIGHT
from tilemesh.runs.metrics import RESUMED, STEP, STOPPED
from tilemesh.runs.names import CHOICES, bad_batch
from tilemesh.runs.tensors import parts_of, write_tensors
from tilemesh.train.config import TrainConfig
from tilemesh.train.loggers import Loggers
from tilemesh.train.memory import peak_bytes
from tilemesh.train.record import IDLE
from tilemesh.train.result import Saved
from tilemesh.train.schedule import rate
from tilemesh.train.source import order_settings
from tilemesh.train.steps import Stepper

Bytes = dict[str, dict[str, int]]  # axis: operation: bytes

WARM_UP_STEPS = 3  # first ones are slower: pages are touched, connections made, kernels compiled
_SPEED_STEPS = 20  # the shown speed is that of the last ones
_READ_EVERY_S = 1.0  # where steps are not waited for, how often their loss is looked at


@dataclass
class Progress:
    """Where a run stands; what a checkpoint keeps besides tensors."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Samples taken from the data, over all epochs."""
    loss: float = math.nan
    held_out: float | None = None
    best_held_out: float | None = None
    """The lowest held-out loss so far, and the step it was measured after."""
    best_step: int | None = None
    evaluations_since_best: int = 0
    best_of: str = ""
    """The held-out text that the best loss is of (`Source.held_out_fingerprint`); empty in an older checkpoint."""

    def judge(self, min_improvement: float) -> bool:
        """Take note of a held-out loss; whether it is the best so far."""
        if self.held_out is None:
            return False
        least = math.inf if self.best_held_out is None else self.best_held_out - min_improvement
        if self.held_out < least:
            self.best_held_out, self.best_step, self.evaluations_since_best = self.held_out, self.step, 0
            return True
        self.evaluations_since_best += 1
        return False

    def load_best(self, best: Any) -> None:
        """What a checkpoint says of the evaluations before it; nothing in one of an older version."""
        if isinstance(best, dict) and best.get("step") is not None:
            self.best_step, self.best_held_out = int(best["step"]), float(best["held_out"])
            self.evaluations_since_best, self.best_of = int(best["evaluations_since"]), str(best.get("of", ""))

    def forget_best(self) -> None:
        self.best_held_out, self.best_step, self.evaluations_since_best, self.best_of = None, None, 0, ""

    def values(self, stepper: Stepper, fingerprint: str) -> dict[str, Any]:
        steps, of_servers = stepper.optimizer.steps, stepper.optimizer.server_steps
        return {
            "position": self.position, "optimizer_steps": steps, "scale": stepper.scale.state(),
            "loss": self.loss if math.isfinite(self.loss) else None, "data": fingerprint,
            "order": order_settings(stepper.config),
            "best": {
                "step": self.best_step, "held_out": self.best_held_out,
                "evaluations_since": self.evaluations_since_best, "of": self.best_of,
            },
        } | ({"server_steps": of_servers} if steps in of_servers else {})  # fmt: skip


@dataclass
class Timing:
    """Seconds of ordinary steps: without warm-up, evaluation and checkpoints."""

    steps: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """Of these steps, over all replicas, padding not counted."""
    exchange: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    joules: float = 0.0
    """Of this rank's device, where it counts them (`core/energy.py`), in so many steps. A reading takes milliseconds,
    so there is none but where an evaluation or a checkpoint begins and ends."""
    joule_steps: int = 0
    checkpoint_steps: list[float] = field(default_factory=list)
    """Of steps during which a checkpoint was taken or being written, the taking included."""
    first_step_at: float | None = None

    def sample(self) -> Sample | None:
        return Sample.of(self.steps) if self.steps else None


class Interrupt:
    """Notes the signals that ask a run to stop, until it can: at the end of the step."""

    def __init__(
        self, numbers: tuple[signal.Signals, ...] = (), stop_after: int | None = None, max_time_s: float = 0.0
    ) -> None:
        """`max_time_s`: seconds from now after which a run is asked to stop; 0: never."""
        self.stop_requested = False
        self.stop_after = stop_after
        self.end_at = time.monotonic() + max_time_s if max_time_s else math.inf
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.stop_requested = True

    @property
    def is_time_over(self) -> bool:
        return time.monotonic() >= self.end_at

    def stops_at(self, step: int) -> bool:
        """Whether a run that has done this step is to stop."""
        return self.stop_requested or (self.stop_after is not None and step >= self.stop_after) or self.is_time_over

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Loop:
    """One rank's training. Everything is handed in; `run` trains up to the configured step."""

    def __init__(
        self,
        config: TrainConfig,
        stepper: Stepper,
        writer: checkpoint.Writer,
        journal: Journal,
        folder: Path,
        emit: Callable[[Mapping[str, Any]], None],
        earlier: Mapping[str, Any] | None = None,
        collectives: Choices | None = None,
        loggers: Loggers | None = None,
    ) -> None:
        """`earlier`: the choices of the run's earlier part, if any; `collectives`: what `auto` picks now."""
        self.earlier = dict(earlier or {})
        self.collectives = collectives or Choices()
        self._choices: dict[str, Any] = {}
        self.config, self.stepper, self.writer, self.journal = config, stepper, writer, journal
        self.folder, self.emit = folder, emit
        self.recorder, self.laid, self.optimizer = stepper.recorder, stepper.laid, stepper.optimizer
        self.mesh, self.device = stepper.laid.mesh, stepper.device
        self.progress, self.timing, self.energy = Progress(), Timing(), energy_meter(stepper.device)
        self.fingerprint = stepper.source.fingerprint()
        self.loggers = loggers
        self.is_resumed = False
        self.interrupted = False
        self.ended_early = ""
        """Why the run ended before its last step by its own decision."""
        self.saved = Saved(None, folder)
        self.step_bytes: Bytes = {}
        self._unread: list[tuple[int, GradientStep]] = []
        self._alone: list[StepFigures] = []  # of steps since replicas last met
        self._figures: dict[int, StepFigures] = {}  # over all replicas, of steps that are not told yet
        self._lines: list[tuple[int, dict[str, Any]]] = []  # of metrics: those of steps that are not told yet
        self._routed: dict[str, Any] = {}  # of experts, where they were just looked at
        self._began = 0  # the step this attempt goes on from
        self._moved = 1  # steps that the last one brought this rank on: more where others went on without it
        self._read_at = time.perf_counter()
        self._undrawn = 0  # steps whose energy is not read yet
        self._recent: list[tuple[float, float]] = []  # seconds and tokens of the last steps

    @property
    def steps_done(self) -> int:
        """Of this attempt."""
        return self.progress.step - self._began

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Of the held-out text; None where nobody knows what the tokens mean."""
        return self.stepper.source.held_out_bytes_per_token()

    def method_figures(self) -> dict[str, Any]:
        """What the method came to, besides one exchange of gradients per step; nothing where it is that."""
        return {**self.laid.gradients.figures(), **self.optimizer.figures()}

    # The run ------------------------------------------------------------------------------------------------------

    def run(self, interrupt: Interrupt) -> None:
        """Train to the last step, or until somebody asks to stop; then the last checkpoint is written, or failed."""
        config, progress = self.config, self.progress
        self._began, self._read_at = progress.step, time.perf_counter()
        self.energy.take()
        self._end_early()
        if self.is_resumed and progress.step < config.train.steps and not self.ended_early:
            self.journal.add(RESUMED, progress.step, plan=config.plan.to_dict())
        before = None  # the clock when the steps that are not read yet began
        is_counted = False
        while progress.step < config.train.steps and not self.interrupted and not self.ended_early:
            before, bytes_before = before or self.recorder.parts_s(), self.recorder.bytes_by_axis()
            was_writing = self.writer.step is not None
            stop = self.step(interrupt)
            self.timing.first_step_at = self.timing.first_step_at or time.time()
            if not is_counted and not self.stepper.overflowed:
                # Every step sends the same, unless it is made again: the first one's bytes are any one's.
                self.step_bytes, is_counted = _difference(self.recorder.bytes_by_axis(), bytes_before), True
            is_last = progress.step == config.train.steps
            due = self._is_due(config.checkpoint.every) or is_last or stop
            looks = self._is_due(config.evaluate.every) or is_last
            waits = not self.stepper.is_late or self.steps_done <= WARM_UP_STEPS
            if due or looks or waits or time.perf_counter() - self._read_at > _READ_EVERY_S:
                self._between(before, due, looks, is_ordinary=not (due or was_writing))
                before = None
            self.interrupted = stop and not is_last
        self._settle_checkpoint()
        self.writer.close()

    def step(self, interrupt: Interrupt | None = None) -> bool:
        """One step and the meeting after it; whether anybody was asked to stop."""
        progress, recorder = self.progress, self.recorder
        recorder.step = progress.step + 1
        recorder.trace.on = recorder.trace.on and progress.step - self._began < self.config.train.trace_steps
        with recorder.in_step():
            result = self.stepper(progress.step + 1)
            if self.stepper.overflowed and self.mesh.comm.rank == 0:
                self._tell_overflow(progress.step + 1, self.stepper.overflowed)
            reached = self.optimizer.reached(progress.step + 1)
            self._moved = reached - progress.step
            if self._moved > 1:
                self.writer.say(
                    f"LATE: this rank was waited for no more in step {progress.step + 1} and goes on after step "
                    f"{reached}; the steps in between are those of the others alone"
                )
            progress.step = reached
            progress.position += self.config.batch * self._moved
            self._unread.append((progress.step, result))
            is_asked = self.optimizer.is_asked_to_stop or (interrupt is not None and interrupt.stops_at(progress.step))
            # Replicas that step alone wait for nobody: who is asked to stop does so when they meet.
            stops = self._pulse(is_asked) if self.laid.gradients.meets(progress.step) else False
            if stops:
                self.optimizer.stop()
            return stops

    def read(self) -> list[StepFigures]:
        """Loss, norm and rate of the steps since the last call; a loss or norm of NaN or infinity ends the run here."""
        steps, self._unread = self._unread, []
        numbers = read([result for _, result in steps])
        values = [
            StepFigures(step, loss, norm, result.tokens)
            for (step, result), (loss, norm) in zip(steps, numbers, strict=True)
        ]
        for value in values:
            if self.stepper.is_bad(value.loss, value.norm):
                self._refuse(value.step, value.loss, value.norm)
        self._alone += values
        if self._alone and self.laid.gradients.meets(self._alone[-1].step):
            self._figures |= {figures.step: figures for figures in self.laid.gradients.over_replicas(self._alone)}
            self._alone = []
        if values:
            last = values[-1] if self._alone else self._figures[values[-1].step]
            self.progress.loss = last.loss if last.tokens else self.progress.loss
        return values

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.progress.step // every > (self.progress.step - self._moved) // every

    def _between(self, before: tuple[float, float, float], due: bool, looks: bool, is_ordinary: bool) -> None:
        """What comes between two steps: the loss is read, perhaps the held-out text looked at, a checkpoint taken."""
        values = self.read()
        seconds = (time.perf_counter() - self._read_at) / len(values)
        self._draw(len(values), is_end=due or looks)
        after = self.recorder.parts_s()
        self.progress.held_out = self.stepper.evaluate() if looks else None
        model = self.config.model
        self._routed = self.stepper.routers.figures(model.expert_layers, model.experts) if looks else {}
        due = self._judge() or due
        if due:
            taking = time.perf_counter()
            self._begin_checkpoint()
            seconds += (time.perf_counter() - taking) / len(values)
        parts = [(now - then) / len(values) for now, then in zip(after, before, strict=True)]
        self._note(values, seconds, parts, is_ordinary and not due)
        if due or looks:
            self.energy.take()  # what these drew is of no step
        self._read_at = time.perf_counter()

    def _draw(self, steps: int, is_end: bool) -> None:
        """Count what these steps drew, from the end of the warm-up on, when a stretch of steps ends."""
        if self.steps_done <= WARM_UP_STEPS:
            self.energy.take()
            return
        self._undrawn += steps
        if is_end:
            if (joules := self.energy.take()) is not None:
                self.timing.joules += joules
                self.timing.joule_steps += self._undrawn
            self._undrawn = 0

    def _judge(self) -> bool:
        """What follows from a held-out loss, which all ranks know alike; whether a checkpoint is to be written now."""
        progress = self.progress
        if progress.held_out is None:
            return False
        text = self.stepper.source.held_out_fingerprint()
        if progress.best_of not in ("", text):
            if self.mesh.comm.rank == 0:
                self.writer.say(
                    f"OTHER TEXT IS HELD OUT THAN BEFORE: the best loss so far, {progress.best_held_out:.4f} of step "
                    f"{progress.best_step}, is of what was, and no later one is compared with it"
                )
            progress.forget_best()
        progress.best_of = text
        if progress.judge(self.config.evaluate.min_improvement) and self.config.checkpoint.keep_best:
            return True
        return self._end_early()

    def _end_early(self) -> bool:
        """Whether enough evaluations brought no lower loss, after which the run ends; a resumed one has ended then."""
        progress, patience = self.progress, self.config.evaluate.patience
        if not patience or progress.evaluations_since_best < patience:
            return False
        if progress.step < self.config.train.steps:
            best = progress.best_held_out
            lower = "that is a number" if best is None else f"below {best:.4f}, that of step {progress.best_step},"
            self.ended_early = (
                f"early stopping: no held-out loss {lower} in {progress.evaluations_since_best} evaluations "
                "(evaluate.patience)"
            )
            self.optimizer.stop()
        return True

    # Meeting ------------------------------------------------------------------------------------------------------

    def _pulse(self, is_asked: bool) -> bool:
        """Meet the other ranks; returns whether anybody was asked to stop, and settles a checkpoint that all wrote."""
        state = self.writer.state
        failed = state == checkpoint.FAILED
        mine = np.array([is_asked, failed or state == checkpoint.WRITTEN, failed], np.float64)
        with self.recorder.span("meet", IDLE):
            stops, finished, failures = self.mesh.comm.all_reduce(mine).tolist()
        if self.writer.step is not None and round(finished) == self.mesh.comm.size:
            self.writer.settle(failures > 0)
        return bool(stops > 0)

    def checkpoint(self, writer: checkpoint.Writer) -> None:
        """Write one by this writer, and wait until all ranks have, or could not."""
        usual, self.writer = self.writer, writer
        try:
            self._begin_checkpoint()
            self._settle_checkpoint()
            writer.close()
        finally:
            self.writer = usual

    def _begin_checkpoint(self) -> None:
        self._settle_checkpoint()
        self.stepper.source.before_checkpoint()
        with self.recorder.span("checkpoint", "checkpoint"):
            parts = [part for name, shard, tensor in self._kept() for part in parts_of(name, shard, tensor)]
            values = self.progress.values(self.stepper, self.fingerprint)
            is_best = self.config.checkpoint.keep_best and self.progress.step == self.progress.best_step
            self.writer.begin(self.progress.step, parts, values, is_best=is_best)
        self.write_choices()

    def _kept(self) -> Iterator[tuple[str, Shard, torch.Tensor]]:
        """What the optimizer and the method of exchange keep."""
        for name, shard, tensor in self.optimizer.tensors():
            differs = self.laid.gradients.states_differ and not name.startswith(f"{WEIGHT}:")
            yield (name, shard.by_replica(), tensor[None]) if differs else (name, shard, tensor)
        yield from self.laid.gradients.remembered()

    def write_choices(self) -> None:
        """What `auto` has picked so far, and what an earlier part of this run had: a run that goes on keeps to it."""
        choices = {
            "collectives": {**self.earlier.get("collectives", {}), **self.collectives.table},
            "graph": self.stepper.is_replayed,
            "kernels": self.config.kernels_on(self.device.type).words(),
            "matmul": {**self.earlier.get("matmul", {}), **default_context().picks("matmul")},
        }
        if choices != self._choices:
            self.journal.write(CHOICES, choices)
            self._choices = choices

    def _settle_checkpoint(self) -> None:
        """Wait until the checkpoint under way is written everywhere, or has failed."""
        while self.writer.step is not None:
            self._pulse(False)
            if self.writer.step is not None:
                self.recorder.at("waiting for the last checkpoint to be written")
                time.sleep(0.01)

    # Telling ------------------------------------------------------------------------------------------------------

    def _note(self, values: list[StepFigures], seconds: float, parts: list[float], is_ordinary: bool) -> None:
        """Keep and show what these steps came to; `seconds` and `parts` are of each of them."""
        config, progress, timing = self.config, self.progress, self.timing
        exchange, waited, idle = parts
        tokens = sum(self.stepper.source.tokens(value.step) for value in values) / len(values)
        self._recent = [*self._recent[-_SPEED_STEPS + 1 :], (seconds, tokens)]
        if values[0].step > WARM_UP_STEPS and len(self._recent) > WARM_UP_STEPS:
            if is_ordinary:
                timing.steps.append(seconds)
                timing.tokens.append(tokens)
                # The meeting is an exchange that carries nothing: its seconds are waiting.
                timing.exchange.append(max(0.0, exchange - idle))
                timing.data.append(waited)
                timing.idle.append(idle)
            else:
                timing.checkpoint_steps.append(seconds)
        memory = peak_bytes(self.device)
        median, _ = sorted(self._recent)[len(self._recent) // 2]
        tokens_per_s = sum(count for _, count in self._recent) / len(self._recent) / median
        first = len(self._recent) == 1
        for step, loss in ((value.step, value.loss) for value in values):
            line: dict[str, Any] = {
                "rate": rate(step - 1, config.train.steps, config.optimizer), "seconds": seconds,
                "tokens_per_s": tokens_per_s, "exchange_s": exchange, "data_s": waited,
                "memory_bytes": memory, **self.stepper.source.figures(step, loss),
            }  # fmt: skip
            if step == progress.step:
                line |= self._routed
            if progress.held_out is not None and step == progress.step:
                line["held_out"] = progress.held_out
                if self.bytes_per_token:
                    line["bits_per_byte"] = progress.held_out / math.log(2) / self.bytes_per_token
            self._lines.append((step, line))
        if self._alone:  # what the other replicas' steps came to is known when they meet
            return
        for step, line in self._lines:
            figures = self._figures.pop(step)
            line = {"norm": figures.norm if math.isfinite(figures.norm) else None, **line}
            if figures.tokens:  # a batch in which no target counts, of long questions say, has no loss
                line = {"loss": figures.loss, **line}
                self.recorder.trace.counter("loss", figures.loss)
            self.journal.add(STEP, step, **line)
            if self.loggers is not None:
                self.loggers.add(step, line)
        self._lines = []
        left = (config.train.steps - progress.step) * median
        self.emit(
            {
                "kind": STEP,
                "step": step,
                **line,
                "steps": config.train.steps,
                "left_s": left,
                "first": first,
                "counts": self.stepper.source.counts,
            }
        )

    def _tell_overflow(self, step: int, scales: list[float]) -> None:
        tried = " and ".join(f"{scale:,.0f}" for scale in scales)
        self.writer.say(
            f"OVERFLOW: gradients of step {step} overflowed in fp16 at a loss scale of {tried}; it was made again "
            f"at {scales[-1] / 2:,.0f}"
        )

    def _refuse(self, step: int, loss: float, norm: float) -> None:
        """A step that came to no number: keep the batch for whoever looks into it, and stop everywhere."""
        name = bad_batch(step, self.mesh.part_of_batch())
        if self.mesh.is_first_of_part():
            source = self.stepper.source
            columns = zip(*(tensors for tensors, _ in source.fetch(step)), strict=True)
            batch = {name: torch.cat(column).cpu() for name, column in zip(source.names, columns, strict=True)}
            write_tensors(self.folder / name, batch)
        what = f"loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        advice = "a smaller optimizer.lr or optimizer.clip may help"
        self.journal.add(STOPPED, step, why=f"{what}; the batch is kept beside the metrics; {advice}")
        if self.mesh.comm.rank:
            time.sleep(1.0)  # rank 0 speaks for all; this one is only heard if it cannot
        raise RunError(
            f"step {step}: {what}; stopped, the batch is kept in {self.folder / bad_batch(step, '*')}; {advice}"
        )


def _difference(now: Bytes, then: Bytes) -> Bytes:
    """What was moved in between; what was not is left out."""
    differences = {
        axis: {name: nbytes - then.get(axis, {}).get(name, 0) for name, nbytes in moved.items()}
        for axis, moved in now.items()
    }
    return {axis: {name: nbytes for name, nbytes in moved.items() if nbytes} for axis, moved in differences.items()}
