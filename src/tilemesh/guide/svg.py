"""Drawings of the guide: boxes, arrows, words and lanes as SVG that is light or dark as its reader's screen is.

Colours are the pages' own (`report/assets/page.css`). A box is filled with a pale tint of its colour, so that words in
the foreground colour can be read on it in both. Curves with axes are `report.picture`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tilemesh.report.picture import style

_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
_SHAPES = (
    ".box{fill-opacity:.22;stroke-width:1.3}.pale{fill-opacity:.09;stroke-width:1}.mid{text-anchor:middle}"
    ".end{text-anchor:end}.thin{stroke-width:1.3;fill:none}.thick{stroke-width:2.2;fill:none}.b{font-weight:600}"
)


class Canvas:
    """A drawing that grows; `svg()` closes it. Colours are numbers 0 to 7; y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width = width
        self.height = height
        self.title = title
        self._body: list[str] = []
        self.text(12, 22, title, size=15, bold=True)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 12,
        bold: bool = False,
        align: str = "",
        quiet: bool = False,
    ) -> None:
        """`align`: "" begins at x, "mid" is centred on it, "end" ends there."""
        classes = " ".join(["quiet" if quiet else "fg", *(["b"] if bold else []), *([align] if align else [])])
        self._body.append(f'<text class="{classes}" x="{x:g}" y="{y:g}" font-size="{size}">{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", *, colour: int = 0, pale: bool = False,
        size: int = 12,
    ) -> None:  # fmt: skip
        """A rectangle with words in its middle; a line break in them begins a new line."""
        kind = "pale" if pale else "box"
        place_and_size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._body.append(f'<rect class="{kind} f{colour} s{colour}" {place_and_size} rx="3"/>')
        lines = words.split("\n") if words else []
        for place, line in enumerate(lines):
            middle = y + height / 2 + (place - (len(lines) - 1) / 2) * (size + 3) + size * 0.36
            self.text(x + width / 2, middle, line, size=size, align="mid")

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: int | None = None, dashed: bool = False,
        thick: bool = False, faint: bool = False,
    ) -> None:  # fmt: skip
        """`faint`: as the lines of a grid."""
        stroke = f"s{colour}" if colour is not None else "grid" if faint else "edge"
        classes = f"{stroke} {'thick' if thick else 'thin'}{' dashed' if dashed else ''}"
        self._body.append(f'<path class="{classes}" d="M{x1:.4g},{y1:.4g}L{x2:.4g},{y2:.4g}"/>')

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, words: str = "", *, colour: int = 0, dashed: bool = False
    ) -> None:
        """A line with a tip at its second end, and words beside its middle."""
        self.line(x1, y1, x2, y2, colour=colour, dashed=dashed, thick=True)
        length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-9)
        along = (x2 - x1) / length, (y2 - y1) / length
        left = x2 - 9 * along[0] - 4.5 * along[1], y2 - 9 * along[1] + 4.5 * along[0]
        right = x2 - 9 * along[0] + 4.5 * along[1], y2 - 9 * along[1] - 4.5 * along[0]
        points = f"{x2:.1f},{y2:.1f} {left[0]:.1f},{left[1]:.1f} {right[0]:.1f},{right[1]:.1f}"
        self._body.append(f'<polygon class="f{colour}" points="{points}"/>')
        if words:
            self.text((x1 + x2) / 2 + 4, (y1 + y2) / 2 - 5, words, size=11, quiet=True, align="mid")

    def svg(self) -> str:
        label = escape(self.title, quote=True)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" font-family="{_FONT}" '
            f'font-size="12" role="img" aria-label="{label}">\n<style>{style()}{_SHAPES}</style>\n'
            f'<rect class="bg" width="{self.width}" height="{self.height}"/>\n' + "\n".join(self._body) + "\n</svg>\n"
        )


@dataclass(frozen=True)
class LaneBlock:
    """Something that takes time in a lane."""

    lane: int
    begin: float
    end: float
    words: str = ""
    colour: int = 0
    pale: bool = False


def lanes(
    title: str,
    names: Sequence[str],
    stretches: Sequence[LaneBlock],
    *,
    unit: str = "time",
    note: str = "",
    left: int = 96,
) -> str:
    """Lanes over time, one below the other: ranks of a pipeline, stages of a program."""
    end = max(stretch.end for stretch in stretches)
    width, lane = 860, 34
    scale = (width - left - 24) / end
    canvas = Canvas(width, 58 + len(names) * (lane + 6) + (40 if note else 22), title)
    for number, name in enumerate(names):
        y = 40 + number * (lane + 6)
        canvas.text(left - 10, y + lane / 2 + 4, name, align="end")
        canvas.line(left, y + lane, left + end * scale, y + lane)
    for stretch in stretches:
        y = 40 + stretch.lane * (lane + 6)
        canvas.box(
            left + stretch.begin * scale, y + 3, (stretch.end - stretch.begin) * scale, lane - 6, stretch.words,
            colour=stretch.colour, pale=stretch.pale, size=11,
        )  # fmt: skip
    below = 40 + len(names) * (lane + 6) + 10
    canvas.arrow(left, below, left + end * scale, below, colour=6)
    canvas.text(left + end * scale, below + 16, f"{unit} → {end:g}", align="end", quiet=True, size=11)
    if note:
        canvas.text(left, below + 20, note, quiet=True, size=11)
    return canvas.svg()
