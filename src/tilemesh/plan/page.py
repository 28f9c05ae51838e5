"""A page for a browser: memory against step time with the frontier marked, and the chosen plan's pipeline in time.

One self-contained HTML file with two drawings in SVG; nothing is loaded from anywhere.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from tilemesh.core import pipeline
from tilemesh.core.errors import RunError
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.plan.choose import Result
from tilemesh.plan.layout import short
from tilemesh.plan.step import Prediction

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 420, 90, 50
ROUNDS = (3, 2, 1)
"""Microbatches drawn, in multiples of the stages: filling, the steady state and draining ..."""
MOST_POINTS = 2000
MOST_SLOTS = 6000
"""... and fewer where a browser would drag."""

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1c2330;background:#fff}
svg{width:100%;height:auto}text{font:12px system-ui,sans-serif;fill:#445}.axis{stroke:#99a}.grid{stroke:#e4e7ee}
.all{fill:#9fb3d1}.front{fill:#1d4ed8}.best{fill:#c2410c}.line{fill:none;stroke:#1d4ed8;stroke-width:1.5}
.limit{stroke:#b91c1c;stroke-dasharray:5 4}.f{fill:#3b82f6}.b{fill:#f59e0b}.idle{fill:#f1f3f7}
table{border-collapse:collapse}td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #e4e7ee}
"""


def write_page(result: Result, name: str, path: str) -> None:
    """Write the page whole; RunError when it cannot be."""
    try:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(render(result, name), encoding="utf-8")
    except OSError as error:
        raise RunError(f"'{path}' cannot be written: {error.strerror}") from None


def render(result: Result, name: str) -> str:
    best = result.best
    title = f"{name} on {result.cluster.name}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{result.considered:,} layouts looked at, {result.fitting:,} fit. Best: "
        f"{html.escape(best.plan.describe())}; {format_seconds(best.step_time_s)} a step, MFU {best.mfu:.1%}, "
        f"{format_bytes(best.memory.total_bytes)} a GPU.</p>",
        "<h2>Memory against step time</h2>",
        f"<p>Dark points: nothing is both faster and smaller. Dashed: {format_bytes(best.usable_bytes)} usable.</p>",
        trade_off(result),
        "<h2>The pipeline of the first plan</h2>",
        timeline(result),
    ]
    head = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    )
    return head + "\n".join(parts) + "</html>\n"


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of points (time, memory) that no other beats in both, by time."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    kept: list[int] = []
    for i in order:
        if not kept or points[i][1] < points[kept[-1]][1]:
            kept.append(i)
    return kept


def trade_off(result: Result) -> str:
    """All layouts that fit, as points; the frontier and the ten shown."""
    points = [(p.time_s, p.nbytes) for p in result.points]
    front = frontier(points)
    slowest = max(points[i][0] for i in front)
    # The slow tail would press everything that matters into a corner.
    right = max(2.5 * points[front[0]][0], 1.05 * slowest)
    top = result.best.usable_bytes * 1.05

    def place(time_s: float, nbytes: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - 20) * time_s / right, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 20) * nbytes / top

    drawn = []
    for step in range(6):
        x, _ = place(right * step / 5, 0)
        _, y = place(0, top * step / 5)
        drawn.append(f"<line class=grid x1={x:.0f} y1=20 x2={x:.0f} y2={HEIGHT - BOTTOM} />")
        words, anchor = format_seconds(right * step / 5), "end" if step == 5 else "middle"
        drawn.append(f"<text x={x:.0f} y={HEIGHT - BOTTOM + 18} text-anchor={anchor}>{words}</text>")
        drawn.append(f"<text x={LEFT - 8} y={y + 4:.0f} text-anchor=end>{format_bytes(top * step / 5)}</text>")
    _, limit = place(0, result.best.usable_bytes)
    drawn.append(f"<line class=limit x1={LEFT} y1={limit:.0f} x2={WIDTH - 20} y2={limit:.0f} />")
    chosen = set(front)
    others = [i for i in range(len(points)) if points[i][0] <= right and i not in chosen]
    for i in others[:: 1 + len(others) // MOST_POINTS]:
        drawn.append(_dot("all", *place(*points[i]), 2.5, short(result.points[i].layout), *points[i]))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*points[i]) for i in front))
    drawn.append(f'<polyline class=line points="{path}" />')
    drawn += [_dot("front", *place(*points[i]), 4, short(result.points[i].layout), *points[i]) for i in front]
    best = result.best
    drawn.append(_dot("best", *place(best.step_time_s, best.memory.total_bytes), 6, short(best.plan), best.step_time_s,
                      best.memory.total_bytes))  # fmt: skip
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(drawn)}</svg>'


