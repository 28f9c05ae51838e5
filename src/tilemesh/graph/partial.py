"""Programs that are only partly equivalent, corrected where they differ (the idea of PET). Plain Python.

A *mutant* of a program is faster and wrong in places: two pictures side by side are convolved by one kernel, and near
the seam each window sees the other picture. Where it is wrong is found exactly, without computing the outputs: an
output falls into *regions* in which every position has the same form (windows meet the same edges). Convolutions,
products and sums are multilinear in their inputs, so two programs that agree on a few positions of a region agree on
all of it: one position and its neighbour along each dim. Each is compared on random numbers modulo a prime; a wrong
region passes t tests with a probability of at most (degree / prime)^t. The wrong regions are computed as in the
original, all of them by one kernel, and the mutant is taken only if it is faster with these corrections.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as combinations
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.graph import build
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.size import known

PRIME = 536_870_909
TESTS = 2


@dataclass(frozen=True)
class Mutant:
    """A program of the same shapes as the original: what was done, and how sure equality of a region is."""

    name: str
    graph: Graph
    wrong: tuple[tuple[tuple[int, int, int], ...], ...]  # for every output: strips (dim, start, stop) that differ
    regions: int
    positions: int
    error: float  # the largest probability that a region that differs was taken for equal


@dataclass(frozen=True)
class PartialResult:
    """The program to use, its cost and that of the original, and the mutant behind it (None: the original)."""

    graph: Graph
    cost: float
    original: float
    mutant: Mutant | None
    tried: tuple[tuple[str, float], ...]


def improve(graph: Graph, cost: Callable[[Graph], float]) -> PartialResult:
    """The cheapest of the original and its corrected mutants, corrections included."""
    best, original, chosen = graph, cost(graph), None
    least, tried = original, []
    for mutant in mutants(graph):
        corrected = correct(graph, mutant)
        price = cost(corrected)
        tried.append((mutant.name, price))
        if price < least:
            best, least, chosen = corrected, price, mutant
    return PartialResult(best, least, original, chosen, tuple(tried))


def mutants(graph: Graph) -> Iterator[Mutant]:
    """Programs in which convolutions by the same weights are one: inputs joined along the batch or a dim of space."""
    alike: dict[Any, list[Node]] = {}
    for node in graph.outputs:
        if node.op == "conv":
            alike.setdefault((node.inputs[1], node.inputs[0].shape, node.attributes), []).append(node)
    for nodes in alike.values():
        if len(nodes) < 2 or nodes[0]["groups"] != 1:
            continue
        for dim in (0, *range(2, len(nodes[0].shape))):
            made = _joined(graph, nodes, dim)
            if made is not None:
                yield _checked(graph, made, f"{len(nodes)} inputs joined along dim {dim}")


def _joined(graph: Graph, nodes: Sequence[Node], dim: int) -> Graph | None:
    """One convolution over all inputs, and each result cut out of its result."""
    first = nodes[0]
    whole = build.conv(
        build.concat([node.inputs[0] for node in nodes], dim), first.inputs[1], *_settings(first), groups=1
    )
    size, results = known(first.shape[dim], {}), {}
    stride = 1 if dim == 0 else first["stride"][dim - 2]
    step = known(first.inputs[0].shape[dim], {})
    if step % stride or (len(nodes) - 1) * (step // stride) + size > known(whole.shape[dim], {}):
        return None  # the results of the others do not begin on a position of their own
    for place, node in enumerate(nodes):
        begin = place * (step // stride)
        results[node] = build.part(whole, dim, begin, begin + size)
    return graph.substitute(results)


def _settings(node: Node) -> tuple[Any, Any, Any]:
    return node["stride"], node["padding"], node["dilation"]


def _checked(graph: Graph, mutant: Graph, name: str) -> Mutant:
    """Where each output of a mutant differs from the original."""
    wrong, regions, tested = [], 0, 0
    draws = random.Random(11)
    tests = [_numbers(graph, draws) for _ in range(TESTS)]
    for ours, theirs in zip(graph.outputs, mutant.outputs, strict=True):
        cuts = [sorted(set(left) | set(right)) for left, right in zip(cuts_of(ours), cuts_of(theirs), strict=True)]
        bad: list[tuple[tuple[int, int], ...]] = []
        for region in combinations(*(list(pairwise(each)) for each in cuts)):
            regions += 1
            places = list(_positions(region))
            tested += len(places)
            if any(_differs(ours, theirs, place, values) for values in tests for place in places):
                bad.append(region)
        wrong.append(_strips(bad, ours))
    return Mutant(name, mutant, tuple(wrong), regions, tested, (2 / PRIME) ** TESTS)


def _positions(region: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """The first position of a region, and its neighbour along every dim that has one."""
    start = tuple(begin for begin, _ in region)
    yield start
    for dim, (begin, end) in enumerate(region):
        if end - begin > 1:
            yield tuple(place + (1 if each == dim else 0) for each, place in enumerate(start))


def _strips(bad: Sequence[tuple[tuple[int, int], ...]], node: Node) -> tuple[tuple[int, int, int], ...]:
    """The wrong regions covered by strips across one dim: the dim in which they are narrowest."""
    if not bad:
        return ()
    best: tuple[float, list[tuple[int, int]], int] | None = None
    for dim in range(len(node.shape)):
        merged: list[tuple[int, int]] = []
        for begin, end in sorted({region[dim] for region in bad}):
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        share = sum(end - begin for begin, end in merged) / known(node.shape[dim], {})
        if best is None or share < best[0]:
            best = (share, merged, dim)
    assert best is not None
    return tuple((best[2], begin, end) for begin, end in best[1])


def cuts_of(node: Node) -> list[list[int]]:
    """For each dim where regions begin, and its end: between them every position has the same form."""
    sizes = [known(size, {}) for size in node.shape]
    if node.op == "conv":
        inner = cuts_of(node.inputs[0])
        taps = [known(size, {}) for size in node.inputs[1].shape[2:]]
        cuts = [inner[0], [0, sizes[1]]]
        for dim, (count, stride, pad, dilation) in enumerate(zip(taps, *_settings(node), strict=True)):
            edges = {-(-(edge + pad - dilation * tap) // stride) for edge in inner[2 + dim] for tap in range(count)}
            cuts.append(_within(edges, sizes[2 + dim]))
        return cuts
    if node.op == "concat":
        parts = [cuts_of(value) for value in node.inputs]
        cuts = [sorted(set().union(*each)) for each in zip(*parts, strict=True)]
        edges, start = set(), 0
        for value, part in zip(node.inputs, parts, strict=True):
            edges |= {start + edge for edge in part[node["dim"]]}
            start += known(value.shape[node["dim"]], {})
        cuts[node["dim"]] = sorted(edges)
        return cuts
    if node.op == "slice":
        inner = cuts_of(node.inputs[0])
        return [
            _within({-(-(edge - start) // step) for edge in each}, size)
            for each, start, step, size in zip(inner, node["start"], node["step"], sizes, strict=True)
        ]
    if node.op in ("add", "subtract", "negate"):
        parts = [cuts_of(value) for value in node.inputs]
        return [sorted(set().union(*each)) for each in zip(*parts, strict=True)]
    if node.op == "input":
        return [[0, size] for size in sizes]
    raise UsageError(f"{node.op} has no regions here; served are conv, concat, slice, add, subtract, negate")


def _within(edges: set[int], size: int) -> list[int]:
    return sorted({0, size} | {edge for edge in edges if 0 < edge < size})


Numbers = dict[Node, Callable[[tuple[int, ...]], int]]


def _numbers(graph: Graph, draws: random.Random) -> Numbers:
    """A random number modulo the prime for every element of every input, made when it is asked for."""

    def drawn(seed: int) -> Callable[[tuple[int, ...]], int]:
        return lambda place: random.Random(hash((seed, place))).randrange(PRIME)

    return {node: drawn(draws.randrange(1 << 60)) for node in graph.inputs}


def _differs(ours: Node, theirs: Node, place: tuple[int, ...], values: Numbers) -> bool:
    return element(ours, place, values) != element(theirs, place, values)


def element(node: Node, place: tuple[int, ...], values: Numbers) -> int:
    """One element of a program's value modulo the prime: only what it depends on is computed."""
    if node.op == "input":
        return values[node](place)
    if node.op == "conv":
        return _conv_element(node, place, values)
    if node.op == "concat":
        dim, at = node["dim"], place[node["dim"]]
        for value in node.inputs:
            size = known(value.shape[dim], {})
            if at < size:
                return element(value, (*place[:dim], at, *place[dim + 1 :]), values)
            at -= size
    if node.op == "slice":
        inside = tuple(start + at * step for at, start, step in zip(place, node["start"], node["step"], strict=True))
        return element(node.inputs[0], inside, values)
    parts = [element(value, place, values) for value in node.inputs]
    signed = {"add": sum(parts), "subtract": parts[0] - parts[-1], "negate": -parts[0]}
    return signed[node.op] % PRIME


