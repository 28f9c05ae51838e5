"""The page of a kernel's bench: rates and roofline, speedups over the peers, times by case, and what the tuner tried.

Rows of any other bench or of a calibration have the same page without a roofline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilemesh.core.units import format_seconds
from tilemesh.measure.row import Row
from tilemesh.measure.sample import equal
from tilemesh.measure.table import format_value
from tilemesh.report.bars import Bar, BarPart, bars, heat
from tilemesh.report.draw import PageTable, figure
from tilemesh.report.html import Child, Html, article, el, headed
from tilemesh.report.kernel_charts import (
    RowWork,
    bar_names,
    best_peer,
    case_name,
    compute_bound,
    is_kernel_time,
    kernel_times,
    peers_of,
    rates,
    roofline,
)
from tilemesh.report.rows import origin, percent, row_table

BUILT_IN = ("library", "torch")
"""Kinds of a trial that are not ours to tune."""


@dataclass(frozen=True)
class UnitWords:
    """What is said of rows of one unit beside a peer's: only a time or a rate is faster."""

    better: str
    worse: str
    than: str
    title: str
    legend: str


_FASTER = UnitWords("faster", "slower", "faster than every peer", "Speedup over the best peer", "1.00× is the peer")
_WORDS = {
    "B": UnitWords("smaller", "larger", "smaller than every peer", "Bytes beside the best peer",
                   "2.00× is half of the peer's bytes"),
    "nats": UnitWords("lower", "higher", "a lower loss than every peer", "Loss beside the best peer",
                      "The peer's loss over ours: above 1.00× ours is lower"),
}  # fmt: skip
_OTHERS = UnitWords("better", "worse", "better than every peer", "Beside the best peer", "1.00× is the peer")


def _words(row: Row) -> UnitWords:
    return _FASTER if row.unit == "s" or row.unit.endswith("/s") else _WORDS.get(row.unit, _OTHERS)


def _by_words(rows: Sequence[Row]) -> list[tuple[UnitWords, list[Row]]]:
    """Rows that have a peer, times and rates first."""
    judged = [row for row in rows if peers_of(row)]
    kinds = [_FASTER, *_WORDS.values(), _OTHERS]
    groups = [(words, [row for row in judged if _words(row) is words]) for words in kinds]
    return [(words, some) for words, some in groups if some]


@dataclass(frozen=True)
class TimedConfig:
    """One configuration the tuner timed; `seconds` is infinite when it did not run."""

    problem: str
    config: Mapping[str, Any]
    seconds: float


def trial_object(trial: TimedConfig) -> dict[str, Any]:
    """As the recorded grids have them."""
    ran = math.isfinite(trial.seconds)
    body = {"problem": trial.problem, "config": dict(trial.config), "seconds": trial.seconds if ran else None}
    return body | {"failure": None if ran else "did not run"}


def render(rows: Sequence[Row], work: Sequence[RowWork | None], trials: Sequence[TimedConfig] = ()) -> str:
    """`work` has one for each row. Kernel time is drawn; call time stands in the table."""
    pairs = kernel_times(rows, work)
    names = list(dict.fromkeys(row.name for row in rows))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    machines = " and ".join(dict.fromkeys(row.machine for row in rows))
    title = f"{shown} on {machines}" if rows else "What a tuner tried"
    drawn = [row for row in rows if row.measured is not None and is_kernel_time(row)]
    charts = [drawing.show() for drawing in rates(pairs)]
    judged = [speedups(some, words) for words, some in _by_words(drawn)] or [el("p", "No peer was run.")]
    return article(
        title,
        "tilemesh bench",
        verdict(drawn) if drawn else tuned(trials) if trials else None,
        headed(
            "Against the machine's limit",
            el("div", *charts, class_="pair") if charts else None,
            roofline(compute_bound(pairs) or pairs).show(wide=True) if pairs else limits(drawn),
        ),
        headed("Against the peers", *judged, by_case(drawn)) if drawn else None,
        headed("Every row", row_table(rows, _lead(rows))) if rows else None,
        headed("What the tuner tried", *heat_maps(trials)),
        origin(rows),
    )


def _lead(rows: Sequence[Row]) -> list[str]:
    """Parts of a case that get a column: those that say which shape, and whatever else tells rows apart."""
    first = [key for key in ("shape", "dtype", "time") if any(key in row.case for row in rows)]
    keys = dict.fromkeys(key for row in rows for key in row.case if key not in first and key != "by")
    telling = [key for key in keys if len({str(row.case.get(key, "")) for row in rows}) > 1]
    return first + ([] if "shape" in first else telling)


