"""From the placements of some tensors to those of all, forward and backward until nothing changes.

The one idea: along each axis a node follows what is known around it as long as that costs nothing. Where something has
to be exchanged, or two neighbours wish for different placements, the first such node takes the cheapest, which is said,
and the others follow again. Axes come one after the other, in the order of the mesh; an axis may cut again what another
has cut. The result is a table beside the graph: nodes themselves are shared by all that computes the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tilemesh.core.axes import Axes
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.tensor_placement import SILENT, Mark, P, R, S, TensorPlacement, V, can_follow, exchange_of
from tilemesh.graph.ir import Graph, Node, users
from tilemesh.plan.place.rules import OpaqueRule, Way, summed_once, ways

DTYPE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bool": 1, "int8": 1, "uint8": 1}
"""Others have 2."""
Marks = dict[Node, Mark]
Pins = Mapping[str, TensorPlacement] | Mapping[Node, TensorPlacement]


@dataclass(frozen=True)
class PlacedExchange:
    """What ranks along an axis exchange between a node and a reader of it; `reader` None: before any reads it."""

    node: Node
    reader: Node | None
    axis: str
    before: Mark
    after: Mark
    nbytes: float
    """That each rank sends."""

    @property
    def collective(self) -> str:
        return exchange_of(self.before, self.after)


@dataclass(frozen=True)
class PlacementConflict:
    """A node that was wanted in two placements: those, and what ranks send for each."""

    node: Node
    axis: str
    wishes: tuple[tuple[Mark, float], ...]
    """The first was taken."""

    def __str__(self) -> str:
        words = " or ".join(f"{mark} ({nbytes:,.0f} bytes per rank)" for mark, nbytes in self.wishes)
        return f"{name_of(self.node)} is wanted over {self.axis} as {words}: {self.wishes[0][0]} was taken"


@dataclass(frozen=True)
class PlacedGraph:
    """A graph and where its tensors lie."""

    graph: Graph
    axes: Axes
    placements: Mapping[Node, TensorPlacement]
    taken: Mapping[Node, tuple[TensorPlacement, ...]]
    """What each node takes its inputs as."""
    given: Mapping[Node, TensorPlacement]
    """What each node's own computation gives, before `placements` is made of it."""
    conflicts: tuple[PlacementConflict, ...] = ()
    exchanges: tuple[PlacedExchange, ...] = field(default=())
    first_pass: frozenset[Node] = frozenset()
    """Nodes whose exchanged copies others do not read: these exchange again, and nothing is kept for them."""

    @property
    def nbytes(self) -> float:
        """What each rank sends in all."""
        return sum(exchange.nbytes for exchange in self.exchanges)


def name_of(node: Node) -> str:
    """A node in words."""
    what = node["name"] if node.op == "input" else node["target"] if node.op == "opaque" else node.op
    return f"{what} {list(node.shape)}" + (f" ({node.line})" if node.line else "")


def pins_of_names(
    dims: Mapping[str, Sequence[str]], axes: Mapping[str, str | Sequence[str]]
) -> dict[str, TensorPlacement]:
    """Pins by named dims: `dims` names those of each tensor, `axes` says which axis, or axes in order, cut a name."""
    pins = {}
    for tensor, names in dims.items():
        cuts = [(axis, S(dim)) for dim, name in enumerate(names) for axis in _several(axes.get(name, ()))]
        pins[tensor] = TensorPlacement(tuple(cuts))
    return pins


def _several(axes: str | Sequence[str]) -> Sequence[str]:
    return (axes,) if isinstance(axes, str) else axes


def sent_bytes(before: Mark, after: Mark, ranks: int, nbytes: float) -> float:
    """What each rank sends at least to turn one placement into another. `nbytes`: of the tensor without this axis."""
    kind = exchange_of(before, after)
    if kind in SILENT:
        return 0.0
    others = (ranks - 1) / ranks * nbytes
    return {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others, "all_to_all": others / ranks}[
        kind
    ]


def propagate(
    graph: Graph,
    pins: Pins,
    axes: Axes,
    opaque: Mapping[str, OpaqueRule] = MappingProxyType({}),
    *,
    ends: Pins = MappingProxyType({}),
) -> PlacedGraph:
    """Where all tensors of a graph lie. `pins`: by node, or by the name of an input, or "output" and its number.

    `axes`: (name, size) in the order in which they cut a dim that several of them do. `opaque`: ways of operators of
    torch's own, which are else computed whole by every rank. `ends`: pins that nothing follows: a gradient's, which
    lies as its parameter does, however the pass that makes it is placed.
    """
    pinned, last = _pinned(graph, pins, axes), _pinned(graph, ends, axes)
    placed = _Placing(graph, axes, opaque)
    for axis, ranks in axes:
        marks = [{node: placement[axis] for node, placement in each.items()} for each in (pinned, last)]
        placed.place(axis, ranks, *marks)
    return placed.result()


