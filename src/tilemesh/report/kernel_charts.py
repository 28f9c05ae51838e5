"""Charts of a kernel's bench: the rate reached shape by shape beside the peers', and the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilemesh.core.units import format_bytes, format_plain, format_rate
from tilemesh.measure.row import COMPUTES_LESS, Row
from tilemesh.report.draw import Dots, Drawing, Line, Note, PageTable, Plot, PlotAxis, PlotLayer
from tilemesh.report.rows import percent

COMPUTE_BOUND = 50.0  # FLOPs per byte: from here on an operator is judged by FLOP/s, below it by bandwidth
MOST_JOINED = 6  # shapes whose values are joined by lines
_NOT_A_SETTING = ("shape", "time", "config", "auto", "by", "limit")
_PEER_COLOURS = (1, 2, 5, 7, 3, 4)


@dataclass(frozen=True)
class RowWork:
    """What a row's problem needs whoever computes it."""

    flops: float
    nbytes: float

    @property
    def intensity(self) -> float:
        return self.flops / self.nbytes


Worked = tuple[Row, RowWork]
"""A row that was measured, and what its problem needs."""


def kernel_times(rows: Sequence[Row], work: Sequence[RowWork | None]) -> list[Worked]:
    """Rows of kernel time whose work is known; `work` has one for each row."""
    pairs = zip(rows, work, strict=True)
    return [(row, need) for row, need in pairs if need is not None and row.measured is not None and is_kernel_time(row)]


def is_kernel_time(row: Row) -> bool:
    return row.case.get("time", "kernel") == "kernel"


def drawings(pairs: Sequence[Worked]) -> list[Drawing]:
    """Every operator's rates, and the roofline of those that compute more than they move."""
    bound = compute_bound(pairs)
    return [*rates(pairs), *([roofline(bound)] if bound else [])]


def compute_bound(pairs: Sequence[Worked]) -> list[Worked]:
    """Those of operators that compute more than they move: the others' dots would all lie on the roof's slope."""
    return [pair for group in _groups(pairs).values() if _is_compute_bound(group) for pair in group]


def rates(pairs: Sequence[Worked]) -> list[Drawing]:
    """For each operator, dtype and direction: bandwidth or FLOP/s by shape, ours, the peers' and the limit's."""
    return [_rates(title, group) for title, group in _groups(pairs).items()]


def _groups(pairs: Sequence[Worked]) -> dict[str, list[Worked]]:
    """By operator and settings, those of one operator together; of a shape that was measured twice, the later row."""
    directions, machines = {row.name for row, _ in pairs if "passes" in row.case}, {row.machine for row, _ in pairs}
    groups: dict[tuple[str, str], dict[str, Worked]] = {}
    for row, need in pairs:
        settings = {name: str(value) for name, value in row.case.items() if name not in _NOT_A_SETTING}
        passes = {"both": "forward and backward"}.get(settings.pop("passes", ""), "forward")
        where = [f"on {row.machine}"] if len(machines) > 1 else []
        words = ", ".join([*settings.values(), *([passes] if row.name in directions else []), *where])
        groups.setdefault((row.name, words), {})[str(row.case.get("shape", ""))] = (row, need)
    order = list(dict.fromkeys(name for name, _ in groups))
    titles = sorted(groups, key=lambda title: (order.index(title[0]), title[1]))
    return {", ".join(part for part in title if part): list(groups[title].values()) for title in titles}


def _is_compute_bound(group: Sequence[Worked]) -> bool:
    return statistics.median(need.intensity for _, need in group) >= COMPUTE_BOUND


