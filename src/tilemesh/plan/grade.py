"""A finished run beside its prediction: what was said, what was measured, how far off, and what to measure again.

The one idea: grading needs one small file, a run's `summary.json`, and no part of training. Whatever the file lacks
becomes a figure that says so. A prediction that the run made before it started is graded as it stood; otherwise it is
made now, from the same model, layout and calibration, without looking at the measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tilemesh.core import config
from tilemesh.core.calibration import Rates
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import Cluster, device_for, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.memory import StepBytes
from tilemesh.core.step.program import chunk_layers, settled
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.operations import peak_of_step
from tilemesh.model.work.task import Code, default_code
from tilemesh.model.work.weights import count_parameters, shard_parameters
from tilemesh.plan.memory import Room, rank_state_bytes
from tilemesh.plan.prediction import Prediction
from tilemesh.plan.software import SOFTWARE
from tilemesh.plan.step import predict
from tilemesh.runs.folder import read_summary
from tilemesh.runs.kind import TRAINED
from tilemesh.runs.metrics import STEP, latest
from tilemesh.runs.names import CONFIG, PREDICTED
from tilemesh.runs.phases import PHASES, measured_phases, predicted_phases
from tilemesh.runs.values import number, numbers, section

DRAWING = "peak memory, drawing"
"""Of ranks that only draw answers."""
BOUNDS = {"step time": 0.15, "peak memory": 0.05, DRAWING: 0.05}
"""What a prediction is meant to keep to; everything else is meant to be exact."""
FOLLOWS = ("tokens/s", "computing", "exposed exchange", "waiting", "loading data", *PHASES)
"""Figures that say again what another says and are not judged twice: 15 % off a time is 13 or 18 % off its rate; parts
of a step say why it is off."""
NOT_RECORDED = "the run did not record it"
ROUTED = "rows to experts"
"""Of exchanges whose bytes a router decides: expected, and not judged."""


@dataclass(frozen=True)
class Grade:
    """One figure of a run. `measured` is the median where there are several readings."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    limit: float | None = None
    spread: tuple[float, float, int] | None = None
    """p20, p80 and how many readings."""
    note: str = ""
    between: tuple[float, float] | None = None
    """Where eight of ten measurements were expected (`plan/ranges.py`), if the run was told."""

    @property
    def is_inside(self) -> bool | None:
        return (
            None
            if self.between is None or self.measured is None
            else self.between[0] <= self.measured <= self.between[1]
        )

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None where one of them is missing."""
        if self.predicted is None or self.measured is None:
            return None
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else None
        return self.predicted / self.measured - 1

    @property
    def bound(self) -> float | None:
        """None for what is not judged."""
        return None if self.name in FOLLOWS or ROUTED in self.name else BOUNDS.get(self.name, 0.0)

    @property
    def holds(self) -> bool | None:
        return None if self.error is None or self.bound is None else abs(self.error) <= self.bound


@dataclass(frozen=True)
class Graded:
    """A run's grades, worst first, and what to do about them."""

    source: str
    plan: ParallelPlan
    cluster: str
    grades: tuple[Grade, ...]
    advice: tuple[str, ...]
    before: bool
    """The prediction was made before the run and kept in its summary."""
    software: str = ""
    """What a prediction that was made now stands on."""

    def find(self, name: str) -> Grade:
        return next(grade for grade in self.grades if grade.name == name)


@dataclass(frozen=True)
class RunSummary:
    """What a summary says, checked."""

    source: str
    model: ModelConfig
    plan: ParallelPlan
    context: int
    cluster: str
    data: Mapping[str, Any]


def read_run(path: Path) -> RunSummary:
    """The run in a folder (or in a summary file itself); RunError says what is wrong with it."""
    data = read_summary(path, *TRAINED)
    try:
        model = config.from_dict(ModelConfig, data["model"], f"{path}: model")
        plan = config.from_dict(ParallelPlan, data["plan"], f"{path}: plan")
    except (UsageError, TypeError, AttributeError) as error:
        raise RunError(f"the summary of '{path}' cannot be used: {error}") from None
    context = data.get("context", model.context)
    if not isinstance(context, int):
        raise RunError(f"the summary of '{path}' has context {context!r}, expected a whole number")
    return RunSummary(str(path), model, plan, context, str(data["cluster"]), data)


