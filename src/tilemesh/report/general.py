"""The page of a run whose kind has none of its own: its summary beside its prediction, figures over steps, events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tilemesh.core.units import format_seconds
from tilemesh.report import compare, run_parts, series
from tilemesh.report.draw import PageTable, Plot, PlotAxis, around, chart, grid
from tilemesh.report.html import Child, Html, el, join
from tilemesh.report.kind_page import Beside, Fact, KindPage, PageSection, PairSection, Verdict
from tilemesh.report.rows import percent, row_table
from tilemesh.report.run import Run, flat
from tilemesh.report.verdict import state_words
from tilemesh.runs.values import number

MOST_CHARTS = 12
_MOST_LETTERS = 200


def _about(run: Run) -> str:
    return f"A run of kind '{run.kind}'."


def _verdict(run: Run, beside: Beside) -> Verdict:
    words = state_words(run)
    return Verdict(words[0].upper() + words[1:] + ("" if words.endswith(".") else "."), run.was_cut_short)


def _facts(run: Run, beside: Beside) -> list[Fact]:
    facts = [Fact("steps", f"{run.last_step:,}")] if run.steps else []
    if len(run.clock) > 1 and 0 <= (lasted := run.clock[-1][0] - run.clock[0][0]) < math.inf:
        facts.append(Fact("time", format_seconds(lasted), "from the first step to the last"))
    return facts


# ---- sections --------------------------------------------------------------------------------------------------


def _summary(run: Run, beside: Beside) -> Html:
    """Every figure of the summary and of the prediction, side by side."""
    told = {} if run.is_behind else {key: value for key, value in run.summary.items() if key not in ("schema", "kind")}
    measured, predicted = flat(told), flat(run.predicted)
    rows: list[list[Child]] = [
        [
            name,
            *(_cell(figures, name) for figures in (measured, predicted)),
            _error(measured.get(name), predicted.get(name)),
        ]
        for name in dict.fromkeys([*measured, *predicted])
    ]
    without = "the run has no summary" if run.was_cut_short else "it is written when the run ends"
    note = None if measured else run_parts.absent("what the run came to", without)
    return join(note, grid(PageTable(["figure", "value", "predicted", "difference"], rows)) if rows else None)


def _cell(figures: Mapping[str, object], name: str) -> str:
    return _shown(figures[name]) if name in figures else "–"


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(value)
        return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _error(value: object, guess: object) -> str:
    measured, predicted = number(value), number(guess)
    if not math.isfinite(measured) or not math.isfinite(predicted) or predicted == 0:
        return ""
    error = percent(measured / predicted - 1, 1)
    return error if error.startswith("-") else f"+{error}"


def _rows(run: Run, beside: Beside) -> Html | None:
    return row_table(beside.rows) if beside.rows else None


def _steps(run: Run, beside: Beside) -> Html | None:
    """A chart for each number that the steps say."""
    charts = [_chart(run, key) for key in run.figures[:MOST_CHARTS]]
    left = run.figures[MOST_CHARTS:]
    note = el("p", f"Not drawn: {', '.join(left)}.", class_="quiet") if left else None
    return join(el("div", *charts, class_="pair"), note) if charts else None


def _chart(run: Run, key: str) -> Html:
    points = run.figure(key)
    buckets = series.buckets(points)
    values = [value for bucket in buckets for value in (bucket.low, bucket.high) if value is not None]
    x = run_parts.steps_axis(run)
    coarse = series.buckets(points, run_parts.MOST_ROWS)
    rows: list[list[Child]] = [
        [bucket.steps, *map(run_parts.short, (bucket.mean, bucket.low, bucket.high))] for bucket in coarse
    ]
    table = PageTable(["step", "mean", "lowest", "highest"], rows, [x.place(bucket.middle) for bucket in coarse])
    words = (
        "Mean of neighbouring steps; lowest to highest shaded."
        if any(bucket.last > bucket.first for bucket in buckets)
        else ""
    )
    bad = sum(bucket.bad for bucket in buckets)
    words += f" In {bad:,} of {len(points):,} steps it is NaN, infinite or no number." if bad else ""
    y = PlotAxis(*around(values or [0.0]), "", "{:.4g}".format)
    line = series.line(key, buckets, 0, dots=len(points) <= 100)
    return chart(key, words, Plot(x, y, [line], run_parts.marks_of(run), shaded=run_parts.shaded(run)), table)


# ---- two runs --------------------------------------------------------------------------------------------------


def _differences(first: Run, first_beside: Beside, second: Run, second_beside: Beside) -> list[compare.Difference]:
    return compare.general_differences(first, first_beside.rows, second, second_beside.rows)


def _overlays(first: Run, second: Run, names: tuple[str, str]) -> Html | None:
    keys: Sequence[str] = [key for key in first.figures if key in second.figures][:MOST_CHARTS]
    charts = [run_parts.overlay(key, key, key, (first, second), names, zero=False) for key in keys]
    return el("div", *charts, class_="pair") if charts else None


GENERAL_PAGE = KindPage(
    about=_about,
    verdict=_verdict,
    facts=_facts,
    sections=(
        PageSection("summary", "What it came to", _summary),
        PageSection("rows", "Against prediction, limit and peer", _rows),
        PageSection("steps", "Step by step", _steps),
        PageSection("events", "What happened", lambda run, _: run_parts.events(run)),
        PageSection("again", "To run it again", lambda run, _: run_parts.again(run)),
    ),
    differences=_differences,
    pairs=(PairSection("Side by side", _overlays),),
)
