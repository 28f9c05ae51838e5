"""Any module on a mesh: traced with its backward pass, placed from a few pins, and run by every rank on its parts.

The one idea: placements say everything. A parameter's is what a rank holds of it, its gradient has the same, and all
that ranks exchange stands in the two programs that autograd calls. The module's parameters are shards under their own
names, so that any optimizer of torch that works element by element trains them, and a checkpoint is boxes by name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from operator import methodcaller
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.runtime.engine import Handle
from tilemesh.core.axes import Axes
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.shard import Shard
from tilemesh.core.tensor_placement import REPLICATED, S, TensorPlacement, parse
from tilemesh.graph.emit import program
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.joint import (
    DRAWN,
    JointTrace,
    ModuleCall,
    divided,
    halved,
    refilled,
    settings,
    tangent_name,
    trace_joint,
    with_generator,
)
from tilemesh.parallel.agree import agree, tell
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import require_no_hooks, take
from tilemesh.parallel.whole import gather_parts, handed_around
from tilemesh.plan.place.combine import combined
from tilemesh.plan.place.local import local_graph
from tilemesh.plan.place.overlap import begun_early
from tilemesh.plan.place.propagate import PlacedGraph, propagate
from tilemesh.plan.place.rules import DRAWN_ALIKE, EXCHANGES, OpaqueRule, is_random

Pins = Mapping[str, TensorPlacement | str]
"""By the name of a parameter, an input or a result (`output0`), or a shell's pattern: the last that fits counts."""


class Chooser(Protocol):
    """From the placements of some tensors to those of all."""

    def __call__(
        self,
        graph: Graph,
        pins: Mapping[Node, TensorPlacement],
        axes: Axes,
        opaque: Mapping[str, OpaqueRule] = MappingProxyType({}),
        *,
        ends: Mapping[Node, TensorPlacement] = MappingProxyType({}),
    ) -> PlacedGraph: ...


@dataclass(frozen=True)
class PlacedJoint:
    """Both passes of a module and where all their tensors lie: a value, the same on every rank."""

    trace: JointTrace
    placed: PlacedGraph
    outputs: tuple[TensorPlacement, ...]
    """As what each output is given: gradients like their parameters."""

    def placement(self, name: str) -> TensorPlacement:
        return self.placed.placements.get(self.trace.node(name), REPLICATED)


def place_joint(trace: JointTrace, axes: Axes, pins: Pins, choose: Chooser = propagate) -> PlacedJoint:
    """Pins say where some tensors lie; where other parameters and inputs do follows from the forward pass, then where
    the backward pass' tensors do. Results are wanted whole unless they are pinned."""
    named = fitting(trace, pins, axes)
    axes = tuple((axis, ranks) for axis, ranks in axes if ranks > 1)
    _require_no_draws(trace)
    forward = choose(
        trace.forward, {_named(trace, name): placement for name, placement in named.items()}, axes, DRAWN_ALIKE
    )
    lies = {node["name"]: forward.placements.get(node, REPLICATED) for node in trace.graph.inputs}
    results = [named.get(f"output{number}", REPLICATED) for number in range(trace.results)]
    lies |= {tangent_name(number): results[number] for number in trace.tangents}
    outputs = (*results, *(lies[name] for name in (*trace.changed, *trace.gradients)))
    pinned = {node: lies[node["name"]] for node in trace.graph.inputs}
    pinned |= {_named(trace, name): placement for name, placement in named.items() if name.startswith("output")}
    ends: dict[Node, TensorPlacement] = {}
    for node, placement in [*zip(trace.graph.outputs, outputs, strict=True)][trace.results :]:
        ends.setdefault(node, placement)
    return PlacedJoint(trace, choose(trace.graph, pinned, axes, DRAWN_ALIKE, ends=ends), outputs)


def _require_no_draws(trace: JointTrace) -> None:
    for node in trace.graph.nodes():
        if node.op == "opaque" and node["target"] != DRAWN and is_random(node):
            where = f" ({node.line})" if node.line else ""
            raise UsageError(
                f"{node['target']} draws random numbers{where}, and ranks would draw each for themselves: of random "
                "operators dropout alone is placed"
            )