def timeline(result: Result) -> str:
    """The busy and idle times of each stage over the first microbatches, simulated."""
    best = result.best
    plan = best.plan
    if plan.pp == 1:
        return "<p>There is no pipeline: every GPU has all layers (pp 1).</p>"
    schedule, slots, total = _simulated(result, best)
    row = max(6, min(26, 600 // plan.pp))
    height = row * plan.pp + 40
    scale = (WIDTH - 70) / total
    drawn = []
    for stage in range(plan.pp):
        drawn.append(f"<rect class=idle x=60 y={stage * row} width={WIDTH - 70} height={row - 1} />")
        if row >= 12 or stage % 8 == 0:
            drawn.append(f"<text x=52 y={stage * row + row * 0.75:.0f} text-anchor=end>{stage}</text>")
    for slot in slots:
        x, width = 60 + slot.start_s * scale, max(0.4, (slot.end_s - slot.start_s) * scale - 0.3)
        kind = "f" if slot.action.forward else "b"
        opacity = 1 - 0.5 * (slot.action.chunk // plan.pp) / max(1, plan.interleave)
        drawn.append(
            f"<rect class={kind} x={x:.1f} y={slot.stage * row} width={width:.1f} height={row - 1} "
            f"opacity={opacity:.2f}><title>{slot.action}</title></rect>"
        )
    drawn.append(f"<text x=60 y={height - 14}>0</text><text x={WIDTH - 10} y={height - 14} text-anchor=end>"
                 f"{format_seconds(total)}</text>")  # fmt: skip
    shown = (
        ""
        if schedule.microbatches == plan.accumulation
        else f" (the first {schedule.microbatches} of {plan.accumulation})"
    )
    words = (
        f"{plan.schedule}, {plan.pp} stages, {schedule.microbatches} microbatches{shown}: forward blue, backward amber"
    )
    paler = ", later chunks paler" if plan.interleave > 1 else ""
    return f'<p>{words}{paler}; grey is waiting.</p><svg viewBox="0 0 {WIDTH} {height}">{"".join(drawn)}</svg>'


def _simulated(result: Result, best: Prediction) -> tuple[pipeline.PipelineSchedule, tuple[pipeline.Slot, ...], float]:
    plan = best.plan
    per_round = 2 * plan.pp * plan.pp * plan.interleave
    rounds = next((count for count in ROUNDS if count * per_round <= MOST_SLOTS), ROUNDS[-1])
    few = min(plan.accumulation, rounds * plan.pp)
    estimator = result.estimator()
    chunks = estimator.chunk_times(plan)
    schedule = pipeline.build(plan.schedule, plan.pp, few, plan.interleave)
    found = pipeline.simulate(schedule, chunks.forward_s, chunks.backward_s, keep_slots=True)
    return schedule, found.slots, found.total_s


def _dot(kind: str, x: float, y: float, radius: float, words: str, time_s: float, nbytes: float) -> str:
    label = html.escape(f"{words}: {format_seconds(time_s)}, {format_bytes(nbytes)}")
    return f"<circle class={kind} cx={x:.1f} cy={y:.1f} r={radius}><title>{label}</title></circle>"
