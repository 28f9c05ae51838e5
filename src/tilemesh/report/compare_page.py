"""The page of two runs: what changed in the configuration, what in the figures, and which differences are no noise."""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.core.errors import UsageError
from tilemesh.measure.sample import Sample
from tilemesh.measure.table import format_value
from tilemesh.report import compare
from tilemesh.report.compare import BETTER, WORSE, Change, Difference
from tilemesh.report.draw import PageTable, grid
from tilemesh.report.html import Child, Html, el, join, page, tied
from tilemesh.report.kind_page import Beside, KindPage
from tilemesh.report.kinds import page_of
from tilemesh.report.run import Run, flat
from tilemesh.report.run_parts import absent, missing_words

MOST_LETTERS = 32
"""Of a run's name where it heads a column or stands in a legend."""


def render(first: Run, first_beside: Beside, second: Run, second_beside: Beside) -> str:
    """Two runs of one kind."""
    if first.kind != second.kind:
        raise UsageError(
            f"{first.folder} is a run of kind '{first.kind}', {second.folder} one of kind '{second.kind}': "
            "only runs of one kind have figures to compare"
        )
    kind_page = page_of(first.kind)
    changed = compare.changes(flat(first.config), flat(second.config))
    differences = kind_page.differences(first, first_beside, second, second_beside)
    title, names = _names(first, second)
    pairs = [(pair.title, pair.body(first, second, names)) for pair in kind_page.pairs]
    body = join(
        el("h1", title),
        el("p", tied(compare.sentence(names[1], changed, differences)), class_="verdict"),
        _missing(first, second, names, kind_page),
        el("h2", "What was changed"),
        _changes(changed, names),
        el("h2", "What it changed"),
        _differences(differences, names),
        *(part for heading, shown in pairs if shown is not None for part in (el("h2", heading), shown)),
    )
    return page(f"{title}: tilemesh", body)


def _names(first: Run, second: Run) -> tuple[str, tuple[str, str]]:
    """The title, and what the runs are called beneath it. Runs of one name are told apart by where they lie, and names
    that would push a table's columns out of sight stand in the title alone."""
    names = (first.name, second.name) if first.name != second.name else (first.folder, second.folder)
    if max(map(len, names)) <= MOST_LETTERS:
        return f"{names[0]} and {names[1]}", names
    return f"First: {names[0]}; second: {names[1]}", ("first", "second")


def _missing(first: Run, second: Run, names: tuple[str, str], kind_page: KindPage) -> Html | None:
    items = [
        el("li", f"{name}: {what}")
        for name, run in zip(names, (first, second), strict=True)
        for what in missing_words(run, kind_page.expects)
    ]
    return el("div", el("b", "What this page cannot show"), el("ul", *items), class_="missing") if items else None


def _changes(changed: Sequence[Change], names: tuple[str, str]) -> Html:
    if not changed:
        return el("p", "Nothing: the configurations are the same.")
    rows: list[list[Child]] = [[change.name, _setting(change.before), _setting(change.after)] for change in changed]
    return grid(PageTable(["setting", *names], rows, words=True))


def _setting(value: object) -> str:
    return "not set" if value is None else str(value)


def _differences(differences: Sequence[Difference], names: tuple[str, str]) -> Html:
    if not differences:
        return absent("figures", "the runs have none in common")
    rows: list[list[Child]] = []
    for difference in differences:
        kind = {BETTER: "good", WORSE: "worse"}.get(difference.verdict, "quiet")
        ratio = "–" if difference.ratio is None else f"{difference.ratio - 1:+.1%}".replace("%", " %")
        cells = [_sample(difference.first, difference.unit), _sample(difference.second, difference.unit)]
        rows.append([difference.name, el("td", difference.verdict, class_=kind), ratio, *cells])
    note = (
        "Within noise: medians closer than 2 %, or overlapping p20 to p80. Last steps: a run's last tenth, ten at "
        "least. A figure that was measured once has no spread: run each configuration again to see what is noise."
    )
    return join(grid(PageTable(["figure", "verdict", "change", *names], rows)), el("p", note, class_="quiet"))


def _sample(sample: Sample, unit: str) -> Html:
    def shown(value: float) -> str:
        return f"{value:.4g}" if unit in ("nats", "") else format_value(value, unit)

    spread = f"{shown(sample.p20)} to {shown(sample.p80)}" if sample.n > 1 else "once"
    return el("td", el("b", shown(sample.median)), el("br"), el("small", spread))
