"""Charts of a page as pictures of their own: SVG that is light or dark as its reader's screen is, or PNG.

A `Drawing` is the same value that a page shows; here text is placed too, since a picture keeps its proportions. Colours
are the style sheet's, written out, because programs that turn an SVG into a PNG know no variables.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import replacing, write_text
from tilemesh.report.draw import Dots, Drawing, Line, Note, PlotAxis, PlotLayer, Rule, is_slanted, runs
from tilemesh.report.html import asset

WIDTH, GAP = 940, 20
_TOP, _BOTTOM, _RIGHT = 30, 46, 14
_LETTER, _LINE = 6.8, 17  # a letter's width and a line's height at the size of ticks
_SLANTED = 5.2  # what a letter of a slanted name needs below the plot
_TEXT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"


def check_picture(path: str) -> None:
    """Refuse a name that cannot be written to, so that a caller can ask before minutes of measuring."""
    target = Path(path)
    if target.suffix not in (".svg", ".png"):
        raise UsageError(f"chart '{path}': expected a file that ends in .svg or .png")
    if target.suffix == ".png":
        _converter(target, target, 1)


def write_picture(drawings: Sequence[Drawing], path: str) -> None:
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


def svg(drawings: Sequence[Drawing]) -> str:
    """The picture: a chart a row, or two where both are narrow."""
    if not drawings:
        raise UsageError("nothing to draw a chart of")
    body, top, row_height, left = [], 0.0, 0.0, 0.0
    for drawing in drawings:
        width = WIDTH if _is_wide(drawing) or len(drawings) == 1 else (WIDTH - GAP) / 2
        if left + width > WIDTH:
            top, left, row_height = top + row_height + GAP, 0.0, 0.0
        shapes, height = _panel(drawing, width)
        body.append(f'<g transform="translate({left:.0f} {top:.0f})">{"".join(shapes)}</g>')
        left, row_height = left + width + GAP, max(row_height, height)
    height = round(top + row_height)
    label = escape("; ".join(drawing.title for drawing in drawings), quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="{_TEXT}" font-size="12" '
        f'role="img" aria-label="{label}">\n<style>{style()}</style>\n'
        f'<rect class="bg" width="{WIDTH}" height="{height}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _is_wide(drawing: Drawing) -> bool:
    return len(drawing.plot.x.names) > 6 or any(isinstance(layer, Note) for layer in drawing.plot.layers)


def style() -> str:
    """Classes of the picture from the style sheet's colours: light, and dark where that is preferred."""
    light, dark = (dict(re.findall(r"--(\w+):(#\w+)", part)) for part in asset("page.css").split("@media", 2)[:2])

    def classes(colours: dict[str, str]) -> str:
        lines = "".join(f".s{n}{{stroke:{colours[f'c{n}']}}}.f{n}{{fill:{colours[f'c{n}']}}}" for n in range(8))
        bg, fg, quiet, edge = (colours[name] for name in ("bg", "fg", "quiet", "edge"))
        words = f".fg{{fill:{fg}}}.quiet{{fill:{quiet}}}.note{{fill:{fg};stroke:{bg}}}"
        return f".bg,.hole{{fill:{bg}}}.grid{{stroke:{edge}}}.edge{{stroke:{quiet}}}{words}{lines}"

    shapes = (
        ".line,.grid,.edge{fill:none}.line{stroke-width:2;stroke-linejoin:round}.dashed{stroke-dasharray:6 4}"
        ".note{stroke-width:3;paint-order:stroke}"
    )
    return f"{shapes}{classes(light)}@media (prefers-color-scheme:dark){{{classes(dark)}}}"


def _panel(drawing: Drawing, width: float) -> tuple[list[str], float]:
    """Title, legend, axes and layers of one chart, and how high it is."""
    x, y, layers = drawing.plot.x, drawing.plot.y, drawing.plot.layers
    legend, lines = _legend([layer for layer in layers if not isinstance(layer, Note) and layer.name], width)
    y_ticks = y.ticks(4)
    left = 14 + _LETTER * max(len(y.show(tick)) for tick in y_ticks)
    top = _TOP + lines * _LINE + 18
    below = _SLANTED * max(len(name) for name in x.names) if is_slanted(x, width / WIDTH) else 0.0
    frame = _Frame(x, y, left, top, width - left - _RIGHT, drawing.plot.height)
    shapes = [f'<text class="fg" x="4" y="18" font-size="15" font-weight="600">{escape(drawing.title)}</text>', *legend]
    shapes += frame.axes(y_ticks, bool(below))
    for layer in layers:
        shapes += frame.layer(layer)
    return shapes, top + drawing.plot.height + _BOTTOM + below


