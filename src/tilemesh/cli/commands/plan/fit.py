"""Make a software profile of measured runs: how long an engine takes beside what the planner says of such code.

RUNS.toml names the runs: published figures, or logs and traces of your own. The profile is fitted on some of them and
graded on the others. `plan MODEL --code PROFILE.toml` then plans with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tilemesh.cli.commands.plan.train import named_cluster, origin
from tilemesh.cli.models import load_model
from tilemesh.cli.output import Block, Output, table_of
from tilemesh.core import config
from tilemesh.core.errors import UsageError
from tilemesh.core.options import OutFile, argument, option
from tilemesh.core.ranges import Range

if TYPE_CHECKING:
    from tilemesh.plan.software import MeasuredRun, Software


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    runs: str = argument(..., "What ran, where, and how fast: see docs/how-to/other-engines.md.", "RUNS.toml")
    out: OutFile | None = option(None, "Write the profile, for `plan --code`.", "PROFILE.toml")
    json: OutFile | None = option(None, "Every figure by name; - for stdout.", "FILE")


@dataclass(frozen=True)
class RunEntry:
    """A [[runs]] section, beside its plan."""

    name: str
    model: str
    """As `plan` takes it."""
    cluster: str
    set: str = ""
    """model.layers=80,..."""
    gpu: str = ""
    """A file that describes the cluster's GPU."""
    context: Annotated[int, Range(0)] = 0
    """Tokens of a sequence; 0: the model's."""
    imbalance: Annotated[float, Range(0, 1e6)] = 0.0
    tokens_per_s_per_gpu: Annotated[float, Range(0)] = 0.0
    log: str = ""
    of: str = ""
    """What wrote the log, as `plan grade --of` takes it."""
    held_out: bool = False
    """To be graded on. Where no run says so, every second one is."""


def fit(options: FitOptions) -> Output:
    from tilemesh.plan.software import errors, fit_software, read_software

    data = config.read_toml(options.runs, "runs")
    name, source, code = (str(data.get(key, "")) for key in ("name", "source", "code"))
    runs = _runs(data.get("runs"), Path(options.runs))
    plain = read_software(code)
    fitted = fit_software(name or Path(options.runs).stem, source, plain.code, runs)
    graded = [run for run in runs if run.held_out]
    lines = [_line(run, plain, fitted) for run in runs]
    factors = ", ".join(f"{part} {times:g}" for part, times in fitted.factors.items())
    text: list[Block] = [
        f"{fitted.words}: times as long as {plain.words}: {factors}", table_of(lines, left=("run", ""))
    ]  # fmt: skip
    figures: dict[str, Any] = {"name": "software", **asdict(fitted), "runs": lines}
    if graded:
        after, before = errors(fitted, graded), errors(plain, graded)
        text.append(
            f"of {len(graded)} runs that were not fitted, the median error is {after[0]:.1%} and the greatest "
            f"{after[1]:.1%}; without the profile {before[0]:.1%} and {before[1]:.1%}"
        )
        figures |= {"median_error": after[0], "median_error_without": before[0]}
    else:
        text.append("no run was held out: nothing says how well the profile predicts another")
    return Output(text, [figures | origin()], {"out": lambda: config.dump_toml(fitted)})


def _line(run: MeasuredRun, plain: Software, fitted: Software) -> dict[str, str]:
    return {
        "run": run.name,
        "measured s": f"{run.step_s:.4g}",
        "predicted s": f"{run.predicted_s(fitted):.4g}",
        "error": f"{run.error(fitted):+.1%}",
        "without": f"{run.error(plain):+.1%}",
        "": "graded" if run.held_out else "fitted",
    }


def _runs(sections: Any, file: Path) -> list[MeasuredRun]:
    if not isinstance(sections, list) or not sections or not all(isinstance(each, dict) for each in sections):
        raise UsageError(f"{file} has no [[runs]] section: expected one for each run")
    entries = [(config.from_dict(RunEntry, {k: v for k, v in each.items() if k != "plan"}, str(file)), each)
               for each in sections]  # fmt: skip
    marked = any(entry.held_out for entry, _ in entries)
    return [
        _measured(entry, each.get("plan", {}), file, entry.held_out if marked else bool(place % 2))
        for place, (entry, each) in enumerate(entries)
    ]


def _measured(entry: RunEntry, plan_data: Any, file: Path, held_out: bool) -> MeasuredRun:
    """A run with its step's seconds, as published or logged."""
    from tilemesh.core.plan import ParallelPlan
    from tilemesh.core.step.program import settled
    from tilemesh.plan.engines.logs import FORMATS, read_log
    from tilemesh.plan.software import MeasuredRun

    if not isinstance(plan_data, dict) or bool(entry.log) == bool(entry.tokens_per_s_per_gpu):
        raise UsageError(f"{file}: run '{entry.name}': give a plan, and either tokens_per_s_per_gpu or log with of")
    here = file.parent
    model = load_model(entry.model, [entry.set] if entry.set else ())
    plan = settled(config.from_dict(ParallelPlan, plan_data, f"{file}: run '{entry.name}'"), model.layers)
    cluster, rates = named_cluster(entry.cluster, str(here / entry.gpu) if entry.gpu else None)
    if plan.world != cluster.world:
        raise UsageError(f"{file}: run '{entry.name}': {plan.world} ranks on {cluster.world} devices: expected as many")
    context = entry.context or model.context
    if entry.log:
        if entry.of not in FORMATS:
            raise UsageError(f"{file}: run '{entry.name}': of is '{entry.of}', expected one of {', '.join(FORMATS)}")
        step_s = read_log(here / entry.log, entry.of, plan, context).sample["median"]
    else:
        step_s = plan.batch * context / (entry.tokens_per_s_per_gpu * plan.world)
    return MeasuredRun(entry.name, model, plan, cluster, context, step_s, held_out, rates, entry.imbalance)
