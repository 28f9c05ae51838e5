"""What `tilemesh bench collective` does: calls the ranks that measure, and prints what they found."""

from __future__ import annotations

import datetime as dt
import json as json_format
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console

from tilemesh.cli.targets import check_targets
from tilemesh.comm.bench_job import Job
from tilemesh.comm.cells import COLLECTIVES, crossovers, parse_ranks, parse_sizes
from tilemesh.comm.runtime.fit import SECTION, Fit, key_of
from tilemesh.comm.schedules import draw as drawing
from tilemesh.comm.schedules.book import ALGORITHMS, algorithms, build
from tilemesh.comm.schedules.simulate import Memory, simulate
from tilemesh.comm.schedules.topology import Flat, Ring, Topology, TwoLevel, Wire
from tilemesh.core.busy import Busyness, replaces
from tilemesh.core.calibration import Calibration, find
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.units import format_bytes, format_rate, format_seconds
from tilemesh.launch import call
from tilemesh.launch.job import check_ranks
from tilemesh.measure.busy import OtherWork, again_while_busy
from tilemesh.measure.machine import command, stamp, this_machine
from tilemesh.measure.row import Row, write_rows

TRANSPORTS = {"auto": "auto", "mpi": "mpi", "gloo": "torch", "nccl": "torch"}
PARTS = ("set-up", "copy", "wire", "reduce", "wait")
TOPOLOGIES = ("flat", "ring", "two-level")
MOST_SIMULATED, MOST_DRAWN = 65_536, 4096  # ranks: beyond it a simulation takes minutes and a drawing is no picture
AT_SCALE = ("ring", "tree", "hierarchical")  # what is simulated unless named

# Without these the library's large collectives lose a third of their time to fresh pages at each call.
MALLOC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2000000000:glibc.malloc.top_pad=268435456"

# NVLink inside nodes of eight, InfiniBand between them: latency and bytes a second each way.
NVLINK, INFINIBAND = Wire(1e-6, 450e9), Wire(3e-6, 50e9)
NODE = 8
GPU = Memory(reduce_bytes_per_s=1e12, copy_bytes_per_s=1.5e12, sync_s=2e-6)


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
    wanted = _known(collectives)
    chosen = ("none",) if names == "none" else _named(names)
    if chart is not None and not chart.endswith(".svg"):
        raise UsageError(f"chart '{chart}': expected a file that ends in .svg")
    check_targets(json=json, chart=chart, html=html)
    counts = parse_ranks(ranks)
    for count in counts:
        check_ranks(count)
    repeats, seconds = (5, 0.1) if quick else (15, 0.5)
    rows: list[Row] = []
    for count in counts:
        job = Job(
            command=command(),
            collectives=tuple(wanted),
            sizes=tuple(parse_sizes(sizes)),
            algorithms=chosen,
            repeats=repeats,
            seconds=seconds,
        )
        rows += [Row.from_json(line) for line in _in_ranks(job, count, transport)]
    console = Console(stderr=json == "-", highlight=False)
    for line in [*_table(rows), *_summary(rows)]:
        console.print(line, soft_wrap=True, markup=False)
    if json is not None:
        write_rows(rows, json)
    if chart is not None:
        from tilemesh.comm.chart import draw

        draw(rows, chart)
        console.print(f"chart: {chart}", soft_wrap=True)
    if html is not None:
        from tilemesh.cli.bench_page import write_bench_page

        write_bench_page(rows, html)
        console.print(f"page: {html}", soft_wrap=True)


def _named(names: str) -> tuple[str, ...]:
    """The algorithms of --algorithms; none for `all`, which every command reads in its own way."""
    chosen = () if names == "all" else tuple(name for name in names.split(",") if name not in ("none", ""))
    for name in chosen:
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS)
    return chosen


def fit_machine(ranks: str, sizes: str, transport: str, quick: bool) -> None:
    """Measure, show and store fits; what was stored before for other ranks or transports stays."""
    most = max(parse_sizes(sizes))
    counts = parse_ranks(ranks)
    for count in counts:
        check_ranks(count)
        if count < 2:
            raise UsageError(f"--fit with {count} rank: expected at least 2, since one has nobody to talk to")
    for count in counts:
        job = Job(command=command(), sizes=(most,), fit=True, seconds=0.1 if quick else 0.4)
        fit, _ = again_while_busy(partial(_fit_ranks, job, count, transport), _warn)
        _print_fit(fit)
        _store(fit)


def _fit_ranks(job: Job, ranks: int, transport: str) -> tuple[Fit, Busyness]:
    others = OtherWork()
    (line,) = _in_ranks(job, ranks, transport)
    fit = Fit.from_dict(json_format.loads(line))
    busy = replace(others.busyness(), spread=0.0 if fit.busy is None else fit.busy.spread)
    return replace(fit, busy=busy), busy


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


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
    print(drawing.text(schedule))
    if svg is not None:
        try:
            svg.write_text(drawing.svg(schedule), encoding="utf-8")
        except OSError as error:
            raise RunError(f"{svg} could not be written: {error.strerror}") from None
    if html is not None:
        from tilemesh.report.collective_page import render
        from tilemesh.report.html import write

        write(render([], [schedule]), html)
        print(f"page: {html}")


