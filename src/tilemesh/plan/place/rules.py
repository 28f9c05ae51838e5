"""How each primitive of the graph can be computed on ranks along one axis: one row per primitive.

A *way* says in which placement a node takes its inputs and in which it then gives its result, nothing being exchanged:
each rank applies the same primitive to what it has (`local.py`). The first way is always that every rank computes all
of it. What is not a row here is not done: a maximum of parts of a sum, a window that reaches into a neighbour's rows,
a reshape that would leave a rank rows which do not follow one another.

`tests/pure/test_place_rules.py` holds every row against numpy on a simulated mesh.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tilemesh.core.shard import share
from tilemesh.core.tensor_placement import Mark, P, R, S, V
from tilemesh.graph.ir import Node
from tilemesh.plan.place.opaque_rules import opaque_marks

EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Primitives that ranks along an axis compute together."""


@dataclass(frozen=True)
class Way:
    """What a node takes its inputs as, and what its result then is, along one axis."""

    inputs: tuple[Mark, ...]
    output: Mark


Before = Callable[[Node, int], int]
"""Into how many pieces other axes have cut a dim of a tensor already."""
Rule = Callable[[Node, int, Before], Iterator[Way]]
OpaqueRule = Callable[[Node, int], Sequence[Way]]
"""Of an operator of torch's own, by its target."""


DRAWN_ALIKE: Mapping[str, OpaqueRule] = MappingProxyType(
    dict.fromkeys(("aten.rand.generator", "aten.native_dropout.default"), lambda node, ranks: ())
)
"""Dropout's numbers are drawn whole by every rank, from generators that are alike."""


def uncut(node: Node, dim: int) -> int:
    """No other axis cuts anything."""
    return 1


def ways(
    node: Node, ranks: int, before: Before = uncut, opaque: Mapping[str, OpaqueRule] = MappingProxyType({})
) -> list[Way]:
    """The ways to compute a node along an axis of so many ranks. Dims with fewer elements than ranks are not cut."""
    whole = Way((R,) * len(node.inputs), R)
    if node.op == "opaque":
        rule = opaque.get(node["target"])
        if rule is None and is_random(node):
            return [Way(whole.inputs, V)]
        known = rule(node, ranks) if rule else [Way(*marks) for marks in opaque_marks(node)]
        return [whole, *(way for way in known if _has_room(node, way, ranks, before))]
    other = Way((V,) * len(node.inputs), V)
    every = [whole, *RULES[node.op](node, ranks, before), *([other] if node.inputs else [])]
    return [way for way in dict.fromkeys(every) if _has_room(node, way, ranks, before)]


def is_random(node: Node) -> bool:
    """Whether an operator draws numbers: ranks that draw each for themselves have different ones."""
    return bool(re.search(r"rand|bernoulli|dropout|multinomial|normal_|uniform|exponential", str(node["target"])))


def summed_once(order: Iterable[Node]) -> set[Node]:
    """Values whose largest element is looked for again, by a max's gradient: readers may sum parts in other orders."""
    pairs = {(node.op, owner(value)) for node in order for value in node.inputs if node.op in ("amax", "compare")}
    return {value for op, value in pairs if op == "amax" and ("compare", value) in pairs}


def owner(node: Node) -> Node:
    """Whose memory a view names."""
    while node.inputs and not node.launched:
        node = node.inputs[0]
    return node


def _has_room(node: Node, way: Way, ranks: int, before: Before) -> bool:
    ends = [*zip(node.inputs, way.inputs, strict=True), (node, way.output)]
    for value, mark in ends:
        if mark.kind == "S" and value.dtype != "tuple":
            assert isinstance(mark.dim, int)
            if value.shape[mark.dim] < ranks * before(value, mark.dim):
                return False
    return True


def _each_dim(node: Node, count: int) -> Iterator[Way]:
    for dim in range(len(node.shape)):
        yield Way((S(dim),) * count, S(dim))