def verdict(rows: Sequence[Row]) -> str:
    """How many are faster than every peer (smaller, where they are bytes), how near the limit, and which shape has most
    to gain."""
    parts = []
    for words, judged in _by_words(rows):
        same = [row for row in judged if _is_equal(row)]
        better = [row for row in judged if _factor(row) > 1 and not _is_equal(row)]
        parts.append(f"{words.than} in {len(better)} of {len(judged)} cases, equal in {len(same)}")
    # Bytes and fractions of a peak are no time: nothing of them is saved by being faster.
    of_time = [row for row in rows if row.unit == "s" or row.unit.endswith("/s")]
    timed = [(row.of_limit, row) for row in of_time if row.of_limit is not None]
    if timed:
        timed.sort(key=lambda timing: timing[0])
        parts.append(f"median {percent(timed[len(timed) // 2][0])} of the limit")
        reached, worst = max(timed, key=_saving)
        which, gain = str(worst.case.get("shape") or case_name(worst)), _below_all(1 - reached)
        if len({row.name for row in rows}) > 1 and not which.startswith(worst.name):
            which = f"{worst.name} {which}"
        parts.append(f"the largest saving is {which}, at most {gain} of its time")
    sentence = "; ".join(parts) or "nothing to compare with"
    return f"{sentence[0].upper()}{sentence[1:]}."


def _below_all(share: float) -> str:
    """A share with as many digits as keep it below 100 %, where it is: a limit is not nothing."""
    texts = (percent(share, digits) for digits in range(5))
    return next((text for text in texts if share >= 1 or float(text.removesuffix(" %")) < 100), "nearly all")


def _saving(timing: tuple[float, Row]) -> tuple[float, float]:
    """Seconds that the limit would save, for the launch of a tiny kernel is all of its time and yet nothing.

    Of a rate no seconds are known: among rates the share decides.
    """
    reached, row = timing
    seconds = row.measured.median - row.limit if row.unit == "s" and row.measured and row.limit else 0.0
    return seconds, -reached


def _factor(row: Row) -> float:
    return min(peers_of(row).values())


def _is_equal(row: Row) -> bool:
    return row.measured is not None and equal(row.measured, row.peers[best_peer(row)], row.unit)


# ---- drawings --------------------------------------------------------------------------------------------------


def limits(rows: Sequence[Row]) -> Html | None:
    """How much of the limit was reached, one bar per row: where FLOPs per byte are not the question."""
    # A bound on a loss is none of the machine's.
    known = [(row, row.of_limit) for row in rows if row.of_limit is not None and row.unit != "nats"]
    if not known:
        return None
    names = bar_names([row for row, _ in known])
    items = [
        Bar(name, [BarPart(share, 0, percent(share), percent(share))], percent(share), case_name(row))
        for name, (row, share) in zip(names, known, strict=True)
    ]
    rows_ = [[_numbered(name, row), percent(share, 1)] for name, (row, share) in zip(names, known, strict=True)]
    longest = max(1.0, *(share for _, share in known))
    drawn = bars(items, most=longest, one_line=True)
    words = "100 % is the limit."
    if any(percent(share) != "100 %" and share > 1 for _, share in known):
        words += " What is above it was quicker than this machine's calibration says is possible: calibrate again."
    return figure("Of the limit", words, drawn, PageTable(["what", "of the limit"], rows_), wide=True)


def speedups(judged: Sequence[Row], unit_words: UnitWords) -> Html:
    """How many times faster (or smaller) than the best peer, shape by shape."""
    items, table = [], []
    for name, row in zip(bar_names(judged), judged, strict=True):
        factor = _factor(row)
        same = _is_equal(row)
        colour = 6 if same else 2 if factor > 1 else 1
        words = f"{factor:.2f}×{' =' if same else ''}"
        items.append(
            Bar(
                name,
                [BarPart(factor, colour, f"{case_name(row)}: {words} {best_peer(row)}", words)],
                best_peer(row),
                case_name(row),
            )
        )
        table.append([_numbered(name, row), words, best_peer(row)])
    drawn = bars(items, kinds=[(unit_words.better, 2), ("equal", 6), (unit_words.worse, 1)], one_line=True)
    sentence = (
        f"{unit_words.legend}; equal is {'' if judged[0].unit == 'nats' else 'within 2 % or '}overlapping spreads."
    )
    factor_name = "speedup" if unit_words is _FASTER else f"times {unit_words.better}"
    return figure(unit_words.title, sentence, drawn, PageTable(["shape", factor_name, "best peer"], table), wide=True)


