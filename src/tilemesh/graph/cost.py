"""What a graph costs on a device, operator by operator: the roofline, plus a launch each. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilemesh.core.hardware import Device
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.rewrite import Applied

PEAKS = {"float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}  # how hardware names the dtypes of a graph


@dataclass(frozen=True)
class RuleGain:
    """What one rule brought: how often it fitted, and operators, bytes and seconds that are no longer needed."""

    rule: str
    times: int
    launches: int
    moved_bytes: int
    seconds: float


def node_seconds(node: Node, device: Device) -> float:
    """A launch, and the longer of computing and moving."""
    return device.launch_s + roof_seconds(node, device) if node.launched else 0.0


def roof_seconds(node: Node, device: Device) -> float:
    """The least time of an operator: the longer of computing and moving, without its launch."""
    if not node.launched:
        return 0.0
    return max(_compute_seconds(node, device), node.moved_bytes / device.memory_bytes_per_s)


def _compute_seconds(node: Node, device: Device) -> float:
    """Floating-point operations at the rate of a dtype: of a region's own operators, of an opaque one's operands."""
    if node.op == "region":
        return sum(_compute_seconds(inner, device) for inner in node["body"].nodes())
    floats = [each.dtype for each in (node, *node.inputs) if each.dtype in PEAKS]
    dtype = PEAKS[floats[0]] if floats and (node.op == "opaque" or node.dtype in PEAKS) else "fp32"
    return node.flops / device.peak(dtype if dtype in device.peak_flops_per_s else "fp32")


def graph_seconds(graph: Graph, device: Device) -> float:
    return sum(node_seconds(node, device) for node in graph.nodes())


def graph_roof_seconds(graph: Graph, device: Device) -> float:
    return sum(roof_seconds(node, device) for node in graph.nodes())


def saved_by(graph: Graph, steps: Sequence[Applied], device: Device) -> list[RuleGain]:
    """For every rule what it saved, in the order in which they first fitted: the steps are done again one by one."""
    totals: dict[str, RuleGain] = {}
    for step in steps:
        after = graph.substitute({step.before: step.after})
        old = totals.get(step.rule, RuleGain(step.rule, 0, 0, 0, 0.0))
        totals[step.rule] = RuleGain(
            step.rule,
            old.times + 1,
            old.launches + graph.launches - after.launches,
            old.moved_bytes + graph.moved_bytes - after.moved_bytes,
            old.seconds + graph_seconds(graph, device) - graph_seconds(after, device),
        )
        graph = after
    return list(totals.values())