def _rates(title: str, group: Sequence[Worked]) -> Drawing:
    by_flops = _is_compute_bound(group)
    unit = "FLOP/s" if by_flops else "B/s"

    def amount(need: RowWork) -> float:
        return need.flops if by_flops else need.nbytes

    ordered = sorted(group, key=lambda pair: amount(pair[1]))
    peers = list(dict.fromkeys(name for row, _ in ordered for name in row.peers))
    colours = {name: _PEER_COLOURS[place % len(_PEER_COLOURS)] for place, name in enumerate(peers)}
    reached: dict[str, list[tuple[float, float | None]]] = {name: [] for name in ("limit", *peers, "ours")}
    rows = []
    for place, (row, need) in enumerate(ordered):
        assert row.measured is not None
        seconds = {"limit": row.limit, "ours": row.measured.median}
        seconds |= {name: sample.median for name, sample in row.peers.items()}
        here = {name: amount(need) / taken_s for name in reached if (taken_s := seconds.get(name))}
        for name, points in reached.items():
            points.append((float(place), here.get(name)))
        size = format_rate(need.flops, "FLOP") if by_flops else format_bytes(need.nbytes)
        cells = [format_rate(here[name], unit) if name in here else "–" for name in ("ours", *peers, "limit")]
        rows.append([str(row.case.get("shape", "")), size, *cells, percent(row.of_limit) if row.of_limit else "–"])
    x = PlotAxis.of_names([str(row.case.get("shape", "")) for row, _ in ordered], "shape, by size")
    highest = max(value for points in reached.values() for _, value in points if value is not None)
    y = PlotAxis(0.0, highest * 1.05, f"{unit} reached", lambda value: format_rate(value, unit))
    many = len(ordered) > MOST_JOINED
    layers = [_layer(name, points, colours, many) for name, points in reached.items() if any(v for _, v in points)]
    head = ["shape", "size", "ours", *peers, "limit", "of limit"]
    table = PageTable(head, rows, [x.place(place) for place in range(len(rows))])
    origins = {str(row.case.get("limit", "calibrated")) for row, _ in ordered if row.limit}
    known = {"calibrated": "as calibrated on this machine", "datasheet": "by the GPU's datasheet"}
    limit = " or ".join(known.get(origin, origin) for origin in sorted(origins))
    words = f"Kernel time. Limit: {limit}." if origins else "Kernel time."
    return Drawing(title, words, Plot(x, y, layers, height=240), table)


def _layer(
    name: str, points: Sequence[tuple[float, float | None]], colours: Mapping[str, int], many: bool
) -> PlotLayer:
    """A line with dots; where shapes are many, lines between those of peers would only tangle."""
    if name == "limit":
        return Line(name, points, 6, dashed=True)
    if many:
        known = [(at, value) for at, value in points if value is not None]
        return Dots(name, known, colours.get(name, 0), 10 if name == "ours" else 7)
    return Line(name, points, colours.get(name, 0), dots=True)


# ---- the roofline ----------------------------------------------------------------------------------------------


def roofline(pairs: Sequence[Worked]) -> Drawing:
    """FLOP/s against FLOPs per byte, ours and the best peer, under the limit."""
    ours, theirs, roof, labels, places = [], [], [], [], []
    rows: list[list[str]] = []
    has_many = len({row.name for row, _ in pairs}) > 1  # operators: a shape alone would not tell which
    for row, need in sorted(pairs, key=lambda pair: pair[1].intensity):
        assert row.measured is not None
        name = f"{row.name} {case_name(row)}" if has_many else case_name(row)
        x, reached = need.intensity, need.flops / row.measured.median
        ours.append((x, reached))
        labels.append(name)
        best = best_peer(row) if peers_of(row) else None
        peer = need.flops / row.peers[best].median if best else None
        if peer:
            theirs.append((x, peer))
        if row.limit:
            roof.append((x, need.flops / row.limit))
        rows.append([f"{len(rows) + 1}: {name}", f"{x:.3g}", format_rate(reached, "FLOP/s"),
                     format_rate(peer, "FLOP/s") if peer else "–", best or "–",
                     percent(row.of_limit) if row.of_limit is not None else "–"])  # fmt: skip
        places.append(x)
    ys = [y for _, y in [*ours, *theirs, *roof]]
    x_axis = PlotAxis(min(places) / 1.5, max(places) * 1.6, "FLOPs per byte", "{:g}".format, log=True)
    y_axis = PlotAxis(min(ys) / 1.4, max(ys) * 1.4, "FLOP/s", lambda value: format_rate(value, "FLOP/s"), log=True)
    layers: list[PlotLayer] = [
        Line("limit", _hull(roof), 6),
        Dots("best peer", theirs, 1, 10, hollow=True),
        Dots("ours", ours, 0, 10, words=labels),
        *(notes := names_beside(ours, theirs, [] if has_many else labels, x_axis, y_axis, numbers=True)),
    ]
    head = ["case", "FLOPs per byte", "ours", "best peer", "which", "of limit"]
    table = PageTable(head, rows, [x_axis.place(x) for x in places])
    words = "Kernel time. The height between dot and ring is what fusing and tuning gained."
    if any(note.text.isdigit() for note in notes):
        words += " A number is that of a case in the table below (Numbers)."
    return Drawing("Roofline", words, Plot(x_axis, y_axis, layers, height=420), table)


