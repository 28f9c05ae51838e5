"""Rows of collectives as lines of text: a table per collective, how good `auto`'s choices were, and a fit's values."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from tilemesh.bench.collective.cells import array_words
from tilemesh.comm.runtime.fit import Fit
from tilemesh.core.units import format_bytes, format_rate, format_seconds
from tilemesh.measure.row import Row

PARTS = ("set-up", "copy", "wire", "reduce", "wait")
_EXPLAINED = ("predicted", "limit", "native")
_COLUMNS = 100  # no line is longer, on a terminal or in a pipe
_BELOW = " " * 10  # what belongs to a cell stands below its line, from where its columns begin


def fit_lines(fit: Fit) -> list[str]:
    """A fit in words: what a barrier takes, then latency and bandwidth of each algorithm."""
    where = f"{fit.transport}, {fit.ranks} ranks on {fit.cores} core{'s' if fit.cores > 1 else ''}"
    lines = [f"{where}, all busy: a meeting takes {format_seconds(fit.sync_s)}"]
    for name, curve in sorted(fit.curves.items()):
        pieces = [f"{format_rate(rate, 'B/s')} to {format_bytes(high)}" for _, high, rate in curve.bytes_per_s()]
        lines += _listed(f"  {name:<28} α {format_seconds(curve.latency_s):>9}   β ", pieces or ["none"])
    if fit.layer_s is not None:
        alone, together = fit.layer_s
        lines.append(
            f"  a layer's passes: {format_seconds(alone)} while the others sleep, {format_seconds(together)} "
            "while all do the same"
        )
    if fit.worked_s is not None:
        lines.append(f"  an exchange after computing takes {format_seconds(fit.worked_s)} more than in a loop of them")
    return lines


def table(rows: Sequence[Row]) -> list[str]:
    """Per cell a line of auto with its neighbours; below it the bandwidths, where the time went, and every other
    algorithm's time."""
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
            where = f"{key[0]}, {key[2]} ranks over {key[1]} on {auto['cores']} cores{crowd}"
            lines += ["", *_prose(f"{where}, {array_words(str(key[3]))}")]
            lines.append(
                f"{'size':>9} {'auto picks':<19}{'predicted':>10}{'measured':>10}{'limit':>10}{'native':>10}"
                f"{'native/ours':>12}{'sent':>10}"
            )
        lines += _cell(int(str(key[4])), cell)
    # The columns of the table are those of auto's rows.
    shown = [row for row in rows if row.case.get("algorithm") == "auto"]
    reasons = {(column, row.missing[column]) for row in shown for column in _EXPLAINED if column in row.missing}
    lines.append("")
    for column, why in sorted(reasons):
        lines += _prose(f"{column} is missing: {why}")
    for row in rows:
        if row.name == "overlap" and row.measured is not None:
            lines += _prose(
                f"overlap: {row.measured.median:.0%} of an all_reduce of {format_bytes(float(str(row.case['bytes'])))} "
                f"by {row.case['algorithm']} on {row.case['ranks']} ranks hidden behind compute"
            )
    return lines


def _cell(size: int, cell: dict[str, Row]) -> list[str]:
    auto = cell["auto"]
    case, measured = auto.case, auto.measured
    assert measured is not None

    def seconds(value: float | None) -> str:
        return "-" if value is None else format_seconds(value)

    sent = "-" if case["sent_bytes"] is None else format_bytes(float(str(case["sent_bytes"])))
    native = auto.peers.get("native")
    ratio = f"{auto.speedup['native']:.2f}" if native is not None else "-"
    shares = [f"{part} {float(str(case.get(f'in_{part}', 0))):.2f}" for part in PARTS]
    rates = [f"{name} {format_rate(float(str(case[f'{name}_bytes_per_s'])), 'B/s')}" for name in ("algorithm", "bus")]
    others = [
        f"{name} {format_seconds(row.measured.median)}"
        for name, row in cell.items()
        if name not in ("auto", "native") and row.measured is not None
    ]
    first = (
        f"{format_bytes(size):>9} {case['picked']!s:<19}{seconds(auto.predicted):>10}{seconds(measured.median):>10}"
        f"{seconds(auto.limit):>10}{seconds(native.median if native else None):>10}{ratio:>12}{sent:>10}"
    )
    lines = [first, *_listed(f"{_BELOW}bandwidth: ", rates), *_listed(f"{_BELOW}shares of the time: ", shares)]
    return lines + (_listed(f"{_BELOW}others: ", others) if others else [])


def _listed(start: str, items: Sequence[str]) -> list[str]:
    """Items one after the other, continued below the first; a figure stays with its name and its unit."""
    kept = ", ".join(item.replace(" ", "\N{NO-BREAK SPACE}") for item in items)
    lines = textwrap.wrap(kept, _COLUMNS - len(start), break_long_words=False, break_on_hyphens=False)
    lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
    return [f"{' ' * len(start) if at else start}{line}" for at, line in enumerate(lines)]


def _prose(words: str) -> list[str]:
    return textwrap.wrap(words, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def summary(rows: Sequence[Row]) -> list[str]:
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
