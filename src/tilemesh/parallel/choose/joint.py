"""A module's two passes, placed by a chooser: what `tilemesh.parallel.place` then runs.

joint = choose_joint(trace_joint(module, call), mesh.shape, parse_cluster("4xh100"))
placed = place(module, mesh, example=batch, joint=joint)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from tilemesh.core.axes import Axes
from tilemesh.core.hardware import Cluster
from tilemesh.core.tensor_placement import REPLICATED, TensorPlacement
from tilemesh.graph.ir import Node
from tilemesh.graph.joint import JointTrace, tangent_name
from tilemesh.parallel.choose import choose
from tilemesh.parallel.placed import ALIKE, PlacedJoint
from tilemesh.plan.place.cost import MeshCost
from tilemesh.plan.place.space import PlacementSpace


def choose_joint(
    trace: JointTrace, axes: Axes, cluster: Cluster, chooser: str = "ilp", limit_bytes: float = math.inf,
    pins: Mapping[str, TensorPlacement] = MappingProxyType({}),
) -> PlacedJoint:  # fmt: skip
    """Where parameters, inputs and all between lie, both passes together. Results are whole; a gradient lies as what it
    is of. `pins`: of parameters and inputs, by name."""
    axes = tuple((axis, ranks) for axis, ranks in axes if ranks > 1)
    outputs, names = trace.graph.outputs, (*trace.changed, *trace.gradients)
    carried: dict[Node, Node] = {}
    for output, name in zip(outputs[trace.results :], names, strict=True):
        carried.setdefault(output, trace.node(name))
    ends = dict.fromkeys(outputs[: trace.results], REPLICATED)
    cost = MeshCost(axes, cluster)
    space = PlacementSpace(trace.graph, cost, carried, limit_bytes=limit_bytes, in_place=False, ends=ends, opaque=ALIKE)
    fixed = {tangent_name(number): REPLICATED for number in trace.tangents} | dict(pins)
    placed = space.placed(choose(space.problem.fixed(space.pinned(fixed)), chooser).choice or ())
    lies = [placed.placements.get(trace.node(name), REPLICATED) for name in names]
    return PlacedJoint(trace, placed, (*(REPLICATED,) * trace.results, *lies))