def _conv_element(node: Node, place: tuple[int, ...], values: Numbers) -> int:
    x, w = node.inputs
    taps = [range(known(size, {})) for size in w.shape[2:]]
    sizes = [known(size, {}) for size in x.shape[2:]]
    total = 0
    for tap in combinations(*taps):
        at = tuple(
            position * stride - pad + each * dilation
            for position, each, stride, pad, dilation in zip(place[2:], tap, *_settings(node), strict=True)
        )
        if all(0 <= each < size for each, size in zip(at, sizes, strict=True)):
            for channel in range(known(x.shape[1], {})):
                total += element(x, (place[0], channel, *at), values) * element(w, (place[1], channel, *tap), values)
    return total % PRIME


def correct(graph: Graph, mutant: Mutant) -> Graph:
    """The mutant with its wrong strips computed as in the original; strips of one shape are one convolution."""
    wanted: dict[Any, list[tuple[int, tuple[int, int, int], Node]]] = {}
    for place, strips in enumerate(mutant.wrong):
        for strip in strips:
            piece = _strip_input(graph.outputs[place], strip)
            node = graph.outputs[place]
            wanted.setdefault((node.inputs[1], piece.shape, node.attributes, strip[0]), []).append(
                (place, strip, piece)
            )
    made: dict[tuple[int, tuple[int, int, int]], Node] = {}
    for (weights, _, _, dim), group in wanted.items():
        node = graph.outputs[group[0][0]]
        stride, padding, dilation = _settings(node)
        free = tuple(0 if dim - 2 == each else pad for each, pad in enumerate(padding))
        result = build.conv(build.concat([piece for _, _, piece in group], 0), weights, stride, free, dilation)
        batch = known(node.shape[0], {})
        for order, (place, strip, _) in enumerate(group):
            made[place, strip] = build.part(result, 0, order * batch, (order + 1) * batch)
    outputs = []
    for place, (value, strips) in enumerate(zip(mutant.graph.outputs, mutant.wrong, strict=True)):
        outputs.append(_patched(value, strips, [made[place, strip] for strip in strips]))
    return Graph(graph.inputs, tuple(outputs))


