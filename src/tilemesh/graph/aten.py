"""Which aten operators become primitives, and how: views and products here, elements in `aten_elements.py`.

`LOWERED` and `SEVERAL` map an operator to the function that writes it as nodes; what they do not have, or refuse, stays
opaque. `decompositions` says what torch itself shall write in other operators first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilemesh.graph import aten_elements as elements
from tilemesh.graph import build
from tilemesh.graph.aten_elements import truth
from tilemesh.graph.ir import Node, make
from tilemesh.graph.ops import FLOATS, Shape, primitive

aten = torch.ops.aten


def _split(typed: Sequence[tuple[Shape, str]], x: Node, sizes: Any, dim: int = 0) -> tuple[Node, ...]:
    dim %= len(x.shape)
    parts, start = [], 0
    for shape, _ in typed:
        parts.append(build.part(x, dim, start, start + shape[dim]))
        start += shape[dim]
    return tuple(parts)


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
    if shape != (0,):  # a cache begins as a tensor of no elements and one dim, which torch leaves out
        values = [value for value in values if value.shape != (0,)]
    if any(value.dtype != dtype or len(value.shape) != len(shape) for value in values):
        return None
    return build.concat(values, dim)


def _slice(shape: Shape, dtype: str, x: Node, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Node:
    size = x.shape[dim]
    begin, end, by = slice(start, stop, step).indices(size)
    return build.part(x, dim, begin, max(begin, end), by)


def _slice_back(shape: Shape, dtype: str, g: Node, sizes: Any, dim: int, start: int, stop: int, step: int) -> Any:
    """The gradient of the first or the last columns, beside zeros (`rotations.py`); others are torch's own."""
    last, begin, width = len(shape) - 1, range(shape[dim])[slice(start, stop, step)].start, g.shape[-1]
    high = shape[-1] - begin - width
    if dim % len(shape) != last or step != 1 or width == 0 or (begin and high):
        return None
    return build.pad(g, [0] * last + [begin], [0] * last + [high])


def _select(shape: Shape, dtype: str, x: Node, dim: int, index: int) -> Node:
    size = x.shape[dim]
    return build.reshape(build.part(x, dim, index % size, index % size + 1), shape)


def _dot(shape: Shape, dtype: str, x: Node, y: Node) -> Node | None:
    return make("dot", x, y) if x.dtype == y.dtype == dtype else None


def _addmm(shape: Shape, dtype: str, bias: Node, x: Node, w: Node, beta: float = 1, alpha: float = 1) -> Node | None:
    if (beta, alpha) != (1, 1) or {bias.dtype, x.dtype, w.dtype} != {dtype}:
        return None
    return build.add(make("dot", x, w), build.expand(bias, shape))


def _embedding(shape: Shape, dtype: str, table: Node, index: Node, *rest: Any) -> Node | None:
    return make("take", table, build.cast(index, "int64"))


def _convolution(
    shape: Shape, dtype: str, x: Node, w: Node, bias: Node | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, extra: Sequence[int], groups: int,
) -> Node | None:  # fmt: skip
    space = len(x.shape) - 2
    if any(extra) or not 1 <= space <= 3 or {x.dtype, w.dtype} != {dtype}:
        return None
    settings = _windows(space, stride, padding, dilation, groups)
    made = make("conv_input", x, w, size=shape, **settings) if transposed else make("conv", x, w, **settings)
    if bias is None:
        return made
    return build.add(made, make("broadcast", bias, shape=shape, dims=(1,)))


def _windows(space: int, stride: Any, padding: Any, dilation: Any, groups: int) -> dict[str, Any]:
    settings = {"stride": stride, "padding": padding, "dilation": dilation}
    return {name: tuple(_spread(value, space)) for name, value in settings.items()} | {"groups": groups}


def _convolution_gradients(
    typed: Sequence[Any], g: Node, x: Node, w: Node, sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, extra: Sequence[int], groups: int, wanted: Sequence[bool],
) -> tuple[Node | None, ...] | None:  # fmt: skip
    """Of the input, the weight and the bias, those that are wanted."""
    space = len(x.shape) - 2
    if any(extra) or not 1 <= space <= 3:
        return None
    settings = _windows(space, stride, padding, dilation, groups)
    if transposed:  # forward it is the gradient of a convolution
        ends = (make("conv", g, w, **settings), make("conv_weight", g, x, size=w.shape, **settings))
    else:
        ends = (
            make("conv_input", g, w, size=x.shape, **settings),
            make("conv_weight", x, g, size=w.shape, **settings),
        )
    bias = build.total(g, [dim for dim in range(len(g.shape)) if dim != 1])
    return tuple(node if has else None for node, has in zip((*ends, bias), wanted, strict=True))


