"""Functions to write a program with: numbers and smaller shapes are broadcast, as in numpy.

x, w = build.argument("x", [8, 64]), build.argument("w", [64, 10])
graph = Graph((x, w), (build.relu(build.dot(x, w)),))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

from tilemesh.core.errors import UsageError
from tilemesh.graph.ir import Node, make
from tilemesh.graph.ops import FLOATS, WIDER, Shape

Value: TypeAlias = Node | int | float | bool


def argument(name: str, shape: Sequence[int], dtype: str = "float32") -> Node:
    return make("input", name=name, shape=tuple(shape), dtype=dtype)


def constant(value: Any, shape: Sequence[int] = (), dtype: str = "float32") -> Node:
    """One number, repeated to the shape."""
    if isinstance(value, int | float) and dtype in FLOATS:
        value = float(value)
    number = make("constant", value=value, shape=(), dtype=dtype)
    return expand(number, tuple(shape))


def like(node: Node, value: float) -> Node:
    return constant(value, node.shape, node.dtype)


def iota(shape: Sequence[int], dim: int) -> Node:
    """The index along one dim, at every element."""
    return make("iota", shape=tuple(shape), dim=dim, dtype="int64")


def expand(node: Node, shape: Shape) -> Node:
    """Numpy's broadcasting to this shape: sizes of 1 repeat, and dims are added in front."""
    if node.shape == shape:
        return node
    added = len(shape) - len(node.shape)
    kept = [dim for dim, size in enumerate(node.shape) if size != 1 or (added >= 0 and shape[dim + added] == 1)]
    if added < 0 or any(shape[dim + added] != node.shape[dim] for dim in kept):
        raise UsageError(f"{list(node.shape)} cannot be broadcast to {list(shape)}")
    squeezed = reshape(node, [node.shape[dim] for dim in kept])
    return make("broadcast", squeezed, shape=shape, dims=tuple(dim + added for dim in kept))


def common(*shapes: Shape) -> Shape:
    """The shape that numpy's broadcasting gives."""
    sizes = [1] * max(map(len, shapes))
    for shape in shapes:
        for place, size in enumerate(reversed(shape), 1):
            if size != 1:
                if sizes[-place] not in (1, size):
                    raise UsageError(
                        f"the shapes {' and '.join(str(list(shape)) for shape in shapes)} do not broadcast"
                    )
                sizes[-place] = size
    return tuple(sizes)


def _together(*values: Value) -> list[Node]:
    nodes = [value for value in values if isinstance(value, Node)]
    if not nodes:
        raise UsageError("an operator of numbers alone; give at least one node")
    dtypes = {node.dtype for node in nodes}
    if len(dtypes) > 1:
        raise UsageError(f"the dtypes are {' and '.join(sorted(dtypes))}; cast one of them")
    shape = common(*(node.shape for node in nodes))
    return [
        expand(value, shape) if isinstance(value, Node) else constant(value, shape, nodes[0].dtype) for value in values
    ]


def _binary(op: str) -> Callable[[Value, Value], Node]:
    return lambda left, right: make(op, *_together(left, right))


def _unary(op: str) -> Callable[[Node], Node]:
    return lambda node: make(op, node)


add, subtract, multiply, divide = map(_binary, ("add", "subtract", "multiply", "divide"))
power, maximum, minimum = map(_binary, ("power", "maximum", "minimum"))
negate, sign, exp, log, sqrt = map(_unary, ("negate", "sign", "exp", "log", "sqrt"))
sin, cos, tanh, sigmoid, erf = map(_unary, ("sin", "cos", "tanh", "sigmoid", "erf"))


def compare(kind: str, left: Value, right: Value) -> Node:
    return make("compare", *_together(left, right), kind=kind)


def where(chosen: Node, left: Value, right: Value) -> Node:
    first, second = _together(left, right)
    shape = common(chosen.shape, first.shape)
    return make("where", expand(chosen, shape), expand(first, shape), expand(second, shape))


def cast(node: Node, dtype: str) -> Node:
    return node if node.dtype == dtype else make("cast", node, dtype=dtype)


def relu(node: Node) -> Node:
    return maximum(node, 0.0)


def silu(node: Node) -> Node:
    return multiply(node, sigmoid(node))


def gelu(node: Node) -> Node:
    return multiply(multiply(node, 0.5), add(erf(multiply(node, 0.5**0.5)), 1.0))


def larger(left: Node, right: Node) -> Node:
    """1 where the left one is larger, a half where both are equal, and 0 elsewhere."""
    tied = multiply(cast(compare("equal", left, right), left.dtype), 0.5)
    return add(cast(compare("less", right, left), left.dtype), tied)


def power_by_base(base: Node, exponent: Node) -> Node:
    """How a power changes with its base: x ** 0 is 1 everywhere, also at 0."""
    flat = compare("equal", exponent, 0.0)
    return where(flat, 0.0, multiply(exponent, power(where(flat, 1.0, base), subtract(exponent, 1.0))))


def power_by_exponent(base: Node, value: Node) -> Node:
    """How a power, which has this value, changes with its exponent."""
    none = compare("equal", base, 0.0)
    return where(none, 0.0, multiply(value, log(where(none, 1.0, base))))


def total(node: Node, dims: Sequence[int] | None = None, keep: bool = False) -> Node:
    return _reduction("sum", node, dims, keep)


def amax(node: Node, dims: Sequence[int] | None = None, keep: bool = False) -> Node:
    return _reduction("amax", node, dims, keep)


