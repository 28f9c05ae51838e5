"""The page of a run whose kind has none of its own: its summary beside its prediction, figures over steps, events."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilemesh.core.units import format_seconds
from tilemesh.report import run_parts
from tilemesh.report.draw import PageTable, grid
from tilemesh.report.html import Child, Fact, Html, el, join, pair
from tilemesh.report.kind_page import Beside, KindPage, PageSection, PairSection
from tilemesh.report.rows import percent
from tilemesh.report.run import Run, flat
from tilemesh.report.verdict import state_verdict
from tilemesh.runs.values import number

MOST_CHARTS = 12
_MOST_LETTERS = 80


def _facts(run: Run, beside: Beside) -> list[Fact]:
    facts = [Fact("steps", f"{run.last_step:,}")] if run.steps else []
    if len(run.clock) > 1 and 0 <= (lasted := run.clock[-1][0] - run.clock[0][0]) < math.inf:
        facts.append(Fact("time", format_seconds(lasted), "from the first step to the last"))
    return facts


# ---- sections --------------------------------------------------------------------------------------------------


def _summary(run: Run, beside: Beside) -> Html:
    """Every figure of the summary and of the prediction, side by side."""
    summary = (
        {} if run.is_behind else {key: value for key, value in run.summary.items() if key not in ("schema", "kind")}
    )
    measured, predicted = flat(summary), flat(run.predicted)
    rows: list[list[Child]] = [
        [
            name,
            *(_shown(figures[name]) if name in figures else "–" for figures in (measured, predicted)),
            _error(measured.get(name), predicted.get(name)),
        ]
        for name in dict.fromkeys([*measured, *predicted])
    ]
    without = "the run has no summary" if run.was_cut_short else "it is written when the run ends"
    note = None if measured else run_parts.absent("what the run came to", without)
    return join(note, grid(PageTable(["figure", "value", "predicted", "difference"], rows)) if rows else None)


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


def _steps(run: Run, beside: Beside) -> Html | None:
    """A chart for each number that the steps say."""
    charts = figure_charts(run, run.figures[:MOST_CHARTS])
    left = run.figures[MOST_CHARTS:]
    return join(charts, el("p", f"Not drawn: {', '.join(left)}.", class_="quiet") if left else None) if charts else None


def figure_charts(run: Run, keys: Sequence[str]) -> Html | None:
    """A chart for each of these numbers of the steps; None where there is none."""
    figures = [run_parts.StepFigure(key, key, "", "", "{:.4g}".format, 0, False, key, dots=True) for key in keys]
    return pair(*(run_parts.step_figure(run, figure) for figure in figures))


def _overlays(first: Run, second: Run, names: tuple[str, str]) -> Html | None:
    """The figures that both have over their steps."""
    keys = [key for key in first.figures if key in second.figures][:MOST_CHARTS]
    return pair(*(run_parts.overlay(key, key, key, (first, second), names, zero=False) for key in keys))


GENERAL_PAGE = KindPage(
    about=lambda run: f"A run of kind '{run.kind}'.",
    verdict=lambda run, _: state_verdict(run),
    facts=_facts,
    sections=(
        PageSection("summary", "What it came to", _summary),
        run_parts.rows_section("Against prediction, limit and peer"),
        PageSection("steps", "Step by step", _steps),
        run_parts.EVENTS,
        run_parts.AGAIN,
    ),
    pairs=(PairSection("Side by side", _overlays),),
)
