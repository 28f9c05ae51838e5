"""`torch.compile(model, backend="tilemesh")`: forward and backward of a model through the graph's passes.

torch traces the model and its backward pass into aten operators (Dynamo, AOTAutograd); each becomes a graph, is
simplified, and is written as Python code that calls torch. What cannot be a graph runs as torch traced it, and
`report()` says why.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.units import parse_bytes
from tilemesh.graph.aten import decompositions
from tilemesh.graph.calls import with_better_calls
from tilemesh.graph.channels import channels_last, strides_of
from tilemesh.graph.emit import Emitted, program
from tilemesh.graph.generated import server, way_for
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.joining import joined_products
from tilemesh.graph.lower import Lowered, NotServedError, apart, lower
from tilemesh.graph.opaque import Strides, laid, lies, traced_strides
from tilemesh.graph.partition import StepCut, least_cut, within
from tilemesh.graph.recorded import reason_against, recorded, waits_for_host
from tilemesh.graph.regions import fused
from tilemesh.graph.rewrite import Applied
from tilemesh.graph.rotations import with_rotations
from tilemesh.graph.rules import ALGEBRA, simplify
from tilemesh.graph.sized import Sizes, SymbolReader, generalised, joined_text
from tilemesh.graph.templates import with_products, with_rows
from tilemesh.kernels.launch.compile_ahead import AheadCompilers


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
    held: Sequence[Any] = ()  # these
    recorded: bool = False  # as a CUDA graph
    unrecorded: str = ""  # why not, where it would be

    @property
    def opaque(self) -> list[str]:
        """The operators that stayed torch's own."""
        nodes = self.graph.nodes() if self.graph else []
        return [node["target"] for node in nodes if node.op == "opaque"]


@dataclass
class Report:
    """What a backend compiled, piece by piece."""

    pieces: list[Compiled]
    cuts: list[StepCut] = field(default_factory=list)
    """Of pieces with a budget of memory, what their forward programs keep."""

    def __str__(self) -> str:
        lines = [str(cut) for cut in self.cuts]
        for place, piece in enumerate(self.pieces):
            if piece.graph is None:
                lines.append(f"{place}: {piece.nodes_before} operators as torch traced them: {piece.reason}")
            else:
                after = piece.graph.launches
                lines.append(
                    f"{place}: {piece.nodes_before} operators became {after}, {len(piece.opaque)} of them torch's own,"
                    f" by {len(piece.steps)} rewrites in {piece.seconds:.2f} s"
                    + (", one CUDA graph" if piece.recorded else "")
                    + (f", not recorded: {piece.unrecorded}" if piece.unrecorded else "")
                )
        return "\n".join(lines)


