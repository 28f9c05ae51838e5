"""From torch to the IR: an fx graph of aten operators becomes nodes; what has no primitive stays an opaque node.

Only operators that become exactly one or two primitives are lowered. What torch has one good kernel for (layer norm,
softmax, attention, dropout) stays opaque, so that a round trip costs nothing. An opaque node keeps torch's own
operator and its arguments; operators that draw random numbers keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from tilemesh.core.errors import UsageError
from tilemesh.graph import build
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.ops import DTYPES, FLOATS, TUPLE

aten = torch.ops.aten
# What they return depends on how their input lies in memory, which a rewritten program may change.
LAYOUT_BOUND = ("aten.as_strided", "aten.as_strided_", "aten.set_", "aten.resize_")


class NotServedError(UsageError):
    """A program that cannot be a graph; the message says what is in the way."""


class InputSlot:
    """The place of a node's input among an opaque operator's arguments."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputSlot) and other.index == self.index

    def __hash__(self) -> int:
        return hash(("slot", self.index))

    def __repr__(self) -> str:
        return f"#{self.index}"


def lower(module: fx.GraphModule, names: Sequence[str] = ()) -> tuple[Graph, dict[str, Any], list[Any]]:
    """The graph of a traced module, the tensors it holds by name, and what it returns: nodes, or None and numbers."""
    return _Lowering(module, names).run()


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
    def __init__(self, module: fx.GraphModule, names: Sequence[str]) -> None:
        self.module, self.names = module, iter(names)
        self.values: dict[fx.Node, Any] = {}
        self.inputs: list[Node] = []
        self.held: dict[str, Any] = {}
        self.random: Node | None = None
        self.serial = 0

    def run(self) -> tuple[Graph, dict[str, Any], list[Any]]:
        outputs: Sequence[Any] = ()
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._argument(node, next(self.names, node.name))
            elif node.op == "get_attr":
                self.held[f"held {node.target}"] = _attribute(self.module, str(node.target))
                self.values[node] = self._argument(node, f"held {node.target}")
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                outputs = node.args[0]
            else:
                raise NotServedError(f"an fx node of kind {node.op}")
        flat = [self.values[value] if isinstance(value, fx.Node) else value for value in outputs]
        nodes = tuple(value for value in flat if isinstance(value, Node))
        return Graph(tuple(self.inputs), nodes), self.held, flat

    def _argument(self, node: fx.Node, name: str) -> Node:
        value = node.meta.get("val")
        if value is None and node.op == "get_attr":
            value = self.held[name]
        shape, dtype = _typed(value, node)
        made = make("input", name=name, shape=shape, dtype=dtype)
        self.inputs.append(made)
        return made

    def _call(self, node: fx.Node) -> Any:
        args = [self.values[value] if isinstance(value, fx.Node) else value for value in node.args]
        if getattr(node.target, "__name__", "") == "getitem" and isinstance(args[0], Node):
            shape, dtype = _typed(node.meta.get("val"), node)
            return make("item", args[0], index=args[1], shape=shape, dtype=dtype)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NotServedError(f"{node.target} is no aten operator ({line_of(node)})")
        if node.target.namespace == "aten" and str(node.target.overloadpacket) in LAYOUT_BOUND:
            raise NotServedError(f"{node.target} depends on how its input lies in memory ({line_of(node)})")
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.target in LOWERED:
            shape, dtype = _typed(value, node)
            made = LOWERED[node.target](shape, dtype, *self._nested(node.args), **self._nested(node.kwargs))
            if made is not None:
                if made.typed != (shape, dtype):
                    raise NotServedError(f"{node.target} became {made}; torch has {dtype}{list(shape)}")
                return made
        return self._opaque(node, value)

    def _nested(self, value: Any) -> Any:
        return fx.node.map_arg(value, lambda node: self.values[node])

    def _opaque(self, node: fx.Node, value: Any) -> Node:
        inputs: list[Node] = []

        def slot(each: fx.Node) -> Any:
            inputs.append(self.values[each])
            return InputSlot(len(inputs) - 1)

        args = fx.node.map_arg(node.args, slot)
        kwargs = fx.node.map_arg(node.kwargs, slot)
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        extra: dict[str, Any] = {}
        if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            self.serial += 1
            extra["serial"] = self.serial  # two draws are not one
            if self.random is not None:
                inputs.append(self.random)
        shape, dtype = ((), TUPLE) if isinstance(value, tuple | list) else _typed(value, node)
        made = make(
            "opaque",
            *inputs,
            line=line_of(node),
            target=str(target),
            args=_hashable(args),
            kwargs=_hashable(tuple(sorted(kwargs.items()))),
            shape=shape,
            dtype=dtype,
            **extra,
        )
        if extra:
            self.random = made
        return made


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


Shape: TypeAlias = tuple[int, ...]


def _at(value: Any, shape: Shape, dtype: str) -> Node:
    """An operand as torch takes it: cast to the result's dtype and broadcast to its shape."""
    if isinstance(value, Node):
        return build.expand(build.cast(value, dtype), shape)
    return build.constant(value if "float" in dtype else int(value), shape, dtype)


def _binary(op: str) -> Callable[..., Node | None]:
    def lowered(shape: Shape, dtype: str, x: Any, y: Any, alpha: float = 1) -> Node | None:
        if alpha != 1 or dtype not in FLOATS:
            return None
        return make(op, _at(x, shape, dtype), _at(y, shape, dtype))

    return lowered


def _unary(op: str) -> Callable[..., Node | None]:
    def lowered(shape: Shape, dtype: str, x: Node) -> Node | None:
        return make(op, x) if x.dtype == dtype and (dtype in FLOATS or op in ("negate", "absolute")) else None

    return lowered


