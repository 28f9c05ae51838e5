"""From torch to the IR: an fx graph of aten operators becomes nodes; what has no primitive stays an opaque node.

Only operators that become exactly one or two primitives are lowered. What torch has one good kernel for (layer norm,
softmax, attention, dropout) stays opaque, so that a round trip costs nothing. An opaque node keeps torch's own
operator and its arguments; operators that draw random numbers keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from tilemesh.core.errors import UsageError
from tilemesh.graph import build
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.memory import owner
from tilemesh.graph.ops import DTYPES, FLOATS, TUPLE, primitive
from tilemesh.graph.size import known, product

aten = torch.ops.aten
# What they return depends on how their input lies in memory, which a rewritten program may change.
SAME = (aten.detach.default, aten.alias.default)
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


@dataclass(frozen=True)
class Lowered:
    """A traced module as a graph, the tensors it holds by name, and what it returns: nodes, or None and numbers.

    made: for each output of the graph the operator of torch that makes its memory; None where that is an input's.
    """

    graph: Graph
    held: dict[str, Any]
    returned: list[Any]
    made: tuple[str | None, ...]


def lower(module: fx.GraphModule, names: Sequence[str] = (), kernels: bool = True) -> Lowered:
    """The graph of a traced module. Without generated kernels, what torch has one good kernel for stays opaque."""
    return _Lowering(module, names, kernels).run()


def apart(graph: Graph, made: Sequence[str | None]) -> Graph:
    """The graph with copies where a result that torch makes anew would be the memory of an input, of a constant or of
    another result: the caller may change it in place."""
    outputs: list[Node] = []
    taken: dict[Node, str | None] = {}
    for value, maker in zip(graph.outputs, made, strict=True):
        memory = owner(value)
        if maker and (primitive(memory.op).kind == "source" or taken.get(memory, maker) != maker):
            outputs.append(_copied(value, -1 - len(outputs)))
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
    def __init__(self, module: fx.GraphModule, names: Sequence[str], kernels: bool) -> None:
        self.module, self.names = module, iter(names)
        self.whole = () if kernels else FOR_KERNELS
        self.values: dict[fx.Node, Any] = {}
        self.inputs: list[Node] = []
        self.held: dict[str, Any] = {}
        self.random: Node | None = None
        self.serial = 0

    def run(self) -> Lowered:
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
        roots = [_root(value) for value in outputs if isinstance(value, fx.Node) and value in self.values]
        made = tuple(root.name if root.op == "call_function" else None for root in roots)
        return Lowered(Graph(tuple(self.inputs), nodes), self.held, flat, made)

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
        if getattr(node.target, "__name__", "") == "getitem" and isinstance(args[0], tuple):
            return args[0][int(args[1])]  # type: ignore[arg-type]
        if getattr(node.target, "__name__", "") == "getitem" and isinstance(args[0], Node):
            shape, dtype = _typed(node.meta.get("val"), node)
            return make("item", args[0], index=args[1], shape=shape, dtype=dtype)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NotServedError(f"{node.target} is no aten operator ({line_of(node)})")
        if node.target.namespace == "aten" and str(node.target.overloadpacket) in LAYOUT_BOUND:
            raise NotServedError(f"{node.target} depends on how its input lies in memory ({line_of(node)})")
        value = node.meta.get("val")
        if node.target in self.whole:
            return self._opaque(node, value)
        if isinstance(value, torch.Tensor) and node.target in LOWERED:
            shape, dtype = _typed(value, node)
            made = LOWERED[node.target](shape, dtype, *self._nested(node.args), **self._nested(node.kwargs))
            if made is not None:
                if made.typed != (shape, dtype):
                    raise NotServedError(f"{node.target} became {made}; torch has {dtype}{list(shape)}")
                return made
        if isinstance(value, tuple | list) and node.target in SEVERAL:
            typed = [_typed(each, node) for each in value]
            several = SEVERAL[node.target](typed, *self._nested(node.args), **self._nested(node.kwargs))
            if several is not None:
                return several
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
        if target._schema.is_mutable:
            raise NotServedError(f"{target} changes a tensor in place ({line_of(node)})")
        if torch.Tag.nondeterministic_seeded in target.tags:
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


def _root(node: fx.Node) -> fx.Node:
    """The fx node whose memory this one is a view of."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.args:
        first = node.args[0]
        if not isinstance(first, fx.Node) or not (node.target.is_view or node.target in SAME):
            break
        node = first
    return node


