"""Running a graph by torch: one function per primitive, on any device, with autograd if a caller wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tilemesh.core.errors import UsageError
from tilemesh.graph.evaluate import control, dense, pad_ranges, ranges, sizes_of
from tilemesh.graph.ir import Dense, Graph, Node
from tilemesh.graph.opaque import laid, run_opaque
from tilemesh.graph.ops import DTYPES, primitive
from tilemesh.graph.size import numbers

Tensor = torch.Tensor


_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def dtype_of(name: str) -> torch.dtype:
    return _BY_NAME[name]


def run_torch(graph: Graph, *tensors: Tensor) -> tuple[Any, ...]:
    """The outputs of a graph for these inputs, one operator after the other; a value goes after its last use."""
    sizes = sizes_of(graph, [tensor.shape for tensor in tensors])
    device = tensors[0].device if tensors else torch.device("cpu")
    values: dict[Node, Any] = dict(zip(graph.inputs, tensors, strict=True))
    order = graph.nodes()
    last = {value: place for place, node in enumerate(order) for value in node.inputs}
    kept = {*graph.outputs, *graph.inputs}
    for place, node in enumerate(order):
        if node not in values:
            values[node] = evaluate_torch(node, [values[value] for value in node.inputs], sizes, device)
        for value in node.inputs:
            if last[value] == place and value not in kept:
                values.pop(value, None)
    return tuple(values[node] for node in graph.outputs)


def evaluate_torch(node: Node, inputs: Sequence[Any], sizes: Mapping[str, int], device: torch.device) -> Any:
    """One operator."""
    steered, value = control(node, inputs)
    if steered:
        return value
    if node.op == "constant":
        return constant(node, device)
    if node.op == "iota":
        return _iota(node, sizes, device)
    return torch_function(node, sizes)(*inputs)


def torch_function(node: Node, sizes: Mapping[str, int]) -> Callable[..., Any]:
    """The function of torch, or of several of its functions, that computes a node of its inputs."""
    name = primitive(node.op).torch
    if name:
        return getattr(torch, name)  # type: ignore[no-any-return]
    if node.op not in _TORCH:
        raise UsageError(f"{node.op} cannot be run by torch")
    return partial(_TORCH[node.op], node, sizes)


def constant(node: Node, device: torch.device) -> Tensor:
    value = node["value"]
    if not isinstance(value, Dense):
        return torch.tensor(value, dtype=dtype_of(node.dtype), device=device)
    if node.dtype == "bfloat16":
        flat = torch.frombuffer(bytearray(value.data), dtype=torch.bfloat16)
        return flat.reshape(numbers(node.shape, {})).to(device)
    return torch.from_numpy(dense(node).copy()).to(device)


def _iota(node: Node, sizes: Mapping[str, int], device: torch.device) -> Tensor:
    shape = numbers(node.shape, sizes)
    line = torch.arange(shape[node["dim"]], device=device)
    return line.reshape([-1 if dim == node["dim"] else 1 for dim in range(len(shape))]).expand(shape)


def _broadcast(node: Node, sizes: Mapping[str, int], x: Tensor) -> Tensor:
    shape, dims = numbers(node.shape, sizes), node["dims"]
    if list(dims) != sorted(dims):
        x = x.permute([dims.index(dim) for dim in sorted(dims)])
    for dim in range(len(shape)):
        if dim not in dims:
            x = x.unsqueeze(dim)
    return x.expand(shape)


def _pad(node: Node, sizes: Mapping[str, int], x: Tensor) -> Tensor:
    padded = x.new_zeros(numbers(node.shape, sizes))
    padded[pad_ranges(node, x.shape)] = x
    return padded


def _take(node: Node, sizes: Mapping[str, int], table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table. An index counts from 0: indexing would take a negative one from the end."""
    return table.index_select(0, index.reshape(-1)).reshape(numbers(node.shape, sizes))