def _elementwise(parts: str = "") -> Rule:
    """Cut along any dim. `parts`: for which inputs that are parts of a sum the result is one too: "PR" the first."""
    marks = [tuple({"P": P, "R": R}[letter] for letter in word) for word in parts.split()]

    def rule(node: Node, ranks: int, before: Before) -> Iterator[Way]:
        yield from _each_dim(node, len(node.inputs))
        yield from (Way(inputs, P) for inputs in marks)

    return rule


def _cast(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    yield from _each_dim(node, 1)
    if "float" in node.dtype and "float" in node.inputs[0].dtype:
        yield Way((P,), P)


def _reduced(parts: bool) -> Rule:
    """Over some dims: of parts of a sum, and where a dim that is cut goes, the result is a part of a sum too."""

    def rule(node: Node, ranks: int, before: Before) -> Iterator[Way]:
        over = (node["dim"],) if node.op == "argmax" else node["dims"]
        kept = [dim for dim in range(len(node.inputs[0].shape)) if dim not in over]
        yield from (Way((S(dim),), S(place)) for place, dim in enumerate(kept))
        if parts:
            yield from (Way((S(dim),), P) for dim in over)
            yield Way((P,), P)

    return rule


def _moved(place: Callable[[Node, int], int | None]) -> Rule:
    """Linear in one input, each of whose dims may become one of the result's."""

    def rule(node: Node, ranks: int, before: Before) -> Iterator[Way]:
        for dim in range(len(node.inputs[0].shape)):
            target = place(node, dim)
            if target is not None:
                yield Way((S(dim),), S(target))
        yield Way((P,), P)

    return rule


def _broadcast(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    yield from (Way((S(dim),), S(target)) for dim, target in enumerate(node["dims"]))
    yield from (Way((R,), S(dim)) for dim in range(len(node.shape)) if dim not in node["dims"])
    yield Way((P,), P)


def _reshape(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    """Rows of one shape are rows of the other where pieces end at the same elements."""
    value = node.inputs[0]
    for (dim, inner), (target, outer) in itertools.product(_leading(value), _leading(node)):
        pieces, others = before(value, dim), before(node, target)
        length, rows = value.shape[dim], node.shape[target]
        if pieces == others == 1:
            ends = [share(length, ranks, rank)[0] * inner for rank in range(ranks)]
            fits = ends == [share(rows, ranks, rank)[0] * outer for rank in range(ranks)]
        else:  # cut more than once: only where all pieces are alike
            fits = pieces == others and length % (ranks * pieces) == rows % (ranks * pieces) == 0
        # Elements before the dim: a piece of it is one stretch of each of these, in both shapes alike.
        lead = math.prod(value.shape[:dim])
        is_same = lead == math.prod(node.shape[:target]) and length * inner == rows * outer
        if fits and is_same:
            yield Way((S(dim),), S(target))
    yield Way((P,), P)


def _leading(node: Node) -> Iterator[tuple[int, int]]:
    """Each dim, and how many elements follow one another for one step along it."""
    for dim in range(len(node.shape)):
        yield dim, math.prod(node.shape[dim + 1 :])


def _concat(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    count = len(node.inputs)
    yield from (Way((S(dim),) * count, S(dim)) for dim in range(len(node.shape)) if dim != node["dim"])
    yield Way((P,) * count, P)


def _is_all(node: Node, dim: int) -> int | None:
    """A slice takes all of a dim."""
    taken = (node["start"][dim], node["stop"][dim], node["step"][dim])
    return dim if taken == (0, node.inputs[0].shape[dim], 1) else None


def _is_unpadded(node: Node, dim: int) -> int | None:
    return dim if not (node["low"][dim] or node["high"][dim] or node["inner"][dim]) else None


def _dot(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    last = len(node.shape) - 1
    yield from (Way((S(dim), S(dim)), S(dim)) for dim in range(last - 1))
    yield Way((S(last - 1), R), S(last - 1))
    yield Way((R, S(last)), S(last))
    yield Way((S(last), S(last - 1)), P)
    yield from _either()


def _either() -> Iterator[Way]:
    """Linear in each of two inputs: one of them may be parts of a sum. Both may not: a product of sums is another."""
    yield Way((P, R), P)
    yield Way((R, P), P)


def _take(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    """Of a table whose rows are cut each rank has some; for others it gives zeros (`local.py`)."""
    table, index = node.inputs
    yield from (Way((R, S(dim)), S(dim)) for dim in range(len(index.shape)))
    yield from (Way((S(dim), R), S(len(index.shape) + dim - 1)) for dim in range(1, len(table.shape)))
    yield Way((S(0), R), P)
    yield Way((P, R), P)


def _put_add(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    values, index = node.inputs
    many = len(index.shape)
    yield from (Way((S(dim), S(dim)), P) for dim in range(many))
    yield from (Way((S(dim), R), S(dim - many + 1)) for dim in range(many, len(values.shape)))
    yield Way((P, R), P)


def _conv(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    """x [n, c, *space], w [out, c, *taps]: by examples, by what is given, by channels. Space is not cut: a window at
    an end reaches into a neighbour's part."""
    yield Way((S(0), R), S(0))
    if node["groups"] == 1:
        yield Way((R, S(0)), S(1))
        yield Way((S(1), S(1)), P)
    yield from _either()


def _conv_input(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    yield Way((S(0), R), S(0))
    if node["groups"] == 1:
        yield Way((S(1), S(0)), P)
        yield Way((R, S(1)), S(1))
    yield from _either()


def _conv_weight(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    yield Way((S(0), S(0)), P)
    if node["groups"] == 1:
        yield Way((S(1), R), S(1))
        yield Way((R, S(1)), S(0))
    yield from _either()


def _before_windows(node: Node, dim: int) -> int | None:
    """Dims that no window lies in."""
    lead = len((node.inputs[0] if node.op == "windows" else node).shape) - len(node["taps"])
    return dim if dim < lead else None


def _nothing(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    return iter(())


def _switch(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    yield from (Way((S(dim), R), S(dim)) for dim in range(len(node.shape)))
    yield Way((P, R), P)


def _merge(node: Node, ranks: int, before: Before) -> Iterator[Way]:
    yield from (Way((R, S(dim), S(dim)), S(dim)) for dim in range(len(node.shape)))
    yield Way((R, P, P), P)


_NOT_LINEAR = "power maximum minimum absolute sign exp log sqrt sin cos tanh sigmoid erf compare"
ELEMENTWISE = frozenset([*_NOT_LINEAR.split(), "add", "subtract", "multiply", "divide", "negate", "where", "cast"])
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ["input", "constant", "iota", "lay", "region", "own_copy", *EXCHANGES], _nothing
    ),  # as they are pinned, or all of it; of a rank's own program nothing is placed again
    **dict.fromkeys(_NOT_LINEAR.split(), _elementwise()),
    "add": _elementwise("PP"),
    "subtract": _elementwise("PP"),
    "multiply": _elementwise("PR RP"),
    "divide": _elementwise("PR"),
    "negate": _elementwise("P"),
    "where": _elementwise("RPP"),
    "cast": _cast,
    "item": lambda node, ranks, before: _each_dim(node, 1),  # several results of one operator are cut alike
    "sum": _reduced(parts=True),
    "amax": _reduced(parts=False),
    "argmax": _reduced(parts=False),
    "reshape": _reshape,
    "transpose": _moved(lambda node, dim: node["order"].index(dim)),
    "broadcast": _broadcast,
    "concat": _concat,
    "slice": _moved(_is_all),
    "pad": _moved(_is_unpadded),
    "reverse": _moved(lambda node, dim: None if dim in node["dims"] else dim),
    "dot": _dot,
    "take": _take,
    "put_add": _put_add,
    "conv": _conv,
    "conv_input": _conv_input,
    "conv_weight": _conv_weight,
    "windows": _moved(_before_windows),
    "unwindows": _moved(_before_windows),
    "switch": _switch,
    "merge": _merge,
}