def mean(node: Node, dims: Sequence[int] | None = None, keep: bool = False) -> Node:
    chosen = _dims(node, dims)
    count = prod(node.shape[dim] for dim in chosen)
    wide = cast(node, WIDER.get(node.dtype, node.dtype))  # a sum of 16-bit numbers may be too large for 16 bits
    return cast(divide(total(wide, chosen, keep), float(count)), node.dtype)


def _dims(node: Node, dims: Sequence[int] | None) -> tuple[int, ...]:
    rank = len(node.shape)
    return tuple(range(rank)) if dims is None else tuple(sorted(dim % rank for dim in dims))


def _reduction(op: str, node: Node, dims: Sequence[int] | None, keep: bool) -> Node:
    chosen = _dims(node, dims)
    if not chosen:
        return node
    reduced = make(op, node, dims=chosen)
    return reshape(reduced, [1 if dim in chosen else size for dim, size in enumerate(node.shape)]) if keep else reduced


def reshape(node: Node, shape: Sequence[int]) -> Node:
    return node if tuple(shape) == node.shape else make("reshape", node, shape=tuple(shape))


def transpose(node: Node, order: Sequence[int] | None = None) -> Node:
    """Without an order the last two dims are swapped."""
    rank = len(node.shape)
    chosen = tuple(order) if order is not None else (*range(rank - 2), rank - 1, rank - 2)
    return node if chosen == tuple(range(rank)) else make("transpose", node, order=chosen)


def concat(nodes: Sequence[Node], dim: int) -> Node:
    return nodes[0] if len(nodes) == 1 else make("concat", *nodes, dim=dim % len(nodes[0].shape))


def part(node: Node, dim: int, start: int, stop: int, step: int = 1) -> Node:
    """A range of one dim."""
    dim %= len(node.shape)
    if start == 0 and stop == node.shape[dim] and step == 1:
        return node
    ranges = [(start, stop, step) if place == dim else (0, size, 1) for place, size in enumerate(node.shape)]
    starts, stops, steps = zip(*ranges, strict=True)
    return make("slice", node, start=starts, stop=stops, step=steps)


def pad(node: Node, low: Sequence[int], high: Sequence[int], inner: Sequence[int] | None = None) -> Node:
    between = tuple(inner) if inner is not None else (0,) * len(node.shape)
    if not any((*low, *high, *between)):
        return node
    return make("pad", node, low=tuple(low), high=tuple(high), inner=between)


def dot(left: Node, right: Node) -> Node:
    """[..., m, k] times [..., k, n]; leading dims are broadcast."""
    lead = common(left.shape[:-2], right.shape[:-2]) if len(left.shape) + len(right.shape) > 4 else ()
    return make("dot", expand(left, (*lead, *left.shape[-2:])), expand(right, (*lead, *right.shape[-2:])))


def take(table: Node, index: Node) -> Node:
    return make("take", table, index)


def conv(
    x: Node, w: Node, stride: Sequence[int] | None = None, padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None, groups: int = 1,
) -> Node:  # fmt: skip
    """A convolution over 1 to 3 dims: x [n, c, *space], w [out, c/groups, *taps]."""
    ones, zeros = (1,) * (len(x.shape) - 2), (0,) * (len(x.shape) - 2)
    steps, apart = tuple(stride or ones), tuple(dilation or ones)
    return make("conv", x, w, groups=groups, stride=steps, padding=tuple(padding or zeros), dilation=apart)


def max_pool(x: Node, taps: Sequence[int], stride: Sequence[int] | None = None) -> Node:
    return amax(windows(x, taps, stride), range(-len(taps), 0))


def average_pool(x: Node, taps: Sequence[int], stride: Sequence[int] | None = None) -> Node:
    return mean(windows(x, taps, stride), range(-len(taps), 0))


def windows(x: Node, taps: Sequence[int], stride: Sequence[int] | None = None) -> Node:
    return make("windows", x, taps=tuple(taps), stride=tuple(stride or taps))


def softmax(node: Node, dim: int = -1) -> Node:
    shifted = exp(subtract(node, amax(node, [dim], keep=True)))
    return divide(shifted, total(shifted, [dim], keep=True))


def log_softmax(node: Node, dim: int = -1) -> Node:
    shifted = subtract(node, amax(node, [dim], keep=True))
    return subtract(shifted, log(total(exp(shifted), [dim], keep=True)))


def cross_entropy(logits: Node, targets: Node) -> Node:
    """The mean over rows of the negative log-probability of each row's target."""
    vocabulary = logits.shape[-1]
    columns = iota((*targets.shape, vocabulary), len(targets.shape))
    chosen = compare("equal", columns, reshape(targets, (*targets.shape, 1)))
    return negate(mean(total(where(chosen, log_softmax(logits), 0.0), [-1])))


def layer_norm(x: Node, weight: Node, bias: Node, epsilon: float = 1e-5) -> Node:
    centred = subtract(x, mean(x, [-1], keep=True))
    spread = sqrt(add(mean(multiply(centred, centred), [-1], keep=True), epsilon))
    return add(multiply(divide(centred, spread), weight), bias)


def switch(value: Node, predicate: Node, branch: bool) -> Node:
    """The value where the predicate is `branch`, and nothing (a dead value) where it is not."""
    return make("switch", value, predicate, branch=branch)


def merge(predicate: Node, if_true: Node, if_false: Node) -> Node:
    """The one of two values that lives."""
    return make("merge", predicate, if_true, if_false)