class Backend:
    """A backend for torch.compile that keeps a report. `tilemesh` is the one that torch finds by name."""

    def __init__(
        self, kernels: bool = True, cuda_graphs: bool | None = None, rematerialise: bool | None = None,
        memory: str | int | None = None,
    ) -> None:  # fmt: skip
        self.report = Report([])
        self.ahead: AheadCompilers | None = None  # after a model was compiled it has no processes
        self.kernels = kernels  # False: operator by operator, for comparison
        # Record programs on a GPU once and replay them: no cost on the host. None: those that wait for the host.
        self.cuda_graphs = cuda_graphs
        # Whether the backward program computes cheap values again instead of reading them: None, on a GPU alone.
        self.rematerialise = rematerialise
        # The most bytes that the values of a training step may take at once, as "2GiB": what does not fit is computed
        # again. Parameters and inputs are not counted; each piece of a model has the budget to itself.
        self.memory = parse_bytes(memory) if isinstance(memory, str) else memory

    def __deepcopy__(self, memo: Any) -> Backend:
        """Itself: copies of a compiled module share their backend, as they share torch's own, and its report."""
        return self

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        way = way_for(_device(inputs)) if self.kernels else None
        kinds = ("forward", "backward", "inference")
        compilers: list[Any] = [functools.partial(self._compile, way=way, kind=kind) for kind in kinds]
        if self.cuda_graphs is not False and _device(inputs).type == "cuda":
            known: dict[str, bool] = {}
            compilers = [functools.partial(self._recorded, way=way, kind=kind, known=known) for kind in kinds]
        # Of a piece whose sizes change operators are taken apart later (`_at_sizes`): it may run as torch traced it.
        sized = any(_changes(value) for value in inputs)
        settings: dict[str, Any] = {} if way is None or sized else {"decompositions": decompositions()}
        again = self.rematerialise if self.rematerialise is not None else _device(inputs).type == "cuda"
        if self.memory is not None:
            planned = functools.partial(_planned, way=way)
            settings["partition_fn"] = functools.partial(
                within, budget=self.memory, planned=planned, took=self.report.cuts.append
            )
        elif again and way is not None:
            settings["partition_fn"] = least_cut
        names = ("fw_compiler", "bw_compiler", "inference_compiler")
        compiling = aot_autograd(**dict(zip(names, compilers, strict=True)), **settings)
        # Processes that compile kernels start while torch traces the backward pass. torch would compile the backward
        # program when it is first run; compiled here, its kernels are made beside the forward program's.
        with AheadCompilers(None if way == "triton" else 0) as self.ahead, _backward_at_once(way):
            return compiling(with_better_calls(module), inputs, **options)

    def _recorded(
        self, module: fx.GraphModule, inputs: Sequence[Any], way: str | None, kind: str, known: dict[str, bool]
    ) -> Callable[[list[Any]], Any]:
        """The program as a CUDA graph where it can be one. known: whether the forward program was recorded.

        The recorder takes it that what the forward program leaves for the backward one lies where it lay before, which
        holds only where both are recorded.
        """
        run = self._compile(module, inputs, way, kind)
        if any(_changes(value) for value in inputs):
            return run
        piece = self.report.pieces[-1]
        if kind == "backward":
            wanted = known.get("forward", False)
        else:
            wanted = self.cuda_graphs or (piece.graph is not None and waits_for_host(piece.graph))
        if not wanted:
            return run
        piece.unrecorded = reason_against(piece.graph, module, inputs, piece.held)
        if piece.unrecorded:
            return run
        known[kind] = piece.recorded = True
        return recorded(run, module, inputs, kind)

    def _compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], way: str | None, kind: str = "inference"
    ) -> Callable[[list[Any]], Any]:
        if any(_changes(value) for value in inputs):
            return self._by_sizes(module, way)
        began = time.perf_counter()
        count = sum(node.op == "call_function" for node in module.graph.nodes)
        try:
            run, before, graph, steps, held = compiled(module, inputs, way, self.ahead, kind)
        except NotServedError as error:
            self.report.pieces.append(Compiled(count, None, (), time.perf_counter() - began, str(error)))
            return _as_traced(module)
        took = time.perf_counter() - began
        self.report.pieces.append(Compiled(count, graph, steps, took, "", before, run, len(inputs), held))
        return _with_signs(run)

    def _by_sizes(self, module: fx.GraphModule, way: str | None) -> Callable[[list[Any]], Any]:
        """One program for all sizes where there is one (`sized.py`), else one for each combination that is seen."""
        programs: dict[tuple[Any, ...], Callable[[list[Any]], Any]] = {}
        general: list[Callable[[list[Any]], Any] | None] = []

        def run(inputs: list[Any]) -> Any:
            if not general:
                general.append(self._sized(module, inputs, way))
            whole = general[0]
            if whole is not None and all(value > 1 for value in inputs if type(value) is int):
                return whole(inputs)
            sizes = tuple(
                (tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value for value in inputs
            )
            if sizes not in programs and len(programs) < MOST_SIZES:
                programs[sizes] = self._specialised(module, inputs, way)
            if sizes in programs:
                tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
                inputs.clear()
                return programs[sizes](tensors)
            return make_boxed_func(module.forward)(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _sized(
        self, module: fx.GraphModule, inputs: Sequence[Any], way: str | None
    ) -> Callable[[list[Any]], Any] | None:
        """The program for all sizes, where the programs for a few made-up ones differ in nothing else."""
        if way not in (None, "c"):
            return None  # Triton's kernels have their sizes as constants
        began = time.perf_counter()
        try:
            symbols = SymbolReader(module)
            for made_up in symbols.instances(symbols.read(inputs)):
                with suppress(Exception):  # what a table or a guard does not let be, the sizes below may
                    run, written = _general_program(module, symbols, made_up, way)
                    count = sum(node.op == "call_function" for node in module.graph.nodes)
                    took = time.perf_counter() - began
                    self.report.pieces.append(Compiled(count, written.run.graph, written.steps, took))
                    return _with_signs(run)
        except NotServedError:
            pass
        return None

    def _specialised(self, module: fx.GraphModule, inputs: list[Any], way: str | None) -> Callable[[list[Any]], Any]:
        """The program for the sizes of these inputs."""
        static, tensors = _at_sizes(module, inputs, way)
        with AheadCompilers(None if way == "triton" else 0) as self.ahead:
            return self._compile(static, tensors, way)


def _with_signs(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The same for inputs whose numbers torch would negate as they are read, which kernels do not see."""

    def signed(inputs: list[Any]) -> Any:
        for place, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and value.is_neg():
                inputs[place] = value.resolve_neg()
        return run(inputs)

    signed._boxed_call = True  # type: ignore[attr-defined]
    return signed


def _at_sizes(module: fx.GraphModule, inputs: Sequence[Any], way: str | None) -> tuple[fx.GraphModule, list[Any]]:
    """A piece with the sizes of these inputs as numbers, and the tensors among the inputs, which are all that it
    takes."""

    def at_these_sizes(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        return module.forward(*[next(given) if isinstance(value, torch.Tensor) else value for value in inputs])

    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    with torch.no_grad():
        table = decompositions() if way is not None else {}
        return make_fx(at_these_sizes, decomposition_table=table, tracing_mode="fake")(*tensors), tensors


def _general_program(
    module: fx.GraphModule, symbols: SymbolReader, made_up: Sequence[Sizes], way: str | None
) -> tuple[Callable[[list[Any]], Any], _Written]:
    """One function for all sizes, and the first of the programs that it was found from."""
    programs = [_written(*_at_sizes(module, symbols.inputs_at(sizes), way), way, kernels=False) for sizes in made_up]
    first = programs[0]
    if any(each.lowered.held or each.kept != first.kept for each in programs):
        raise NotServedError("a piece that holds tensors")
    function = generalised([each.run for each in programs], made_up)
    numbers = [
        None if isinstance(values[0], Node) else joined_text([repr(value) for value in values], made_up)
        for values in zip(*(each.lowered.returned for each in programs), strict=True)
    ]
    names = ", ".join(f"n{place}" for place in range(len(made_up[0])))
    returned = eval(f"lambda {names}: [{', '.join(str(text) for text in numbers)}]")

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        sizes = symbols.read(inputs)
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        inputs.clear()
        outputs = function(tensors, *sizes)
        return tuple(
            outputs[place] if place is not None else value
            for place, value in zip(first.kept, returned(*sizes), strict=True)
        )

    run._boxed_call = True  # type: ignore[attr-defined]
    return run, first


def _backward_at_once(way: str | None) -> AbstractContextManager[Any]:
    """Where compiling takes long, torch is asked for the backward program together with the forward one."""
    if way in (None, "c") or not hasattr(functorch_config, "force_non_lazy_backward_lowering"):
        return nullcontext()
    patch: AbstractContextManager[Any] = functorch_config.patch(force_non_lazy_backward_lowering=True)
    return patch


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
    module: fx.GraphModule,
    inputs: Sequence[Any],
    way: str | None = None,
    ahead: AheadCompilers | None = None,
    kind: str = "inference",
) -> tuple[Callable[[list[Any]], Any], Graph, Graph, Sequence[Applied], Sequence[Any]]:
    """A traced module as a boxed function (it may free its inputs), its graph before and after, the rewrites, and the
    tensors that it holds. kind: forward, backward or inference."""
    written = _written(module, inputs, way, ahead, kind)
    run, kept = written.run, written.kept
    if _returns(kind) is not None:
        _tell_strides([run.strides[place] if run.strides and place is not None else None for place in kept])
    extra = list(written.lowered.held.values())
    boxed = _boxed(run, extra, kept, written.lowered.returned)
    return boxed, written.lowered.graph, run.graph, written.steps, extra


@dataclass(frozen=True)
class _Written:
    """A traced module as a program: from what, by which rewrites, and which of its results is which of the module's;
    None: one that is no tensor."""

    run: Emitted
    lowered: Lowered
    steps: Sequence[Applied]
    kept: list[int | None]


def _written(
    module: fx.GraphModule, inputs: Sequence[Any], way: str | None, ahead: AheadCompilers | None = None,
    kind: str = "inference", kernels: bool = True,
) -> _Written:  # fmt: skip
    lowered, better, steps = _planned_from(module, way, inputs)
    nodes = iter(range(len(lowered.returned)))
    kept = [next(nodes) if isinstance(value, Node) else None for value in lowered.returned]
    # A forward program's own results lie as in eager; what it leaves for the backward one lies as it comes.
    own = len([place for place in kept[: _returns(kind)] if place is not None])
    strides = [*lowered.strides[:own], *[None] * (len(lowered.strides) - own)]
    given = [*inputs, *lowered.held.values()]
    run = program(better, _device(inputs), given, way, ahead, strides, kernels=kernels)
    return _Written(run, lowered, steps, kept)


def _planned_from(
    module: fx.GraphModule, way: str | None, inputs: Sequence[Any] = ()
) -> tuple[Lowered, Graph, Sequence[Applied]]:
    """A traced module as it was lowered, the graph that shall run, and the rewrites between them."""
    lowered = lower(module, kernels=way is not None)
    better, steps = simplify(lowered.graph, ALGEBRA)
    better = apart(joined_products(better, way)[0], lowered.made, lowered.strides)
    if way is None:
        return lowered, better, steps
    pictures = zip(better.inputs, inputs, strict=False)
    there = {node for node, value in pictures if len(node.shape) == 4 and lies(value, strides_of(node.shape))}
    return lowered, as_kernels(channels_last(better, way, there), way), steps


def _planned(module: fx.GraphModule, way: str | None) -> Graph:
    """The graph that shall run, whose bytes are to be counted."""
    try:
        return _planned_from(module, way)[1]
    except NotServedError as error:
        raise UsageError(
            f"memory: a piece stays as torch traced it ({error}), whose bytes are not known: leave it out"
        ) from None


def _returns(kind: str) -> int | None:
    """Of a forward program how many of its results are the caller's; the others are for the backward program.

    None: all. So too where torch does not ask how they lie, because it would compile the backward program for the
    strides that it traced.
    """
    context = TracingContext.try_get()
    if kind != "forward" or context is None or context.fw_metadata is None or context.output_strides is None:
        return None
    returns: int = context.fw_metadata.num_forward_returns
    return returns


def _tell_strides(strides: Sequence[Strides | None]) -> None:
    """Tells torch how a forward program's results lie: it compiles the backward program for these."""
    context = TracingContext.try_get()
    assert context is not None
    assert context.output_strides is not None
    context.output_strides += strides


def _as_traced(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module as torch traced it, for inputs that may lie otherwise than they did then."""
    traced = [traced_strides(node.meta.get("val")) for node in module.graph.find_nodes(op="placeholder")]

    def run(*inputs: Any) -> Any:
        return module.forward(
            *[
                value if steps is None or value is None else laid(value, steps)  # None: a token of torch's
                for value, steps in zip(inputs, traced, strict=True)
            ]
        )

    return make_boxed_func(run)


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
OPTIONS = ("kernels", "cuda_graphs", "rematerialise", "memory")


def tilemesh(
    module: fx.GraphModule, inputs: Sequence[Any], mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """The backend that `torch.compile(model, backend="tilemesh")` finds.

    On a GPU, programs that wait for the host are recorded as CUDA graphs; mode="reduce-overhead" or
    options={"cuda_graphs": True} records all, options={"cuda_graphs": False} none. options={"memory": "2GiB"}: what
    the values of a training step may take; more is computed again.
    """
    if mode is not None and mode not in MODES:
        raise unknown("mode", mode, MODES)
    given = {**MODES[mode or "default"], **(options or {})}
    for name, value in given.items():
        if name not in OPTIONS:
            raise unknown("option", name, OPTIONS)
        if name == "memory":
            if type(value) not in (int, str) or (type(value) is int and value < 1):
                raise UsageError(f"option memory is {value!r}; give bytes, as 2_000_000_000 or '2GiB'")
        elif not isinstance(value, bool) and not (name != "kernels" and value is None):
            raise UsageError(f"option {name} is {value!r}; give True or False")
    return Backend(**given)(module, inputs)
