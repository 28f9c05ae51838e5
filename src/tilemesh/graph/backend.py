"""`torch.compile(model, backend="tilemesh")`: forward and backward of a model through the graph's passes.

torch traces the model and its backward pass into aten operators (Dynamo, AOTAutograd); each becomes a graph, is
simplified, and is written as Python code that calls torch. What cannot be a graph runs as torch traced it, and
`report()` says why.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from tilemesh.core.errors import UsageError, unknown
from tilemesh.graph.aten import decompositions
from tilemesh.graph.compile_ahead import AheadCompilers
from tilemesh.graph.emit import Emitted, program
from tilemesh.graph.generated import server, way_for
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.joining import joined_products
from tilemesh.graph.lower import NotServedError, apart, lower
from tilemesh.graph.regions import fused
from tilemesh.graph.rewrite import Applied
from tilemesh.graph.rotations import with_rotations
from tilemesh.graph.rules import ALGEBRA, simplify
from tilemesh.graph.templates import with_products, with_rows


@dataclass
class Compiled:
    """One compiled piece: what came in, what it became, how long that took; `reason` says why it stayed."""

    nodes_before: int
    graph: Graph | None
    steps: Sequence[Applied]
    seconds: float
    reason: str = ""
    before: Graph | None = None  # as it was lowered
    run: Callable[[list[Any]], Any] | None = None
    given: int = 0  # inputs of a call; further ones of the graph are tensors that the program holds

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

    def __init__(self, kernels: bool = True, cuda_graphs: bool = False, rematerialise: bool | None = None) -> None:
        self.report = Report([])
        self.ahead: AheadCompilers | None = None  # after a model was compiled it has no processes
        self.kernels = kernels  # False: operator by operator, for comparison
        self.cuda_graphs = cuda_graphs  # record each program on a GPU once and replay it: no cost on the host
        # Whether the backward program computes cheap values again instead of reading them: None, on a GPU alone.
        self.rematerialise = rematerialise

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        way = way_for(_device(inputs)) if self.kernels else None
        compilers: list[Any] = [functools.partial(self._compile, way=way)] * 3
        if self.cuda_graphs and _device(inputs).type == "cuda":
            compilers = [
                functools.partial(self._recorded, way=way, given=len(inputs), kind=kind)
                for kind in ("forward", "backward", "inference")
            ]
        settings: dict[str, Any] = {"decompositions": decompositions()} if way is not None else {}
        again = self.rematerialise if self.rematerialise is not None else _device(inputs).type == "cuda"
        if again and way is not None:
            settings["partition_fn"] = _partition
        names = ("fw_compiler", "bw_compiler", "inference_compiler")
        compiling = aot_autograd(**dict(zip(names, compilers, strict=True)), **settings)
        # Processes that compile kernels start while torch traces the backward pass.
        with AheadCompilers(None if way == "triton" else 0) as self.ahead:
            return compiling(module, inputs, **options)

    def _recorded(
        self, module: fx.GraphModule, inputs: Sequence[Any], way: str | None, given: int, kind: str
    ) -> Callable[[list[Any]], Any]:
        """The program as a CUDA graph, by torch's own recorder, which shares memory between forward and backward.

        What lies at one address in every call (weights, and what the forward program hands to the backward one) is
        read where it is; other inputs are copied first.
        """
        from torch._dynamo.backends.cudagraphs import check_for_skip, get_device_index, get_stack_traces
        from torch._inductor.cudagraph_trees import cudagraphify_impl
        from torch._inductor.cudagraph_utils import get_placeholder_info
        from torch._inductor.utils import count_tangents, num_fw_fixed_arguments

        run = self._compile(module, inputs, way)
        fixed = count_tangents(module) if kind == "backward" else num_fw_fixed_arguments(given, len(inputs))
        skip = check_for_skip(module, fixed)
        if skip or any(_changes(value) for value in inputs):
            return run
        recorded: Callable[[list[Any]], Any] = cudagraphify_impl(
            run,
            list(inputs),
            range(fixed),
            device_index=get_device_index(module),
            is_backward=kind == "backward",
            is_inference=kind == "inference",
            stack_traces=get_stack_traces(module),
            placeholders=get_placeholder_info(module.graph),
            mutated_input_idxs=(),
        )
        recorded._boxed_call = True  # type: ignore[attr-defined]
        return recorded

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any], way: str | None) -> Callable[[list[Any]], Any]:
        if any(_changes(value) for value in inputs):
            return self._by_sizes(module, way)
        began = time.perf_counter()
        count = sum(node.op == "call_function" for node in module.graph.nodes)
        try:
            run, before, graph, steps = compiled(module, inputs, way, self.ahead)
        except NotServedError as error:
            self.report.pieces.append(Compiled(count, None, (), time.perf_counter() - began, str(error)))
            return make_boxed_func(module.forward)
        took = time.perf_counter() - began
        self.report.pieces.append(Compiled(count, graph, steps, took, "", before, run, len(inputs)))
        return run

    def _by_sizes(self, module: fx.GraphModule, way: str | None) -> Callable[[list[Any]], Any]:
        """One program for each combination of sizes that is seen: kernels and plans need sizes that are known."""
        programs: dict[tuple[Any, ...], Callable[[list[Any]], Any]] = {}

        def run(inputs: list[Any]) -> Any:
            sizes = tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in inputs)
            if sizes not in programs and len(programs) < MOST_SIZES:
                programs[sizes] = self._specialised(module, inputs, way)
            if sizes in programs:
                tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
                inputs.clear()
                return programs[sizes](tensors)
            return make_boxed_func(module.forward)(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _specialised(self, module: fx.GraphModule, inputs: list[Any], way: str | None) -> Callable[[list[Any]], Any]:
        """The program for the sizes of these inputs."""

        def at_these_sizes(*tensors: torch.Tensor) -> Any:
            given = iter(tensors)
            return module.forward(*[next(given) if isinstance(value, torch.Tensor) else value for value in inputs])

        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        with torch.no_grad():
            static = make_fx(at_these_sizes, tracing_mode="fake")(*tensors)
        with AheadCompilers(None if way == "triton" else 0) as self.ahead:
            return self._compile(static, tensors, way)


def _partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward program by torch's least cut, which keeps what is cheap to keep and computes the rest again.

    Of a loss the cut could keep the logits, or their log-probabilities, which are as large. The forward program has
    the logits anyway and need not write the others, so those are computed again.
    """
    for node in joint.graph.nodes:
        if node.target is torch.ops.aten.nll_loss_forward.default and isinstance(node.args[0], fx.Node):
            chances = node.args[0]
            if chances.target in (torch.ops.aten.sub.Tensor, torch.ops.aten._to_copy.default):
                chances.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    forward, backward = min_cut_rematerialization_partition(joint, inputs, **settings)
    return forward, backward


