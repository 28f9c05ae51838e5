"""A module's two passes, placed by a chooser: what `tilemesh.parallel.place` then runs.

joint = choose_joint(trace_joint(module, call), mesh.shape, parse_cluster("4xh100"))
placed = place(module, mesh, example=batch, joint=joint)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.axes import Axes
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import Cluster
from tilemesh.core.tensor_placement import REPLICATED
from tilemesh.graph.ir import Node
from tilemesh.graph.joint import JointTrace, tangent_name
from tilemesh.parallel.agree import tell
from tilemesh.parallel.choose import choose
from tilemesh.parallel.placed import Pins, PlacedJoint, fitting
from tilemesh.plan.place.cost import MeshCost
from tilemesh.plan.place.problem import PlacementProblem
from tilemesh.plan.place.rules import DRAWN_ALIKE
from tilemesh.plan.place.space import PlacementSpace


def choose_joint(
    trace: JointTrace, axes: Axes, cluster: Cluster | MeshCost, chooser: str = "ilp", limit_bytes: float = math.inf,
    pins: Pins = MappingProxyType({}), comm: Communicator | None = None,
) -> PlacedJoint:  # fmt: skip
    """Where parameters, inputs and all between lie, both passes together. Results are whole; a gradient lies as what it
    is of. `cluster`: of the mesh's devices, or what things cost there. `pins`: of parameters and inputs, by name.
    `comm`: ranks that are all told what the first has chosen."""
    pinned = fitting(trace, pins, axes)
    axes = tuple((axis, ranks) for axis, ranks in axes if ranks > 1)
    outputs, names = trace.graph.outputs, (*trace.changed, *trace.gradients)
    carried: dict[Node, Node] = {}
    for output, name in zip(outputs[trace.results :], names, strict=True):
        carried.setdefault(output, trace.node(name))
    ends = dict.fromkeys(outputs[: trace.results], REPLICATED)
    cost = cluster if isinstance(cluster, MeshCost) else MeshCost(axes, cluster)
    space = PlacementSpace(
        trace.graph, cost, carried, limit_bytes=limit_bytes, in_place=False, ends=ends, opaque=DRAWN_ALIKE
    )
    fixed = {tangent_name(number): REPLICATED for number in trace.tangents} | pinned
    problem = space.problem.fixed(space.pinned(fixed))
    placed = space.placed(_choice(problem, chooser, comm))
    lies = [placed.placements.get(trace.node(name), REPLICATED) for name in names]
    return PlacedJoint(trace, placed, (*(REPLICATED,) * trace.results, *lies))


def _choice(problem: PlacementProblem, chooser: str, comm: Communicator | None) -> Sequence[int]:
    """The first rank's, on every rank: a solver that time ends need not come to the same everywhere."""
    if comm is None or comm.size == 1:
        return choose(problem, chooser).choice or ()
    answer: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            answer = {"choice": choose(problem, chooser).choice}
        except (UsageError, RunError) as error:  # which the others would wait for
            answer = {"refused": str(error)}
    answer = json.loads(tell(comm, json.dumps(answer)))
    if "refused" in answer:
        raise UsageError(answer["refused"])
    return tuple(answer["choice"])
