"""Elementwise and reduction regions: groups of operators that become one generated kernel each. Plain Python.

A region works on `rows` x `columns` elements in the order of memory. Its values are *full* (one number per element) or
*row* values (one per row: the sum or the maximum of a row, and what is computed from them); sums over the rows (one
number per column, as the gradient of a bias) may leave it. Reshapes do not change the order of elements, so they are
free inside; operands from outside may be broadcast, and may lie in memory in any way.

`fused` puts every operator into the region of one of its inputs where that is possible without a cycle, and joins
regions that an operator reads together. A region with a single operator stays that operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from tilemesh.graph.ir import Graph, Node, make, ordered, rebuilt, users
from tilemesh.graph.memory import owner
from tilemesh.graph.ops import REDUCTIONS, Shape, primitive
from tilemesh.graph.rewrite import number_of
from tilemesh.graph.rotations import swapped, swapped_source

FULL, ROW, COLUMN = "full", "row", "column"
NARROW = ("bfloat16", "float16")
MOST_COLUMNS = 1 << 18  # of a row that is reduced: beyond, few rows are left and one reduction has to be shared

MOST_SUMS = 16_384  # sums over the rows that one kernel keeps: they stay in registers


@dataclass
class _Region:
    """A region that grows: its elements, its columns once a reduction decides them, and the level of each member."""

    space: int
    columns: int | None
    levels: dict[Node, str]
    cuts: set[int]  # products of trailing sizes that occur: each divides the next, so that one index serves all
    before: set[int] = field(default_factory=set)

    @property
    def rows(self) -> int:
        return self.space // self.columns if self.columns else -1


def fused(graph: Graph, serves: Callable[[Node], bool], smallest: int = 2, swaps: bool = False) -> Graph:
    """The graph with every region of at least `smallest` operators as one node.

    serves: what a kernel can compute. swaps: whether it can read an operand with its halves swapped (`rotations.py`).
    """
    return _Fusion(graph, serves, swaps).run(smallest)


def fusible(node: Node) -> bool:
    """Whether a node is of a kind that regions are made of."""
    if primitive(node.op).kind == "elementwise":
        return prod(node.shape) > 0
    return node.op in REDUCTIONS and prod(node.inputs[0].shape) > 0


def trailing(node: Node) -> int | None:
    """The elements of a row, where a reduction is over the last dims."""
    dims, shape = node["dims"], node.inputs[0].shape
    return prod(shape[dims[0] :]) if list(dims) == list(range(dims[0], len(shape))) else None


def leading(node: Node) -> int | None:
    """The elements of a row, where a sum is over the first dims."""
    dims, shape = node["dims"], node.inputs[0].shape
    return prod(shape[len(dims) :]) if node.op == "sum" and list(dims) == list(range(len(dims))) else None


def spread(node: Node) -> int | None:
    """How many elements each element is repeated to, where a broadcast only adds dims at the end."""
    shape, dims = node.shape, node["dims"]
    sized = [dim for dim, size in enumerate(shape) if size != 1]
    kept = [dim for dim in dims if shape[dim] != 1]
    return prod(tuple(shape[dim] for dim in sized[len(kept) :])) if kept == sized[: len(kept)] else None


def cuts_of(shape: Shape) -> set[int]:
    """The products of the last sizes of a shape: 1, and where each dim begins."""
    cuts, total = {1}, 1
    for size in reversed(shape):
        total *= size
        cuts.add(total)
    return cuts


def chained(cuts: Iterable[int]) -> bool:
    order = sorted(cuts)
    return all(more % less == 0 for less, more in pairwise(order))


class _Fusion:
    def __init__(self, graph: Graph, serves: Callable[[Node], bool], swaps: bool) -> None:
        self.graph, self.serves, self.swaps = graph, serves, swaps
        self.order = graph.nodes()
        self.groups: dict[int, _Region | None] = {}  # None: a node that stays alone
        self.before: dict[int, set[int]] = {}
        self.place: dict[Node, int] = {}

    def run(self, smallest: int) -> Graph:
        for number, node in enumerate(self.order):
            self.place[node] = number
            self.groups[number], self.before[number] = None, set()
            if fusible(node) and self.serves(node) and number_of(node) is None:
                self._grouped(node, number)
            if self.place[node] == number:
                self.before[number] |= self._outside(node, self.groups[number])
        return _Building(self, smallest).run()

    def _grouped(self, node: Node, number: int) -> None:
        """Puts a node into the region of an input, or begins one."""
        nearby = {self.place[owner(value)] for value in node.inputs if owner(value) in self.place}
        # The largest first: one that has an element for each row of another becomes part of that one.
        spaces = {place: group.space for place in nearby if (group := self.groups[place]) is not None}
        candidates = sorted(spaces, key=lambda place: (spaces[place], place), reverse=True)
        for chosen in candidates:
            joined = self._joined(node, chosen)
            if joined is not None:
                self._take(node, chosen, joined)
                for other in candidates:
                    if other != chosen:
                        self._merge(chosen, other)
                return
        self.groups[number] = self._begun(node)

    def _begun(self, node: Node) -> _Region | None:
        if primitive(node.op).kind == "elementwise":
            cuts = cuts_of(node.shape)
            return _Region(prod(node.shape), None, {node: FULL}, cuts) if chained(cuts) else None
        shape = node.inputs[0].shape
        columns = trailing(node)
        if columns is None or columns == 1 or columns > MOST_COLUMNS or columns == prod(shape):
            return None
        cuts = cuts_of(shape)
        return _Region(prod(shape), columns, {node: ROW}, cuts) if chained(cuts) else None

    def _joined(self, node: Node, place: int) -> tuple[str, int | None, set[int]] | None:
        """The level that a node has in a region, the region's columns and cuts then; None where it does not fit."""
        group = self.groups[place]
        assert group is not None
        if primitive(node.op).kind != "elementwise":
            return self._reduction(node, place, group)
        count = prod(node.shape)
        if count == group.space:
            level = FULL
        elif group.columns and count == group.rows:
            level = ROW
        else:
            return None
        for value in node.inputs:
            if self.level(value, group) not in (None, level):
                return None
        cuts = cuts_of(node.shape) if level == FULL else {cut * (group.columns or 1) for cut in cuts_of(node.shape)}
        return self._fits(node, place, group, level, group.columns, cuts)

    def _reduction(self, node: Node, place: int, group: _Region) -> tuple[str, int | None, set[int]] | None:
        value = node.inputs[0]
        if prod(value.shape) != group.space or self.level(value, group) != FULL:
            return None
        for level, columns in ((ROW, trailing(node)), (COLUMN, leading(node))):
            most = MOST_COLUMNS if level == ROW else MOST_SUMS
            if columns is None or columns in (1, group.space) or columns > most:
                continue
            if group.columns in (None, columns):
                return self._fits(node, place, group, level, columns, cuts_of(value.shape))
        return None

    def _fits(
        self, node: Node, place: int, group: _Region, level: str, columns: int | None, cuts: set[int]
    ) -> tuple[str, int | None, set[int]] | None:
        together = group.cuts | cuts | ({columns} if columns else set())
        if not chained(together) or self._reaches(self._outside(node, group), place):
            return None
        return level, columns, together

    def level(self, value: Node, group: _Region) -> str | None:
        """How a region can read a value of its own: full or row; None: it comes from outside; "" where it cannot."""
        while value.op == "reshape" and value not in group.levels:
            value = value.inputs[0]
        if value in group.levels:
            return group.levels[value] if group.levels[value] != COLUMN else ""
        if value.op == "broadcast" and group.columns is not None and spread(value) == group.columns:
            inner = value.inputs[0]
            while inner.op == "reshape" and inner not in group.levels:
                inner = inner.inputs[0]
            if group.levels.get(inner) == ROW:
                return FULL
        return "" if owner(value) in group.levels else None

    def _outside(self, node: Node, group: _Region | None) -> set[int]:
        """The places that a node waits for, outside the region that it is in."""
        waits = set()
        for value in node.inputs:
            inside = group is not None and self.level(value, group) is not None
            if not inside:
                waits.add(self.place[value])
        return waits

    def _reaches(self, starts: Iterable[int], goal: int) -> bool:
        """Whether what these need includes the region `goal`."""
        seen, waiting = set(), list(starts)
        while waiting:
            place = waiting.pop()
            if place == goal:
                return True
            if place not in seen:
                seen.add(place)
                waiting += self.before[place]
        return False

    def _take(self, node: Node, place: int, joined: tuple[str, int | None, set[int]]) -> None:
        group = self.groups[place]
        assert group is not None
        level, group.columns, group.cuts = joined
        self.before[place] |= self._outside(node, group)
        group.levels[node] = level
        del self.groups[self.place[node]], self.before[self.place[node]]
        self.place[node] = place

    def _merge(self, place: int, other: int) -> None:
        """Joins the region `other` into this one, where both have the same elements, or `other` has one for each row
        of this one, and no cycle comes of it."""
        group, second = self.groups[place], self.groups[other]
        assert group is not None
        assert second is not None
        scale = group.columns if group.columns and second.space == group.rows and second.columns is None else 1
        levels = second.levels if scale == 1 else dict.fromkeys(second.levels, ROW)
        known = {columns for columns in (group.columns, second.columns) if columns}
        cuts = group.cuts | {cut * scale for cut in second.cuts} | known
        if second.space * scale != group.space or len(known) > 1 or not chained(cuts):
            return
        merged = _Region(group.space, next(iter(known), None), {**group.levels, **levels}, cuts)
        members = [member for member in self.order if member in merged.levels]
        if any(not self._reads(merged, member, value) for member in members for value in member.inputs):
            return
        # What the joined region waits for: views between the two are inside it now.
        waits = {wait for member in members for wait in self._outside(member, merged)} - {place, other}
        if self._reaches(waits, place) or self._reaches(waits, other):
            return
        self.groups[place] = merged
        for member in second.levels:
            self.place[member] = place
        for each in self.before.values():
            if other in each:
                each.discard(other)
                each.add(place)
        self.before[place] = waits
        del self.groups[other], self.before[other]

    def _reads(self, group: _Region, member: Node, value: Node) -> bool:
        """Whether a region can give a value to one of its members, or reads it from outside."""
        level = self.level(value, group)
        if level is None:
            return True
        wanted = group.levels[member] if primitive(member.op).kind == "elementwise" else FULL
        return level == wanted


