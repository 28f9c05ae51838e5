"""Transposes that meet: one before and one behind elementwise operators undo one another, and both go. Plain Python.

    transpose(exp(transpose(x, order=(1, 0))), order=(1, 0))  =  exp(x)

How many operators stand between them, and how many transposed operands they have, is no fixed pattern, so this is a
pass and not a rule. It takes a transpose away only where no other one has to be put in its place: every operand is
transposed already, a number, or repeated along dims that can be named in another order. The operators between are read
by nobody else, so none is computed twice, and a program never has more to do than before. A transposed product of a
transposed matrix is the product the other way round.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from tilemesh.graph import build
from tilemesh.graph.ir import Graph, Node, make, rebuilt, users
from tilemesh.graph.ops import primitive
from tilemesh.graph.rewrite import Applied, compose, number_of

MOST = 64  # operators between two transposes
NAME = "transposes meet"


def met_transposes(graph: Graph) -> tuple[Graph, list[Applied]]:
    """The graph without the transposes that undo one another, and the steps that led there."""
    nodes = graph.nodes()
    readers: dict[Node, set[Node | None]] = {node: set(found) for node, found in users(nodes).items()}
    for node in graph.outputs:
        readers[node].add(None)  # whoever runs the program
    place = {node: index for index, node in enumerate(nodes)}
    new: dict[Node, Node] = {}
    steps: list[Applied] = []
    for node in nodes:
        new[node] = rebuilt(node, [new[value] for value in node.inputs])
        between = _between(node, nodes, place, readers) if node.op == "transpose" else []
        after = _turned(between, node["order"], new) if between else _turned_product(node, readers, new)
        if after is not None:
            steps.append(Applied(NAME, new[node], after))
            new[node] = after
    return (Graph(graph.inputs, tuple(new[node] for node in graph.outputs)) if steps else graph), steps


def _turned_product(node: Node, readers: Mapping[Node, set[Node | None]], new: Mapping[Node, Node]) -> Node | None:
    """(xᵀ · y)ᵀ of several products at once is yᵀ · x: the products are read by it alone, and what reads it in turn
    would read across rows. Libraries turn the operands of a product for nothing."""
    if node.op != "transpose" or node.inputs[0].op != "dot" or readers[node.inputs[0]] != {node}:
        return None
    product, rank = node.inputs[0], len(node.shape)
    (x, y), swap = product.inputs, (*range(rank - 2), rank - 1, rank - 2)
    if x.op != "transpose" or not tuple(x["order"]) == tuple(node["order"]) == swap or rank < 3 or rank != len(y.shape):
        return None
    return make("dot", build.transpose(new[y], swap), new[x.inputs[0]], line=product.line)


def _between(
    last: Node, nodes: Sequence[Node], place: Mapping[Node, int], readers: Mapping[Node, set[Node | None]]
) -> list[Node]:
    """The operators before this transpose that can do without it, last ones first; none where it has to stay."""
    inside: set[Node | None] = {last}
    between: list[Node] = []
    waiting = [-place[last.inputs[0]]]  # later nodes first: whoever reads a node was looked at before it
    while waiting:
        node = nodes[-heapq.heappop(waiting)]
        if node in inside:
            continue
        if primitive(node.op).kind == "elementwise" and readers[node] <= inside and len(between) < MOST:
            inside.add(node)
            between.append(node)
            for value in dict.fromkeys(node.inputs):
                heapq.heappush(waiting, -place[value])
        elif not _turns(node, last["order"], readers[node] <= inside):
            return []
    return between


def _turns(leaf: Node, order: Sequence[int], alone: bool) -> bool:
    """Whether an operand in another order of dims needs no transpose that is not there yet."""
    if leaf.op == "transpose":
        return alone or list(compose(leaf["order"], order)) == sorted(order)
    if leaf.op == "broadcast":
        moved = [order.index(dim) for dim in leaf["dims"]]
        return moved == sorted(moved)
    return number_of(leaf) is not None


def _turned(between: Sequence[Node], order: Sequence[int], new: Mapping[Node, Node]) -> Node:
    """The operators on operands in another order of dims."""
    made: dict[Node, Node] = {}

    def operand(leaf: Node) -> Node:
        if leaf in made:
            return made[leaf]
        shape = tuple(leaf.shape[dim] for dim in order)
        if leaf.op == "transpose":
            return build.transpose(new[leaf.inputs[0]], compose(leaf["order"], order))
        if leaf.op == "broadcast":
            dims = tuple(order.index(dim) for dim in leaf["dims"])
            return make("broadcast", new[leaf.inputs[0]], shape=shape, dims=dims)
        number = number_of(leaf)
        assert number is not None
        return build.constant(number, shape, leaf.dtype)

    for node in reversed(between):
        made[node] = make(node.op, *map(operand, node.inputs), line=node.line, **dict(node.attributes))
    return made[between[0]]
