"""How aten's elementwise operators, reductions and losses become primitives.

Each function gets the shape and dtype that torch found and the operator's arguments, and returns a node, or None where
the operator stays torch's own: a dtype or a setting that the primitives do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from tilemesh.graph import build
from tilemesh.graph.evaluate import stored_number
from tilemesh.graph.ir import Node, make
from tilemesh.graph.ops import DTYPES, FLOATS, WIDER, Shape
from tilemesh.graph.targets import checked_targets


def _at(value: Any, shape: Shape, dtype: str) -> Node:
    """An operand as torch takes it: cast to the result's dtype and broadcast to its shape. A number stays as it is."""
    if isinstance(value, Node):
        return build.expand(build.cast(value, dtype), shape)
    return build.constant(value if "float" in dtype else int(value), shape, dtype)


def _stored(value: Any, shape: Shape, dtype: str) -> Node | None:
    """An operand that torch stores before it is used: a number as this dtype has it, or None where it has it not."""
    if isinstance(value, Node):
        return _at(value, shape, dtype)
    number = stored_number(value, dtype)
    return None if number is None else build.constant(number, shape, dtype)


WHOLE = ("int64", "int32")


def lower_binary(op: str) -> Callable[..., Node | None]:
    exact = op in ("add", "subtract", "multiply", "maximum", "minimum")

    def lowered(shape: Shape, dtype: str, x: Any, y: Any, alpha: float = 1) -> Node | None:
        if dtype not in FLOATS and not (exact and dtype in WHOLE and _dtypes(x, y) <= {dtype}):
            return None
        if alpha != 1 and dtype not in FLOATS:
            return None
        if op == "subtract" and (isinstance(x, bool) or isinstance(y, bool)):
            return None  # torch refuses it
        right = _at(y, shape, dtype)
        return make(op, _at(x, shape, dtype), build.multiply(right, float(alpha)) if alpha != 1 else right)

    return lowered


def _dtypes(*values: Any) -> set[str]:
    return {value.dtype for value in values if isinstance(value, Node)}


def lower_power(shape: Shape, dtype: str, x: Any, y: Any) -> Node | None:
    """Small powers by products and roots, as torch computes them: what is between them is not rounded to 16 bits."""
    if dtype not in FLOATS:
        return None
    base = _at(x, shape, dtype)
    if isinstance(y, Node) or y not in SMALL_POWERS:
        return make("power", base, _at(y, shape, dtype))
    return build.cast(SMALL_POWERS[y](build.cast(base, WIDER.get(dtype, dtype))), dtype)


SMALL_POWERS: Mapping[float, Callable[[Node], Node]] = {
    1: lambda x: x,
    2: lambda x: build.multiply(x, x),
    3: lambda x: build.multiply(build.multiply(x, x), x),
    0.5: build.sqrt,
    -1: lambda x: build.divide(1.0, x),
    -0.5: lambda x: build.divide(1.0, build.sqrt(x)),
}


def lower_unary(op: str) -> Callable[..., Node | None]:
    def lowered(shape: Shape, dtype: str, x: Node) -> Node | None:
        return make(op, x) if x.dtype == dtype and (dtype in FLOATS or op in ("negate", "absolute")) else None

    return lowered


def lower_comparison(kind: str, swapped: bool) -> Callable[..., Node | None]:
    def lowered(shape: Shape, dtype: str, x: Node, y: Any) -> Node | None:
        if isinstance(y, Node):
            if y.dtype != x.dtype:
                return None
            other = build.expand(y, shape)
        else:
            if x.dtype == "bool" or ("float" not in x.dtype and isinstance(y, float)):
                return None
            constant = _stored(y, shape, x.dtype)
            if constant is None:
                return None
            other = constant
        pair = (build.expand(x, shape), other)
        return make("compare", *(reversed(pair) if swapped else pair), kind=kind)

    return lowered


def lower_where(shape: Shape, dtype: str, chosen: Node, x: Any, y: Any) -> Node | None:
    first, second = _stored(x, shape, dtype), _stored(y, shape, dtype)
    if chosen.dtype != "bool" or first is None or second is None:
        return None
    return make("where", build.expand(chosen, shape), first, second)


def lower_cast(shape: Shape, dtype: str, x: Node, /, **settings: Any) -> Node | None:
    kept = (None, False, torch.strided, torch.contiguous_format, torch.preserve_format)
    moved = {name for name, value in settings.items() if value not in kept} - {"dtype"}
    return None if moved or not {x.dtype, dtype} <= set(DTYPES) else build.cast(x, dtype)


def lower_same_value(shape: Shape, dtype: str, x: Node, /, **settings: Any) -> Node | None:
    return x if settings.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format) else None


def lower_filled(shape: Shape, dtype: str, /, *given: Any, **settings: Any) -> Node | None:
    """A number everywhere: `full`, `scalar_tensor` and the like; the number is their last argument."""
    value = given[-1]
    return None if isinstance(value, Node) or dtype not in DTYPES else _stored(value, shape, dtype)


def lower_masked(shape: Shape, dtype: str, x: Node, mask: Node, value: Any) -> Node | None:
    number = None if isinstance(value, Node) else _stored(value, shape, dtype)
    if mask.dtype != "bool" or number is None:
        return None
    return make("where", build.expand(mask, shape), number, build.expand(x, shape))


def lower_clamp(shape: Shape, dtype: str, x: Node, low: Any = None, high: Any = None) -> Node | None:
    if dtype not in FLOATS or x.dtype != dtype or isinstance(low, Node) or isinstance(high, Node):
        return None
    for op, bound in (("maximum", low), ("minimum", high)):
        limit = None if bound is None else _stored(bound, shape, dtype)
        if bound is not None and limit is None:
            return None
        x = x if limit is None else make(op, x, limit)
    return x


