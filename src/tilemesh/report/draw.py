"""The drawing helpers of every page: axes, lines, dots, bars and tables.

The one idea: only shapes are stretched. A plot's lines lie in an SVG that takes whatever width there is (strokes keep
theirs, and a dot is a stroke of no length); text is HTML at its own size beside it. So one drawing, made once without
a script, is legible on a phone and on a projector. Colours are classes: light and dark are the style sheet's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tilemesh.report.html import Child, Html, el, join

SPAN = 1000  # units of the drawing across and up
_NICE = (1, 2, 2.5, 5, 10)
_MARK_ROWS, _MARK_WIDTH = 3, 0.045  # rows of signs above a plot, and a sign's share of a narrow one
NAMES_FIT = 100  # letters of names beside each other below a plot

Format = Callable[[float], str]
T = TypeVar("T")


@dataclass(frozen=True)
class PlotAxis:
    """Values between two ends, each at a fraction of the way; logarithmic or not."""

    low: float
    high: float
    words: str
    show: Format = "{:g}".format
    log: bool = False
    whole: bool = False
    """Only whole numbers get a tick."""
    binary: bool = False
    """Ticks at round numbers of KiB, MiB, GiB."""
    unit: float = 1.0
    """Ticks at round numbers of it, such as 60 for minutes on an axis of seconds."""
    names: Sequence[str] = ()
    """Instead of numbers: places 0, 1, 2, … each with its name."""

    @classmethod
    def of_names(cls, names: Sequence[str], words: str) -> PlotAxis:
        return cls(-0.5, len(names) - 0.5, words, lambda place: names[round(place)], names=names)

    def place(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        return 0.5 if low == high else (self._scaled(value) - low) / (high - low)

    def value(self, place: float) -> float:
        """What lies at a fraction of the way."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        scaled = low + place * (high - low)
        return 10.0**scaled if self.log else scaled

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def ticks(self, about: int = 5) -> list[float]:
        if self.names:
            return [float(place) for place in range(len(self.names))]
        if self.log:
            return _log_ticks(self.low, self.high, self.binary)
        width = (self.high - self.low) / max(1, about)
        if width <= 0 or not math.isfinite(width):
            return [self.low]
        step = _binary_step(width, self.high) if self.binary else self.unit * _decimal_step(width / self.unit)
        if self.whole:
            step = max(1.0, round(step))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]


def _decimal_step(width: float) -> float:
    """The next round number above a width."""
    unit = 10.0 ** math.floor(math.log10(width))
    return next(nice * unit for nice in _NICE if nice * unit >= width * 0.999)


def _binary_step(width: float, high: float) -> float:
    """The same in the unit of the axis's end: 1, 2, 5, 10, … of it, or a half, a quarter, … (512 MiB)."""
    unit = 1024.0 ** max(0, math.floor(math.log(max(1.0, high), 1024)))
    if width <= unit / 2:
        return unit * 2.0 ** math.ceil(math.log2(width * 0.999 / unit))
    step = _decimal_step(max(width, unit) / unit)
    return unit * (2 * step if step == 2.5 else step)


