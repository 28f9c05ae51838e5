"""What a run would be, before anything is started or written: model, layout, data, memory, time and files.

`preview` makes the same checks as `fit`, in the same order, asks the planner the same question, and returns values; the
command prints them (`tilemesh train --dry-run`). No torch: nothing is computed.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilemesh.compress.config import aims
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.data.config import STDLIB
from tilemesh.data.documents import misnamed_words
from tilemesh.launch.start import choose_transport
from tilemesh.measure.machine import stamp, usable_gpus
from tilemesh.measure.row import Row
from tilemesh.model.adapter import adapter_parameters
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.weights import count_parameters, parameter_shapes
from tilemesh.runs.names import CHECKPOINTS, CONFIG, METRICS, PAGE, RUNS, SERVER_RECORDS, SUMMARY, TRACE
from tilemesh.train.check import TRAINING, JobRequest, RankProgram, check_job
from tilemesh.train.config import TrainConfig
from tilemesh.train.load import settled
from tilemesh.train.rows import least_bytes
from tilemesh.train.rules import kept_share, kinds_of

_NOT_RUN = "a dry run measures nothing"


@dataclass(frozen=True)
class Preview:
    """What would run. `predicted` is what the planner says, as predicted.json would hold it."""

    config: TrainConfig
    device: str
    transport: str
    folder: str
    """Where the run would be written."""
    done: int
    """Steps that the run to resume has made."""
    init: str
    checkpoint_bytes: int
    """Of one checkpoint: the weights that are stepped and the optimizer's state, in one piece."""
    free_bytes: int
    """On the disk of that folder."""
    predicted: dict[str, Any]

    @property
    def steps(self) -> int:
        """That are left to do."""
        return max(0, self.config.train.steps - self.done)

    @property
    def seconds(self) -> float | None:
        """Of all steps left, as predicted; start, evaluation and checkpoints come on top."""
        step_s = self.predicted.get("step_time_s")
        return None if step_s is None else float(step_s) * self.steps

    @property
    def disk_bytes(self) -> int:
        """The most that checkpoints take at one time: those kept, the best one and the one that is being written."""
        kept, before = self.config.checkpoint, max(0, self.steps - 1)
        periods = [kept.every, self.config.evaluate.every * kept.keep_best]
        times = [before // every for every in periods if every]
        if len(times) > 1:  # one that is both is written once
            times.append(-(before // math.lcm(*periods)))
        return self.checkpoint_bytes * min(kept.keep + kept.keep_best + 1, 1 + sum(times))

    def lines(self) -> list[tuple[str, str]]:
        """What there is to say, with a word for each subject."""
        lines = [
            ("model", model_words(self.config.model)),
            ("data", self._data()),
            ("layout", f"{self.config.plan.describe(self.config.servers)}; on {self.device}, {self.transport}"),
            ("steps", self._steps()),
            *self._predictions(),
            ("files", self._files()),
        ]
        lines[2:2] = aims(self.config.compress, self.config.distill)
        if self.init:
            lines.insert(1, ("weights", f"begin with those in {self.init}"))
        return lines

    def rows(self) -> list[Row]:
        """The predictions as rows, without what was measured."""
        case = {"ranks": self.config.ranks, "batch": self.config.batch, "context": self.config.context}
        figures = (
            ("step time", "s", "step_time_s"), ("throughput", "tokens/s", "tokens_per_s"), ("MFU", "fraction", "mfu"),
            ("peak memory per rank", "B", "memory_bytes"),
        )  # fmt: skip
        why = {"measured": _NOT_RUN, "limit": _NOT_RUN, "peers": _NOT_RUN}
        rows = []
        for name, unit, key in figures:
            value = self.predicted.get(key)
            missing = why if value is not None else {**why, "predicted": str(self.predicted.get("missing"))}
            rows.append(
                Row(
                    name=name, case=case, unit=unit, predicted=value, measured=None, limit=None, missing=missing,
                    predicted_range=_ends(self.predicted, key), **stamp(),
                )
            )  # fmt: skip
        return rows

    def _data(self) -> str:
        data = self.config.data
        total = sum(weight for _, weight in data.parts)
        names = {STDLIB: "this Python's standard library"}
        sources = [
            f"{weight / total:.0%} " * bool(data.mixture) + names.get(part.source, part.source)
            for part, weight in data.parts
        ]
        tokens = "bytes as tokens" if data.tokenizer is None else f"tokens of {data.tokenizer}"
        words = f"{' and '.join(sources)}, {tokens}, {data.held_out:.1%} held out".replace("%", " %")
        misnamed = misnamed_words(data)
        return f"{words}; {misnamed}" if misnamed else words

    def _steps(self) -> str:
        config, per_step = self.config, self.config.tokens_per_step
        again = f" (after step {self.done})" if self.done else ""
        return (
            f"{self.steps:,}{again} of {config.batch} x {config.context} = {per_step:,} tokens, "
            f"{self.steps * per_step:,} tokens in all; {config.optimizer.name}, learning rate {config.optimizer.lr:g}"
        )

    def _predictions(self) -> list[tuple[str, str]]:
        """Memory and time, or why the planner says nothing of them."""
        if "missing" in self.predicted:
            adapters = adapter_parameters(self.config.model, self.config.lora) if self.config.lora.rank else 0
            share = stored_share(self.config) if adapters else 1.0
            kept = kept_share(self.config.optimizer, self.config.plan.precision)
            states = format_bytes(least_bytes(self.config.model, self.config.plan, adapters, share, kept))
            why = f"not predicted: {self.predicted['missing']}"
            known = f"{states} per rank for weights, gradients and optimizer states; activations {why}"
            return [("memory", known), ("time", why)]
        memory, seconds = self.predicted["memory"], self.seconds
        kinds = {key.removesuffix("_bytes"): size for key, size in memory.items() if size}
        parts = ", ".join(
            f"{kind} {format_bytes(size)}" for kind, size in kinds.items() if kind not in ("total", "usable", "later")
        )
        usable = memory["usable_bytes"]
        fits = "" if self.predicted["fits"] else ": DOES NOT FIT; more ranks, tp or recomputation need less"
        assert seconds is not None
        return [
            ("memory", f"{format_bytes(memory['total_bytes'])} per rank of {format_bytes(usable)}{fits} ({parts})"),
            (
                "time",
                f"{format_seconds(self.predicted['step_time_s'])} per step{_between(self.predicted, 'step_time_s')}, "
                f"{self.predicted['tokens_per_s']:,.0f} tokens/s, {format_seconds(seconds)} for all steps; start, "
                "evaluation and checkpoints come on top",
            ),
        ]

    def _files(self) -> str:
        few = "" if self.disk_bytes <= self.free_bytes else ": TOO LITTLE SPACE"
        every = self.config.checkpoint.every
        when = f"every {every} steps, the newest {self.config.checkpoint.keep} kept" if every else "at the end"
        when += ", and the best" * self.config.checkpoint.keep_best
        records = f"{SERVER_RECORDS}/, " if self.config.servers else ""
        return (
            f"{self.folder}/: {CONFIG}, {METRICS}, {SUMMARY}, {TRACE}, {PAGE}, {records}{CHECKPOINTS}/ ({when}; "
            f"{format_bytes(self.checkpoint_bytes)} each, at most {format_bytes(self.disk_bytes)} at a time; "
            f"{format_bytes(self.free_bytes)} free{few})"
        )


def _ends(predicted: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    low, high = predicted.get("ranges", {}).get(name) or (None, None)
    return None if low is None or high is None else (low, high)


def _between(predicted: Mapping[str, Any], name: str) -> str:
    """Where eight of ten measurements are expected."""
    ends = _ends(predicted, name)
    return "" if ends is None else f" ({format_seconds(ends[0])} to {format_seconds(ends[1])})"


def stored_share(config: TrainConfig) -> float:
    """What the frozen weights below adapters take of the bytes that dense ones would."""
    from tilemesh.model.huggingface import stored_kinds  # late: torch
    from tilemesh.model.kinds import open_codes, projections, put_kinds
    from tilemesh.model.transformer import Transformer
    from tilemesh.train.optimizer import stored_dtype

    assert config.lora.base is not None
    model = Transformer(config.model, device="meta", dtype=stored_dtype(config.plan.precision))
    dense = sum(parameter.nbytes for parameter in model.parameters())
    put_kinds(model, stored_kinds(config.lora.base))
    for _, layer in projections(model):
        if config.plan.tp > 1:  # as `lay` does
            open_codes(layer)
    return sum(parameter.nbytes for parameter in model.parameters()) / dense


def preview(
    config: TrainConfig,
    *,
    run: str | Path | None = None,
    name: str = "run",
    resume: str | Path | None = None,
    init: str | Path | None = None,
    transport: str = "auto",
    restarts: int = 0,
    stop_after: int | None = None,
    program: RankProgram = TRAINING,
    min_ranks: int | None = None,
) -> Preview:
    """What `fit` with the same arguments would do, or its refusal. Starts nothing and writes nothing."""
    config = settled(config)
    request = JobRequest(run, name, resume, init, transport, restarts, stop_after, program, min_ranks)
    check_job(config, request)
    gpus = usable_gpus() if config.train.device != "cpu" else ()
    folder = str(resume or run or f"{RUNS}/YYYYMMDD-HHMMSS-{name}")
    if config.ranks + program.beside == 1:
        how = "one process"
    else:
        how = "torch" if gpus and transport == "auto" else choose_transport(transport)
        how = f"ranks exchange through {'MPI' if how == 'mpi' else 'torch.distributed'}"
    return Preview(
        config,
        device=gpus[0] if gpus else "CPU",
        transport=how,
        folder=folder,
        done=request.steps_done,
        init="" if init is None else str(init),
        checkpoint_bytes=checkpoint_bytes(config),
        free_bytes=_free_bytes(Path(folder)),
        predicted=program.predict(config, usable_gpus()),
    )


def model_words(model: ModelConfig) -> str:
    """A model in a line."""
    heads = f"{model.heads} heads" + (f" ({model.kv_heads} of keys and values)" * (model.kv_heads != model.heads))
    mlp = f"{model.experts} experts ({model.experts_per_token} per token) of" if model.experts else "MLP"
    return (
        f"{count_parameters(model).total:,} parameters: {model.layers} layers, width {model.width}, {heads}, {mlp} "
        f"{model.mlp_width} {model.activation}, {model.norm}, {model.positions} positions, vocabulary "
        f"{model.vocabulary:,}, context {model.context:,}"
    )


def checkpoint_bytes(config: TrainConfig) -> int:
    """Of one checkpoint, whatever the layout: every weight as it is stepped, and what the optimizer keeps of it."""
    number = 8 if config.plan.precision == "fp64" else 4
    if config.lora.rank:
        states = len(kinds_of(config.optimizer, "layers.0.lora_a", (config.lora.rank, config.model.width)))
        return adapter_parameters(config.model, config.lora) * number * (1 + states)
    shapes = parameter_shapes(config.model)
    kept = (math.prod(shape) * (1 + len(kinds_of(config.optimizer, name, shape))) for name, shape in shapes.items())
    return number * sum(kept)


def _free_bytes(folder: Path) -> int:
    near = folder.resolve()
    while not near.exists():
        near = near.parent
    return shutil.disk_usage(near).free