MOST_SIZES = 16  # programs for one piece whose sizes change; beyond, it runs as torch traced it


def _changes(value: Any) -> bool:
    """Whether an input is, or has, a size that is not the same in every call."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    return isinstance(value, torch.Tensor) and not all(type(size) is int for size in (*value.shape, *value.stride()))


def _device(inputs: Sequence[Any]) -> torch.device:
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def compiled(
    module: fx.GraphModule, inputs: Sequence[Any], way: str | None = None, ahead: AheadCompilers | None = None
) -> tuple[Callable[[list[Any]], Any], Graph, Graph, Sequence[Applied]]:
    """A traced module as a boxed function (it may free its inputs), its graph before and after, and the rewrites."""
    lowered = lower(module, kernels=way is not None)
    better, steps = simplify(lowered.graph, ALGEBRA)
    better, _ = joined_products(better)
    better = apart(better, lowered.made)
    if way is not None:
        better = as_kernels(better, way)
    extra, returned = list(lowered.held.values()), lowered.returned
    run = program(better, _device(inputs), [*inputs, *extra], way, ahead)
    nodes = iter(range(len(returned)))
    kept = [next(nodes) if isinstance(value, Node) else None for value in returned]
    return _boxed(run, extra, kept, returned), lowered.graph, better, steps


def as_kernels(graph: Graph, way: str) -> Graph:
    """The graph as kernels: hand-written ones where a pattern of theirs is found, generated ones for the rest."""
    if way == "c":
        return fused(graph, server(way))
    graph = with_products(with_rotations(graph), PRODUCT_DTYPES[way])
    return with_rows(fused(graph, server(way), swaps=True))


PRODUCT_DTYPES = {"triton": ("bfloat16", "float16"), "interpret": ("bfloat16", "float16", "float32")}


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


MODES = {"default": {}, "reduce-overhead": {"cuda_graphs": True}}
OPTIONS = ("kernels", "cuda_graphs", "rematerialise")


def tilemesh(
    module: fx.GraphModule, inputs: Sequence[Any], mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """The backend that `torch.compile(model, backend="tilemesh")` finds.

    mode="reduce-overhead" or options={"cuda_graphs": True} records CUDA graphs on a GPU.
    """
    if mode is not None and mode not in MODES:
        raise unknown("mode", mode, MODES)
    given = {**MODES[mode or "default"], **(options or {})}
    for name, value in given.items():
        if name not in OPTIONS:
            raise unknown("option", name, OPTIONS)
        if not isinstance(value, bool) and not (name == "rematerialise" and value is None):
            raise UsageError(f"option {name} is {value!r}; give True or False")
    return Backend(**given)(module, inputs)
