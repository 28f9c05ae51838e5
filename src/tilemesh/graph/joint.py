"""Forward and backward pass of a module as one graph, so that gradients can be placed together with what they are of.

torch traces both passes at once (AOTAutograd), with a *tangent* for each output that has a gradient: the gradient of
whatever follows with respect to it. Buffers that the module changes as it runs are results here. `divided` makes the
two programs of one rank that autograd calls, `with_update` appends an optimizer's formula.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from tilemesh.core.errors import RunError, UsageError
from tilemesh.graph import build
from tilemesh.graph.aten import decompositions
from tilemesh.graph.by_torch import dtype_of
from tilemesh.graph.ir import Graph, Node, make, ordered, rebuilt
from tilemesh.graph.lower import lower
from tilemesh.graph.ops import primitive
from tilemesh.graph.rules import ALGEBRA, simplify
from tilemesh.graph.tracing import quiet, tracing_failure

_TRACING = threading.Lock()  # torch traces one program at a time
TENSOR = object()
"""Among what a module returns, the place of a tensor."""
_PLAIN = (type(None), Number, str, bytes, slice, range, Enum, torch.Size, torch.dtype, torch.device)
"""Arguments whose `repr` says all that they are."""


@dataclass(frozen=True)
class JointTrace:
    """`graph` takes parameters, buffers, inputs, tangents and constants, in this order, and gives results, the buffers
    that change, and gradients."""

    graph: Graph
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    tangents: tuple[int, ...]
    """Numbers of the results that have a gradient."""
    results: int
    changed: tuple[str, ...]
    gradients: tuple[str, ...]
    """Of which parameters and inputs, in order."""
    spec: Any = field(compare=False)
    """How the results become what the module returns."""
    constants: Mapping[str, Tensor] = field(compare=False, default_factory=dict)
    """Tensors that the program holds itself."""

    def node(self, name: str) -> Node:
        return next(node for node in self.graph.inputs if node["name"] == name)

    @property
    def forward(self) -> Graph:
        """Of the same nodes: what the module computes, without gradients."""
        return Graph(self.graph.inputs, self.graph.outputs[: self.results + len(self.changed)])


UpdateRule = Callable[..., Sequence[Node]]
"""Of a parameter, its gradient and its states, element by element: the new parameter and the new states."""


def with_update(trace: JointTrace, states: Sequence[str], rule: UpdateRule) -> tuple[Graph, dict[Node, Node]]:
    """Both passes and an optimizer's update as one graph, and which input each new value replaces.

    States are inputs named like `exp_avg of NAME`. Cut over the axis of the batch they are ZeRO's: gradients are
    reduced and scattered for them, and new parameters gathered.
    """
    kept = trace.results + len(trace.changed)
    added: list[Node] = []
    replaced: dict[Node, Node] = {}
    for name, gradient in zip(trace.gradients, trace.graph.outputs[kept:], strict=True):
        if name in trace.parameters:
            own = trace.node(name)
            held = [build.argument(f"{state} of {name}", own.shape, own.dtype) for state in states]
            added += held
            replaced |= dict(zip(rule(own, gradient, *held), (own, *held), strict=True))
    return Graph((*trace.graph.inputs, *added), (*trace.graph.outputs[:kept], *replaced)), replaced


def _by_descent(parameter: Node, gradient: Node) -> Sequence[Node]:
    return (build.subtract(parameter, build.multiply(gradient, 0.001)),)


def _by_moments(parameter: Node, gradient: Node, mean: Node, square: Node) -> Sequence[Node]:
    """AdamW's first step; later ones differ in two numbers."""
    mean = build.add(build.multiply(mean, 0.9), build.multiply(gradient, 0.1))
    square = build.add(build.multiply(square, 0.999), build.multiply(build.multiply(gradient, gradient), 0.001))
    scale = build.add(build.divide(build.sqrt(square), 0.001**0.5), 1e-8)
    step = build.multiply(build.divide(mean, scale), 0.001 / 0.1)
    return build.subtract(build.multiply(parameter, 1 - 0.001 * 0.01), step), mean, square


