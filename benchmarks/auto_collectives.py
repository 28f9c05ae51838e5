"""Whether `auto` is ever slower than the library's own collective: native | auto | mpi4py in a plain loop of calls.

    PYTHONPATH=src python benchmarks/auto_collectives.py --out rows.jsonl [--ranks 2,4,8] [--states unfitted,fitted]

Starts the ranks itself, each combination of ranks and state as a job of its own: before any fit, then after a quick fit
of this machine (in a folder of its own: the user's calibration is neither read nor changed). Ordinary arrays are
measured before any array of `comm.empty` exists. All three are interleaved, the slowest rank counts, and
malloc is set as `tilemesh bench collective` sets it. The table shows `algorithm="native"` over `auto`; a cell is missed
below 0.95 (below 1 KiB: 0.8) unless the two are within 1 µs and every rank has a core. What is in FILE already is not
measured again. All of it takes about five minutes; `--all` times every algorithm that could have been picked as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilemesh.bench.collective.cells import Cell, parse_sizes
from tilemesh.bench.collective.run import MALLOC
from tilemesh.core.busy import Busyness
from tilemesh.core.units import format_bytes
from tilemesh.measure.busy import OtherWork
from tilemesh.measure.machine import stamp

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = "8B,1KiB,8KiB,32KiB,128KiB,256KiB,1MiB,8MiB,64MiB"
STATES, BUFFERS = ("unfitted", "fitted"), ("ordinary", "empty")
ASKED, ASKED_SMALL, SMALL_BYTES, NEAR_S = 0.95, 0.8, 1 << 10, 1e-6

Record = dict[str, Any]


def main() -> None:
    options = _options()
    if options.inside is not None:
        measure(options)
        return
    rows = _read(options.out)
    began = len(rows)
    with tempfile.TemporaryDirectory() as cache:
        for ranks in (int(part) for part in options.ranks.split(",")):
            for state in STATES:
                wanted = state in options.states.split(",")
                known = any(row["ranks"] == ranks and row["state"] == state for row in rows)
                if not wanted or known:
                    continue
                if state == "fitted":
                    fit = ["bench", "collective", "--fit", "--quick", "--ranks", str(ranks), "--transport", "mpi"]
                    _tilemesh([*fit, "--sizes", options.sizes.split(",")[-1]], cache, quiet=True)
                others = OtherWork()
                found = _job(options, ranks, state, cache)
                busy = others.busyness()
                rows += [row | {"busy": busy.to_dict()} for row in found]
                if busy.is_busy:
                    print(f"{ranks} ranks, {state}: disturbed ({busy.words})", file=sys.stderr)
                if options.out is not None:
                    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows) - began} cells measured, {began} read from {options.out}", file=sys.stderr)
    (markdown if options.markdown else report)(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where rows are kept, and read from when run again")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--states", default=",".join(STATES))
    parser.add_argument("--buffers", default=",".join(BUFFERS))
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--all", action="store_true", help="time every algorithm that auto could have picked")
    parser.add_argument(
        "--markdown", action="store_true", help="the worst cell of each range, per collective, as a table"
    )
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # this process is a rank; rows go to this file
    parser.add_argument("--state", help=argparse.SUPPRESS)
    return parser.parse_args()


def _job(options: argparse.Namespace, ranks: int, state: str, cache: str) -> list[Record]:
    found = Path(cache) / f"{ranks}-{state}.jsonl"
    passed = ["--collectives", options.collectives, "--sizes", options.sizes, "--buffers", options.buffers]
    passed += ["--rounds", str(options.rounds), *(["--all"] if options.all else [])]
    script = [str(Path(__file__)), "--inside", str(found), "--state", state, *passed]
    # Without a fit: another, empty folder.
    folder = cache if state == "fitted" else str(Path(cache) / "empty")
    _tilemesh(["launch", "--ranks", str(ranks), "--transport", "mpi", "--", *script], folder)
    return _read(found)


def _tilemesh(arguments: Sequence[str], cache: str, *, quiet: bool = False) -> None:
    environ = {"GLIBC_TUNABLES": MALLOC} | os.environ | {"XDG_CACHE_HOME": cache}
    command = [sys.executable, "-m", "tilemesh", *arguments]
    done = subprocess.run(command, env=environ, capture_output=quiet, text=True, check=False)
    said = (done.stderr or "").splitlines()
    for line in said if done.returncode else [line for line in said if line.startswith("warning")]:
        print(line, file=sys.stderr)
    done.check_returncode()


def _read(path: Path | None) -> list[Record]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Inside the ranks -----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    from tilemesh.comm.connection import connect

    comm = connect(timeout_s=120.0)
    sys.setswitchinterval(1e-3)
    if (comm.fit is not None) != (options.state == "fitted"):
        sys.exit(f"{options.state}, and the ranks find {'a' if comm.fit else 'no'} fit")
    _cell(comm, Cell("all_reduce", comm.size, 8), options)  # a job's first moments belong to what still starts
    rows = [
        _cell(comm, Cell(collective, comm.size, size, buffers), options)
        for buffers in options.buffers.split(",")
        for collective in options.collectives.split(",")
        for size in parse_sizes(options.sizes)
    ]
    if comm.rank == 0:
        Path(options.inside).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    comm.barrier()


def _cell(comm: Any, cell: Cell, options: argparse.Namespace) -> Record:
    from tilemesh.bench.collective.fit import arrays, timer_of
    from tilemesh.bench.collective.peers import peer_call
    from tilemesh.comm.runtime.choose import Request, candidates
    from tilemesh.comm.schedules.book import is_direct, is_shared
    from tilemesh.measure.timing import compare

    x, out = arrays(comm, cell)
    method, library = getattr(comm, cell.collective), peer_call(comm, cell.collective, x, out)
    picked = comm.choice(cell.collective, cell.payload).taken(in_arena=cell.buffers == "empty")
    calls: dict[str, Callable[[int], object]] = {
        "auto": lambda _: method(x, out=out),
        "native": lambda _: method(x, out=out, algorithm="native"),
        "mpi4py": lambda _: library(),
    }
    if options.all:
        request = Request(cell.collective, cell.payload, "float32", "sum")
        for name, refusal in candidates(request, comm.transport).items():
            if refusal is None and is_shared(name) and not (is_direct(name) and cell.buffers != "empty"):
                calls[name] = lambda _, name=name: method(x, out=out, algorithm=name)  # type: ignore[misc]
    found = compare(
        calls, timer=timer_of(comm), repeats=options.rounds, warmup=2, seconds=0.4 * len(calls), on_error="raise"
    )
    return {
        "ranks": comm.size,
        "cores": comm.cores,
        "state": options.state,
        "buffers": cell.buffers,
        "collective": cell.collective,
        "bytes": cell.payload,
        "asked_bytes": cell.nbytes,
        "picked": picked,
        "seconds": {name: sample.median for name, sample in found.items()},
        **{key: value for key, value in stamp().items() if key in ("machine", "commit")},
    }


# What came of it ------------------------------------------------------------------------------------------------------


def is_met(row: Record) -> bool:
    """Whether auto is as quick as the library's own, called by us, within what was asked."""
    auto, native = row["seconds"]["auto"], row["seconds"]["native"]
    if row["bytes"] < SMALL_BYTES:
        return bool(native >= ASKED_SMALL * auto)
    return bool(native >= ASKED * auto or (row["ranks"] <= row["cores"] and auto - native <= NEAR_S))