def lower_logic(choose: Callable[[Node, Node, Shape], Node]) -> Callable[..., Node | None]:
    def lowered(shape: Shape, dtype: str, x: Node, y: Any = None) -> Node | None:
        pair = [x, y] if isinstance(y, Node) else [x, x]
        if (y is not None and not isinstance(y, Node)) or any(value.dtype != "bool" for value in pair):
            return None
        return choose(build.expand(pair[0], shape), build.expand(pair[1], shape), shape)

    return lowered


def truth(value: bool, shape: Shape) -> Node:
    return build.constant(value, shape, "bool")


def lower_unequal(shape: Shape, dtype: str, x: Node, y: Any) -> Node | None:
    equal = lower_comparison("equal", False)(shape, dtype, x, y)
    return equal if equal is None else make("where", equal, truth(False, shape), truth(True, shape))


def lower_mean(shape: Shape, dtype: str, x: Node, dims: Any = None, keep: bool = False, /, **other: Any) -> Node | None:
    chosen = _reduced_dims(dtype, x, dims, other)
    return build.reshape(build.mean(x, chosen), shape) if chosen and 0 not in x.shape else None


def lower_variance(
    typed: Sequence[tuple[Shape, str]], x: Node, dims: Any = None, /, **other: Any
) -> tuple[Node, ...] | None:
    """The variance and the mean, from the differences to the mean: no cancellation."""
    (shape, dtype), _ = typed
    if x.dtype != dtype or dtype not in FLOATS:
        return None
    rank = len(x.shape)
    chosen = sorted(dim % rank for dim in dims) if dims and rank else list(range(rank))
    count = prod(x.shape[dim] for dim in chosen)
    correction = other.get("correction")
    free = count - (1 if correction is None else correction)
    if free <= 0:
        return None
    x = build.cast(x, WIDER.get(dtype, dtype))
    mean = build.mean(x, chosen, keep=True)
    centred = build.subtract(x, mean)
    variance = build.divide(build.total(build.multiply(centred, centred), chosen), float(free))
    return tuple(build.cast(build.reshape(value, shape), dtype) for value in (variance, mean))


def target_column(target: Node, shape: Shape) -> Node:
    """Where a column is the row's target."""
    column = target if len(target.shape) == len(shape) else build.reshape(target, (*target.shape, 1))
    return build.compare("equal", build.iota(shape, len(shape) - 1), column)


def picked(x: Node, target: Node) -> Node:
    """Of each row the element in its target's column; rows to be ignored have no such column, and any value.

    What is subtracted from a whole row (a logarithm of a sum) is subtracted once, from the element: then a row has to
    be read only for its largest element and for the sum.
    """
    if x.op == "cast" and x.inputs[0].dtype in FLOATS:
        return build.cast(picked(x.inputs[0], target), x.dtype)
    if x.op == "subtract" and x.inputs[1].op == "broadcast" and x.inputs[1]["dims"][:1] == (0,):
        row = x.inputs[1].inputs[0]
        if row.shape in (x.shape[:1], (x.shape[0], 1)):
            return build.subtract(picked(x.inputs[0], target), build.reshape(row, x.shape[:1]))
    return build.total(build.where(target_column(target, x.shape), x, 0.0), [1])


def lower_loss(
    typed: Sequence[tuple[Shape, str]], x: Node, target: Node, weight: Any, reduction: int, ignored: int
) -> tuple[Node, ...] | None:
    """The negative log-probability of each row's target, of those that are not to be ignored."""
    (_, dtype), _ = typed
    if weight is not None or len(x.shape) != 2 or x.dtype != dtype or target.dtype != "int64":
        return None
    target = checked_targets(target, x.shape[1], ignored)
    skipped = build.compare("equal", target, ignored)
    losses = build.where(skipped, build.constant(0.0, target.shape, dtype), build.negate(picked(x, target)))
    count = build.total(build.where(skipped, build.constant(0.0, target.shape, dtype), 1.0))
    total = build.total(losses)
    return (losses, total, build.divide(total, count))[(0, 2, 1)[reduction]], count


def lower_loss_backward(
    shape: Shape, dtype: str, slope: Node, x: Node, target: Node, weight: Any, reduction: int, ignored: int, count: Node
) -> Node | None:
    if weight is not None or len(shape) != 2 or slope.dtype != dtype or target.dtype != "int64":
        return None
    each = build.divide(slope, count) if reduction == 1 else slope
    each = build.expand(build.reshape(each, (*each.shape, 1)) if each.shape else each, shape)
    skipped = build.expand(build.reshape(build.compare("equal", target, ignored), (shape[0], 1)), shape)
    chosen = make("where", skipped, truth(False, shape), target_column(target, shape))
    return build.where(chosen, build.negate(each), 0.0)


def lower_reduction(op: str) -> Callable[..., Node | None]:
    def lowered(
        shape: Shape, dtype: str, x: Node, dims: Any = None, keep: bool = False, /, **other: Any
    ) -> Node | None:
        chosen = _reduced_dims(dtype, x, dims, other)
        return build.reshape(make(op, x, dims=chosen), shape) if chosen else None

    return lowered


def _reduced_dims(dtype: str, x: Node, dims: Any, other: Mapping[str, Any]) -> tuple[int, ...]:
    """The dims that a reduction is over; none where it stays torch's own."""
    rank = len(x.shape)
    if x.dtype != dtype or dtype not in FLOATS or any(value is not None for value in other.values()) or not rank:
        return ()
    return tuple(sorted(dim % rank for dim in dims)) if dims else tuple(range(rank))
