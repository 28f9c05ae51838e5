"""Rotary positions inside a kernel: the halves of the last dim, swapped, are a way to read an operand. Plain Python.

A model writes `x * cosine + cat([-x[half:], x[:half]]) * sine`. The concatenation would be a copy, and what reads it a
kernel of its own. Here the signs leave it as a factor, and it goes past products to their operands: what is left, the
two halves of an operand that another operator made, swapped, is an index of the kernel that reads it. The gradient adds
two halves between zeros, which is such a concatenation too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilemesh.graph import build
from tilemesh.graph.ir import Graph, Node, make, rebuilt
from tilemesh.graph.rewrite import number_of


def swapped(x: Node) -> Node:
    """The two halves of the last dim, the second one first."""
    last, size = len(x.shape) - 1, x.shape[-1]
    return build.concat([build.part(x, last, size // 2, size), build.part(x, last, 0, size // 2)], last)


def swapped_source(node: Node) -> Node | None:
    """What a node has the two halves of, swapped; None for any other node."""
    if node.op != "concat" or len(node.inputs) != 2 or node.inputs[0].op != "slice":
        return None
    x = node.inputs[0].inputs[0]
    even = x.shape == node.shape and x.shape[-1] % 2 == 0
    return x if even and swapped(x) is node else None


def with_rotations(graph: Graph) -> Graph:
    """The graph in which concatenations of negated halves are products of swapped halves and signs."""

    def change(node: Node, inputs: Sequence[Node]) -> Node:
        made = rebuilt(node, inputs)
        if node.op == "add":
            return _joined(made, turned)
        return made if node.op != "concat" or len(inputs) != 2 else turned(made, inputs)

    def turned(made: Node, inputs: Sequence[Node]) -> Node:
        plain = rebuilt(made, [value.inputs[0] if value.op == "negate" else value for value in inputs])
        x = swapped_source(plain)
        if x is None:
            return made
        half = plain.inputs[0].shape[-1:]
        signs = [build.constant(-1.0 if value.op == "negate" else 1.0, half, x.dtype) for value in inputs]
        halves = _turned(x)
        if all(value.op != "negate" for value in inputs):
            return halves
        sign = make("broadcast", build.concat(signs, 0), shape=x.shape, dims=(len(x.shape) - 1,))
        return build.multiply(halves, sign)

    return graph.replace(change)


def _joined(total: Node, turned: Callable[[Node, Sequence[Node]], Node]) -> Node:
    """A sum in which two parts of rows between zeros are one value. Where one of them has a number, the other has zero:
    added to a third in either order, the result is the same to the bit."""
    for part, other in (total.inputs, total.inputs[::-1]):
        pairs = [(other, None)] if other.op != "add" else zip(other.inputs, other.inputs[::-1], strict=True)
        for added, rest in pairs:
            pair = sorted((part, added), key=_span)
            (begin, cut), (again, end) = map(_span, pair)
            if begin == 0 and cut == again and end == total.shape[-1]:
                values = [each.inputs[0] for each in pair]
                joined = turned(build.concat(values, len(total.shape) - 1), values)
                return joined if rest is None else build.add(rest, joined)
    return total


def _span(node: Node) -> tuple[int, int]:
    """The columns of a row beside which there are zeros; none of any other node."""
    if node.op != "pad" or any(node["low"][:-1]) or any(node["high"][:-1]) or any(node["inner"]):
        return -1, -1
    return node["low"][-1], node.shape[-1] - node["high"][-1]


def _turned(x: Node) -> Node:
    """The swapped halves of a value, taken from its operands where it is a product."""
    last = len(x.shape) - 1
    if number_of(x) is not None:
        return x
    if x.op == "multiply":
        return rebuilt(x, [_turned(value) for value in x.inputs])
    if x.op == "broadcast" and last not in x["dims"]:
        return x
    if x.op == "broadcast" and x["dims"][-1] == last and x.inputs[0].shape[-1] == x.shape[-1]:
        return rebuilt(x, [swapped(x.inputs[0])])
    return swapped(x)