UPDATES: Mapping[str, tuple[tuple[str, ...], UpdateRule]] = {
    "sgd": ((), _by_descent),
    "adamw": (("exp_avg", "exp_avg_sq"), _by_moments),
}
"""What an optimizer keeps for each parameter, and its formula, as torch has it."""


def tangent_name(number: int) -> str:
    """Of the input that is the gradient with respect to a result."""
    return f"d output{number}"


@dataclass(frozen=True)
class ModuleCall:
    """The arguments of a call: its tensors, what they are called, and all else."""

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModuleCall:
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        named = [f"input{place}" for place in range(len(pytree.tree_leaves(tuple(args))))]
        for name, value in kwargs.items():
            count = len(pytree.tree_leaves(value))
            named += [name] if count == 1 else [f"{name}.{place}" for place in range(count)]
        names = [name for name, leaf in zip(named, leaves, strict=True) if isinstance(leaf, Tensor)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            raise UsageError("the module is called without a tensor: give its inputs, by place or by name")
        kept = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if strange := [leaf for leaf in kept if not (leaf is TENSOR or isinstance(leaf, _PLAIN) or callable(leaf))]:
            raise UsageError(
                f"the module is called with a {type(strange[0]).__name__}: expected tensors, numbers, words and None, "
                "or lists, tuples and dicts of these, since a program is kept for calls that differ in tensors alone"
            )
        return cls(tuple(tensors), tuple(names), kept, spec)

    @classmethod
    def example(cls, given: Any) -> ModuleCall:
        """given: a tensor, a sequence of arguments, or a mapping of named ones."""
        if isinstance(given, Mapping):
            return cls.of((), given)
        return cls.of(given if isinstance(given, tuple | list) else (given,), {})

    @property
    def key(self) -> tuple[Any, ...]:
        """Calls of one key run by one program."""
        typed = tuple((tuple(value.shape), value.dtype, value.requires_grad) for value in self.tensors)
        return typed, self.names, tuple(map(repr, self.leaves)), str(self.spec)

    def arguments(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """With these tensors."""
        return refilled(self.leaves, self.spec, tensors)  # type: ignore[no-any-return]


def refilled(leaves: Sequence[Any], spec: Any, tensors: Iterable[Tensor]) -> Any:
    """A nest of values with these tensors in their places."""
    values = iter(tensors)
    return pytree.tree_unflatten([next(values) if leaf is TENSOR else leaf for leaf in leaves], spec)


def trace_joint(
    module: nn.Module, call: ModuleCall, has_gradients: bool = True, shapes: Mapping[str, Sequence[int]] | None = None
) -> JointTrace:
    """The graph of a module's passes for a call like this one. Without `has_gradients` of its forward pass alone.

    Of the module's own tensors only shapes and dtypes are read. shapes: those of parameters that have others here.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    # Of the same tensors: while it is traced it has others, and threads that are ranks may share a module.
    original, owned = module, {**parameters, **buffers}
    module = copy.deepcopy(module, {id(value): value for value in owned.values()})
    if doubled := {*call.names} & {*parameters, *buffers}:
        raise UsageError(f"{min(doubled)} is an input and a parameter: give the input by its place, in a list")
    found: dict[str, Any] = {}

    def flat(*values: Tensor) -> list[Tensor]:
        own = dict(zip((*parameters, *buffers), values, strict=False))
        after = own | {name: own[name].clone() for name in buffers}  # a buffer that is assigned to is written back
        args, kwargs = call.arguments(values[len(own) :])
        leaves, found["spec"] = pytree.tree_flatten(functional_call(module, after, args, kwargs))
        for name in buffers:
            _require_alike(name, own[name], after[name])
        found["leaves"] = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found["slopes"] = [leaf.requires_grad for leaf in outputs]
        # A result that is an input, or another result, is a tensor of its own.
        return [*(leaf.clone() for leaf in outputs), *(after[name].detach() for name in buffers)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty(tuple((shapes or {}).get(name, value.shape)), dtype=value.dtype, device=call.tensors[0].device,
                        requires_grad=has_gradients and value.requires_grad)
            for name, value in (*parameters.items(), *buffers.items(), *zip(call.names, call.tensors, strict=True))
        ]  # fmt: skip
    try:
        with _TRACING, quiet(), sdpa_kernel(SDPBackend.MATH), _compiling_state_context():
            traced: Any = aot_export_joint_simple(
                flat, tuple(fakes), trace_joint=has_gradients, decompositions=decompositions(passes=True)
            )
    except UsageError:
        raise
    except Exception as error:
        raise RunError(f"the module cannot be traced: {tracing_failure(error)}") from error
    names = [*parameters, *buffers, *call.names]
    trained = {name for name, fake in zip(names, fakes, strict=True) if fake.requires_grad}
    slopes = [number for number, has in enumerate(found["slopes"]) if has and has_gradients]
    _require_steady(original, module)
    lowered = lower(traced, [*names, *map(tangent_name, slopes)], convolutions=True)
    _require_read_by_name(owned, lowered.held)
    inputs, count, returned = lowered.graph.inputs, len(found["slopes"]), lowered.returned
    after = zip(buffers, returned[count:], inputs[len(parameters) :], strict=False)
    # A buffer that stays as it is, and a gradient of nothing, are no results.
    changed = {name: value for name, value, before in after if value is not before}
    slots = zip(names, returned[count + len(buffers) :], strict=False)
    gradients = {name: value for name, value in slots if name in trained and isinstance(value, Node)}
    graph = Graph(inputs, (*returned[:count], *changed.values(), *gradients.values())).replace(_rewritten)
    graph, _ = simplify(graph, ALGEBRA)
    own, results = (tuple(parameters), tuple(buffers), call.names), (tuple(slopes), count, tuple(changed))
    return JointTrace(graph, *own, *results, tuple(gradients), (found["leaves"], found["spec"]), lowered.held)


def settings(module: nn.Module) -> tuple[str, ...]:
    """What a program keeps as it was traced, in words: numbers, words and nests of them that modules have."""
    own = [value for each in module.modules() for key, value in vars(each).items() if key[0] != "_"]
    nests = (pytree.tree_leaves(value) if isinstance(value, list | tuple | dict) else [value] for value in own)
    return tuple(repr(each) for each, nest in zip(own, nests, strict=True) if all(isinstance(x, _PLAIN) for x in nest))


def _require_steady(original: nn.Module, called: nn.Module) -> None:
    for (name, before), after in zip(original.named_modules(), called.modules(), strict=False):
        for key, value in vars(before).items():
            if isinstance(value, int | float) and (now := vars(after).get(key)) is not value and now != value:
                raise UsageError(
                    f"{f'{name}.' if name else ''}{key} changes as the module is called, and a program keeps "
                    "the number that it was traced with: make it a buffer, or count outside of the module"
                )


def _require_read_by_name(owned: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    memory = {value.untyped_storage().data_ptr(): name for name, value in owned.items() if not value.is_meta}
    for value in held.values():
        if value.numel() and (name := memory.get(value.untyped_storage().data_ptr())):
            raise UsageError(
                f"{name} is read beside the module's parameters and buffers, such as from a list, or by a view that "
                "was made of it before: such a tensor would stay as it is now; read it by its name"
            )


def _require_alike(name: str, before: Tensor, after: Tensor) -> None:
    if (after.shape, after.dtype) != (before.shape, before.dtype):
        was, now = (f"{value.dtype} {list(value.shape)}" for value in (before, after))
        raise UsageError(f"a module makes its buffer {name}, {was}, one of {now}: give it what it stays from the start")


DRAWN = "aten.rand.generator"
"""Uniform numbers, from a generator that whoever runs the program gives (`with_generator`)."""


def with_generator(graph: Graph, generator: torch.Generator) -> Graph:
    def changed(node: Node, inputs: tuple[Node, ...]) -> Node:
        if node.op != "opaque" or node["target"] != DRAWN:
            return rebuilt(node, inputs)
        kwargs = (("device", generator.device), ("dtype", dtype_of(node.dtype)), ("generator", generator))
        return make("opaque", *inputs, line=node.line, **dict(node.attributes) | {"kwargs": kwargs})

    return graph.replace(changed)


def _rewritten(node: Node, inputs: tuple[Node, ...]) -> Node:
    """Random numbers like a tensor's without reading it. A product of many matrices with its leading dims as they were
    before they became one: heads that are cut are no piece of examples times heads."""
    if node.op == "opaque" and node["target"] == "aten.rand_like.default":
        args = {"target": DRAWN, "args": (node.shape,), "kwargs": (), "strides": ()}
        return make("opaque", *inputs[1:], line=node.line, **dict(node.attributes) | args)
    lead = next((shape for value in inputs if (shape := _lead(value))), None) if node.op == "dot" else None
    if lead is None or len(node.shape) != 3:
        return rebuilt(node, inputs)
    parts = [_spread_out(value, lead) for value in inputs]
    return build.reshape(make("dot", *parts), node.shape)


def _lead(value: Node) -> tuple[int, ...] | None:
    """Dims that a reshape makes one, of matrices that stay as they are or are transposed."""
    if value.op == "transpose" and value["order"] == (0, 2, 1):
        return _lead(value.inputs[0])
    if value.op != "reshape" or len(value.shape) != 3:
        return None
    before = value.inputs[0].shape
    return before[:-2] if len(before) > 3 and before[-2:] == value.shape[-2:] else None


def _spread_out(value: Node, lead: tuple[int, ...]) -> Node:
    if value.op == "transpose" and value["order"] == (0, 2, 1):
        inner = _spread_out(value.inputs[0], lead)
        last = len(inner.shape) - 1
        return build.transpose(inner, [*range(last - 1), last, last - 1])
    if _lead(value) == lead:
        return value.inputs[0]
    return build.reshape(value, (*lead, *value.shape[-2:]))


def divided(graph: Graph, results: int, tangents: str = "d output") -> tuple[Graph, Graph]:
    """The first `results` outputs as one program, the others as a second one that goes on from it.

    The first gives, after its results, what the second takes before inputs whose names begin with `tangents`
    the tangents: values that it has made anyway.
    """
    slopes = [node for node in graph.inputs if node["name"].startswith(tangents)]
    first = set(ordered(graph.outputs[:results]))
    order = graph.nodes()
    first |= {node for node in order if node.op == "item" and node.inputs[0] in first}
    later = [node for node in order if node not in first and primitive(node.op).kind != "source"]
    reads = [value for node in later for value in node.inputs] + list(graph.outputs[results:])
    saved = [
        node
        for node in dict.fromkeys(reads)
        if (node in first or node.op == "input") and node not in slopes and node.op not in ("constant", "iota")
    ]
    stand_ins = [make("input", name=f"saved{n}", shape=node.shape, dtype=node.dtype) for n, node in enumerate(saved)]
    renamed = dict(zip(saved, stand_ins, strict=True))
    new: dict[Node, Node] = {}
    for node in order:
        if node not in first or node in renamed or primitive(node.op).kind == "source":
            new[node] = renamed.get(node) or rebuilt(node, [new[value] for value in node.inputs])
    given = tuple(node for node in graph.inputs if node not in slopes)
    forward = Graph(given, (*graph.outputs[:results], *saved))
    return forward, Graph((*stand_ins, *slopes), tuple(new[node] for node in graph.outputs[results:]))


def halved(backward: Graph, entering: int) -> tuple[Graph, Graph]:
    """The second program of `divided` in two: its last outputs, gradients of inputs, and the others after them."""
    own = len(backward.outputs) - entering
    return divided(Graph(backward.inputs, (*backward.outputs[own:], *backward.outputs[:own])), entering, "no tangent")
