"""A graph as a problem of choosing: which operators are placed alike, in which ways, and what that costs.

The one idea: few operators decide, the others follow. A product, an input, the first elementwise operator of its size
are variables; views, sums and further elementwise operators lie as what they read. Layers that are alike share
their variables: they are chosen once. A chooser's "optimal" means: among these choices.

Exchanged copies do not outlive their pass: what the backward pass needs again is exchanged again, as FSDP does.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilemesh.core.errors import UsageError
from tilemesh.core.tensor_placement import P, R, S, TensorPlacement, V
from tilemesh.graph.ir import Graph, Node, ordered, users
from tilemesh.plan.place.combine import combined
from tilemesh.plan.place.cost import MeshCost
from tilemesh.plan.place.local import local_graph
from tilemesh.plan.place.problem import Moment, PlacementProblem, Transfer
from tilemesh.plan.place.propagate import PlacedExchange, PlacedGraph, name_of
from tilemesh.plan.place.rules import ELEMENTWISE, Before, OpaqueRule, Way, owner, summed_once, ways

Choice = tuple[tuple[TensorPlacement, ...], TensorPlacement]
"""As what an operator takes its inputs, and what it gives."""
ROUNDS = 3
"""Operators are alike if all that is up to so many steps away is."""
_SOURCES = ("constant", "iota")
_PARTIAL = ("dot", "sum", "take", "put_add", "conv", "conv_input", "conv_weight")
_FOLLOWING = ("reshape", "transpose", "slice", "pad", "reverse", "sum", "amax", "argmax", "item", "lay")


class PlacementSpace:
    """All placements of a graph that are considered.

    `carried`: outputs that lie as inputs do, such as new weights; `in_place`: they take no memory of their own. `ends`:
    outputs that are wanted in a placement. `opaque`: ways of operators of torch's own.
    """

    def __init__(
        self, graph: Graph, cost: MeshCost, carried: Mapping[Node, Node] | None = None, is_shared: bool = True,
        limit_bytes: float = math.inf, *, in_place: bool = True,
        ends: Mapping[Node, TensorPlacement] = MappingProxyType({}),
        opaque: Mapping[str, OpaqueRule] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.graph, self.cost, self.in_place, self.opaque = graph, cost, in_place, opaque
        self.order = _scheduled(graph)
        self.readers, self._once = users(self.order), summed_once(self.order)
        self.carried = {new: old for new, old in (carried or {}).items() if old in self.readers}
        self.ends = {**dict.fromkeys(carried or {}, TensorPlacement()), **ends}  # an input that nobody reads is whole
        self._forward = frozenset(ordered(graph.outputs[:1]))
        self._free = self._constants()
        self._ways: dict[object, list[Choice]] = {}
        self._kinds: dict[object, int] = {}
        self.kind: dict[Node, int] = {}
        self.variable: list[int] = []
        """Of each kind, as the following."""
        self.choices: list[tuple[Choice, ...]] = []
        self.sample: list[Node] = []
        self._partial: set[Node] = set()
        """Values that elementwise operators do not follow: that may be parts of a sum, or repeat a smaller one."""
        self._assign(_colours(self.order, self.readers) if is_shared else {})
        self.problem = self._problem(limit_bytes)

    # Who decides ----------------------------------------------------------------------------------------------------

    def _constants(self) -> set[Node]:
        """What every rank has for nothing."""
        free: set[Node] = set()
        for node in self.order:
            is_view = not node.launched and node.op != "input"
            if node.op in _SOURCES or (is_view and all(value in free for value in node.inputs)):
                free.add(node)
        return free

    def _leader(self, node: Node) -> int | None:
        """Which input a node follows."""
        if node.op in _FOLLOWING:
            return 0
        if node.op not in ELEMENTWISE:
            return None
        fits = [
            place
            for place, value in enumerate(node.inputs)
            if value.shape == node.shape and value not in self._free and value not in self._partial
            and (value.op != "input" or all(reader.op in ELEMENTWISE for reader in self.readers[value]))
        ]  # fmt: skip
        return min(fits, key=lambda place: (node.inputs[place].op == "input", place), default=None)

    def _assign(self, colours: Mapping[Node, int]) -> None:
        roots: dict[object, int] = {}
        for node in self.order:
            if node in self._free:
                continue
            leader = self._leader(node)
            followed = node.inputs[leader] if leader is not None else None
            if leader is None or followed is None or followed in self._free:
                adds = self._is_sum(node)
                root = (colours.get(node, node), adds)
                variable = roots.setdefault(root, len(roots))
                self.kind[node] = self._kind((root,), variable, node, self._own_choices(node, adds))
                if adds or node.op in _PARTIAL or node.op == "broadcast":
                    self._partial.add(node)
                continue
            above = self.kind[followed]
            lies = (self.variable[above], tuple(given for _, given in self.choices[above]))
            key = (_signature(node), node in self._once, leader, *lies)
            if key in self._kinds:
                self.kind[node] = self._kinds[key]
            else:
                own = tuple(self._following(node, leader, given) for _, given in self.choices[above])
                self.kind[node] = self._kind(key, self.variable[above], node, own)
            if node.op in _PARTIAL or (followed in self._partial and not node.launched):
                self._partial.add(node)

    def _kind(self, key: object, variable: int, node: Node, choices: tuple[Choice, ...]) -> int:
        if key not in self._kinds:
            self._kinds[key] = len(self.variable)
            self.variable.append(variable)
            self.choices.append(choices)
            self.sample.append(node)
        return self._kinds[key]

    def _is_sum(self, node: Node) -> bool:
        """Of products, which may all be parts still."""
        return node.op == "add" and all(value in self._partial for value in node.inputs)

    def _own_choices(self, node: Node, adds: bool) -> tuple[Choice, ...]:
        def allowed(way: Way) -> bool:
            marks = (*way.inputs, way.output)
            if node.op == "broadcast" and way.inputs[0] == R and way.output != R:
                return False  # repeated whole and cut after, which sends nothing
            is_made_once = way.output != P or node not in self._once
            return V not in marks and is_made_once and (P not in way.inputs or (adds and set(marks) == {P}))

        key = (_signature(node), adds, node in self._once)
        if key not in self._ways:
            self._ways[key] = list(self._combined(node, allowed))
        if not self._ways[key]:
            raise UsageError(f"{name_of(node)} differs from rank to rank (V): no placement can be chosen for it")
        return tuple(self._ways[key])

    def _combined(self, node: Node, allowed: Callable[[Way], bool]) -> Iterator[Choice]:
        """Ways along the axes, one after the other; an axis may cut again what another has cut."""
        found: list[Choice] = [((TensorPlacement(),) * len(node.inputs), TensorPlacement())]
        for axis, ranks in self.cost.axes:
            further = []
            for taken, given in found:
                before = self._pieces(node, taken, given)
                options = (
                    _input_ways(node, ranks, before) if node.op == "input" else ways(node, ranks, before, self.opaque)
                )
                for way in filter(allowed, options):
                    inputs = tuple(old.put(axis, new) for old, new in zip(taken, way.inputs, strict=True))
                    further.append((inputs, given.put(axis, way.output)))
            found = further
        yield from dict.fromkeys(found)

    def _following(self, node: Node, leader: int, placement: TensorPlacement) -> Choice:
        """The way that takes one input as it lies; along axes where there is none, that takes all whole."""
        taken, given = (TensorPlacement(),) * len(node.inputs), TensorPlacement()
        bad = (V, P) if node in self._once else (V,)
        for axis, ranks in self.cost.axes:
            options = ways(node, ranks, self._pieces(node, taken, given), self.opaque)
            fits = [way for way in options if way.inputs[leader] == placement[axis] and way.output not in bad]
            way = min(fits, key=lambda way: way.inputs.count(P), default=options[0])
            taken = tuple(old.put(axis, new) for old, new in zip(taken, way.inputs, strict=True))
            given = given.put(axis, way.output)
        return taken, given

    def _pieces(self, node: Node, taken: Sequence[TensorPlacement], given: TensorPlacement) -> Before:
        def before(value: Node, dim: int) -> int:
            if value is node:
                return self.cost.pieces(given, dim)
            slots = [place for place, each in zip(taken, node.inputs, strict=True) if each is value]
            return max(self.cost.pieces(place, dim) for place in slots)

        return before

    # What it costs --------------------------------------------------------------------------------------------------

    def _problem(self, limit_bytes: float) -> PlacementProblem:
        count = max(self.variable, default=-1) + 1
        many = Counter(self.kind.values())
        names = [""] * count
        seconds: list[list[float]] = [[] for _ in range(count)]
        for kind, node in enumerate(self.sample):
            variable, own = self.variable[kind], self.choices[kind]
            names[variable] = names[variable] or name_of(node)
            seconds[variable] = seconds[variable] or [0.0] * len(own)
            for k, (taken, given) in enumerate(own):
                seconds[variable][k] += many[kind] * self.cost.compute_s(node, taken, given)
        transfers, slots = self._transfers()
        values = tuple(
            (self.variable[kind], tuple(self.cost.nbytes(node, given) for _, given in self.choices[kind]))
            for kind, node in enumerate(self.sample)
        )
        table = tuple(tuple(own) for own in seconds)
        return PlacementProblem(tuple(names), table, transfers, values, self._moments(slots), limit_bytes)

    def reads(self) -> Iterator[tuple[Node, list[tuple[Node | None, int]]]]:
        """Each value, and who reads it in one pass: (operator, input), or for an output nobody and -1."""
        forward, places = self._forward, {node: place for place, node in enumerate(self.order)}
        outputs = set(self.graph.outputs)
        for node in self.order:
            if node in self._free:
                continue
            passes: dict[bool, list[tuple[Node | None, int]]] = {}
            for reader in sorted(dict.fromkeys(self.readers[node]), key=places.__getitem__):
                slots = [(reader, slot) for slot, value in enumerate(reader.inputs) if value is node]
                passes.setdefault(reader in forward, []).extend(slots)
            if node in outputs:
                passes.setdefault(node in forward, []).append((None, -1))
            yield from ((node, group) for group in passes.values())

    def wants(self, node: Node, reader: Node | None, slot: int) -> tuple[int, tuple[TensorPlacement, ...]]:
        """Whose choice decides in which placement a value is read, and that placement."""
        if reader is not None:
            kind = self.kind[reader]
            return self.variable[kind], tuple(taken[slot] for taken, _ in self.choices[kind])
        if node in self.carried:
            kind = self.kind[self.carried[node]]
            return self.variable[kind], tuple(given for _, given in self.choices[kind])
        kind = self.kind[node]  # whoever gets it wants the sum
        return self.variable[kind], tuple(self.ends.get(node, _summed(given)) for _, given in self.choices[kind])

    def result(self, node: Node, choice: Sequence[int]) -> TensorPlacement:
        """As what an output is given."""
        variable, wants = self.wants(node, None, -1)
        return wants[choice[variable]]

    def _transfers(self) -> tuple[tuple[Transfer, ...], dict[tuple[Node, int], list[tuple[int, int]]]]:
        found: dict[object, int] = {}
        transfers: list[Transfer] = []
        counts: Counter[int] = Counter()
        slots: dict[tuple[Node, int], list[tuple[int, int]]] = {}
        for node, group in self.reads():
            wanted = [self.wants(node, reader, slot) for reader, slot in group]
            readers = dict.fromkeys(wanted)
            key = (self.kind[node], tuple(readers))
            if key not in found:
                transfer = self._transfer(node, list(readers))
                found[key] = -1 if transfer is None else len(transfers)
                transfers += [] if transfer is None else [transfer]
            if (at := found[key]) >= 0:
                counts[at] += 1
                places = {each: place for place, each in enumerate(readers)}
                for (reader, slot), each in zip(group, wanted, strict=True):
                    if reader is not None:
                        slots.setdefault((reader, slot), []).append((at, places[each]))
        return tuple(replace(each, count=counts[at]) for at, each in enumerate(transfers)), slots

    def _transfer(self, node: Node, readers: list[tuple[int, tuple[TensorPlacement, ...]]]) -> Transfer | None:
        """None where nothing is ever exchanged."""
        kind = self.kind[node]
        states = {given: at for at, given in enumerate(dict.fromkeys(given for _, given in self.choices[kind]))}
        targets = {each: at for at, each in enumerate(dict.fromkeys(p for _, wants in readers for p in wants))}
        figures = [[self.cost.exchange(node, state, target) for target in targets] for state in states]
        same = all(variable == self.variable[kind] for variable, _ in readers)
        own = [given for _, given in self.choices[kind]]
        if same and all(
            self.cost.exchange(node, given, wants[k])[0] == 0 for _, wants in readers for k, given in enumerate(own)
        ):
            return None
        if all(seconds == 0 for row in figures for seconds, _ in row):
            return None
        sizes = [self.cost.nbytes(node, target) for target in targets]
        return Transfer(
            self.variable[kind],
            tuple(states[given] for given in own),
            tuple((variable, tuple(targets[each] for each in wants)) for variable, wants in readers),
            tuple(tuple(seconds for seconds, _ in row) for row in figures),
            tuple(tuple(sent for _, sent in row) for row in figures),
            tuple(tuple(size if row[at][0] else 0.0 for at, size in enumerate(sizes)) for row in figures),
        )

    def _moments(self, slots: Mapping[tuple[Node, int], list[tuple[int, int]]]) -> tuple[Moment, ...]:
        """When each operator runs; of moments at which the same operator runs, those at which most lives."""
        places = {node: place for place, node in enumerate(self.order)}
        dies: dict[Node, int] = {}
        for place, node in enumerate(self.order):
            for value in node.inputs:
                dies[owner(value)] = place
        kept = {owner(node) for node in self.graph.outputs}
        ending: dict[int, list[Node]] = {}
        for node in self.order:
            if self._has_memory(node) and node not in kept and node.op != "input":
                ending.setdefault(dies.get(node, places[node]), []).append(node)
        living = Counter(self.kind[node] for node in self.order if node.op == "input" and node in self.kind)
        moments: dict[tuple[int, tuple[tuple[int, int], ...]], list[Counter[int]]] = {}
        for place, node in enumerate(self.order):
            if node.op == "input" or node in self._free:
                continue
            if self._has_memory(node) and not (self.in_place and node in self.carried):
                living[self.kind[node]] += 1
            copies = tuple(each for slot in range(len(node.inputs)) for each in slots.get((node, slot), ()))
            same = moments.setdefault((self.kind[node], copies), [])
            if not any(living <= other for other in same):
                same[:] = [other for other in same if not other <= living] + [living.copy()]
            for value in ending.get(place, ()):
                living[self.kind[value]] -= 1
        return tuple(Moment(dict(+each), copies) for (_, copies), several in moments.items() for each in several)

    def _has_memory(self, node: Node) -> bool:
        return node.launched and node not in self._free and node.dtype != "tuple"

    # From and to placements -----------------------------------------------------------------------------------------

    def pinned(self, pins: Mapping[str, TensorPlacement]) -> dict[int, list[int]]:
        """The choices that are left to each variable where these inputs lie so."""
        names = {node["name"]: node for node in self.graph.inputs}
        left: dict[int, list[int]] = {}
        for name, placement in pins.items():
            if names[name] not in self.kind:
                continue
            kind = self.kind[names[name]]
            fits = [k for k, (_, given) in enumerate(self.choices[kind]) if given == placement]
            others = left.get(self.variable[kind], fits)
            left[self.variable[kind]] = [k for k in fits if k in others]
        return left

    def program(self, choice: Sequence[int], rank: int) -> Graph:
        """What one rank runs: its parts of the inputs in, its parts of the results out."""
        placed, results = self.placed(choice), [self.result(each, choice) for each in self.graph.outputs]
        return combined(local_graph(placed, rank, results), local_graph(placed, 0, results) if rank else None)

    def placed(self, choice: Sequence[int]) -> PlacedGraph:
        """The graph as it is placed by a choice for each variable."""
        placements: dict[Node, TensorPlacement] = dict.fromkeys(self.order, TensorPlacement())
        taken: dict[Node, tuple[TensorPlacement, ...]] = {}
        for node in self.order:
            if node in self._free:
                taken[node] = (TensorPlacement(),) * len(node.inputs)
            else:
                taken[node], placements[node] = self.choices[self.kind[node]][choice[self.variable[self.kind[node]]]]
        given = dict(placements)
        exchanges: list[PlacedExchange] = []
        for node, group in self.reads():
            done: set[TensorPlacement] = set()
            for reader, slot in group:
                variable, wants = self.wants(node, reader, slot)
                wanted = wants[choice[variable]]
                for (axis, old, new), _, sent in self.cost.steps(node, given[node], wanted):
                    nbytes = 0.0 if wanted in done else sent  # made once, and read by all that want it so
                    exchanges.append(PlacedExchange(node, reader, axis, old, new, nbytes))
                done.add(wanted)
                if reader is None and not self.readers[node]:
                    placements[node] = wanted
        return PlacedGraph(self.graph, self.cost.axes, placements, taken, given, (), tuple(exchanges), self._forward)


def _scheduled(graph: Graph) -> list[Node]:
    """The first output, then others by how deep they lie: the last layer's gradients come first, and are used up."""
    depth: dict[Node, int] = {}
    for node in graph.nodes():
        depth[node] = 1 + max((depth[value] for value in node.inputs), default=0)
    first, *others = graph.outputs
    return ordered([first, *sorted(others, key=depth.__getitem__)])


