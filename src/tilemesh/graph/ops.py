"""The table of primitives: shape rule, operations, torch's function, derivative, and the text in C and Triton.

A rule gets the shapes and dtypes of the inputs and the attributes, and returns the shape and the dtype of the output;
it refuses what does not fit. `kind` says what passes may assume: an *elementwise* primitive computes each element of
its output from the same element of its inputs; a *linear* one is linear in each differentiable input separately.

An elementwise primitive is one row, read by everything that runs, differentiates or generates code for it. The others
have functions besides their row: their value in `by_torch.py`, their transpose in `derive.py`. numpy's values, the
reference, are `evaluate.py`'s own. Plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from tilemesh.core.errors import UsageError, unknown

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2}
DTYPES |= {"int8": 1, "uint8": 1, "bool": 1}
FLOATS = ("float64", "float32", "bfloat16", "float16")
WIDER = {"bfloat16": "float32", "float16": "float32"}  # what sums of them are kept in
COMPARISONS = {"equal": "==", "less": "<", "less_equal": "<="}
REDUCTIONS = ("sum", "amax")  # that generated kernels compute
VIEWS = ("reshape", "transpose", "broadcast", "slice", "item", "own_copy")  # memory named again: no work for a device
TUPLE = "tuple"  # the dtype of an opaque operator that returns several tensors, each taken out by `item`

Shape: TypeAlias = tuple[int, ...]
Typed: TypeAlias = tuple[Shape, str]
Attributes: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[Sequence[Typed], Attributes], Typed]
Flops: TypeAlias = Callable[[Sequence[Typed], Typed, Attributes], int]


@dataclass(frozen=True)
class Primitive:
    """What every pass knows of an operator. `arity` None: any number of inputs.

    In texts, {x}, {y} and {z} are the operands and {sign} that of a comparison; `code` is the same in Python, C and
    Triton. C has {f} (empty for float64), {fast} (functions of `kernel_math.h`) and {type}; Triton has {type}, {nan}
    (NaN goes through a maximum) and {rn} (rounded to nearest, which float64 always is).
    """

    name: str
    arity: int | None
    kind: str  # source, elementwise, linear, reduction, control, region, exchange or opaque
    rule: Rule
    flops: Flops = lambda inputs, output, attributes: 0
    commutes: bool = False
    torch: str = ""  # the name of torch's function
    partials: str | None = None  # for each input the derivative, of x, y and out, in the functions of `build.py`
    code: str = ""
    c: str = ""
    triton: str = ""
    floats: bool = False  # generated kernels compute it for floating-point dtypes alone
    costly: bool = False  # worth keeping where it is needed again


PRIMITIVES: dict[str, Primitive] = {}


def primitive(name: str) -> Primitive:
    if name not in PRIMITIVES:
        raise unknown("primitive", name, PRIMITIVES)
    return PRIMITIVES[name]


def _define(names: str, arity: int | None, kind: str, rule: Rule, **more: Any) -> None:
    for name in names.split():
        PRIMITIVES[name] = Primitive(name, arity, kind, rule, **more)


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _known(what: str, given: str, known: Iterable[str]) -> None:
    if given not in known:
        raise unknown(what, given, known)


def _same(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    """Equal shapes and dtypes in, the same out."""
    for other in inputs[1:]:
        _need(other == inputs[0], f"the inputs are {_words(inputs)}; give equal shapes and dtypes")
    return inputs[0]


def _words(inputs: Sequence[Typed]) -> str:
    return " and ".join(f"{dtype}{list(shape)}" for shape, dtype in inputs)


def _float(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    typed = _same(inputs, attributes)
    _need(typed[1] in FLOATS, f"the input is {_words(inputs)}; give a floating-point dtype")
    return typed


def _comparison(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    _known("comparison", str(attributes["kind"]), COMPARISONS)
    return _same(inputs, attributes)[0], "bool"


def _where(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    chosen, *branches = inputs
    _need(chosen == (branches[0][0], "bool"), f"where chooses by {_words([chosen])}; give bool{list(branches[0][0])}")
    return _same(branches, attributes)


def _given(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    _known("dtype", str(attributes["dtype"]), DTYPES)
    return _typed(inputs, attributes)


def _typed(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    return tuple(attributes["shape"]), attributes["dtype"]


def _cast(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    _known("dtype", str(attributes["dtype"]), DTYPES)
    return inputs[0][0], attributes["dtype"]


def _dims(dims: Sequence[int], rank: int) -> tuple[int, ...]:
    ordered = tuple(dims)
    legal = all(isinstance(dim, int) and 0 <= dim < rank for dim in ordered)
    _need(legal and len(set(ordered)) == len(ordered), f"the dims are {list(dims)}; give different ones below {rank}")
    return ordered


def _reduced(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    shape, dtype = inputs[0]
    dims = _dims(attributes["dims"], len(shape))
    return tuple(size for dim, size in enumerate(shape) if dim not in dims), dtype


def _argmax(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    return _reduced(inputs, {"dims": (attributes["dim"],)})[0], "int64"


def _reshape(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    shape, dtype = inputs[0]
    new = tuple(attributes["shape"])
    _need(prod(shape) == prod(new), f"a reshape from {list(shape)} to {list(new)}; give as many elements")
    return new, dtype


def _transpose(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    shape, dtype = inputs[0]
    order = _dims(attributes["order"], len(shape))
    _need(len(order) == len(shape), f"the order is {list(order)}; give each of the {len(shape)} dims once")
    return tuple(shape[dim] for dim in order), dtype


def _broadcast(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    """Dim k of the input becomes dim `dims[k]` of the output; the others repeat it."""
    shape, dtype = inputs[0]
    new, dims = tuple(attributes["shape"]), _dims(attributes["dims"], len(attributes["shape"]))
    fits = len(dims) == len(shape) and all(new[dim] == size for dim, size in zip(dims, shape, strict=True))
    _need(fits, f"a broadcast of {list(shape)} as dims {list(dims)} of {list(new)}; give equal sizes")
    return new, dtype


def _concat(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    (shape, dtype), dim = inputs[0], attributes["dim"]
    _dims([dim], len(shape))
    for other, kind in inputs[1:]:
        equal = len(other) == len(shape) and all(
            size == own for place, (size, own) in enumerate(zip(other, shape, strict=True)) if place != dim
        )
        _need(
            equal and kind == dtype, f"a concatenation along {dim} of {_words(inputs)}; the other sizes must be equal"
        )
    return (*shape[:dim], sum(other[dim] for other, _ in inputs), *shape[dim + 1 :]), dtype


def _slice(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    shape, dtype = inputs[0]
    starts, stops, steps = attributes["start"], attributes["stop"], attributes["step"]
    _need(
        len(starts) == len(stops) == len(steps) == len(shape), f"a slice of {list(shape)} needs one range for each dim"
    )
    sizes = []
    for size, start, stop, step in zip(shape, starts, stops, steps, strict=True):
        _need(0 <= start <= stop <= size and step >= 1, f"the range {start}:{stop}:{step} leaves a dim of {size}")
        sizes.append(-(-(stop - start) // step))
    return tuple(sizes), dtype


def _pad(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    """Zeros before, after and between the elements of each dim."""
    shape, dtype = inputs[0]
    sizes = []
    for size, low, high, inner in zip(shape, attributes["low"], attributes["high"], attributes["inner"], strict=True):
        _need(low >= 0 and high >= 0 and inner >= 0, f"padding {low}, {high}, {inner}; give numbers of at least 0")
        spread = size + (size - 1) * inner if inner and size != 0 else size
        sizes.append(spread + low + high)
    return tuple(sizes), dtype


def _reverse(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    _dims(attributes["dims"], len(inputs[0][0]))
    return inputs[0]


def _dot(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    (left, dtype), (right, other) = inputs
    fits = len(left) == len(right) >= 2 and left[:-2] == right[:-2] and left[-1] == right[-2] and dtype == other
    _need(fits, f"the product of {_words(inputs)}; give [..., m, k] and [..., k, n] of one dtype")
    return (*left[:-1], right[-1]), dtype


def _take(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    (values, dtype), (index, kind) = inputs
    _need(kind == "int64" and len(values) >= 1, f"rows of {_words(inputs)}; give a table and int64 indices")
    return (*index, *values[1:]), dtype


def _put_add(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    (values, dtype), (index, kind) = inputs
    fits = kind == "int64" and values[: len(index)] == index
    _need(fits, f"sums of rows of {_words(inputs)}; give [*index, *row] and int64 indices")
    return (attributes["size"], *values[len(index) :]), dtype


def window(size: int, taps: int, stride: int, low: int = 0, high: int = 0, dilation: int = 1) -> int:
    """How many places a window of `taps` elements has in a dim of `size`."""
    return (size + low + high - dilation * (taps - 1) - 1) // stride + 1


def _conv(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    """x [n, c, *space], w [out, c/groups, *taps] -> [n, out, *places]; 1 to 3 dims of space."""
    (x, dtype), (w, other) = inputs
    space = len(x) - 2
    groups = attributes["groups"]
    fits = 1 <= space <= 3 and len(w) == len(x) and dtype == other and w[1] * groups == x[1]
    fits = fits and w[0] % groups == 0
    _need(fits, f"a convolution of {_words(inputs)} in {groups} groups; give [n, c, *space] and [out, c/groups, *taps]")
    for name in ("stride", "padding", "dilation"):
        _need(
            len(attributes[name]) == space, f"{name} is {list(attributes[name])}; give one number for each dim of space"
        )
    places = [
        window(size, taps, stride, pad, pad, dilation)
        for size, taps, stride, pad, dilation in zip(
            x[2:], w[2:], attributes["stride"], attributes["padding"], attributes["dilation"], strict=True
        )
    ]
    _need(all(place >= 1 for place in places), f"the window {list(w[2:])} exceeds {list(x)}")
    return (x[0], w[0], *places), dtype


def _windows(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    """[*lead, *space] -> [*lead, *places, *taps]: every window as dims of its own."""
    shape, dtype = inputs[0]
    taps, stride = attributes["taps"], attributes["stride"]
    lead = len(shape) - len(taps)
    _need(lead >= 0 and len(stride) == len(taps), f"windows {list(taps)} by {list(stride)} of {list(shape)}")
    places = tuple(window(size, tap, by) for size, tap, by in zip(shape[lead:], taps, stride, strict=True))
    return (*shape[:lead], *places, *taps), dtype


def _switch(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    _need(inputs[1] == ((), "bool"), f"a switch decides by {_words(inputs[1:])}; give bool[]")
    return inputs[0]


def _merge(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    _need(inputs[0] == ((), "bool"), f"a merge decides by {_words(inputs[:1])}; give bool[]")
    return _same(inputs[1:], attributes)


def _exchanged(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    """`counts`: how long each rank's part is along `dim`, `parts` along `into`; this rank is number `index`."""
    shape, dtype = list(inputs[0][0]), inputs[0][1]
    if "counts" in attributes:
        counts, dim = attributes["counts"], attributes["dim"]
        before, after = counts[attributes["index"]], sum(counts)
        if attributes["scatters"]:
            before, after = after, before
        _need(shape[dim] == before, f"parts {list(counts)} of a dim of {shape[dim]}: expected {before}")
        shape[dim] = after
    if "into" in attributes:
        parts, into = attributes["parts"], attributes["into"]
        _need(shape[into] == sum(parts), f"parts {list(parts)} of a dim of {shape[into]}")
        shape[into] = parts[attributes["index"]]
    return tuple(shape), dtype