def _pinned(graph: Graph, pins: Pins, axes: Axes) -> dict[Node, TensorPlacement]:
    names: dict[str, Node] = {node["name"]: node for node in graph.inputs}
    names |= {f"output{number}": node for number, node in enumerate(graph.outputs)}
    pinned, order = {}, [axis for axis, _ in axes]
    inside = set(graph.nodes())
    for key, placement in pins.items():
        if isinstance(key, str) and key not in names:
            raise unknown("tensor", key, names)
        node = names[key] if isinstance(key, str) else key
        for axis, mark in placement:
            if axis not in order:
                raise unknown("axis", axis, order)
            if mark.kind == "S" and not (isinstance(mark.dim, int) and mark.dim < len(node.shape)):
                raise UsageError(f"{name_of(node)} has no dim {mark.dim} to cut over {axis}")
            if mark == P and node.op == "input" and "float" not in node.dtype:
                raise UsageError(f"{name_of(node)} of {node.dtype} as parts of a sum over {axis}: pin it R or S")
        for dim in range(len(node.shape)):
            cut = placement.axes_of(dim)
            pieces = math.prod(dict(axes)[axis] for axis in cut)
            if list(cut) != sorted(cut, key=order.index):
                raise UsageError(
                    f"{name_of(node)} is pinned to be cut along dim {dim} by {', then '.join(cut)}: axes cut in the "
                    f"order of the mesh, {', '.join(order)}; name them so"
                )
            if cut and node.shape[dim] < pieces:
                raise UsageError(f"{name_of(node)}: {node.shape[dim]} along dim {dim} cannot be cut for {pieces} ranks")
        if node in inside:
            pinned[node] = placement
    return pinned


