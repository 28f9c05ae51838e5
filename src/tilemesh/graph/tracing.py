"""A torch function or module as a graph, to look at, rewrite and run; and a graph as an fx module again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_module
from torch.fx.experimental.proxy_tensor import make_fx

from tilemesh.core.errors import UsageError
from tilemesh.graph.aten import decompositions
from tilemesh.graph.by_torch import Tensor
from tilemesh.graph.emit import examples, program
from tilemesh.graph.folding import specialise
from tilemesh.graph.ir import Graph
from tilemesh.graph.lower import lower
from tilemesh.graph.opaque import Strides
from tilemesh.graph.rules import ALGEBRA, INFERENCE, simplify
from tilemesh.kernels.launch.tensors import read_device


@dataclass(frozen=True)
class Traced:
    """A graph and the tensors behind its first inputs: a module's parameters and buffers, by name."""

    graph: Graph
    weights: dict[str, Tensor]
    strides: tuple[Strides | None, ...] | None = None  # how results lie in memory

    def run(self, *tensors: Tensor) -> tuple[Any, ...]:
        device = tensors[0].device if tensors else "cpu"
        return program(self.graph, device, results=self.strides)(*self.weights.values(), *tensors)

    def frozen(self) -> Graph:
        """The graph of the last inputs alone: weights are constants, and batch norms become part of convolutions."""
        better, _ = simplify(self.graph, [*ALGEBRA, *INFERENCE])
        fixed = specialise(better, {name: value.cpu().numpy() for name, value in self.weights.items()})
        return simplify(fixed, [*ALGEBRA, *INFERENCE])[0]

    def export(self) -> fx.GraphModule:
        return export(self.graph)

    def __str__(self) -> str:
        return str(self.graph)


class _Whole(nn.Module):
    """A module or a function whose results are a tuple."""

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        outputs = self.model(*tensors)
        return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def trace(model: Callable[..., Any], inputs: Sequence[Tensor]) -> Traced:
    """The graph of what a module or a function computes from these tensors.

    Buffers that a module changes as it runs (the averages of a batch norm in training) stay as they are.
    """
    if not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
        raise UsageError(f"trace was given {[type(tensor).__name__ for tensor in inputs]}; give tensors")
    whole = _Whole(model)
    weights = {
        name.removeprefix("model."): value.detach()
        for name, value in (*whole.named_parameters(), *whole.named_buffers())
    }
    with torch.no_grad():
        exported, signature = aot_export_module(
            whole, list(inputs), trace_joint=False, decompositions=decompositions(norms=True)
        )
    module: Any = exported
    if signature.user_inputs_to_mutate:
        raise UsageError("the program changes its inputs in place; give it a copy: x = x.clone()")
    changed = len(signature.buffers_to_mutate)
    (returned,) = module.graph.find_nodes(op="output")
    returned.args = (returned.args[0][changed:],)
    names = [*weights, *(f"input{place}" for place in range(len(inputs)))]
    lowered = lower(module, names, convolutions=True)
    if lowered.held:
        held = ", ".join(lowered.held)
        raise UsageError(f"the program holds tensors of its own ({held}); make them inputs or buffers")
    return Traced(lowered.graph, weights, lowered.strides)


def export(graph: Graph, device: torch.device | str = "cpu") -> fx.GraphModule:
    """A graph as an fx module of aten operators, for torch's own tools. Sizes must be known."""
    place = read_device(device)
    run = program(graph, place)
    return make_fx(lambda *tensors: run(*tensors), tracing_mode="fake")(*examples(graph, place))
