"""What chapter 16 runs: a product cut in four ways, placed programs on ranks that are threads, a small step to place.

A product C = A·B has M rows, N columns, and sums over K. The step trains relu(x·A)·B on tokens of some width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.axes import Axes
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.tensor_placement import TensorPlacement, parse
from tilemesh.graph import build
from tilemesh.graph.derive import update
from tilemesh.graph.evaluate import evaluate_numpy
from tilemesh.graph.ir import Graph, Node
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import put, take
from tilemesh.plan.place.cost import MeshCost
from tilemesh.plan.place.local import local_graph
from tilemesh.plan.place.problem import PlacementProblem
from tilemesh.plan.place.propagate import PlacedGraph, propagate
from tilemesh.plan.place.space import PlacementSpace

Array = np.ndarray[Any, Any]
LINE, SQUARE = (("tp", 4),), (("tp", 2), ("dp", 2))


class ProductCut(NamedTuple):
    """A way to cut C = A·B: the mesh, and where A and B lie on it."""

    axes: Axes
    a: str
    b: str


CUTS = {
    "rows": ProductCut(LINE, "tp:S0", "R"),
    "along K": ProductCut(LINE, "tp:S1", "tp:S0"),
    "2-D tiles": ProductCut(SQUARE, "dp:S0", "tp:S1"),
    "rows and K": ProductCut(SQUARE, "dp:S0,tp:S1", "tp:S0"),
}


def cut_product(name: str, m: int, k: int, n: int) -> PlacedGraph:
    """C = A·B with A and B placed. What the product gives follows from them; where that is parts of a sum, they are
    summed."""
    cut = CUTS[name]
    a, b = build.argument("A", [m, k], "float64"), build.argument("B", [k, n], "float64")
    graph = Graph((a, b), (build.dot(a, b),))
    pins = {"A": parse(cut.a), "B": parse(cut.b)}
    output = propagate(graph, pins, cut.axes).given[graph.outputs[0]]
    summed = TensorPlacement(tuple(pair for pair in output if pair[1].kind == "S"))
    return propagate(graph, {**pins, "output0": summed}, cut.axes)


def product_bytes(placed: PlacedGraph) -> float:
    """What each rank sends for the result of a product, by the formulas of chapter 3."""
    output = placed.graph.outputs[0]
    return mesh_cost(placed.axes).exchange(output, placed.given[output], placed.placements[output])[1]


def mesh_cost(axes: Axes) -> MeshCost:
    """Of a node of H100s."""
    return MeshCost(axes, parse_cluster(f"{math.prod(size for _, size in axes)}xh100"))


def run_local(comm: Communicator, placed: PlacedGraph, arrays: Sequence[Array]) -> tuple[list[Array], int]:
    """One rank's program on its parts of the arrays: what comes out, and the bytes that it sent."""
    mesh = Mesh(comm, **dict(placed.axes))
    local = local_graph(placed, comm.rank)
    values: dict[Node, Array] = {}
    for node, mine, array in zip(placed.graph.inputs, local.inputs, arrays, strict=True):
        values[mine] = take(placed.placements[node].shard(array.shape, placed.axes, comm.rank), array)
    groups = [axis.comm for axis in mesh.axes.values() if axis.size > 1]
    before = sum(group.sent.nbytes for group in groups)
    for node in local.nodes():
        if node not in values:
            inputs = [values[value] for value in node.inputs]
            is_exchange = "serial" in dict(node.attributes)
            values[node] = exchange(mesh, node, inputs[0]) if is_exchange else evaluate_numpy(node, inputs)
    return [values[node] for node in local.outputs], sum(group.sent.nbytes for group in groups) - before


def exchange(mesh: Mesh, node: Node, mine: Array) -> Any:
    """The collective that a node of the rank's program stands for, along its axis of the mesh."""
    along, mine = mesh.axis(node["axis"]).comm, np.array(mine, order="C")
    if node.op == "all_reduce":
        return along.all_reduce(mine, algorithm="ring")
    if node.op == "all_to_all":  # pieces of another dim for everyone
        pieces = along.all_to_all(np.stack(np.split(mine, along.size, node["into"])))
        return np.concatenate(list(pieces), node["dim"])
    collective = along.all_gather if node.op == "all_gather" else along.reduce_scatter
    return collective(mine, axis=node["dim"], counts=node["counts"], algorithm="ring")


class PlacedRun(NamedTuple):
    """Whole outputs, and the bytes that each rank sent."""

    outputs: list[Array]
    sent: list[int]


def run_placed(placed: PlacedGraph, arrays: Sequence[Array]) -> PlacedRun:
    """A placed program by ranks that are threads, joined again."""
    ranks = math.prod(size for _, size in placed.axes)
    parts = run_threads(ranks, lambda comm: run_local(comm, placed, arrays))
    outputs = []
    for number, node in enumerate(placed.graph.outputs):
        joined = np.empty(node.shape)
        for rank, (values, _) in enumerate(parts):
            put(placed.placements[node].shard(joined.shape, placed.axes, rank), values[number], joined)
        outputs.append(joined)
    return PlacedRun(outputs, [sent for _, sent in parts])


def arrays_of(graph: Graph) -> list[Array]:
    """Numbers for a graph's inputs, the same each time."""
    random = np.random.default_rng(16)
    return [random.normal(size=node.shape) / 4 for node in graph.inputs]


Training = tuple[Graph, dict[Node, Node]]


def mlp_step(tokens: int, width: int, hidden: int, layers: int = 1, dtype: str = "bfloat16") -> Training:
    """A training step of relu(x·A)·B, so many of them in a row: the loss and the new matrices; and which output takes
    the place of which input."""
    x = value = build.argument("x", [tokens, width], dtype)
    weights = []
    for layer in range(layers):
        name = str(layer) if layers > 1 else ""
        a, b = build.argument(f"A{name}", [width, hidden], dtype), build.argument(f"B{name}", [hidden, width], dtype)
        value = build.dot(build.relu(build.dot(value, a)), b)
        weights += [a, b]
    loss = build.total(build.multiply(value, value))
    new = update(loss, weights, rate=0.01)
    return Graph((x, *weights), (loss, *new)), dict(zip(new, weights, strict=True))


def space_of(step: Training, axes: Axes = LINE) -> PlacementSpace:
    """Every placement of a step that is considered, with its predicted times."""
    return PlacementSpace(step[0], mesh_cost(axes), step[1])


def seconds_per_try(problem: PlacementProblem, tries: int = 300) -> list[float]:
    """How long this machine takes to price one placement, several times."""
    random, readings = np.random.default_rng(0), []
    for _ in range(7):
        drawn = [[int(random.integers(len(own))) for own in problem.seconds] for _ in range(tries)]
        began = time.perf_counter()
        for choice in drawn:
            problem.figures(choice)
        readings.append((time.perf_counter() - began) / tries)
    return readings


def best_so_far(history: Sequence[tuple[int, float]], tries: Sequence[int]) -> list[float]:
    """Of a chooser's history, what the best was after so many tries."""
    return [min((seconds for at, seconds in history if at <= many), default=history[0][1]) for many in tries]
