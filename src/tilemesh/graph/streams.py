"""Which operators run at the same time: independent branches of a program on streams of their own. Plain Python.

A small operator does not fill a device: it takes its time at the roof divided by the share of the device that it can
use. One after the other, such operators leave the rest idle; side by side they do not. The prediction: a program on
several streams takes at least as long as its longest chain, and at least as long as all its work on a full device.
`plan_streams` gives each operator a stream, following its chain, and says what both ways are predicted to take.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.core.hardware import Device
from tilemesh.graph.cost import roof_seconds
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.memory import owner
from tilemesh.graph.size import known, product

TILE = 128 * 128  # results that one multiprocessor, or one core, computes of a product at a time
LINE = 32_768  # elements of another operator that are worth one multiprocessor or core
SWITCH_S = 2e-6  # what waiting for another stream costs


@dataclass(frozen=True)
class StreamPlan:
    """For every operator its stream, and the predicted seconds of one stream and of several."""

    streams: dict[Node, int]
    one_by_one_s: float
    at_once_s: float
    waits: int  # operators that wait for another stream

    @property
    def pays(self) -> bool:
        return self.at_once_s < self.one_by_one_s


def share(node: Node, device: Device) -> float:
    """The part of a device that an operator can use."""
    units = max(1, device.sm_count)
    count = known(product(node.shape), {}) if node.op != "region" else _largest(node)
    each = TILE if node.op in ("dot", "conv", "conv_input", "conv_weight") else LINE
    return min(1.0, max(1, -(-count // each)) / units)


def _largest(region: Node) -> int:
    return max(known(product(output.shape), {}) for output in region["body"].outputs)


def plan_streams(graph: Graph, device: Device, streams: int = 4) -> StreamPlan:
    """A stream for each operator: that of an input that ends there, else the one that is free first."""
    free = [0.0] * streams
    last: list[Node | None] = [None] * streams
    ends: dict[Node, float] = {}
    chosen: dict[Node, int] = {}
    waits, alone, work = 0, 0.0, 0.0
    for node in graph.nodes():
        if not node.launched:
            continue
        part = share(node, device)
        full = roof_seconds(node, device)
        taken = device.launch_s + full / part
        needs = {maker(value) for value in node.inputs} & set(ends)
        ready = max((ends[need] for need in needs), default=0.0)
        follows = [place for place in range(streams) if last[place] in needs]
        place = follows[0] if follows else min(range(streams), key=lambda each: free[each])
        elsewhere = any(chosen[need] != place for need in needs)
        waits += elsewhere
        begin = max(free[place], ready + (SWITCH_S if elsewhere else 0.0))
        free[place] = ends[node] = begin + taken
        last[place], chosen[node] = node, place
        alone += taken
        work += device.launch_s * part + full
    return StreamPlan(chosen, alone, max(max(free), work), waits)


def maker(value: Node) -> Node:
    """The operator whose result a value is."""
    node = owner(value)
    return node.inputs[0] if node.op == "item" else node