def _named(trace: JointTrace, name: str) -> Node:
    number = name.removeprefix("output")
    if name.startswith("output") and number.isdigit():
        return trace.graph.outputs[int(number)]
    return trace.node(name)


def fitting(trace: JointTrace, pins: Pins, axes: Axes) -> dict[str, TensorPlacement]:
    """The tensors that pins name, and how they lie."""
    names = [*trace.parameters, *trace.buffers, *trace.inputs, *(f"output{n}" for n in range(trace.results))]
    named: dict[str, TensorPlacement] = {}
    for pattern, placement in pins.items():
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise unknown("tensor", pattern, names)
        marks = (parse(placement) if isinstance(placement, str) else placement).marks
        if strange := [axis for axis, _ in marks if axis not in dict(axes)]:
            raise unknown("axis", strange[0], [axis for axis, _ in axes])
        cut = TensorPlacement(tuple((axis, mark) for axis, mark in marks if dict(axes)[axis] > 1))
        named |= dict.fromkeys(fitting, cut)
    return named


Finish = Callable[[Tensor], Tensor]


class BegunExchange(NamedTuple):
    """An exchange that moves while its rank computes."""

    handle: Handle
    finish: Finish

    def wait(self) -> Tensor:
        return self.finish(self.handle.wait())


def exchange_call(node: Node, comm: Communicator, is_begun: bool = False) -> Callable[[Tensor], Any]:
    """What a node that ranks compute together does, by the communicator along its axis; or what begins it."""
    attributes = dict(node.attributes)

    def begin(x: Tensor, collective: Callable[..., Any], finish: Finish = lambda y: y, **words: Any) -> Any:
        return BegunExchange(collective(x, **words, wait=False), finish) if is_begun else finish(collective(x, **words))

    if node.op == "all_reduce":
        return lambda x: begin(x.contiguous(), comm.all_reduce)
    dim, counts = attributes["dim"], attributes["counts"]
    if node.op == "all_gather":
        rank = len(node.shape)  # a turned view is gathered as it lies in memory
        order = node.inputs[0]["order"] if node.inputs[0].op == "transpose" else tuple(range(rank))
        back, lies = [order.index(at) for at in range(rank)], order[dim]
        turned = methodcaller("permute", order)
        return lambda x: begin(x.permute(back).contiguous(), comm.all_gather, turned, axis=lies, counts=counts)
    if node.op == "reduce_scatter":
        return lambda x: begin(x.contiguous(), comm.reduce_scatter, axis=dim, counts=counts)
    into, parts, shape = attributes["into"], list(attributes["parts"]), node.shape
    shapes = [[length if at == dim else size for at, size in enumerate(shape)] for length in counts]
    lengths = [math.prod(each) for each in shapes]

    def joined(flat: Tensor) -> Tensor:
        return torch.cat(
            [piece.view(each) for piece, each in zip(torch.split(flat, lengths), shapes, strict=True)], dim
        )

    def all_to_all(x: Tensor) -> Any:
        pieces = [piece.flatten() for piece in torch.split(x, parts, into)]
        sent = [piece.numel() for piece in pieces]
        return begin(torch.cat(pieces), comm.all_to_all, joined, send_counts=sent, recv_counts=lengths)

    return all_to_all


