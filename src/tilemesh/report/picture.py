"""Charts of a page as pictures of their own: SVG that is light or dark as its reader's screen is, or PNG.

A `Drawing` is the same value that a page shows, and its shapes are drawn by the same code (`draw.PlotFrame`); here
text is placed too, since a picture keeps its proportions.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import replacing, write_text
from tilemesh.core.scene import Scene, document
from tilemesh.report import draw
from tilemesh.report.html import el

WIDTH, GAP = 940, 20
_TOP, _BOTTOM, _RIGHT = 30, 46, 14
_LETTER, _LINE = 6.8, 17  # a letter's width and a line's height at the size of ticks
_SLANTED = 5.2  # what a letter of a slanted name needs below the plot


def check_picture(path: str) -> None:
    """Refuse a name that cannot be written to, so that a caller can ask before minutes of measuring."""
    target = Path(path)
    if target.suffix not in (".svg", ".png"):
        raise UsageError(f"chart '{path}': expected a file that ends in .svg or .png")
    if target.suffix == ".png":
        _converter(target, target, 1)


def write_picture(drawings: Sequence[draw.Drawing], path: str) -> None:
    """Write the charts below and beside each other to an .svg or a .png file."""
    check_picture(path)
    text = svg(drawings)
    if path.endswith(".svg"):
        write_text(text, path)
        return
    with tempfile.TemporaryDirectory() as folder:
        source, drawn = Path(folder, "chart.svg"), Path(folder, "chart.png")
        source.write_text(text, encoding="utf-8")
        height = int(text.split('viewBox="0 0 ')[1].split('"')[0].split()[1])
        done = subprocess.run(
            _converter(source, drawn, height), capture_output=True, text=True, timeout=120, check=False
        )
        if not drawn.exists():
            raise RunError(f"the chart could not be turned into {path}: {done.stderr.strip()[-200:]}")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as part:
            shutil.copyfile(drawn, part)


def _converter(source: Path, drawn: Path, height: int) -> list[str]:
    """The command that turns an SVG into a PNG twice its size, with what this machine has."""
    if program := shutil.which("rsvg-convert"):
        return [program, "--zoom", "2", "--output", str(drawn), str(source)]
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if program := shutil.which(name):
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--force-device-scale-factor=2"]
            size = [f"--window-size={WIDTH},{height}", "--hide-scrollbars"]
            return [program, *flags, *size, f"--screenshot={drawn}", source.as_uri()]
    raise UsageError("a .png chart needs rsvg-convert or chromium on the PATH, found neither: write an .svg instead")


def svg(drawings: Sequence[draw.Drawing]) -> str:
    """The picture: a chart a row, or two where both are narrow."""
    if not drawings:
        raise UsageError("nothing to draw a chart of")
    body, top, row_height, left = [], 0.0, 0.0, 0.0
    for drawing in drawings:
        plot = drawing.plot
        is_wide = len(plot.x.names) > 6 or any(isinstance(layer, draw.Note) for layer in plot.layers)
        width = WIDTH if is_wide or len(drawings) == 1 else (WIDTH - GAP) / 2
        if left + width > WIDTH:
            top, left, row_height = top + row_height + GAP, 0.0, 0.0
        shapes, height = _panel(drawing, width)
        body.append(f'<g transform="translate({left:.0f} {top:.0f})">{"".join(shapes)}</g>')
        left, row_height = left + width + GAP, max(row_height, height)
    label = "; ".join(drawing.title for drawing in drawings)
    return document(WIDTH, round(top + row_height), label, body)


def curves(title: str, x: draw.PlotAxis, y: draw.PlotAxis, *layers: draw.PlotLayer, height: int = 260) -> str:
    """The picture of one chart."""
    return svg([draw.Drawing(title, "", draw.Plot(x, y, layers, height=height), draw.PageTable([], []))])


def _panel(drawing: draw.Drawing, width: float) -> tuple[list[str], float]:
    """Title, legend, axes and layers of one chart, and how high it is."""
    plot, scene = drawing.plot, Scene(width, 0, "")
    scene.text(4, 18, drawing.title, size=15, bold=True)
    lines = _add_legend(scene, [layer for layer in plot.layers if not isinstance(layer, draw.Note) and layer.name])
    left = 14 + _LETTER * max(len(plot.y.show(tick)) for tick in plot.y.ticks(4))
    top = _TOP + lines * _LINE + 18
    below = _SLANTED * max(len(name) for name in plot.x.names) if draw.is_slanted(plot.x, width / WIDTH) else 0.0
    frame = draw.PlotFrame(plot.x, plot.y, left, top, width - left - _RIGHT, plot.height, lead=9, dot=7)
    _add_axes(scene, frame, below)
    for layer in plot.layers:
        scene.shapes += frame.shapes(layer)
        if isinstance(layer, draw.Note):
            side, anchor = (-9, "end") if layer.at_left else (9, "start")
            place = f'x="{frame.across(layer.x) + side:.1f}" y="{frame.up(layer.y) + 4:.1f}" text-anchor="{anchor}"'
            scene.shapes.append(f'<text class="note" font-size="11" {place}>{escape(layer.text)}</text>')
    return scene.shapes, top + plot.height + _BOTTOM + below


def _add_legend(scene: Scene, layers: Sequence[draw.Line | draw.Dots | draw.Rule]) -> int:
    """The keys beside each other; how many lines they take."""
    at, line = 4.0, 0
    for layer in layers:
        needs = 42 + _LETTER * len(layer.name)
        if at + needs > scene.width and at > 4:
            at, line = 4.0, line + 1
        y = _TOP + line * _LINE + 4
        if isinstance(layer, draw.Dots):
            scene.shapes += draw.dot_paths([f"M{at + 11:.1f},{y:.1f}h0"], layer.colour, 9, layer.hollow)
        else:
            dashed = isinstance(layer, draw.Rule) or layer.dashed
            scene.shapes.append(el("path", class_=draw.line_class(layer.colour, dashed), d=f"M{at:.0f},{y:.0f}h22"))
        scene.text(round(at + 28), round(y + 4), layer.name)
        at += needs
    return line + 1 if layers else 0


def _add_axes(scene: Scene, frame: draw.PlotFrame, below: float) -> None:
    """Lines and words around a chart; `below`: the height of names that are written at an angle, 0 where none are."""
    left, right, bottom = round(frame.left), round(frame.left + frame.width), frame.top + frame.height
    scene.text(4, frame.top - 8, frame.y.words, quiet=True)
    for value in frame.y.ticks(4):
        at = round(frame.up(value), 1)
        scene.shapes.append(el("path", class_="grid", d=f"M{left},{at:g}H{right}"))
        scene.text(left - 7, at + 4, frame.y.show(value), align="end", quiet=True)
    scene.shapes.append(el("path", class_="edge", d=f"M{left},{frame.top:g}V{bottom:g}H{right}"))
    for value in frame.x.ticks(6):
        at, words = round(frame.across(value), 1), frame.x.show(value)
        if below:
            place = f'transform="translate({at + 4:g} {bottom + 14:g}) rotate(-35)"'
            scene.shapes.append(f'<text class="quiet end" {place}>{escape(words)}</text>')
        else:
            scene.text(at, bottom + 18, words, align="mid", quiet=True)
    scene.text(right, round(bottom + 36 + below), frame.x.words, align="end", quiet=True)
