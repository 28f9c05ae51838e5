"""Compare finished runs with their predictions, worst first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilemesh.cli.commands.plan.train import write_json
from tilemesh.core.errors import RunError
from tilemesh.core.options import OutFile, argument, option
from tilemesh.core.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilemesh.plan.grade import Grade, Graded


@dataclass(frozen=True, kw_only=True)
class GradeOptions:
    runs: tuple[str, ...] = argument(..., "Finished runs; model, layout and machine are theirs.", "RUN...")
    json: OutFile | None = option(None, "Every figure by name; - for stdout.", "FILE")


def grade(options: GradeOptions) -> None:
    from tilemesh.cli.layouts import plan_console

    graded = [grade_run(path) for path in options.runs]
    if options.json is not None:
        write_json(grade_objects(graded), options.json)
    print_grades(graded, plan_console(stderr=options.json == "-"))


def grade_objects(graded: Sequence[Graded]) -> list[dict[str, Any]]:
    """The grades of each run and how well their order was foreseen, as plain data."""
    objects = [_plain(run) for run in graded]
    if len(graded) > 1:
        from tilemesh.plan.grade import rank_correlation

        value = rank_correlation(*_step_times(graded))
        objects.append({"name": "grade order", "runs": [run.source for run in graded], "rank_correlation": value})
    return objects


def print_grades(graded: Sequence[Graded], console: Console) -> None:
    """The same for people."""
    from tilemesh.measure.table import print_words, wrapped
    from tilemesh.plan.grade import rank_correlation

    for run in graded:
        print_words(f"{run.source}: {run.plan.describe()}, on {run.cluster}", console)
        made = "before the run" if run.before else "now, from the run's model and layout"
        console.print(f"predicted {made}; error is (predicted - measured) / measured")
        console.print(_table(run))
        for line in run.advice:
            console.print(wrapped(line, console.width, "  - ", "    "), soft_wrap=True)
        if not run.advice:
            console.print("  every figure that was recorded is within its bound")
        console.print()
    if len(graded) > 1:
        predicted, measured = _step_times(graded)
        value = rank_correlation(predicted, measured)
        words = f"{value:+.2f}" if value is not None else "not defined: it takes three runs whose step times differ"
        console.print(f"rank correlation of predicted and measured step time over {len(measured)} runs: {words}")


def grade_run(path: str) -> Graded:
    """A run beside its prediction."""
    from tilemesh.core.hardware import parse_cluster
    from tilemesh.measure.machine import this_machine
    from tilemesh.plan.grade import grade, read_run
    from tilemesh.plan.local import is_local, local_machine

    run = read_run(Path(path))
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


def _step_times(graded: Sequence[Graded]) -> tuple[list[float], list[float]]:
    """Predicted and measured, of the runs that have both: whether the faster layout was foreseen as the faster."""
    steps = [run.find("step time") for run in graded]
    pairs = [(s.predicted, s.measured) for s in steps if s.predicted is not None and s.measured is not None]
    return [predicted for predicted, _ in pairs], [measured for _, measured in pairs]


def _table(run: Graded) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("", "predicted", "measured", "limit", "error", "bound", ""):
        table.add_column(heading, justify="left" if heading == "" else "right", no_wrap=True)
    for figure in run.grades:
        error = "-" if figure.error is None else "exact" if figure.error == 0 else f"{figure.error:+.1%}"
        verdict = {None: "", True: "", False: "off"}[figure.holds]
        note = figure.note if figure.measured is None else verdict
        table.add_row(
            figure.name, *(_value(figure, value) for value in (figure.predicted, figure.measured, figure.limit)), error,
            "-" if figure.bound is None else f"{figure.bound:.0%}" if figure.bound else "exact", note,
        )  # fmt: skip
    return table


def _value(figure: Grade, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.unit == "s":
        return format_seconds(value)
    if figure.unit == "B":
        # Counts that should agree to the byte are shown to the byte.
        return format_bytes(value) if figure.name == "peak memory" else f"{value:,.0f} B"
    return f"{value:,.0f}" if figure.unit == "parameters" else format_count(value)


def _plain(run: Graded) -> dict[str, Any]:
    grades = [
        dataclasses.asdict(figure) | {"error": figure.error, "bound": figure.bound, "holds": figure.holds}
        for figure in run.grades
    ]
    return {
        "name": "grade",
        "run": run.source,
        "plan": run.plan.to_dict(),
        "cluster": run.cluster,
        "predicted_before": run.before,
        "figures": grades,
        "advice": list(run.advice),
    }
