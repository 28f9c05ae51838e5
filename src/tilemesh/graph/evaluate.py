"""Running a graph by numpy, one operator after the other: slow, and simple enough to be believed.

`run_numpy` is the reference that every other way of running a graph is compared with. A value that a switch did not
let through is `DEAD`; whatever reads it is dead as well, except a merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product as places
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tilemesh.core.errors import UsageError
from tilemesh.graph.ir import Dense, Graph, Node
from tilemesh.graph.ops import primitive

Array: TypeAlias = npt.NDArray[Any]


class _Dead:
    def __repr__(self) -> str:
        return "dead: its branch was not taken"


DEAD = _Dead()


def check_shapes(graph: Graph, shapes: Sequence[Sequence[int]]) -> None:
    """Refuses arrays that do not fit the inputs of a graph."""
    if len(shapes) != len(graph.inputs):
        raise UsageError(f"{len(shapes)} arrays were given; the graph has {len(graph.inputs)} inputs")
    for node, shape in zip(graph.inputs, shapes, strict=True):
        if node.shape != tuple(shape):
            raise UsageError(f"input {node['name']} has shape {list(shape)}; the graph needs {list(node.shape)}")


def run_numpy(graph: Graph, *arrays: Array) -> tuple[Array, ...]:
    """The outputs of a graph for these inputs."""
    check_shapes(graph, [np.shape(array) for array in arrays])
    values: dict[Node, Any] = dict(zip(graph.inputs, map(np.asarray, arrays), strict=True))
    for node in graph.nodes():
        if node not in values:
            values[node] = evaluate_numpy(node, [values[value] for value in node.inputs])
    return tuple(values[node] for node in graph.outputs)


def evaluate_numpy(node: Node, inputs: Sequence[Any]) -> Any:
    """One operator."""
    steered, value = control(node, inputs)
    if steered:
        return value
    if node.dtype == "bfloat16":
        raise UsageError("numpy has no bfloat16; run the graph by torch, or in another dtype")
    function = _NUMPY.get(node.op)
    if function is None and primitive(node.op).kind == "elementwise":
        result = getattr(np, node.op)(*inputs)  # numpy's own name for it
    elif function is not None:
        result = function(node, *inputs)
    else:
        what = node["target"] if node.op == "opaque" else node.op
        raise UsageError(f"{what} runs by torch alone" + (f" ({node.line})" if node.line else ""))
    return result if node.op == "region" else np.asarray(result).astype(node.dtype, copy=False)


def control(node: Node, inputs: Sequence[Any]) -> tuple[bool, Any]:
    """Whether the value of a node follows from which of its inputs live, and then that value."""
    if node.op == "merge":
        return True, inputs[1] if inputs[0] else inputs[2]
    if any(value is DEAD for value in inputs):
        return True, DEAD
    if node.op == "switch":
        return True, inputs[0] if bool(inputs[1]) == node["branch"] else DEAD
    return False, None


def dense(node: Node) -> Array:
    """The array of a constant."""
    value = node["value"]
    if isinstance(value, Dense):
        return np.frombuffer(value.data, dtype=node.dtype).reshape(node.shape)
    return np.asarray(value, dtype=node.dtype)


def stored_number(value: float | int | bool, dtype: str) -> float | int | bool | None:
    """The number that a tensor of this dtype holds of another one; None where it has none that is near."""
    if dtype == "bool":
        return bool(value)
    if "float" not in dtype:
        if not math.isfinite(value) or not np.iinfo(dtype).min <= int(value) <= np.iinfo(dtype).max:
            return None
        return int(value)
    with np.errstate(over="ignore"):
        near = np.asarray(value, np.float32 if dtype == "bfloat16" else dtype)
        if dtype == "bfloat16" and near == near:
            bits = near.view(np.uint32).astype(np.uint64)
            near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    number = float(near)
    return None if math.isinf(number) and not math.isinf(value) else number


def _iota(node: Node) -> Array:
    shape = node.shape
    line = np.arange(shape[node["dim"]]).reshape([-1 if dim == node["dim"] else 1 for dim in range(len(shape))])
    return np.broadcast_to(line, shape)


def _broadcast(node: Node, x: Array) -> Array:
    shape = node.shape
    between = [size if dim in node["dims"] else 1 for dim, size in enumerate(shape)]
    return np.broadcast_to(np.transpose(x, np.argsort(node["dims"]).astype(int)).reshape(between), shape)


def ranges(node: Node) -> tuple[slice, ...]:
    """A slice node's ranges, as Python slices."""
    stops = node["stop"]
    return tuple(slice(*bounds) for bounds in zip(node["start"], stops, node["step"], strict=True))


def _pad(node: Node, x: Array) -> Array:
    padded = np.zeros(node.shape, x.dtype)
    padded[pad_ranges(node, x.shape)] = x
    return padded


def pad_ranges(node: Node, shape: Sequence[int]) -> tuple[slice, ...]:
    """Where the elements of a padded array lie in the result."""
    bounds = zip(shape, node["low"], node["inner"], strict=True)
    return tuple(slice(low, low + size + (size - 1) * inner if size else low, inner + 1) for size, low, inner in bounds)


def _put_add(node: Node, values: Array, index: Array) -> Array:
    table = np.zeros(node.shape, values.dtype)
    np.add.at(table, _rows(index, len(table)), values)
    return table