def _comparison(kind: str, swapped: bool) -> Callable[..., Node | None]:
    def lowered(shape: Shape, dtype: str, x: Node, y: Any) -> Node | None:
        if isinstance(y, Node):
            if y.dtype != x.dtype:
                return None
            other = build.expand(y, shape)
        else:
            if x.dtype == "bool" or ("float" not in x.dtype and isinstance(y, float)):
                return None
            other = build.constant(y, shape, x.dtype)
        pair = (build.expand(x, shape), other)
        return make("compare", *(reversed(pair) if swapped else pair), kind=kind)

    return lowered


def _where(shape: Shape, dtype: str, chosen: Node, x: Any, y: Any) -> Node | None:
    if chosen.dtype != "bool":
        return None
    return make("where", build.expand(chosen, shape), _at(x, shape, dtype), _at(y, shape, dtype))


def _cast(shape: Shape, dtype: str, x: Node, /, **settings: Any) -> Node | None:
    moved = {name for name, value in settings.items() if value not in (None, False, torch.strided)} - {"dtype"}
    return None if moved or x.dtype == "bool" or dtype == "bool" or x.dtype == dtype else build.cast(x, dtype)


def _reduction(op: str) -> Callable[..., Node | None]:
    def lowered(
        shape: Shape, dtype: str, x: Node, dims: Any = None, keep: bool = False, /, **other: Any
    ) -> Node | None:
        if x.dtype != dtype or dtype not in FLOATS or any(value is not None for value in other.values()):
            return None
        rank = len(x.shape)
        chosen = tuple(sorted(dim % rank for dim in dims)) if dims else tuple(range(rank))
        return build.reshape(make(op, x, dims=chosen), shape) if chosen else None

    return lowered


def _reshape(shape: Shape, dtype: str, x: Node, *rest: Any) -> Node | None:
    return build.reshape(x, shape)


def _permute(shape: Shape, dtype: str, x: Node, order: Sequence[int]) -> Node | None:
    return build.transpose(x, [dim % len(shape) for dim in order])


def _swap(shape: Shape, dtype: str, x: Node, first: int = 0, second: int = 1) -> Node | None:
    order = list(range(len(shape)))
    if len(order) < 2:
        return x
    order[first], order[second] = order[second], order[first]
    return build.transpose(x, order)


def _expand(shape: Shape, dtype: str, x: Node, sizes: Any, implicit: bool = False) -> Node | None:
    return build.expand(x, shape)


def _cat(shape: Shape, dtype: str, values: Sequence[Node], dim: int = 0) -> Node | None:
    if any(value.dtype != dtype or len(value.shape) != len(shape) for value in values):
        return None
    return build.concat(values, dim)


def _slice(shape: Shape, dtype: str, x: Node, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Node:
    size = x.shape[dim]
    assert isinstance(size, int)
    begin, end, by = slice(start, stop, step).indices(size)
    return build.part(x, dim, begin, max(begin, end), by)


def _select(shape: Shape, dtype: str, x: Node, dim: int, index: int) -> Node:
    size = x.shape[dim]
    assert isinstance(size, int)
    return build.reshape(build.part(x, dim, index % size, index % size + 1), shape)


def _dot(shape: Shape, dtype: str, x: Node, y: Node) -> Node | None:
    return make("dot", x, y) if x.dtype == y.dtype == dtype else None


def _addmm(shape: Shape, dtype: str, bias: Node, x: Node, w: Node, beta: float = 1, alpha: float = 1) -> Node | None:
    if (beta, alpha) != (1, 1) or {bias.dtype, x.dtype, w.dtype} != {dtype}:
        return None
    return build.add(make("dot", x, w), build.expand(bias, shape))


def _embedding(shape: Shape, dtype: str, table: Node, index: Node, *rest: Any) -> Node | None:
    return make("take", table, build.cast(index, "int64"))


LOWERED: Mapping[Any, Callable[..., Node | None]] = {
    **{
        getattr(getattr(aten, name), overload): _binary(op)
        for name, op in (("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("div", "divide"))
        for overload in ("Tensor", "Scalar")
    },
    aten.pow.Tensor_Scalar: _binary("power"),
    aten.pow.Tensor_Tensor: _binary("power"),
    aten.maximum.default: _binary("maximum"),
    aten.minimum.default: _binary("minimum"),
    **{
        getattr(aten, name).default: _unary(name)
        for name in ("exp", "log", "sqrt", "sin", "cos", "tanh", "sigmoid", "erf")
    },
    aten.neg.default: _unary("negate"),
    aten.abs.default: _unary("absolute"),
    **{
        getattr(getattr(aten, name), overload): _comparison(kind, swapped)
        for name, kind, swapped in (
            ("eq", "equal", False),
            ("lt", "less", False),
            ("gt", "less", True),
            ("le", "less_equal", False),
            ("ge", "less_equal", True),
        )
        for overload in ("Tensor", "Scalar")
    },
    aten.where.self: _where,
    aten._to_copy.default: _cast,
    torch.ops.prims.convert_element_type.default: lambda shape, dtype, x, to: _cast(shape, dtype, x),
    aten.sum.dim_IntList: _reduction("sum"),
    aten.sum.default: _reduction("sum"),
    aten.amax.default: _reduction("amax"),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _reshape),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default), _reshape),
    aten.permute.default: _permute,
    aten.transpose.int: _swap,
    aten.t.default: _swap,
    aten.expand.default: _expand,
    aten.cat.default: _cat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    **dict.fromkeys((aten.detach.default, aten.alias.default), lambda shape, dtype, x: x),
    aten.mm.default: _dot,
    aten.bmm.default: _dot,
    aten.addmm.default: _addmm,
    aten.embedding.default: _embedding,
}
