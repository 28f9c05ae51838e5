"""Known layouts as pins: what a chooser that is left the rest can be held against.

Weights are the inputs that outputs replace. A weight is cut by columns (what its product gives) or, where all products
that it reads from are, by rows (what its product sums over), as Megatron does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilemesh.core.errors import RunError
from tilemesh.core.tensor_placement import Mark, S, TensorPlacement
from tilemesh.graph.ir import Node
from tilemesh.parallel.choose.integer import integer
from tilemesh.parallel.choose.walk import greedy
from tilemesh.plan.place.problem import Chosen, PlacementProblem
from tilemesh.plan.place.space import PlacementSpace

Pins = dict[str, TensorPlacement]
REST_S = 10.0
"""That choosing what a recipe leaves may take."""


def recipes(space: PlacementSpace) -> dict[str, Pins]:
    """By name: data parallelism with whole weights (ddp) or cut ones (fsdp), megatron's, that with tokens cut between
    blocks (sequence), and on two axes megatron's with fsdp (2d)."""
    axes = [axis for axis, _ in space.cost.axes]
    summed = _summed_dims(space)
    if not summed:
        return {}
    batch, model = ("dp" if "dp" in axes else axes[-1]), ("tp" if "tp" in axes else axes[0])
    data = [node for node in space.graph.inputs if node not in space.carried.values() and node.shape]

    def cut(node: Node, *marks: tuple[str, Mark]) -> TensorPlacement:
        """In the order of the mesh."""
        return TensorPlacement(tuple(sorted(marks, key=lambda pair: axes.index(pair[0]))))

    rows = {str(node["name"]): cut(node, (batch, S(0))) for node in data}
    whole = {str(node["name"]): TensorPlacement() for node in summed}
    sharded = {str(node["name"]): cut(node, (batch, S(0))) for node in summed}
    megatron = {str(node["name"]): cut(node, (model, S(dim))) for node, (dim, _) in summed.items()}
    tokens = {str(node["name"]): cut(node, (model, S(1 if len(node.shape) > 2 else 0))) for node in data}
    found = {"ddp": rows | whole, "fsdp": rows | sharded, "megatron": megatron, "sequence": megatron | tokens}
    if batch != model:
        both = {
            str(node["name"]): cut(node, (model, S(dim)), (batch, S(other))) for node, (dim, other) in summed.items()
        }
        found["2d"] = rows | both
    return found


def with_recipes(space: PlacementSpace, answers: Sequence[Chosen]) -> list[Chosen]:
    """These answers and those of recipes, each with the best rest; the fastest first."""
    bound = max((each.bound_s for each in answers), default=0.0)
    more = []
    for name, pins in recipes(space).items():
        left = space.pinned(pins)
        if all(left.values()):  # a dim may be too short to be cut
            more.append(replace(_rest(space.problem.fixed(left)), chooser=name, bound_s=bound))
    return sorted([*answers, *more], key=lambda each: each.figures.seconds if each.figures else math.inf)


def _rest(problem: PlacementProblem) -> Chosen:
    """What pins leave: greedily it may gather the very weights that they cut."""
    try:
        chosen = integer(problem, REST_S)
    except RunError:  # without scipy
        return greedy(problem)
    return chosen if chosen.choice is not None else greedy(problem)


def _summed_dims(space: PlacementSpace) -> dict[Node, tuple[int, int]]:
    """Of each matrix that is a weight and is first read by a product: the dim that Megatron cuts, and the other."""
    dims: dict[Node, tuple[int, int]] = {}
    weights = {node for node in space.carried.values() if len(node.shape) == 2}
    nearest: dict[Node, set[str]] = {}  # how the weights of the last products before a node are cut
    for node in space.order:
        nearest[node] = set().union(*(nearest[value] for value in node.inputs))
        if node.op != "dot":
            continue
        weight, inner = node.inputs[1], len(node.shape) - 2
        while weight.op == "transpose":
            inner, weight = weight["order"][inner], weight.inputs[0]
        if weight not in weights:
            continue
        if weight not in dims:
            by_rows = nearest[node.inputs[0]] == {"columns"}
            dims[weight] = (inner, 1 - inner) if by_rows else (1 - inner, inner)
        nearest[node] = {"rows" if dims[weight][0] == inner else "columns"}
    return dims
