"""Ranks of a mesh in one process: arrays cut and put together as placements say, without any of our code for it but the
arithmetic of one cut. What placed programs are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilemesh.core.axes import Axes, coordinates, ranks_of
from tilemesh.core.tensor_placement import TensorPlacement
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.plan.place.local import local_node
from tilemesh.plan.place.propagate import PlacedGraph

Array = Any


def pieces(length: int, ranks: int) -> list[slice]:
    """Larger ones first."""
    ends = np.cumsum([length // ranks + (rank < length % ranks) for rank in range(ranks)])
    return [slice(end - length // ranks - (rank < length % ranks), end) for rank, end in enumerate(ends)]


def scatter(whole: Array, placement: TensorPlacement, axes: Axes, random: np.random.Generator) -> list[Array]:
    """What each rank has of an array; of what is a sum, parts drawn at random."""
    sizes, ranks = dict(axes), ranks_of(axes)
    parts = [whole] * ranks
    for axis, mark in placement:
        places = [coordinates(rank, axes)[axis] for rank in range(ranks)]
        if mark.kind == "S":
            assert isinstance(mark.dim, int)
            lead = (slice(None),) * mark.dim
            parts = [
                part[(*lead, pieces(part.shape[mark.dim], sizes[axis])[at])]
                for part, at in zip(parts, places, strict=True)
            ]
        elif mark.kind == "P":  # of ranks that are alike but for this axis, the parts add up
            drawn: dict[Any, Array] = {}
            for rank, at in enumerate(places):
                # Along axes of R all have the same parts.
                others = [(name, at) for name, at in coordinates(rank, axes).items() if placement[name].kind in "SP"]
                keys = [(*(pair for pair in others if pair[0] != axis), (axis, n)) for n in range(sizes[axis])]
                for key in keys[:-1]:
                    if key not in drawn:
                        drawn[key] = random.integers(-4, 5, parts[rank].shape).astype(parts[rank].dtype)
                rest = parts[rank] - sum(drawn[key] for key in keys[:-1])
                parts[rank] = rest if at == sizes[axis] - 1 else drawn[keys[at]]
    return parts


def gather(parts: Sequence[Array], placement: TensorPlacement, axes: Axes) -> Array:
    """The whole; ranks that should have the same must have it."""
    sizes = dict(axes)
    held = {tuple(coordinates(rank, axes).items()): part for rank, part in enumerate(parts)}
    marks = [*placement, *((axis, placement[axis]) for axis in sizes if axis not in dict(placement.marks))]
    for axis, mark in reversed(marks):
        groups: dict[Any, list[Array]] = {}
        for place, part in sorted(held.items(), key=lambda entry: dict(entry[0])[axis]):
            groups.setdefault(tuple(entry for entry in place if entry[0] != axis), []).append(part)
        held = {}
        for place, alike in groups.items():
            if mark.kind == "S":
                held[place] = np.concatenate(alike, mark.dim)
            elif mark.kind == "P":
                held[place] = sum(alike[1:], start=alike[0])
            else:
                for other in alike[1:]:
                    np.testing.assert_allclose(other, alike[0], rtol=1e-12, atol=1e-12, err_msg="ranks differ")
                held[place] = alike[0]
    [whole] = held.values()
    return whole


def run_placed(placed: PlacedGraph, arrays: Sequence[Array], random: np.random.Generator) -> list[Array]:
    """The outputs of a placed graph, every node computed by every rank and every exchange made."""
    graph, axes = placed.graph, placed.axes
    held: dict[Node, list[Array]] = {}
    for node in graph.nodes():
        if node.op == "input":
            whole = np.asarray(arrays[graph.inputs.index(node)])
            held[node] = scatter(whole, placed.placements[node], axes, random)
            continue
        values = [
            exchanged(held[value], placed.placements[value], taken, axes, random)
            for value, taken in zip(node.inputs, placed.taken[node], strict=True)
        ]
        given = placed.given[node]
        parts = run_node(node, values, placed.taken[node], given, axes)
        held[node] = exchanged(parts, given, placed.placements[node], axes, random)
    return [gather(held[node], placed.placements[node], axes) for node in graph.outputs]


def exchanged(
    parts: list[Array], before: TensorPlacement, after: TensorPlacement, axes: Axes, random: np.random.Generator
) -> list[Array]:
    return parts if before == after else scatter(gather(parts, before, axes), after, axes, random)


def run_node(
    node: Node, values: Sequence[Sequence[Array]], taken: Sequence[TensorPlacement], output: TensorPlacement, axes: Axes
) -> list[Array]:
    """What each rank computes of a node from its parts of the inputs."""
    results: list[Array] = []
    for rank in range(ranks_of(axes)):
        own = [value[rank] for value in values]
        inputs = [make("input", name=f"x{n}", shape=part.shape, dtype=str(part.dtype)) for n, part in enumerate(own)]
        local = local_node(node, inputs, taken, output, axes, rank)
        results += run_numpy(Graph(tuple(inputs), (local,)), *own)
    return results
