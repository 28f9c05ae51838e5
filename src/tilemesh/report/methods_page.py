"""The page of `tilemesh bench methods`: loss against steps and time, utilisation, staleness, traffic, every row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilemesh.core.units import format_seconds
from tilemesh.measure.method_curve import BoundCurve, MethodCurve, ServerLoad
from tilemesh.measure.row import Row
from tilemesh.report.bars import Bar, BarPart, bars
from tilemesh.report.draw import Drawing, Line, PageTable, Plot, PlotAxis, around, figure
from tilemesh.report.html import Html, article, el, headed, pair, tied
from tilemesh.report.method_part import age_parts
from tilemesh.report.rows import origin, percent, row_table


def render(
    rows: Sequence[Row],
    curves: Sequence[MethodCurve],
    notes: Sequence[str] = (),
    loads: Sequence[ServerLoad] = (),
    bounds: Sequence[BoundCurve] = (),
) -> str:
    title = "Beyond one all-reduce per step"
    studies = list(dict.fromkeys(curve.slow for curve in curves))
    parts = []
    for slow in studies:
        mine = [curve for curve in curves if curve.slow == slow]
        charts = pair(over_steps(mine).show(), over_time(mine).show()), pair(utilised(mine), stale(mine))
        parts.append(headed(f"Four workers, slow: {slow}", *charts))
    if bounds:
        parts.append(headed("What a staleness bound costs", pair(over_bounds(bounds).show(), excesses(rows))))
    if loads:
        parts.append(headed("Where a server is the hotspot", pair(shares(loads).show(), queues(loads))))
    parts.append(headed("What follows", *(el("p", tied(note + ".")) for note in notes)))
    parts.append(headed("Every row", row_table(rows, ("method", "slow", "workers", "servers", "bound"))))
    return article(title, "tilemesh bench", verdict(rows), *parts, origin(rows))


def drawings(curves: Sequence[MethodCurve], loads: Sequence[ServerLoad], bounds: Sequence[BoundCurve]) -> list[Drawing]:
    """The page's charts, for a picture of their own."""
    drawn = []
    for slow in dict.fromkeys(curve.slow for curve in curves):
        mine = [curve for curve in curves if curve.slow == slow]
        drawn += [replace(over_steps(mine), title=f"Slow: {slow}"), over_time(mine)]
    return [*drawn, *([over_bounds(bounds)] if bounds else []), *([shares(loads)] if loads else [])]


def verdict(rows: Sequence[Row]) -> str:
    """Throughput beside data parallelism, for both kinds of stragglers, and why they differ."""
    sentences = []
    for slow in dict.fromkeys(str(row.case["slow"]) for row in rows if row.name == "straggler"):
        speedups = [
            f"{row.case['method']} {row.speedup['synchronous']:.2f}"
            for row in rows
            if row.name == "straggler" and row.case["slow"] == slow and row.speedup
        ]
        sentences.append(f"slow {slow}: {', '.join(speedups)}")
    why = (
        "A bound absorbs delays that change from step to step. A rank that is always slow uses the bound up once, and "
        "then all wait for it; only asynchronous workers leave it behind, and its gradients are then old."
    )
    return f"Throughput beside synchronous data parallelism. {'. '.join(sentences)}. {why}"


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
    first = drawn[0][1] if drawn else []  # synchronous data parallelism
    rows = []
    for curve, points in drawn:
        if points:
            at, loss = points[-1]
            beside = min(first, key=lambda point: abs(point[0] - at))[1]
            rows.append([curve.method, f"{at:.4g}", f"{loss:.4g}", f"{loss - beside:+.3g}"])
    table = PageTable(["method", across, "loss", f"beside {drawn[0][0].method} there" if drawn else ""], rows)
    return Drawing(title, words, Plot(x, PlotAxis(low, high, "nats"), layers), table)


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
    with_servers = [curve for curve in curves if curve.staleness]
    items = [Bar(curve.method, age_parts(curve.staleness), f"lead at most {curve.lead}") for curve in with_servers]
    rows = [
        [
            curve.method,
            ", ".join(f"{age}: {count}" for age, count in curve.staleness),
            str(curve.lead),
            "" if curve.replay_difference is None else f"{curve.replay_difference:.1e}",
        ]
        for curve in with_servers
    ]
    table = PageTable(["method", "gradients by age in updates", "largest lead", "difference from its replay"], rows)
    words = (
        "Gradients by the updates that were made since their weights were read. A serial replay of what the servers "
        "did gives the same weights."
    )
    return figure("Staleness", words, bars(items, most=1.0), table)


