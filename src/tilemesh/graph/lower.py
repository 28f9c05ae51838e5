"""From torch to the IR: an fx graph of aten operators becomes nodes; what has no primitive stays an opaque node.

Only operators that become exactly one or two primitives are lowered. What torch has one good kernel for (layer norm,
softmax, attention, dropout) stays opaque, so that a round trip costs nothing. An opaque node keeps torch's own
operator and its arguments; operators that draw random numbers keep their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils.flop_counter import flop_registry

from tilemesh.core.errors import UsageError
from tilemesh.graph import build
from tilemesh.graph.aten import (
    CONVOLUTION_GRADIENTS,
    CONVOLUTIONS,
    FOR_KERNELS,
    LOWERED,
    MAX_POOLS,
    SEVERAL,
    lower_max_pool,
)
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.memory import owner
from tilemesh.graph.opaque import InputSlot, Strides, contiguous, traced_strides
from tilemesh.graph.ops import DTYPES, TUPLE, primitive

aten = torch.ops.aten
# What they return depends on how their input lies in memory, which a rewritten program may change.
SAME = (aten.detach.default, aten.alias.default)
ASSERTED = (aten._assert_tensor_metadata.default,)  # what tracing found is so by construction: nothing to run
# They go by the strides of what they read, so nothing is copied for them.
ANY_STRIDES = (
    aten.copy.default, aten.slice_scatter.default, aten.select_scatter.default, aten.scatter.src, aten.scatter.value,
    aten.unbind.int, aten._scaled_dot_product_flash_attention_for_cpu.default,
)  # fmt: skip
LAYOUT_BOUND = ("aten.as_strided", "aten.as_strided_", "aten.set_", "aten.resize_")


class NotServedError(UsageError):
    """A program that cannot be a graph; the message says what is in the way."""


@dataclass(frozen=True)
class Lowered:
    """A traced module as a graph, the tensors it holds by name, and what it returns: nodes, or None and numbers.

    made: for each output of the graph the operator of torch that makes its memory; None where that is an input's.
    strides: for each output how torch has it in memory; None where it is an input's memory, which stays as it is.
    """

    graph: Graph
    held: dict[str, Any]
    returned: list[Any]
    made: tuple[str | None, ...]
    strides: tuple[Strides | None, ...]


def lower(
    module: fx.GraphModule, names: Sequence[str] = (), kernels: bool = True, convolutions: bool = False
) -> Lowered:
    """The graph of a traced module. Without generated kernels, what torch has one good kernel for stays opaque.

    convolutions: whether they are primitives with a sum after them, instead of torch's own with their bias;
    poolings too.
    """
    return _Lowering(module, names, kernels, convolutions).run()


def apart(graph: Graph, made: Sequence[str | None], strides: Sequence[Strides | None]) -> Graph:
    """The graph with copies where a result that torch makes anew would be the memory of an input, of a constant or of
    another result: the caller may change it in place. strides: how results lie in memory, for the copies."""
    outputs: list[Node] = []
    taken: dict[Node, str | None] = {}
    for value, maker, steps in zip(graph.outputs, made, strides, strict=True):
        memory = owner(value)
        if maker and (primitive(memory.op).kind == "source" or taken.get(memory, maker) != maker):
            outputs.append(_copied(value, steps, -1 - len(outputs)))
        else:
            taken.setdefault(memory, maker)
            outputs.append(value)
    return Graph(graph.inputs, tuple(outputs))


def dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise NotServedError(f"a tensor of {name}; served are {', '.join(DTYPES)}")
    return name


def line_of(node: fx.Node) -> str:
    """The line of the user's program that an fx node comes from, as FILE:LINE."""
    trace = (node.stack_trace or "").strip().splitlines()
    places = [text.strip() for text in trace if text.strip().startswith('File "')]
    if not places:
        return ""
    path, _, rest = places[-1].removeprefix('File "').partition('", line ')
    return f"{path.rpartition('/')[2]}:{rest.split(',')[0]}"