def code_of(run: RunSummary, cluster: Cluster) -> Code | None:
    """What ran it: as the summary says, else torch without its compiler."""
    said = run.data.get("code")
    if said in ("fused", "compiled", "eager"):
        return cast(Code, said)
    return "eager" if cluster.device.kind == "cpu" or run.data.get("compile") is False else None


def grade(run: RunSummary, cluster: Cluster, rates: Rates | None = None) -> Graded:
    """Every figure of a run beside its prediction."""
    plan = settled(run.plan, run.model.layers)
    code = code_of(run, cluster) or default_code(cluster.device, plan.precision)
    now = predict(run.model, cluster, plan, run.context, rates=rates, code=code)
    told = run.data.get("predicted")
    before = isinstance(told, Mapping) and isinstance(told.get("step_time_s"), (int, float))
    step_s = float(told["step_time_s"]) if before and isinstance(told, Mapping) else now.step_time_s
    step, spread = _sample(run.data.get("step_time_s"))
    peak = peak_of_step(run.model, run.context, run.plan, cluster.device.peak_flops_per_s)
    limit_s = now.model_flops / (peak * run.plan.world)
    rate = None if step is None else now.tokens / step
    grades = [
        Grade("parameters", "parameters", count_parameters(run.model).total, _number(run.data.get("parameters"))),
        Grade("step time", "s", step_s, step, limit_s, spread),
        Grade("tokens/s", "tokens/s", now.tokens / step_s, rate, now.tokens / limit_s),
        _memory(run, cluster, now),
        *_exchanges(run, now),
    ]
    ranges = section(told, "ranges") if before and isinstance(told, Mapping) else {}
    for name, key in (("step time", "step_time_s"), ("peak memory", "memory_bytes")):
        if len(ends := numbers(ranges, key)) == 2:
            grades = [dataclasses.replace(g, between=(ends[0], ends[1])) if g.name == name else g for g in grades]
    grades = [g if g.measured is not None else _unrecorded(g) for g in grades]
    # Worst against its own bound first; what was not recorded last.
    grades.sort(key=lambda g: (g.error is None, -_excess(g), g.name))
    return Graded(
        run.source, run.plan, run.cluster, tuple(grades), tuple(_advice(run, now, grades)), before, SOFTWARE[code].words
    )


def grade_feedback(run: RunSummary) -> Graded:
    """Of a run that learns from feedback, by what was predicted before it: its time, by phase too, and its memory."""
    told, folder = section(run.data, "predicted"), Path(run.source)
    if _number(told.get("step_time_s")) is None:
        why = told.get("missing", "the run was not predicted")
        raise RunError(f"'{run.source}' cannot be graded: {why}")
    lines = [line for line in latest(folder) if line["kind"] == STEP] if folder.is_dir() else []
    seen, guess = measured_phases(lines), predicted_phases(told)
    step, spread = _sample(run.data.get("step_time_s"))
    drawing, told_drawing = section(run.data, "drawing"), _number(told.get("drawing_memory_bytes"))
    grades = [
        Grade("step time", "s", _number(told["step_time_s"]), step, _number(told.get("limit_s")), spread),
        *(Grade(phase, "s", guess.get(phase), seen.get(phase)) for phase in PHASES),
        Grade("peak memory", "B", _number(told.get("memory_bytes")), _grown(run.data), note="the fullest rank"),
        *([Grade(DRAWING, "B", told_drawing, _grown(drawing))] if told_drawing is not None else []),
    ]
    grades = sorted(
        (g if g.measured is not None else _unrecorded(g) for g in grades),
        key=lambda g: (g.error is None, -_excess(g), g.name),
    )
    advice = [f"{g.name} is off: see its terms in the run's {PREDICTED}" for g in grades if g.holds is False]
    return Graded(run.source, run.plan, run.cluster, tuple(grades), tuple(advice), before=True)


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Spearman's, with mean ranks for ties: 1 is the same order. None for fewer than three or where all are equal."""
    if len(predicted) < 3 or len(predicted) != len(measured):
        return None
    a, b = _ranks(predicted), _ranks(measured)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return covariance / spread**0.5 if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def _memory(run: RunSummary, cluster: Cluster, now: Prediction) -> Grade:
    """On a GPU what torch allocates; on a CPU what the process grew by, with what its first step loads."""
    cpu = cluster.device.kind == "cpu"
    before = run.data.get("predicted")
    told = before.get("memory") if isinstance(before, Mapping) else None
    predicted = now.memory.seen_bytes(cluster.device.kind)
    if isinstance(told, Mapping) and _number(told.get("total_bytes")) is not None:  # as it was said before the run
        reserved = 0 if cpu else int(told.get("reserved_bytes") or now.memory.reserved_bytes)
        predicted = int(told["total_bytes"]) - reserved
    shards = shard_parameters(run.model, run.plan.tp, run.plan.ep, run.plan.expert_tp)
    held = shards.held(run.model.layers, True, True, *run.model.dense_of((run.model.layers,)))
    least = sum(rank_state_bytes(run.plan, held)) if run.plan.pp == 1 else None
    return Grade("peak memory", "B", predicted, _grown(run.data), least, note="the fullest rank")


