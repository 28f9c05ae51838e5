"""Which values to compute again instead of keeping them: fewer bytes at the fullest moment for more operations.

A value of a forward pass that only the backward pass reads again lives through the fullest moment of a step. Where it
can be computed from what lives there anyway, it may be dropped and made again just before it is read. `rematerialised`
does that value by value, the one that lowers the peak most for its operations first, until the peak fits a budget or
nothing lowers it. What is computed again is a node of its own (`again=NUMBER`), because equal nodes are one. Plain
Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilemesh.graph.ir import Graph, Node, make, rebuilt
from tilemesh.graph.memory import Lifetime, lifetimes, live_bytes, owner
from tilemesh.graph.ops import VIEWS, primitive
from tilemesh.graph.size import known

PATIENCE = 12  # values that may be computed again before the peak falls
TRIED = 8  # candidates whose effect on the peak is computed in each round
CHEAP = ("elementwise", "linear", "reduction")  # what may be computed again; products only where they are allowed
PRODUCTS = ("dot", "conv", "conv_input", "conv_weight", "put_add", "unwindows")


@dataclass(frozen=True)
class Rematerialised:
    """The program, its peak before and after, the operations that it does more, and how many values are made again."""

    graph: Graph
    peak_before: int
    peak: int
    extra_flops: int
    values: int


def peak_bytes(graph: Graph) -> int:
    """The bytes of values at the fullest moment."""
    return max(live_bytes(lifetimes(graph)), default=0)


def rematerialised(graph: Graph, budget_bytes: int, products: bool = False, most: int = 200) -> Rematerialised:
    """The program with values computed again until its peak is at most the budget, or as low as it gets.

    products: whether products and convolutions may be computed again too (recomputing whole layers).
    """
    before = peak = peak_bytes(graph)
    flops = known(graph.flops, {})
    values = 0
    best = Rematerialised(graph, before, peak, 0, 0)
    while best.peak > budget_bytes and values < most and values - best.values < PATIENCE:
        better = _best(graph, products, values)
        if better is None:
            break
        graph = better
        values += 1
        peak = peak_bytes(graph)
        if peak < best.peak:
            best = Rematerialised(graph, before, peak, known(graph.flops, {}) - flops, values)
    return best


def _best(graph: Graph, products: bool, serial: int) -> Graph | None:
    """The program with one more value computed again: of the largest the one that leaves the lowest peak.

    There may be several moments as full as the fullest: then the sum over all moments decides.
    """
    order = graph.nodes()
    places = {node: place for place, node in enumerate(order)}
    lives = lifetimes(graph)
    curve = live_bytes(lives)
    moment = curve.index(max(curve))
    spans = {life.node: life for life in lives}
    outputs = {owner(node) for node in graph.outputs}
    candidates = [
        life
        for life in lives
        if life.born < moment < life.dies and life.node not in outputs and _may_repeat(life.node, products)
    ]
    candidates.sort(key=lambda life: (-life.size, known(life.node.flops, {})))
    best: Graph | None = None
    least = (max(curve), sum(curve))
    for life in candidates[:TRIED]:
        changed = _repeated(graph, order, places, spans, life, moment, products, serial)
        if changed is None:
            continue
        after = live_bytes(lifetimes(changed))
        level = max(after), sum(after)
        # The first of several values that are made from one that now lives longer gains nothing by itself.
        if level < least or (level == least and best is None):
            best, least = changed, level
    return best


def _may_repeat(node: Node, products: bool) -> bool:
    return primitive(node.op).kind in CHEAP and (products or node.op not in PRODUCTS)


def _repeated(
    graph: Graph,
    order: Sequence[Node],
    places: dict[Node, int],
    spans: dict[Node, Lifetime],
    life: Lifetime,
    moment: int,
    products: bool,
    serial: int,
) -> Graph | None:
    """The program whose operators after a moment read this value made again; None where that cannot be done."""
    copies: dict[Node, Node] = {}
    later = [node for node in order[moment + 1 :] if any(owner(value) is life.node for value in node.inputs)]
    if not later:
        return None
    first = min(places[node] for node in later)

    new: dict[Node, Node] = {}

    def copy(node: Node, depth: int) -> Node:
        """A value made again from what lives at its next use; a view of one."""
        if node in copies:
            return copies[node]
        source = owner(node)
        kept = source is not life.node and (source not in spans or spans[source].dies >= first)
        if primitive(node.op).kind == "source" or kept:
            return new.get(node, node)
        if source is not life.node and (depth == 0 or node.op == "item" or not _may_repeat(source, products)):
            return new.get(node, node)  # it lives a little longer instead
        given = [copy(value, depth - 1) for value in node.inputs]
        attributes = dict(node.attributes)
        if node.op not in VIEWS:
            attributes["again"] = serial
        copies[node] = make(node.op, *given, line=node.line, **attributes)
        return copies[node]

    for place, node in enumerate(order):
        inputs = []
        for value in node.inputs:
            again = place > moment and owner(value) is life.node and node.op not in VIEWS
            inputs.append(copy(value, 40) if again else new[value])
        new[node] = rebuilt(node, inputs)
    return Graph(graph.inputs, tuple(new[node] for node in graph.outputs))
