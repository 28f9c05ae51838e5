"""Graphs as SVG drawings: one box per operator, below what it reads; several graphs beside each other. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tilemesh.graph.ir import Graph, Node, users
from tilemesh.graph.rewrite import number_of

LETTER, BOX, LEVEL, GAP, MARGIN = 6.6, 36, 66, 14, 16
LINE = 2  # the width of a line's place among boxes
MOST = 400  # boxes of one drawing: beyond, nobody can read it
COLOURS = {"input": "#e8eefc", "region": "#d4ecd4", "dot": "#fbe3c3", "conv": "#fbe3c3", "opaque": "#e6e6e6"}


@dataclass(frozen=True)
class _Box:
    node: Node
    label: str
    below: str
    x: float
    y: float
    width: float


def drawing(graphs: Sequence[tuple[str, Graph]]) -> str:
    """The graphs beside each other, each below its title."""
    parts, left, height = [], float(MARGIN), 0.0
    for title, graph in graphs:
        shown = [node for node in graph.nodes() if _shown(node)]
        if len(shown) > MOST:
            text = f"{title}: {len(shown)} operators, too many to draw"
            parts.append(_text(left, 24, text, 13))
            left, height = left + LETTER * len(text) + 2 * MARGIN, max(height, 60.0)
            continue
        layout = _placed(graph, shown)
        width = max([box.x + box.width for box in layout.boxes] + list(layout.lines.values()), default=0.0)
        width = max(width, LETTER * 1.15 * len(title))
        parts.append(f'<g transform="translate({left:.0f},{MARGIN})">{_drawn(title, graph, layout)}</g>')
        left += width + 3 * MARGIN
        height = max([height, *(box.y + BOX for box in layout.boxes)])
    size = f"{left:.0f} {height + 3 * MARGIN:.0f}"
    style = "font-family:ui-sans-serif,system-ui,sans-serif"
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{left:.0f}" style="{style}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{arrow}{"".join(parts)}</svg>\n'
    )


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


def _placed(graph: Graph, shown: Sequence[Node]) -> _Layout:
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
        edge = 0.0
        for centre, node, passes in sorted(wanted, key=lambda each: each[0]):
            label, below_text = ("", "") if passes else _label(node)
            width = LINE if passes else max(LETTER * max(len(label) * 1.1, len(below_text) * 0.85) + 14, 40)
            x = max(edge, centre - width / 2)
            if passes:
                lines[node, depth] = x + width / 2
            else:
                boxes[node] = _Box(node, label, below_text, x, _top(depth), width)
            edge = x + width + GAP
    return _Layout(list(boxes.values()), lines, level)


def _top(depth: int) -> int:
    return depth * LEVEL + 22


def _drawn(title: str, graph: Graph, layout: _Layout) -> str:
    outputs = {_source(node) for node in graph.outputs}
    parts = [_text(0, 8, title, 13, "600")]
    at = {box.node: box for box in layout.boxes}
    for box in layout.boxes:
        for value in dict.fromkeys(_reads(box.node)):
            parts.append(
                f'<path d="{_line(at[value], box, layout)}" '
                'fill="none" stroke="#667" stroke-width="1" marker-end="url(#arrow)"/>'
            )
    for box in layout.boxes:
        edge = "#a33" if box.node in outputs else "#667"
        parts.append(
            f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{BOX}" rx="6" '
            f'fill="{COLOURS.get(box.node.op, "#ffffff")}" stroke="{edge}"/>'
        )
        parts.append(_text(box.x + 7, box.y + 15, box.label, 12))
        parts.append(_text(box.x + 7, box.y + 29, box.below, 9.5, colour="#556"))
    return "".join(parts)


def _line(start: _Box, end: _Box, layout: _Layout) -> str:
    """From one box to another: straight past the boxes of a level, curved between levels."""
    x, y = start.x + start.width / 2, start.y + BOX
    path = f"M{x:.0f} {y:.0f}"
    for depth in range(layout.level[start.node] + 1, layout.level[end.node] + 1):
        last = depth == layout.level[end.node]
        to_x, to_y = end.x + end.width / 2 if last else layout.lines[start.node, depth], _top(depth)
        middle = (y + to_y) / 2
        path += f"C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y:.0f}"
        x, y = to_x, to_y + BOX
        path += "" if last else f"V{y:.0f}"
    return path


def _text(x: float, y: float, words: str, size: float, weight: str = "400", colour: str = "#112") -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(words)}</text>'
