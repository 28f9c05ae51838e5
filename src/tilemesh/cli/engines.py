"""`tilemesh plan --for ENGINE`: the best layout that another engine runs, and its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilemesh.cli.output import Block
from tilemesh.core.errors import UsageError

if TYPE_CHECKING:
    from tilemesh.core.hardware import Cluster
    from tilemesh.core.plan import ParallelPlan
    from tilemesh.model.config import ModelConfig
    from tilemesh.plan.choose import Accepts, SearchResult
    from tilemesh.plan.engines.engine import EngineJob, OtherEngine
    from tilemesh.plan.space import Pins

PLAN = "plan.toml"


def engine_job(options: Any, result: SearchResult) -> EngineJob:
    """What was planned, as an engine is told it."""
    from tilemesh.plan.engines.engine import EngineJob

    compiled = result.code == "compiled"
    return EngineJob(
        result.model, result.best.settled_plan, result.cluster, result.context, options.model, compiled=compiled
    )


def runs(engine: OtherEngine, options: Any, model: ModelConfig, cluster: Cluster) -> Accepts:
    """Whether the engine runs a layout of this model there."""
    from tilemesh.plan.engines.engine import EngineJob

    context = options.context or model.context
    return lambda plan: not any(engine.why_not(EngineJob(model, plan, cluster, context, options.model)))


def best_for(
    engine: OtherEngine,
    options: Any,
    model: ModelConfig,
    cluster: Cluster,
    pins: Pins,
    search: Callable[[Pins, Accepts | None], SearchResult],
) -> SearchResult:
    """The fastest layouts that the engine runs. UsageError where what is fixed leaves none, with the nearest."""
    from tilemesh.plan.choose import NothingFitsError
    from tilemesh.plan.engines.engine import EngineJob
    from tilemesh.plan.space import Pins

    def job(plan: ParallelPlan) -> EngineJob:
        return EngineJob(model, plan, cluster, options.context or model.context, options.model)

    accepts = runs(engine, options, model, cluster)
    pinned = {field.name: getattr(pins, field.name) for field in dataclasses.fields(pins)}
    pinned = {name: value for name, value in pinned.items() if value is not None}
    if "sequence_parallel" in engine.defaults and pinned.get("tp") == 1:
        pinned.setdefault("sequence_parallel", False)
    try:
        return search(Pins(**{**engine.defaults, **pinned}), accepts)
    except (UsageError, NothingFitsError):
        best = search(
            Pins(**{**engine.defaults, **pinned}), None
        ).best.plan  # where nothing is possible at all, that is what is wrong
        refused = list(engine.why_not(job(best)))
        if not refused:
            raise
    if of_model := [refusal.why for refusal in refused if refusal.field == "model"]:
        raise UsageError(f"{engine.name} cannot be told this model: {of_model[0]}; plan for another engine")
    fields = {refusal.field for refusal in engine.refusals}
    free = {name: value for name, value in pinned.items() if name not in fields}
    words = "; ".join(f"{refusal.field} is {getattr(best, refusal.field)}: {refusal.why}" for refusal in refused)
    try:
        near = search(Pins(**{**engine.defaults, **free}), accepts).best.plan
    except (UsageError, NothingFitsError):
        raise UsageError(f"{engine.name} cannot run {best.short()}: {words}; nor any other layout there") from None
    fixed = ",".join(f"{name}={_word(getattr(near, name))}" for name in dict.fromkeys(r.field for r in refused))
    raise UsageError(
        f"{engine.name} cannot run {best.short()}: {words}; the nearest that it runs: --fix {fixed} ({near.short()})"
    )


def written_for(engine: OtherEngine, job: EngineJob, folder: str | None, command: str, plan: str = "") -> list[Block]:
    """Write an engine's files into a folder, or print them. `command`: what was typed for them; `plan`: our own
    file of the plan, to grade a run by."""
    from tilemesh.core.files import write_text
    from tilemesh.plan.engines.write import engine_files

    header = f"{job.describe()}\nwritten for {engine.name} {engine.version} by {command}"
    files = engine_files(engine, job, header) | ({PLAN: plan} if plan and folder else {})
    if folder is None:
        return [
            "",
            *(block for name, text in files.items() for block in ([f"==> {name} <=="], text.splitlines(), "")),
            f"With --out FOLDER they are written; `bash launch.sh` starts {engine.name} on a node.",
        ]
    other = [name for name, text in files.items() if (at := Path(folder, name)).is_file() and at.read_text() != text]
    if other:
        raise UsageError(f"--out {folder} has {', '.join(other)} already, with other text: name another folder")
    for name, text in files.items():
        write_text(text, Path(folder) / name)
    return [f"For {engine.name} {engine.version}: {', '.join(str(Path(folder) / name) for name in files)}"]


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
