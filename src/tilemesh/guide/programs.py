"""Programs drawn as graphs: values of `tilemesh.graph`, before and after what was done to them.

`graph.draw` places them: a box is an operator with the shape of its result, an arrow is a value that is read.
"""

from __future__ import annotations

from tilemesh.core.scene import Scene, files_of
from tilemesh.graph import build, derive
from tilemesh.graph.draw import drawing
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.memory import arena
from tilemesh.graph.rewrite import rewrite
from tilemesh.graph.rules import INFERENCE, simplify


def figures() -> dict[str, str]:
    """By file name, for `docs/guide/figures/`."""
    return files_of(dataflow, forward, reverse, control, folding, common, batch_norm, qkv, buffers)


def _regression() -> tuple[tuple[Node, ...], Node]:
    data, target, w = build.argument("data", [8, 3]), build.argument("target", [8, 1]), build.argument("w", [3, 1])
    error = build.subtract(build.dot(data, w), target)
    return (data, target, w), build.total(build.multiply(error, error))


def dataflow() -> str:
    inputs, loss = _regression()
    return drawing(
        [("operators and the values between them", Graph(inputs, (loss,)))],
        "A program as a graph: loss = Σ (data·w - target)²",
    )


def forward() -> str:
    x, y = build.argument("x", []), build.argument("y", [])
    graph = Graph((x, y), (build.multiply(build.exp(x), y),))
    moved, _ = simplify(derive.jvp(graph, [x]))
    own = set(graph.nodes())
    return drawing(
        [("green: the program; brown: its derivative, computed along with it", moved)],
        "Forward mode: the value of exp(x)·y and how it moves with x, in one pass",
        lambda node: 3 if node.op == "input" else 2 if node in own else 1,
    )


def reverse() -> str:
    inputs, loss = _regression()
    step, _ = simplify(Graph(inputs, (loss, *derive.update(loss, [inputs[2]], rate=0.1))))
    own = set(Graph(inputs, (loss,)).nodes())
    return drawing(
        [("green: forward; brown: backward and the update", step)],
        "Reverse mode: the gradient and the update of w are more of the same graph",
        lambda node: 3 if node.op == "input" else 2 if node in own else 1,
    )


def control() -> str:
    x = build.argument("x", [])
    chosen = build.compare("less", 0.0, x)
    taken, other = build.switch(x, chosen, True), build.switch(x, chosen, False)
    graph = Graph((x,), (build.merge(chosen, build.exp(taken), build.negate(other)),))
    return drawing(
        [("exp(x) if x > 0 else -x", graph)],
        "Control flow: switch lets a value through on one side, merge takes the one that is there",
    )


def folding() -> str:
    x = build.argument("x", [4])
    six = build.multiply(build.constant(2.0), build.constant(3.0))
    before = Graph((x,), (build.multiply(build.subtract(x, 0.0), six),))
    after, _ = simplify(before)
    return drawing([("before", before), ("after", after)], "Constants are folded, and x - 0 is x")


def common() -> str:
    a, b = build.argument("a", [4]), build.argument("b", [4])
    first, again, unused = build.add(a, b), build.add(a, b), build.exp(a)
    assert first is again
    graph = Graph((a, b), (build.multiply(first, again),))
    assert unused not in graph.nodes()
    return drawing(
        [("the program says a + b twice and exp(a) once; the graph has one addition", graph)],
        "(a + b)·(a + b), and exp(a) that nobody reads: equal nodes are one, unread ones are not there",
    )


def batch_norm() -> str:
    x, w, scale = build.argument("x", [8, 3, 16, 16]), build.argument("w", [4, 3, 3, 3]), build.argument("scale", [4])
    y = build.conv(x, w)
    before = Graph((x, w, scale), (build.multiply(y, make("broadcast", scale, shape=y.shape, dims=(1,))),))
    after, steps = rewrite(before, INFERENCE)
    assert steps
    return drawing(
        [("before: scales the output", before), ("after: scales 108 weights, once", after)],
        "A scale behind a convolution moves into its weights, which are known after training",
    )


def qkv() -> str:
    x = build.argument("x", [16, 8])
    weights = [build.argument(name, [8, 8]) for name in ("wq", "wk", "wv")]
    three = Graph((x, *weights), tuple(build.dot(x, weight) for weight in weights))
    joined = build.dot(x, build.concat(weights, 1))
    cut = Graph((x, *weights), tuple(build.part(joined, 1, 8 * place, 8 * place + 8) for place in range(3)))
    return drawing(
        [("three products", three), ("one product, cut afterwards", cut)],
        "Three projections as one product: fewer launches, a larger matrix",
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
    scene = Scene(860, 250, f"Inference through {layers} layers: {kept >> 10} KiB of values in {plan.size >> 10} KiB")
    begin = min(life.born for life in plan.lifetimes)
    end = max(life.dies for life in plan.lifetimes)
    left, top, wide, high = 110, 62, 690 / (end - begin + 1), 120 / plan.size
    buffer_offsets = sorted(set(plan.offsets))
    for number, offset in enumerate(buffer_offsets):
        scene.text(left - 10, top + (offset + plan.lifetimes[0].size / 2) * high + 4, f"buffer {number}", align="end")
    for place, (life, offset) in enumerate(zip(plan.lifetimes, plan.offsets, strict=True)):
        across = (min(life.dies, end) - life.born + 1) * wide - 2
        colour = buffer_offsets.index(offset) * 2
        words = f"{life.node.op} {place // 2}"
        scene.box(
            left + (life.born - begin) * wide,
            top + offset * high,
            across,
            life.size * high - 4,
            words,
            colour=colour,
            size=10,
        )
    scene.arrow(left, top + 134, left + 690, top + 134, colour=6)
    scene.text(left + 690, top + 150, "operators, one after the other", align="end", quiet=True, size=11)
    note = "a value lives from the operator that makes it to the last that reads it; then the next may have its place"
    scene.note(left, top + 174, note)
    return scene.svg()