def _legend(layers: Sequence[Line | Dots | Rule], width: float) -> tuple[list[str], int]:
    made, at, line = [], 4.0, 0
    for layer in layers:
        needs = 42 + _LETTER * len(layer.name)
        if at + needs > width and at > 4:
            at, line = 4.0, line + 1
        y = _TOP + line * _LINE + 4
        if isinstance(layer, Dots):
            made += _circle(at + 11, y, layer.colour, 4.5, layer.hollow)
        else:
            dashed = " dashed" if isinstance(layer, Rule) or layer.dashed else ""
            made.append(f'<path class="line s{layer.colour}{dashed}" d="M{at:.0f},{y:.0f}h22"/>')
        made.append(f'<text class="fg" x="{at + 28:.0f}" y="{y + 4:.0f}">{escape(layer.name)}</text>')
        at += needs
    return made, line + 1 if layers else 0


def _circle(x: float, y: float, colour: int, radius: float, hollow: bool, words: str = "") -> list[str]:
    title = f"<title>{escape(words)}</title>" if words else ""
    made = [f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{title}</circle>']
    return [*made, f'<circle class="hole" cx="{x:.1f}" cy="{y:.1f}" r="{radius - 2:g}"/>'] if hollow else made


class _Frame:
    """Where a chart's values lie in the picture."""

    def __init__(self, x: PlotAxis, y: PlotAxis, left: float, top: float, width: float, height: float) -> None:
        self.x, self.y, self.left, self.top, self.width, self.height = x, y, left, top, width, height

    def across(self, value: float) -> float:
        return self.left + self.width * min(1.0, max(0.0, self.x.place(value)))

    def up(self, value: float) -> float:
        return self.top + self.height * (1 - min(1.0, max(0.0, self.y.place(value))))

    def axes(self, y_ticks: Sequence[float], slanted: bool) -> list[str]:
        right, bottom = self.left + self.width, self.top + self.height
        made = [f'<text class="quiet" x="4" y="{self.top - 8:.0f}">{escape(self.y.words)}</text>']
        for value in y_ticks:
            at = self.up(value)
            made.append(f'<path class="grid" d="M{self.left:.0f},{at:.1f}H{right:.0f}"/>')
            made.append(
                f'<text class="quiet" x="{self.left - 7:.0f}" y="{at + 4:.1f}" text-anchor="end">'
                f"{escape(self.y.show(value))}</text>"
            )
        made.append(f'<path class="edge" d="M{self.left:.0f},{self.top:.0f}V{bottom:.0f}H{right:.0f}"/>')
        for value in self.x.ticks(6):
            at, words = self.across(value), escape(self.x.show(value))
            place = f'transform="translate({at + 4:.1f} {bottom + 14:.0f}) rotate(-35)" text-anchor="end"'
            if not slanted:
                place = f'x="{at:.1f}" y="{bottom + 18:.0f}" text-anchor="middle"'
            made.append(f'<text class="quiet" {place}>{words}</text>')
        below = bottom + 36 + (_SLANTED * max(len(name) for name in self.x.names) if slanted else 0)
        made.append(
            f'<text class="quiet" x="{right:.0f}" y="{below:.0f}" text-anchor="end">{escape(self.x.words)}</text>'
        )
        return made

    def layer(self, layer: PlotLayer) -> list[str]:
        if isinstance(layer, Note):
            side, anchor = (-9, "end") if layer.at_left else (9, "start")
            at = self.across(layer.x) + side
            place = f'x="{at:.1f}" y="{self.up(layer.y) + 4:.1f}" text-anchor="{anchor}"'
            made = []
            if layer.named_y is not None:
                way = f"M{self.across(layer.x):.1f},{self.up(layer.named_y):.1f}L{at:.1f},{self.up(layer.y):.1f}"
                made.append(f'<path class="edge" d="{way}"/>')
            return [*made, f'<text class="note" font-size="11" {place}>{escape(layer.text)}</text>']
        if isinstance(layer, Rule):
            upright = f"M{self.across(layer.at):.1f},{self.top:.0f}v{self.height:.0f}"
            way = upright if layer.upright else f"M{self.left:.0f},{self.up(layer.at):.1f}h{self.width:.0f}"
            return [f'<path class="line s{layer.colour} dashed" d="{way}"/>']
        if isinstance(layer, Dots):
            words = layer.words or [""] * len(layer.points)
            return [
                shape
                for (at, value), said in zip(layer.points, words, strict=True)
                for shape in _circle(self.across(at), self.up(value), layer.colour, layer.size / 2, layer.hollow, said)
            ]
        return self._line(layer)

    def _line(self, layer: Line) -> list[str]:
        made, circles = [], []
        for run in runs([None if value is None else (at, value) for at, value in layer.points]):
            places = [(self.across(at), self.up(value)) for at, value in run]
            way = "L".join(f"{at:.1f},{value:.1f}" for at, value in places)
            made.append(f'<path class="line s{layer.colour}{" dashed" if layer.dashed else ""}" d="M{way}"/>')
            if layer.dots or len(places) == 1:
                circles += [shape for at, value in places for shape in _circle(at, value, layer.colour, 3.5, False)]
        return made + circles
