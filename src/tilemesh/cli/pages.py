"""The pages of runs and of benchmarks' rows: read, put rows and expectations beside a run, and write or serve it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import write_text
from tilemesh.measure.row import read_rows
from tilemesh.plan.grade import expected_memory
from tilemesh.report import compare_page, run, run_page, serve, several_page
from tilemesh.report.kind_page import Beside
from tilemesh.report.run import Run
from tilemesh.runs.kind import TRAIN
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
        page = several_page.render(runs)
    elif len(runs) == 2:
        page = compare_page.render(runs[0], beside(runs[0]), runs[1], beside(runs[1]))
    else:
        page = run_page.render(runs[0], beside(runs[0]))
    target = html or str(Path(what[0]) / (PAGE if len(runs) == 1 else page_beside(runs[1].name)))
    write_text(page, target)
    return [target]


def _rows_page(files: Sequence[str], html: str | None, svg: str | None) -> list[str]:
    """The page and the charts of benchmarks' rows; one of the files may be what a tuner tried."""
    from tilemesh.cli.bench_page import bench_page, is_trials, write_charts

    if html is None and svg is None:
        raise UsageError("the page of a file of rows needs a name: give --html FILE, or --svg FOLDER for charts")
    if svg is not None and Path(svg).exists() and not Path(svg).is_dir():
        raise UsageError(f"--svg {svg}: expected a folder, and this is a file")
    tried = [path for path in files if is_trials(path)]
    if len(tried) > 1:
        raise UsageError(f"{len(tried)} files of what a tuner tried: a page shows one")
    rows = [row for path in files if path not in tried for row in read_rows(path)]
    charts = write_charts(rows, svg) if svg is not None else []
    if html is None:
        return charts
    write_text(bench_page(rows, tried[0] if tried else None), html)
    return [*charts, html]


def follow(folder: str, port: int) -> None:
    """Serve the run's page until interrupted."""
    run.read(folder)  # a folder that is no run is refused before a server starts

    def render(live: str) -> str:
        content = run.read(folder)
        return run_page.render(content, beside(content), live=live)

    server = serve.PageServer(folder, render, port)
    print(f"watching {folder}: {server.address} (Ctrl-C ends this; the run goes on)", flush=True)
    server.serve()


def beside(run: Run) -> Beside:
    """Rows and expected memory of a run; whatever its folder lacks is left out, with the reason."""
    if run.kind != TRAIN.name:
        return Beside([] if run.is_behind else run.rows)
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
    return Beside(run_rows, why, expected_memory(run.config, run.predicted, run.summary), counted)