def _grown(data: Mapping[str, Any]) -> float | None:
    """By how much the fullest rank grew."""
    peaks, bases = data.get("peak_memory_bytes"), data.get("memory_baseline_bytes")
    if not isinstance(peaks, list) or not peaks or any(_number(peak) is None for peak in peaks):
        return None
    known = bases if isinstance(bases, list) and len(bases) == len(peaks) else [0] * len(peaks)
    return max(float(peak) - float(base) for peak, base in zip(peaks, known, strict=True))


def _exchanges(run: RunSummary, now: Prediction) -> list[Grade]:
    """Bytes by axis and operation; "control" (agreements, single numbers) is not the model's."""
    counted = run.data.get("exchanges")
    if not isinstance(counted, Mapping):
        wanted = [(axis, name) for axis, by in now.exchanges.items() for name in by]
        return [Grade(f"{axis} {name}", "B", now.exchanges[axis][name], None) for axis, name in wanted]
    names = {(axis, name) for source in (now.exchanges, counted) for axis, by in source.items() for name in by}
    return [
        Grade(
            f"{axis} {name}" + f", {ROUTED}" * (axis == "ep"),
            "B",
            now.exchanges.get(axis, {}).get(name, 0),
            _number(counted.get(axis, {}).get(name, 0)),
        )
        for axis, name in sorted(names)
        if axis != "control"
    ]


def _advice(run: RunSummary, now: Prediction, grades: Sequence[Grade]) -> list[str]:
    """What to measure or mend, from the figures that are off."""
    off = {g.name: g for g in grades if g.holds is False}
    advice = []
    if "parameters" in off:
        advice.append("parameters differ: the run's model is not the one its summary describes")
    if any(g.unit == "B" and g.name != "peak memory" for g in off.values()):
        advice.append("exchanged bytes differ: training and model/work/exchanges.py do not describe the same exchange")
    if "step time" in off:
        advice.append(_which_part(run, now))
        _, spread = _sample(run.data.get("step_time_s"))
        if spread is not None and spread[1] > 1.3 * spread[0]:
            advice.append("the run's own steps wander (p80 above 1.3 times p20): other work was running beside it")
    if "peak memory" in off:
        advice.append(
            "memory: compare the terms of `tilemesh plan --explain` with the run; a process's own part wanders"
        )
    return advice


def _which_part(run: RunSummary, now: Prediction) -> str:
    """Whether computing or exchanging is off, by the shares that the run recorded."""
    step, _ = _sample(run.data.get("step_time_s"))
    shares = run.data.get("shares")
    advice = "recalibrate this machine when it is idle: `tilemesh calibrate`"
    if step is None or not isinstance(shares, Mapping) or _number(shares.get("exchange")) is None:
        return f"step time is off: {advice}"
    exchange_s = (float(shares["exchange"]) + float(shares.get("idle") or 0.0)) * step
    said_s = now.times.exposed_s
    if abs(said_s - exchange_s) > abs((now.step_time_s - said_s) - (step - exchange_s)):
        return (
            f"exchanges take {exchange_s:.3g} s a step with waiting for other ranks, {said_s:.3g} predicted without: "
            f"fit them on this machine when it is idle, `tilemesh bench collective --fit --ranks {run.plan.world}`"
        )
    return f"computing takes {step - exchange_s:.3g} s per step, {now.step_time_s - said_s:.3g} predicted: {advice}"