def _numbered(name: str, row: Row) -> str:
    """A case as the table has it: whole, with the number that its bar has."""
    return case_name(row) if name == case_name(row) else f"{name.partition(':')[0]}: {case_name(row)}"


_COLOURS = {"ours": 0, "limit": 2}


def by_case(rows: Sequence[Row]) -> Html:
    """Ours, every peer and the limit, a group a case."""
    groups = []
    for row in rows:
        if row.measured is None:
            continue
        seconds = {"ours": row.measured.median, **{name: timing.median for name, timing in row.peers.items()}}
        seconds |= {"limit": row.limit} if row.limit else {}
        items = [
            Bar(name, [BarPart(value, _COLOURS.get(name, 6), name)], format_value(value, row.unit))
            for name, value in seconds.items()
        ]
        groups.append(el("div", el("h3", case_name(row)), bars(items)))
    return el("details", el("summary", "Ours, every peer and the limit, by case"), el("div", *groups, class_="pair"))


# ---- the tuner -------------------------------------------------------------------------------------------------


def heat_maps(trials: Sequence[TimedConfig]) -> list[Html]:
    """A map a problem: tile rows against tile columns, the best time over everything else."""
    problems = list(dict.fromkeys(trial.problem for trial in trials))
    return [heat_map(problem, [trial for trial in trials if trial.problem == problem]) for problem in problems]


def tuned(trials: Sequence[TimedConfig]) -> str:
    """What tuning came to: the best of each problem against the best that was there already."""
    factors = []
    for problem in dict.fromkeys(trial.problem for trial in trials):
        times: dict[bool, list[float]] = {True: [], False: []}
        for trial in trials:
            if trial.problem == problem and math.isfinite(trial.seconds) and trial.seconds > 0:
                times[trial.config.get("kind") in BUILT_IN].append(trial.seconds)
        if times[True] and times[False]:
            factors.append(min(times[True]) / min(times[False]))
    if not factors:
        return "No built-in was timed beside what was tried."
    faster = sum(factor > 1 for factor in factors)
    return (
        f"The best tried is {min(factors):.2f}× to {max(factors):.2f}× as fast as the best built-in; "
        f"it is faster in {faster} of {len(factors)} problem{'s' * (len(factors) > 1)}."
    )


def heat_map(problem: str, trials: Sequence[TimedConfig]) -> Html:
    best: dict[tuple[int, int], TimedConfig] = {}
    for trial in trials:
        m, n = trial.config.get("block_m"), trial.config.get("block_n")
        if trial.config.get("kind") in BUILT_IN or not math.isfinite(trial.seconds):
            continue
        key = (int(m or 128), int(n or 128))
        if key not in best or trial.seconds < best[key].seconds:
            best[key] = trial
    if not best:
        return el("p", f"{problem}: no configuration ran.", class_="missing")
    fastest = min(trial.seconds for trial in best.values())
    columns = sorted({n for _, n in best})
    lines = []
    for m in sorted({m for m, _ in best}):
        cells = [best.get((m, n)) for n in columns]
        lines.append((str(m), [None if cell is None else _heat_cell(cell, fastest) for cell in cells]))
    built_in = [trial for trial in trials if trial.config.get("kind") in BUILT_IN]
    words = f"Tile rows down, tile columns across; best {format_seconds(fastest)} of {len(trials)} tried"
    words += "".join(f", {trial.config['kind']} {format_seconds(trial.seconds)}" for trial in built_in) + "."
    head = ["tile", "seconds", "of the best", "configuration"]
    rows: list[list[Child]] = [
        [
            f"{m}x{n}",
            format_seconds(trial.seconds),
            percent(fastest / trial.seconds),
            el("td", _config(trial), class_="words"),
        ]
        for (m, n), trial in sorted(best.items(), key=lambda item: item[1].seconds)
    ]
    return figure(problem, words, heat([str(n) for n in columns], lines), PageTable(head, rows), wide=True)


def _heat_cell(trial: TimedConfig, fastest: float) -> tuple[float, str, str]:
    share = fastest / trial.seconds
    return share**2, percent(share), f"{format_seconds(trial.seconds)}: {_config(trial)}"


def _config(trial: TimedConfig) -> str:
    return ", ".join(f"{key} {value}" for key, value in trial.config.items())
