"""The page of `tilemesh bench methods`: loss against steps and time, utilisation, staleness, traffic, every row."""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.measure.method_curve import MethodCurve
from tilemesh.measure.row import Row
from tilemesh.report.bars import Bar, BarPart, bars
from tilemesh.report.draw import Drawing, Line, PageTable, Plot, PlotAxis, around, figure
from tilemesh.report.html import Html, el, join, page, tied
from tilemesh.report.rows import origin, percent, row_table


def render(rows: Sequence[Row], curves: Sequence[MethodCurve], notes: Sequence[str] = ()) -> str:
    title = "Beyond one all-reduce per step"
    studies = list(dict.fromkeys(curve.slow for curve in curves))
    parts: list[Html | None] = [el("h1", title), el("p", tied(verdict(rows)), class_="verdict")]
    for slow in studies:
        mine = [curve for curve in curves if curve.slow == slow]
        parts += [
            el("h2", f"Four workers, slow: {slow}"),
            el("div", over_steps(mine).show(), over_time(mine).show(), class_="pair"),
            el("div", utilised(mine), stale(mine), class_="pair"),
        ]
    parts += [el("h2", "What follows")] if notes else []
    parts += [el("p", tied(note + ".")) for note in notes]
    lead = ("method", "slow", "workers", "servers")
    parts += [el("h2", "Every row"), row_table(rows, lead), origin(rows)]
    return page(f"{title}: tilemesh bench", join(*parts))


def verdict(rows: Sequence[Row]) -> str:
    """Throughput beside data parallelism, for both kinds of stragglers, and why they differ."""
    found = []
    for slow in dict.fromkeys(str(row.case["slow"]) for row in rows if row.name == "straggler"):
        told = [
            f"{row.case['method']} {row.speedup['synchronous']:.2f}"
            for row in rows
            if row.name == "straggler" and row.case["slow"] == slow and row.speedup
        ]
        found.append(f"slow {slow}: {', '.join(told)}")
    why = (
        "A bound absorbs delays that change from step to step. A rank that is always slow uses the bound up once, and "
        "then all wait for it; only asynchronous workers leave it behind, and its gradients are then old."
    )
    return f"Throughput beside synchronous data parallelism. {'. '.join(found)}. {why}"


def over_steps(curves: Sequence[MethodCurve]) -> Drawing:
    points = [(curve, [(float(step), loss) for step, (_, loss) in enumerate(curve.losses)]) for curve in curves]
    return _losses("Loss against steps", "of worker 0, on held-out examples", "steps of worker 0", points)


def over_time(curves: Sequence[MethodCurve]) -> Drawing:
    points = [(curve, list(curve.losses)) for curve in curves]
    return _losses("Loss against time", "the same against seconds", "seconds", points)


def _losses(
    title: str, words: str, across: str, drawn: Sequence[tuple[MethodCurve, list[tuple[float, float]]]]
) -> Drawing:
    values = [loss for _, points in drawn for _, loss in points]
    x = PlotAxis(0, max((at for _, points in drawn for at, _ in points), default=1.0), across)
    low, high = around(values)
    layers = [Line(curve.method, points, colour) for colour, (curve, points) in enumerate(drawn)]
    rows = [[curve.method, f"{points[-1][0]:.4g}", f"{points[-1][1]:.4g}"] for curve, points in drawn if points]
    return Drawing(
        title, words, Plot(x, PlotAxis(low, high, "nats"), layers), PageTable(["method", across, "loss"], rows)
    )


def utilised(curves: Sequence[MethodCurve]) -> Html:
    """How much of the time each worker computed."""
    items = [
        Bar(
            f"{curve.method}, rank {rank}",
            [BarPart(part, rank % 4, f"computes {percent(part)} of the time", percent(part))],
        )
        for curve in curves
        for rank, part in enumerate(curve.utilisation)
    ]
    rows = [[curve.method, *(percent(part) for part in curve.utilisation)] for curve in curves]
    ranks = max((len(curve.utilisation) for curve in curves), default=0)
    head = ["method", *(f"rank {rank}" for rank in range(ranks))]
    return figure("Utilisation", "The part of the time in which each worker computes.", bars(items, most=1.0),
                  PageTable(head, rows))  # fmt: skip


def stale(curves: Sequence[MethodCurve]) -> Html:
    """Updates between a read and the application of its gradient; how far ahead anybody was; the replay."""
    served = [curve for curve in curves if curve.staleness]
    items = []
    for curve in served:
        total = sum(count for _, count in curve.staleness)
        parts = [
            BarPart(count / total, age % 8, f"{age} updates old: {percent(count / total)}", str(age))
            for age, count in curve.staleness
        ]
        items.append(Bar(curve.method, parts, f"lead at most {curve.lead}"))
    rows = [
        [
            curve.method,
            ", ".join(f"{age}: {count}" for age, count in curve.staleness),
            str(curve.lead),
            "" if curve.replay_difference is None else f"{curve.replay_difference:.1e}",
        ]
        for curve in served
    ]
    table = PageTable(["method", "gradients by age in updates", "largest lead", "difference from its replay"], rows)
    words = (
        "Gradients by the updates that were made since their weights were read. A serial replay of what the servers "
        "did gives the same weights."
    )
    return figure("Staleness", words, bars(items, most=1.0), table)