def _rows(index: Array, count: int) -> Array:
    """Indices of rows, which count from 0: numpy would take a negative one from the end."""
    if index.size and not 0 <= index.min() <= index.max() < count:
        raise IndexError(f"indices from {index.min()} to {index.max()} of {count} rows")
    return index


def _last(*index: Any) -> Any:
    """An index of the last dims."""
    return (..., *index)


def _by_taps(node: Node, x: Array, taps: Sequence[int], out: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """For each tap of a convolution its index in the weights, and what of a padded map it meets at every place."""
    for tap in places(*map(range, taps)):
        seen = (
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, size, stride, dilation in zip(tap, out, node["stride"], node["dilation"], strict=True)
        )
        yield _last(*tap), x[_last(*seen)]


def _grouped(x: Array, groups: int, dim: int) -> Array:
    """The channels of a map (dim 1), or the results of weights (dim 0), apart by groups."""
    return x.reshape(*x.shape[:dim], groups, -1, *x.shape[dim + 1 :])


def _padded(node: Node, x: Array) -> Array:
    wide = np.pad(x, [(0, 0), (0, 0), *((pad, pad) for pad in node["padding"])])
    return _grouped(wide, node["groups"], 1)


def _conv(node: Node, x: Array, w: Array) -> Array:
    out, weights = node.shape, _grouped(w, node["groups"], 0)
    parts = _by_taps(node, _padded(node, x), w.shape[2:], out[2:])
    total: Array = sum(np.einsum("ngc...,goc->ngo...", part, weights[tap]) for tap, part in parts)
    return total.reshape(out)


def _conv_input(node: Node, g: Array, w: Array) -> Array:
    shape = node.shape
    total = _padded(node, np.zeros(shape, g.dtype))
    slopes, weights = _grouped(g, node["groups"], 1), _grouped(w, node["groups"], 0)
    for tap, part in _by_taps(node, total, w.shape[2:], g.shape[2:]):
        part += np.einsum("ngo...,goc->ngc...", slopes, weights[tap])
    inner = (slice(pad, pad + size) for pad, size in zip(node["padding"], shape[2:], strict=True))
    cropped: Array = total[_last(*inner)]
    return cropped.reshape(shape)


def _conv_weight(node: Node, x: Array, g: Array) -> Array:
    shape, slopes = node.shape, _grouped(g, node["groups"], 1)
    total = _grouped(np.zeros(shape, g.dtype), node["groups"], 0)
    for tap, part in _by_taps(node, _padded(node, x), shape[2:], g.shape[2:]):
        total[tap] = np.einsum(
            "ngcp,ngop->goc", part.reshape(*part.shape[:3], -1), slopes.reshape(*slopes.shape[:3], -1)
        )
    return total.reshape(shape)


def _windows(node: Node, x: Array) -> Array:
    taps, stride = node["taps"], node["stride"]
    axes = tuple(range(x.ndim - len(taps), x.ndim))
    view = np.lib.stride_tricks.sliding_window_view(x, taps, axes)
    steps = tuple(slice(None, None, by) for by in stride)
    return view[(slice(None),) * (x.ndim - len(taps)) + steps]


def _unwindows(node: Node, g: Array) -> Array:
    """The transpose of `windows`: every element of the input gets the sum of its places in the windows."""
    taps, stride = node["taps"], node["stride"]
    total = np.zeros(node.shape, g.dtype)
    out = g.shape[-2 * len(taps) : -len(taps)]
    for tap in places(*map(range, taps)):
        seen = tuple(slice(at, at + (n - 1) * by + 1, by) for at, n, by in zip(tap, out, stride, strict=True))
        total[_last(*seen)] += g[_last(*tap)]
    return total


_erf = np.vectorize(math.erf, otypes=[np.float64])
_NUMPY: dict[str, Callable[..., Any]] = {
    "region": lambda node, *xs: run_numpy(node["body"], *xs),
    "item": lambda node, values: values[node["index"]],
    "constant": lambda node: dense(node),
    "iota": _iota,
    "negate": lambda node, x: np.negative(x),
    "sigmoid": lambda node, x: 0.5 * (1 + np.tanh(0.5 * x)),
    "erf": lambda node, x: _erf(x) if x.size else x,
    "compare": lambda node, x, y: getattr(np, node["kind"])(x, y),
    "cast": lambda node, x: x,
    "sum": lambda node, x: x.sum(axis=node["dims"]),
    "amax": lambda node, x: x.max(axis=node["dims"]),
    "argmax": lambda node, x: x.argmax(axis=node["dim"]),
    "reshape": lambda node, x: x.reshape(node.shape),
    "transpose": lambda node, x: x.transpose(node["order"]),
    "broadcast": _broadcast,
    "concat": lambda node, *xs: np.concatenate(xs, axis=node["dim"]),
    "slice": lambda node, x: x[ranges(node)],
    "pad": _pad,
    "reverse": lambda node, x: np.flip(x, node["dims"]),
    "own_copy": lambda node, x: x,
    "dot": lambda node, x, y: x @ y,
    "take": lambda node, table, index: table[_rows(index, len(table))],
    "put_add": _put_add,
    "conv": _conv,
    "conv_input": _conv_input,
    "conv_weight": _conv_weight,
    "windows": _windows,
    "unwindows": _unwindows,
}
