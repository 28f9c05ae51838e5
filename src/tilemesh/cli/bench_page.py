"""Pages and charts of benchmarks: which kind rows are of, and what the report may not know (an operator's FLOPs)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tilemesh.comm.schedules.collectives import COLLECTIVES
from tilemesh.core.errors import UsageError
from tilemesh.kernels import registry
from tilemesh.measure.row import Row
from tilemesh.report import collective_page, kernel_charts, kernel_page
from tilemesh.report.draw import Drawing
from tilemesh.report.kernel_charts import RowWork
from tilemesh.report.kernel_page import TimedConfig
from tilemesh.report.picture import write_picture
from tilemesh.runs.files import Unread, read_lines


def bench_page(rows: Sequence[Row], tried: str | None = None) -> str:
    """The page of rows of `bench kernel` or `bench collective`; `tried` is a file of what a tuner timed."""
    if not rows and tried is None:
        raise UsageError("no rows to make a page of")
    if any(row.name in COLLECTIVES for row in rows):
        if tried is not None:
            raise UsageError("a tuner's trials belong to the rows of a kernel, and these are of collectives")
        return collective_page.render(rows)
    return kernel_page.render(rows, [_work(row) for row in rows], read_trials(tried) if tried else ())


def bench_drawings(rows: Sequence[Row]) -> list[Drawing]:
    """The charts of rows of `bench kernel` or `bench collective`, as the page has them."""
    if any(row.name in COLLECTIVES for row in rows):
        return collective_page.drawings(rows)
    charts = kernel_charts.drawings(kernel_charts.kernel_times(rows, [_work(row) for row in rows]))
    if not charts:
        raise UsageError("no kernel-time rows of an operator to draw a chart of")
    return charts


def write_charts(rows: Sequence[Row], folder: str) -> list[str]:
    """A picture in this folder for each operator or collective, named after it; where they are."""
    names = dict.fromkeys(row.name for row in rows if row.name in COLLECTIVES or _work(row) is not None)
    if not names:
        raise UsageError("no rows of operators or collectives to draw charts of")
    paths = {name: str(Path(folder, f"{name}.svg")) for name in names}
    for name, path in paths.items():
        write_picture(bench_drawings([row for row in rows if row.name == name]), path)
    return list(paths.values())


def is_trials(path: str) -> bool:
    """Whether a file holds what a tuner tried rather than rows."""
    try:
        lines, _ = read_lines(Path(path))
    except Unread:
        return False
    return bool(lines) and "problem" in lines[0] and isinstance(lines[0].get("config"), dict)


def read_trials(path: str) -> list[TimedConfig]:
    """What `tilemesh tune --json` wrote."""
    try:
        lines, _ = read_lines(Path(path))
    except Unread as why:
        raise UsageError(f"'{path}' cannot be read: {why}") from None
    trials = []
    for number, trial in enumerate(lines, start=1):
        config, seconds = trial.get("config"), trial.get("seconds")
        if not isinstance(config, dict) or "problem" not in trial:
            continue
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, (int, float))):
            raise UsageError(f"'{path}', trial {number}: seconds is {str(seconds)[:80]!r}, expected a number or null")
        trials.append(TimedConfig(str(trial["problem"]), config, math.inf if seconds is None else float(seconds)))
    if not trials:
        raise UsageError(f"'{path}' holds nothing that a tuner tried: expected what `tilemesh tune --json` writes")
    return trials


def _work(row: Row) -> RowWork | None:
    """FLOPs and bytes of an operator's row; None for rows of anything else."""
    entry = registry.find_function(row.name)
    if entry is None or entry.form is None or "shape" not in row.case:
        return None
    try:
        cost = entry.load("form").cost_of(row.case)
    except UsageError:  # a shape or a setting that this version's operator does not have
        return None
    return RowWork(cost.flops, cost.bytes_moved)
