"""A zoomable picture of lanes in time, for traces and for pipelines: the data, packed small, and its frame.

The script draws it on a canvas, because there may be tens of thousands of spans; it works with keys alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilemesh.report.draw import PageTable, figure
from tilemesh.report.html import Html, data, el

KEYS = "arrows move, + and - zoom, n and p go from span to span, up and down change the lane, 0 shows all"
TICKS_PER_S = 1e7  # the script's unit: a tenth of a microsecond

Kinds = Mapping[str, tuple[str, int]]
"""By kind: what it is called, and its colour."""


@dataclass(frozen=True)
class LanePiece:
    began_s: float
    ended_s: float
    name: str
    kind: str
    depth: int = 0


@dataclass(frozen=True)
class Lane:
    name: str
    pieces: Sequence[LanePiece]


@dataclass(frozen=True)
class Stretch:
    """A part of the whole that can be chosen and is marked: a step."""

    name: str
    began_s: float
    ended_s: float


def draw(
    title: str, words: str, lanes: Sequence[Lane], stretches: Sequence[Stretch], kinds: Kinds, table: PageTable
) -> Html:
    """The figure; times count from the first stretch's beginning."""
    seen = {piece.kind for lane in lanes for piece in lane.pieces}
    legend = [el("li", el("i", class_=f"key k{kinds[kind][1]} box"), kinds[kind][0]) for kind in kinds if kind in seen]
    buttons = [
        el("button", sign, type="button", data_key=key, aria_label=label)
        for key, sign, label in (
            ("ArrowLeft", "◀", "earlier"), ("ArrowRight", "▶", "later"), ("+", "+", "zoom in"), ("-", "−", "zoom out"),
            ("p", "previous", "previous span of this lane"), ("n", "next", "next span of this lane"),
        )
    ]  # fmt: skip
    options = [el("option", "all of it"), *(el("option", stretch.name) for stretch in stretches)]
    box = el(
        "div",
        el("ul", *legend, class_="legend"),
        el("div", *buttons, el("label", "show ", el("select", *options)), class_="controls"),
        el("canvas", tabindex=0, role="application", aria_label=f"{title}: {KEYS}"),
        el("output", class_="reading", aria_live="polite"),
        el("noscript", "This picture needs the page's script; its numbers are beneath."),
        data(pack(lanes, stretches, kinds)),
        class_="timeline",
    )
    return figure(title, f"{words} With the keyboard: {KEYS}.", box, table, wide=True)


def pack(lanes: Sequence[Lane], stretches: Sequence[Stretch], kinds: Kinds) -> dict[str, Any]:
    """The lanes for the script: names once, starts as differences, four whole numbers a piece."""
    names: dict[tuple[str, str], int] = {}
    zero = stretches[0].began_s
    packed = []
    for lane in lanes:
        flat: list[int] = []
        before = 0
        for piece in lane.pieces:
            began = round((piece.began_s - zero) * TICKS_PER_S)
            name = names.setdefault((piece.name, piece.kind), len(names))
            flat += [began - before, max(1, round((piece.ended_s - piece.began_s) * TICKS_PER_S)), name, piece.depth]
            before = began
        packed.append({"name": lane.name, "spans": flat})
    return {
        "lanes": packed,
        "names": [list(pair) for pair in names],
        "kinds": {kind: list(words) for kind, words in kinds.items()},
        "steps": [
            [stretch.name, round(stretch.began_s - zero, 7), round(stretch.ended_s - zero, 7)] for stretch in stretches
        ],
    }