def simulate_scale(
    collectives: Sequence[str], topology: str, ranks: str, sizes: str, node_size: int | None = None, names: str = "all"
) -> None:
    """Predicted seconds over sizes, of ring, tree and hierarchical unless named, and where the quickest changes."""
    if topology not in TOPOLOGIES:
        raise unknown("topology", topology, TOPOLOGIES)
    counts = parse_ranks(ranks, MOST_SIMULATED)
    if node_size is not None and node_size < 1:
        raise UsageError(f"--node-size {node_size}: expected at least 1")
    size_of_node = node_size or NODE
    print(assumptions(topology, size_of_node))
    for collective in collectives:
        known = [name for name in _named(names) or AT_SCALE if name in algorithms(collective)]
        if not known:
            raise UsageError(
                f"none of {names} serves {collective}: expected some of {', '.join(algorithms(collective))}"
            )
        for count in counts:
            times: dict[str, Any] = {name: [] for name in known}
            for size in parse_sizes(sizes):
                for name in known:
                    schedule = build(collective, name, count, node_size=size_of_node)
                    seconds = simulate(schedule, size, topology_of(topology, count, size_of_node), GPU).seconds
                    times[name].append((size, seconds))
            print(f"{collective}, {count} ranks, {topology}: seconds as simulated")
            print("  " + "size".rjust(10) + "".join(name.rjust(14) for name in known) + "   quickest")
            for i, size in enumerate(parse_sizes(sizes)):
                here = {name: times[name][i][1] for name in known}
                best = min(here, key=lambda name: here[name])
                cells = "".join(format_seconds(here[name]).rjust(14) for name in known)
                print(f"  {format_bytes(size):>10}{cells}   {best}")
            for pair in combinations(known, 2):
                for last, first, one, other in crossovers({name: times[name] for name in pair}):
                    print(f"  {one} is overtaken by {other} between {format_bytes(last)} and {format_bytes(first)}")


def assumptions(topology: str, node_size: int) -> str:
    """What a simulation takes the machine to be: latency (α), bytes per second on a link (β) and in memory (γ)."""

    def wire(words: str, found: Wire) -> str:
        return f"{words} α {format_seconds(found.latency_s)}, β {format_rate(found.bytes_per_s, 'B/s')}"

    wires = [wire("each message", INFINIBAND)]
    if topology == "two-level":
        wires = [wire(f"inside nodes of {node_size}", NVLINK), wire("between nodes", INFINIBAND)]
    return (
        f"assumed, not measured: {'; '.join(wires)}; γ {format_rate(GPU.reduce_bytes_per_s, 'B/s')} reduced, "
        f"{format_rate(GPU.copy_bytes_per_s, 'B/s')} copied, {format_seconds(GPU.sync_s)} a barrier"
    )


def topology_of(name: str, ranks: int, node_size: int = NODE) -> Topology:
    if name == "flat":
        return Flat(ranks, INFINIBAND)
    if name == "ring":
        return Ring(ranks, INFINIBAND)
    return TwoLevel(ranks, node_size, NVLINK, INFINIBAND)


def _known(collectives: Sequence[str] | None) -> list[str]:
    for name in collectives or ():
        if name not in COLLECTIVES:
            raise unknown("collective to bench", name, COLLECTIVES)
    return list(collectives or COLLECTIVES)


def _in_ranks(job: Job, ranks: int, transport: str) -> list[str]:
    """What rank 0 found, an object of JSON each."""
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    if transport == "nccl":
        _require_gpus(ranks)

    def sink(rank: int, stream: str, line: bytes) -> None:
        if stream == "err":
            sys.stderr.write(line.decode(errors="replace") + "\n")
            sys.stderr.flush()

    environ = {"GLIBC_TUNABLES": MALLOC} | os.environ
    found: list[list[str]] = call(
        "tilemesh.comm.bench_ranks:measure", ranks, asdict(job), transport=TRANSPORTS[transport], environ=environ,
        sink=sink,
    )  # fmt: skip
    return found[0]


def _require_gpus(ranks: int) -> None:
    import torch

    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if have < ranks:
        raise UsageError(f"--transport nccl with {ranks} ranks: it needs a GPU for each, and there are {have}")


def _store(fit: Fit) -> None:
    """Beside the fits for other ranks; one that was measured on a quieter machine stays, and is said to."""
    machine = this_machine()
    found = find(machine.id)
    if found is None:
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        found = Calibration(machine.id, machine.words, now, stamp()["versions"])
    section, key = dict(found.extra.get(SECTION, {})), key_of(fit.transport, fit.ranks, fit.cores)
    before = section.get(key)
    before = before if isinstance(before, dict) else {}
    if fit.busy is not None and not replaces(fit.busy, Busyness.from_dict(before.get("busy"))):
        _warn(f"not stored: the fit of {before.get('when')} was measured on a quieter machine, and stays")
        return
    section[key] = fit.to_dict()
    print(f"stored in {found.with_section(SECTION, section).save()}")


