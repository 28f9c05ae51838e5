"""A torch function or module as a graph, to look at, rewrite and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tilemesh.core.errors import UsageError
from tilemesh.graph.by_torch import Tensor
from tilemesh.graph.emit import program
from tilemesh.graph.ir import Graph
from tilemesh.graph.lower import decompositions, lower


@dataclass(frozen=True)
class Traced:
    """A graph and the tensors behind its first inputs: a module's parameters and buffers, by name."""

    graph: Graph
    weights: dict[str, Tensor]

    def run(self, *tensors: Tensor) -> tuple[Any, ...]:
        device = tensors[0].device if tensors else "cpu"
        return program(self.graph, device)(*self.weights.values(), *tensors)

    def __str__(self) -> str:
        return str(self.graph)


def trace(model: Callable[..., Any], inputs: Sequence[Tensor]) -> Traced:
    """The graph of what a module or a function computes from these tensors."""
    weights: dict[str, Tensor] = {}
    if isinstance(model, nn.Module):
        weights = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}

    def flat(*tensors: Tensor) -> Sequence[Any]:
        given, rest = tensors[: len(weights)], tensors[len(weights) :]
        if isinstance(model, nn.Module):
            outputs = torch.func.functional_call(model, dict(zip(weights, given, strict=True)), rest)
        else:
            outputs = model(*rest)
        return outputs if isinstance(outputs, tuple | list) else (outputs,)

    tensors = [*weights.values(), *inputs]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise UsageError(f"trace was given {[type(tensor).__name__ for tensor in inputs]}; give tensors")
    with torch.no_grad():
        functional = torch.func.functionalize(flat, remove="mutations")
        module = make_fx(functional, decomposition_table=decompositions(), tracing_mode="fake")(*tensors)
    names = [*weights, *(f"input{place}" for place in range(len(inputs)))]
    lowered = lower(module, names)
    if lowered.held:
        held = ", ".join(lowered.held)
        raise UsageError(f"the program holds tensors of its own ({held}); make them inputs or buffers")
    return Traced(lowered.graph, weights)