def over_bounds(curves: Sequence[BoundCurve]) -> Drawing:
    """Loss against steps of a quadratic whose workers keep what they read for s steps."""
    drawn = [(curve, [math.log10(max(loss, 1e-12) / curve.losses[0]) for loss in curve.losses]) for curve in curves]
    low, high = around([value for _, values in drawn for value in values])
    x = PlotAxis(0, max(len(curve.losses) - 1 for curve in curves), "steps of each worker")
    layers = [
        Line(f"s = {curve.bound}", [(float(step), value) for step, value in enumerate(values)], colour)
        for colour, (curve, values) in enumerate(drawn)
    ]
    rows = [[str(curve.bound), f"{curve.losses[-1] / curve.losses[0]:.1e}"] for curve in curves]
    return Drawing(
        "A bound too large to converge",
        "a quadratic at a constant learning rate; workers use what they read for up to s steps",
        Plot(x, PlotAxis(low, high, "log10 of the loss beside the first"), layers),
        PageTable(["staleness bound s", "last loss beside the first"], rows),
    )


def excesses(rows: Sequence[Row]) -> Html:
    """The measured difference from the best weights beside the expectation bound."""
    mine = [row for row in rows if row.name == "excess loss" and row.measured is not None]
    most = max((row.limit or 0.0 for row in mine), default=1.0)
    items = [
        Bar(f"s = {row.case['bound']}", [BarPart(row.measured.median, 0, "measured", f"{row.measured.median:.2g}")],
            f"at most {row.limit:.2g}")
        for row in mine if row.measured is not None
    ]  # fmt: skip
    table = [[str(row.case["bound"]), f"{row.measured.median:.4g}", f"{row.limit:.4g}"] for row in mine if row.measured]
    words = (
        "Logistic regression in a ball, which is convex: by how much the mean loss of all reads exceeds that of the "
        "best weights, and the bound of Ho et al. 2013, 4 F L sqrt(2 (s + 1) P / T)."
    )
    head = ["staleness bound s", "measured excess, nats", "expectation bound, nats"]
    return figure("Expectation bound", words, bars(items, most=most), PageTable(head, table))


def shares(loads: Sequence[ServerLoad]) -> Drawing:
    """What workers do beside as many that never wait for a server."""
    servers = sorted({load.servers for load in loads})
    layers = [
        Line(
            f"{count} server{'s' * (count > 1)}",
            [(math.log2(load.workers), load.share) for load in loads if load.servers == count],
            colour,
        )
        for colour, count in enumerate(servers)
    ]
    x = PlotAxis(0, max(math.log2(load.workers) for load in loads), "log2 of the workers")
    rows = [[str(load.servers), str(load.workers), percent(load.share), percent(load.busy)] for load in loads]
    return Drawing(
        "Throughput against workers",
        "simulated with this machine's messages, beside workers that never wait for a server",
        Plot(x, PlotAxis(0, 1, "part"), layers),
        PageTable(["servers", "workers", "throughput", "server at work"], rows),
    )


def queues(loads: Sequence[ServerLoad]) -> Html:
    most = max(load.queue_s for load in loads) or 1.0
    items = [
        Bar(
            f"{load.workers} workers, {load.servers} server{'s' * (load.servers > 1)}",
            [BarPart(load.queue_s, load.servers % 8, "waits", format_seconds(load.queue_s))],
        )
        for load in loads
        if load.workers in (4, 16, 64)
    ]
    rows = [[str(load.servers), str(load.workers), format_seconds(load.queue_s)] for load in loads]
    words = "What a pull and a push wait, together, for the server to become free."
    return figure("Queueing", words, bars(items, most=most), PageTable(["servers", "workers", "waiting"], rows))
