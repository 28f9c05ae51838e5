"""Programs drawn as graphs: values of `tilemesh.graph`, before and after what was done to them.

A box is an operator with the shape of its result, an arrow is a value that is read. Boxes stand in the column of their
depth, so that arrows go from left to right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilemesh.graph import build, derive
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.memory import arena
from tilemesh.graph.rewrite import rewrite
from tilemesh.graph.rules import INFERENCE, simplify
from tilemesh.guide.svg import Canvas

WIDE, HIGH, GAP_X, GAP_Y = 108, 40, 26, 14
Colour = Callable[[Node], int]


def figures() -> dict[str, str]:
    """By file name, for `docs/guide/figures/`."""
    return {
        "dataflow.svg": dataflow(),
        "forward.svg": forward_mode(),
        "reverse.svg": reverse_mode(),
        "control.svg": control(),
        "folding.svg": folding(),
        "common.svg": common(),
        "batch_norm.svg": batch_norm(),
        "qkv.svg": qkv(),
        "buffers.svg": buffers(),
    }


def _by_kind(node: Node) -> int:
    return 3 if node.op == "input" else 6 if node.op == "constant" else 0


def drawn(title: str, panels: Sequence[tuple[str, Graph]], colour: Colour = _by_kind) -> str:
    """Graphs below each other, each with a few words above it."""
    placed = [(words, GraphLayout(graph)) for words, graph in panels]
    width = 40 + max(layout.columns for _, layout in placed) * (WIDE + GAP_X)
    heights = [34 + layout.rows * (HIGH + GAP_Y) for _, layout in placed]
    canvas = Canvas(max(width, 12 + 9 * len(title)), 40 + sum(heights), title)
    top = 40
    for (words, layout), height in zip(placed, heights, strict=True):
        canvas.text(20, top + 12, words, quiet=True)
        for node in layout.nodes:
            for value in node.inputs:
                _wire(canvas, layout, top + 24, value, node)
        for node in layout.nodes:
            x, y = _corner(layout, node, layout.depth[node], top + 24)
            canvas.box(x, y, WIDE, HIGH, f"{_name(node)}\n{_shape(node)}".rstrip(), colour=colour(node), size=11)
        top += height
    return canvas.svg()


def _corner(layout: GraphLayout, node: Node, column: int, top: float) -> tuple[float, float]:
    return 20 + column * (WIDE + GAP_X), top + layout.row[node, column] * (HIGH + GAP_Y)


def _wire(canvas: Canvas, layout: GraphLayout, top: float, value: Node, user: Node) -> None:
    """From a value to who reads it, through the places that were kept free for it on the way."""
    x, y = _corner(layout, value, layout.depth[value], top)
    x, y = x + WIDE, y + HIGH / 2
    for column in range(layout.depth[value] + 1, layout.depth[user]):
        left, upper = _corner(layout, value, column, top)
        canvas.line(x, y, left, upper + HIGH / 2, colour=6, thick=True)
        canvas.line(left, upper + HIGH / 2, left + WIDE, upper + HIGH / 2, colour=6, thick=True)
        x, y = left + WIDE, upper + HIGH / 2
    left, upper = _corner(layout, user, layout.depth[user], top)
    canvas.arrow(x, y, left - 1, upper + HIGH / 2, colour=6)


class GraphLayout:
    """Columns by depth; within a column, rows near those of what is read. A value that is read further on keeps a row
    free in every column between, so that no arrow runs through a box."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes()
        self.depth: dict[Node, int] = {}
        for node in self.nodes:
            self.depth[node] = max((self.depth[value] + 1 for value in node.inputs), default=0)
        for node in reversed(self.nodes):
            if not node.inputs:  # beside its first reader
                self.depth[node] = min((self.depth[user] - 1 for user in self.nodes if node in user.inputs), default=0)
        self.columns = max(self.depth.values()) + 1
        self.row: dict[tuple[Node, int], float] = {}
        last = {
            node: max((self.depth[user] for user in self.nodes if node in user.inputs), default=0)
            for node in self.nodes
        }
        through = [
            [n for n in self.nodes if self.depth[n] <= column < max(last[n], self.depth[n] + 1)]
            for column in range(self.columns)
        ]
        self.rows = max(len(nodes) for nodes in through)
        for column, nodes in enumerate(through):
            ordered = sorted(nodes, key=lambda node: self._wanted(node, column))
            for place, node in enumerate(ordered):
                self.row[node, column] = place + (self.rows - len(ordered)) / 2

    def _wanted(self, node: Node, column: int) -> float:
        """Where a node would like to stand: at the height of what it reads, or of its own place one column before."""
        before = [(node, column - 1)] if self.depth[node] < column else [(value, column - 1) for value in node.inputs]
        heights = [self.row[place] for place in before if place in self.row]
        return sum(heights) / len(heights) if heights else self.rows / 2


def _name(node: Node) -> str:
    if node.op == "input":
        return str(node["name"])
    if node.op == "constant":
        return f"{node['value']:g}" if isinstance(node["value"], int | float) else "constant"
    return {"switch": f"switch {dict(node.attributes).get('branch', '')}".strip()}.get(node.op, node.op)


def _shape(node: Node) -> str:
    return "×".join(str(dim) for dim in node.shape)


def _regression() -> tuple[tuple[Node, ...], Node]:
    data, target, w = build.argument("data", [8, 3]), build.argument("target", [8, 1]), build.argument("w", [3, 1])
    error = build.subtract(build.dot(data, w), target)
    return (data, target, w), build.total(build.multiply(error, error))


