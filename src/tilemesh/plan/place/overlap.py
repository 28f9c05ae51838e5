"""When a rank's program begins its exchanges: as soon as it helps, so that they move while it computes.

The one idea: an exchange begins where it stands in the order of a program, and is waited for where it is first read. So
an order says all that there is to say: the program that runs and the cost that times it read the same one. What a next
exchange needs is computed first, what nobody waits for (a weight's gradient) while that exchange moves; copies of
inputs (a weight that is gathered) are begun one ahead. All ranks have one order: it looks at no size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tilemesh.graph.ir import Graph, Node, ordered, users
from tilemesh.plan.place.rules import EXCHANGES

HEAVY = ("dot", "conv", "conv_input", "conv_weight", "take", "put_add", "opaque")
"""What an exchange may hide behind; a program has as many of these on every rank, and in the same places."""


def begun_early(graph: Graph) -> list[Node]:
    """The nodes of a rank's program, each after what it reads, exchanges as early as they should begin."""
    plain = graph.nodes()
    if not any(node.op in EXCHANGES for node in plain):
        return plain
    early, depth, ends, readers = of_inputs(plain), dict[Node, int](), set[Node](), users(plain)
    for node in plain:  # how many heavy operators lie on the longest way to it
        depth[node] = (node.op in HEAVY) + max((depth[value] for value in node.inputs), default=0)
    for node in reversed(plain):  # nothing heavy reads what comes of it
        if all(reader in ends and reader.op not in HEAVY for reader in readers[node]):
            ends.add(node)
    # The last layer's gradients come first: what they read is used up then.
    order = ordered(sorted(graph.outputs, key=depth.__getitem__))
    order = ordered([*_first(order, [node for node in order if node.op in EXCHANGES and node not in early | ends])])
    order = ordered([*_one_ahead(order, [node for node in order if node in early], readers)])
    last = set[Node]()  # what reads sums of gradients: an update, which comes when all of them are begun
    for node in order:
        if any(value in last or (value.op in EXCHANGES and value in ends - early) for value in node.inputs):
            last.add(node)
    return sorted(order, key=last.__contains__)


def of_inputs(order: Sequence[Node]) -> set[Node]:
    """Exchanges of a program's inputs, such as weights, that could begin at once."""
    later: set[Node] = set()  # something heavy, or another exchange, comes before
    for node in order:
        if any(value in later or value.op in (*HEAVY, *EXCHANGES) for value in node.inputs):
            later.add(node)
    return {node for node in order if node.op in EXCHANGES and node not in later}


def _first(order: Sequence[Node], waited: Sequence[Node]) -> Iterator[Node]:
    """Exchanges that the program waits for before what stands before them and is not needed by them."""
    places, done = {node: place for place, node in enumerate(order)}, 0
    for node in waited:
        yield node
        yield from order[done : places[node]]
        done = places[node]
    yield from order[done:]


def _one_ahead(order: Sequence[Node], early: Sequence[Node], readers: Mapping[Node, Sequence[Node]]) -> Iterator[Node]:
    """Each exchange of inputs begins where the one before is first read."""
    places = {node: place for place, node in enumerate(order)}
    first = {node: min((places[reader] for reader in readers[node]), default=len(order)) for node in early}
    waiting = sorted(early, key=lambda node: (first[node], places[node]))
    begun = 0
    for place, node in enumerate(order):
        while begun < len(waiting) and (not begun or first[waiting[begun - 1]] <= place):
            yield waiting[begun]
            begun += 1
        if node not in first:
            yield node
    yield from waiting