def _copied(value: Node, serial: int) -> Node:
    kwargs = (("memory_format", torch.contiguous_format),)
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


Shape: TypeAlias = tuple[int, ...]


def _at(value: Any, shape: Shape, dtype: str) -> Node:
    """An operand as torch takes it: cast to the result's dtype and broadcast to its shape."""
    if isinstance(value, Node):
        return build.expand(build.cast(value, dtype), shape)
    return build.constant(value if "float" in dtype else int(value), shape, dtype)


WHOLE = ("int64", "int32")


def _binary(op: str) -> Callable[..., Node | None]:
    exact = op in ("add", "subtract", "multiply", "maximum", "minimum")

    def lowered(shape: Shape, dtype: str, x: Any, y: Any, alpha: float = 1) -> Node | None:
        if dtype not in FLOATS and not (exact and dtype in WHOLE and _dtypes(x, y) <= {dtype}):
            return None
        if alpha != 1 and dtype not in FLOATS:
            return None
        right = _at(y, shape, dtype)
        return make(op, _at(x, shape, dtype), build.multiply(right, float(alpha)) if alpha != 1 else right)

    return lowered


def _dtypes(*values: Any) -> set[str]:
    return {value.dtype for value in values if isinstance(value, Node)}


def _power(shape: Shape, dtype: str, x: Any, y: Any) -> Node | None:
    """Small powers by products and roots, as torch computes them."""
    if dtype not in FLOATS:
        return None
    base = _at(x, shape, dtype)
    if isinstance(y, Node) or y not in SMALL_POWERS:
        return make("power", base, _at(y, shape, dtype))
    return SMALL_POWERS[y](base)


SMALL_POWERS: Mapping[float, Callable[[Node], Node]] = {
    1: lambda x: x,
    2: lambda x: build.multiply(x, x),
    3: lambda x: build.multiply(build.multiply(x, x), x),
    0.5: build.sqrt,
    -1: lambda x: build.divide(1.0, x),
    -0.5: lambda x: build.divide(1.0, build.sqrt(x)),
}


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
    kept = (None, False, torch.strided, torch.contiguous_format, torch.preserve_format)
    moved = {name for name, value in settings.items() if value not in kept} - {"dtype"}
    if moved - {"device"} or not {x.dtype, dtype} <= set(DTYPES):
        return None
    return None if "device" in moved and str(settings["device"]) != "cpu" else build.cast(x, dtype)


def _same_value(shape: Shape, dtype: str, x: Node, /, **settings: Any) -> Node | None:
    return x if settings.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format) else None


def _filled(shape: Shape, dtype: str, /, *given: Any, **settings: Any) -> Node | None:
    """A number everywhere: `full`, `scalar_tensor` and the like; the number is their last argument."""
    value = given[-1]
    if isinstance(value, Node) or dtype not in DTYPES:
        return None
    return build.constant(float(value) if dtype in FLOATS else type(value)(value), shape, dtype)


def _masked(shape: Shape, dtype: str, x: Node, mask: Node, value: Any) -> Node | None:
    if mask.dtype != "bool" or isinstance(value, Node):
        return None
    return make("where", build.expand(mask, shape), _at(value, shape, dtype), build.expand(x, shape))


def _clamp(shape: Shape, dtype: str, x: Node, low: Any = None, high: Any = None) -> Node | None:
    if dtype not in FLOATS or x.dtype != dtype or isinstance(low, Node) or isinstance(high, Node):
        return None
    x = x if low is None else build.maximum(x, float(low))
    return x if high is None else build.minimum(x, float(high))