def _laid(inputs: Sequence[Typed], attributes: Attributes) -> Typed:
    if len(attributes["strides"]) != len(inputs[0][0]):
        raise UsageError(f"the strides {attributes['strides']} do not fit the shape {list(inputs[0][0])}")
    return inputs[0]


def _each(inputs: Sequence[Typed], output: Typed, attributes: Attributes) -> int:
    return prod(output[0])


def _each_read(inputs: Sequence[Typed], output: Typed, attributes: Attributes) -> int:
    return prod(inputs[0][0])


def _elementwise(name: str, arity: int, rule: Rule = _same, flops: Flops = _each, code: str = "", **more: Any) -> None:
    texts = {"code": code, "c": code, "triton": code} if code else {}
    _define(name, arity, "elementwise", rule, flops=flops, **texts, **more)


def _function(name: str, triton: str = "", c: str = "{fast}@({x})", **more: Any) -> None:
    """A function of one floating-point number that libraries have under its own name."""
    triton = triton or f"tl.{name}({{x}})"
    c = c.replace("@", name)
    _elementwise(name, 1, _float, torch=name, floats=True, costly=True, c=c, triton=triton, **more)


_define("input constant iota", 0, "source", _given)
_define("opaque", None, "opaque", _typed, flops=lambda inputs, output, attributes: attributes.get("flops", 0))
_define("item", 1, "opaque", _typed)
_define("lay", 1, "opaque", _laid)  # the same values in certain strides, for operators that read memory in order
_define(
    "region", None, "region", lambda inputs, attributes: ((), TUPLE),
    flops=lambda inputs, output, attributes: attributes["body"].flops,
)  # fmt: skip

