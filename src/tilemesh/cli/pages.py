"""The pages of runs and of benchmarks' rows: read, put beside them what the report may not know (rows and expected
memory of a run, FLOPs of an operator), and write or serve them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tilemesh.cli.next_command import after_run
from tilemesh.cli.targets import check_filled
from tilemesh.comm.schedules.collectives import COLLECTIVES
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import write_text
from tilemesh.kernels import registry
from tilemesh.measure.row import Row, read_rows
from tilemesh.plan.grade import expected_memory
from tilemesh.report import collective_page, compare_page, kernel_charts, kernel_page, run, run_page, serve
from tilemesh.report.draw import Drawing
from tilemesh.report.kernel_charts import RowWork
from tilemesh.report.kernel_page import TimedConfig
from tilemesh.report.kind_page import Beside
from tilemesh.report.picture import write_picture
from tilemesh.report.run import Run
from tilemesh.runs.files import Unread, read_lines
from tilemesh.runs.kind import TRAINED
from tilemesh.runs.names import PAGE, page_beside
from tilemesh.train.rows import rows, run_mfu_words

_NOT_AS_EXPECTED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RunError)
"""What a summary of another version, or one that somebody edited, ends in."""


def write_pages(what: Sequence[str], html: str | None, svg: str | None = None) -> list[str]:
    """Write the page asked for, and charts of rows; where they are."""
    if all(Path(path).is_file() for path in what):
        return _rows_page(what, html, svg)
    if svg is not None:
        raise UsageError("--svg: charts are made of files of rows, and a run's page has its own; leave it out")
    runs = [run.read(path) for path in what]
    if len(runs) > 2 and html is None:
        raise UsageError(f"{len(runs)} runs together need a name for their page: give --html FILE")
    if len(runs) > 2:
        page = compare_page.render_several(runs)
    elif len(runs) == 2:
        page = compare_page.render(runs[0], beside(runs[0]), runs[1], beside(runs[1]))
    else:
        page = run_page.render(runs[0], beside(runs[0]))
    target = html or str(Path(what[0]) / (PAGE if len(runs) == 1 else page_beside(runs[1].name)))
    write_text(page, target)
    return [target]


def _rows_page(files: Sequence[str], html: str | None, svg: str | None) -> list[str]:
    """The page and the charts of benchmarks' rows; one of the files may be what a tuner tried."""
    if html is None and svg is None:
        raise UsageError("the page of a file of rows needs a name: give --html FILE, or --svg FOLDER for charts")
    if svg is not None:
        check_filled("--svg", svg)
    tried = [path for path in files if is_trials(path)]
    if len(tried) > 1:
        raise UsageError(f"{len(tried)} files of what a tuner tried: a page shows one")
    rows = [row for path in files if path not in tried for row in read_rows(path)]
    charts = write_charts(rows, svg) if svg is not None else []
    if html is None:
        return charts
    write_text(bench_page(rows, tried[0] if tried else None), html)
    return [*charts, html]


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


def follow(folder: str, port: int) -> None:
    """Serve the run's page until interrupted."""
    run.read(folder)  # a folder that is not a run is refused before a server starts

    def render(live: str) -> str:
        content = run.read(folder)
        return run_page.render(content, beside(content), live=live)

    server = serve.PageServer(folder, render, port)
    print(f"watching {folder}: {server.address} (Ctrl-C ends this; the run goes on)", flush=True)
    server.serve()


def beside(run: Run) -> Beside:
    """Rows and expected memory of a run; whatever its folder lacks is left out, with the reason."""
    after = after_run(run)
    if run.kind not in [kind.name for kind in TRAINED]:
        return Beside([] if run.is_behind else run.rows, next=after)
    run_rows, why, counted = [] if run.is_behind else list(run.rows), "", ""
    if not run_rows:
        try:
            run_rows = rows(run.summary, run.predicted) if run.summary and not run.is_behind else []
            why = "" if run_rows else "the run has no summary"
        except _NOT_AS_EXPECTED as error:
            lacks = f"it has no {error}" if isinstance(error, LookupError) else str(error)
            why = f"the summary is of another version: {lacks}"
    with suppress(*_NOT_AS_EXPECTED):
        counted = run_mfu_words(run.summary, run_rows)
    return Beside(run_rows, why, expected_memory(run.config, run.predicted, run.summary), counted, after)
