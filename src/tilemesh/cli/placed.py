"""A graph placed on a mesh, as text and as a drawing: part of `tilemesh graph explain`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from tilemesh.core.axes import Axes
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.tensor_placement import REPLICATED, TensorPlacement, parse
from tilemesh.core.units import format_bytes
from tilemesh.graph.draw import drawing
from tilemesh.graph.ir import Graph, Node
from tilemesh.plan.place.propagate import PlacedExchange, PlacedGraph, propagate
from tilemesh.plan.place.rules import DRAWN_ALIKE

COLOURS = {"R": 0, "S": 2, "P": 1, "V": 6}
"""Of a tensor's box, by what it is along the first axis that it is not R along."""


def read_axes(text: str) -> Axes:
    """`dp=2,tp=2`: axes in the order in which they cut a dim that several of them do."""
    axes: dict[str, int] = {}
    for word in text.split(","):
        fits = re.fullmatch(r"([a-z]\w{0,15})=([1-9]\d{0,3})", word.strip())
        if not fits:
            raise UsageError(f"--mesh is {text}: expected axes and their sizes, such as tp=2 or dp=2,tp=4")
        if fits[1] in axes:
            raise UsageError(f"--mesh is {text}: {fits[1]} is there twice: say each axis once, such as dp=2,tp=4")
        axes[fits[1]] = int(fits[2])
    return tuple(axes.items())


def read_pins(words: Sequence[str], graph: Graph) -> dict[str, TensorPlacement]:
    """`up.weight=tp:S0`; a name may be a pattern, as in a shell, and the last that fits counts."""
    names = [str(node["name"]) for node in graph.inputs] + [f"output{n}" for n in range(len(graph.outputs))]
    pins: dict[str, TensorPlacement] = {}
    for word in words:
        pattern, sign, placement = word.partition("=")
        if not sign:
            raise UsageError(f"--pin is {word}: expected NAME=AXIS:PLACEMENT, such as {names[0]}=tp:S0")
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise unknown("tensor", pattern, names)
        pins |= dict.fromkeys(fitting, parse(placement))
    return pins


def placed_lines(placed: PlacedGraph) -> list[str]:
    """The graph with placements, then what is exchanged, then what was wanted twice."""
    text, names = placed.graph.text(lambda node: _marked(placed, node))
    lines = [*text.splitlines(), ""]
    for exchange in placed.exchanges:
        reader = f" for {names[exchange.reader]}" if exchange.reader is not None else ""
        if exchange.nbytes:
            size = format_bytes(exchange.nbytes)
            ends = f"{exchange.before} to {exchange.after} over {exchange.axis}"
            lines.append(f"  {names[exchange.node]}{reader}: {exchange.collective}, {ends}, {size} per rank")
    lines.append(f"each rank sends {format_bytes(placed.nbytes)}" if placed.nbytes else "nothing is sent")
    return [*lines, *map(str, placed.conflicts)]


def _marked(placed: PlacedGraph, node: Node) -> str:
    return "" if node.op == "constant" else str(placed.placements.get(node, REPLICATED))  # an input may have no reader


def by_reader(placed: PlacedGraph) -> dict[tuple[Node, Node | None], list[PlacedExchange]]:
    """What is sent from a node to one that reads it."""
    found: dict[tuple[Node, Node | None], list[PlacedExchange]] = {}
    for exchange in placed.exchanges:
        if exchange.nbytes:
            found.setdefault((exchange.node, exchange.reader), []).append(exchange)
    return found


def placed_drawing(placed: PlacedGraph, title: str) -> str:
    """Boxes coloured by placement, exchanges on the lines."""
    sent = by_reader(placed)

    def colour(node: Node) -> int:
        return next((COLOURS[mark.kind] for _, mark in placed.placements.get(node, REPLICATED)), 0)

    def edge(node: Node, reader: Node) -> str:
        return ", ".join(f"{each.collective} {each.axis}" for each in sent.get((node, reader), ()))

    def more(node: Node) -> str:
        own = "".join(f" after {each.collective} {each.axis}" for each in sent.get((node, None), ()))
        return f"{placed.placements.get(node, REPLICATED)}{own}"

    return drawing([(title, placed.graph)], colour=colour, more=more, edge=edge)


def record(placed: PlacedGraph) -> dict[str, Any]:
    """For --json."""
    _, names = placed.graph.text()
    return {
        "mesh": dict(placed.axes),
        "placements": {names[node]: str(placement) for node, placement in placed.placements.items()},
        "exchanges": [
            {
                "node": names[exchange.node], "axis": exchange.axis, "collective": exchange.collective,
                "reader": None if exchange.reader is None else names[exchange.reader],
                "bytes_per_rank": exchange.nbytes,
            }
            for exchange in placed.exchanges
        ],
        "conflicts": [str(conflict) for conflict in placed.conflicts],
        "bytes_per_rank": placed.nbytes,
    }  # fmt: skip


def place(graph: Graph, mesh: str, pins: Sequence[str]) -> PlacedGraph:
    """As the words of a command say."""
    return propagate(graph, read_pins(pins, graph), read_axes(mesh), DRAWN_ALIKE)
