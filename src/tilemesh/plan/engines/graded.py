"""Another engine's run beside its prediction: why a step takes what it takes, and what another layout would give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tilemesh.core.calibration import Rates
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import Cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.program import settled
from tilemesh.model.config import ModelConfig
from tilemesh.plan.choose import search
from tilemesh.plan.engines.engine import EngineJob, OtherEngine
from tilemesh.plan.engines.logs import COMPUTE, DATA, EXCHANGE, FORMATS, WAITING, Measured, read_log
from tilemesh.plan.engines.tables import ENGINES
from tilemesh.plan.grade import Grade, Graded, RunSummary, grade
from tilemesh.plan.prediction import Prediction
from tilemesh.plan.software import SOFTWARE, Software
from tilemesh.plan.space import Pins
from tilemesh.plan.step import predict

_WORTH = 0.02
"""Of a step: two layouts that are closer are alike."""


def grade_log(
    path: Path,
    kind: str,
    model: ModelConfig,
    plan: ParallelPlan,
    context: int,
    cluster: Cluster,
    rates: Rates | None,
    software: Software | None = None,
) -> Graded:
    """A log or profile of this plan's run, figure by figure. `software`: what ran it, if not what the engine usually
    runs."""
    if plan.world != cluster.world:
        raise UsageError(
            f"the plan has {plan.world} ranks and the cluster {cluster.name} has {cluster.world}: give --cluster the "
            "one that the plan was made for"
        )
    measured = read_log(path, kind, plan, context)
    engine = ENGINES.get(FORMATS[kind].engine)
    software = software or SOFTWARE["eager" if engine is None else engine.code]
    code, (cluster, rates) = software.code, software.on(cluster, rates)
    data: dict[str, Any] = {"step_time_s": measured.sample, "code": code, "exchanges": {}}
    if measured.peak_bytes is not None:
        data["peak_memory_bytes"] = [measured.peak_bytes]
    run = RunSummary(str(path), model, plan, context, cluster.name, data)
    graded = grade(run, cluster, rates)
    now = predict(model, cluster, settled(plan, model.layers), context, rates=rates, code=code)
    seen = [figure for figure in graded.grades if figure.measured]
    parts = _parts(measured, now)
    advice = [*_why(graded.find("step time"), parts), *_better(run, engine, now, cluster, rates)]
    return dataclasses.replace(graded, grades=(*seen, *parts), advice=tuple(advice), software=software.words)


def _parts(measured: Measured, now: Prediction) -> list[Grade]:
    """Where a step's seconds went, of a profile."""
    times = now.times
    predicted = {
        COMPUTE: times.compute_s + times.recompute_s + times.optimizer_s,
        EXCHANGE: times.exposed_s,
        WAITING: times.bubble_s + times.host_s + times.offload_s,
        DATA: None,
    }
    return [Grade(name, "s", predicted[name], seconds) for name, seconds in (measured.parts_s or {}).items()]


def _why(step: Grade, parts: list[Grade]) -> list[str]:
    if step.holds is not False or step.measured is None or step.predicted is None:
        return []
    late = step.measured - step.predicted
    if not parts:
        return [f"a step takes {late:+.3g} s to what was predicted: a torch.profiler trace (--of kineto) says of what"]
    gaps = {part.name: (part.measured or 0.0) - part.predicted for part in parts if part.predicted is not None}
    worst = max(gaps, key=lambda name: gaps[name] if late > 0 else -gaps[name])
    return [f"a step takes {late:+.3g} s to what was predicted, {gaps[worst]:+.3g} s of it {worst}"]


def _better(
    run: RunSummary, engine: OtherEngine | None, now: Prediction, cluster: Cluster, rates: Rates | None
) -> list[str]:
    """The fastest layout that the same engine runs there, and what it would gain."""
    code = run.data["code"]

    def accepts(plan: ParallelPlan) -> bool:
        job = EngineJob(run.model, plan, cluster, run.context, run.source)
        return engine is None or not any(engine.why_not(job))

    try:
        pins = Pins(precision=run.plan.precision)
        best = search(
            run.model, cluster, batch=run.plan.batch, context=run.context, pins=pins, rates=rates, code=code,
            accepts=accepts, shown=1,
        ).best  # fmt: skip
    except (UsageError, RunError):
        return []
    gain = 1 - best.step_time_s / now.step_time_s
    if gain < _WORTH:
        return ["no layout that it runs is predicted to be faster"]
    return [f"{best.plan.short()} is predicted to take {best.step_time_s:.3g} s, {gain:.0%} less than this layout"]
