"""Time our collectives beside the library's own. Or fit the machine, or look at schedules."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from tilemesh.cli.next_command import again
from tilemesh.cli.output import Output
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.options import ROWS, Known, OutFile, OutPicture, argument, changed_flags, option
from tilemesh.core.ranges import Range

MOST_SIMULATED, MOST_DRAWN = 65_536, 4096  # ranks: beyond it a simulation takes minutes and a drawing is not a picture
_RANKS = {"--draw": "8", "--simulate": "64,1024,16384", "--fit": "2,4,8", "a measurement": "2,4,8"}
"""Where nobody says how many, by what is asked for."""
_OF_MODES = {"svg": ("--draw",), "json": ("a measurement",), "chart": ("a measurement",),
             "html": ("a measurement", "--draw")}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    collectives: tuple[str, ...] = argument((), "Which; all of five.", "[COLLECTIVE]...")
    ranks: str | None = option(
        None,
        "How many. [default: 2,4,8; --draw: 8; --simulate: 64,1024,16384]",
        "A,B,...",
        show=False,
    )
    sizes: str = option("4B..64MiB", "4B..64MiB (powers of four), or sizes.", "A,B,...")
    transport: str = option("auto", "mpi, gloo or nccl; auto takes what there is.")
    algorithms: str = option(
        "all", "Besides auto, what to time or simulate: all, none, or names (native: as we call it).", "A,B,..."
    )
    fit: bool = option(False, "Measure and store what auto predicts from.")
    quick: bool = option(False, "Fewer and shorter readings.")
    simulate: Annotated[str, Known("topology", "tilemesh.bench.collective.at_scale:TOPOLOGIES")] | None = option(
        None, "On paper instead: flat, ring or two-level; any --ranks.", "TOPOLOGY"
    )
    draw: str | None = option(None, "Draw this algorithm's schedule, round by round.", "ALGORITHM")
    root: int = option(0, "Of a drawn broadcast, reduce, scatter or gather.")
    node_size: Annotated[int, Range(1)] | None = option(
        None, "Ranks a node, for the hierarchical schedules. [default: 8]"
    )
    svg: OutFile | None = option(None, "Also write the drawing as an SVG.", "FILE")
    json: OutFile | None = option(None, ROWS, "FILE")
    chart: OutPicture | None = option(None, "Draw time over size: .svg, .png.", "FILE")
    html: OutFile | None = option(None, "A page of the rows, or of the rounds with a slider.", "FILE")


def collective(options: CollectiveOptions) -> Output | None:
    modes = changed_flags(options, "draw", "simulate", "fit")
    if len(modes) > 1:
        raise UsageError(
            f"{' and '.join(sorted(modes, key=list(_RANKS).index))}: each is a run of its own, give one of them"
        )
    mode = modes[0] if modes else "a measurement"
    for name, belongs in _OF_MODES.items():
        if getattr(options, name) is not None and mode not in belongs:
            raise UsageError(f"--{name} with {mode}: it belongs to {' or '.join(belongs)}; leave it out")
    work: Mapping[str, Callable[[CollectiveOptions, str], Output | None]]
    work = {"--draw": _draw, "--simulate": _simulate, "--fit": fit_machine, "a measurement": _measure}
    return work[mode](options, options.ranks or _RANKS[mode])


def _measure(options: CollectiveOptions, ranks: str) -> Output:
    from tilemesh.bench.collective.cells import COLLECTIVES, parse_ranks, parse_sizes
    from tilemesh.bench.collective.run import check_transport, collective_rows
    from tilemesh.bench.collective.table import summary, table
    from tilemesh.cli.pages import bench_drawings, bench_page
    from tilemesh.comm.schedules.book import ALGORITHMS

    for name in options.collectives:
        if name not in COLLECTIVES:
            raise unknown("collective to bench", name, COLLECTIVES)
    chosen = ("none",) if options.algorithms == "none" else _named(options.algorithms, (*ALGORITHMS, "native"))
    counts, sizes = parse_ranks(ranks), parse_sizes(options.sizes)
    check_transport(options.transport, counts)
    names, transport, quick = options.collectives or COLLECTIVES, options.transport, options.quick
    measured = (collective_rows(names, n, sizes, transport=transport, algorithms=chosen, quick=quick) for n in counts)
    rows = [row for of_count in measured for row in of_count]
    text = [[*table(rows), *summary(rows)]]
    return Output(text, rows, {"chart": lambda: bench_drawings(rows), "html": lambda: bench_page(rows)},
                  next=again("--fit"))  # fmt: skip


def fit_machine(options: CollectiveOptions, ranks: str) -> None:
    """Measure, show and store fits; what was stored before for other ranks or transports stays."""
    from tilemesh.bench.collective.cells import parse_ranks, parse_sizes
    from tilemesh.bench.collective.run import check_transport, fit_ranks, store
    from tilemesh.bench.collective.table import fit_lines

    most, counts = max(parse_sizes(options.sizes)), parse_ranks(ranks)
    check_transport(options.transport, counts)
    if min(counts) < 2:
        raise UsageError(f"--fit with {min(counts)} rank: expected at least 2, since one has nobody to talk to")

    def warn(text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    for count in counts:
        fit = fit_ranks(count, most, options.transport, quick=options.quick, warn=warn)
        print("\n".join(fit_lines(fit)))
        outcome = store(fit)
        (print if outcome.startswith("stored") else warn)(outcome)


def _draw(options: CollectiveOptions, ranks: str) -> Output:
    from tilemesh.bench.collective.cells import parse_ranks
    from tilemesh.comm.schedules import draw as drawing
    from tilemesh.comm.schedules.book import build
    from tilemesh.measure.table import PIPE_WIDTH
    from tilemesh.report.collective_page import render

    collectives, algorithm = options.collectives or ("all_reduce",), options.draw
    assert algorithm is not None
    if len(collectives) != 1:
        raise UsageError(f"--draw with {len(collectives)} collectives: expected one")
    counts = parse_ranks(ranks, MOST_DRAWN)
    if len(counts) != 1:
        raise UsageError(f"--draw with --ranks {ranks}: expected one number of ranks")
    schedule = build(collectives[0], algorithm, counts[0], options.root, node_size=options.node_size)
    drawn = drawing.text(schedule, shutil.get_terminal_size((PIPE_WIDTH, 0)).columns)
    files = {"svg": lambda: drawing.svg(schedule), "html": lambda: render([], [schedule])}
    return Output([drawn.splitlines()], files=files)


def _simulate(options: CollectiveOptions, ranks: str) -> Output:
    """Predicted seconds over sizes, of ring, tree and hierarchical unless named, and where the quickest changes."""
    from tilemesh.bench.collective.at_scale import NODE, assumptions, simulated
    from tilemesh.bench.collective.cells import parse_ranks, parse_sizes
    from tilemesh.comm.schedules.book import ALGORITHMS

    topology, node = options.simulate or "", options.node_size or NODE
    counts, sizes = parse_ranks(ranks, MOST_SIMULATED), parse_sizes(options.sizes)
    algorithms, names = _named(options.algorithms, ALGORITHMS), options.collectives or ("all_reduce",)
    lines = [simulated(name, topology, count, sizes, node, algorithms) for name in names for count in counts]
    return Output([assumptions(topology, node), *lines])


def _named(names: str, known: Sequence[str]) -> tuple[str, ...]:
    """The algorithms of --algorithms; none for `all`, which every command reads in its own way."""
    chosen = () if names == "all" else tuple(name for name in names.split(",") if name != "none")
    for name in chosen:
        if name not in known:
            raise unknown("algorithm", name, known)
    return chosen