class PlacedProgram:
    """What one rank runs: two programs over its own parts."""

    def __init__(self, joint: PlacedJoint, mesh: Mesh, generator: torch.Generator) -> None:
        trace = self.trace = joint.trace
        self.joint, self.mesh = joint, mesh
        self.results = trace.results + len(trace.changed)
        parts = local_graph(joint.placed, mesh.comm.rank, joint.outputs)
        self.entering = sum(name in trace.inputs for name in trace.gradients)
        self.device, graphs = generator.device, divided(with_generator(parts, generator), self.results)
        self._first = local_graph(joint.placed, 0, joint.outputs) if mesh.comm.rank else parts
        self.programs = [combined(graph, self._first) for graph in graphs]
        self.exchanges = [node for graph in self.programs for node in graph.nodes() if node.op in EXCHANGES]
        self.forward, self.backward = self._functions(self.programs)
        self._backward = graphs[1]
        self._halves: list[Callable[..., tuple[Tensor, ...]]] = []
        self.later: list[Callable[[], tuple[Tensor, ...]]] | None = None
        """Where a list: backward passes give gradients of inputs alone, and leave here what gives those of
        parameters."""
        self.constants = [value.to(self.device) for value in self._parts(trace.constants.items())]

    def halves(self) -> list[Callable[..., tuple[Tensor, ...]]]:
        """The backward program in two: gradients of inputs and what else it has made, then those of parameters (the
        first time a collective call)."""
        if not self._halves:
            graphs = halved(self._backward, self.entering)
            self._halves = self._functions(combined(graph, self._first) for graph in graphs)
        return self._halves

    def _functions(self, graphs: Iterable[Graph]) -> list[Callable[..., tuple[Tensor, ...]]]:
        """Of programs whose exchanges stand in the same order on all ranks."""
        graphs = list(graphs)
        orders = [[node["serial"] for node in begun_early(graph) if node.op in EXCHANGES] for graph in graphs]
        agree(self.mesh.comm, {"exchanges": orders})

        def exchange(node: Node, is_begun: bool) -> Callable[[Tensor], Any]:
            return exchange_call(node, self.mesh.axis(node["axis"]).comm, is_begun)

        return [program(graph, self.device, exchange=exchange, order=begun_early).function for graph in graphs]

    def parts(self, call: ModuleCall) -> Iterator[Tensor]:
        """This rank's parts of the inputs."""
        return self._parts(zip(call.names, call.tensors, strict=True))

    def _parts(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
        for name, value in named:
            mine = self.joint.placement(name).shard(tuple(value.shape), self.mesh.shape, self.mesh.comm.rank, name)
            yield take(mine, value)


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: PlacedProgram, *tensors: Tensor) -> tuple[Tensor, ...]:
        try:
            made = run.forward([*tensors, *run.constants])
        except IndexError as error:
            raise UsageError(
                f"an index is in no row of the table that it is looked up in ({error}): give each from 0 to the "
                "table's rows less one"
            ) from error
        results, saved = made[: run.results], made[run.results :]
        ctx.run = run
        own = zip((*run.trace.parameters, *run.trace.buffers), tensors, strict=False)
        changing = {value.untyped_storage().data_ptr() for name, value in own if name in run.trace.changed}
        ctx.save_for_backward(
            *(value.clone() if value.untyped_storage().data_ptr() in changing else value for value in saved)
        )
        ctx.mark_non_differentiable(
            *(value for number, value in enumerate(results) if number not in run.trace.tangents)
        )
        return tuple(value.clone() if any(value is tensor for tensor in tensors) else value for value in results)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        run, trace = ctx.run, ctx.run.trace
        values = [*ctx.saved_tensors, *(slopes[number] for number in trace.tangents)]
        if run.later is None:
            by_name = dict(zip(trace.gradients, run.backward(values), strict=True))
        else:
            first, second = run.halves()
            made = first(values)
            run.later.append(partial(second, list(made[run.entering :])))
            by_name = dict(zip(trace.gradients[len(trace.gradients) - run.entering :], made, strict=False))
        return None, *(by_name.get(name) for name in (*trace.parameters, *trace.buffers, *trace.inputs))


_OWN = ("mesh", "pins", "choose", "shards", "shells", "generator", "generators", "programs")
"""Attributes of a placed module that are not those of the module."""


