"""Parts that pages of runs share: figures over steps, events, how a run was made, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from tilemesh.core.units import format_bytes, format_count, format_seconds
from tilemesh.report import draw, series
from tilemesh.report.html import Child, Html, el, join
from tilemesh.report.kind_page import Beside, PageSection
from tilemesh.report.rows import row_table, words_table
from tilemesh.report.run import Run, flat
from tilemesh.runs import metrics
from tilemesh.runs.folder import read_busyness
from tilemesh.runs.names import METRICS

T = TypeVar("T")

MOST_ROWS = 200
"""Lines of a chart's table: the drawn buckets, joined until a person can read them."""
MOST_MARKS = 60
MOST_DOTS = 100


def absent(what: str, why: str) -> Html:
    return el("p", f"Not shown: {what} ({why}).", class_="missing")


def steps_axis(run: Run) -> draw.PlotAxis:
    """All steps that were planned: what is left of a run can be seen."""
    return _steps_to(run.last_step, run.planned_steps or 0)


def _steps_to(*ends: int) -> draw.PlotAxis:
    return draw.PlotAxis(0, max(1, *ends), "step", lambda value: f"{value:,.0f}", whole=True)


def marks_of(run: Run) -> list[draw.EventMark]:
    """Signs above a chart; where there are many checkpoints, every so many."""
    kept = [event for event in run.events if event.kind == metrics.CHECKPOINT]
    others = [event for event in run.events if event.kind != metrics.CHECKPOINT]
    thinned = kept[:: 1 + len(kept) // MOST_MARKS] + others[:: 1 + len(others) // MOST_MARKS]
    return [draw.EventMark(event.step, event.kind, event.words) for event in thinned]


def shaded(run: Run) -> list[tuple[float, float, str]]:
    steps = [step["step"] for step in run.steps]
    return [
        (first - 0.5, last + 0.5, f"{steps_between(first, last)}: not in the metrics")
        for first, last in series.gaps(steps)
    ]


def steps_between(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def gap_words(run: Run) -> list[str]:
    """Steps that are missing from the metrics, and values that are not numbers, in words."""
    gaps = series.gaps(step["step"] for step in run.steps)
    words = [f"{steps_between(first, last)}: not in the metrics" for first, last in gaps[:5]]
    if len(gaps) > 5:
        words.append(f"{len(gaps) - 5} more gaps in the metrics")
    bad = [step for step, value in run.figure("loss") if not math.isfinite(value)]
    if bad:
        words.append(f"the loss of {len(bad):,} step{'s' * (len(bad) > 1)}, the first of step {bad[0]:,}: not a number")
    return words


def missing_words(run: Run, expects: Mapping[str, str]) -> list[str]:
    """What a page cannot show: files that `expects` names and that are not there, and whatever is damaged."""
    files = [
        f"{expects[name]} ({name}): {why}" if name in expects else f"{name}: {why}"
        for name, why in run.missing.items()
        if name in expects or name not in run.absent
    ]
    return [*files, *gap_words(run)]


def cannot_show(words: Sequence[str]) -> Html | None:
    """A box at the top of a page; None where there is nothing to say."""
    items = [el("li", each) for each in words]
    return el("div", el("b", "What this page cannot show"), el("ul", *items), class_="missing") if items else None


class StepFigure(NamedTuple):
    """A figure of every step that a page draws."""

    key: str
    """In metrics.jsonl."""
    title: str
    words: str
    unit: str
    shown: Callable[[float], str]
    colour: int = 0
    from_zero: bool = True
    name: str = ""
    """Of its line, where that is not the unit."""
    dots: bool = False
    """Whether each step is marked where there are few."""


LOSS = StepFigure("loss", "Loss", "", "nats per token", "{:.4g}".format, from_zero=False, name="training loss")
SPEED = StepFigure(
    "tokens_per_s", "Speed", "Over all ranks, by the median of the last twenty steps.", "tokens/s", format_count, 2
)
NORM = StepFigure(
    "norm", "Gradient norm", "Of the whole model's mean gradient, before clipping.", "norm", "{:.3g}".format, 3
)
RATE = StepFigure("rate", "Learning rate", "As the schedule has it.", "learning rate", "{:.3g}".format, 4)
MEMORY = StepFigure(
    "memory_bytes", "Memory", "The most that rank 0 has held so far, its process included.", "bytes", format_bytes, 5
)


def step_figure(run: Run, figure: StepFigure, sparse: str = "") -> Html:
    """A figure against the step, and what of it is no number at the top. `sparse`: a figure that only some steps have,
    such as the held-out loss, drawn with it."""
    points = run.figure(figure.key)
    others = [(step, value) for step, value in run.figure(sparse) if math.isfinite(value)]
    buckets = series.buckets(points)
    values = [*series.ends(buckets), *(value for _, value in others)]
    if not values:
        return absent(figure.title.lower(), f"the metrics hold no {figure.key}")
    low, high = draw.around(values, zero=figure.from_zero)
    x, y = steps_axis(run), draw.PlotAxis(low, high, figure.unit, figure.shown, binary=figure.shown is format_bytes)
    dots = figure.dots and len(points) <= MOST_DOTS
    layers: list[draw.PlotLayer] = [series.line(figure.name or figure.unit, buckets, figure.colour, dots=dots)]
    bad = [(float(step), high) for step, value in points if not math.isfinite(value)]
    if bad:
        layers.append(draw.Dots("not a number", bad[:: 1 + len(bad) // 200], 4, 9))
    if others:
        few = len(others) <= MOST_DOTS
        layers.append(series.line("held-out loss", series.buckets(others, apart=10**9), 1, dots=few))
    many = any(bucket.last > bucket.first for bucket in buckets)
    words = figure.words or ("Mean of neighbouring steps; lowest to highest shaded." if many else "Every step.")
    plot = draw.Plot(x, y, layers, marks_of(run), shaded=shaded(run))
    words += " Grey: steps that are not in the metrics." if plot.shaded else ""
    return draw.chart(figure.title, words, plot, _step_table(points, others, x, figure.shown))


def _step_table(
    points: Sequence[tuple[int, float]],
    others: Sequence[tuple[int, float]],
    x: draw.PlotAxis,
    shown: Callable[[float], str],
) -> draw.PageTable:
    """As many lines as a person can read; columns for the other figure and for remarks where there are some."""
    coarse = series.buckets(points, MOST_ROWS)
    head, rows = ["step", "mean", "lowest", "highest"], [[bucket.steps] for bucket in coarse]
    for row, bucket in zip(rows, coarse, strict=True):
        row += ["–" if value is None else shown(value) for value in (bucket.mean, bucket.low, bucket.high)]
        if others:
            seen = [value for step, value in others if bucket.first <= step <= bucket.last]
            row.append(shown(seen[-1]) if seen else "–")
        if any(bucket.bad for bucket in coarse):
            row.append(f"{bucket.bad} not a number" if bucket.bad else "")
    head += ["held-out"] if others else []
    head += ["remark"] if any(bucket.bad for bucket in coarse) else []
    return draw.PageTable(head, rows, [x.place(bucket.middle) for bucket in coarse], f"Every step is in {METRICS}.")


_CLOCK = (("d", 86400.0, 172800.0), ("h", 3600.0, 7200.0), ("min", 60.0, 120.0), ("s", 1.0, 1.0), ("ms", 1e-3, 0.0))
"""Units of a run's clock, each with its seconds and the shortest run that is shown in it."""


def progress(run: Run) -> Html | None:
    """Steps against the clock: where a run stood still, and when it was restarted, can be seen."""
    began = run.began_at
    if began is None or len(run.clock) < 2:
        return None
    known = [(at - began, step) for at, step in run.clock if 0 <= at - began < 1e12]
    happened = [
        (event, max(0.0, event.at - began)) for event in run.events if event.at is not None and event.at - began < 1e12
    ]
    end = max(1e-3, *(at for at, _ in known), *(at for _, at in happened))
    word, unit = next((word, unit) for word, unit, least in _CLOCK if end >= least)
    x = draw.PlotAxis(0, end, "since the first step", lambda at: f"{at / unit:.4g} {word}", unit=unit)
    y = draw.PlotAxis(0, max(1, *(step for _, step in known)) * 1.05, "steps done", format_count, whole=True)
    points: list[tuple[float, float | None]] = []
    before = 0
    for at, step in _some(known, series.MOST):
        points += [(at, None)] if step <= before else []  # gone back: a new line begins
        points.append((at, float(step)))
        before = step
    marks = [draw.EventMark(at, event.kind, event.words) for event, at in _some(happened, MOST_MARKS)]
    rows: list[list[Child]] = [[format_seconds(at), f"{step:,}"] for at, step in _some(known, MOST_ROWS)]
    table = draw.PageTable(
        ["since the first step", "steps done"], rows, [x.place(at) for at, _ in _some(known, MOST_ROWS)]
    )
    plot = draw.Plot(x, y, [draw.Line("steps done", points, 0)], marks, height=160)
    words = "Flat: paused. Drop: steps done again from a checkpoint. Markers: events."
    return draw.chart("The run in time", words, plot, table, wide=True)


def _some(values: Sequence[T], most: int) -> Sequence[T]:
    """At most so many of them, evenly taken, the last always."""
    every = -(-len(values) // most)
    return values if every <= 1 else [*values[:-1:every], values[-1]]


def overlay(title: str, unit: str, key: str, runs: Sequence[Run], names: Sequence[str], *, zero: bool) -> Html:
    """A figure of several runs over their steps, one line each."""
    # The held-out loss is measured at the last step too, and when a run was asked to.
    apart = 10**9 if key == "held_out" else None
    drawn = [series.buckets(run.figure(key), apart=apart) for run in runs]
    values = [value for each in drawn for value in series.ends(each)]
    if not values:
        return absent(title.lower(), f"no run has {key} in its metrics")
    # To the last step that a run has done: one that ended early would press the others' curves into a corner.
    x = _steps_to(*(run.last_step for run in runs))
    y = draw.PlotAxis(*draw.around(values, zero=zero), unit, format_count if zero else "{:.3g}".format)
    layers: list[draw.PlotLayer] = [
        series.line(name, each, colour, dashed=colour % 2 == 1)
        for colour, (name, each) in enumerate(zip(names, drawn, strict=True))
    ]
    rows: list[list[Child]] = []
    places: list[float] = []
    coarse = [series.buckets(run.figure(key), MOST_ROWS, apart=apart) for run in runs]
    for name, each in zip(names, coarse, strict=True):
        for bucket in each:
            cells = (bucket.mean, bucket.low, bucket.high)
            rows.append([bucket.steps, name, *("–" if value is None else f"{value:.4g}" for value in cells)])
            places.append(min(1.0, x.place(bucket.middle)))
    order = sorted(range(len(rows)), key=places.__getitem__)
    table = draw.PageTable(
        ["step", "run", "mean", "lowest", "highest"], [rows[i] for i in order], [places[i] for i in order]
    )
    return draw.chart(title, "", draw.Plot(x, y, layers), table)


# ---- events ----------------------------------------------------------------------------------------------------


def events(run: Run) -> Html:
    if not run.events:
        return el("p", "None in this folder.")
    rows: list[list[Child]] = [
        [f"{event.step:,}", event.kind, el("td", event.words, class_="words"), _when(event.at, run.began_at)]
        for event in run.events[-500:]
    ]
    note = el("p", f"The last 500 of {len(run.events):,}.", class_="quiet") if len(run.events) > 500 else None
    return join(note, draw.grid(draw.PageTable(["step", "kind", "what", "when"], rows, words=True)))


def _when(at: float | None, began: float | None) -> str:
    if at is None or began is None:
        return ""
    return f"{format_seconds(at - began)} after the first step" if at >= began else "before the first step"


# ---- how it was made -------------------------------------------------------------------------------------------


def again(run: Run, guess: str = "") -> Html:
    """The commands that made the run, its environment and its settings. `guess`: what makes it where none was kept."""
    typed = run.environment.get("commands")
    commands = [str(command) for command in typed] if isinstance(typed, list) and typed else []
    kept = "What was typed:" if commands else "The command was not kept"
    shown = join(
        el("p", kept if commands else f"{kept}; this runs the same configuration:" if guess else f"{kept}."),
        el("pre", "\n".join(commands) or guess) if commands or guess else None,
    )
    environment = _environment(run)
    settings = [[key, str(value)] for key, value in flat(run.config).items()]
    return join(
        shown,
        el("p", "The environment:"),
        words_table(environment) if environment else absent("the environment", "the folder does not say"),
        draw.numbers(draw.PageTable(["setting", "value"], settings, words=True), "Every setting") if settings else None,
        el("details", el("summary", "Text it wrote"), el("pre", run.sample)) if run.sample else None,
    )


def _environment(run: Run) -> dict[str, str]:
    shown: dict[str, str] = {}
    for source in (run.environment, run.summary):
        for key in ("machine", "backend", "device", "cores", "cluster", "commit", "versions", "host"):
            value = source.get(key)
            if isinstance(value, Mapping):
                shown[key] = ", ".join(f"{name} {version}" for name, version in value.items())
            elif value is not None:
                shown[key] = str(value)
    return shown


def disturbed(*runs: Run, names: Sequence[str] = ()) -> Html | None:
    """A line each where other work disturbed a run, or the calibration that its prediction comes from."""
    before = [f"{name}: " for name in names] or [""]
    lines = [el("p", start, line) for start, run in zip(before, runs, strict=True) for line in _disturbances(run)]
    return el("div", *lines, class_="missing", id="busy") if lines else None


def _disturbances(run: Run) -> list[str]:
    """What other work on the machine says about this page's figures."""
    busy, calibration = read_busyness(run.environment), run.predicted.get("calibration_busy")
    lines = []
    if busy is not None and busy.is_busy:
        lines.append(f"The machine was busy while this run went on ({busy.words}): its times are too long.")
    if isinstance(calibration, str):
        lines.append(f"The prediction comes from a calibration of a busy machine ({calibration}): calibrate again.")
    return lines


EVENTS = PageSection("events", "What happened", lambda run, _: events(run))
AGAIN = PageSection("again", "To run it again", lambda run, _: again(run))


def rows_section(title: str, lead: Sequence[str] = ()) -> PageSection:
    """The run's rows; `lead` names parts of the case that get columns of their own, where rows have them."""

    def body(run: Run, beside: Beside) -> Child:
        known = [key for key in lead if any(key in row.case for row in beside.rows)]
        return row_table(beside.rows, known) if beside.rows else None

    return PageSection("rows", title, body)