def dataflow() -> str:
    inputs, loss = _regression()
    return drawn(
        "A program as a graph: loss = Σ (data·w - target)²",
        [("operators and the values between them", Graph(inputs, (loss,)))],
    )


def forward_mode() -> str:
    x, y = build.argument("x", []), build.argument("y", [])
    graph = Graph((x, y), (build.multiply(build.exp(x), y),))
    moved, _ = simplify(derive.jvp(graph, [x]))
    own = set(graph.nodes())
    return drawn(
        "Forward mode: the value of exp(x)·y and how it moves with x, in one pass",
        [("green: the program; brown: its derivative, computed along with it", moved)],
        lambda node: 3 if node.op == "input" else 2 if node in own else 1,
    )


def reverse_mode() -> str:
    inputs, loss = _regression()
    step, _ = simplify(Graph(inputs, (loss, *derive.update(loss, [inputs[2]], rate=0.1))))
    own = set(Graph(inputs, (loss,)).nodes())
    return drawn(
        "Reverse mode: the gradient and the update of w are more of the same graph",
        [("green: forward; brown: backward and the update; grey: constants", step)],
        lambda node: 3 if node.op == "input" else 2 if node in own else 6 if node.op == "constant" else 1,
    )


def control() -> str:
    x = build.argument("x", [])
    chosen = build.compare("less", 0.0, x)
    taken, other = build.switch(x, chosen, True), build.switch(x, chosen, False)
    graph = Graph((x,), (build.merge(chosen, build.exp(taken), build.negate(other)),))
    return drawn(
        "Control flow: switch lets a value through on one side, merge takes the one that is there",
        [("exp(x) if x > 0 else -x", graph)],
    )


def folding() -> str:
    x = build.argument("x", [4])
    six = build.multiply(build.constant(2.0), build.constant(3.0))
    before = Graph((x,), (build.multiply(build.subtract(x, 0.0), six),))
    after, _ = simplify(before)
    return drawn("Constants are folded, and x - 0 is x", [("before", before), ("after", after)])


def common() -> str:
    a, b = build.argument("a", [4]), build.argument("b", [4])
    first, again, unused = build.add(a, b), build.add(a, b), build.exp(a)
    assert first is again
    graph = Graph((a, b), (build.multiply(first, again),))
    assert unused not in graph.nodes()
    return drawn(
        "(a + b)·(a + b), and exp(a) that nobody reads: equal nodes are one, unread ones are not there",
        [("the program says a + b twice and exp(a) once; the graph has one addition", graph)],
    )


def batch_norm() -> str:
    x, w, scale = build.argument("x", [8, 3, 16, 16]), build.argument("w", [4, 3, 3, 3]), build.argument("scale", [4])
    y = build.conv(x, w)
    before = Graph((x, w, scale), (build.multiply(y, make("broadcast", scale, shape=y.shape, dims=(1,))),))
    after, steps = rewrite(before, INFERENCE)
    assert steps
    return drawn(
        "A scale behind a convolution moves into its weights, which are known after training",
        [("before: scales the output", before), ("after: scales 108 weights, once", after)],
    )


def qkv() -> str:
    x = build.argument("x", [16, 8])
    weights = [build.argument(name, [8, 8]) for name in ("wq", "wk", "wv")]
    three = Graph((x, *weights), tuple(build.dot(x, weight) for weight in weights))
    joined = build.dot(x, build.concat(weights, 1))
    cut = Graph((x, *weights), tuple(build.part(joined, 1, 8 * place, 8 * place + 8) for place in range(3)))
    return drawn(
        "Three projections as one product: fewer launches, a larger matrix",
        [("three products", three), ("one product, cut afterwards", cut)],
    )


def buffers() -> str:
    """Where inference keeps the values of a chain of layers, as the memory planner places them."""
    layers, rows, width = 6, 32, 256
    value = x = build.argument("x", [rows, width])
    weights = [build.argument(f"w{layer}", [width, width]) for layer in range(layers)]
    for weight in weights:
        value = build.tanh(build.dot(value, weight))
    graph = Graph((x, *weights), (value,))
    plan = arena(graph)
    kept = sum(life.size for life in plan.lifetimes)
    assert plan.size == plan.bound < kept
    canvas = Canvas(860, 250, f"Inference through {layers} layers: {kept >> 10} KiB of values in {plan.size >> 10} KiB")
    begin = min(life.born for life in plan.lifetimes)
    end = max(life.dies for life in plan.lifetimes)
    left, top, wide, high = 110, 62, 690 / (end - begin + 1), 120 / plan.size
    buffer_offsets = sorted(set(plan.offsets))
    for number, offset in enumerate(buffer_offsets):
        canvas.text(left - 10, top + (offset + plan.lifetimes[0].size / 2) * high + 4, f"buffer {number}", align="end")
    for place, (life, offset) in enumerate(zip(plan.lifetimes, plan.offsets, strict=True)):
        across = (min(life.dies, end) - life.born + 1) * wide - 2
        colour = buffer_offsets.index(offset) * 2
        words = f"{_name(life.node)} {place // 2}"
        canvas.box(
            left + (life.born - begin) * wide,
            top + offset * high,
            across,
            life.size * high - 4,
            words,
            colour=colour,
            size=10,
        )
    canvas.arrow(left, top + 134, left + 690, top + 134, colour=6)
    canvas.text(left + 690, top + 150, "operators, one after the other", align="end", quiet=True, size=11)
    note = "a value lives from the operator that makes it to the last that reads it; then the next may have its place"
    canvas.text(left, top + 174, note, quiet=True, size=11)
    return canvas.svg()