class PlacedModule(nn.Module):
    """A module whose parameters and buffers are this rank's shards, under their own names. See `place`."""

    def __init__(
        self, module: nn.Module, mesh: Mesh, pins: Pins, joint: PlacedJoint, call: ModuleCall, choose: Chooser
    ) -> None:
        super().__init__()
        self.mesh, self.pins, self.choose = mesh, dict(pins), choose
        self.shards: dict[str, Shard] = {}
        """What each parameter and buffer is of the whole."""
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        local: dict[int, Any] = {}
        for name, value in own.items():
            require_no_hooks(name, value)
            placement = joint.placement(name)
            mine = placement.shard(tuple(value.shape), mesh.shape, mesh.comm.rank, name)
            self.shards[name] = mine
            empty = value.new_empty(mine.shape)
            local[id(value)] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
        shell = copy.deepcopy(module, local)  # the same module of local tensors; what is shared stays so
        self.shells = (shell,)  # no module of this one: its modules are
        self._modules, self._parameters, self._buffers = shell._modules, shell._parameters, shell._buffers
        self.training = module.training
        self._load(own, root=0)
        self.generator = torch.Generator(call.tensors[0].device)
        self.generator.manual_seed(int(tell(mesh.comm, str(torch.initial_seed()))))
        self.generators = {0: self.generator}
        """Of dropout, by their modules' numbers in a pipeline."""
        self.programs = {self._key(call): PlacedProgram(joint, mesh, self.generator)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = ModuleCall.of(args, kwargs)
        run = self.program(call)
        own = self.own()
        tensors = [own[name] for name in (*run.trace.parameters, *run.trace.buffers)]
        made = _Passes.apply(run, *tensors, *run.parts(call))  # type: ignore[no-untyped-call]
        results, changed = made[: run.trace.results], made[run.trace.results :]
        with torch.no_grad():
            for name, value in zip(run.trace.changed, changed, strict=True):
                own[name].copy_(value)
        leaves, spec = run.trace.spec
        return refilled(leaves, spec, results)

    def program(self, call: ModuleCall) -> PlacedProgram:
        """For calls of these shapes, traced and placed when the first comes; parameters stay where they lie."""
        key = self._key(call)
        if key not in self.programs:
            self.mesh.comm.barrier()  # ranks may be threads, and torch's optimizers count otherwise while one traces
            shapes, [shell] = {name: mine.whole for name, mine in self.shards.items()}, self.shells
            trace = trace_joint(shell, call, torch.is_grad_enabled(), shapes)
            lies = {name: _placement(mine) for name, mine in self.shards.items()}
            inputs = {name: pin for name, pin in self.pins.items() if not any(fnmatchcase(own, name) for own in lies)}
            joint = place_joint(trace, self.mesh.shape, inputs | lies, self.choose)
            self.programs[key] = PlacedProgram(joint, self.mesh, self.generator)
        return self.programs[key]

    def _key(self, call: ModuleCall) -> tuple[Any, ...]:
        [shell] = self.shells
        vars(shell).update((name, value) for name, value in vars(self).items() if name[0] != "_" and name not in _OWN)
        trained = tuple(each.requires_grad for each in self.parameters())
        return call.key, torch.is_grad_enabled(), settings(shell), trained

    def own(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def whole_gradient(self, value: Tensor, name: str) -> Tensor:
        """The gradient of an input that was given whole, of which a rank that has a part of it knows that part's (a
        collective call)."""
        assert value.grad is not None
        gradient = value.grad
        for axis, mark in next(iter(self.programs.values())).joint.placement(name):
            if mark.kind == "S":
                gradient = self.mesh.axis(axis).comm.all_reduce(gradient.contiguous())
        return gradient

    # Whole tensors --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor] | None:
        """The whole module's state on rank 0, None on the others (a collective call): what the module that was placed
        loads with `load_state_dict`. values: others by parameter name, such as an optimizer's states."""
        own = self.own() if values is None else dict(values)
        names = [name for name in self.shards if name in own]
        parts = [(self.shards[name], own[name].detach()) for name in names]
        wholes = gather_parts(parts, self.mesh.comm, range(self.mesh.comm.size))
        if self.mesh.comm.rank:
            return None
        if values is not None:
            return wholes
        called = {id(value): name for name, value in own.items()}  # one that is shared has one name in `shards`
        state = self.state_dict(keep_vars=True)
        return {
            name: wholes[called[id(value)]] if isinstance(value, Tensor) else value for name, value in state.items()
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor] | None, root: int | None = None) -> None:
        """Take this rank's parts of a whole module's state: on every rank, or with `root` on that one alone (a
        collective call). Whoever wrote it may have been placed otherwise."""
        own = {name: value for name, value in self.state_dict(keep_vars=True).items() if name in self.shards}
        problem = "" if root not in (None, self.mesh.comm.rank) else self._problem(state, own)
        if root is not None:
            problem = tell(self.mesh.comm, problem, root)
        if problem:
            raise UsageError(problem)
        self._load({} if state is None else {name: state[name] for name in own if name in state}, root)

    def _problem(self, state: Mapping[str, Tensor] | None, own: Mapping[str, Tensor]) -> str:
        if state is None:
            return "load without a state: give one on every rank, or name the rank that has it with root="
        for name in own:
            if name not in state:
                return f"the state lacks {name}"
            if tuple(state[name].shape) != self.shards[name].whole:
                return f"{name} has shape {tuple(state[name].shape)}: expected {self.shards[name].whole}"
        return ""

    @torch.no_grad()
    def _load(self, state: Mapping[str, Tensor], root: int | None) -> None:
        own = self.own()
        for name, value in handed_around(self.mesh.comm, state, root) if root is not None else state.items():
            own[name].copy_(take(self.shards[name], value))

    @torch.no_grad()
    def clip_gradients(self, most: float) -> float:
        """Scale all gradients so that their norm over the whole module is at most this; the norm before (a collective
        call). torch's own function knows of a rank's shards alone."""
        norm = self.gradient_norm()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, most / (norm + 1e-6)))
        return norm

    def gradient_norm(self) -> float:
        """Over the whole module (a collective call)."""
        return gradient_norm(self, self.shards, self.mesh.comm)

    def placements(self) -> dict[str, str]:
        """Of parameters, as pins say it."""
        return {name: cut_words(self.shards[name]) for name, _ in self.named_parameters()}


