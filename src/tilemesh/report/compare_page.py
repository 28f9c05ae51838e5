"""The page of two runs: what changed in the configuration, what in the figures, and which differences are no noise;
and that of three or more: what differs in their configurations, their last figures, and their curves together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_bytes, format_count, format_seconds
from tilemesh.measure.sample import Sample
from tilemesh.measure.table import format_value
from tilemesh.report import compare
from tilemesh.report.compare import BETTER, WORSE, Difference
from tilemesh.report.draw import PageTable, grid
from tilemesh.report.html import Child, Html, article, el, headed, join, pair
from tilemesh.report.kind_page import Beside, KindPage
from tilemesh.report.kinds import page_of
from tilemesh.report.run import Run, flat
from tilemesh.report.run_parts import absent, cannot_show, disturbed, missing_words, overlay
from tilemesh.runs.values import numbers as figures

MOST_LETTERS = 32
"""Of a run's name where it heads a column or stands in a legend."""
MOST_RUNS = 8
"""As many as there are colours that can be told apart."""


def render(first: Run, first_beside: Beside, second: Run, second_beside: Beside) -> str:
    """Two runs of one kind."""
    kind_page = _page_of_all((first, second))
    changed = compare.changes(flat(first.config), flat(second.config))
    differences = kind_page.differences(first, first_beside.rows, second, second_beside.rows)
    names = (first.name, second.name) if first.name != second.name else (first.folder, second.folder)
    title = f"{names[0]} and {names[1]}"
    if max(map(len, names)) > MOST_LETTERS:  # they would push a table's columns out of sight
        title, names = f"First: {names[0]}; second: {names[1]}", ("first", "second")
    named = zip(names, (first, second), strict=True)
    missing = [f"{name}: {what}" for name, run in named for what in missing_words(run, kind_page.expects)]
    return article(
        title,
        "tilemesh",
        compare.sentence(names[1], changed, differences),
        cannot_show(missing),
        disturbed(first, second, names=names),
        headed("What was changed", _settings((first, second), names)),
        headed("What it changed", _differences(differences, names)),
        *(headed(part.title, part.body(first, second, names)) for part in kind_page.pairs),
    )


def render_several(runs: Sequence[Run]) -> str:
    """Three or more runs of one kind."""
    if len(runs) > MOST_RUNS:
        raise UsageError(f"{len(runs)} runs given: a page shows up to {MOST_RUNS} together")
    together = _page_of_all(runs).together
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [run.folder for run in runs]
    if max(map(len, names)) > MOST_LETTERS:
        names = [f"run {number}" for number, _ in enumerate(runs, start=1)]
    title = f"{len(runs)} runs: {', '.join(names)}"
    curves = (overlay(heading, unit, key, runs, names, zero=zero) for heading, unit, key, zero in _CURVES)
    return article(
        title,
        "tilemesh",
        None,
        disturbed(*runs, names=names),
        headed("What differs", _settings(runs, names)),
        headed("Where they ended", _figures(runs, names)) if together is None else None,
        headed("Together", pair(*curves) if together is None else together(runs)),
    )


def _page_of_all(runs: Sequence[Run]) -> KindPage:
    kinds = {run.kind for run in runs}
    if len(kinds) > 1:
        each = ", ".join(f"{run.folder} is of kind '{run.kind}'" for run in runs)
        raise UsageError(f"{each}: only runs of one kind have figures to compare")
    return page_of(runs[0].kind)


def _settings(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """The settings in which the configurations differ."""
    settings = [flat(run.config) for run in runs]
    rows: list[list[Child]] = []
    for key in dict.fromkeys(key for each in settings for key in each):
        values = [each.get(key) for each in settings]
        if any(value != values[0] for value in values):
            rows.append([key, *("not set" if value is None else str(value) for value in values)])
    if not rows:
        return el("p", "Nothing: the configurations are the same.")
    return grid(PageTable(["setting", *names], rows, words=True))


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


# ---- three runs or more ----------------------------------------------------------------------------------------


def _figures(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """A line per figure; a run that does not have it shows a dash."""
    rows: list[list[Child]] = []
    for title, read, shown in _FIGURES:
        values = [read(run) for run in runs]
        if any(math.isfinite(value) for value in values):
            rows.append([title, *(shown(value) if math.isfinite(value) else "–" for value in values)])
    return grid(PageTable(["figure", *names], rows)) if rows else absent("figures", "no run has any")


def _last(key: str) -> Callable[[Run], float]:
    return lambda run: next((value for _, value in reversed(run.figure(key)) if math.isfinite(value)), math.nan)


def _tail(key: str) -> Callable[[Run], float]:
    def read(run: Run) -> float:
        sample = run.tail(key)
        return math.nan if sample is None else sample.median

    return read


def _step_time(run: Run) -> float:
    taken = run.step_time()
    return math.nan if taken is None else taken.median


_FIGURES: tuple[tuple[str, Callable[[Run], float], Callable[[float], str]], ...] = (
    ("step", lambda run: float(run.last_step), lambda value: f"{value:,.0f}"),
    ("training loss, last steps", _tail("loss"), "{:.4g}".format),
    ("held-out loss, last", _last("held_out"), "{:.4g}".format),
    ("bits per byte, last", _last("bits_per_byte"), "{:.4g}".format),
    ("step time", _step_time, format_seconds),
    ("tokens/s", _tail("tokens_per_s"), format_count),
    (
        "memory, largest rank",
        lambda run: max(figures(run.summary, "peak_memory_bytes"), default=math.nan),
        format_bytes,
    ),
)
_CURVES = (
    ("Loss", "nats per token", "loss", False),
    ("Held-out loss", "nats per token", "held_out", False),
    ("Speed", "tokens/s", "tokens_per_s", True),
    ("Gradient norm", "norm", "norm", False),
)