_elementwise("add", 2, code="{x} + {y}", torch="add", partials="1.0, 1.0", commutes=True)
_elementwise("subtract", 2, code="{x} - {y}", torch="sub", partials="1.0, -1.0")
_elementwise("multiply", 2, code="{x} * {y}", torch="mul", partials="y, x", commutes=True)
_elementwise(
    "divide", 2, code="{x} / {y}", torch="div", partials="divide(1.0, y), negate(divide(out, y))", floats=True,
    costly=True,
)  # fmt: skip
_elementwise(
    "power", 2, c="pow{f}({x}, {y})", torch="pow", partials="power_by_base(x, y), power_by_exponent(x, out)",
    floats=True, costly=True,
)  # fmt: skip
_elementwise(
    "maximum", 2, c="{x} > {y} || {x} != {x} ? {x} : {y}", triton="tl.maximum({x}, {y}{nan})", torch="maximum",
    partials="share := larger(x, y), subtract(1.0, share)", commutes=True,
)  # fmt: skip
_elementwise(
    "minimum", 2, c="{x} < {y} || {x} != {x} ? {x} : {y}", triton="tl.minimum({x}, {y}{nan})", torch="minimum",
    partials="share := larger(y, x), subtract(1.0, share)", commutes=True,
)  # fmt: skip
_elementwise("negate", 1, c="-{x}", triton="-{x}", torch="neg", partials="-1.0")
_elementwise("absolute", 1, c="fabs{f}({x})", triton="tl.abs({x})", torch="abs", partials="sign(x)", floats=True)
_elementwise(
    "sign", 1, c="({type})(({x} > 0) - ({x} < 0))", triton="({x} > 0).to(tl.{type}) - ({x} < 0).to(tl.{type})",
    torch="sign", partials="None",
)  # fmt: skip
_function("exp", partials="out")
_function("log", partials="divide(1.0, x)")
_function("sqrt", c="sqrt{f}({x})", triton="tl.sqrt{rn}({x})", partials="divide(0.5, out)")
_function("sin", c="sin{f}({x})", partials="cos(x)")
_function("cos", c="cos{f}({x})", partials="negate(sin(x))")
_function("tanh", triton="tanh({x})", partials="subtract(1.0, multiply(out, out))")
_function("sigmoid", partials="multiply(out, subtract(1.0, out))")
_function("erf", partials="multiply(exp(negate(multiply(x, x))), 1.1283791670955126)")
_elementwise("compare", 2, _comparison, code="{x} {sign} {y}", partials="None, None")
_elementwise("where", 3, _where, c="{x} ? {y} : {z}", triton="tl.where({x}, {y}, {z})", torch="where")
_elementwise("cast", 1, _cast, flops=lambda inputs, output, attributes: 0)

