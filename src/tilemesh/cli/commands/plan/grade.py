"""Compare finished runs with their predictions, worst first."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tilemesh.cli.commands.plan.train import origin
from tilemesh.cli.output import Block, Output, table_of
from tilemesh.core.advice import NextCommand
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.options import Known, OutFile, argument, option, refuse
from tilemesh.core.units import format_bytes, format_count, format_seconds
from tilemesh.runs.kind import ALIGN
from tilemesh.runs.values import count

if TYPE_CHECKING:
    from tilemesh.plan.grade import Grade, Graded


@dataclass(frozen=True, kw_only=True)
class GradeOptions:
    runs: tuple[str, ...] = argument(..., "Finished runs; or with --of logs, or folders of them.", "RUN...")
    of: Annotated[str, Known("engine", "tilemesh.plan.engines.logs:FORMATS")] | None = option(
        None, "What wrote it: torchtitan, megatron, deepspeed, hf-trainer, or kineto (torch.profiler).", "ENGINE"
    )
    plan: str | None = option(None, "Of --of: the plan that it ran, as `plan --out` wrote it.", "PLAN.toml")
    cluster: str | None = option(None, "Of --of: where it ran.", "NxGPU")
    code: str | None = option(None, "Of --of: what ran it, as `plan` takes it; by default the engine's usual.", "NAME")
    json: OutFile | None = option(None, "Every figure by name; - for stdout.", "FILE")


def grade(options: GradeOptions) -> Output:
    if options.of is None:
        refuse(options, "{} is about the log of another engine: say which with --of", "plan", "cluster", "code")
        return grades([grade_run(path) for path in options.runs], _next(options.runs[-1]))
    graded = [_grade_log(options, options.of, path) for path in options.runs]
    return grades(graded, NextCommand(shlex.join(["plan", f"{options.plan}", "--cluster", f"{options.cluster}"])))


def _next(path: str) -> NextCommand | None:
    """What follows on the run itself; of one whose layout is the best, its time beside what others would take."""
    from tilemesh.cli.next_command import after_run
    from tilemesh.report.run import read
    from tilemesh.runs.names import CONFIG

    after = after_run(read(path))
    is_this = after is not None and after.words.startswith("plan grade")
    return NextCommand(f"bench train {shlex.quote(path.rstrip('/'))}/{CONFIG}") if is_this else after


def _grade_log(options: GradeOptions, kind: str, path: str) -> Graded:
    """What another engine logged beside what this plan comes to where it ran."""
    from tilemesh.cli.commands.plan.train import named_cluster
    from tilemesh.cli.models import load_model
    from tilemesh.core.plan_file import TRAIN, read_plan
    from tilemesh.plan.engines.graded import grade_log
    from tilemesh.plan.software import read_software

    if options.plan is None or options.cluster is None:
        raise UsageError("a log does not say what ran where: give --plan PLAN.toml and --cluster, such as 64xh100")
    plan, model = read_plan(options.plan, TRAIN), load_model(options.plan, ())
    cluster, rates = named_cluster(options.cluster, None)
    context = count(plan.sections[TRAIN].get("context"), model.context)
    software = None if options.code is None else read_software(options.code)
    return grade_log(Path(path), kind, model, plan.layout, context, cluster, rates, software)


def grades(graded: Sequence[Graded], after: NextCommand | None = None) -> Output:
    """The grades of each run, and how well the order of their step times was foreseen."""
    from tilemesh.plan.grade import rank_correlation

    text: list[Block] = []
    for run in graded:
        predicted = "before the run" if run.before else f"now, from the run's model and layout; {run.software}"
        advice = run.advice or ["every figure that was recorded is within its bound"]
        text += [
            f"{run.source}: {run.plan.describe()}, on {run.cluster}",
            f"predicted {predicted}; error is (predicted - measured) / measured",
            table_of([_line(figure) for figure in run.grades], left=("", " ")),
            *(f"  - {line}" for line in advice),
            "",
        ]
    objects = [_plain(run) for run in graded]
    if len(graded) > 1:
        steps = [run.find("step time") for run in graded]
        pairs = [(step.predicted, step.measured) for step in steps if step.predicted is not None]
        times = [(predicted, measured) for predicted, measured in pairs if measured is not None]
        value = rank_correlation([predicted for predicted, _ in times], [measured for _, measured in times])
        objects.append({"name": "grade order", "runs": [run.source for run in graded], "rank_correlation": value})
        words = f"{value:+.2f}" if value is not None else "not defined: it takes three runs whose step times differ"
        ranged = [figure for run in graded for figure in run.grades if figure.is_inside is not None]
        for name in dict.fromkeys(figure.name for figure in ranged):
            inside = [figure.is_inside for figure in ranged if figure.name == name]
            text.append(
                f"{name}: {sum(map(bool, inside))} of {len(inside)} measurements lie inside the predicted range"
            )
        text.append(f"rank correlation of predicted and measured step time over {len(times)} runs: {words}")
    is_off = any(figure.holds is False for run in graded for figure in run.grades)
    return Output(text, [figures | origin() for figures in objects], next=NextCommand("calibrate") if is_off else after)


def grade_run(path: str) -> Graded:
    """A run beside its prediction."""
    from tilemesh.core.hardware import parse_cluster
    from tilemesh.measure.machine import this_machine
    from tilemesh.plan.grade import grade, grade_feedback, read_run
    from tilemesh.plan.local import is_local, local_machine

    run = read_run(Path(path))
    if run.data.get("kind") == ALIGN.name:
        return grade_feedback(run)
    if not is_local(run.cluster):
        return grade(run, parse_cluster(run.cluster))
    machine, here = run.data.get("machine"), this_machine()
    if machine not in (None, here.id):
        raise RunError(
            f"'{path}' ran on {machine} and this is {here.id}: its prediction needs that machine's calibration; "
            f"grade it there"
        )
    # Only runs on a CPU say "local" (others name their GPU), whatever else the machine has.
    local = local_machine(f"{run.cluster.strip().lower().removesuffix('-cpu')}-cpu", here)
    return grade(run, local.cluster, local.rates)


def _line(figure: Grade) -> dict[str, str]:
    values = {name: _value(figure, getattr(figure, name)) for name in ("predicted", "measured", "limit")}
    return {
        "": figure.name,
        **values,
        "error": "-" if figure.error is None else "exact" if figure.error == 0 else f"{figure.error:+.1%}",
        "bound": "-" if figure.bound is None else f"{figure.bound:.0%}" if figure.bound else "exact",
        " ": figure.note if figure.measured is None else ", ".join(_marks(figure)),
    }


def _marks(figure: Grade) -> list[str]:
    outside = figure.between is not None and figure.is_inside is False
    ends = [_value(figure, end) for end in figure.between or ()]
    return ["off"] * (figure.holds is False) + [f"outside {' to '.join(ends)}"] * outside


def _value(figure: Grade, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.unit == "s":
        return format_seconds(value)
    if figure.unit == "B":
        # Counts that should agree to the byte are shown to the byte.
        return format_bytes(value) if figure.name.startswith("peak memory") else f"{value:,.0f} B"
    return f"{value:,.0f}" if figure.unit == "parameters" else format_count(value)


def _plain(run: Graded) -> dict[str, Any]:
    judged = ("error", "bound", "holds", "is_inside")
    figures = [asdict(figure) | {name: getattr(figure, name) for name in judged} for figure in run.grades]
    case = {"run": run.source, "plan": run.plan.to_dict(), "cluster": run.cluster, "predicted_before": run.before}
    case |= {"software": run.software} if run.software else {}
    return {"name": "grade", **case, "figures": figures, "advice": list(run.advice)}