def peers_of(row: Row) -> dict[str, float]:
    return {name: factor for name, factor in row.speedup.items() if name not in COMPUTES_LESS}


def best_peer(row: Row) -> str:
    peers = peers_of(row)
    return min(peers, key=lambda name: peers[name])


def case_name(row: Row) -> str:
    """A row's case in a few words: its shape and dtype, or whatever else tells it from others."""
    if "shape" in row.case:
        return f"{row.case['shape']} {row.case.get('dtype', '')}".strip()
    return " ".join([row.name, *(_part(key, value) for key, value in row.case.items() if key != "by")])


def bar_names(rows: Sequence[Row]) -> list[str]:
    """Cases in so few words that each stands on one line beside its bar: as they are where all are short, else what
    tells rows of one name apart, with a number that finds the rest in the table."""
    full_names = [case_name(row) for row in rows]
    if max((len(name) for name in full_names), default=0) <= _BAR_LETTERS:
        return full_names
    names = []
    for number, row in enumerate(rows, 1):
        alike = [other.case for other in rows if other.name == row.name]
        telling = (key for key in row.case if key != "by" and len({str(case.get(key, "")) for case in alike}) > 1)
        text = " ".join([f"{number}: {row.name}", *(_part(key, row.case[key]) for key in telling)])
        names.append(text if len(text) <= _BAR_LETTERS else f"{text[: _BAR_LETTERS - 1].rstrip()}…")
    return names


_BAR_LETTERS = 40


def _part(key: str, value: object) -> str:
    if isinstance(value, bool):
        return key if value else f"not {key}"
    if isinstance(value, float):
        return format_plain(value)
    return f"{value} {key}" if isinstance(value, int) else str(value)


def _hull(roof: Sequence[tuple[float, float]]) -> list[tuple[float, float | None]]:
    """The limit as one line: of shapes with the same intensity the highest, never falling."""
    hull: list[tuple[float, float | None]] = []
    highest = 0.0
    for x, y in sorted(roof):
        highest = max(highest, y)
        hull.append((x, highest))
    return hull


_LETTER, _LINE, _DOT = 0.0135, 0.06, 0.012  # of a plot: a letter's width where names are shown at all, a line, a dot
_NEAR, _FAR = (0, 1, -1), (2, -2, 3, -3, 4, -4, 5, -5, 6, -6)  # lines above or below a dot
Box = tuple[float, float, float, float]  # from left and bottom to right and top, as fractions of a plot


def names_beside(
    points: Sequence[tuple[float, float]],
    others: Sequence[tuple[float, float]],
    labels: Sequence[str],
    x: PlotAxis,
    y: PlotAxis,
    numbers: bool = False,
) -> list[Note]:
    """A name for every dot, as near to it as there is room that no dot and no other name takes; a line leads to one
    that is further away. `numbers`: where there is no room near the dot for its name, or there are no names, its
    number in the order of the dots, which takes less."""
    dots = [(x.place(at), y.place(value)) for at, value in [*points, *others]]
    taken: list[Box] = [(at - _DOT, up - _DOT * 1.5, at + _DOT, up + _DOT * 1.5) for at, up in dots]
    notes = []
    for place, (at, value) in enumerate(points):
        words = [*([labels[place].split(" ")[0]] if labels else []), *([str(place + 1)] if numbers else [])]
        choices = ((word, lines) for lines in (_NEAR, _FAR) for word in (words if lines == _NEAR else words[::-1]))
        for word, lines in choices:
            free = _free_place(word, x.place(at), y.place(value), taken, lines)
            if free is not None:
                box, at_left = free
                notes.append(Note(at, y.value((box[1] + box[3]) / 2), word, at_left, value if lines == _FAR else None))
                taken.append(box)
                break
    return notes


def _free_place(
    name: str, here: float, up: float, taken: Sequence[Box], lines: Sequence[int]
) -> tuple[Box, bool] | None:
    """The nearest place for a name beside a dot that covers nothing, and whether it is left of the dot."""
    width = _LETTER * len(name)
    for shift, at_left in ((line * _LINE, side) for line in lines for side in (False, True)):
        begin = here - _DOT - width if at_left else here + _DOT
        box = (begin, up + shift - _LINE / 2, begin + width, up + shift + _LINE / 2)
        if min(box) > 0 and max(box) < 1 and not any(_meet(box, other) for other in taken):
            return box, at_left
    return None


def _meet(first: Box, other: Box) -> bool:
    return first[0] < other[2] and other[0] < first[2] and first[1] < other[3] and other[1] < first[3]
