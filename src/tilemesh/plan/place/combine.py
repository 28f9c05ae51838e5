"""Small exchanges of one kind over one axis, made together: one for several gradients, norms, biases.

Each exchange begins with a latency that does not depend on its size, so that many small ones take longer than one of
all their bytes; what it costs is a copy into one piece of memory and out of it. Bytes sent stay the same. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tilemesh.graph.ir import Graph, Node, make, ordered, rebuilt, users
from tilemesh.plan.place.overlap import begun_early, of_inputs
from tilemesh.plan.place.propagate import DTYPE_BYTES

MOST_BYTES = 1 << 18
"""Of a tensor: copying 256 KiB in and out takes about 50 µs at 10 GB/s, as long as a small exchange between processes
of a CPU, and less than one on GPUs."""
MOST_TOGETHER = 1 << 20
"""Of an exchange of several: the first of them do not wait for all."""


FEWEST = 3
"""Gathers and scatters: one of n saves n - 1 latencies and takes n + 1 copies more; of sums only two."""


def combined(graph: Graph, first: Graph | None = None, fewest: int = FEWEST) -> Graph:
    """A rank's program with small exchanges in one, where nobody reads the first of them before the last begins.

    first: the first rank's program, or more than this of it. Parts may be uneven, and what is small is small there: all
    ranks join the same.
    """
    least, nbytes = {"all_reduce": 2}, {}
    for node in (first or graph).nodes():
        if node.op in _JOINED:
            nbytes[node["serial"]] = _nbytes(node)
    groups = [group for group in _groups(graph, nbytes) if len(group) >= least.get(group[0].op, fewest)]
    group_of = {node: group for group in groups for node in group}
    new: dict[Node, Node] = {}

    def reads(node: Node) -> list[Node]:
        return [value for member in group_of.get(node, (node,)) for value in member.inputs]

    for node in ordered(graph.outputs, reads):
        if node not in new:
            group = group_of.get(node, (node,))
            changed = [rebuilt(member, [new[value] for value in member.inputs]) for member in group]
            joined = _JOINED[node.op](changed) if len(group) > 1 else {changed[0]: changed[0]}
            new |= {member: joined[each] for member, each in zip(group, changed, strict=True)}
    return Graph(graph.inputs, tuple(new[node] for node in graph.outputs))


def _groups(graph: Graph, nbytes: Mapping[int, int]) -> Iterator[list[Node]]:
    """One is made where the last of a group is ready, before the first reader of any; inputs are always ready."""
    order = begun_early(graph)
    places, readers = {node: place for place, node in enumerate(order)}, users(order)
    early = of_inputs(order)
    kinds: dict[tuple[str, str, str], list[tuple[int, int, Node]]] = {}
    for node in order:
        if node.op in _JOINED and nbytes[node["serial"]] <= MOST_BYTES:
            ready = -1 if node in early else places[node]
            ends = min((places[reader] for reader in readers[node]), default=len(order))
            kinds.setdefault((node.op, str(node["axis"]), node.dtype), []).append((ready, ends, node))
    for same in kinds.values():
        group, until, total = list[Node](), len(order), 0
        for ready, ends, node in sorted(same, key=lambda each: each[:2]):
            if group and (ready >= until or total + nbytes[node["serial"]] > MOST_TOGETHER):
                yield group
                group, until, total = [], len(order), 0
            group, until, total = [*group, node], min(until, ends), total + nbytes[node["serial"]]
        yield group


def _nbytes(node: Node) -> int:
    """Of the larger side."""
    size = max(math.prod(value.shape) for value in (node, node.inputs[0]))
    return size * DTYPE_BYTES.get(node.dtype, 4)


def _flat(node: Node) -> Node:
    return make("reshape", node, shape=(math.prod(node.shape),))


def _pieces(node: Node, dim: int, counts: Sequence[int]) -> Iterator[Node]:
    """Along a dim."""
    shape = node.shape
    for begin, count in zip((0, *accumulate(counts)), counts, strict=False):
        start = [begin if at == dim else 0 for at in range(len(shape))]
        stop = [begin + count if at == dim else size for at, size in enumerate(shape)]
        yield make("slice", node, start=tuple(start), stop=tuple(stop), step=(1,) * len(shape))


def _joint(group: Sequence[Node], parts: Sequence[Node], **words: Any) -> Node:
    """All ranks have the same group, and its first number."""
    serial = min(int(node["serial"]) for node in group)
    return make(group[0].op, make("concat", *parts, dim=0), axis=group[0]["axis"], serial=serial, **words)


def _reduced(group: Sequence[Node]) -> dict[Node, Node]:
    joint = _joint(group, [_flat(node.inputs[0]) for node in group], ranks=group[0]["ranks"])
    parts = _pieces(joint, 0, [math.prod(node.shape) for node in group])
    return {node: make("reshape", part, shape=node.shape) for node, part in zip(group, parts, strict=True)}


def _sizes(node: Node, whole: Node) -> list[int]:
    """Of every rank's part of a tensor that is cut along one dim."""
    others = math.prod(size for at, size in enumerate(whole.shape) if at != node["dim"])
    return [count * others for count in node["counts"]]


def _gathered(group: Sequence[Node]) -> dict[Node, Node]:
    """What a rank sends of all lies together: what arrives is taken apart rank by rank."""
    sizes = [_sizes(node, node) for node in group]
    counts = tuple(map(sum, zip(*sizes, strict=True)))
    joint = _joint(
        group, [_flat(node.inputs[0]) for node in group], dim=0, counts=counts, index=group[0]["index"], scatters=False
    )
    arrived = [
        [*_pieces(part, 0, own)] for part, own in zip(_pieces(joint, 0, counts), zip(*sizes, strict=True), strict=True)
    ]
    made: dict[Node, Node] = {}
    for at, node in enumerate(group):
        dim, shape = node["dim"], node.shape
        shapes = [(*shape[:dim], count, *shape[dim + 1 :]) for count in node["counts"]]
        parts = [make("reshape", rank[at], shape=each) for rank, each in zip(arrived, shapes, strict=True)]
        made[node] = make("concat", *parts, dim=dim)
    return made


def _scattered(group: Sequence[Node]) -> dict[Node, Node]:
    """What goes to one rank lies together."""
    sizes = [_sizes(node, node.inputs[0]) for node in group]
    counts = tuple(map(sum, zip(*sizes, strict=True)))
    cut = [[*_pieces(node.inputs[0], node["dim"], node["counts"])] for node in group]
    index = group[0]["index"]
    parts = [_flat(own[rank]) for rank in range(len(counts)) for own in cut]
    joint = _joint(group, parts, dim=0, counts=counts, index=index, scatters=True)
    own = _pieces(joint, 0, [size[index] for size in sizes])
    return {node: make("reshape", part, shape=node.shape) for node, part in zip(group, own, strict=True)}


_JOINED: dict[str, Callable[[Sequence[Node]], dict[Node, Node]]] = {
    "all_reduce": _reduced,
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
}
"""All_to_all is none: several at a time are rare, and each rank's parts are small already."""
