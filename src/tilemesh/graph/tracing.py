"""A torch function or module as a graph, to look at, rewrite and run; and a graph as an fx module again."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from tilemesh.core.errors import RunError, UsageError
from tilemesh.graph.aten import decompositions
from tilemesh.graph.by_torch import Tensor
from tilemesh.graph.emit import examples, program
from tilemesh.graph.folding import specialise
from tilemesh.graph.ir import Graph
from tilemesh.graph.lower import lower
from tilemesh.graph.opaque import Strides
from tilemesh.graph.ops import primitive
from tilemesh.graph.rules import ALGEBRA, INFERENCE, simplify
from tilemesh.kernels.launch.tensors import read_device


@dataclass(frozen=True)
class Traced:
    """A graph and the tensors behind its first inputs: a module's parameters and buffers, by name."""

    graph: Graph
    weights: dict[str, Tensor]
    strides: tuple[Strides | None, ...] | None = None  # how results lie in memory

    def run(self, *tensors: Tensor) -> tuple[Any, ...]:
        given = self.graph.inputs[len(self.weights) :]
        if [tuple(tensor.shape) for tensor in tensors] != [node.shape for node in given]:
            needed = ", ".join(str(list(node.shape)) for node in given)
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "nothing"
            raise UsageError(f"run was given {shapes}; the program was traced for {needed}: trace it for these")
        device = tensors[0].device if tensors else "cpu"
        return program(self.graph, device, results=self.strides)(*self.weights.values(), *tensors)

    def frozen(self) -> Graph:
        """The graph of the last inputs alone: weights are constants, and batch norms become part of convolutions."""
        better, _ = simplify(self.graph, [*ALGEBRA, *INFERENCE])
        fixed = specialise(better, {name: value.cpu().numpy() for name, value in self.weights.items()})
        return simplify(fixed, [*ALGEBRA, *INFERENCE])[0]

    def export(self) -> fx.GraphModule:
        return _exported(self.graph, "cpu", self.strides)

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
    if isinstance(inputs, torch.Tensor):
        raise UsageError("trace was given a tensor; give a list of tensors: trace(model, [x])")
    if not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
        raise UsageError(f"trace was given {[type(tensor).__name__ for tensor in inputs]}; give tensors")
    whole = _Whole(model)
    weights = {
        name.removeprefix("model."): value.detach()
        for state in (whole.named_parameters, whole.named_buffers)
        for name, value in state(remove_duplicate=False)  # a tied one is an input under each of its names
    }
    try:
        with torch.no_grad(), quiet():
            exported, signature = aot_export_module(
                whole, list(inputs), trace_joint=False, decompositions=decompositions(norms=True)
            )
    except Exception as error:
        raise RunError(f"the program cannot be traced: {tracing_failure(error)}") from error
    module: Any = exported
    if signature.user_inputs_to_mutate:
        raise UsageError("the program changes its inputs in place; give it a copy: x = x.clone()")
    changed = len(signature.buffers_to_mutate)
    (returned,) = module.graph.find_nodes(op="output")
    returned.args = (returned.args[0][changed:],)
    word = "input"
    while any(f"{word}{place}" in weights for place in range(len(inputs))):
        word += "_"  # inputs of one name, shape and dtype would be one node
    names = [*weights, *(f"{word}{place}" for place in range(len(inputs)))]
    lowered = lower(module, names, convolutions=True)
    if lowered.held:
        held = ", ".join(lowered.held)
        raise UsageError(f"the program holds tensors of its own ({held}); make them inputs or buffers")
    return Traced(lowered.graph, weights, lowered.strides)


@contextmanager
def quiet() -> Iterator[None]:
    """torch's tracing logs an operator that fails with its whole stack; the error that follows says what is wrong."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def tracing_failure(error: BaseException) -> str:
    """What torch says about a program that it cannot trace, on one line, and the user's line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode):
        said = "what it does depends on a tensor's values (tilemesh graph breaks lists where)"
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Dynamo puts words of its own around an operator's error.
        inner = re.search(r"got (\w+Error)\(['\"](.*)['\"]\)", str(error))
        if inner is not None:
            said = f"{inner[1]}: {inner[2]}"
        else:
            said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not {"torch", "tilemesh"} & set(Path(frame.filename).parts) and not frame.filename.startswith("<")
    ]
    return said + (f" ({frames[-1]})" if frames else "")


def export(graph: Graph, device: torch.device | str = "cpu") -> fx.GraphModule:
    """A graph as an fx module of aten operators, for torch's own tools. Sizes must be known; inputs lie in order."""
    return _exported(graph, device, None)


def _exported(graph: Graph, device: torch.device | str, results: Sequence[Strides | None] | None) -> fx.GraphModule:
    place = read_device(device)
    if any(primitive(node.op).kind == "control" for node in graph.nodes()):
        raise UsageError("the graph has switches, which an fx module has not: run it by program or run_torch")
    run = program(graph, place, results=results)
    return make_fx(lambda *tensors: run(*tensors), tracing_mode="fake")(*examples(graph, place))