@torch.no_grad()
def gradient_norm(module: nn.Module, shards: Mapping[str, Shard], comm: Communicator) -> float:
    """Over all that ranks have of a module (a collective call)."""
    held = [(shards[name], p.grad) for name, p in module.named_parameters() if p.grad is not None]
    squares = sum((grad.double().square().sum() / mine.copies for mine, grad in held), torch.zeros(()).double())
    return math.sqrt(comm.all_reduce(squares.reshape(1).cpu()))


def cut_words(mine: Shard) -> str:
    """As a pin would say it."""
    return ",".join(f"{cut.axis}:S{cut.dim}" for cut in mine.cuts) or "R"


def _placement(mine: Shard) -> TensorPlacement:
    return TensorPlacement(tuple((cut.axis, S(cut.dim)) for cut in mine.cuts))


def place(
    module: nn.Module,
    mesh: Mesh,
    pins: Pins = MappingProxyType({}),
    example: Any = None,
    *,
    joint: PlacedJoint | None = None,
    choose: Chooser = propagate,
) -> PlacedModule:
    """A module placed on a mesh (a collective call): rank 0's parameters, of which each rank holds its parts, and its
    seed (`torch.initial_seed()`), from which dropout is drawn alike for every layout.

    example: a tensor, a list of arguments or a dict of named ones, as the module will be called; other shapes are
    traced when they come. Inputs are given whole and the same on every rank, which takes its part; results are whole
    unless they are pinned (`output0`). joint: as it was placed before (`place_joint`). choose: from pins to placements
    of all tensors.
    """
    if example is None:
        raise UsageError("place needs an example of what the module is called with: example=batch")
    return place_call(module, mesh, pins, ModuleCall.example(example), joint=joint, choose=choose)


def place_call(
    module: nn.Module, mesh: Mesh, pins: Pins, call: ModuleCall, *, joint: PlacedJoint | None = None,
    choose: Chooser = propagate,
) -> PlacedModule:  # fmt: skip
    """`place`, of a call whose tensors are known by name."""
    mesh.comm.barrier()
    if joint is None:
        joint = place_joint(trace_joint(module, call), mesh.shape, pins, choose)
    return PlacedModule(module, mesh, pins, joint, call, choose)