def _excess(grade: Grade) -> float:
    """How far a figure is beyond its bound; what is not judged comes after what is."""
    return -1.0 if grade.error is None or grade.bound is None else abs(grade.error) - grade.bound


def _unrecorded(grade: Grade) -> Grade:
    return Grade(grade.name, grade.unit, grade.predicted, None, grade.limit, None, NOT_RECORDED)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _sample(value: object) -> tuple[float | None, tuple[float, float, int] | None]:
    """The median of a sample or a plain number, and its spread."""
    if isinstance(value, Mapping):
        median, p20, p80 = (_number(value.get(name)) for name in ("median", "p20", "p80"))
        spread = None if p20 is None or p80 is None else (p20, p80, int(_number(value.get("n")) or 0))
        return median, spread
    return _number(value), None


# ---- of a run's folder -------------------------------------------------------------------------------------------


def expected_memory(
    settings: Mapping[str, Any], predicted: Mapping[str, Any], summary: Mapping[str, Any]
) -> dict[str, float]:
    """Bytes per rank by kind: what was predicted before the run, else counted from its configuration.

    On a GPU these are the bytes that torch allocates, as a run measures them, without what the context and the
    libraries reserve. Nothing where the configuration is not one that can be counted.
    """
    told: Mapping[str, object] = section(predicted, "memory")
    if not told:
        counted = _counted(settings, summary)
        told = {} if counted is None else dataclasses.asdict(counted.memory)
    kinds = {key.removesuffix("_bytes"): number(size, 0.0) for key, size in told.items()}
    unseen = ("total", "usable") if summary.get("device") in (None, "cpu") else ("total", "usable", "reserved")
    return {kind: size for kind, size in kinds.items() if size > 0 and kind not in unseen}


def expected_kept(
    settings: Mapping[str, Any], predicted: Mapping[str, Any], summary: Mapping[str, Any]
) -> StepBytes | None:
    """The same of what a step's passes keep, by chunk: of a pipeline, of layers that come and go, or of all layers."""
    told = section(predicted, "pipeline")
    kept, late = numbers(told, "kept_bytes"), numbers(told, "kept_for_weights_bytes")
    if kept and len(kept) == len(late):
        return StepBytes(kept=kept, kept_for_weights=late)
    counted = _counted(settings, summary)
    if counted is not None and counted.plan.pp > 1:
        return counted.kept
    return None if counted is None else _kept_alone(settings, summary, counted.plan)


def _kept_alone(settings: Mapping[str, Any], summary: Mapping[str, Any], plan: ParallelPlan) -> StepBytes:
    """What the passes of a rank without stages keep, by the code that training runs."""
    model = config.from_dict(ModelConfig, dict(section(settings, "model")), CONFIG)
    train = section(settings, "train")
    code: Code = "compiled" if train.get("compile") else "eager"
    room = Room(model, _like(summary, plan), train.get("context") or model.context, code)
    return room.step_bytes(plan, chunk_layers(plan, model.layers))


def _like(summary: Mapping[str, Any], plan: ParallelPlan) -> Cluster:
    """As many devices of the kind that a run had."""
    name = str(summary.get("cluster", "")).partition("x")[2]
    device = device_for(name) if name != "local" else None
    return parse_cluster(f"{plan.world}x{device.name if device else 'cpu'}")


def _counted(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> Prediction | None:
    """What a run's configuration comes to on a device of its kind; None where it is not one that can be counted."""
    try:
        model = config.from_dict(ModelConfig, dict(section(settings, "model")), CONFIG)
        plan = config.from_dict(ParallelPlan, dict(section(settings, "plan")), CONFIG)
        context = section(settings, "train").get("context") or model.context
        return predict(model, _like(summary, plan), settled(plan, model.layers), context)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RunError):
        return None
