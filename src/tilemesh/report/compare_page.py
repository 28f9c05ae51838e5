"""The page of two runs: what changed in the configuration, what in the figures, and which differences are no noise."""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.core.units import format_count
from tilemesh.measure.sample import Sample
from tilemesh.measure.table import format_value
from tilemesh.report import compare, series, time_parts
from tilemesh.report.compare import BETTER, WORSE, Change, Difference
from tilemesh.report.draw import Axis, Layer, Plot, Table, around, chart, grid
from tilemesh.report.html import Child, Html, el, join, page, tied
from tilemesh.report.run import Run
from tilemesh.report.run_page import Beside, flat
from tilemesh.report.run_parts import MOST_ROWS, absent, short, steps_axis


def render(first: Run, first_beside: Beside, second: Run, second_beside: Beside) -> str:
    changed = compare.changes(flat(first.config), flat(second.config))
    found = compare.differences(first, first_beside.rows, second, second_beside.rows)
    names = _names(first, second)
    body = join(
        el("h1", f"{names[0]} and {names[1]}"),
        el("p", tied(compare.sentence(first, second, changed, found)), class_="verdict"),
        _missing(first, second, names),
        el("h2", "What was changed"),
        _changes(changed, names),
        el("h2", "What it changed"),
        _differences(found, names),
        el("h2", "Side by side"),
        el(
            "div",
            _overlay("Loss", "nats a token", "loss", first, second, names, zero=False),
            _overlay("Speed", "tokens/s", "tokens_per_s", first, second, names, zero=True),
            class_="pair",
        ),
        el("h2", "Where the time went"),
        el(
            "div",
            el("div", el("h3", names[0]), time_parts.by_rank(first)),
            el("div", el("h3", names[1]), time_parts.by_rank(second)),
            class_="pair",
        ),
    )
    return page(f"{names[0]} and {names[1]}: tilemesh", body)


def _names(first: Run, second: Run) -> tuple[str, str]:
    """Runs of one name are told apart by where they lie."""
    return (first.name, second.name) if first.name != second.name else (first.folder, second.folder)


def _missing(first: Run, second: Run, names: tuple[str, str]) -> Html | None:
    items = [
        el("li", f"{name}: {what}: {why}")
        for name, run in zip(names, (first, second), strict=True)
        for what, why in run.missing.items()
    ]
    return el("div", el("b", "What this page cannot show"), el("ul", *items), class_="missing") if items else None


def _changes(changed: Sequence[Change], names: tuple[str, str]) -> Html:
    if not changed:
        return el("p", "Nothing: the configurations are the same.")
    rows: list[list[Child]] = [[one.name, _setting(one.before), _setting(one.after)] for one in changed]
    return grid(Table(["setting", *names], rows, words=True))


def _setting(value: object) -> str:
    return "not set" if value is None else str(value)


def _differences(found: Sequence[Difference], names: tuple[str, str]) -> Html:
    if not found:
        return absent("figures", "the runs have none in common")
    rows: list[list[Child]] = []
    for one in found:
        kind = {BETTER: "good", WORSE: "worse"}.get(one.verdict, "quiet")
        ratio = "–" if one.ratio is None else f"{one.ratio - 1:+.1%}".replace("%", " %")
        cells = [_sample(one.first, one.unit), _sample(one.second, one.unit)]
        rows.append([one.name, el("td", one.verdict, class_=kind), ratio, *cells])
    note = (
        "Within noise: medians closer than 2 %, or overlapping p20 to p80. What was measured once has no spread to "
        "judge by: two runs of one configuration would tell."
    )
    return join(grid(Table(["figure", "verdict", "change", *names], rows)), el("p", note, class_="quiet"))


def _sample(sample: Sample, unit: str) -> Html:
    def shown(value: float) -> str:
        return f"{value:.4g}" if unit == "nats" else format_value(value, unit)

    spread = f"{shown(sample.p20)} to {shown(sample.p80)}" if sample.n > 1 else "once"
    return el("td", el("b", shown(sample.median)), el("br"), el("small", spread))


def _overlay(title: str, unit: str, key: str, first: Run, second: Run, names: tuple[str, str], *, zero: bool) -> Html:
    both = [series.buckets(run.figure(key)) for run in (first, second)]
    values = [value for each in both for one in each for value in (one.low, one.high) if value is not None]
    if not values:
        return absent(title.lower(), f"neither run has {key} in its metrics")
    x = steps_axis(first, second)
    y = Axis(*around(values, zero=zero), unit, format_count if zero else "{:.3g}".format)
    layers: list[Layer] = [
        series.line(name, each, colour, dashed=colour == 1)
        for colour, (name, each) in enumerate(zip(names, both, strict=True))
    ]
    rows: list[list[Child]] = []
    places: list[float] = []
    coarse = [series.buckets(run.figure(key), MOST_ROWS) for run in (first, second)]
    for name, each in zip(names, coarse, strict=True):
        for one in each:
            rows.append([one.steps, name, short(one.mean), short(one.low), short(one.high)])
            places.append(min(1.0, x.place(one.middle)))
    order = sorted(range(len(rows)), key=places.__getitem__)
    table = Table(["step", "run", "mean", "lowest", "highest"], [rows[i] for i in order], [places[i] for i in order])
    return chart(title, "", Plot(x, y, layers), table)