_define("sum", 1, "linear", _reduced, flops=_each_read)
_define("amax", 1, "reduction", _reduced, flops=_each_read)
_define("argmax", 1, "reduction", _argmax, flops=_each_read)
_define("reshape", 1, "linear", _reshape)
_define("transpose", 1, "linear", _transpose)
_define("broadcast", 1, "linear", _broadcast)
_define("concat", None, "linear", _concat)
_define("slice", 1, "linear", _slice)
_define("pad", 1, "linear", _pad)
_define("reverse", 1, "linear", _reverse)
_define(
    "dot", 2, "linear", _dot, torch="matmul",
    flops=lambda inputs, output, attributes: prod(output[0]) * inputs[0][0][-1] * 2,
)  # fmt: skip
_define("take", 2, "linear", _take)
_define("put_add", 2, "linear", _put_add, flops=_each_read)
_define(
    "conv", 2, "linear", _conv,
    flops=lambda inputs, output, attributes: prod(output[0]) * prod(inputs[1][0][1:]) * 2,
)  # fmt: skip
_define(  # the two transposes of a convolution; `size` is the shape of what they give
    "conv_input", 2, "linear", lambda inputs, attributes: (tuple(attributes["size"]), inputs[0][1]),
    flops=lambda inputs, output, attributes: prod(inputs[0][0]) * prod(inputs[1][0][1:]) * 2,
)  # fmt: skip
_define(
    "conv_weight", 2, "linear", lambda inputs, attributes: (tuple(attributes["size"]), inputs[0][1]),
    flops=lambda inputs, output, attributes: prod(inputs[1][0]) * prod(output[0][1:]) * 2,
)  # fmt: skip
_define("windows", 1, "linear", _windows)
_define(
    "unwindows", 1, "linear", lambda inputs, attributes: (tuple(attributes["shape"]), inputs[0][1]), flops=_each_read
)
# What ranks along an `axis` of a mesh do together; `serial` tells two of them apart, in an order that all ranks have.
_define("all_reduce all_gather reduce_scatter all_to_all", 1, "exchange", _exchanged)
_define("own_copy", 1, "linear", _same)  # what all ranks have alike, of which each computes its own from here on
_define("switch", 2, "control", _switch)
_define("merge", 3, "control", _merge)
