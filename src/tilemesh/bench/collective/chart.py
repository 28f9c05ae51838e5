"""A chart of a bench of collectives: time over size, one line an algorithm, native and the limit drawn in.

Drawn by hand as SVG, one panel a collective and number of ranks; a dashed upright line marks where the quickest of ours
changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tilemesh.bench.collective.cells import crossovers
from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.measure.row import Row

_PANEL, _HEIGHT = 460, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 96, 40, 44
_COLOURS = {
    "native": "#000000",
    "auto": "#d62728",
    "limit": "#888888",
    "flat": "#1f77b4",
    "flat_one": "#7fb8e0",
    "flat_slices": "#2ca02c",
    "direct": "#9467bd",
    "direct_slices": "#8c564b",
    "ring": "#ff7f0e",
    "recursive_doubling": "#17becf",
    "rabenseifner": "#bcbd22",
    "tree": "#e377c2",
}
_OTHER = "#bbbbbb"

Points = list[tuple[int, float]]


def draw(rows: Sequence[Row], path: str) -> None:
    """Write the chart of these rows to an .svg file."""
    if not path.endswith(".svg"):
        raise UsageError(f"chart '{path}': expected a file that ends in .svg")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(svg(rows), encoding="utf-8")


def svg(rows: Sequence[Row]) -> str:
    panels: dict[tuple[str, int, str], dict[str, Points]] = {}
    for row in rows:
        if row.unit != "s" or row.measured is None or "algorithm" not in row.case:
            continue
        key = (row.name, int(str(row.case["ranks"])), str(row.case["buffers"]))
        lines = panels.setdefault(key, {})
        size = int(str(row.case["bytes"]))
        lines.setdefault(str(row.case["algorithm"]), []).append((size, row.measured.median))
        if row.limit is not None and row.case["algorithm"] == "auto":
            lines.setdefault("limit", []).append((size, row.limit))
    if not panels:
        raise UsageError("no rows of collectives to draw a chart from")
    across = 2 if len(panels) in (2, 4) else min(3, len(panels))
    down = -(-len(panels) // across)
    width, height = across * _PANEL, down * _HEIGHT
    body = []
    for place, (key, lines) in enumerate(panels.items()):
        x, y = place % across * _PANEL, place // across * _HEIGHT
        body.append(f'<g transform="translate({x} {y})">{_panel(key, lines)}</g>')
    inside = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="{width}" height="{height}" fill="white"/>\n{inside}\n</svg>\n'
    )


def _panel(key: tuple[str, int, str], lines: dict[str, Points]) -> str:
    points = [point for line in lines.values() for point in line]
    x_axis = _Axis([size for size, _ in points], _LEFT, _PANEL - _RIGHT)
    y_axis = _Axis([seconds for _, seconds in points], _HEIGHT - _BOTTOM, _TOP)
    collective, ranks, buffers = key
    where = "arrays of comm.empty" if buffers == "empty" else "ordinary arrays"
    parts = [f'<text x="{_LEFT}" y="22" font-size="14">{escape(collective)}, {ranks} ranks, {where}</text>']
    parts += _frame(x_axis, y_axis, points)
    ours = {name: line for name, line in lines.items() if name not in ("native", "limit", "auto")}
    for last, first, _, name in crossovers(ours):  # type: ignore[arg-type]
        x = (x_axis.place(last) + x_axis.place(first)) / 2
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#999" '
            f'stroke-dasharray="4 3"><title>from here {escape(name)}</title></line>'
        )
    ends = []
    for name, line in lines.items():
        ordered = sorted(line)
        path = " ".join(f"{x_axis.place(size):.1f},{y_axis.place(seconds):.1f}" for size, seconds in ordered)
        colour, wide = _COLOURS.get(name, _OTHER), 2.2 if name in ("auto", "native") else 1.1
        dash = ' stroke-dasharray="2 3"' if name == "limit" else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{wide}"{dash}/>')
        ends.append((y_axis.place(ordered[-1][1]), name, colour))
    return "".join([*parts, *_labels(ends)])


def _labels(ends: list[tuple[float, str, str]]) -> list[str]:
    """Names at the lines' right ends, pushed apart where they would overlap."""
    result, taken = [], -math.inf
    for y, name, colour in sorted(ends):
        taken = max(y + 4, taken + 11)
        result.append(f'<text x="{_PANEL - _RIGHT + 5}" y="{taken:.1f}" fill="{colour}">{escape(name)}</text>')
    return result


def _frame(x_axis: _Axis, y_axis: _Axis, points: Points) -> list[str]:
    parts = []
    for size in sorted({size for size, _ in points})[::2]:
        x = x_axis.place(size)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{format_bytes(size)}</text>')
    for seconds in y_axis.decades():
        y = y_axis.place(seconds)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_PANEL - _RIGHT}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_seconds(seconds)}</text>')
    return parts


class _Axis:
    """A logarithmic axis between two pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low, self.high = math.log10(min(values)), math.log10(max(values) * 1.0001)
        self.start, self.end = start, end

    def place(self, value: float) -> float:
        return self.start + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def decades(self) -> list[float]:
        return [10.0**k for k in range(math.ceil(self.low), math.floor(self.high) + 1)]