def _logic(choose: Callable[[Node, Node, Shape], Node]) -> Callable[..., Node | None]:
    def lowered(shape: Shape, dtype: str, x: Node, y: Any = None) -> Node | None:
        pair = [x, y] if isinstance(y, Node) else [x, x]
        if (y is not None and not isinstance(y, Node)) or any(value.dtype != "bool" for value in pair):
            return None
        return choose(build.expand(pair[0], shape), build.expand(pair[1], shape), shape)

    return lowered


def _truth(value: bool, shape: Shape) -> Node:
    return build.constant(value, shape, "bool")


def _unequal(shape: Shape, dtype: str, x: Node, y: Any) -> Node | None:
    equal = _comparison("equal", False)(shape, dtype, x, y)
    return equal if equal is None else make("where", equal, _truth(False, shape), _truth(True, shape))


def _mean(shape: Shape, dtype: str, x: Node, dims: Any = None, keep: bool = False, /, **other: Any) -> Node | None:
    total = _reduction("sum")(shape, dtype, x, dims, keep, **other)
    count = 1 if total is None else product(x.shape)
    if total is None or not isinstance(count, int) or not count or not product(shape):
        return None
    return build.divide(total, float(count // int(product(shape))))  # type: ignore[arg-type]


def _variance(
    typed: Sequence[tuple[Shape, str]], x: Node, dims: Any = None, /, **other: Any
) -> tuple[Node, ...] | None:
    """The variance and the mean, from the differences to the mean: no cancellation."""
    (shape, dtype), _ = typed
    if x.dtype != dtype or dtype not in FLOATS:
        return None
    rank = len(x.shape)
    chosen = sorted(dim % rank for dim in dims) if dims and rank else list(range(rank))
    count = int(product(x.shape[dim] for dim in chosen))  # type: ignore[arg-type]
    correction = other.get("correction")
    free = count - (1 if correction is None else correction)
    if free <= 0:
        return None
    mean = build.divide(build.total(x, chosen, keep=True), float(count))
    centred = build.subtract(x, mean)
    variance = build.divide(build.total(build.multiply(centred, centred), chosen), float(free))
    return build.reshape(variance, shape), build.reshape(mean, shape)


def _split(typed: Sequence[tuple[Shape, str]], x: Node, sizes: Any, dim: int = 0) -> tuple[Node, ...]:
    dim %= len(x.shape)
    parts, start = [], 0
    for shape, _ in typed:
        parts.append(build.part(x, dim, start, start + shape[dim]))
        start += shape[dim]
    return tuple(parts)


def typed_shape(x: Node) -> Shape:
    return tuple(known(size, {}) for size in x.shape)


def _chosen(target: Node, shape: Shape) -> Node:
    """Where a column is the row's target."""
    column = target if len(target.shape) == len(shape) else build.reshape(target, (*target.shape, 1))
    return build.compare("equal", build.iota(shape, len(shape) - 1), column)


def _loss(
    typed: Sequence[tuple[Shape, str]], x: Node, target: Node, weight: Any, reduction: int, ignored: int
) -> tuple[Node, ...] | None:
    """The negative log-probability of each row's target, of those that are not to be ignored."""
    (_, dtype), _ = typed
    if weight is not None or len(x.shape) != 2 or x.dtype != dtype or target.dtype != "int64":
        return None
    skipped = build.compare("equal", target, ignored)
    picked = build.total(build.where(_chosen(target, typed_shape(x)), x, 0.0), [1])
    losses = build.where(skipped, build.multiply(picked, 0.0), build.negate(picked))
    count = build.total(build.where(skipped, build.constant(0.0, target.shape, dtype), 1.0))
    total = build.total(losses)
    return (losses, total, build.divide(total, count))[(0, 2, 1)[reduction]], count


def _loss_backward(
    shape: Shape, dtype: str, slope: Node, x: Node, target: Node, weight: Any, reduction: int, ignored: int, count: Node
) -> Node | None:
    if weight is not None or len(shape) != 2 or slope.dtype != dtype or target.dtype != "int64":
        return None
    each = build.divide(slope, count) if reduction == 1 else slope
    each = build.expand(build.reshape(each, (*each.shape, 1)) if each.shape else each, shape)
    skipped = build.expand(build.reshape(build.compare("equal", target, ignored), (shape[0], 1)), shape)
    chosen = make("where", skipped, _truth(False, shape), _chosen(target, shape))
    return build.where(chosen, build.negate(each), 0.0)


def _reduction(op: str) -> Callable[..., Node | None]:
    def lowered(
        shape: Shape, dtype: str, x: Node, dims: Any = None, keep: bool = False, /, **other: Any
    ) -> Node | None:
        if x.dtype != dtype or dtype not in FLOATS or any(value is not None for value in other.values()):
            return None
        rank = len(x.shape)
        if not rank:
            return None
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
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
    aten.rsqrt.default: lambda shape, dtype, x: _power(shape, dtype, x, -0.5) if x.dtype == dtype else None,
    aten.reciprocal.default: lambda shape, dtype, x: _power(shape, dtype, x, -1) if x.dtype == dtype else None,
    aten.relu.default: lambda shape, dtype, x: build.relu(x) if dtype in FLOATS else None,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda shape, dtype, x, high: _clamp(shape, dtype, x, None, high),
    aten.masked_fill.Scalar: _masked,
    **dict.fromkeys(
        (aten.logical_not.default, aten.bitwise_not.default),
        _logic(lambda x, y, shape: make("where", x, _truth(False, shape), _truth(True, shape))),
    ),
    **dict.fromkeys(
        (aten.logical_and.default, aten.bitwise_and.Tensor),
        _logic(lambda x, y, shape: make("where", x, y, _truth(False, shape))),
    ),
    **dict.fromkeys(
        (aten.logical_or.default, aten.bitwise_or.Tensor),
        _logic(lambda x, y, shape: make("where", x, _truth(True, shape), y)),
    ),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _unequal),
    **dict.fromkeys(
        (aten.full.default, aten.scalar_tensor.default, aten.full_like.default, aten.new_full.default), _filled
    ),
    **{
        getattr(aten, name).default: lambda shape, dtype, /, *given, _value=value, **settings: _filled(
            shape, dtype, _value
        )
        for name, value in (
            ("zeros", 0),
            ("zeros_like", 0),
            ("new_zeros", 0),
            ("ones", 1),
            ("ones_like", 1),
            ("new_ones", 1),
        )
    },
    **dict.fromkeys((aten.clone.default, aten.lift_fresh_copy.default), _same_value),
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.nll_loss_backward.default: _loss_backward,
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
SEVERAL: Mapping[Any, Callable[..., tuple[Node, ...] | None]] = {
    aten.var_mean.correction: _variance,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.nll_loss_forward.default: _loss,
}
# One good kernel of torch's each, and several primitives: worth their own nodes only where kernels are generated.
FOR_KERNELS = (
    aten.rsqrt.default, aten.reciprocal.default, aten.mean.dim, aten.mean.default, aten.relu.default,
    aten.var_mean.correction, aten.nll_loss_forward.default, aten.nll_loss_backward.default,
)  # fmt: skip
# Operators that torch writes in terms of those above: they become part of generated kernels. Never all that torch could
# decompose: its attention on a CPU would then have a backward pass that does not fit its forward pass.
DECOMPOSED = (
    aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.tanh_backward, aten.sigmoid_backward,
    aten.threshold_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.elu, aten.elu_backward, aten.softplus,
    aten.softplus_backward, aten.hardtanh, aten.hardswish, aten.hardswish_backward, aten.mse_loss,
    aten.mse_loss_backward, aten.smooth_l1_loss, aten.native_layer_norm, aten.native_layer_norm_backward,
    aten._softmax, aten._softmax_backward_data, aten._safe_softmax, aten._log_softmax,
    aten._log_softmax_backward_data, aten.addcmul, aten.addcdiv, aten.rsub, aten.lerp, aten.glu, aten.glu_backward,
    aten.native_dropout_backward, aten._fused_rms_norm, aten._fused_rms_norm_backward, aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
)  # fmt: skip


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What torch shall write in other operators, where generated kernels compute them."""
    from torch._decomp import get_decompositions

    return get_decompositions(DECOMPOSED)