class _Placing:
    def __init__(self, graph: Graph, axes: Axes, opaque: Mapping[str, OpaqueRule]) -> None:
        self.graph, self.axes, self.opaque = graph, axes, opaque
        self.order = graph.nodes()
        self.once = summed_once(self.order)
        self.number = {node: number for number, node in enumerate(self.order)}
        self.readers = {node: list(dict.fromkeys(readers)) for node, readers in users(self.order).items()}
        self.placements: dict[Node, TensorPlacement] = dict.fromkeys(self.order, TensorPlacement())
        self.given: dict[Node, TensorPlacement] = dict.fromkeys(self.order, TensorPlacement())
        self.taken: dict[Node, list[TensorPlacement]] = {
            node: [TensorPlacement()] * len(node.inputs) for node in self.order
        }
        self.conflicts: list[PlacementConflict] = []
        self.exchanges: list[PlacedExchange] = []

    def place(self, axis: str, ranks: int, pinned: Marks, ends: Marks) -> None:
        """Along one axis more."""
        self.axis, self.ranks = axis, ranks
        # What every axis has of a tensor together decides how it can be cut once more.
        self.ways = {node: ways(node, ranks, self.pieces, self.opaque) for node in self.order}
        marks: Marks = {}
        self.touched: set[Node] = set()  # something before them is marked
        self.ahead, self.behind = [*range(len(self.order))], [*range(1 - len(self.order), 1)]
        for known, mark in pinned.items():
            self.mark(known, mark, marks)
        self.follow(marks)
        while (node := self.next_node(marks)) is not None:
            self.mark(node, self.decide(node, marks), marks)
            self.follow(marks)
        for node in self.order:
            marks.setdefault(node, R)
        for node in self.graph.outputs:
            if marks[node] == P and node not in pinned:
                marks[node] = R  # whoever gets it wants the sum
        marks |= {node: mark for node, mark in ends.items() if node not in pinned}
        self.settle(marks)

    def pieces(self, node: Node, dim: int) -> int:
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in self.placements[node].axes_of(dim))

    def nbytes(self, node: Node) -> float:
        """Of what a rank has along the axes so far."""
        if node.dtype == "tuple":
            return 0.0
        size = math.prod(size / self.pieces(node, dim) for dim, size in enumerate(node.shape))
        return size * DTYPE_BYTES.get(node.dtype, 2)

    def cost(self, node: Node, before: Mark, after: Mark) -> float:
        if not can_follow(before, after) or (node.dtype == "tuple" and before != after):
            return math.inf
        return sent_bytes(before, after, self.ranks, self.nbytes(node))

    # Following for nothing ------------------------------------------------------------------------------------------

    def follow(self, marks: Marks) -> None:
        """Mark what follows from what is marked, and costs nothing, until nothing more does; forward first.

        A node waits for one before it that is about to be known: that is not marked, and something before it is.
        """
        while self.ahead or self.behind:
            while self.ahead:
                node = self.order[heapq.heappop(self.ahead)]
                due = (value for value in node.inputs if value in self.touched and value not in marks)
                if node not in marks and all(value.op == "broadcast" for value in due):
                    self.mark(node, self.forward(node, marks), marks)
            while self.behind:
                node = self.order[-heapq.heappop(self.behind)]
                if node not in marks and node.op not in ("constant", "iota"):
                    wishes = {wish for reader in self.readers[node] for wish in self.backward(node, reader, marks)}
                    if node.dtype == "tuple":  # which cannot be turned into another placement afterwards
                        wishes &= {way.output for way in self.ways[node]}
                    self.mark(node, wishes.pop() if len(wishes) == 1 else None, marks)

    def mark(self, node: Node, mark: Mark | None, marks: Marks) -> None:
        """Say what a node is, and look again at what is beside it."""
        if mark is None:
            return
        marks[node] = mark
        waiting = [node]
        while waiting:
            further = [reader for reader in self.readers[waiting.pop()] if reader not in self.touched]
            self.touched.update(further)
            waiting += further
        for reader in self.readers[node]:
            heapq.heappush(self.ahead, self.number[reader])
        for value in (*node.inputs, *(value for reader in self.readers[node] for value in reader.inputs)):
            if value not in marks:
                heapq.heappush(self.behind, -self.number[value])

    def forward(self, node: Node, marks: Marks) -> Mark | None:
        """The one result that the inputs give without an exchange, if they are not all whole."""
        if any(marks.get(value) == V for value in node.inputs) or self.ways[node][0].output == V:
            return V
        known = [marks.get(value, R) for value in node.inputs]
        if all(mark == R for mark in known) or not self.is_worth(node, known) or node.op == "broadcast":
            return None  # what is repeated follows its readers: a bias that is cut does not cut what it is added to
        results = {way.output for way in self.ways[node] if way.output != V and self.is_free(node, way, marks)}
        return self.summed(node, results.pop()) if len(results) == 1 else None

    def summed(self, node: Node, mark: Mark) -> Mark:
        return R if mark == P and node in self.once else mark

    def is_worth(self, node: Node, known: Sequence[Mark]) -> bool:
        """Parts of a sum are passed on as long as they do not become larger."""
        parts = [self.nbytes(value) for value, mark in zip(node.inputs, known, strict=True) if mark == P]
        return not parts or self.nbytes(node) <= sum(parts)

    def is_free(self, node: Node, way: Way, marks: Marks) -> bool:
        """Whether known inputs that are not whole are just what a way takes, and whole ones can be cut for it."""
        for value, mark in zip(node.inputs, way.inputs, strict=True):
            known = marks.get(value)
            is_cut = (
                known == R and mark.kind == "S" and value.dtype != "tuple"
            )  # own rows of what all have: nothing is sent
            if known is not None and known != mark and not is_cut:
                return False
        return True

    def backward(self, node: Node, reader: Node, marks: Marks) -> Iterator[Mark]:
        """As what a reader would have an input, where its own result is cut, or made of parts."""
        result = marks.get(reader)
        if result is None or result.kind not in "SP":
            return
        fits = [way for way in self.ways[reader] if way.output == result and self.is_free(reader, way, marks)]
        wanted = {way.inputs[place] for way in fits for place, value in enumerate(reader.inputs) if value is node}
        if len(wanted) == 1 and (mark := wanted.pop()).kind == "S":
            yield mark

    # Deciding -------------------------------------------------------------------------------------------------------

    def next_node(self, marks: Marks) -> Node | None:
        """The first node that is not marked and has an input that is; then those whose readers are, inputs last."""
        left = [node for node in self.order if node not in marks]
        for node in sorted(left, key=lambda node: node.op == "broadcast"):
            if node.inputs and all(
                value in marks or value.op in ("input", "constant", "iota") for value in node.inputs
            ):
                return node
        return next((node for node in left if node.op == "input"), left[0] if left else None)

    def decide(self, node: Node, marks: Marks) -> Mark:
        """The cheapest of what a node could be, seen from its inputs and its readers."""
        wishes: dict[Mark, float] = {}
        known = {marks.get(value, R) for value in node.inputs}
        is_sum = P in known and known <= {P, R}
        for way in self.ways[node]:
            if way.output == V:
                continue
            pairs = zip(node.inputs, way.inputs, strict=True)
            cost = sum(self.cost(value, marks[value], mark) for value, mark in pairs if value in marks)
            if way.output == P:
                cost += self.cost(node, P, R)  # somebody has to make the sum
            elif is_sum and way.output.kind == "S":
                cost += self.cost(node, way.output, R)  # somebody will want all of it: the sum at once costs no more
            mark = self.summed(node, way.output)
            wishes[mark] = min(cost, wishes.get(mark, math.inf))
        if node.op == "input":
            wanted = [wish for reader in self.readers[node] for wish in self.backward(node, reader, marks)]
            wishes = {mark: sum(self.cost(node, mark, other) for other in wanted) for mark in dict.fromkeys(wanted)}
            wishes = wishes or {R: 0.0}
        if not wishes or min(wishes.values()) == math.inf:
            raise UsageError(
                f"{name_of(node)} needs what ranks of {self.axis} have each for itself (V): make it R there"
            )
        # Of equals, where anything is cut, what leaves each rank less to compute.
        is_whole = all(marks.get(value, R) == R for value in node.inputs)
        order = "RSP" if is_whole or is_sum else "SRP"
        best = sorted(wishes.items(), key=lambda wish: (wish[1], order.index(wish[0].kind), str(wish[0])))
        asked = {marks[value] for value in node.inputs if value in marks and marks[value].kind == "S"}
        if node.op == "input":
            asked = set(wishes)
        if len(asked) > 1 and best[0][1] > 0 and len(best) > 1:
            self.conflicts.append(PlacementConflict(node, self.axis, tuple(best[:2])))
        return best[0][0]

    # What is exchanged then -----------------------------------------------------------------------------------------

    def settle(self, marks: Marks) -> None:
        """For each node the cheapest way from its inputs' placements to its own, and what is exchanged for it."""
        exchanges: dict[tuple[Node, Mark], list[Node]] = {}
        made: list[PlacedExchange] = []
        for node in self.order:
            mark = marks[node]
            way = (
                Way((), mark)
                if node.op == "input"
                else min(self.ways[node], key=lambda way: self.price(node, way, marks))
            )
            if self.price(node, way, marks)[0] == math.inf:
                raise UsageError(
                    f"{name_of(node)} is {mark} over {self.axis}, and no way leads there from "
                    f"{', '.join(str(marks[value]) for value in node.inputs)}: pin it otherwise, or what it reads"
                )
            for value, wanted in zip(node.inputs, way.inputs, strict=True):
                if wanted != marks[value]:
                    exchanges.setdefault((value, wanted), []).append(node)
            if way.output != mark:
                nbytes = self.cost(node, way.output, mark)
                made.append(PlacedExchange(node, None, self.axis, way.output, mark, nbytes))
            self.given[node] = self.given[node].put(self.axis, way.output)
            self.taken[node] = [old.put(self.axis, new) for old, new in zip(self.taken[node], way.inputs, strict=True)]
        for (value, wanted), readers in exchanges.items():
            nbytes = self.cost(value, marks[value], wanted)
            made += [
                PlacedExchange(value, reader, self.axis, marks[value], wanted, nbytes if not turn else 0.0)
                for turn, reader in enumerate(readers)  # made once, and read by all that want it so
            ]
        self.exchanges += made
        for node in self.order:
            self.placements[node] = self.placements[node].put(self.axis, marks[node])

    def price(self, node: Node, way: Way, marks: Marks) -> tuple[float, bool, int]:
        pairs = zip(node.inputs, way.inputs, strict=True)
        cost = sum(self.cost(value, marks[value], mark) for value, mark in pairs)
        cost += self.cost(node, way.output, marks[node])
        return cost, way.output != marks[node], way.inputs.count(R)

    def result(self) -> PlacedGraph:
        taken = {node: tuple(placements) for node, placements in self.taken.items()}
        return PlacedGraph(
            self.graph, self.axes, self.placements, taken, self.given, tuple(self.conflicts), tuple(self.exchanges)
        )
