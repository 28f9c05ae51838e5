"""The table of targets for the collectives, with what the given rows reached: targets_collectives.py ROWS.jsonl...

Every figure is native's median over ours in the same run, `algorithm="auto"`; a range of sizes shows its worst cell.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

from tilemesh.bench.collective.fit import SIZES as SIZES_FITTED
from tilemesh.comm.schedules.book import is_shared
from tilemesh.measure.row import Row, read_rows

KIB, MIB = 1 << 10, 1 << 20
SIZES: dict[str, Callable[[int], bool]] = {
    "≤ 512 B": lambda n: n <= 512,
    "1 to 32 KiB": lambda n: KIB <= n <= 32 * KIB,
    "256 KiB": lambda n: n == 256 * KIB,
    "≥ 1 MiB": lambda n: n >= MIB,
}
TARGETS = {
    ("all_reduce", "ordinary"): (0.9, 1.2, 1.1, 1.3),
    ("all_reduce", "empty"): (0.9, 1.3, 1.5, 2.0),
    ("reduce_scatter", "empty"): (0.9, 1.0, 1.3, 2.0),
    ("all_gather", "empty"): (0.9, 1.0, 1.1, 1.4),
    ("all_to_all", "empty"): (0.9, 0.95, 0.95, 1.0),
}
GLOO = {"≤ 32 KiB": (lambda n: n <= 32 * KIB, 10.0), "64 MiB": (lambda n: n == 64 * MIB, 1.4)}


def main(paths: Sequence[str]) -> None:
    rows = [row for path in paths for row in read_rows(path)]
    timed = [row for row in rows if row.unit == "s" and row.measured is not None]
    for ranks in sorted({int(str(row.case["ranks"])) for row in timed if row.case["transport"] == "mpi"}):
        print_table([row for row in timed if row.case["ranks"] == ranks and row.case["transport"] == "mpi"], ranks)
    print_gloo([row for row in timed if row.case["transport"] == "torch"])
    print_limit(timed)
    print_choices(timed)
    print_crossovers(timed)
    print_overlap([row for row in rows if row.name == "overlap"])


def ratios(rows: Sequence[Row], collective: str, buffers: str) -> dict[int, float]:
    """native / ours by size, for auto."""
    return {
        int(str(row.case["bytes"])): row.speedup["native"]
        for row in rows
        if row.name == collective
        and row.case["buffers"] == buffers
        and row.case["algorithm"] == "auto"
        and "native" in row.speedup
    }


def print_table(rows: Sequence[Row], ranks: int) -> None:
    case = rows[0].case
    print(f"\n{ranks} MPI ranks on {case['cores']} cores: native / ours, target → reached (worst cell of the range)")
    print(f"{'':<28}" + "".join(f"{name:>20}" for name in SIZES))
    for (collective, buffers), targets in TARGETS.items():
        known = ratios(rows, collective, buffers)
        cells = []
        for (_, within), target in zip(SIZES.items(), targets, strict=True):
            found = [ratio for size, ratio in known.items() if within(size)]
            worst = min(found, default=None)
            mark = "" if worst is None else " ok" if worst >= target else " --"
            cells.append(f"≥ {target:g} → {'none' if worst is None else f'{worst:.2f}'}{mark}")
        words = f"{collective}, {'comm.empty' if buffers == 'empty' else 'ordinary'}"
        print(f"{words:<28}" + "".join(f"{cell:>20}" for cell in cells))


def print_gloo(rows: Sequence[Row]) -> None:
    for ranks in sorted({int(str(row.case["ranks"])) for row in rows}):
        mine = [row for row in rows if row.case["ranks"] == ranks]
        known = ratios(mine, "all_reduce", "ordinary")
        for name, (within, target) in GLOO.items():
            found = [ratio for size, ratio in known.items() if within(size)]
            if found:
                mark = "ok" if min(found) >= target else "--"
                print(f"gloo, {ranks} ranks, all_reduce {name}: target ≥ {target:g}, reached {min(found):.2f} {mark}")


def print_limit(rows: Sequence[Row]) -> None:
    for row in rows:
        case = row.case
        is_it = row.name == "all_reduce" and case["algorithm"] == "auto" and case["bytes"] == 64 * MIB
        if is_it and case["buffers"] == "empty" and row.limit and row.measured and case["transport"] == "mpi":
            times = row.measured.median / row.limit
            mark = "ok" if times <= 1.4 else "--"
            print(
                f"64 MiB all_reduce, comm.empty, {case['ranks']} ranks: {times:.2f} times the limit, target 1.4 {mark}"
            )


def print_choices(rows: Sequence[Row]) -> None:
    cells: dict[tuple[object, ...], dict[str, float]] = {}
    errors = []
    for row in rows:
        assert row.measured is not None
        key = (row.name, *(row.case[name] for name in ("transport", "ranks", "bytes", "buffers")))
        cells.setdefault(key, {})[str(row.case["algorithm"])] = row.measured.median
        if row.predicted is not None and row.case["bytes"] not in SIZES_FITTED:
            errors.append(abs(row.predicted - row.measured.median) / row.measured.median)
    judged = [cell for cell in cells.values() if "auto" in cell and len(cell) > 3]
    if judged:
        # What auto could have picked: its own algorithms, and the library's own as called by us.
        good = sum(cell["auto"] <= 1.1 * min(s for name, s in cell.items() if name != "native") for cell in judged)
        share = good / len(judged)
        print(
            f"auto within 10 % of the quickest measured: {good} of {len(judged)} cells ({share:.0%}), "
            f"target 90 % {'ok' if share >= 0.9 else '--'}"
        )
    if errors:
        middle = sorted(errors)[len(errors) // 2]
        mark = "ok" if middle <= 0.3 else "--"
        print(f"median prediction error of {len(errors)} rows not used in the fit: {middle:.0%}, target 30 % {mark}")


def crossing(one: dict[int, float], other: dict[int, float]) -> float | None:
    """The size at which two curves first cross, between the sizes that were measured; None: they do not."""
    sizes = sorted(set(one) & set(other))
    for low, high in pairwise(sizes):
        a, b = (math.log(one[size] / other[size]) for size in (low, high))
        if a < 0 < b or b < 0 < a:
            return float(low * (high / low) ** (a / (a - b)))
    return None


def print_crossovers(rows: Sequence[Row]) -> None:
    """Every pair of algorithms that cross where they were measured: where the fit said they would."""
    series: dict[tuple[object, ...], dict[str, tuple[dict[int, float], dict[int, float]]]] = {}
    for row in rows:
        name = str(row.case["algorithm"])
        if row.predicted is None or row.measured is None or name == "auto":
            continue
        key = (row.name, *(row.case[part] for part in ("transport", "ranks", "buffers")))
        measured, predicted = series.setdefault(key, {}).setdefault(name, ({}, {}))
        size = int(str(row.case["bytes"]))
        measured[size], predicted[size] = row.measured.median, row.predicted
    fitted: list[float] = []
    simulated: list[float] = []
    for algorithms in series.values():
        for one, other in combinations(algorithms, 2):
            found, said = (crossing(algorithms[one][i], algorithms[other][i]) for i in (0, 1))
            if found is not None:
                distance = math.inf if said is None else abs(math.log2(said / found))
                (fitted if has_curve(one) and has_curve(other) else simulated).append(distance)
    for words, distances in (("as measured by the fit", fitted), ("where one is simulated", simulated)):
        if distances:
            near = sum(distance <= 1 for distance in distances)
            mark = "ok" if near == len(distances) else "--"
            print(f"crossovers predicted within a power of two, {words}: {near} of {len(distances)} {mark}")


def has_curve(algorithm: str) -> bool:
    """Whether a fit measures it as a whole; others it puts together from rounds of messages."""
    return is_shared(algorithm) or algorithm == "native_by_us"


def print_overlap(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.measured is not None:
            case = row.case
            print(
                f"overlap, {case['ranks']} ranks on {case['cores']} cores, all_reduce of {case['bytes']} bytes, "
                f"{case['algorithm']}: {row.measured.median:.0%} of communication hidden"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
