"""What each operator of a program takes on this machine: run by itself, on inputs that lie as it reads them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilemesh.core.hardware import Device
from tilemesh.graph.by_torch import dtype_of
from tilemesh.graph.cost import node_seconds
from tilemesh.graph.emit import program
from tilemesh.graph.ir import Graph, Node, make, rebuilt, users
from tilemesh.graph.ops import TUPLE, VIEWS, primitive

LEAST_CALLS, MOST_SECONDS = 5, 0.1


@dataclass(frozen=True)
class OperatorTime:
    """An operator, or several that are the same: predicted and measured seconds of all; why it was not measured."""

    operator: str
    shape: tuple[int, ...]
    line: str
    count: int
    predicted_s: float
    measured_s: float | None
    why: str = ""


def operator_times(graph: Graph, device: Device) -> list[OperatorTime]:
    """Each launched operator's time on a CPU, equal ones together, the longest first. `device`: what predicts."""
    order = graph.nodes()
    readers = users(order)
    alike: dict[Graph | Node, list[Node]] = {}
    for node in order:
        if node.launched:
            alike.setdefault(_alone(node, readers[node]) or node, []).append(node)
    times = []
    for single, nodes in alike.items():
        seconds, why = (
            (None, "it reads what only its own program makes") if isinstance(single, Node) else _timed(single)
        )
        node, count = nodes[0], len(nodes)
        name = str(node["target"]) if node.op == "opaque" else node.op
        if node.op == "region":
            name = "region of " + ", ".join(dict.fromkeys(each.op for each in node["body"].nodes() if each.launched))
        result = next((each for each in readers[node] if each.op == "item"), node)
        shape = result.shape
        measured = None if seconds is None else count * seconds
        times.append(OperatorTime(name, shape, node.line, count, count * node_seconds(node, device), measured, why))
    return sorted(times, key=lambda each: -(each.measured_s or each.predicted_s))


def _alone(node: Node, readers: Sequence[Node]) -> Graph | None:
    """A program of one operator: views and constants that it reads stay with it."""
    inputs: dict[Node, Node] = {}

    def read(value: Node) -> Node:
        if value.op in VIEWS and value.op != "item":
            return rebuilt(value, [read(each) for each in value.inputs])
        if primitive(value.op).kind == "source" and value.op != "input":
            return value
        name = f"input{len(inputs)}"
        return inputs.setdefault(value, make("input", name=name, shape=value.shape, dtype=value.dtype))

    single = rebuilt(node, [read(value) for value in node.inputs])
    if any(value.dtype == TUPLE for value in inputs):
        return None
    items = {each: rebuilt(each, [single]) for each in readers if each.op == "item"}
    return Graph(tuple(inputs.values()), tuple(dict.fromkeys(items.values())) or (single,))


def _timed(graph: Graph) -> tuple[float | None, str]:
    """The median of some calls, and why there is none."""
    inputs = [
        torch.rand(node.shape).to(dtype_of(node.dtype)) if "float" in node.dtype
        else torch.zeros(node.shape, dtype=dtype_of(node.dtype))
        for node in graph.inputs
    ]  # fmt: skip
    try:
        run = program(graph, "cpu", inputs=inputs)
        run(*inputs)
        readings: list[float] = []
        ends = time.perf_counter() + MOST_SECONDS
        while len(readings) < LEAST_CALLS or time.perf_counter() < ends:
            began = time.perf_counter()
            run.function(list(inputs))
            readings.append(time.perf_counter() - began)
    except RuntimeError as error:  # an operator of torch that these numbers do not fit
        return None, str(error).splitlines()[0]
    return statistics.median(readings), ""
