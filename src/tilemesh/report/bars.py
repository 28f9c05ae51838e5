"""Bars, maps and meshes: drawings of boxes, which HTML places by itself at any width."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilemesh.core.axes import Axes, rank_at, ranks_of, size_of
from tilemesh.report.draw import PageTable, figure
from tilemesh.report.html import Html, el, join

_LETTER = 0.022  # of a bar: a letter's width on a phone


@dataclass(frozen=True)
class BarPart:
    """A piece of a bar."""

    size: float
    colour: int
    words: str
    label: str = ""


@dataclass(frozen=True)
class Bar:
    name: str
    parts: Sequence[BarPart]
    value: str = ""
    words: str = ""
    """What a short name leaves out, for whoever points at it."""


def bars(
    items: Sequence[Bar], *, most: float | None = None, kinds: Sequence[tuple[str, int]] = (), one_line: bool = False
) -> Html:
    """Bars beside their names, pieces end to end; `most` is the length of the longest, `kinds` the legend;
    `one_line`: the names are short enough (some 40 letters) to stand on one line each."""
    longest = most or max((sum(part.size for part in item.parts) for item in items), default=1.0) or 1.0
    rows = []
    for item in items:
        pieces = [
            el(
                "span",
                part.label if part.size / longest > max(0.09, _LETTER * len(part.label)) else None,
                class_=f"b{part.colour}",
                title=part.words,
                style=f"width:{part.size / longest:.3%}",
            )
            for part in item.parts
            if part.size > 0
        ]
        rows.append(
            el(
                "div",
                el("span", item.name, class_="who", title=item.words or None),
                el("span", *pieces, class_="bar"),
                el("span", item.value, class_="what"),
                class_="row",
            )
        )
    legend = el(
        "ul", *(el("li", el("i", class_=f"key k{colour} box"), name) for name, colour in kinds), class_="legend"
    )
    many = " many" if len(items) > 16 else ""
    # On a phone these words would leave no room for the bar: it then gets a line of its own.
    words = max((len(item.name) + len(item.value) for item in items), default=0)
    many += " long" if words > 22 else ""
    many += " oneline" if one_line else ""
    return join(
        legend if kinds else None,
        el(
            "div",
            *rows,
            class_=f"bars{many}",
            role="img",
            aria_label="bars: " + ", ".join(item.name for item in items[:6]),
        ),
    )


def bars_by_kind(
    title: str,
    words: str,
    sizes: Mapping[str, Mapping[str, float]],
    kinds: Mapping[str, tuple[str, int]],
    show: Callable[[float], str],
    *,
    head: str,
    total: str = "",
    most: float | None = None,
    short: Mapping[str, str] | None = None,
    label: Callable[[float, float], str] = lambda size, total: "",
) -> Html:
    """A bar for each name, in pieces by kind, and the same sizes as a table below it. `kinds`: what each is called, and
    its colour. `total`: the heading of a column of sums; `short`: names of bars where the table's are too long;
    `label`: what stands on a piece, of its size and of the sum."""
    shown = {kind: kinds[kind] for kind in kinds if any(each.get(kind, 0.0) > 0 for each in sizes.values())}
    items, rows = [], []
    for name, each in sizes.items():
        summed = sum(each.values())
        parts = [
            BarPart(each[kind], colour, f"{called}: {show(each[kind])}", label(each[kind], summed))
            for kind, (called, colour) in shown.items()
            if each.get(kind)
        ]
        items.append(Bar(short[name] if short else name, parts, show(summed), name if short else ""))
        rows.append([name, *(show(each.get(kind, 0.0)) for kind in shown), *([show(summed)] if total else [])])
    table = PageTable([head, *(called for called, _ in shown.values()), *([total] if total else [])], rows)
    drawn = bars(items, most=most, kinds=list(shown.values()), one_line=short is not None)
    return figure(title, words, drawn, table, wide=short is None)


_DEEPEST = 0.6  # of the colour: beyond that neither light nor dark words could be read on it


def heat(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[float, str, str] | None]]]) -> Html:
    """A map of cells, each (strength from 0 to 1, what it shows, words for whoever points at it)."""
    head = el("tr", el("td"), *(el("th", column, scope="col") for column in columns))
    body = []
    for name, cells in rows:
        shown = [
            el("td", class_="none")
            if cell is None
            else el(
                "td",
                cell[1],
                title=cell[2],
                class_="best" if cell[0] > 0.999 else None,
                style=f"--heat:{_DEEPEST * min(1.0, max(0.0, cell[0])):.0%}",
            )
            for cell in cells
        ]
        body.append(el("tr", el("th", name, scope="row"), *shown))
    return el(
        "div",
        el("table", el("thead", head), el("tbody", *body), class_="heat"),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label="heat map",
    )


MOST_DRAWN = 256


def mesh_picture(axes: Axes, nbytes: Mapping[str, float]) -> Html:
    """Ranks as boxes, tp across and dp down, a panel for each place on the other axes; thick where much crosses."""
    ranks, tp, dp = ranks_of(axes), size_of(axes, "tp"), size_of(axes, "dp")
    if ranks > MOST_DRAWN:
        return el("p", f"{ranks:,} ranks are more than a picture can show: the table beneath says what crosses.")
    most = max(1.0, *(nbytes.get(axis, 0.0) for axis in ("dp", "tp")))
    thick = {axis: 2 + 10 * nbytes.get(axis, 0.0) / most for axis in ("dp", "tp")}
    small = " small" if max(dp, tp) > 8 else ""
    others = [(name, size) for name, size in axes if name not in ("dp", "tp") and size > 1]
    panels = []
    for there in itertools.product(*(range(size) for _, size in others)):
        place = {name: index for (name, _), index in zip(others, there, strict=True)}
        where = "".join(f", {name} {index}" for name, index in place.items())
        cells = []
        for row, column in itertools.product(range(dp), range(tp)):
            rank = rank_at(dict.fromkeys(dict(axes), 0) | place | {"dp": row, "tp": column}, axes)
            joined = " ".join(name for name, on in (("right", column + 1 < tp), ("down", row + 1 < dp)) if on)
            cells.append(el("span", rank, class_=joined or None, title=f"rank {rank}: dp {row}, tp {column}{where}"))
        style = f"grid-template-columns:repeat({tp},max-content);--tp:{thick['tp']:.0f}px;--dp:{thick['dp']:.0f}px"
        words = f"mesh of {dp} by {tp} ranks{where}"
        panels.append(el("div", *cells, class_=f"mesh{small}", style=style, role="img", aria_label=words))
    return join(*panels)