def _print_fit(fit: Fit) -> None:
    where = f"{fit.transport}, {fit.ranks} ranks on {fit.cores} core{'s' if fit.cores > 1 else ''}"
    print(f"{where}, all busy: a meeting takes {format_seconds(fit.sync_s)}")
    for name, curve in sorted(fit.curves.items()):
        pieces = ", ".join(
            f"{format_rate(rate, 'B/s')} to {format_bytes(high)}" for _, high, rate in curve.bytes_per_s()
        )
        print(f"  {name:<28} α {format_seconds(curve.latency_s):>9}   β {pieces or 'none'}")


def _table(rows: Sequence[Row]) -> list[str]:
    """A line a cell: auto with its neighbours, where its time went, and every other algorithm's time."""
    lines: list[str] = []
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row.unit == "s" and row.measured is not None:
            key = (row.name, row.case["transport"], row.case["ranks"], row.case["buffers"], row.case["bytes"])
            cells.setdefault(key, {})[str(row.case["algorithm"])] = row
    before: tuple[Any, ...] = ()
    for key, cell in cells.items():
        if key[:4] != before:
            before = key[:4]
            auto = cell["auto"].case
            crowd = ", more ranks than cores" if auto["oversubscribed"] else ""
            lines += ["", f"{key[0]}, {key[2]} ranks over {key[1]} on {auto['cores']} cores{crowd}, {key[3]} arrays"]
            lines.append(
                f"{'size':>9} {'auto picks':<19}{'predicted':>10}{'measured':>10}{'limit':>10}{'native':>10}"
                f"{'native/ours':>12}{'algorithm':>12}{'bus':>11}{'sent':>10}  set-up copy wire reduce wait | others"
            )
        lines.append(_cell(int(str(key[4])), cell))
    # The columns of the table are those of auto's rows.
    shown = [row for row in rows if row.case.get("algorithm") == "auto"]
    reasons = {(column, row.missing[column]) for row in shown for column in _EXPLAINED if column in row.missing}
    lines += ["", *(f"{column} is missing: {why}" for column, why in sorted(reasons))]
    for row in rows:
        if row.name == "overlap" and row.measured is not None:
            lines.append(
                f"overlap: {row.measured.median:.0%} of an all_reduce of {format_bytes(float(str(row.case['bytes'])))} "
                f"by {row.case['algorithm']} on {row.case['ranks']} ranks hidden behind compute"
            )
    return lines


_EXPLAINED = ("predicted", "limit", "native")


def _cell(size: int, cell: dict[str, Row]) -> str:
    auto = cell["auto"]
    case, measured = auto.case, auto.measured
    assert measured is not None

    def seconds(value: float | None) -> str:
        return "-" if value is None else format_seconds(value)

    sent = "-" if case["sent_bytes"] is None else format_bytes(float(str(case["sent_bytes"])))
    native = auto.peers.get("native")
    ratio = f"{auto.speedup['native']:.2f}" if native is not None else "-"
    parts = " ".join(f"{float(str(case.get(f'in_{part}', 0))):.2f}" for part in PARTS)
    others = [
        f"{name} {format_seconds(row.measured.median)}"
        for name, row in cell.items()
        if name not in ("auto", "native") and row.measured is not None
    ]
    return (
        f"{format_bytes(size):>9} {case['picked']!s:<19}{seconds(auto.predicted):>10}{seconds(measured.median):>10}"
        f"{seconds(auto.limit):>10}{seconds(native.median if native else None):>10}{ratio:>12}"
        f"{format_rate(float(str(case['algorithm_bytes_per_s'])), 'B/s'):>12}"
        f"{format_rate(float(str(case['bus_bytes_per_s'])), 'B/s'):>11}"
        f"{sent:>10}  {parts} | {', '.join(others)}"
    )


def _summary(rows: Sequence[Row]) -> list[str]:
    """How good auto's choices and the predictions were, over all rows."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    errors = []
    for row in rows:
        if row.unit != "s" or row.measured is None:
            continue
        case = row.case
        key = (row.name, case["ranks"], case["bytes"], case["buffers"])
        cells.setdefault(key, {})[str(case["algorithm"])] = row.measured.median
        if row.predicted is not None:
            errors.append(abs(row.predicted - row.measured.median) / row.measured.median)
    lines = []
    judged = [cell for cell in cells.values() if "auto" in cell and len(cell) > 2]
    if judged:
        good = sum(cell["auto"] <= 1.1 * min(s for name, s in cell.items() if name != "native") for cell in judged)
        lines.append(f"auto within 10 % of the quickest it could have picked in {good} of {len(judged)} cells")
    if errors:
        lines.append(f"median error of {len(errors)} predictions: {sorted(errors)[len(errors) // 2]:.0%}")
    return lines
