"""Running a graph in the memory that a plan gave it: one allocation, and every result written to its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilemesh.graph.by_torch import COMPARE, dtype_of, evaluate_torch
from tilemesh.graph.evaluate import DEAD, control
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.memory import MemoryPlan, arena
from tilemesh.graph.ops import DTYPES, primitive
from tilemesh.graph.size import numbers, product
from tilemesh.kernels.launch.tensors import read_device

Tensor = torch.Tensor


class PlannedProgram:
    """A graph with its block of memory. A run overwrites what the run before returned."""

    def __init__(self, graph: Graph, device: torch.device | str = "cpu") -> None:
        self.graph, self.plan = graph, arena(graph)
        self.device = read_device(device)
        self.block = torch.empty(self.plan.size, dtype=torch.uint8, device=self.device)
        self.places = _tensors(self.plan, self.block)
        self.order = graph.nodes()

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values: dict[Node, Any] = dict(zip(self.graph.inputs, tensors, strict=True))
        with torch.no_grad():
            for node in self.order:
                if node not in values:
                    values[node] = self._run(node, [values[value] for value in node.inputs])
        return tuple(values[node] for node in self.graph.outputs)

    def _run(self, node: Node, inputs: list[Any]) -> Any:
        place = self.places.get(node)
        if place is None:
            return evaluate_torch(node, inputs, {}, self.device)
        steered, value = control(node, inputs)
        if value is DEAD:
            return value
        name = primitive(node.op).torch
        if name:
            getattr(torch, name)(*inputs, out=place)
        elif node.op in _INTO:
            _INTO[node.op](node, place, *inputs)
        else:
            place.copy_(value if steered else evaluate_torch(node, inputs, {}, self.device))
        return place


def _tensors(plan: MemoryPlan, block: Tensor) -> dict[Node, Tensor]:
    places = {}
    for node, offset in plan.place().items():
        shape = numbers(node.shape)
        stop = offset + int(product(shape)) * DTYPES[node.dtype]  # type: ignore[arg-type]
        places[node] = block[offset:stop].view(dtype_of(node.dtype)).view(shape)
    return places


_INTO: dict[str, Callable[..., Any]] = {
    "compare": lambda node, out, x, y: COMPARE[node["kind"]](x, y, out=out),
    "sum": lambda node, out, x: torch.sum(x, node["dims"], out=out),
    "amax": lambda node, out, x: torch.amax(x, node["dims"], out=out),
    "argmax": lambda node, out, x: torch.argmax(x, node["dim"], out=out),
    "concat": lambda node, out, *inputs: torch.cat(inputs, node["dim"], out=out),
    "cast": lambda node, out, x: out.copy_(x),
}
