"""Sums that nobody waits for within a program, made together: one all_reduce for the small gradients of an axis.

Each exchange begins with a latency that does not depend on its size, so that many small ones take longer than one of
all their bytes; what it costs is a copy into one piece of memory and out of it. Bytes sent stay the same. No torch.
"""

from __future__ import annotations

import math

from tilemesh.graph.ir import Graph, Node, make, users
from tilemesh.plan.place.local import whole_shape
from tilemesh.plan.place.propagate import DTYPE_BYTES

MOST_BYTES = 1 << 18
"""Of a tensor: copying 256 KiB in and out takes about 50 µs at 10 GB/s, as long as a small exchange between processes
of a CPU, and less than one on GPUs."""


def combined(graph: Graph, results: int, gradients: int) -> Graph:
    """A rank's program with small sums of its parameters' gradients, which follow results, in one exchange per axis."""
    readers = users(graph.nodes())
    together: dict[tuple[str, str], list[Node]] = {}
    for node in dict.fromkeys(graph.outputs[results : results + gradients]):
        if node.op != "all_reduce" or readers.get(node) or node in graph.outputs[:results]:
            continue
        if math.prod(whole_shape(node)) * DTYPE_BYTES.get(node.dtype, 4) <= MOST_BYTES:
            together.setdefault((str(node["axis"]), node.dtype), []).append(node)
    new: dict[Node, Node] = {}
    for group in together.values():
        if len(group) > 1:
            new |= _joined(group)
    return Graph(graph.inputs, tuple(new.get(node, node) for node in graph.outputs))


def _joined(group: list[Node]) -> dict[Node, Node]:
    """The sums of a group, as parts of one; all ranks have the same group, and its first number."""
    sizes = [math.prod(whole_shape(node)) for node in group]
    first = min(group, key=lambda node: int(node["serial"]))
    flat = [make("reshape", node.inputs[0], shape=(size,)) for node, size in zip(group, sizes, strict=True)]
    words = {"axis": first["axis"], "ranks": first["ranks"], "serial": first["serial"]}
    whole = make("all_reduce", make("concat", *flat, dim=0), **words)
    parts, begin = {}, 0
    for node, size in zip(group, sizes, strict=True):
        piece = make("slice", whole, start=(begin,), stop=(begin + size,), step=(1,))
        parts[node] = make("reshape", piece, shape=node.shape)
        begin += size
    return parts
