"""Graphs as SVG drawings: one box per operator, below what it reads; several graphs beside each other. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilemesh.core.scene import Scene, text_width
from tilemesh.graph.ir import Graph, Node, users
from tilemesh.graph.rewrite import number_of

BOX, LEVEL, GAP, MARGIN = 36, 66, 14, 16
LINE = 2  # the width of a line's place among boxes
MOST = 400  # boxes of one drawing: beyond, nobody can read it
LEAST = 700  # the width of a drawing with a title, which stands in a text
COLOURS = {"input": 3, "region": 2, "dot": 1, "conv": 1, "opaque": 6}
"""By operator; others are blue."""


@dataclass(frozen=True)
class _Box:
    node: Node
    label: str
    below: str
    x: float
    y: float
    width: float


def by_operator(node: Node) -> int:
    return COLOURS.get(node.op, 0)


def drawing(
    graphs: Sequence[tuple[str, Graph]],
    title: str = "",
    colour: Callable[[Node], int] = by_operator,
    more: Callable[[Node], str] = lambda node: "",
    edge: Callable[[Node, Node], str] = lambda node, reader: "",
    is_centred: bool = False,
) -> str:
    """The graphs beside each other, each below its words. `colour`: of each operator's box; `more`: what stands in it
    besides; `edge`: what stands on the line to a reader. `is_centred`: boxes stand on both sides of what they read."""
    top = 44 if title else 22
    scene = Scene(0, 0, title)
    left, height = float(MARGIN), 60.0
    for words, graph in graphs:
        shown = [node for node in graph.nodes() if _shown(node)]
        if len(shown) > MOST:
            words = f"{words}: {len(shown)} operators, too many to draw"
            shown = []
        layout = _placed(graph, shown, left, top, more, is_centred)
        scene.text(left, top, words, bold=True)
        _draw(scene, graph, layout, colour, edge)
        ends = [box.x + box.width for box in layout.boxes] + list(layout.lines.values())
        left = max([*ends, left + text_width(words, 13)]) + 3 * MARGIN
        height = max([height, *(box.y + BOX + 2 * MARGIN for box in layout.boxes)])
    scene.width, scene.height = round(max(left, text_width(title, 17) + 24, LEAST if title else 0)), round(height)
    return scene.svg()


def _shown(node: Node) -> bool:
    """Numbers stand in the boxes that use them; one of several results is an arrow of its own."""
    return node.op not in ("constant", "item") and number_of(node) is None


def _source(node: Node) -> Node:
    while node.op == "item":
        node = node.inputs[0]
    return node


def _reads(node: Node) -> list[Node]:
    return [_source(value) for value in node.inputs if _shown(_source(value))]


def _label(node: Node) -> tuple[str, str]:
    shape = f"{node.dtype} {list(node.shape)}".replace("'", "")
    if node.op == "input":
        return str(node["name"]), shape
    if node.op == "opaque":
        return str(node["target"]).removeprefix("aten."), "" if node.dtype == "tuple" else shape
    if node.op == "region":
        inner = [
            each.op for each in node["body"].nodes() if each.op not in ("input", "constant", "broadcast", "reshape")
        ]
        words = ", ".join(inner[:6]) + (", …" if len(inner) > 6 else "")
        return f"one kernel of {len(inner)} operators", words
    numbers = [number_of(value) for value in node.inputs]
    known = [f"{number:g}" for number in numbers if number is not None]
    known += [str(node["branch"])] if node.op == "switch" else []
    return f"{node.op} {' '.join(known)}".strip(), shape


@dataclass(frozen=True)
class _Layout:
    """Where everything stands: boxes, and for every level between a box and its reader the place of its line."""

    boxes: list[_Box]
    lines: dict[tuple[Node, int], float]
    level: dict[Node, int]


def _levels(graph: Graph, shown: Sequence[Node]) -> dict[Node, int]:
    """Levels by the longest way from an input; what reads nothing stands right above its first reader."""
    level: dict[Node, int] = {}
    for node in shown:
        level[node] = max((level[value] + 1 for value in _reads(node)), default=0)
    readers = users(graph.nodes())
    for node in shown:
        below = [level[reader] for reader in readers.get(node, ()) if reader in level]
        if not _reads(node) and below:
            level[node] = min(below) - 1
    first = min(level.values(), default=0)
    return {node: depth - first for node, depth in level.items()}


def _placed(
    graph: Graph, shown: Sequence[Node], left: float, top: float, more: Callable[[Node], str], is_centred: bool
) -> _Layout:
    """Within a level everything stands near what it reads. A line that passes a level has a place there, as a box has:
    so no line runs behind a box."""
    level = _levels(graph, shown)
    rows: dict[int, list[Node]] = {}
    passing: dict[int, dict[Node, None]] = {}
    for node in shown:
        rows.setdefault(level[node], []).append(node)
        for value in _reads(node):
            for depth in range(level[value] + 1, level[node]):
                passing.setdefault(depth, {})[value] = None
    boxes: dict[Node, _Box] = {}
    lines: dict[tuple[Node, int], float] = {}

    def above(node: Node, depth: int) -> float:
        """Where the line of a node comes from, seen from this level."""
        return lines.get((node, depth - 1), boxes[node].x + boxes[node].width / 2)

    for depth in sorted({*rows, *passing}):
        wanted: list[tuple[float, Node, bool]] = [(above(node, depth), node, True) for node in passing.get(depth, ())]
        for node in rows.get(depth, ()):
            centres = [above(value, depth) for value in _reads(node)]
            wanted.append((sum(centres) / len(centres) if centres else -1.0, node, False))
        edge, row = -math.inf if is_centred else left, list[tuple[float, float, Node, bool, str, str]]()
        off: list[float] = []
        for centre, node, passes in sorted(wanted, key=lambda each: each[0]):
            label, below_text = ("", "") if passes else _label(node)
            below_text = f"{below_text} {'' if passes else more(node)}".strip()
            width = LINE if passes else max(text_width(label, 13), text_width(below_text, 10)) + 16
            x = max(edge, centre - width / 2)
            row.append((x, width, node, passes, label, below_text))
            off.append(x + width / 2 - centre)
            edge = x + width + GAP
        shift = sum(off) / len(off) if is_centred and off else 0.0
        for x, width, node, passes, label, below_text in row:
            if passes:
                lines[node, depth] = x - shift + width / 2
            else:
                boxes[node] = _Box(node, label, below_text, round(x - shift), top + depth * LEVEL + 14, round(width))
    least = min([*(box.x for box in boxes.values()), *lines.values()], default=left)
    moved = left - least if is_centred else 0.0
    found = [replace(box, x=box.x + round(moved)) for box in boxes.values()]
    return _Layout(found, {place: x + round(moved) for place, x in lines.items()}, level)


def _draw(
    scene: Scene,
    graph: Graph,
    layout: _Layout,
    colour: Callable[[Node], int],
    edge: Callable[[Node, Node], str],
) -> None:
    outputs = {_source(node) for node in graph.outputs}
    at = {box.node: box for box in layout.boxes}
    for box in layout.boxes:
        for value in dict.fromkeys(_reads(box.node)):
            scene.path(_line(at[value], box, layout), "edge")
            scene.tip(box.x + box.width / 2, box.y, (0, 1), 6)
    for box in layout.boxes:
        crossed = dict.fromkeys(edge(value, box.node) for value in dict.fromkeys(_reads(box.node)))
        if words := ", ".join(filter(None, crossed)):
            scene.text(box.x + box.width / 2 + 8, box.y - 5, words, size=10.5, bold=True, above=True)
        scene.box(box.x, box.y, box.width, BOX, colour=colour(box.node))
        scene.text(box.x + 7, box.y + 15, box.label, bold=box.node in outputs)
        scene.text(box.x + 7, box.y + 29, box.below, size=9.5, quiet=True)


def _line(start: _Box, end: _Box, layout: _Layout) -> str:
    """From one box to another: straight past the boxes of a level, curved between levels."""
    x, y = start.x + start.width / 2, start.y + BOX
    path = f"M{x:.0f} {y:.0f}"
    for depth in range(layout.level[start.node] + 1, layout.level[end.node] + 1):
        last = depth == layout.level[end.node]
        to_x = end.x + end.width / 2 if last else layout.lines[start.node, depth]
        to_y = end.y - (layout.level[end.node] - depth) * LEVEL
        middle = (y + to_y) / 2
        path += f"C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y:.0f}"
        x, y = to_x, to_y + BOX
        path += "" if last else f"V{y:.0f}"
    return path