def _embedding_gradient(
    shape: Shape, dtype: str, g: Node, index: Node, rows: int, padding: int, by_count: bool
) -> Node | None:
    if by_count:
        return None
    index = build.cast(index, "int64")
    if padding >= 0:
        skipped = build.reshape(build.compare("equal", index, padding), (*index.shape, 1))
        g = build.where(build.expand(skipped, g.shape), build.constant(0.0, g.shape, dtype), g)
    return make("put_add", g, index, size=rows)


def _every(is_all: bool) -> Callable[..., Node | None]:
    """Whether all along some dims are true, or any: by the largest of numbers."""

    def lowered(shape: Shape, dtype: str, x: Node, dims: Any = None, keep: bool = False) -> Node | None:
        rank = len(x.shape)
        if x.dtype != "bool" or not rank:
            return None
        over = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
        numbers = build.where(x, build.constant(float(not is_all), x.shape, "float32"), float(is_all))
        largest = make("amax", numbers, dims=tuple(sorted(dim % rank for dim in over)))
        return build.reshape(build.compare("equal", largest, float(not is_all)), shape)

    return lowered


def _spread(value: Sequence[int] | int, space: int) -> list[int]:
    """A setting for each dim in space; torch lets one number stand for all."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * (space if len(numbers) == 1 else 1)


def lower_max_pool(
    x: Node, taps: Sequence[int], stride: Sequence[int] = (), padding: Any = 0, dilation: Any = 1,
    whole: bool = False, *, space: int,
) -> Node | None:  # fmt: skip
    """Of each window the largest. Where several are, its gradient is shared, and torch's goes to the first."""
    sides = _spread(padding, space)
    if whole or set(_spread(dilation, space)) != {1} or x.dtype not in FLOATS:
        return None
    if any(sides):
        low = (*[0] * (len(x.shape) - space), *sides)
        inside = build.pad(truth(True, x.shape), low, low)
        x = build.where(inside, build.pad(x, low, low), float("-inf"))
    taps = _spread(taps, space)
    return build.max_pool(x, taps, _spread(stride, space) or taps)


def _average_pool(
    shape: Shape, dtype: str, x: Node, taps: Sequence[int], stride: Sequence[int] = (), padding: Any = 0,
    whole: bool = False, padding_counts: bool = True, divisor: int | None = None,
) -> Node | None:  # fmt: skip
    space = len(taps)
    sides = _spread(padding, space)
    if whole or divisor is not None or x.dtype not in FLOATS or (any(sides) and not padding_counts):
        return None
    low = (*[0] * (len(x.shape) - space), *sides)
    taps = _spread(taps, space)
    return build.average_pool(build.pad(x, low, low), taps, _spread(stride, space) or taps)


def _filled_with(value: int) -> Callable[..., Node | None]:
    return lambda shape, dtype, /, *given, **settings: elements.lower_filled(shape, dtype, value)


