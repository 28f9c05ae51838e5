"""Products of one matrix with several others as one product: q, k and v of attention. Plain Python.

x·a, x·b and x·c become slices of x·[a b c]. That reads x once instead of three times and launches one product, and it
writes and reads the weights once more, to put them side by side. It is done where fewer bytes move: many rows, narrow
weights. A rule of `rewrite.py` changes one node; this changes several that share an operand, so it is a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.graph import build
from tilemesh.graph.ir import Graph, Node, make, rebuilt
from tilemesh.graph.ops import primitive, size_bytes
from tilemesh.graph.size import known


def joined_products(graph: Graph) -> tuple[Graph, int]:
    """The graph with products of one left operand joined where that pays, and how many became part of another."""
    groups: dict[tuple[Node, str], list[Node]] = {}
    for node in graph.nodes():
        if node.op == "dot" and len(node.shape) == 2 and _is_given(node.inputs[1]):
            groups.setdefault((node.inputs[0], node.dtype), []).append(node)
    results: dict[Node, tuple[tuple[Node, ...], int]] = {}
    for products in groups.values():
        if len(products) > 1 and saved_bytes(products) > 0:
            weights = tuple(product.inputs[1] for product in products)
            start = 0
            for product in products:
                results[product] = (weights, start)
                start += known(product.shape[1], {})
    if not results:
        return graph, 0

    def change(node: Node, inputs: Sequence[Node]) -> Node:
        if node not in results:
            return rebuilt(node, inputs)
        weights, start = results[node]
        joined = make("dot", inputs[0], build.concat(weights, 1))
        return build.part(joined, 1, start, start + known(node.shape[1], {}))

    return graph.replace(change), len(results) - len({weights for weights, _ in results.values()})


def saved_bytes(products: list[Node]) -> int:
    """Bytes less to move when these products are one."""
    shared = known(size_bytes(products[0].inputs[0].typed), {})
    weights = sum(known(size_bytes(product.inputs[1].typed), {}) for product in products)
    return (len(products) - 1) * shared - 2 * weights


def _is_given(node: Node) -> bool:
    """Whether an operand is an input, perhaps transposed: no product is part of it."""
    while node.op in ("transpose", "reshape"):
        node = node.inputs[0]
    return primitive(node.op).kind == "source"
