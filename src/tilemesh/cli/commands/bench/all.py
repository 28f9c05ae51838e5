"""Run what this machine can, the most valuable first. Rows are kept as they come; another call with the same folder
goes on where this one was cut.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tilemesh.cli.next_command import again
from tilemesh.cli.output import Block, Output, console_beside, interrupt, on_signals, table_of
from tilemesh.core.advice import NextCommand
from tilemesh.core.options import ROWS, Known, OutFile, OutFolder, Seconds, Words, option
from tilemesh.runs import names


@dataclass(frozen=True, kw_only=True)
class AllBenchOptions:
    out: OutFolder = option(..., "Rows, what each command printed, and how far all came.", "FOLDER")
    seconds: Seconds = option(500.0, "End after so many.", "S")
    jobs: Annotated[Words, Known("job", "tilemesh.bench.jobs:JOBS")] = option(
        (), "These alone, failed ones again.", "A,B"
    )
    list: bool = option(False, "Only say what would run, and what cannot.")
    json: OutFile | None = option(None, ROWS, "FILE")


def all(options: AllBenchOptions) -> Output:  # noqa: A001 - a command is called as its file
    from tilemesh.bench.all import run_all
    from tilemesh.bench.jobs import JOBS
    from tilemesh.cli.pages import bench_page
    from tilemesh.comm.schedules.collectives import COLLECTIVES
    from tilemesh.core.files import write_text

    chosen = [job for job in JOBS.values() if not options.jobs or job.name in options.jobs]
    if options.list:
        lines = [
            {
                "job": job.name,
                "about": f"{job.seconds:.0f} s",
                "commands": str(len(job.commands)),
                "here": job.why_not() or "yes",
            }
            for job in chosen
        ]
        return Output([table_of(lines, left=("job", "here"))])
    console, folder = console_beside(options.json), Path(options.out)
    with on_signals(interrupt, signal.SIGTERM):
        findings = run_all(folder, options.seconds, options.jobs, console.print)
    lines = [
        {
            "job": name, "seconds": f"{state.seconds:.0f}", "came to": findings.left.get(name)
            or (f"failed: {state.failure}" if state.failure else "done"),
        }
        for name, state in findings.states.items()
    ]  # fmt: skip
    text: list[Block] = [findings.rows, table_of(lines, left=("job", "came to")), f"rows: {folder / names.ROWS}"]
    for name, is_shown in (("collectives", True), ("rows", False)):
        rows = [row for row in findings.rows if (row.name in COLLECTIVES) == is_shown]
        if rows:
            write_text(bench_page(rows), folder / f"{name}.html")
            text.append(f"page: {folder / f'{name}.html'}")
    after = NextCommand(f"report {folder / names.ROWS} --html rows.html") if not findings.left else again("")
    return Output(text, findings.rows, next=after)
