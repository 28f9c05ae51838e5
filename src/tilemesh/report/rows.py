"""Rows as a table of a page: predicted (error coloured by its size) | measured | limit | of it | each peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilemesh.measure.row import Row
from tilemesh.measure.sample import equal
from tilemesh.measure.table import format_value
from tilemesh.report.draw import PageTable, grid
from tilemesh.report.html import Child, Html, coded, el, join

NEAR, FAR = 0.15, 0.5
"""Errors of a prediction: within the first it is good, beyond the second it misleads."""


def percent(fraction: float, digits: int = 0) -> str:
    return f"{fraction:.{digits}%}".replace("%", " %")


def row_table(rows: Sequence[Row], lead: Sequence[str] = ()) -> Html:
    """The rows; `lead` names parts of the case that get columns of their own. Reasons stand beneath, once each."""
    reasons: list[str] = []

    def mark(reason: str) -> Html:
        if reason not in reasons:
            reasons.append(reason)
        return el("td", f"[{reasons.index(reason) + 1}]", title=reason, class_="quiet")

    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    head = ["what", *lead, "predicted", "error", "measured", "p20 to p80", "limit", "of limit", *peers]
    if not peers:
        head.append("peer")
    body: list[list[Child]] = []
    for row in rows:
        cells: list[Child] = [row.name, *(str(row.case.get(key, "")) for key in lead)]
        cells += [
            mark(row.missing["predicted"]) if row.predicted is None else _predicted(row, row.predicted),
            error(row),
        ]
        if row.measured is None:
            cells += [mark(row.missing["measured"]), ""]
        else:
            spread = (
                f"{_value(row, row.measured.p20)} to {_value(row, row.measured.p80)}" if row.measured.n > 1 else "once"
            )
            cells += [el("td", el("b", _value(row, row.measured.median))), spread]
        cells += [mark(row.missing["limit"]) if row.limit is None else _value(row, row.limit)]
        cells += ["" if row.of_limit is None else percent(row.of_limit)]
        cells += [peer(row, name) for name in peers]
        if not peers:
            cells.append(mark(row.missing.get("peers", "no peer was run")))
        body.append(cells)
    notes = [el("p", coded(f"[{index}] {reason}"), class_="quiet") for index, reason in enumerate(reasons, start=1)]
    return join(grid(PageTable(head, body)), *notes)


def _predicted(row: Row, value: float) -> str:
    if row.predicted_range is None:
        return _value(row, value)
    low, high = (_value(row, end) for end in row.predicted_range)
    return f"{_value(row, value)} ({low} to {high})"


def _value(row: Row, value: float) -> str:
    return format_value(value, row.unit)


def error(row: Row) -> Child:
    """How far off the prediction was, coloured: near, off, misleading."""
    return "" if row.prediction_error is None else error_cell(row.prediction_error)


def error_cell(fraction: float) -> Html:
    kind = "near" if abs(fraction) <= NEAR else "mid" if abs(fraction) <= FAR else "far"
    return el("td", f"{fraction:+.0%}".replace("%", " %"), class_=kind)


def peer(row: Row, name: str) -> Child:
    """What a peer took and how many times faster ours is; = where they cannot be told apart."""
    timing = row.peers.get(name)
    if timing is None:
        return el("td", "", title=row.missing.get(name, ""))
    if row.measured is None:
        return _value(row, timing.median)
    factor = row.speedup[name]
    same = equal(row.measured, timing, row.unit)
    kind = "" if same else "good" if factor > 1 else "worse"
    return el("td", _value(row, timing.median), " ", el("span", f"{factor:.2f}×{' =' if same else ''}", class_=kind))


def origin(rows: Sequence[Row]) -> Html | None:
    """Where rows came from, for the foot of a page. One file may hold several commands': each value stands once."""
    if not rows:
        return None
    facts = {
        "machine": [row.machine for row in rows],
        "versions": [", ".join(f"{name} {version}" for name, version in row.versions.items()) for row in rows],
        "commit": [row.commit or "not known" for row in rows],
        "command": [row.command for row in rows],
    }
    lines = {
        key: [part for value in dict.fromkeys(values) for part in (el("br"), value)] for key, values in facts.items()
    }
    table = words_table({key: join(*parts[1:]) for key, parts in lines.items()})
    return el("footer", el("h2", "To run it again"), table)


def words_table(facts: Mapping[str, Child]) -> Html:
    """What has which value, in words that wrap."""
    cells: list[list[Child]] = [[key, el("td", value, class_="words")] for key, value in facts.items()]
    return grid(PageTable(["what", "value"], cells, words=True))
