"""The page of three or more runs: what differs in their configurations, their last figures, and their curves together.

Two runs have a page of their own (`compare_page.py`), which also says which differences are no noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_bytes, format_count, format_seconds
from tilemesh.report import run_parts
from tilemesh.report.compare_page import MOST_LETTERS
from tilemesh.report.draw import PageTable, grid
from tilemesh.report.html import Child, Html, el, join, page
from tilemesh.report.kinds import page_of
from tilemesh.report.run import Run, flat
from tilemesh.runs.values import numbers as figures

MOST_RUNS = 8
"""As many as there are colours that can be told apart."""


def render(runs: Sequence[Run]) -> str:
    """Several runs of one kind."""
    if len(runs) > MOST_RUNS:
        raise UsageError(f"{len(runs)} runs given: a page shows up to {MOST_RUNS} together")
    kinds = {run.kind for run in runs}
    if len(kinds) > 1:
        raise UsageError(f"runs of kinds {', '.join(sorted(kinds))}: only runs of one kind have figures to compare")
    names = _names(runs)
    title = f"{len(runs)} runs: {', '.join(names)}"
    body = join(
        el("h1", title),
        el("h2", "What differs"),
        _settings(runs, names),
        *_together(runs, names),
    )
    return page(f"{title}: tilemesh", body)


def _together(runs: Sequence[Run], names: Sequence[str]) -> list[Html]:
    """What the kind of run has to show, or where the runs ended and the curves of their steps."""
    drawn = page_of(runs[0].kind).together
    if drawn is not None:
        return [el("h2", "Together"), drawn(runs)]
    return [
        el("h2", "Where they ended"),
        _figures(runs, names),
        el("h2", "Together"),
        el(
            "div",
            run_parts.overlay("Loss", "nats per token", "loss", runs, names, zero=False),
            run_parts.overlay("Held-out loss", "nats per token", "held_out", runs, names, zero=False),
            run_parts.overlay("Speed", "tokens/s", "tokens_per_s", runs, names, zero=True),
            run_parts.overlay("Gradient norm", "norm", "norm", runs, names, zero=False),
            class_="pair",
        ),
    ]


def _names(runs: Sequence[Run]) -> list[str]:
    """Runs of one name are told apart by where they lie; names that would fill the page, by their numbers."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [run.folder for run in runs]
    if max(map(len, names)) > MOST_LETTERS:
        return [f"run {number}" for number, _ in enumerate(runs, start=1)]
    return names


def _settings(runs: Sequence[Run], names: Sequence[str]) -> Html:
    settings = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each)
    rows: list[list[Child]] = []
    for key in keys:
        values = [each.get(key) for each in settings]
        if any(value != values[0] for value in values):
            rows.append([key, *("not set" if value is None else str(value) for value in values)])
    if not rows:
        return el("p", "Nothing: the configurations are the same.")
    return grid(PageTable(["setting", *names], rows, words=True))


def _figures(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """A line per figure; a run that does not have it shows a dash."""
    rows: list[list[Child]] = []
    for title, read, shown in _FIGURES:
        values = [read(run) for run in runs]
        if any(math.isfinite(value) for value in values):
            rows.append([title, *(shown(value) if math.isfinite(value) else "–" for value in values)])
    return grid(PageTable(["figure", *names], rows)) if rows else run_parts.absent("figures", "no run has any")


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