_BINARY = ("add", "subtract", "multiply", "divide")
_UNARY = ("negate", "absolute", "exp", "log", "sqrt", "sin", "cos", "tanh", "sigmoid", "erf")
LOWERED: Mapping[Any, Callable[..., Node | None]] = {
    **{
        getattr(getattr(aten, primitive(op).torch), overload): elements.lower_binary(op)
        for op in _BINARY
        for overload in ("Tensor", "Scalar")
    },
    aten.pow.Tensor_Scalar: elements.lower_power,
    aten.pow.Tensor_Tensor: elements.lower_power,
    aten.rsqrt.default: lambda shape, dtype, x: (
        elements.lower_power(shape, dtype, x, -0.5) if x.dtype == dtype else None
    ),
    aten.reciprocal.default: lambda shape, dtype, x: (
        elements.lower_power(shape, dtype, x, -1) if x.dtype == dtype else None
    ),
    aten.relu.default: lambda shape, dtype, x: build.relu(x) if dtype in FLOATS else None,
    aten.clamp.default: elements.lower_clamp,
    aten.clamp_min.default: elements.lower_clamp,
    aten.clamp_max.default: lambda shape, dtype, x, high: elements.lower_clamp(shape, dtype, x, None, high),
    aten.masked_fill.Scalar: elements.lower_masked,
    **dict.fromkeys(
        (aten.logical_not.default, aten.bitwise_not.default),
        elements.lower_logic(lambda x, y, shape: make("where", x, truth(False, shape), truth(True, shape))),
    ),
    **dict.fromkeys(
        (aten.logical_and.default, aten.bitwise_and.Tensor),
        elements.lower_logic(lambda x, y, shape: make("where", x, y, truth(False, shape))),
    ),
    **dict.fromkeys(
        (aten.logical_or.default, aten.bitwise_or.Tensor),
        elements.lower_logic(lambda x, y, shape: make("where", x, truth(True, shape), y)),
    ),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), elements.lower_unequal),
    **dict.fromkeys(
        (aten.full.default, aten.scalar_tensor.default, aten.full_like.default, aten.new_full.default),
        elements.lower_filled,
    ),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _filled_with(0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _filled_with(1)),
    **dict.fromkeys((aten.clone.default, aten.lift_fresh_copy.default), elements.lower_same_value),
    aten.mean.dim: elements.lower_mean,
    aten.mean.default: elements.lower_mean,
    aten.nll_loss_backward.default: elements.lower_loss_backward,
    aten.maximum.default: elements.lower_binary("maximum"),
    aten.minimum.default: elements.lower_binary("minimum"),
    **{getattr(aten, primitive(op).torch).default: elements.lower_unary(op) for op in _UNARY},
    **{
        getattr(getattr(aten, name), overload): elements.lower_comparison(kind, swapped)
        for name, kind, swapped in (
            ("eq", "equal", False),
            ("lt", "less", False),
            ("gt", "less", True),
            ("le", "less_equal", False),
            ("ge", "less_equal", True),
        )
        for overload in ("Tensor", "Scalar")
    },
    aten.where.self: elements.lower_where,
    aten.slice_backward.default: _slice_back,
    aten._to_copy.default: elements.lower_cast,
    torch.ops.prims.convert_element_type.default: lambda shape, dtype, x, to: elements.lower_cast(shape, dtype, x),
    aten.sum.dim_IntList: elements.lower_reduction("sum"),
    aten.sum.default: elements.lower_reduction("sum"),
    aten.amax.default: elements.lower_reduction("amax"),
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
# Where a program is only looked at, frozen or placed; a compiled one calls torch's convolution with its bias, and its
# pooling.
CONVOLUTION_GRADIENTS = {aten.convolution_backward.default: _convolution_gradients}
CONVOLUTIONS: Mapping[Any, Callable[..., Node | None]] = {
    aten.embedding_dense_backward.default: _embedding_gradient,
    **dict.fromkeys((aten.all.dim, aten.all.default, aten.all.dims), _every(True)),
    **dict.fromkeys((aten.any.dim, aten.any.default, aten.any.dims), _every(False)),
    aten.convolution.default: _convolution,
    **dict.fromkeys((aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default), _average_pool),
}
MAX_POOLS: Mapping[Any, int] = {aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3}
SEVERAL: Mapping[Any, Callable[..., tuple[Node, ...] | None]] = {
    aten.var_mean.correction: elements.lower_variance,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.nll_loss_forward.default: elements.lower_loss,
}
# One good kernel of torch's each, and several primitives: worth their own nodes only where kernels are generated.
FOR_KERNELS = (
    aten.rsqrt.default, aten.reciprocal.default, aten.mean.dim, aten.mean.default, aten.relu.default,
    aten.var_mean.correction, aten.nll_loss_forward.default, aten.nll_loss_backward.default,
)  # fmt: skip
# Operators that torch writes in terms of those above: they become part of generated kernels. Never all that torch could
# decompose: its attention on a CPU would then have a backward pass that does not fit its forward pass, and its
# derivatives of ELU and hardswish are numbers where the input is NaN.
DECOMPOSED = (
    aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.tanh_backward, aten.sigmoid_backward,
    aten.threshold_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.elu, aten.softplus,
    aten.softplus_backward, aten.hardtanh, aten.hardswish, aten.mse_loss,
    aten.mse_loss_backward, aten.smooth_l1_loss, aten.native_layer_norm, aten.native_layer_norm_backward,
    aten._softmax, aten._softmax_backward_data, aten._safe_softmax, aten._log_softmax,
    aten._log_softmax_backward_data, aten.addcmul, aten.addcdiv, aten.rsub, aten.lerp, aten.glu, aten.glu_backward,
    aten.native_dropout_backward, aten._fused_rms_norm, aten._fused_rms_norm_backward, aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
)  # fmt: skip


NORMS = (aten._native_batch_norm_legit_no_training, aten._native_batch_norm_legit)
PASSES = (
    *NORMS, aten._native_batch_norm_legit_functional, aten.native_batch_norm, aten.native_batch_norm_backward,
    aten.native_group_norm, aten.native_group_norm_backward, aten.unfold_backward, aten.select_backward,
    aten.slice_backward, aten.split_with_sizes, aten.binary_cross_entropy_with_logits, aten.huber_loss,
    aten.huber_loss_backward, aten.smooth_l1_loss_backward, aten.hardtanh_backward, aten.mish,
    aten.mish_backward, aten.logsumexp, aten.dot, aten.mv, aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu,
    aten.native_dropout, aten.var, aten.std, aten.new_empty, aten.empty_like, aten.unbind, aten.stack,
)  # fmt: skip


def decompositions(norms: bool = False, passes: bool = False) -> dict[Any, Callable[..., Any]]:
    """What torch shall write in other operators, where generated kernels compute them.

    norms: batch norms too, to become part of convolutions. passes: all that can be cut, in both passes.
    """
    from torch._decomp import get_decompositions

    return get_decompositions((*DECOMPOSED, *(PASSES if passes else NORMS if norms else ())))
