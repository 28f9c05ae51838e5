"""Drawings that no chart library makes: boxes, arrows, words, lanes in time, bars and cells, as SVG.

A drawing is light or dark as its reader's screen is. Colours are numbers 0 to 7 of one palette, which the pages of a
run share; a box is filled with a pale tint of its colour, so that words in the foreground colour can be read on it.
y grows downwards. Charts with axes are `report/chart.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
LETTER = 0.53  # the width of a letter in heights of its font, on average
PALETTE = {
    "shade": ("#0004", "#fff4"), "bg": ("#fff", "#12161d"), "fg": ("#1b212c", "#e7ebf2"),
    "quiet": ("#5a6475", "#a3adbd"), "edge": ("#dde1e9", "#313947"), "soft": ("#f3f5f9", "#1b212b"),
    "good": ("#00694d", "#58d3ab"), "bad": ("#b23c00", "#ff9d66"),
    "c0": ("#1f5fd0", "#3b8cff"), "c1": ("#b5500a", "#f4a024"), "c2": ("#0b8658", "#31d88e"),
    "c3": ("#d499d3", "#d1a0ed"), "c4": ("#4a3a10", "#ce5d2d"), "c5": ("#38b0f5", "#c5f4ff"),
    "c6": ("#6a6f7c", "#7d8791"), "c7": ("#eba11c", "#fff58b"),
    **{f"t{n}": ("#1b212c" if n in (3, 5, 7) else "#fff", "#0b0f14") for n in range(8)},
}  # fmt: skip
"""By name: the colour on a light ground, and on a dark one. c0 to c7 can be told apart, and t0 to t7 be
read on them."""
_SHAPES = (
    ".line,.grid,.edge,.lead{fill:none}.line{stroke-width:2;stroke-linejoin:round}.dashed{stroke-dasharray:6 4}"
    ".note{stroke-width:3;paint-order:stroke}.dot{stroke-linecap:round;fill:none}.band{opacity:.22}"
    ".box{fill-opacity:.22;stroke-width:1.3}.pale{fill-opacity:.09;stroke-width:1}.mid{text-anchor:middle}"
    ".end{text-anchor:end}.thin{stroke-width:1.3;fill:none}.thick{stroke-width:2.2;fill:none}.b{font-weight:600}"
)


def style() -> str:
    """The classes of a drawing: light, and dark where that is preferred. Colours are written out, because programs that
    turn an SVG into a PNG know no variables."""
    light, dark = (_classes({name: pair[which] for name, pair in PALETTE.items()}) for which in (0, 1))
    return f"{_SHAPES}{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _classes(colours: dict[str, str]) -> str:
    bg, fg, quiet, edge = (colours[name] for name in ("bg", "fg", "quiet", "edge"))
    words = f".fg{{fill:{fg}}}.quiet{{fill:{quiet}}}.note{{fill:{fg};stroke:{bg}}}.hole{{stroke:{bg}}}"
    lines = "".join(f".s{n}{{stroke:{colours[f'c{n}']}}}.f{n}{{fill:{colours[f'c{n}']}}}" for n in range(8))
    return f".bg{{fill:{bg}}}.grid{{stroke:{edge}}}.edge,.lead{{stroke:{quiet}}}{words}{lines}"


def document(width: float, height: float, label: str, shapes: Iterable[str]) -> str:
    """The file of a drawing from its shapes."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="{FONT}" '
        f'font-size="12" role="img" aria-label="{escape(label, quote=True)}">\n<style>{style()}</style>\n'
        f'<rect class="bg" width="{width:g}" height="{height:g}"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def files_of(*drawings: Callable[[], str]) -> dict[str, str]:
    """Drawings by the names of their files, which are those of their functions."""
    return {f"{drawing.__name__}.svg": drawing() for drawing in drawings}


def text_width(words: str, size: float = 12) -> float:
    """About how wide words are."""
    return LETTER * size * len(words)