class _Building:
    """The graph in which each region is a node, and its results are items of it."""

    def __init__(self, fusion: _Fusion, smallest: int) -> None:
        self.fusion = fusion
        self.readers = users(fusion.order)
        self.new: dict[Node, Node] = {}
        self.inside: dict[Node, _Region] = {}
        for group in fusion.groups.values():
            if group is not None and len(group.levels) >= smallest:
                self.inside |= dict.fromkeys(group.levels, group)

    def run(self) -> Graph:
        graph = self.fusion.graph
        for node in ordered(graph.outputs, self._reads):
            group = self.inside.get(node)
            if group is None:
                self.new[node] = rebuilt(node, [self.new[value] for value in node.inputs])
            elif node not in self.new:
                self._region(group)
        return Graph(graph.inputs, tuple(self.new[node] for node in graph.outputs))

    def _reads(self, node: Node) -> tuple[Node, ...]:
        group = self.inside.get(node)
        return node.inputs if group is None else self._needs(group)

    def _members(self, group: _Region) -> list[Node]:
        return [node for node in self.fusion.order if node in group.levels]

    def _needs(self, group: _Region) -> tuple[Node, ...]:
        """What a region reads from outside, in the order of its members; broadcasts are its own."""
        needs: dict[Node, None] = {}
        for node in self._members(group):
            for value in node.inputs:
                if number_of(value) is None and self.fusion.level(value, group) is None and not _counts(value, group):
                    needs[self._source(value, group)] = None
        return tuple(needs)

    def _source(self, value: Node, group: _Region) -> Node:
        """What is read from outside: a broadcast is done by the kernel's index, and so is a swap of halves; a vector
        that is widened first, as a norm's weights are, is widened as it is read."""
        if value.op == "broadcast":
            return value.inputs[0].inputs[0] if self._widened(value) else value.inputs[0]
        swapped = self._swapped(value)
        return value if swapped is None or prod(value.shape) != group.space else swapped

    def _widened(self, value: Node) -> bool:
        """Whether a value is a 16-bit one, repeated after it became a wider one."""
        inner = value.inputs[0]
        narrow = inner.op == "cast" and inner.inputs[0].dtype in NARROW and inner.dtype in ("float32", "float64")
        return narrow and self.fusion.serves(inner) and inner not in self.inside

    def _swapped(self, value: Node) -> Node | None:
        return swapped_source(value) if self.fusion.swaps else None

    def _region(self, group: _Region) -> None:
        needs = self._needs(group)
        body: dict[Node, Node] = {
            value: make("input", name=f"i{place}", shape=value.shape, dtype=value.dtype)
            for place, value in enumerate(needs)
        }
        members = self._members(group)
        for node in members:
            body[node] = rebuilt(node, [self._inner(value, body) for value in node.inputs])
        outputs = [node for node in members if self._leaves(node, group)]
        inner = Graph(tuple(body[value] for value in needs), tuple(body[node] for node in outputs))
        columns = group.columns or 0
        region = make("region", *(self.new[value] for value in needs), body=inner, space=group.space, columns=columns)
        for place, node in enumerate(outputs):
            self.new[node] = make("item", region, index=place, shape=node.shape, dtype=node.dtype)

    def _inner(self, value: Node, body: dict[Node, Node]) -> Node:
        """A value as the region's own program reads it: reshapes, broadcasts and numbers are copied into it."""
        if value in body:
            return body[value]
        if value.op == "broadcast" and self._widened(value) and value.inputs[0] not in body:
            wide = value.inputs[0]
            repeated = rebuilt(value, [body[wide.inputs[0]]])
            return rebuilt(wide, [repeated])
        if value.op in ("constant", "broadcast", "reshape", "iota"):
            return rebuilt(value, [self._inner(each, body) for each in value.inputs])
        source = self._swapped(value)
        if source is not None:
            return swapped(self._inner(source, body))
        raise AssertionError(f"{value} is outside of its region")

    def _leaves(self, node: Node, group: _Region) -> bool:
        """Whether anything outside reads a member, directly or by another view of it."""
        if node in self.fusion.graph.outputs:
            return True
        waiting = [(node, reader) for reader in self.readers[node]]
        while waiting:
            value, reader = waiting.pop()
            if reader in group.levels:
                if self.fusion.level(value, group) is None:
                    return True
                continue
            if reader.op not in ("reshape", "broadcast") or reader in self.fusion.graph.outputs:
                return True
            waiting += [(reader, each) for each in self.readers[reader]]
        return False


def _counts(value: Node, group: _Region) -> bool:
    """Whether a value is the number of each column, at every element: a kernel has it without reading it."""
    last = value.op == "iota" and value["dim"] == len(value.shape) - 1
    return last and value.shape[-1] == group.columns and prod(value.shape) == group.space
