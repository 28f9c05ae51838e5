"""Graphs as SVG drawings: one box per operator, below what it reads; several graphs beside each other. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tilemesh.graph.ir import Graph, Node, users
from tilemesh.graph.rewrite import number_of

LETTER, BOX, LEVEL, GAP, MARGIN = 6.6, 36, 66, 14, 16
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
        boxes = _placed(graph, shown)
        width = max([box.x + box.width for box in boxes], default=0.0)
        width = max(width, LETTER * 1.15 * len(title))
        parts.append(f'<g transform="translate({left:.0f},{MARGIN})">{_drawn(title, graph, boxes)}</g>')
        left += width + 3 * MARGIN
        height = max([height, *(box.y + BOX for box in boxes)])
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


def _placed(graph: Graph, shown: Sequence[Node]) -> list[_Box]:
    """Levels by the longest way from an input; within one, near what is read."""
    level: dict[Node, int] = {}
    for node in shown:
        level[node] = max((level[value] + 1 for value in _reads(node)), default=0)
    readers = users(graph.nodes())
    for node in shown:
        below = [level[reader] for reader in readers.get(node, ()) if reader in level]
        if not _reads(node) and below:
            level[node] = min(below) - 1
    rows: dict[int, list[Node]] = {}
    for node in shown:
        rows.setdefault(level[node], []).append(node)
    boxes: dict[Node, _Box] = {}
    for depth in sorted(rows):
        wanted = []
        for node in rows[depth]:
            above = [boxes[value] for value in _reads(node) if value in boxes]
            centre = sum(box.x + box.width / 2 for box in above) / len(above) if above else -1.0
            wanted.append((centre, node))
        edge = 0.0
        for centre, node in sorted(wanted, key=lambda each: each[0]):
            label, below_text = _label(node)
            width = max(LETTER * max(len(label) * 1.1, len(below_text) * 0.85) + 14, 40)
            x = max(edge, centre - width / 2)
            boxes[node] = _Box(node, label, below_text, x, (depth - min(rows)) * LEVEL + 22, width)
            edge = x + width + GAP
    return list(boxes.values())


def _drawn(title: str, graph: Graph, boxes: Sequence[_Box]) -> str:
    at = {box.node: box for box in boxes}
    outputs = {_source(node) for node in graph.outputs}
    parts = [_text(0, 8, title, 13, "600")]
    for box in boxes:
        for value in dict.fromkeys(_reads(box.node)):
            start, x, y = at[value], box.x + box.width / 2, box.y
            from_x, from_y = start.x + start.width / 2, start.y + BOX
            middle = (from_y + y) / 2
            parts.append(
                f'<path d="M{from_x:.0f} {from_y:.0f}C{from_x:.0f} {middle:.0f} {x:.0f} {middle:.0f} {x:.0f} {y:.0f}" '
                'fill="none" stroke="#667" stroke-width="1" marker-end="url(#arrow)"/>'
            )
    for box in boxes:
        edge = "#a33" if box.node in outputs else "#667"
        parts.append(
            f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{BOX}" rx="6" '
            f'fill="{COLOURS.get(box.node.op, "#ffffff")}" stroke="{edge}"/>'
        )
        parts.append(_text(box.x + 7, box.y + 15, box.label, 12))
        parts.append(_text(box.x + 7, box.y + 29, box.below, 9.5, colour="#556"))
    return "".join(parts)


def _text(x: float, y: float, words: str, size: float, weight: str = "400", colour: str = "#112") -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(words)}</text>'