def _put_add(node: Node, sizes: Mapping[str, int], values: Tensor, index: Tensor) -> Tensor:
    shape = numbers(node.shape, sizes)
    table = values.new_zeros(shape)
    return table.index_add(0, index.reshape(-1), values.reshape(index.numel(), *shape[1:]))


def _convolved(node: Node, g: Tensor, x: Tensor, w: Tensor, mask: list[bool]) -> Any:
    zeros = [0] * len(node["stride"])
    return torch.ops.aten.convolution_backward(
        g, x, w, None, node["stride"], node["padding"], node["dilation"], False, zeros, node["groups"], mask
    )


def _conv(node: Node, sizes: Mapping[str, int], x: Tensor, w: Tensor) -> Tensor:
    zeros = [0] * len(node["stride"])
    settings = (node["stride"], node["padding"], node["dilation"], False, zeros, node["groups"])
    return torch.ops.aten.convolution(x, w, None, *settings)  # type: ignore[no-any-return]


def _conv_input(node: Node, sizes: Mapping[str, int], g: Tensor, w: Tensor) -> Tensor:
    like = g.new_empty(1).expand(numbers(node.shape, sizes))  # only its shape is read
    return _convolved(node, g, like, w, [True, False, False])[0]  # type: ignore[no-any-return]


def _conv_weight(node: Node, sizes: Mapping[str, int], x: Tensor, g: Tensor) -> Tensor:
    like = g.new_empty(1).expand(numbers(node.shape, sizes))
    return _convolved(node, g, x, like, [False, True, False])[1]  # type: ignore[no-any-return]


def _windows(node: Node, sizes: Mapping[str, int], x: Tensor) -> Tensor:
    lead = x.ndim - len(node["taps"])
    for place, (taps, stride) in enumerate(zip(node["taps"], node["stride"], strict=True)):
        x = x.unfold(lead + place, taps, stride)
    return x


def _unwindows(node: Node, sizes: Mapping[str, int], g: Tensor) -> Tensor:
    total = g.new_zeros(numbers(node.shape, sizes))
    index = _windows(node, sizes, torch.arange(total.numel(), device=g.device).reshape(total.shape))
    return total.reshape(-1).index_add(0, index.reshape(-1), g.reshape(-1)).reshape(total.shape)


COMPARE: dict[str, Callable[..., Tensor]] = {"equal": torch.eq, "less": torch.lt, "less_equal": torch.le}
_TORCH: dict[str, Callable[..., Any]] = {
    "compare": lambda node, sizes, x, y: COMPARE[node["kind"]](x, y),
    "cast": lambda node, sizes, x: x.to(dtype_of(node.dtype)),
    "sum": lambda node, sizes, x: torch.sum(x, node["dims"]).to(x.dtype),
    "amax": lambda node, sizes, x: torch.amax(x, node["dims"]),
    "argmax": lambda node, sizes, x: torch.argmax(x, node["dim"]),
    "reshape": lambda node, sizes, x: x.reshape(numbers(node.shape, sizes)),
    "transpose": lambda node, sizes, x: x.permute(node["order"]),
    "broadcast": _broadcast,
    "concat": lambda node, sizes, *xs: torch.cat(xs, node["dim"]),
    "slice": lambda node, sizes, x: x[ranges(node, sizes)],
    "pad": _pad,
    "reverse": lambda node, sizes, x: torch.flip(x, node["dims"]),
    "own_copy": lambda node, sizes, x: x,
    "take": _take,
    "put_add": _put_add,
    "conv": _conv,
    "conv_input": _conv_input,
    "conv_weight": _conv_weight,
    "windows": _windows,
    "unwindows": _unwindows,
    "opaque": lambda node, sizes, *xs: run_opaque(node, xs),
    "lay": lambda node, sizes, x: laid(x, node["strides"]),
    "item": lambda node, sizes, values: values[node["index"]],
    "region": lambda node, sizes, *xs: run_torch(node["body"], *xs),
}
