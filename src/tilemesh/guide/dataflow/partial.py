"""Programs that are only partly equivalent, corrected where they differ (the idea of PET). Plain Python.

A *mutant* of a program is faster and wrong in places: two pictures side by side are convolved by one kernel, and near
the seam each window sees the other picture. Where it is wrong is found exactly, without computing the outputs: a result
falls into *regions* in which every position has the same form (windows meet the same edges). A convolution is linear in
its map and in its weights, so two programs that agree on a few positions of a region agree on all of it: one position
and its neighbour along each dim. Each is compared on random numbers modulo a prime; a wrong region passes t tests with
a probability of at most (2 / prime)^t: a map's number times a weight is of degree 2. The wrong regions are computed as
in the original, all of them by one kernel; a mutant is worth it where it is faster with these corrections.

Convolutions are joined wherever they stand. What they read may be anything: it is the same in both programs, so it is
random numbers here, and what is behind them reads corrected results.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as combinations
from typing import Any

from tilemesh.graph import build
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.ops import Shape

PRIME = 536_870_909
TESTS = 2
DEGREE = 2  # of a convolution's result in the numbers of its map and its weights

Strip = tuple[int, int, int]  # dim, start, stop
Place = tuple[int, ...]


@dataclass(frozen=True)
class Mutant:
    """A program in which some convolutions are one: what was done, and how sure equality of a region is."""

    name: str
    graph: Graph
    convolutions: tuple[Node, ...]  # of the original, in its order
    results: tuple[Node, ...]  # what each of them is in the mutant
    wrong: tuple[tuple[Strip, ...], ...]  # for each of them the strips that differ
    regions: int
    positions: int
    error: float  # the largest probability that a region that differs was taken for equal


def mutants(graph: Graph) -> Iterator[Mutant]:
    """Programs in which convolutions by the same weights are one: inputs joined along the batch or a dim of space."""
    for nodes in _alike(graph):
        for dim in (0, *range(2, len(nodes[0].shape))):
            results = _joined(nodes, dim)
            if results is not None:
                joined = graph.substitute(dict(zip(nodes, results, strict=True)))
                yield _checked(f"{len(nodes)} inputs joined along dim {dim}", joined, nodes, results, dim)


def _alike(graph: Graph) -> list[list[Node]]:
    """Convolutions of one kind by the same weights, none of which needs another: those of one depth."""
    depth: dict[Node, int] = {}
    alike: dict[Any, list[Node]] = {}
    for node in graph.nodes():
        depth[node] = max((depth[value] for value in node.inputs), default=0) + (node.op == "conv")
        if node.op == "conv" and node["groups"] == 1:
            key = (node.inputs[1], node.inputs[0].shape, node.attributes, depth[node])
            alike.setdefault(key, []).append(node)
    return [nodes for nodes in alike.values() if len(nodes) > 1]


def _joined(nodes: Sequence[Node], dim: int) -> list[Node] | None:
    """One convolution over all inputs, and each result cut out of its result."""
    first = nodes[0]
    whole = build.conv(
        build.concat([node.inputs[0] for node in nodes], dim), first.inputs[1], *_settings(first), groups=1
    )
    size = first.shape[dim]
    stride = 1 if dim == 0 else first["stride"][dim - 2]
    step = first.inputs[0].shape[dim]
    if step % stride or (len(nodes) - 1) * (step // stride) + size > whole.shape[dim]:
        return None  # the results of the others do not begin on a position of their own
    begins = [place * (step // stride) for place in range(len(nodes))]
    return [build.part(whole, dim, begin, begin + size) for begin in begins]


def _settings(node: Node) -> tuple[Any, Any, Any]:
    return node["stride"], node["padding"], node["dilation"]


def _checked(name: str, graph: Graph, nodes: Sequence[Node], results: Sequence[Node], dim: int) -> Mutant:
    x, w = nodes[0].inputs
    wrong, regions, positions = _differences(len(nodes), x.shape, w.shape, _settings(nodes[0]), dim)
    error = (DEGREE / PRIME) ** TESTS
    return Mutant(name, graph, tuple(nodes), tuple(results), wrong, regions, positions, error)


@functools.lru_cache(maxsize=256)
def _differences(
    count: int, shape: Shape, weights: Shape, settings: tuple[Any, Any, Any], dim: int
) -> tuple[tuple[tuple[Strip, ...], ...], int, int]:
    """For each of so many convolutions the strips in which the joined one differs; regions and positions compared.

    The operands are random numbers, so this depends on shapes alone, and is kept for all convolutions of these.
    """
    pictures, w = [build.argument(f"x{place}", shape) for place in range(count)], build.argument("w", weights)
    nodes = [build.conv(x, w, *settings) for x in pictures]
    results = _joined(nodes, dim)
    assert results is not None
    draws = random.Random(11)
    tests = [Numbers((*pictures, w), draws) for _ in range(TESTS)]
    wrong, regions, positions = [], 0, 0
    for ours, theirs in zip(nodes, results, strict=True):
        cuts = [sorted({*left, *right}) for left, right in zip(cuts_of(ours), cuts_of(theirs), strict=True)]
        bad: list[tuple[tuple[int, int], ...]] = []
        for region in combinations(*(list(pairwise(each)) for each in cuts)):
            regions += 1
            places = list(_positions(region))
            positions += len(places)
            if any(values.result(ours, place) != values.result(theirs, place) for values in tests for place in places):
                bad.append(region)
        wrong.append(_strips(bad, ours))
    return tuple(wrong), regions, positions


def _positions(region: Sequence[tuple[int, int]]) -> Iterator[Place]:
    """The first position of a region, and its neighbour along every dim that has one."""
    start = tuple(begin for begin, _ in region)
    yield start
    for dim, (begin, end) in enumerate(region):
        if end - begin > 1:
            yield tuple(place + (1 if each == dim else 0) for each, place in enumerate(start))


def _strips(bad: Sequence[tuple[tuple[int, int], ...]], node: Node) -> tuple[Strip, ...]:
    """The wrong regions covered by strips across one dim of space: the dim in which they are narrowest."""
    if not bad:
        return ()
    best: tuple[float, list[tuple[int, int]], int] | None = None
    for dim in range(2, len(node.shape)):
        merged: list[tuple[int, int]] = []
        for begin, end in sorted({region[dim] for region in bad}):
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        share = sum(end - begin for begin, end in merged) / node.shape[dim]
        if best is None or share < best[0]:
            best = (share, merged, dim)
    assert best is not None
    return tuple((best[2], begin, end) for begin, end in best[1])


def cuts_of(node: Node) -> list[list[int]]:
    """For each dim where regions begin, and its end: between them every position has the same form.

    A convolution, a cut out of one, and the concatenation that it reads; an input has one form everywhere.
    """
    sizes = node.shape
    if node.op == "input":
        return [[0, size] for size in sizes]
    if node.op == "conv":
        inner = cuts_of(node.inputs[0])
        taps = node.inputs[1].shape[2:]
        cuts = [inner[0], [0, sizes[1]]]
        for dim, (count, stride, pad, dilation) in enumerate(zip(taps, *_settings(node), strict=True)):
            edges = {-(-(edge + pad - dilation * tap) // stride) for edge in inner[2 + dim] for tap in range(count)}
            cuts.append(_within(edges, sizes[2 + dim]))
        return cuts
    if node.op == "concat":
        cuts = [[0, size] for size in sizes]
        edges = {0}
        for value in node.inputs:
            edges.add(max(edges) + value.shape[node["dim"]])
        cuts[node["dim"]] = sorted(edges)
        return cuts
    assert node.op == "slice", node.op
    return [
        _within({edge - start for edge in each}, size)
        for each, start, size in zip(cuts_of(node.inputs[0]), node["start"], sizes, strict=True)
    ]


def _within(edges: set[int], size: int) -> list[int]:
    return sorted({0, size} | {edge for edge in edges if 0 < edge < size})


class Numbers:
    """Random numbers modulo the prime for the inputs of convolutions. Those of all channels at one position are drawn
    together, when they are first asked for: only what a result depends on is computed, and once."""

    def __init__(self, inputs: Sequence[Node], draws: random.Random) -> None:
        self.seeds = {node: draws.randrange(1 << 60) for node in inputs}
        self.drawn: dict[tuple[Node, Place], list[int]] = {}

    def result(self, node: Node, place: Place) -> int:
        """One element of a convolution, or of a cut out of one."""
        if node.op == "slice":
            return self.result(
                node.inputs[0], tuple(start + at for at, start in zip(place, node["start"], strict=True))
            )
        x, w = node.inputs
        sizes = x.shape[2:]
        total = 0
        for tap in combinations(*(range(size) for size in w.shape[2:])):
            at = tuple(
                position * stride - pad + each * dilation
                for position, each, stride, pad, dilation in zip(place[2:], tap, *_settings(node), strict=True)
            )
            if all(0 <= each < size for each, size in zip(at, sizes, strict=True)):
                seen, weights = self._channels(x, (place[0], *at)), self._channels(w, (place[1], *tap))
                total += sum(map(int.__mul__, seen, weights))
        return total % PRIME

    def _channels(self, node: Node, place: Place) -> list[int]:
        """All channels at one position: the batch (or a weight's result), then the dims of space."""
        if node in self.seeds:
            if (node, place) not in self.drawn:
                draws = random.Random(hash((self.seeds[node], place)))
                self.drawn[node, place] = draws.choices(range(PRIME), k=node.shape[1])
            return self.drawn[node, place]
        assert node.op == "concat", node.op
        dim = max(node["dim"] - 1, 0)  # among the dims without the channels
        at = place[dim]
        for value in node.inputs:
            size = value.shape[node["dim"]]
            if at < size:
                return self._channels(value, (*place[:dim], at, *place[dim + 1 :]))
            at -= size
        raise AssertionError(place)


def correct(graph: Graph, mutant: Mutant) -> Graph:
    """The mutant with its wrong strips computed as in the original; strips of one shape are one convolution."""
    wanted: dict[Any, list[tuple[int, Strip, Node]]] = {}
    for place, (node, strips) in enumerate(zip(mutant.convolutions, mutant.wrong, strict=True)):
        for strip in strips:
            piece = _strip_input(node, strip)
            wanted.setdefault((piece.shape, strip[0]), []).append((place, strip, piece))
    made: dict[tuple[int, Strip], Node] = {}
    for (_, dim), group in wanted.items():
        node = mutant.convolutions[0]
        stride, padding, dilation = _settings(node)
        free = tuple(0 if dim - 2 == each else pad for each, pad in enumerate(padding))
        result = build.conv(build.concat([piece for _, _, piece in group], 0), node.inputs[1], stride, free, dilation)
        batch = node.shape[0]
        for order, (place, strip, _) in enumerate(group):
            made[place, strip] = build.part(result, 0, order * batch, (order + 1) * batch)
    corrected = {}
    for place, (node, value, strips) in enumerate(zip(mutant.convolutions, mutant.results, mutant.wrong, strict=True)):
        corrected[node] = _patched(value, strips, [made[place, strip] for strip in strips])
    return graph.substitute(corrected)


def _strip_input(node: Node, strip: Strip) -> Node:
    """What the positions of a strip see of the original input, with zeros beyond its edges."""
    dim, start, stop = strip
    stride, padding, dilation = (each[dim - 2] for each in _settings(node))
    taps, size = node.inputs[1].shape[dim], node.inputs[0].shape[dim]
    low, high = start * stride - padding, (stop - 1) * stride - padding + dilation * (taps - 1) + 1
    if high <= 0 or low >= size:  # windows that see the padding alone
        shape = tuple(high - low if each == dim else length for each, length in enumerate(node.inputs[0].shape))
        return build.constant(0.0, shape, node.dtype)
    piece = build.part(node.inputs[0], dim, max(low, 0), min(high, size))
    rank = len(node.shape)
    before = [max(-low, 0) if each == dim else 0 for each in range(rank)]
    after = [max(high - size, 0) if each == dim else 0 for each in range(rank)]
    return build.pad(piece, before, after)


def _patched(value: Node, strips: Sequence[Strip], pieces: Sequence[Node]) -> Node:
    if not strips:
        return value
    dim, parts, begin = strips[0][0], [], 0
    for (_, start, stop), piece in zip(strips, pieces, strict=True):
        if start > begin:
            parts.append(build.part(value, dim, begin, start))
        parts.append(piece)
        begin = stop
    size = value.shape[dim]
    if begin < size:
        parts.append(build.part(value, dim, begin, size))
    return make("concat", *parts, dim=dim) if len(parts) > 1 else parts[0]