class _Lowering:
    def __init__(self, module: fx.GraphModule, names: Sequence[str], kernels: bool, convolutions: bool) -> None:
        self.module, self.names = module, iter(names)
        self.whole = () if kernels else FOR_KERNELS
        self.pools = MAX_POOLS if convolutions else {}
        self.table = {**LOWERED, **CONVOLUTIONS} if convolutions else LOWERED
        self.several = {**SEVERAL, **CONVOLUTION_GRADIENTS} if convolutions else SEVERAL
        self.values: dict[fx.Node, Any] = {}
        self.inputs: list[Node] = []
        self.held: dict[str, Any] = {}
        self.random: Node | None = None
        self.serial = 0
        given = [self._traced(node) for node in module.graph.find_nodes(op="placeholder")]
        types = [each.device.type for each in given if isinstance(each, torch.Tensor)]
        self.device = next((kind for kind in types if kind != "cpu"), "cpu")

    def run(self) -> Lowered:
        outputs: Sequence[Any] = ()
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._argument(node, next(self.names, node.name))
            elif node.op == "get_attr" and self._is_number(node):
                value = _attribute(self.module, str(node.target))
                with unset_fake_temporarily():  # torch compiles under fake tensors; this one is real
                    self.values[node] = build.constant(value.item(), (), dtype_name(value.dtype))
            elif node.op == "get_attr":
                name = f"held {node.target}"
                if name not in self.held:
                    self.held[name] = _attribute(self.module, str(node.target))
                    self._argument(node, name)
                self.values[node] = next(value for value in self.inputs if value["name"] == name)
            elif node.op == "call_function" and node.target not in ASSERTED:
                self.values[node] = self._call(node)
            elif node.op == "output":
                outputs = node.args[0]
            elif node.op != "call_function":
                raise NotServedError(f"an fx node of kind {node.op}")
        flat = [self.values[value] if isinstance(value, fx.Node) else value for value in outputs]
        nodes = tuple(value for value in flat if isinstance(value, Node))
        roots = [maker(value) for value in outputs if isinstance(value, fx.Node) and value in self.values]
        made = tuple(root.name if root.op == "call_function" else None for root in roots)
        laid = [traced_strides(self._traced(value)) for value in outputs if isinstance(value, fx.Node)]
        strides = tuple(steps if maker else None for maker, steps in zip(made, laid, strict=True))
        return Lowered(Graph(tuple(self.inputs), nodes), self.held, flat, made, strides)

    def _is_number(self, node: fx.Node) -> bool:
        """A number that the program was traced with, as a tensor of the host: it need not be read from there."""
        value = _attribute(self.module, str(node.target))
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return False
        if value.dim() or value.device.type != "cpu":
            return False
        if any(user.target is not torch.ops.aten.lift_fresh_copy.default for user in node.users):
            return False
        # A result that is a tensor of the host in a program for a GPU would become one of the GPU.
        returned = self.module.graph.output_node().all_input_nodes
        given = [each for each in self.module.graph.nodes if each.op == "placeholder"]
        return all(_on_host(given)) or not any(_on_host(returned))

    def _argument(self, node: fx.Node, name: str) -> Node:
        shape, dtype = _typed(self._traced(node), node)
        made = make("input", name=name, shape=shape, dtype=dtype)
        self.inputs.append(made)
        return made

    def _traced(self, node: fx.Node) -> Any:
        """The tensor without data that torch found for a node, or the one that the module holds."""
        value = node.meta.get("val")
        return _attribute(self.module, str(node.target)) if value is None and node.op == "get_attr" else value

    def _call(self, node: fx.Node) -> Any:
        args = [self.values[value] if isinstance(value, fx.Node) else value for value in node.args]
        if _is_item(node) and isinstance(args[0], tuple):
            return args[0][int(args[1])]  # type: ignore[arg-type]
        if _is_item(node) and node.meta.get("val") is None:
            return None  # a result that an operator was not asked for: the gradient of a convolution's input
        if _is_item(node) and isinstance(args[0], Node):
            shape, dtype = _typed(node.meta.get("val"), node)
            return make("item", args[0], index=args[1], shape=shape, dtype=dtype)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NotServedError(f"{node.target} is no aten operator ({line_of(node)})")
        if node.target is aten._assert_async.msg:
            raise NotServedError(
                f"a check of a tensor's values is no part of a program ({node.args[1]}): leave it out; one_hot(y, n) "
                "is (y[..., None] == torch.arange(n, device=y.device)).long()"
            )
        if node.target is aten.as_strided.default and self._is_reshape(node):
            return build.reshape(self._nested(node.args[0]), tuple(node.meta["val"].shape))
        if node.target.namespace == "aten" and str(node.target.overloadpacket) in LAYOUT_BOUND:
            raise NotServedError(f"{node.target} depends on how its input lies in memory ({line_of(node)})")
        value = node.meta.get("val")
        if node.target in self.whole or self._is_elsewhere(node):
            return self._opaque(node, value)
        if isinstance(value, torch.Tensor) and node.target in self.table:
            shape, dtype = _typed(value, node)
            made = self.table[node.target](shape, dtype, *self._nested(node.args), **self._settings(node))
            if made is not None:
                if made.typed != (shape, dtype):
                    raise NotServedError(f"{node.target} became {made}; torch has {dtype}{list(shape)}")
                return made
        if node.target in self.pools and all(_is_item(user) and user.args[1] == 0 for user in node.users):
            pooled = lower_max_pool(
                *self._nested(node.args), **self._nested(node.kwargs), space=self.pools[node.target]
            )
            if pooled is not None:
                return (pooled,)  # nobody reads where the largest were
        if isinstance(value, tuple | list) and node.target in self.several:
            typed = [None if each is None else _typed(each, node) for each in value]
            several = self.several[node.target](typed, *self._nested(node.args), **self._nested(node.kwargs))
            if several is not None:
                return several
        return self._opaque(node, value)

    def _settings(self, node: fx.Node) -> dict[str, Any]:
        """Its keywords. Casts of the backward pass name the device, which says nothing where the operand lies there."""
        settings = dict(self._nested(node.kwargs))
        if node.target is aten._to_copy.default and self._traced(node.args[0]).device == self._traced(node).device:  # type: ignore[arg-type]
            settings.pop("device", None)
        return settings

    def _is_elsewhere(self, node: fx.Node) -> bool:
        """Whether a node makes or reads a tensor on another device than the program's. One number may lie anywhere."""
        values = [self._traced(each) for each in (node, *node.all_input_nodes)]
        return any(isinstance(each, torch.Tensor) and each.dim() and each.device.type != self.device for each in values)

    def _is_reshape(self, node: fx.Node) -> bool:
        """Whether new strides are those of the same elements in order."""
        value, shape, steps, *offset = node.args
        before = self._traced(value)  # type: ignore[arg-type]
        in_order = traced_strides(before) == contiguous(tuple(before.shape))
        same_size = math.prod(shape) == before.numel()  # type: ignore[arg-type]
        return in_order and same_size and tuple(steps) == contiguous(tuple(shape)) and not any(offset)  # type: ignore[arg-type]

    def _nested(self, value: Any) -> Any:
        return fx.node.map_arg(value, lambda node: self.values[node])

    def _opaque(self, node: fx.Node, value: Any) -> Node:
        inputs: list[Node] = []
        strides: list[Strides | None] = []

        def slot(each: fx.Node) -> Any:
            inputs.append(self.values[each])
            strides.append(traced_strides(self._traced(each)))
            return InputSlot(len(inputs) - 1)

        args = fx.node.map_arg(node.args, slot)
        kwargs = fx.node.map_arg(node.kwargs, slot)
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        extra: dict[str, Any] = {}
        if target._schema.is_mutable:
            raise NotServedError(f"{target} changes a tensor in place ({line_of(node)})")
        if torch.Tag.nondeterministic_seeded in target.tags:
            self.serial += 1
            extra["serial"] = self.serial  # two draws are not one
            if self.random is not None:
                inputs.append(self.random)
        flops = _flops(node, value)
        counted = {"flops": flops} if flops else {}
        shape, dtype = ((), TUPLE) if isinstance(value, tuple | list) else _typed(value, node)
        made = make(
            "opaque", *inputs, line=line_of(node), target=str(target), args=_hashable(args),
            kwargs=_hashable(tuple(sorted(kwargs.items()))), shape=shape, dtype=dtype,
            strides=() if target in ANY_STRIDES else tuple(strides), **extra, **counted,
        )  # fmt: skip
        if extra:
            self.random = made
        return made


