"""What one rank computes of a placed node: the same primitive on its own part, with sizes that fit it.

A table of rows that are cut is the one primitive that needs more: a rank looks up the rows that it has, and gives zeros
for others; an index that no rank has is refused by the first or the last, as it is where the table is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilemesh.core.axes import Axes
from tilemesh.core.tensor_placement import REPLICATED, TensorPlacement
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.plan.place.exchange import Exchanger
from tilemesh.plan.place.propagate import PlacedGraph

_SIZED = {
    "reshape": "shape", "broadcast": "shape", "conv_input": "size", "conv_weight": "size", "unwindows": "shape",
}  # fmt: skip
"""Attributes that say the shape of the result."""


def local_shape(node: Node, placement: TensorPlacement, axes: Axes, rank: int) -> tuple[int, ...]:
    """Of what a rank has of a tensor."""
    return placement.shard(node.shape, axes, rank).shape


def local_graph(placed: PlacedGraph, rank: int, outputs: Sequence[TensorPlacement] | None = None) -> Graph:
    """The program of one rank: its parts of the inputs in, its parts of the outputs out, exchanges among its nodes.

    outputs: as what each is wanted, if not as it is placed. An exchange is made once for all of a pass that read it,
    and not at all where everyone wants the same other placement: what a node gives is then turned into it at once.
    """
    graph, axes = placed.graph, placed.axes
    if outputs is None:
        outputs = [placed.placements[node] for node in graph.outputs]
    wants: dict[Node, set[TensorPlacement]] = {node: set() for node in graph.nodes()}
    for node in wants:
        for value, taken in zip(node.inputs, placed.taken[node], strict=True):
            wants[value].add(taken)
    for node, wanted in zip(graph.outputs, outputs, strict=True):
        wants[node].add(wanted)
    exchanger = Exchanger(axes, rank)
    parts: dict[tuple[Node, TensorPlacement, bool], Node] = {}

    def part(node: Node, wanted: TensorPlacement, reader: Node) -> Node:
        last = placed.placements[node]
        first = placed.given.get(node, last)
        key = (node, wanted, wanted not in (first, last) and reader in placed.first_pass)
        if key not in parts:
            is_passed = wanted == last or (wants[node] == {wanted} and first != last)
            source = first if is_passed else last
            parts[key] = exchanger.exchange(part(node, source, node), node.shape, source, wanted)
        return parts[key]

    inputs = []
    for node in graph.inputs:
        placement = placed.placements.get(node, REPLICATED)
        inputs.append(
            make("input", name=node["name"], shape=local_shape(node, placement, axes, rank), dtype=node.dtype)
        )
        parts[node, placement, False] = inputs[-1]
    for node in wants:
        if node.op != "input":
            takes, given = placed.taken[node], placed.given[node]
            values = [part(*pair, node) for pair in zip(node.inputs, takes, strict=True)]
            parts[node, given, False] = local_node(node, values, takes, given, axes, rank)
    return Graph(tuple(inputs), tuple(part(*pair, pair[0]) for pair in zip(graph.outputs, outputs, strict=True)))


def local_node(
    node: Node, inputs: Sequence[Node], taken: Sequence[TensorPlacement], output: TensorPlacement, axes: Axes, rank: int
) -> Node:
    """A node of this rank's parts `inputs`, which are placed as `taken`; what it gives is placed as `output`."""
    attributes: dict[str, Any] = dict(node.attributes)
    if node.op in _SIZED:
        attributes[_SIZED[node.op]] = local_shape(node, output, axes, rank)
    elif node.op in ("opaque", "item") and any(placement.marks for placement in taken):
        # Operators that are cut read any strides.
        attributes |= {"shape": local_shape(node, output, axes, rank)} if node.dtype != "tuple" else {}
        attributes |= {"strides": ()} if "strides" in attributes else {}
    elif node.op == "put_add":
        attributes["size"] = local_shape(node, output, axes, rank)[0]
    elif node.op == "slice":
        whole = zip(attributes["stop"], node.inputs[0].shape, inputs[0].shape, strict=True)
        attributes["stop"] = tuple(here if stop == size else stop for stop, size, here in whole)
    elif node.op == "take" and taken[0].axes_of(0):
        return _own_rows(node, inputs[0], inputs[1], taken[0], axes, rank)
    return make(node.op, *inputs, line=node.line, **attributes)


def _own_rows(node: Node, table: Node, index: Node, placement: TensorPlacement, axes: Axes, rank: int) -> Node:
    sizes = node.inputs[0].shape
    [span] = placement.shard(sizes, axes, rank).spans[0]

    def number(value: int) -> Node:
        constant = make("constant", value=value, shape=(), dtype=index.dtype)
        return make("broadcast", constant, shape=index.shape, dims=())

    here = make("subtract", index, number(span.whole)) if span.whole else index
    near = make("maximum", here, number(0)) if span.whole else here  # rows before the first are nobody's
    if span.whole + span.length < sizes[0]:
        near = make("minimum", near, number(span.length - 1))
    rows = make("take", table, near)
    is_own = make("compare", here, near, kind="equal")
    zeros = make("constant", value=0.0 if "float" in rows.dtype else 0, shape=(), dtype=rows.dtype)
    return make(
        "where",
        make("broadcast", is_own, shape=rows.shape, dims=tuple(range(len(index.shape)))),
        rows,
        make("broadcast", zeros, shape=rows.shape, dims=()),
    )