def _strip_input(node: Node, strip: tuple[int, int, int]) -> Node:
    """What the positions of a strip see of the original input, with zeros beyond its edges."""
    dim, start, stop = strip
    if dim < 2 or node.op != "conv":
        raise UsageError(
            f"a wrong strip along dim {dim} of {node.op}: only dims of space of convolutions are corrected"
        )
    stride, padding, dilation = (each[dim - 2] for each in _settings(node))
    taps, size = known(node.inputs[1].shape[dim], {}), known(node.inputs[0].shape[dim], {})
    low, high = start * stride - padding, (stop - 1) * stride - padding + dilation * (taps - 1) + 1
    piece = build.part(node.inputs[0], dim, max(low, 0), min(high, size))
    rank = len(node.shape)
    before = [max(-low, 0) if each == dim else 0 for each in range(rank)]
    after = [max(high - size, 0) if each == dim else 0 for each in range(rank)]
    return build.pad(piece, before, after)


def _patched(value: Node, strips: Sequence[tuple[int, int, int]], pieces: Sequence[Node]) -> Node:
    if not strips:
        return value
    dim, parts, begin = strips[0][0], [], 0
    for (_, start, stop), piece in zip(strips, pieces, strict=True):
        if start > begin:
            parts.append(build.part(value, dim, begin, start))
        parts.append(piece)
        begin = stop
    size = known(value.shape[dim], {})
    if begin < size:
        parts.append(build.part(value, dim, begin, size))
    return make("concat", *parts, dim=dim) if len(parts) > 1 else parts[0]
