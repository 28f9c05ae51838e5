"""The page of a bench of collectives: time against size, who overtakes whom, where the time went, and the schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilemesh.comm.schedules.book import algorithms, build
from tilemesh.comm.schedules.collectives import COLLECTIVES
from tilemesh.comm.schedules.schedule import Schedule
from tilemesh.comm.schedules.simulate import crossovers
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.measure.row import Row
from tilemesh.measure.sample import equal
from tilemesh.report.bars import Bar, BarPart, bars
from tilemesh.report.draw import Drawing, Line, PageTable, Plot, PlotAxis, PlotLayer, Rule, figure
from tilemesh.report.html import Child, Html, article, el, headed, pair
from tilemesh.report.rounds import MOST_RANKS, draw_rounds, schedule_title
from tilemesh.report.rows import origin, percent, row_table
from tilemesh.runs.values import number

PARTS = {"set-up": 4, "copy": 5, "wire": 1, "reduce": 0, "wait": 6}
_PARTS_WORDS = "Copy and reduce: in memory. Wire: messages, or the library's collective. Wait: for other ranks."
ORDER = ("auto", "native", "limit")
MOST_LINES = 8  # colours that can be told apart

SizePoints = list[tuple[int, float]]


@dataclass(frozen=True)
class Panel:
    """One collective on so many ranks: seconds by size for every algorithm, and the rows of auto."""

    collective: str
    ranks: int
    buffers: str
    times: Mapping[str, SizePoints]
    auto: Sequence[Row]
    where: str = ""
    """Over what and on which machine, where the page has several."""

    @property
    def title(self) -> str:
        memory = {"": "", "empty": ", arrays from comm.empty"}.get(self.buffers, f", {self.buffers} arrays")
        return f"{self.collective}, {self.ranks} ranks{self.where}{memory}"

    def crossovers(self) -> list[tuple[int, int, str, str]]:
        """Where the quickest of ours changes: (last size of the one, first of the other, the one, the other)."""
        return crossovers({name: points for name, points in self.times.items() if name not in ORDER})


def render(rows: Sequence[Row], schedules: Sequence[Schedule] = ()) -> str:
    """Rows of `bench collective`; schedules are drawn besides those that auto picked."""
    panels = panels_of(rows)
    machines = dict.fromkeys(row.machine for row in rows)
    title = f"Collectives on {' and '.join(machines)}" if rows else ", ".join(map(schedule_title, schedules))
    picked = [*schedules, *picked_schedules(panels, {_key(schedule) for schedule in schedules})]
    every = el("details", el("summary", "Rows"), row_table(rows, ("ranks", "bytes", "algorithm")))
    return article(
        title,
        "tilemesh bench",
        verdict(panels) if panels else None,
        _names(panels) if panels else None,
        *(
            headed(panel.title, _arrays(panel.buffers), pair(over_size(panel).show(), where_it_went(panel)))
            for panel in panels
        ),
        headed("Schedules, round by round", pair(*map(draw_rounds, picked))),
        headed("Every row", every) if rows else None,
        origin(rows),
    )


# ---- values ----------------------------------------------------------------------------------------------------


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """Rows by collective, ranks, whose memory, transport and machine; what is not a collective's time is passed over.
    Of a cell that was measured twice the later row counts."""
    panels: dict[tuple[str, int, str, str], tuple[dict[str, dict[int, float]], dict[int, Row]]] = {}
    places = {(str(row.case.get("transport", "")), row.machine) for row in rows}
    transports, machines = ({each[which] for each in places} for which in (0, 1))
    for row in rows:
        size, ranks, algorithm = row.case.get("bytes"), row.case.get("ranks"), row.case.get("algorithm")
        if row.unit != "s" or row.measured is None or not isinstance(size, int) or not isinstance(ranks, int):
            continue
        where = f" over {row.case.get('transport')}" * (len(transports) > 1) + f" on {row.machine}" * (
            len(machines) > 1
        )
        times, auto = panels.setdefault((row.name, ranks, str(row.case.get("buffers", "")), where), ({}, {}))
        times.setdefault(str(algorithm), {})[size] = row.measured.median
        if algorithm == "auto":
            auto[size] = row
            if row.limit is not None:
                times.setdefault("limit", {})[size] = row.limit
        if algorithm in ("auto", None):
            for name, peer in row.peers.items():
                times.setdefault(name, {})[size] = peer.median
    return [
        Panel(
            name,
            ranks,
            buffers,
            {key: sorted(points.items()) for key, points in times.items()},
            [*auto.values()],
            where,
        )
        for (name, ranks, buffers, where), (times, auto) in panels.items()
    ]


def verdict(panels: Sequence[Panel]) -> str:
    """How often auto beats native, the median speedup, and where native is furthest ahead."""
    cells = [
        (row, panel) for panel in panels for row in panel.auto if "native" in row.peers and row.measured is not None
    ]
    if not cells:
        count = sum(len(points) for panel in panels for points in panel.times.values())
        return f"{count} times measured; no peer was run."
    apart = [cell for cell in cells if cell[0].measured and not equal(cell[0].measured, cell[0].peers["native"])]
    faster = sum(row.speedup["native"] > 1 for row, _ in apart)
    middle = sorted(row.speedup["native"] for row, _ in cells)[len(cells) // 2]
    same = len(cells) - len(apart)
    words = (
        f"auto is faster than native in {faster} of {len(cells)} cases, equal in {same}; median speedup {middle:.2f}×"
    )
    slower = [cell for cell in apart if cell[0].speedup["native"] < 1]
    if slower:
        row, panel = min(slower, key=lambda cell: cell[0].speedup["native"])
        where = f"{panel.title} at {format_bytes(int(str(row.case['bytes'])))}"
        words += f"; native is furthest ahead in {where}, taking {percent(1 - row.speedup['native'])} less time"
    return words + "."


# ---- drawings --------------------------------------------------------------------------------------------------


def drawings(rows: Sequence[Row]) -> list[Drawing]:
    """Time against size, for each collective, number of ranks and kind of memory."""
    return [replace(over_size(panel), title=panel.title) for panel in panels_of(rows)]


def _names(panels: Sequence[Panel]) -> Html:
    """What the lines of the charts are, for a reader who has not run the bench."""
    names = {name for panel in panels for name in panel.times}
    meanings = {
        "auto": "what tilemesh picks for each size",
        "native": "the collective of the library underneath, called directly",
        "native_by_us": "the same called through tilemesh",
        "limit": "reading every input and writing every result once, at the calibrated memory speed",
    }
    parts = [f"{name}: {words}" for name, words in meanings.items() if name in names]
    if names - set(meanings):
        parts.append("the other lines: tilemesh's algorithms, each one forced")
    many = any(row.case.get("oversubscribed") for panel in panels for row in panel.auto)
    crowd = " There were more ranks than cores, so ranks also waited for a core." if many else ""
    return el("p", f"{'; '.join(parts)}.{crowd}", class_="quiet")


def _arrays(buffers: str) -> Html | None:
    """What the arrays of a panel are, where their name alone does not say it."""
    if buffers != "empty":
        return None
    return el(
        "p",
        el("code", "comm.empty(shape, dtype)"),
        " makes an array that the other ranks of this machine can read where it is, so that large ones are not copied "
        "to a staging buffer first. Ordinary arrays are.",
        class_="quiet",
    )


def over_size(panel: Panel) -> Drawing:
    """Seconds against bytes, both logarithmic; upright lines where the quickest of ours changes."""
    names = [*(name for name in ORDER if name in panel.times), *(name for name in panel.times if name not in ORDER)]
    values = [value for points in panel.times.values() for _, value in points]
    sizes = sorted({size for points in panel.times.values() for size, _ in points})
    x = PlotAxis(sizes[0] / 1.3, sizes[-1] * 1.3, "bytes", format_bytes, log=True, binary=True)
    y = PlotAxis(min(values) / 1.3, max(values) * 1.3, "seconds", format_seconds, log=True)
    colours = {"auto": 0, "native": 1, "limit": 6}
    free = [colour for colour in range(8) if colour not in colours.values()]
    drawn = names[: len(colours) + MOST_LINES]
    layers: list[PlotLayer] = []
    for name in drawn:
        others = [other for other in drawn if other not in colours]
        place = others.index(name) if name in others else 0
        colour = colours.get(name, free[place % len(free)])
        dashed = name == "limit" or (name in others and place >= len(free))
        layers.append(Line(name, list(panel.times[name]), colour, dashed=dashed, dots=name in ("auto", "native")))
    crossed = panel.crossovers()
    layers += [Rule("", math.sqrt(low * high), 6, upright=True) for low, high, _, _ in crossed]
    words = "; ".join(
        f"{b} overtakes {a} between {format_bytes(low)} and {format_bytes(high)}" for low, high, a, b in crossed
    )
    rows: list[list[Child]] = [
        [
            format_bytes(size),
            *(format_seconds(seconds) if (seconds := dict(panel.times[name]).get(size)) else "–" for name in names),
        ]
        for size in sizes
    ]
    table = PageTable(["bytes", *names], rows, [x.place(size) for size in sizes])
    sentence = f"Upright lines, among tilemesh's algorithms: {words}." if words else ""
    return Drawing("Time against size", sentence, Plot(x, y, layers, height=320), table)


def where_it_went(panel: Panel) -> Html:
    """Parts of auto's time, a bar a size."""
    items, rows = [], []
    for row in sorted(panel.auto, key=lambda row: int(str(row.case["bytes"]))):
        read = {part: number(row.case.get(f"in_{part}")) for part in PARTS}
        shares = {part: share if math.isfinite(share) else 0.0 for part, share in read.items()}
        if not any(shares.values()) or row.measured is None:
            continue
        size = format_bytes(int(str(row.case["bytes"])))
        parts = [
            BarPart(share, PARTS[part], f"{part}: {percent(share)}", percent(share)) for part, share in shares.items()
        ]
        items.append(Bar(size, parts, str(row.case.get("picked", ""))))
        rows.append([size, *(percent(share, 1) for share in shares.values()), format_seconds(row.measured.median)])
    if not items:
        return el("p", "Not shown: where the time went (the rows do not say).", class_="missing")
    drawn = bars(items, most=1.0, kinds=list(PARTS.items()))
    return figure("Where auto's time went", f"{_PARTS_WORDS} At the right: what auto picked.", drawn,
                  PageTable(["bytes", *PARTS, "in all"], rows))  # fmt: skip


# ---- the rest --------------------------------------------------------------------------------------------------


def _key(schedule: Schedule) -> tuple[str, str, int]:
    return schedule.collective, schedule.algorithm, schedule.ranks


def picked_schedules(panels: Iterable[Panel], known: set[tuple[str, str, int]]) -> list[Schedule]:
    """What auto picked, each once, where it is a schedule of the book."""
    schedules = []
    for panel in panels:
        for row in panel.auto:
            key = (panel.collective, str(row.case.get("picked")), panel.ranks)
            in_book = panel.collective in COLLECTIVES and key[1] in algorithms(panel.collective)
            if key not in known and in_book and 1 < panel.ranks <= MOST_RANKS:
                known.add(key)
                schedules.append(build(*key))
    return schedules
