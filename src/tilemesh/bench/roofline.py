"""A roofline of bench rows, drawn by hand as SVG: no plotting library is worth a dependency for one picture.

Across: FLOPs per byte that must move. Up: FLOP/s. The roof is the machine's limit; each shape is a dot for ours and a
ring for eager, so the height between them is what fusing and tuning gained. A PNG is the same picture, turned by a
program that can (librsvg's, or a browser), where one is installed.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from tilemesh.core.cost import Cost
from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure.row import Row

# From a row's case to what its problem needs: `ProblemForm.cost_of`.
CostOf = Callable[[Mapping[str, Any]], Cost]

WIDTH, HEIGHT = 920, 560
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 48, 64


def check_path(path: str) -> None:
    """Refuse what `draw` could not write, so that a caller can ask before minutes of measuring."""
    target = Path(path)
    if target.suffix not in (".svg", ".png"):
        raise UsageError(f"chart '{path}': expected a file that ends in .svg or .png")
    if target.suffix == ".png":
        _converter(target, target)


def draw(rows: Sequence[Row], path: str, cost_of: CostOf) -> None:
    """Write the roofline of the kernel-time rows to an .svg or a .png file."""
    check_path(path)
    target = Path(path)
    picture = svg(rows, cost_of)
    if target.suffix == ".svg":
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(picture, encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        source, drawn = Path(folder, "chart.svg"), Path(folder, "chart.png")
        source.write_text(picture, encoding="utf-8")
        done = subprocess.run(_converter(source, drawn), capture_output=True, text=True, timeout=120, check=False)
        if not drawn.exists():
            raise RunError(f"the chart could not be turned into {path}: {done.stderr.strip()[-200:]}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(drawn, target)


def _converter(source: Path, drawn: Path) -> list[str]:
    """The command that turns an SVG into a PNG twice its size, with what this machine has."""
    if found := shutil.which("rsvg-convert"):
        return [found, "--zoom", "2", "--output", str(drawn), str(source)]
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            size = [f"--window-size={WIDTH},{HEIGHT}", "--force-device-scale-factor=2", "--hide-scrollbars"]
            return [
                found,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                *size,
                f"--screenshot={drawn}",
                source.as_uri(),
            ]
    raise UsageError("a .png chart needs rsvg-convert or chromium on the PATH, found neither: write an .svg instead")


def svg(rows: Sequence[Row], cost_of: CostOf) -> str:
    """The picture. cost_of: what a row's problem needs, from its case."""
    points = [
        _point(row, cost_of(row.case)) for row in rows if row.case.get("time") == "kernel" and row.measured is not None
    ]
    if not points:
        raise UsageError("no kernel-time rows to draw a roofline from")
    xs = [x for x, *_ in points]
    ys = [y for _, ours, eager, roof, _ in points for y in (ours, eager, roof) if y]
    across = _LogAxis(min(xs) / 1.5, max(xs) * 1.5, LEFT, WIDTH - RIGHT)
    up = _LogAxis(min(ys) / 1.5, max(ys) * 1.4, HEIGHT - BOTTOM, TOP)
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
    title = escape(f"{rows[0].name}, {rows[0].case.get('dtype', '')}: ours (dot), eager (ring), limit (line)")
    body.append(f'<text x="{LEFT}" y="26" font-size="17">{title}</text>')
    inside = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{inside}\n</svg>\n'
    )


class _LogAxis:
    """A logarithmic axis between two pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = math.log10(low), math.log10(high), start, end

    def place(self, value: float) -> float:
        return self.start + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        found = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
        return [value for value in found if self.low <= math.log10(value) <= self.high]


def _point(row: Row, work: Cost) -> tuple[float, float, float | None, float | None, str]:
    """(FLOPs per byte, our FLOP/s, eager's, the limit's, shape)."""
    assert row.measured is not None
    eager = row.peers.get("eager")
    return (
        work.intensity, work.flops / row.measured.median, work.flops / eager.median if eager else None,
        work.flops / row.limit if row.limit else None, str(row.case["shape"]),
    )  # fmt: skip


def _frame(across: _LogAxis, up: _LogAxis) -> list[str]:
    lines = []
    for value in across.ticks():
        x = across.place(value)
        lines.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
        lines.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for value in up.ticks():
        y = up.place(value)
        lines.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#eee"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value / 1e12:g}</text>')
    lines.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">FLOPs per byte</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    lines.append(f'<text x="22" y="{middle}" text-anchor="middle" transform="rotate(-90 22 {middle})">TFLOP/s</text>')
    return lines


def _roof(
    points: Sequence[tuple[float, float, float | None, float | None, str]], across: _LogAxis, up: _LogAxis
) -> list[str]:
    edge = _edge(points)
    if not edge:
        return []
    path = " ".join(f"{across.place(x):.1f},{up.place(roof):.1f}" for x, roof in edge)
    return [f'<polyline points="{path}" fill="none" stroke="#444" stroke-width="1.5"/>']


def _edge(points: Sequence[tuple[float, float, float | None, float | None, str]]) -> list[tuple[float, float]]:
    return sorted((x, roof) for x, _, _, roof, _ in points if roof)


def _labels(
    points: Sequence[tuple[float, float, float | None, float | None, str]], across: _LogAxis, up: _LogAxis
) -> list[str]:
    """Shapes beside their dots: the nearest free place around each, so that no label covers a dot or another."""
    marks = [(across.place(x), up.place(y)) for x, ours, eager, _, _ in points for y in (ours, eager) if y]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in marks]
    stems = [(across.place(x), up.place(ours), up.place(eager)) for x, ours, eager, _, _ in points if eager]
    taken += [(x - 1, min(ends), x + 1, max(ends)) for x, *ends in stems]
    roof = _sampled([(across.place(x), up.place(height)) for x, height in _edge(points)])
    lines: list[str] = []
    for x, ours, _, _, label in sorted(points):
        box = _free(across.place(x), up.place(ours), 6.3 * len(label), taken, roof)
        taken.append(box)
        halo = 'stroke="white" stroke-width="3" paint-order="stroke"'  # legible where it lies on the roof after all
        lines.append(f'<text x="{box[0]:.1f}" y="{box[3] - 3:.1f}" {halo} fill="#333">{escape(label)}</text>')
    return lines


Box = tuple[float, float, float, float]


def _free(x: float, y: float, width: float, taken: Sequence[Box], roof: Sequence[Box]) -> Box:
    """A box of a label's size near (x, y): beside it and off the roof, else on the roof, else further away."""
    for most, covered in ((14, [*taken, *roof]), (14, taken), (200, taken)):
        for away in range(0, most, 4):
            for height in (y + away, y - away):
                for left in (x + 8, x - 8 - width, x - width / 2):
                    box = (left, height - 7, left + width, height + 7)
                    inside = box[0] > LEFT and box[2] < WIDTH and box[1] > TOP and box[3] < HEIGHT - BOTTOM
                    if inside and not any(_meet(box, other) for other in covered):
                        return box
    return (x + 8, y - 7, x + 8 + width, y + 7)


def _sampled(path: Sequence[tuple[float, float]]) -> list[Box]:
    """A line as small boxes along it."""
    boxes = []
    for (x, y), (to_x, to_y) in pairwise(path):
        along = ((x + part / 50 * (to_x - x), y + part / 50 * (to_y - y)) for part in range(51))
        boxes += [(at - 1, height - 1, at + 1, height + 1) for at, height in along]
    return boxes


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