def report(rows: Sequence[Record]) -> None:
    """A table for each number of ranks, state and kind of array; missed cells once more, with what was picked."""
    groups = dict.fromkeys((row["ranks"], row["state"], row["buffers"]) for row in rows)
    for ranks, state, buffers in groups:
        group = [row for row in rows if (row["ranks"], row["state"], row["buffers"]) == (ranks, state, buffers)]
        sizes = sorted({row["asked_bytes"] for row in group})
        print(f"\n{ranks} ranks on {group[0]['cores']} cores, {state}, {buffers} arrays: native / auto (mpi4py / auto)")
        print(" " * 15 + "".join(f"{format_bytes(size):>13}" for size in sizes))
        for collective in dict.fromkeys(row["collective"] for row in group):
            line = f"{collective:<15}"
            for row in (row for row in group if row["collective"] == collective):
                seconds = row["seconds"]
                mark = " " if is_met(row) else "*"
                library = seconds["mpi4py"] / seconds["auto"]
                line += f"{seconds['native'] / seconds['auto']:>6.2f}{mark}({library:.2f})"
            print(line)
    for row in {(row["ranks"], row["state"]): row for row in rows}.values():
        busy = Busyness.from_dict(row.get("busy"))
        if busy is not None and busy.is_busy:
            print(f"\n{row['ranks']} ranks, {row['state']}: measured on a busy machine ({busy.words})")
    missed = [row for row in rows if not is_met(row)]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} cells as asked; missed (*):")
    for row in missed:
        times = ", ".join(f"{name} {1e6 * seconds:.1f}" for name, seconds in row["seconds"].items())
        where = f"{row['ranks']} ranks, {row['state']}, {row['buffers']}, {row['collective']}"
        print(f"  {where}, {format_bytes(row['bytes'])}: picked {row['picked']}; µs: {times}")


RANGES: dict[str, Callable[[int], bool]] = {
    "8 B": lambda size: size < 1 << 10,
    "1 to 32 KiB": lambda size: 1 << 10 <= size <= 32 << 10,
    "128 and 256 KiB": lambda size: 32 << 10 < size <= 256 << 10,
    "1 to 64 MiB": lambda size: size > 256 << 10,
}


def markdown(rows: Sequence[Record]) -> None:
    """A line for each number of ranks, kind of array and collective: before any fit, fitted. Bold: less than asked."""
    print("| ranks, cores | collective | " + " | ".join(RANGES) + " |")
    print("|---|---|" + "---|" * len(RANGES))
    for ranks, cores, buffers in dict.fromkeys((row["ranks"], row["cores"], row["buffers"]) for row in rows):
        for collective in COLLECTIVES:
            mine = [
                row for row in rows
                if (row["ranks"], row["buffers"], row["collective"]) == (ranks, buffers, collective)
            ]  # fmt: skip
            shown = "`comm.empty`" if buffers == "empty" else "ordinary arrays"
            cells = [_worst([row for row in mine if within(row["asked_bytes"])]) for within in RANGES.values()]
            print(f"| {ranks} on {cores} | {collective}, {shown} | " + " | ".join(cells) + " |")


def _worst(rows: Sequence[Record]) -> str:
    said = []
    for state in STATES:
        found = [row for row in rows if row["state"] == state]
        if not found:
            said.append("not measured")
            continue
        lowest = min(row["seconds"]["native"] / row["seconds"]["auto"] for row in found)
        said.append(f"{lowest:.2f}" if all(map(is_met, found)) else f"**{lowest:.2f}**")
    return ", ".join(said)


if __name__ == "__main__":
    main()
