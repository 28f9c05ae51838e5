"""A roofline of bench rows, drawn by hand as SVG: no plotting library is worth a dependency for one picture.

Across: FLOPs a byte that must move. Up: FLOP/s. The roof is the machine's limit; each shape is a dot for ours and a
ring for eager, so the height between them is what fusing and tuning gained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tilemesh.core.errors import UsageError
from tilemesh.kernels.matmul.cost import cost
from tilemesh.kernels.matmul.problem import dense
from tilemesh.measure.row import Row

WIDTH, HEIGHT = 920, 560
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 48, 64


def draw(rows: Sequence[Row], path: str) -> None:
    """Write the roofline of the kernel-time rows to an .svg file."""
    if not path.endswith(".svg"):
        raise UsageError(f"chart '{path}': expected a file that ends in .svg")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(svg(rows), encoding="utf-8")


def svg(rows: Sequence[Row]) -> str:
    points = [_point(row) for row in rows if row.case.get("time") == "kernel" and row.measured is not None]
    if not points:
        raise UsageError("no kernel-time rows to draw a roofline from")
    xs = [x for x, *_ in points]
    ys = [y for _, ours, eager, roof, _ in points for y in (ours, eager, roof) if y]
    across = _Axis(min(xs) / 1.5, max(xs) * 1.5, LEFT, WIDTH - RIGHT)
    up = _Axis(min(ys) / 1.5, max(ys) * 1.4, HEIGHT - BOTTOM, TOP)
    body = [*_frame(across, up), *_roof(points, across, up)]
    for x, ours, eager, _, label in points:
        at, height = across.place(x), up.place(ours)
        if eager:
            body.append(
                f'<line x1="{at:.1f}" y1="{height:.1f}" x2="{at:.1f}" y2="{up.place(eager):.1f}" stroke="#bbb"/>'
            )
            body.append(f'<circle cx="{at:.1f}" cy="{up.place(eager):.1f}" r="4" fill="white" stroke="#d95f02"/>')
        body.append(
            f'<circle cx="{at:.1f}" cy="{height:.1f}" r="4.5" fill="#1b6ca8"><title>{escape(label)}</title></circle>'
        )
    body += _labels(points, across, up)
    device = escape(str(rows[0].case.get("dtype", "")))
    body.append(
        f'<text x="{LEFT}" y="26" font-size="17">Fused matmul, {device}: ours (dot), eager (ring), limit (line)</text>'
    )
    inside = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{inside}\n</svg>\n'
    )


class _Axis:
    """A logarithmic axis between two pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = math.log10(low), math.log10(high), start, end

    def place(self, value: float) -> float:
        return self.start + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        found = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
        return [value for value in found if self.low <= math.log10(value) <= self.high]


def _point(row: Row) -> tuple[float, float, float | None, float | None, str]:
    """(FLOPs a byte, our FLOP/s, eager's, the limit's, shape)."""
    m, n, k = (int(side) for side in str(row.case["shape"]).split("x"))
    work = cost(dense(m, n, k, dtype=str(row.case["dtype"]), c_kind=str(row.case["c"])))
    assert row.measured is not None
    eager = row.peers.get("eager")
    return (
        work.intensity, work.flops / row.measured.median, work.flops / eager.median if eager else None,
        work.flops / row.limit if row.limit else None, str(row.case["shape"]),
    )  # fmt: skip


def _frame(across: _Axis, up: _Axis) -> list[str]:
    lines = []
    for value in across.ticks():
        x = across.place(value)
        lines.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
        lines.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for value in up.ticks():
        y = up.place(value)
        lines.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#eee"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value / 1e12:g}</text>')
    lines.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">FLOPs a byte</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    lines.append(f'<text x="22" y="{middle}" text-anchor="middle" transform="rotate(-90 22 {middle})">TFLOP/s</text>')
    return lines


def _roof(
    points: Sequence[tuple[float, float, float | None, float | None, str]], across: _Axis, up: _Axis
) -> list[str]:
    edge = sorted((x, roof) for x, _, _, roof, _ in points if roof)
    if not edge:
        return []
    path = " ".join(f"{across.place(x):.1f},{up.place(roof):.1f}" for x, roof in edge)
    return [f'<polyline points="{path}" fill="none" stroke="#444" stroke-width="1.5"/>']


def _labels(
    points: Sequence[tuple[float, float, float | None, float | None, str]], across: _Axis, up: _Axis
) -> list[str]:
    """Shapes beside their dots, pushed down where two would overlap."""
    lines: list[str] = []
    taken: list[tuple[float, float]] = []
    for x, ours, _, _, label in sorted(points):
        at, height = across.place(x) + 7, up.place(ours) + 4
        while any(abs(at - other) < 6.4 * len(label) and abs(height - line) < 12 for other, line in taken):
            height += 12
        taken.append((at, height))
        anchor = "end" if at > WIDTH - 120 else "start"
        lines.append(
            f'<text x="{at - (14 if anchor == "end" else 0):.1f}" y="{height:.1f}" text-anchor="{anchor}" '
            f'fill="#333">{escape(label)}</text>'
        )
    return lines
