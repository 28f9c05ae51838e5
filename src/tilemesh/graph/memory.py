"""In which order operators run, when each value lives, and an arena: one block of memory in which every value has its
place. Plain Python.

Nothing says in which order a graph runs but that operators follow what they read. `scheduled` is an order in which few
bytes live: what frees at least as much as it makes runs at once, a weight's gradient for instance, and what is computed
again runs just before it is read.

A value lives from the operator that makes it to the last one that reads it. Operators that only name memory again
(`VIEWS`) have no value of their own. The lower bound of any plan is the largest sum of sizes that live at one moment;
`arena` places one value after the other, each at the lowest offset that is free during its life.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilemesh.graph.ir import Graph, Node, ordered, users
from tilemesh.graph.ops import TUPLE, VIEWS, primitive

MIXED = 300  # values of a graph up to which mixed orders are tried
PLACINGS = 9000  # values that are placed in mixed orders altogether: 30 orders of 300 values, more of fewer
MOST_ORDERS = 200
ALIGNMENT = 64  # bytes: a cache line, and enough for every vector instruction


@dataclass(frozen=True)
class Lifetime:
    """A value: which operator makes it, the last one that reads it, and its bytes."""

    node: Node
    born: int
    dies: int
    size: int


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets into one block: values that live at the same time do not overlap."""

    lifetimes: tuple[Lifetime, ...]
    offsets: tuple[int, ...]
    size: int
    bound: int  # no plan for this order of operators can be smaller

    def place(self) -> dict[Node, int]:
        return {life.node: offset for life, offset in zip(self.lifetimes, self.offsets, strict=True)}


def owner(node: Node) -> Node:
    """The node whose memory this one names. One of several results of an operator is a value of its own."""
    while node.op in VIEWS and node.op != "item":
        node = node.inputs[0]
    return node


def scheduled(graph: Graph) -> list[Node]:
    """The nodes in an order in which few bytes live.

    The base is depth first, of an operator's inputs the one with the longest way to it first: what is near, as a value
    that is computed again, then runs when it is needed. Before each operator of the base, others that are ready run if
    they free at least as much as they make. Where a condition steers, or where ranks run a program together (in one
    order for all of them), the graph's own order.
    """
    plain = graph.nodes()
    sizes = {node: 0 if node.op in VIEWS and node.op != "item" else _made_bytes(node) for node in plain}
    if any(primitive(node.op).kind in ("control", "exchange") for node in plain):
        return plain
    depths: dict[Node, int] = {}
    for node in plain:
        depths[node] = 1 + max((depths[value] for value in node.inputs), default=0)
    base = ordered(graph.outputs, lambda node: sorted(node.inputs, key=lambda value: -depths[value]))
    return _Ordering(graph, base, sizes).run()


def _made_bytes(node: Node) -> int:
    """What a node's value takes; nothing that another gave it."""
    return 0 if primitive(node.op).kind == "source" else node.nbytes


class _Ordering:
    def __init__(self, graph: Graph, base: Sequence[Node], sizes: Mapping[Node, int]) -> None:
        self.base, self.sizes = base, sizes
        self.readers = users(base)
        self.missing = {node: len({*node.inputs}) for node in base}
        self.kept = {owner(node) for node in graph.outputs}
        self.waiting: dict[Node, set[Node]] = {}  # of a value those that will read it, views of it included
        for node in base:
            for value in node.inputs:
                self.waiting.setdefault(owner(value), set()).add(node)
        self.order: dict[Node, None] = {}

    def run(self) -> list[Node]:
        for node in self.base:
            ready = [node] if node not in self.order else []
            while ready:
                node = ready.pop()
                self.order[node] = None
                ready += [each for each in self._after(node) if each not in ready and self._grows(each) <= 0]
        return list(self.order)

    def _after(self, node: Node) -> list[Node]:
        """What may run now and could not, or would now free what it did not."""
        for reader in dict.fromkeys(self.readers[node]):
            self.missing[reader] -= 1
        sources = {owner(value): None for value in node.inputs}
        for source in sources:
            self.waiting[source].discard(node)
        touched = dict.fromkeys([*self.readers[node], *(each for source in sources for each in self._last(source))])
        return [each for each in touched if each not in self.order and not self.missing[each]]

    def _last(self, source: Node) -> list[Node]:
        """The only reader that is left, if there is one."""
        return list(self.waiting[source]) if len(self.waiting[source]) == 1 else []

    def _grows(self, node: Node) -> int:
        """By how many bytes more live when this has run; the parts of a result are made with it."""
        made = self.sizes[node] + sum(self.sizes[each] for each in {*self.readers[node]} if each.op == "item")
        made = 0 if node.op == "item" else made
        sources = {owner(value): None for value in node.inputs}
        return made - sum(
            self.sizes[each] for each in sources if each not in self.kept and self.waiting[each] == {node}
        )