def _signature(node: Node) -> object:
    return node.op, node.attributes, node.typed, tuple(value.typed for value in node.inputs)


def _colours(order: Sequence[Node], readers: Mapping[Node, list[Node]]) -> dict[Node, int]:
    """Nodes of one colour are alike, and so are their neighbours; numbers in names do not count."""
    numbers: dict[object, int] = {}

    def number(key: object) -> int:
        return numbers.setdefault(key, len(numbers))

    def own(node: Node) -> object:
        if node.op == "input":
            return re.sub(r"\d+", "*", node["name"]), node.typed
        return _signature(node)

    colours = {node: number(own(node)) for node in order}
    for _ in range(ROUNDS):
        colours = {
            node: number(
                (
                    colours[node],
                    tuple(colours[value] for value in node.inputs),
                    tuple(sorted(colours[reader] for reader in readers[node])),
                )
            )
            for node in order
        }
    return colours


def _summed(placement: TensorPlacement) -> TensorPlacement:
    return TensorPlacement(tuple(pair for pair in placement if pair[1] != P))


def _input_ways(node: Node, ranks: int, before: Before) -> list[Way]:
    """An input may lie whole, or be cut along any dim that has room."""
    room = [dim for dim in range(len(node.shape)) if node.shape[dim] >= ranks * before(node, dim)]
    return [Way((), R), *(Way((), S(dim)) for dim in room)]
