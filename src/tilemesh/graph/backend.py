"""`torch.compile(model, backend="tilemesh")`: forward and backward of a model through the graph's passes.

torch traces the model and its backward pass into aten operators (Dynamo, AOTAutograd); each becomes a graph, is
simplified, and is written as Python code that calls torch. What cannot be a graph runs as torch traced it, and
`report()` says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from tilemesh.graph.emit import Emitted, program
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.lower import NotServedError, lower
from tilemesh.graph.rewrite import Applied
from tilemesh.graph.rules import ALGEBRA, simplify


@dataclass
class Compiled:
    """One compiled piece: what came in, what it became, how long that took; `reason` says why it stayed."""

    nodes_before: int
    graph: Graph | None
    steps: Sequence[Applied]
    seconds: float
    reason: str = ""

    @property
    def opaque(self) -> list[str]:
        """The operators that stayed torch's own."""
        nodes = self.graph.nodes() if self.graph else []
        return [node["target"] for node in nodes if node.op == "opaque"]


@dataclass
class Report:
    """What a backend compiled, piece by piece."""

    pieces: list[Compiled]

    def __str__(self) -> str:
        lines = []
        for place, piece in enumerate(self.pieces):
            if piece.graph is None:
                lines.append(f"{place}: {piece.nodes_before} operators as torch traced them: {piece.reason}")
            else:
                after = piece.graph.launches
                lines.append(
                    f"{place}: {piece.nodes_before} operators became {after}, {len(piece.opaque)} of them torch's own,"
                    f" by {len(piece.steps)} rewrites in {piece.seconds:.2f} s"
                )
        return "\n".join(lines)


class Backend:
    """A backend for torch.compile that keeps a report. `tilemesh` is the one that torch finds by name."""

    def __init__(self) -> None:
        self.report = Report([])
        self._inner = aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        return self._inner(module, inputs, **options)

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        began = time.perf_counter()
        count = sum(node.op == "call_function" for node in module.graph.nodes)
        try:
            run, graph, steps = compiled(module, inputs)
        except NotServedError as error:
            self.report.pieces.append(Compiled(count, None, (), time.perf_counter() - began, str(error)))
            return make_boxed_func(module.forward)
        self.report.pieces.append(Compiled(count, graph, steps, time.perf_counter() - began))
        return run


def compiled(
    module: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[Callable[[list[Any]], Any], Graph, Sequence[Applied]]:
    """A traced module as a boxed function (it may free its inputs), its graph and the rewrites."""
    graph, held, returned = lower(module)
    better, steps = simplify(graph, ALGEBRA)
    device = next((value.device for value in inputs if isinstance(value, torch.Tensor)), torch.device("cpu"))
    run = program(better, device)
    extra = list(held.values())
    nodes = iter(range(len(returned)))
    kept = [next(nodes) if isinstance(value, Node) else None for value in returned]
    return _boxed(run, extra, kept, returned), better, steps


def _boxed(
    run: Emitted, held: list[Any], kept: Sequence[int | None], returned: Sequence[Any]
) -> Callable[[list[Any]], Any]:
    if not held and None not in kept:
        function = run.function
    else:

        def function(inputs: list[Any]) -> tuple[Any, ...]:
            given = [*inputs, *held]
            inputs.clear()
            outputs = run.function(given)
            return tuple(
                outputs[place] if place is not None else value for place, value in zip(kept, returned, strict=True)
            )

    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def tilemesh(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """The backend that `torch.compile(model, backend="tilemesh")` finds."""
    return Backend()(module, inputs, **options)
