"""`--plan` of the commands that serve: what a plan of `tilemesh plan serve --out` says, where no flag does.

The options are `ServeOptions` and `ServeBenchOptions`; what was typed goes over the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilemesh.core.config import from_dict
from tilemesh.core.errors import UsageError
from tilemesh.core.plan_file import SERVE, PlanFile, read_plan
from tilemesh.model.config import check_planned
from tilemesh.plan.serving import ServeDemand
from tilemesh.serve.config import EngineConfig

if TYPE_CHECKING:
    from tilemesh.model.config import ModelConfig


def _engine_planned(options: Any, plan: PlanFile) -> Any:
    """The options with the engine's settings of a plan."""
    source = f"{plan.source}: serve"
    from_dict(EngineConfig, plan.sections[SERVE], source)  # refuses what is not a setting of an engine
    for name in plan.sections[SERVE]:
        if name not in {field.name for field in fields(options)}:
            raise UsageError(f"{source}.{name}: this command does not set it; take the line out of the plan")
    return _where_open(options, plan.sections[SERVE])


def _where_open(options: Any, values: Mapping[str, Any]) -> Any:
    """The options with these values where they are at their defaults."""
    defaults = {field.name: field.default for field in fields(options)}
    return replace(
        options, **{name: value for name, value in values.items() if getattr(options, name) == defaults[name]}
    )


def serve_planned(options: Any) -> Any:
    """The options as --plan says."""
    from tilemesh.cli.models import load_model

    if options.plan is None:
        return options
    if options.mesh is not None:
        raise UsageError("--mesh and --plan both say how ranks are laid out: give one of them")
    plan = read_plan(options.plan, SERVE)
    if Path(options.source).exists():  # else the engine says what is missing
        check_planned(plan, load_model(options.source, ()))
    sizes = plan.layout.axes | {"ep": plan.layout.ep}
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    return replace(_engine_planned(options, plan), mesh=mesh or None)


def bench_planned(options: Any) -> Any:
    """The options as --plan says: one replica's engine, and its share of the requests that the plan is for."""
    if options.plan is None:
        return options
    plan = read_plan(options.plan, SERVE)
    layout, demand = plan.layout, plan.sections["demand"]
    if layout.ep > 1 and options.mesh is None:
        raise UsageError(
            f"--plan {options.plan} shares experts among {layout.ep} replicas, and one process is measured here: give "
            f"--mesh dp={layout.dp},ep={layout.ep}, and the load, instead of the plan"
        )
    if layout.world > layout.dp:
        raise UsageError(
            f"--plan {options.plan} cuts the model over {layout.world // layout.dp} ranks, and one process is measured "
            "here: start `tilemesh serve RUN --plan`, and load it with --url"
        )
    options = _engine_planned(options, plan)
    if not demand:
        return options
    planned = from_dict(ServeDemand, demand, f"{plan.source}: demand")
    load = {"rates": (planned.rate / layout.dp,), "prompt": str(planned.prompt), "output": str(planned.output)}
    return _where_open(options, load)


def check_bench_planned(options: Any, model: ModelConfig) -> None:
    """Refuse a model that the plan was not made for."""
    if options.plan is not None:
        check_planned(read_plan(options.plan, SERVE), model)