class Scene:
    """A drawing that grows; `svg()` closes it."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []
        if title:
            self.text(12, 22, title, size=15, bold=True)

    def text(
        self, x: float, y: float, words: str, *, size: float = 12, bold: bool = False, align: str = "",
        quiet: bool = False, above: bool = False,
    ) -> None:  # fmt: skip
        """`align`: "" begins at x, "mid" is centred on it, "end" ends there. `above`: lines behind it keep off."""
        classes = " ".join(["quiet" if quiet else "fg", *(["b"] if bold else []), *([align] if align else [])])
        halo = ' hole" style="paint-order:stroke;stroke-width:3' if above else ""
        place = f'x="{x:g}" y="{y:g}" font-size="{size:g}"'
        self.shapes.append(f'<text class="{classes}{halo}" {place}>{escape(words)}</text>')

    def note(self, x: float, y: float, words: str) -> None:
        """A small line of explanation."""
        self.text(x, y, words, size=11, quiet=True)

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", *, colour: int = 0, pale: bool = False,
        size: float = 12, tip: str = "",
    ) -> None:  # fmt: skip
        """A rectangle with words in its middle; a line break begins a new line. `tip`: for whoever points at it."""
        kind = "pale" if pale else "box"
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        end = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self.shapes.append(f'<rect class="{kind} f{colour} s{colour}" {place} rx="3"{end}')
        lines = words.split("\n") if words else []
        for row, line in enumerate(lines):
            middle = y + height / 2 + (row - (len(lines) - 1) / 2) * (size + 3) + size * 0.36
            self.text(x + width / 2, middle, line, size=size, align="mid")

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: int | None = None, dashed: bool = False,
        thick: bool = False, faint: bool = False,
    ) -> None:  # fmt: skip
        """`faint`: as the lines of a grid."""
        stroke = f"s{colour}" if colour is not None else "grid" if faint else "edge"
        self.path(f"M{x1:.4g},{y1:.4g}L{x2:.4g},{y2:.4g}", stroke, thick=thick, dashed=dashed)

    def path(self, way: str, stroke: str, *, thick: bool = False, dashed: bool = False) -> None:
        """A line by its SVG commands; `stroke`: a class that gives its colour."""
        self.shapes.append(
            f'<path class="{stroke} {"thick" if thick else "thin"}{" dashed" if dashed else ""}" d="{way}"/>'
        )

    def area(self, points: Iterable[tuple[float, float]], colour: int, *, tinted: bool = False) -> None:
        """A filled outline; `tinted`: as pale as a box."""
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(f'<polygon class="{"box " if tinted else ""}f{colour}" points="{corners}"/>')

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, words: str = "", *, colour: int = 0, dashed: bool = False
    ) -> None:
        """A line with a tip at its second end, and words beside its middle."""
        self.line(x1, y1, x2, y2, colour=colour, dashed=dashed, thick=True)
        length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-9)
        self.tip(x2, y2, ((x2 - x1) / length, (y2 - y1) / length), colour)
        if words:
            self.text((x1 + x2) / 2 + 4, (y1 + y2) / 2 - 5, words, size=11, quiet=True, align="mid")

    def tip(self, x: float, y: float, along: tuple[float, float], colour: int) -> None:
        """The tip of an arrow that ends here; `along`: its direction, of length 1."""
        left = x - 9 * along[0] - 4.5 * along[1], y - 9 * along[1] + 4.5 * along[0]
        right = x - 9 * along[0] + 4.5 * along[1], y - 9 * along[1] - 4.5 * along[0]
        self.area(((x, y), left, right), colour)

    def cells(
        self, x: float, y: float, pitch: tuple[float, float], rows: Iterable[Iterable[tuple[str, int, bool]]],
        *, gap: float = 2, size: float = 10,
    ) -> None:  # fmt: skip
        """A table of boxes, each (words, colour, pale), so far from one to the next, with a gap between."""
        for down, row in enumerate(rows):
            for across, (words, colour, pale) in enumerate(row):
                place = x + across * pitch[0], y + down * pitch[1]
                self.box(*place, pitch[0] - gap, pitch[1] - gap, words, colour=colour, pale=pale, size=size)

    def bar(
        self, left: float, y: float, length: float, height: float, name: str = "", value: str = "", *, colour: int = 0,
        quiet: bool = True, pale: bool = False,
    ) -> None:  # fmt: skip
        """A bar that begins at `left`, its name before it, its value behind it."""
        if name:
            self.text(left - 10, y + height / 2 + 4, name, align="end")
        self.box(left, y, length, height, colour=colour, pale=pale)
        if value:
            self.text(left + 8 + length, y + height / 2 + 4, value, size=11, quiet=quiet)

    def svg(self) -> str:
        return document(self.width, self.height, self.title, self.shapes)


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
    blocks: Sequence[LaneBlock],
    *,
    unit: str = "time",
    note: str = "",
    left: int = 96,
    end: float | None = None,
) -> str:
    """Lanes over time, one below the other: ranks of a pipeline, stages of a program. `end`: of the time that is shown;
    where the last block ends, if not given."""
    end = max(block.end for block in blocks) if end is None else end
    width, lane = 860, 34
    scale = (width - left - 24) / end
    scene = Scene(width, 58 + len(names) * (lane + 6) + (40 if note else 22), title)
    for number, name in enumerate(names):
        y = 40 + number * (lane + 6)
        scene.text(left - 10, y + lane / 2 + 4, name, align="end")
        scene.line(left, y + lane, left + end * scale, y + lane)
    for block in blocks:
        x, y = left + block.begin * scale, 43 + block.lane * (lane + 6)
        size = ((block.end - block.begin) * scale, lane - 6)
        scene.box(x, y, *size, block.words, colour=block.colour, pale=block.pale, size=11)
    below = 40 + len(names) * (lane + 6) + 10
    scene.arrow(left, below, left + end * scale, below, colour=6)
    scene.text(left + end * scale, below + 16, f"{unit} → {end:g}", align="end", quiet=True, size=11)
    if note:
        scene.note(left, below + 20, note)
    return scene.svg()
