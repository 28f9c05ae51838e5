"""Time pipeline schedules beside torch's. Over stages that sleep; or how much of their messages computing hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tilemesh.cli.output import Output, console_beside
from tilemesh.core.advice import NextCommand
from tilemesh.core.errors import UsageError
from tilemesh.core.options import ROWS, Commas, Count, OutFile, argument, option
from tilemesh.core.ranges import Range

if TYPE_CHECKING:
    from tilemesh.measure.row import Row


@dataclass(frozen=True, kw_only=True)
class PipelineBenchOptions:
    schedules: tuple[str, ...] = argument(
        (), "gpipe, 1f1b, interleaved, zb-v, …; all that so many ranks can run.", "[SCHEDULE]..."
    )
    ranks: Annotated[tuple[int, ...], Commas(), Range(2, 64)] = option((2, 4, 8), "Stages.", "A,B,...")
    microbatches: Count = option(8, "Of a step.")
    repeats: Count = option(5, "Steps of each, in turns.")
    transport: str = option("auto", "mpi, torch or auto; torch's own schedules need torch.")
    peers: bool = option(True, "Also torch's schedules of the same names.")
    sends: str | None = option(None, "Stages that compute and send so much, instead of sleeping.", "1MiB,8MiB")
    json: OutFile | None = option(None, ROWS, "FILE")


def pipeline(options: PipelineBenchOptions) -> Output:
    from tilemesh.bench.collective.cells import parse_sizes
    from tilemesh.bench.harness import KeptRows
    from tilemesh.bench.train.sends import sends_rows
    from tilemesh.bench.train.sleeping import program_of, sleeping_rows
    from tilemesh.core.step.book import synchronous
    from tilemesh.launch.start import choose_transport

    peers = options.peers and options.sends is None and options.transport in ("auto", "torch")
    transport = choose_transport("torch" if peers else options.transport)
    sizes, rows, microbatches = parse_sizes(options.sends or "1MiB"), KeptRows(options.json), options.microbatches
    console = console_beside(options.json)
    for count in options.ranks:
        names = []
        for name in options.schedules or (name for name in synchronous() if name != "terapipe"):
            try:
                program_of(name, count, microbatches)
                names.append(name)
            except UsageError:
                if options.schedules:  # what was not named is left out where it cannot be built
                    raise
        console.print(f"{count} ranks: {', '.join(names)}")
        if options.sends is None:
            rows.add(sleeping_rows(count, names, microbatches, options.repeats, transport, peers))
        for name in names if options.sends is not None else ():
            rows.add(sends_rows(count, name, sizes, microbatches, options.repeats, transport))
    return Output([rows], rows, next=_next(rows))


def _next(rows: Sequence[Row]) -> NextCommand | None:
    """To train with the schedule that is predicted to be quickest on the most ranks, beside 1f1b."""
    most = max((int(str(row.case["ranks"])) for row in rows), default=0)
    times = {str(row.case["schedule"]): row.predicted for row in rows if row.case["ranks"] == most and row.predicted}
    if "1f1b" not in times:
        return None
    best = min(times, key=lambda name: times[name] or 0.0)
    words = f"train --mesh pp={most} --set plan.schedule={best}"
    return NextCommand.faster(words, times["1f1b"] or 0.0, times[best] or 0.0) if best != "1f1b" else NextCommand(words)
