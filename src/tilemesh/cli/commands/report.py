"""Make the page of runs or of a benchmark's rows. One HTML file, no network; several runs are compared."""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.core.options import OutFile, OutFolder, argument, option


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    what: tuple[str, ...] = argument(
        ..., "A run, up to eight runs, or files of bench rows.", "RUN ... | ROWS.jsonl ..."
    )
    html: OutFile | None = option(None, "Where to write; else beside what is shown.", "FILE")
    svg: OutFolder | None = option(None, "Of rows: a chart per operator or collective.", "FOLDER")


def report(options: ReportOptions) -> None:
    from tilemesh.cli.pages import write_pages

    for path in write_pages(options.what, options.html, options.svg):
        print(f"{'chart' if options.svg is not None and path != options.html else 'page'}: {path}")
