"""Products of one matrix with several others as one product, and convolutions of one picture as one. Plain Python.

x·a, x·b and x·c become slices of x·[a b c] (axioms 18 and 27 of `guide/dataflow/substitutions.txt`, and a slice of a
concatenation at an operand's place is that operand). That reads x once and launches one product, and writes and reads
the weights once more, to put them side by side; where several groups have the same weights, as the steps of a recurrent
network, once for all of them. It is done where fewer bytes move, or where a product is too small to fill a GPU: there
each takes as long as `LAUNCH` bytes. A rule of `rewrite.py` changes one node; this changes several that share an
operand, so it is a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilemesh.graph import build
from tilemesh.graph.ir import Graph, Node, make, rebuilt
from tilemesh.graph.opaque import InputSlot
from tilemesh.graph.ops import primitive

CONVOLUTION = "aten.convolution.default"
LAUNCH = {"triton": 8 << 20}
"""Bytes that a GPU moves in the time that a small product takes at least: 2 of the 3.3 us measured on an H200. A CPU
gains nothing by less launches: two cores of a Xeon were as fast or slower in every case."""


def joined_products(graph: Graph, way: str | None = None) -> tuple[Graph, int]:
    """The graph with products of one left operand joined where that pays, and how many became part of another.

    way: how kernels are generated, which says what a launch is worth; convolutions are joined on a GPU alone.
    """
    launch = LAUNCH.get(way or "", 0)
    groups: dict[tuple[Node, object], list[Node]] = {}
    for node in graph.nodes():
        key = _shared(node, bool(launch))
        if key is not None:
            groups.setdefault((node.inputs[0], key), []).append(node)
    alike: dict[tuple[Node, ...], list[list[Node]]] = {}
    for products in groups.values():
        if len(products) > 1:
            alike.setdefault(tuple(each for node in products for each in node.inputs[1:]), []).append(products)
    results: dict[Node, tuple[list[Node], int]] = {}
    for same in alike.values():
        copied = 2 * sum(each.nbytes for each in {each for node in same[0] for each in node.inputs[1:]})
        if sum(saved_bytes(products, launch) for products in same) <= copied:
            continue
        for products in same:
            start = 0
            for node in products:
                results[node] = (products, start)
                start += node.shape[1]
    if not results:
        return graph, 0

    def change(node: Node, inputs: Sequence[Node]) -> Node:
        if node not in results:
            return rebuilt(node, inputs)
        products, start = results[node]
        return build.part(_together(inputs[0], products), 1, start, start + node.shape[1])

    return graph.replace(change), len(results) - len({id(products) for products, _ in results.values()})


def _shared(node: Node, convolutions: bool) -> object | None:
    """What products have to have in common, beside their left operand, to become one; None: this one stays alone."""
    if node.op == "dot" and len(node.shape) == 2:
        return node.dtype if _is_given(node.inputs[1]) else None
    if not convolutions or node.op != "opaque" or node["target"] != CONVOLUTION or node["args"][-1] != 1:
        return None
    settings = node["args"][3:]
    weights = node.inputs[1:]
    alone = settings[3] or not all(map(_is_given, weights)) or len(node.shape) != 4
    return None if alone else (node.dtype, len(node.inputs), weights[0].shape[1:], settings)


def _together(left: Node, products: Sequence[Node]) -> Node:
    """One product by the weights of several, beside one another."""
    first = products[0]
    if first.op == "dot":
        return make("dot", left, build.concat([node.inputs[1] for node in products], 1))
    weights = [build.concat(each, 0) for each in zip(*(node.inputs[1:] for node in products), strict=True)]
    width = sum(node.shape[1] for node in products)
    slots = (InputSlot(0), InputSlot(1), InputSlot(2) if len(weights) > 1 else None)
    flops = sum(dict(node.attributes).get("flops", 0) for node in products)
    shape = (first.shape[0], width, *first.shape[2:])
    return make(
        "opaque", left, *weights, line=first.line, target=CONVOLUTION, args=(*slots, *first["args"][3:]), kwargs=(),
        shape=shape, dtype=first.dtype, strides=(), **({"flops": flops} if flops else {}),
    )  # fmt: skip


def saved_bytes(products: list[Node], launch: int = 0) -> int:
    """Bytes less to move when these products are one, before their weights are put beside one another: each of a
    convolution's taps reads the picture; a slice of its result lies apart from the next and is read with gaps."""
    shared = products[0].inputs[0].nbytes
    if products[0].op == "dot":
        return (len(products) - 1) * (shared + launch)
    taps = prod(products[0].inputs[1].shape[2:])
    return (len(products) - 1) * (shared * (taps - 1) + launch) - 2 * sum(each.nbytes for each in products)


def _is_given(node: Node) -> bool:
    """Whether an operand is an input, perhaps transposed: no product is part of it."""
    while node.op in ("transpose", "reshape"):
        node = node.inputs[0]
    return primitive(node.op).kind == "source"
