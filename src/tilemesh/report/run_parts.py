"""Parts of a run's page: loss, speed, memory, mesh and events, each with its numbers beneath."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tilemesh.core.units import format_bytes, format_count, format_rate, format_seconds
from tilemesh.report import series
from tilemesh.report.bars import mesh_picture
from tilemesh.report.draw import Axis, Dots, Layer, Line, Mark, Plot, Table, around, chart, figure, grid
from tilemesh.report.html import Child, Html, el, join
from tilemesh.report.run import Run
from tilemesh.runs.values import count, number, section

T = TypeVar("T")

MOST_ROWS = 200
"""Lines of a chart's table: the drawn buckets, joined until a person can read them."""
MOST_MARKS = 60


def absent(what: str, why: str) -> Html:
    return el("p", f"Not shown: {what} ({why}).", class_="missing")


def short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def steps_axis(run: Run, *more: Run) -> Axis:
    ends = [one for each in (run, *more) for one in (each.last_step, each.planned_steps or 0)]
    return Axis(0, max(1, *ends), "step", lambda value: f"{value:,.0f}", whole=True)


def marks_of(run: Run) -> list[Mark]:
    """Signs above a chart; where there are many checkpoints, every so many."""
    kept = [event for event in run.events if event.kind == "checkpoint"]
    others = [event for event in run.events if event.kind != "checkpoint"]
    thinned = kept[:: 1 + len(kept) // MOST_MARKS] + others[:: 1 + len(others) // MOST_MARKS]
    return [Mark(event.step, event.kind, event.words) for event in thinned]


def shaded(run: Run) -> list[tuple[float, float, str]]:
    steps = [one["step"] for one in run.steps]
    return [
        (first - 0.5, last + 0.5, f"{steps_between(first, last)}: not in the metrics")
        for first, last in series.gaps(steps)
    ]


def steps_between(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def gap_words(run: Run) -> list[str]:
    """Steps that are missing from the metrics, and values that are no numbers, in words."""
    found = series.gaps(one["step"] for one in run.steps)
    words = [f"{steps_between(first, last)}: not in the metrics" for first, last in found[:5]]
    if len(found) > 5:
        words.append(f"{len(found) - 5} more gaps in the metrics")
    bad = [step for step, value in run.figure("loss") if not math.isfinite(value)]
    if bad:
        words.append(f"the loss of {len(bad):,} step{'s' * (len(bad) > 1)}, the first of step {bad[0]:,}: not a number")
    return words


def _bad_dots(run: Run, key: str, at: float) -> list[Layer]:
    bad = [(float(step), at) for step, value in run.figure(key) if not math.isfinite(value)]
    return [Dots("not a number", bad[:: 1 + len(bad) // 200], 4, 9)] if bad else []


def loss(run: Run) -> Html:
    """Training and held-out loss against the step."""
    found = series.buckets(run.figure("loss"))
    held = [point for point in run.figure("held_out") if math.isfinite(point[1])]
    if not found:
        return absent("loss", "no step is in the metrics")
    values = [value for one in found for value in (one.low, one.high) if value is not None] + [v for _, v in held]
    low, high = around(values)
    x, y = steps_axis(run), Axis(low, high, "nats a token", "{:.3g}".format)
    held_buckets = series.buckets(held, apart=10**9)
    layers: list[Layer] = [series.line("training loss", found, 0), *_bad_dots(run, "loss", high)]
    if held:
        layers.append(series.line("held-out loss", held_buckets, 1, dots=len(held) <= 100))
    many = any(one.last > one.first for one in found)
    words = "Mean of neighbouring steps; lowest to highest shaded." if many else "Every step."
    plot = Plot(x, y, layers, marks_of(run), shaded=shaded(run))
    words += " Grey: steps that are not in the metrics." if plot.shaded else ""
    return chart("Loss", words, plot, _loss_table(run, x, held))


def _loss_table(run: Run, x: Axis, held: Sequence[tuple[int, float]]) -> Table:
    rows, places = [], []
    for one in series.buckets(run.figure("loss"), MOST_ROWS):
        seen = [value for step, value in held if one.first <= step <= one.last]
        bad = f"{one.bad} not a number" if one.bad else ""
        rows.append(
            [one.steps, short(one.mean), short(one.low), short(one.high), short(seen[-1] if seen else None), bad]
        )
        places.append(x.place(one.middle))
    return Table(
        ["step", "mean", "lowest", "highest", "held-out", "remark"], rows, places, "Every step is in metrics.jsonl."
    )


def speed(run: Run) -> Html:
    """Tokens a second against the step."""
    points = run.figure("tokens_per_s")
    found = series.buckets(points)
    values = [value for one in found for value in (one.low, one.high) if value is not None]
    if not values:
        return absent("speed", "the metrics hold no tokens_per_s")
    low, high = around(values, zero=True)
    x = steps_axis(run)
    y = Axis(low, high, "tokens/s", format_count)
    rows, places = [], []
    for one in series.buckets(points, MOST_ROWS):
        rows.append(
            [
                one.steps,
                *(short(None) if v is None else format_rate(v, "tokens/s") for v in (one.mean, one.low, one.high)),
            ]
        )
        places.append(x.place(one.middle))
    table = Table(["step", "mean", "lowest", "highest"], rows, places)
    plot = Plot(x, y, [series.line("tokens/s", found, 2)], marks_of(run), shaded=shaded(run))
    return chart("Speed", "Over all ranks, by the median of the last twenty steps.", plot, table)


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
    x = Axis(0, end, "since the first step", format_seconds)
    y = Axis(0, max(1, *(step for _, step in known)) * 1.05, "steps done", format_count, whole=True)
    points: list[tuple[float, float | None]] = []
    before = 0
    for at, step in _some(known, series.MOST):
        points += [(at, None)] if step <= before else []  # gone back: a new line begins
        points.append((at, float(step)))
        before = step
    marks = [Mark(at, event.kind, event.words) for event, at in _some(happened, MOST_MARKS)]
    rows: list[list[Child]] = [[format_seconds(at), f"{step:,}"] for at, step in _some(known, MOST_ROWS)]
    table = Table(["since the first step", "steps done"], rows, [x.place(at) for at, _ in _some(known, MOST_ROWS)])
    plot = Plot(x, y, [Line("steps done", points, 0)], marks, height=160)
    words = "Flat stretches are pauses; a line that begins lower does steps again; the signs are what happened."
    return chart("The run in time", words, plot, table, wide=True)


def _some(values: Sequence[T], most: int) -> Sequence[T]:
    """At most so many of them, evenly taken, the last always."""
    every = -(-len(values) // most)
    return values if every <= 1 else [*values[:-1:every], values[-1]]


# ---- mesh ------------------------------------------------------------------------------------------------------


def mesh(run: Run) -> Html:
    """Ranks in their places; lines as thick as what crosses them in a step."""
    sizes = {axis: count(run.plan.get(axis)) for axis in ("dp", "tp", "pp")}
    if run.world <= 1:
        return el("p", "One rank: nothing crosses anything.")
    exchanges = section(run.summary, "exchanges")
    totals = {axis: sum(number(one, 0.0) for one in section(exchanges, axis).values()) for axis in exchanges}
    picture = mesh_picture(sizes["dp"], sizes["tp"], sizes["pp"], totals.get("dp", 0.0), totals.get("tp", 0.0))
    stages = f", {sizes['pp']} stages" if sizes["pp"] > 1 else ""
    keys = (("tp", 0, "to the right"), ("dp", 1, "downwards"))
    legend = [
        el("li", el("i", class_=f"key k{colour}"), f"{axis} {sizes[axis]}, {way}")
        for axis, colour, way in keys
        if sizes[axis] > 1
    ]
    picture = join(el("ul", *legend, class_="legend"), picture)
    beside = el("div", el("div", picture), _traffic(run, exchanges), class_="aside")
    return figure("The mesh", f"{run.world} ranks{stages}; a line is as thick as its traffic.", beside, None, wide=True)


def _traffic(run: Run, exchanges: Mapping[str, object]) -> Html:
    seconds, expected = section(run.summary, "exchange_seconds"), section(run.predicted, "exchanges")
    # Seconds of this attempt's steps; of an older run, of everything it did since it was started.
    told = run.summary.get("exchange_steps")
    done = count(told if told is not None else run.summary.get("step"))
    rows: list[list[Child]] = []
    for axis in exchanges:
        for operation, nbytes in section(exchanges, axis).items():
            spent = number(seconds.get(f"{axis} {operation}"))
            shown = format_seconds(spent / done) if math.isfinite(spent) else "–"
            guess = number(section(expected, axis).get(operation))
            shown_guess = format_bytes(guess) if math.isfinite(guess) else "–"
            rows.append([axis, operation, shown_guess, format_bytes(number(nbytes, 0.0)), shown])
    if not rows:
        return absent("traffic by axis", "the run does not say")
    span = f"the mean of {done:,} steps" if told is not None else "of the whole run over its steps"
    note = f"Bytes of one step as rank 0 sees them; seconds: {span}."
    head = ["axis", "operation", "predicted", "bytes a step and rank", "seconds a step"]
    return el("div", grid(Table(head, rows)), el("p", note, class_="quiet"))


# ---- events ----------------------------------------------------------------------------------------------------


def events(run: Run) -> Html:
    if not run.events:
        return el("p", "None in this folder.")
    rows: list[list[Child]] = [
        [f"{event.step:,}", event.kind, el("td", event.words, class_="words"), _when(event.at, run.began_at)]
        for event in run.events[-500:]
    ]
    note = el("p", f"The last 500 of {len(run.events):,}.", class_="quiet") if len(run.events) > 500 else None
    return join(note, grid(Table(["step", "kind", "what", "when"], rows, words=True)))


def _when(at: float | None, began: float | None) -> str:
    if at is None or began is None:
        return ""
    return f"{format_seconds(at - began)} after the first step" if at >= began else "before the first step"