def lifetimes(graph: Graph, given: Collection[Node] = ()) -> list[Lifetime]:
    """The values that a run makes, in the order of their making: no inputs but these, no constants, no views."""
    order = scheduled(graph)
    places = {node: place for place, node in enumerate(order)}
    dies: dict[Node, int] = {}
    for place, node in enumerate(order):
        for value in node.inputs:
            dies[owner(value)] = place
    for node in graph.outputs:
        dies[owner(node)] = len(order)
    return [
        Lifetime(node, places[node.inputs[0]] if node.op == "item" else place, dies.get(node, place), _aligned(node))
        for place, node in enumerate(order)
        if (primitive(node.op).kind != "source" or node in given) and owner(node) is node and node.dtype != TUPLE
    ]


def _aligned(node: Node) -> int:
    return -(-node.nbytes // ALIGNMENT) * ALIGNMENT


def live_bytes(lives: Sequence[Lifetime]) -> list[int]:
    """The bytes that live while each operator runs: its inputs and its output both do."""
    end = max((life.dies for life in lives), default=-1) + 1
    changes = [0] * (end + 1)
    for life in lives:
        changes[life.born] += life.size
        changes[min(life.dies, end - 1) + 1] -= life.size
    curve, level = [], 0
    for change in changes[:end]:
        level += change
        curve.append(level)
    return curve


def arena(graph: Graph) -> MemoryPlan:
    """A place for every value: of several orders of placing the one that needs the least."""
    lives = lifetimes(graph)
    bound = max(live_bytes(lives), default=0)
    best: dict[Node, int] = {}
    size = -1
    for order in _orders(lives):
        offsets = _placed(order)
        needed = max((offsets[life.node] + life.size for life in lives), default=0)
        if size < 0 or needed < size:
            best, size = offsets, needed
        if size == bound:
            break
    return MemoryPlan(tuple(lives), tuple(best[life.node] for life in lives), max(size, 0), bound)


def _orders(lives: Sequence[Lifetime]) -> Iterator[list[Lifetime]]:
    """The largest first; those of the longest life first; those of the fullest moment first; then mixtures."""
    curve = live_bytes(lives)
    peak = curve.index(max(curve)) if curve else 0
    yield sorted(lives, key=lambda life: (-life.size, life.born))
    yield sorted(lives, key=lambda life: (-(life.dies - life.born), -life.size))
    yield sorted(lives, key=lambda life: (not life.born <= peak <= life.dies, -life.size, life.born))
    yield list(lives)
    if len(lives) > MIXED:
        return
    mixer = random.Random(0)
    for _ in range(min(MOST_ORDERS, PLACINGS // max(1, len(lives)))):
        by_life = mixer.choice((0.0, mixer.random()))  # half of the orders by size alone, the others by life too
        yield sorted(
            lives, key=lambda life: -life.size * (life.dies - life.born + 1) ** by_life * mixer.uniform(0.2, 1.8)
        )


def _placed(order: Sequence[Lifetime]) -> dict[Node, int]:
    """Each as low as it fits beside those before it."""
    placed: list[tuple[Lifetime, int]] = []
    offsets: dict[Node, int] = {}
    for life in order:
        taken = sorted(
            (offset, offset + other.size)
            for other, offset in placed
            if other.born <= life.dies and life.born <= other.dies and other.size
        )
        offset = 0
        for begin, end in taken:
            if offset + life.size <= begin:
                break
            offset = max(offset, end)
        placed.append((life, offset))
        offsets[life.node] = offset
    return offsets
