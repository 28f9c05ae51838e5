"""Products of 8-bit floats while training: weights stay what they are, and each product casts what it multiplies.

The one idea: scales are powers of two. A float's rounding does not depend on such a scale, so that layouts whose scales
differ round alike, but for numbers too small beside the largest to keep their places; and every cast has the same bits
on a CPU and on a GPU. Of a layer's three products, x W^T takes x and W as e4m3. With one scale per tensor g W and g^T x
take the gradient g as e5m2, which has fewer places and a wider range. With one scale per row, of tokens and of outputs,
all casts are e4m3, since every row finds its own range; W is cast anew for g W, by its columns, and g^T x stays in 16
bits: its rows would have scales over tokens, which differ with how a batch is cut.

M: tokens; N: outputs; K: inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.core.plan import Fp8Scales
from tilemesh.kernels.lowbit.codes import Agree
from tilemesh.model.config import ModelConfig
from tilemesh.model.kinds import projections, put_kinds
from tilemesh.model.linear import DenseMatrix, WeightHolder
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.weights import is_wide_for_fp8, layer_matrices

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_TOP = {VALUES: 8, GRADIENTS: 15}  # the largest number of either is 1.75 times two to this
_ABOVE_1_75 = 0x1FFFFF  # added to the bits of a float32 whose fraction is above that, carries into its exponent


class Cast(NamedTuple):
    """codes * scale is about the tensor. scale: (1, 1), (M, 1) or (1, M) of float32."""

    codes: Tensor
    scale: Tensor

    @property
    def T(self) -> Cast:
        return Cast(self.codes.t(), self.scale.t())


def cast(x: Tensor, dtype: torch.dtype, dim: int | None, agree: Agree | None = None) -> Cast:
    """A matrix as 8-bit floats under scales over `dim`, or under one for all of it. `agree`: the largest over ranks."""
    size = x.detach().abs()
    most = (size.amax() if dim is None else size.amax(dim, keepdim=True)).float()
    most = most.reshape(1, 1) if dim is None else most
    if agree is not None:
        most = agree(most)
    power = ((most.view(torch.int32) + _ABOVE_1_75) >> 23) - (127 + _TOP[dtype])  # of the scale
    power = power.clamp(-126, 126)
    scale, inverse = (((127 + sign * power) << 23).view(torch.float32) for sign in (1, -1))
    wide = x if x.dtype == torch.float64 else x.float()
    return Cast((wide * inverse).to(dtype), scale)


def multiply(left: Cast, right: Cast, dtype: torch.dtype, is_fast: bool) -> Tensor:
    """left (a, b) times right (b, c). is_fast: tensor cores may add up with fewer places."""
    on_tensor_cores = left.codes.is_cuda and dtype == torch.bfloat16
    if on_tensor_cores and all(size % 16 == 0 for size in (*left.codes.shape, right.codes.shape[1])):
        a, b = left.codes.contiguous(), right.codes.t().contiguous().t()
        rows = left.scale.numel() > 1 or right.scale.numel() > 1
        scales = (
            (left.scale.expand(len(a), 1).contiguous(), right.scale.expand(1, b.shape[1]).contiguous())
            if rows
            else (left.scale.reshape(()), right.scale.reshape(()))
        )
        return torch._scaled_mm(a, b, *scales, out_dtype=dtype, use_fast_accum=is_fast)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y = left.codes.to(wide) @ right.codes.to(wide)
    return (y * left.scale.to(wide) * right.scale.to(wide)).to(dtype)


class _Agreements(NamedTuple):
    """With whom each scale is agreed on: None where a rank has all that it is over."""

    x: Agree | None = None
    weight: Agree | None = None
    weight_back: Agree | None = None
    gradient: Agree | None = None


class _Product(torch.autograd.Function):
    """x (M, K) times W (N, K) transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by: Fp8Scales, agree: _Agreements) -> Tensor:
        dim = None if by == "tensor" else 1
        left, right = cast(x, VALUES, dim, agree.x), cast(weight, VALUES, dim, agree.weight)
        ctx.by, ctx.agree = by, agree
        if by == "tensor":
            ctx.save_for_backward(*left, *right)
        else:
            ctx.save_for_backward(x, weight)
        return multiply(left, right.T, x.dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx = dweight = None
        if ctx.by == "tensor":
            x_codes, x_scale, codes, scale = ctx.saved_tensors
            g = cast(grad, GRADIENTS, None, ctx.agree.gradient)
            if needs_x:
                dx = multiply(g, Cast(codes, scale), grad.dtype, is_fast=False)
            if needs_weight:
                dweight = multiply(g.T, Cast(x_codes, x_scale), grad.dtype, is_fast=False)
            return dx, dweight, None, None
        x, weight = ctx.saved_tensors
        if needs_x:
            right = cast(weight, VALUES, 0, ctx.agree.weight_back)
            dx = multiply(cast(grad, VALUES, 1, ctx.agree.gradient), right, grad.dtype, is_fast=False)
        if needs_weight:
            dweight = grad.t() @ x
        return dx, dweight, None, None


@dataclass(frozen=True)
class EightBits(DenseMatrix):
    """A weight of the model's dtype that is multiplied in 8 bits, forward and back. `by`: what has a scale."""

    by: Fp8Scales = "tensor"

    def affine(self, layer: WeightHolder, x: Tensor, bias: Tensor | None) -> Tensor:
        function: Any = _Product
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = function.apply(rows, layer.weight, self.by, self._agreements(layer))
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias.to(y.dtype)

    def agrees(self, by: str) -> bool:
        return True

    def _agreements(self, layer: WeightHolder) -> _Agreements:
        agree = layer.place.agree
        if agree is None:
            return _Agreements()
        of_inputs, of_outputs = (agree, None) if layer.place.cuts_inputs else (None, agree)
        if self.by == "tensor":
            return _Agreements(of_inputs, agree, None, of_outputs)
        return _Agreements(of_inputs, of_inputs, of_outputs, of_outputs)


def in_8_bits(config: ModelConfig, by: Fp8Scales) -> list[str]:
    """Names of the matrices that are multiplied in 8 bits."""
    return [
        f"layers.{layer}.{weight.name}"
        for layer in range(config.layers)
        for weight in layer_matrices(config.of_layer(layer))
        if not weight.is_routed and is_wide_for_fp8(weight.outputs, weight.inputs, by)
    ]


def multiply_in_8_bits(model: Transformer, by: Fp8Scales) -> None:
    """Let the matrices of a model's layers that gain by it be multiplied in 8 bits."""
    dense = {name for name, layer in projections(model) if isinstance(layer.kind, DenseMatrix)}
    put_kinds(model, dict.fromkeys(dense.intersection(in_8_bits(model.config, by)), EightBits(by=by)))


def fp8_words(config: ModelConfig, by: Fp8Scales, device: torch.device) -> str:
    """What a run says of its products."""
    of = sum(len(layer_matrices(config.of_layer(layer))) for layer in range(config.layers))
    count = len(in_8_bits(config, by))
    words = f"fp8: products with {count} of the layers' {of} matrices take 8 bits"
    words += ", the others are too narrow to gain by it" if count < of else ""
    return words + ("; a CPU emulates them, slower than 16 bits" if device.type == "cpu" else "")


def require_fp8(device: torch.device) -> None:
    """Refuse a GPU without products of 8-bit floats. A CPU emulates them."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UsageError(
            f"plan.precision is fp8 and {torch.cuda.get_device_name(device)} has no products of 8-bit floats: use "
            "plan.precision=bf16-master"
        )