def _on_host(nodes: Sequence[fx.Node]) -> list[bool]:
    """For each node that is a tensor whether it lies in the host's memory."""
    values = [node.meta.get("val") for node in nodes]
    return [value.device.type == "cpu" for value in values if isinstance(value, torch.Tensor)]


def _flops(node: fx.Node, value: Any) -> int:
    """The floating-point operations of torch's own operator, where torch counts them: convolutions, attention."""
    assert isinstance(node.target, torch._ops.OpOverload)
    count = flop_registry.get(node.target.overloadpacket)
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    try:
        return int(count(*args, **kwargs, out_val=value))
    except (TypeError, ValueError, AssertionError):  # torch's formula does not serve these arguments
        return 0


def maker(node: fx.Node) -> fx.Node:
    """The fx node whose memory this one is a view of."""
    while node.op == "call_function" and node.args:
        first = node.args[0]
        if not isinstance(first, fx.Node) or not (_is_view(node) or (_is_item(node) and _is_view(first))):
            break
        node = first
    return node


def _is_view(node: fx.Node) -> bool:
    """Whether a node's result, or each of its results, is memory of its first argument."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or target in SAME)


def _is_item(node: fx.Node) -> bool:
    """Whether a node is one of several results."""
    return getattr(node.target, "__name__", "") == "getitem"


def _copied(value: Node, strides: Strides | None, serial: int) -> Node:
    in_order = strides is None or strides == contiguous(value.shape)
    kwargs = (("memory_format", torch.contiguous_format if in_order else torch.preserve_format),)
    target, args = "aten.clone.default", (InputSlot(0),)
    shape, dtype = value.typed
    return make("opaque", value, target=target, args=args, kwargs=kwargs, shape=shape, dtype=dtype, serial=serial)


def _hashable(value: Any) -> Any:
    """Arguments as a value that can be compared; lists stay apart from tuples."""
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, slice | dict):
        raise NotServedError(f"an argument {value!r}")
    return value


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _typed(value: Any, node: fx.Node) -> tuple[tuple[int, ...], str]:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise NotServedError(f"{node.name} is a number that changes from call to call: sizes that change")
    if not isinstance(value, torch.Tensor):
        raise NotServedError(f"{node.name} is {type(value).__name__}, no tensor ({line_of(node)})")
    if value.layout is not torch.strided:
        raise NotServedError(f"{node.name} is stored as {value.layout}")
    shape = tuple(value.shape)
    if not all(type(size) is int for size in shape):
        raise NotServedError(f"{node.name} has sizes that change from call to call: {shape}")
    return shape, dtype_name(value.dtype)
