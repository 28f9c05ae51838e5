"""What `tilemesh bench collective` does: checks what was asked, calls the benchmark, prints and writes the rows."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tilemesh.bench.collective.at_scale import NODE, TOPOLOGIES, assumptions, simulated
from tilemesh.bench.collective.cells import COLLECTIVES, parse_ranks, parse_sizes
from tilemesh.bench.collective.run import check_transport, collective_rows, fit_ranks, store
from tilemesh.bench.collective.table import fit_lines, summary, table
from tilemesh.cli.bench_page import write_found
from tilemesh.cli.targets import check_targets
from tilemesh.comm.schedules import draw as drawing
from tilemesh.comm.schedules.book import ALGORITHMS, build
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.files import write_text
from tilemesh.measure.row import Row
from tilemesh.measure.table import PIPE_WIDTH, print_words
from tilemesh.report.picture import check_picture

MOST_SIMULATED, MOST_DRAWN = 65_536, 4096  # ranks: beyond it a simulation takes minutes and a drawing is no picture


def measure(
    collectives: Sequence[str] | None,
    ranks: str,
    sizes: str,
    transport: str,
    names: str,
    *,
    quick: bool,
    json: str | None,
    chart: str | None,
    html: str | None = None,
) -> None:
    for name in collectives or ():
        if name not in COLLECTIVES:
            raise unknown("collective to bench", name, COLLECTIVES)
    chosen = ("none",) if names == "none" else _named(names, (*ALGORITHMS, "native"))
    if chart is not None:
        check_picture(chart)
    check_targets(json=json, chart=chart, html=html)
    counts, wanted = parse_ranks(ranks), parse_sizes(sizes)
    check_transport(transport, counts)
    rows: list[Row] = []
    for count in counts:
        rows += collective_rows(
            collectives or COLLECTIVES, count, wanted, transport=transport, algorithms=chosen, quick=quick
        )
    console = Console(stderr=json == "-", highlight=False)
    for line in [*table(rows), *summary(rows)]:
        console.print(line, soft_wrap=True, markup=False)
    write_found(rows, console, json=json, chart=chart, html=html)


def fit_machine(ranks: str, sizes: str, transport: str, quick: bool) -> None:
    """Measure, show and store fits; what was stored before for other ranks or transports stays."""
    most, counts = max(parse_sizes(sizes)), parse_ranks(ranks)
    check_transport(transport, counts)
    if min(counts) < 2:
        raise UsageError(f"--fit with {min(counts)} rank: expected at least 2, since one has nobody to talk to")

    def warn(text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    for count in counts:
        fit = fit_ranks(count, most, transport, quick=quick, warn=warn)
        print("\n".join(fit_lines(fit)))
        said = store(fit)
        (print if said.startswith("stored") else warn)(said)


def draw_schedule(
    collectives: Sequence[str],
    algorithm: str,
    ranks: str,
    root: int,
    node_size: int | None,
    svg: Path | None,
    html: str | None = None,
) -> None:
    if len(collectives) != 1:
        raise UsageError(f"--draw with {len(collectives)} collectives: expected one")
    check_targets(svg=svg, html=html)
    counts = parse_ranks(ranks, MOST_DRAWN)
    if len(counts) != 1:
        raise UsageError(f"--draw with --ranks {ranks}: expected one number of ranks")
    schedule = build(collectives[0], algorithm, counts[0], root, node_size=node_size)
    drawn = drawing.text(schedule, shutil.get_terminal_size((PIPE_WIDTH, 0)).columns)
    if svg is not None:
        write_text(drawing.svg(schedule), svg)
    if html is not None:
        from tilemesh.report.collective_page import render

        write_text(render([], [schedule]), html)
    print(drawn)
    if html is not None:
        print(f"page: {html}")


def simulate_scale(
    collectives: Sequence[str], topology: str, ranks: str, sizes: str, node_size: int | None = None, names: str = "all"
) -> None:
    """Predicted seconds over sizes, of ring, tree and hierarchical unless named, and where the quickest changes."""
    if topology not in TOPOLOGIES:
        raise unknown("topology", topology, TOPOLOGIES)
    counts, wanted = parse_ranks(ranks, MOST_SIMULATED), parse_sizes(sizes)
    if node_size is not None and node_size < 1:
        raise UsageError(f"--node-size {node_size}: expected at least 1")
    print_words(assumptions(topology, node_size or NODE), Console(highlight=False, markup=False))
    for collective in collectives:
        for count in counts:
            print("\n".join(simulated(collective, topology, count, wanted, node_size or NODE, _named(names))))


def _named(names: str, known: Sequence[str] = tuple(ALGORITHMS)) -> tuple[str, ...]:
    """The algorithms of --algorithms; none for `all`, which every command reads in its own way."""
    chosen = () if names == "all" else tuple(name for name in names.split(",") if name not in ("none", ""))
    for name in chosen:
        if name not in known:
            raise unknown("algorithm", name, known)
    return chosen
