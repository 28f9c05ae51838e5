"""Running a graph by torch: one function per primitive, on any device, with autograd if a caller wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tilemesh.core.errors import UsageError
from tilemesh.graph.evaluate import check_shapes, control, dense, pad_ranges, ranges
from tilemesh.graph.ir import Dense, Graph, Node
from tilemesh.graph.opaque import laid, run_opaque
from tilemesh.graph.ops import DTYPES, primitive

Tensor = torch.Tensor
_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def dtype_of(name: str) -> torch.dtype:
    return _BY_NAME[name]


def run_torch(graph: Graph, *tensors: Tensor) -> tuple[Any, ...]:
    """The outputs of a graph for these inputs, one operator after the other; a value goes after its last use."""
    check_shapes(graph, [tensor.shape for tensor in tensors])
    device = tensors[0].device if tensors else torch.device("cpu")
    values: dict[Node, Any] = dict(zip(graph.inputs, tensors, strict=True))
    order = graph.nodes()
    last = {value: place for place, node in enumerate(order) for value in node.inputs}
    kept = {*graph.outputs, *graph.inputs}
    for place, node in enumerate(order):
        if node not in values:
            values[node] = evaluate_torch(node, [values[value] for value in node.inputs], device)
        for value in node.inputs:
            if last[value] == place and value not in kept:
                values.pop(value, None)
    return tuple(values[node] for node in graph.outputs)


def evaluate_torch(node: Node, inputs: Sequence[Any], device: torch.device) -> Any:
    """One operator."""
    steered, value = control(node, inputs)
    if steered:
        return value
    if node.op == "constant":
        return constant(node, device)
    if node.op == "iota":
        return _iota(node, device)
    return torch_function(node)(*inputs)


def torch_function(node: Node) -> Callable[..., Any]:
    """The function of torch, or of several of its functions, that computes a node of its inputs."""
    name = primitive(node.op).torch
    if name:
        return getattr(torch, name)  # type: ignore[no-any-return]
    if node.op not in _TORCH:
        raise UsageError(f"{node.op} cannot be run by torch")
    return partial(_TORCH[node.op], node)


def constant(node: Node, device: torch.device) -> Tensor:
    value = node["value"]
    if not isinstance(value, Dense):
        return torch.tensor(value, dtype=dtype_of(node.dtype), device=device)
    if node.dtype == "bfloat16":
        flat = torch.frombuffer(bytearray(value.data), dtype=torch.bfloat16)
        return flat.reshape(node.shape).to(device)
    return torch.from_numpy(dense(node).copy()).to(device)


def _iota(node: Node, device: torch.device) -> Tensor:
    shape = node.shape
    line = torch.arange(shape[node["dim"]], device=device)
    return line.reshape([-1 if dim == node["dim"] else 1 for dim in range(len(shape))]).expand(shape)


def _broadcast(node: Node, x: Tensor) -> Tensor:
    shape, dims = node.shape, node["dims"]
    if list(dims) != sorted(dims):
        x = x.permute([dims.index(dim) for dim in sorted(dims)])
    for dim in range(len(shape)):
        if dim not in dims:
            x = x.unsqueeze(dim)
    return x.expand(shape)


def _pad(node: Node, x: Tensor) -> Tensor:
    padded = x.new_zeros(node.shape)
    padded[pad_ranges(node, x.shape)] = x
    return padded


def _take(node: Node, table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table. An index counts from 0: indexing would take a negative one from the end."""
    return table.index_select(0, index.reshape(-1)).reshape(node.shape)


def _put_add(node: Node, values: Tensor, index: Tensor) -> Tensor:
    shape = node.shape
    table = values.new_zeros(shape)
    return table.index_add(0, index.reshape(-1), values.reshape(index.numel(), *shape[1:]))


def _convolved(node: Node, g: Tensor, x: Tensor, w: Tensor, mask: list[bool]) -> Any:
    zeros = [0] * len(node["stride"])
    return torch.ops.aten.convolution_backward(
        g, x, w, None, node["stride"], node["padding"], node["dilation"], False, zeros, node["groups"], mask
    )


def _conv(node: Node, x: Tensor, w: Tensor) -> Tensor:
    zeros = [0] * len(node["stride"])
    settings = (node["stride"], node["padding"], node["dilation"], False, zeros, node["groups"])
    return torch.ops.aten.convolution(x, w, None, *settings)  # type: ignore[no-any-return]


def _conv_input(node: Node, g: Tensor, w: Tensor) -> Tensor:
    like = g.new_empty(1).expand(node.shape)  # only its shape is read
    return _convolved(node, g, like, w, [True, False, False])[0]  # type: ignore[no-any-return]


def _conv_weight(node: Node, x: Tensor, g: Tensor) -> Tensor:
    like = g.new_empty(1).expand(node.shape)
    return _convolved(node, g, x, like, [False, True, False])[1]  # type: ignore[no-any-return]


def _windows(node: Node, x: Tensor) -> Tensor:
    lead = x.ndim - len(node["taps"])
    for place, (taps, stride) in enumerate(zip(node["taps"], node["stride"], strict=True)):
        x = x.unfold(lead + place, taps, stride)
    return x


def _unwindows(node: Node, g: Tensor) -> Tensor:
    total = g.new_zeros(node.shape)
    index = _windows(node, torch.arange(total.numel(), device=g.device).reshape(total.shape))
    return total.reshape(-1).index_add(0, index.reshape(-1), g.reshape(-1)).reshape(total.shape)


COMPARE: dict[str, Callable[..., Tensor]] = {"equal": torch.eq, "less": torch.lt, "less_equal": torch.le}
_TORCH: dict[str, Callable[..., Any]] = {
    "compare": lambda node, x, y: COMPARE[node["kind"]](x, y),
    "cast": lambda node, x: x.to(dtype_of(node.dtype)),
    "sum": lambda node, x: torch.sum(x, node["dims"]).to(x.dtype),
    "amax": lambda node, x: torch.amax(x, node["dims"]),
    "argmax": lambda node, x: torch.argmax(x, node["dim"]),
    "reshape": lambda node, x: x.reshape(node.shape),
    "transpose": lambda node, x: x.permute(node["order"]),
    "broadcast": _broadcast,
    "concat": lambda node, *xs: torch.cat(xs, node["dim"]),
    "slice": lambda node, x: x[ranges(node)],
    "pad": _pad,
    "reverse": lambda node, x: torch.flip(x, node["dims"]),
    "own_copy": lambda node, x: x,
    "take": _take,
    "put_add": _put_add,
    "conv": _conv,
    "conv_input": _conv_input,
    "conv_weight": _conv_weight,
    "windows": _windows,
    "unwindows": _unwindows,
    "opaque": lambda node, *xs: run_opaque(node, xs),
    "lay": lambda node, x: laid(x, node["strides"]),
    "item": lambda node, values: values[node["index"]],
    "region": lambda node, *xs: run_torch(node["body"], *xs),
}