def _log_ticks(low: float, high: float, binary: bool) -> list[float]:
    if binary:  # 1, 16, 256 KiB: powers of sixteen
        powers = range(math.ceil(math.log(low, 16) - 1e-9), math.floor(math.log(high, 16) + 1e-9) + 1)
        return [16.0**power for power in powers]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    every = max(1, len(decades) // 7)
    ticks = [step * 10.0**decade for decade in decades for step in steps if decade % every == 0]
    return [value for value in ticks if low * 0.999 <= value <= high * 1.001]


def around(values: Iterable[float], *, zero: bool = False, margin: float = 0.06) -> tuple[float, float]:
    """Ends of an axis that leave some room around values; (0, 1) for none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if zero:
        low = min(0.0, low)
    room = (high - low) * margin or abs(high) * margin or 1.0
    return (low if zero and low == 0 else low - room), high + room


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other is below in both values, by the first."""
    kept: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not kept or points[i][1] < points[kept[-1]][1]:
            kept.append(i)
    return kept


# ---- layers of a plot ------------------------------------------------------------------------------------------

PlotPoints = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Line:
    """Values joined; None breaks the line. `band`: (x, low, high) shaded behind it, with None where it breaks too."""

    name: str
    points: PlotPoints
    colour: int = 0
    dashed: bool = False
    dots: bool = False
    band: Sequence[tuple[float, float, float] | None] = ()


@dataclass(frozen=True)
class Dots:
    """Single values, each with words for whoever points at it."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    size: int = 7
    hollow: bool = False
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Rule:
    """A straight line across the plot at a value: a limit, a prediction."""

    name: str
    at: float
    colour: int = 1
    upright: bool = False


@dataclass(frozen=True)
class Note:
    """A word beside a place of the plot: at its right, or at its left. `named_y`: the height of the dot that it names,
    if a line is to lead there."""

    x: float
    y: float
    text: str
    at_left: bool = False
    named_y: float | None = None


@dataclass(frozen=True)
class EventMark:
    """A sign above the plot at a value of x: a checkpoint, a restart, a warning."""

    at: float
    kind: str
    words: str


PlotLayer = Line | Dots | Rule | Note

SIGNS = {"checkpoint": "◆", "restart": "↻", "resumed": "▶", "warning": "▲", "stopped": "■", "failed": "✖"}
"""Events that every kind of run may have; others are drawn as a dot."""


@dataclass(frozen=True)
class PageTable:
    """A chart's numbers. `places`: where a row lies across (0 to 1), for the cursor that reads the chart aloud."""

    head: Sequence[str]
    rows: Sequence[Sequence[Child]]
    places: Sequence[float] = ()
    note: str = ""
    words: bool = False
    """Text rather than numbers: aligned at the left."""


@dataclass(frozen=True)
class Plot:
    """One chart: two axes and what lies between them."""

    x: PlotAxis
    y: PlotAxis
    layers: Sequence[PlotLayer]
    marks: Sequence[EventMark] = ()
    height: int = 260
    shaded: Sequence[tuple[float, float, str]] = field(default_factory=tuple)
    """Stretches of x where nothing is known, with the reason."""


@dataclass(frozen=True)
class Drawing:
    """A chart as a value: part of a page (`show`) or a picture of its own (`picture.svg`)."""

    title: str
    words: str
    plot: Plot
    table: PageTable

    def show(self, *, wide: bool = False) -> Html:
        return chart(self.title, self.words, self.plot, self.table, wide=wide)


def chart(title: str, words: Child, plot: Plot, table: PageTable | None, *, wide: bool = False) -> Html:
    """A figure: title, one sentence, the plot, its legend, and its numbers folded beneath."""
    cursor = table is not None and bool(table.places)
    body = _plot(title, plot, cursor)
    return figure(title, words, join(_legend(plot.layers, plot.marks), body), table, wide=wide)


def figure(title: str, words: Child, body: Html, table: PageTable | None, *, wide: bool = False) -> Html:
    return el(
        "figure",
        el("figcaption", el("h3", title), el("p", words) if words else None),
        body,
        numbers(table) if table is not None else None,
        class_="wide" if wide else None,
    )


def numbers(table: PageTable, summary: str = "Numbers") -> Html:
    return el(
        "details", el("summary", summary), el("p", table.note, class_="quiet") if table.note else None, grid(table)
    )


def grid(table: PageTable) -> Html:
    """A plain table that scrolls by itself where it is too wide."""
    head = el("tr", *(el("th", heading, scope="col") for heading in table.head))
    places: Sequence[float | None] = table.places or [None] * len(table.rows)
    rows = [
        el("tr", *(_cell(cell) for cell in row), data_x=None if place is None else f"{place:.4f}")
        for row, place in zip(table.rows, places, strict=True)
    ]
    return el(
        "div",
        el("table", el("thead", head), el("tbody", *rows), class_="left" if table.words else None),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label="table: " + ", ".join(table.head[:4]),
    )


def _cell(cell: Child) -> Html:
    return cell if isinstance(cell, Html) and cell.startswith("<td") else el("td", cell)


def _plot(title: str, plot: Plot, cursor: bool) -> Html:
    x, y, frame = plot.x, plot.y, PlotFrame(plot.x, plot.y)
    shapes: list[Html] = []
    for begin, end, _ in plot.shaded:
        left, right = frame.across(begin), frame.across(end)
        shapes.append(
            el("rect", class_="gap", x=f"{left:.1f}", y=0, width=f"{max(1.0, right - left):.1f}", height=SPAN)
        )
    x_ticks, y_ticks = x.ticks(6), y.ticks(4)
    grid_path = "".join(f"M0,{frame.up(tick):.1f}H{SPAN}" for tick in y_ticks)
    shapes.append(el("path", class_="grid", d=grid_path))
    for layer in plot.layers:
        shapes += frame.shapes(layer)
    texts = [el("span", y.show(tick), class_="ty", style=f"top:{frame.up(tick) / SPAN:.2%}") for tick in y_ticks]
    kind = "tx slant" if is_slanted(x) else "tx"
    texts += [
        el("span", x.show(tick), class_=kind if stays else "tx less", style=f"left:{x.place(tick):.2%}")
        for tick, stays in _thinned(x_ticks, x)
    ]
    texts += [
        el(
            "span",
            layer.text,
            class_="note back" if layer.at_left else "note",
            style=f"left:{x.place(layer.x):.2%};top:{frame.up(layer.y) / SPAN:.2%}",
        )
        for layer in plot.layers
        if isinstance(layer, Note)
    ]
    marks = _in_rows(plot.marks, x)
    signs = [
        el(
            "span",
            SIGNS.get(mark.kind, "●"),
            class_=f"sign {mark.kind}",
            title=mark.words,
            style=f"left:{place:.2%};--row:{row}",
        )
        for mark, place, row in marks
    ]
    drawing = el("svg", *shapes, viewBox=f"0 0 {SPAN} {SPAN}", preserveAspectRatio="none", role="img", aria_label=title)
    inside = el(
        "div",
        drawing,
        *texts,
        *signs,
        class_="plot",
        style=f"height:{plot.height}px",
        tabindex=0 if cursor else None,
        role="group" if cursor else None,
        aria_label=f"{title}: arrow keys read its values" if cursor else None,
    )
    reading = el("output", class_="reading", aria_live="polite") if cursor else None
    left = max((len(y.show(tick)) for tick in y_ticks), default=1)  # letters that the words at the side need
    names = f"--names:{max(len(name) for name in x.names)};" if is_slanted(x) else ""  # and those below
    return el(
        "div",
        el("div", y.words, class_="ylabel"),
        inside,
        el("div", x.words, class_="xlabel"),
        reading,
        class_="chart marked" if marks else "chart",
        style=f"{names}--left:{left};--rows:{1 + max((row for _, _, row in marks), default=0)}",
    )


def _in_rows(marks: Sequence[EventMark], x: PlotAxis) -> list[tuple[EventMark, float, int]]:
    """Each mark's place and row: checkpoints in the lowest, the others above, on top of each other where they meet."""
    ends = [-1.0] * _MARK_ROWS
    placed = []
    for mark in sorted(marks, key=lambda mark: mark.at):
        place = min(1.0, max(0.0, x.place(mark.at)))
        row = 0
        if mark.kind != "checkpoint":
            row = next((index for index, end in enumerate(ends) if place - end > _MARK_WIDTH), _MARK_ROWS - 1) + 1
            ends[row - 1] = place
        placed.append((mark, place, row))
    return placed


def _thinned(ticks: Sequence[float], x: PlotAxis) -> list[tuple[float, bool]]:
    """Ticks with room for their words on a wide page, and whether they stay on a narrow one; slanted ones always do."""
    if is_slanted(x):
        return [(tick, True) for tick in ticks]
    shown = max((len(x.show(tick)) for tick in ticks), default=1)
    kept = ticks[:: -(-len(ticks) // max(2, 80 // (shown + 2)))]
    every = -(-len(kept) // max(2, 34 // (shown + 2)))
    return [(tick, index % every == 0) for index, tick in enumerate(kept)]


def is_slanted(x: PlotAxis, width: float = 1.0) -> bool:
    """Whether names are written at an angle: where they do not fit beside each other in this share of a wide page."""
    return sum(len(name) + 2 for name in x.names) > NAMES_FIT * width


@dataclass(frozen=True)
class PlotFrame:
    """Where a plot's values lie in a drawing, and the shapes of its layers there; words are placed by others."""

    x: PlotAxis
    y: PlotAxis
    left: float = 0
    top: float = 0
    width: float = SPAN
    height: float = SPAN
    lead: float = 0.008 * SPAN
    """How far beside its dot a name begins that a line leads to."""
    dot: int = 6
    """The size of dots on a line."""

    def across(self, value: float) -> float:
        return self.left + self.width * min(1.0, max(0.0, self.x.place(value)))

    def up(self, value: float) -> float:
        return self.top + self.height * (1 - min(1.0, max(0.0, self.y.place(value))))

    def at(self, x: float, y: float) -> str:
        return f"{self.across(x):.1f},{self.up(y):.1f}"

    def shapes(self, layer: PlotLayer) -> list[Html]:
        if isinstance(layer, Line):
            return self._line(layer)
        if isinstance(layer, Rule):
            across = f"M{self.left:g},{self.up(layer.at):.1f}h{self.width:g}"
            way = f"M{self.across(layer.at):.1f},{self.top:g}v{self.height:g}" if layer.upright else across
            return [el("path", el("title", layer.name), class_=line_class(layer.colour, dashed=True), d=way)]
        if isinstance(layer, Dots):
            return self._dots(layer)
        if layer.named_y is None:
            return []
        end = self.across(layer.x) + (-self.lead if layer.at_left else self.lead)
        way = f"M{self.at(layer.x, layer.named_y)}L{end:.1f},{self.up(layer.y):.1f}"
        return [el("path", class_="lead", d=way)]

    def _line(self, layer: Line) -> list[Html]:
        shapes = []
        for shaded in runs(layer.band):
            top = "L".join(self.at(x, high) for x, _, high in shaded)
            back = "L".join(self.at(x, low) for x, low, _ in reversed(shaded))
            shapes.append(el("path", class_=f"f{layer.colour} band", d=f"M{top}L{back}Z"))
        path, single = [], []
        for run in runs([None if value is None else (x, value) for x, value in layer.points]):
            points = [self.at(x, value) for x, value in run]
            path.append("M" + "L".join(points))
            if len(points) == 1 or layer.dots:
                single += [f"M{point}h0" for point in points]
        shapes.append(el("path", class_=line_class(layer.colour, layer.dashed), d="".join(path)))
        return shapes + (dot_paths(single, layer.colour, self.dot) if single else [])

    def _dots(self, layer: Dots) -> list[Html]:
        places = [f"M{self.at(x, value)}h0" for x, value in layer.points]
        return dot_paths(places, layer.colour, layer.size, layer.hollow, layer.words)


def line_class(colour: int, dashed: bool) -> str:
    return f"s{colour} line{' dashed' if dashed else ''}"


def dot_paths(
    places: Sequence[str], colour: int, size: int, hollow: bool = False, words: Sequence[str] = ()
) -> list[Html]:
    """Dots as lines of no length: they stay round where a drawing is stretched. `words`: one for each, or none."""
    kind = f"s{colour} dot"
    if words:
        named = zip(places, words, strict=True)
        dots = [el("path", el("title", label), class_=kind, stroke_width=size, d=place) for place, label in named]
    else:
        dots = [el("path", class_=kind, stroke_width=size, d="".join(places))]
    return [*dots, el("path", class_="dot hole", stroke_width=max(1, size - 4), d="".join(places))] if hollow else dots


def runs(values: Iterable[T | None]) -> list[list[T]]:
    """Stretches between the Nones."""
    stretches: list[list[T]] = [[]]
    for value in values:
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append(value)
    return [run for run in stretches if run]


def _legend(layers: Sequence[PlotLayer], marks: Sequence[EventMark]) -> Html | None:
    named = [layer for layer in layers if not isinstance(layer, Note) and layer.name]
    kinds = list(dict.fromkeys(mark.kind for mark in marks))
    items = [el("li", el("i", class_=f"key k{layer.colour} {_key(layer)}"), layer.name) for layer in named]
    items += [el("li", el("span", SIGNS.get(kind, "●"), class_=f"sign {kind}"), kind) for kind in kinds]
    return el("ul", *items, class_="legend") if len(items) > 1 else None


def _key(layer: Line | Dots | Rule) -> str:
    if isinstance(layer, Dots):
        return "ring" if layer.hollow else "spot"
    return "dashed" if isinstance(layer, Rule) or layer.dashed else ""
