"""Products of 8-bit floats while training: weights stay what they are, and each product casts what it multiplies.

The one idea: scales are powers of two. A float's rounding does not depend on such a scale, so that layouts whose scales
differ round alike, but for numbers too small beside the largest to keep their places; and every cast has the same bits
on a CPU and on a GPU. Of a layer's three products, x W^T takes x and W as e4m3. With one scale per tensor g W and g^T x
take the gradient g as e5m2, which has fewer places and a wider range. With one scale per row, of tokens and of outputs,
all casts are e4m3, since every row finds its own range; W is cast anew for g W, by its columns, and g^T x stays in 16
bits: its rows would have scales over tokens, which differ with how a batch is cut. With one scale per block, which is
128 columns of a token or 128 x 128 of W, both products share one cast of W.

M: tokens; N: outputs; K: inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.core.plan import Fp8Scales
from tilemesh.kernels.lowbit.codes import Agree
from tilemesh.model.config import ModelConfig
from tilemesh.model.kinds import projections, put_kinds
from tilemesh.model.linear import DenseMatrix, WeightHolder
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.weights import FP8_BLOCK as BLOCK
from tilemesh.model.work.weights import is_wide_for_fp8, layer_matrices

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_TOP = {VALUES: 8, GRADIENTS: 15}  # the largest number of either is 1.75 times two to this
_ABOVE_1_75 = 0x1FFFFF  # added to the bits of a float32 whose fraction is above that, carries into its exponent


class Cast(NamedTuple):
    """codes * scale is about the tensor. scale: (1, 1), (M, 1) or (1, M) of float32; or one number per block."""

    codes: Tensor
    scale: Tensor

    @property
    def T(self) -> Cast:
        return Cast(self.codes.t(), self.scale.t())


def cast(x: Tensor, dtype: torch.dtype, dim: int | None, agree: Agree | None = None) -> Cast:
    """A matrix as 8-bit floats under scales over `dim`, or under one for all of it. `agree`: the largest over ranks."""
    dims = (0, 1) if dim is None else dim
    size = x.detach().abs()
    # Experts may have no tokens: what there is nothing of is at most 0.
    most = size.amax(dims, keepdim=True).float() if size.numel() else size.sum(dims, keepdim=True).float()
    if agree is not None:
        most = agree(most)
    scale, inverse = _powers(most, dtype)
    wide = x if x.dtype == torch.float64 else x.float()
    return Cast((wide * inverse).to(dtype), scale)


def _powers(most: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scale for what is at most so large, a power of two, and one over it."""
    power = (((most.view(torch.int32) + _ABOVE_1_75) >> 23) - (127 + _TOP[dtype])).clamp(-126, 126)
    scale, inverse = (((127 + sign * power) << 23).view(torch.float32) for sign in (1, -1))
    return scale, inverse


def cast_blocks(x: Tensor, rows: int) -> Cast:
    """A matrix as 8-bit floats (e4m3) under scales over blocks of so many rows and `BLOCK` columns."""
    size = functional.pad(x.detach().abs(), (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % rows))
    most = size.view(size.shape[0] // rows, rows, size.shape[1] // BLOCK, BLOCK).amax((1, 3)).float()
    scale, inverse = _powers(most, VALUES)
    wide = x if x.dtype == torch.float64 else x.float()
    return Cast((wide * _spread(inverse, x.shape, rows)).to(VALUES), scale)


def _spread(scale: Tensor, shape: torch.Size, rows: int) -> Tensor:
    """The number of its block for every element."""
    each = scale[:, None, :, None].expand(-1, rows, -1, BLOCK)
    return each.reshape(rows * scale.shape[0], BLOCK * scale.shape[1])[: shape[0], : shape[1]]


def multiply_blocks(left: Cast, right: Cast, dtype: torch.dtype, turned: bool, narrow: bool) -> Tensor:
    """Rows in blocks of 1 x 128 times a matrix (N, K) in blocks of 128 x 128; turned: times its transpose (K, N).

    narrow: in 8 bits, where the shapes allow it. Else in the 16 of bfloat16, which have every code times its scale."""
    rows, weight = left.codes, right.codes if turned else right.codes.t()
    scale = right.scale if turned else right.scale.t()
    whole = all(size % BLOCK == 0 for size in weight.shape) and len(rows) and len(rows) % 4 == 0
    if narrow and dtype == torch.bfloat16 and whole:
        parts = (rows, weight, left.scale, scale)
        made: Tensor = _narrow_blocks(*(part.contiguous() for part in parts))
        return made
    wide = dtype if dtype == torch.float64 or (rows.is_cuda and dtype == torch.bfloat16) else torch.float32
    exact = right.codes.to(wide) * _spread(right.scale, right.codes.shape, BLOCK).to(wide)
    y = (rows.to(wide) * _spread(left.scale, rows.shape, 1).to(wide)) @ (exact.t() if turned else exact)
    return y.to(dtype)


def multiply(left: Cast, right: Cast, dtype: torch.dtype, is_fast: bool) -> Tensor:
    """left (a, b) times right (b, c). is_fast: tensor cores may add up with fewer places."""
    on_tensor_cores = left.codes.is_cuda and dtype == torch.bfloat16
    if on_tensor_cores and all(size and size % 16 == 0 for size in (*left.codes.shape, right.codes.shape[1])):
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


@torch.library.custom_op("tilemesh::narrow_blocks", mutates_args=())
def _narrow_blocks(rows: Tensor, weight: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """rows (M, K) times weight (N, K) transposed in bfloat16, as it is called under torch.compile too. cuBLASLt reads
    scales of rows column by column, and those of blocks in rows of whole fours."""
    across = functional.pad(across, (0, -across.shape[1] % 4))[:, : across.shape[1]]
    return torch._scaled_mm(rows, weight.t(), down.t().contiguous().t(), across.t(), out_dtype=torch.bfloat16)


@_narrow_blocks.register_fake
def _(rows: Tensor, weight: Tensor, down: Tensor, across: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]), dtype=torch.bfloat16)


@functools.cache
def multiplies_blocks(device: torch.device) -> bool:
    """Whether this GPU's library multiplies 8-bit floats in blocks, and rightly: tried once, on a small product."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(size, 256, generator=generator, device=device) for size in (64, 384))
    left, right = cast_blocks(x * torch.logspace(-3, 3, 256, device=device), 1), cast_blocks(weight, BLOCK)
    try:
        made = multiply_blocks(left, right, torch.bfloat16, turned=True, narrow=True)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    exact = multiply_blocks(left, right, torch.float64, turned=True, narrow=False)
    return bool((made.double() - exact).norm() <= 2.0**-7 * exact.norm())


class _Agreements(NamedTuple):
    """With whom each scale is agreed on: None where a rank has all that it is over."""

    x: Agree | None = None
    weight: Agree | None = None
    weight_back: Agree | None = None
    gradient: Agree | None = None


class _Product(torch.autograd.Function):
    """x (M, K) times W (N, K) transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by: Fp8Scales, agree: _Agreements, narrow: bool) -> Tensor:
        if by == "block":
            right = cast_blocks(weight, BLOCK)
            ctx.by, ctx.narrow = by, narrow
            ctx.save_for_backward(x, *right)
            return multiply_blocks(cast_blocks(x, 1), right, x.dtype, turned=True, narrow=narrow)
        dim = None if by == "tensor" else 1
        left, right = cast(x, VALUES, dim, agree.x), cast(weight, VALUES, dim, agree.weight)
        ctx.by, ctx.agree = by, agree
        if by == "tensor":
            ctx.save_for_backward(*left, *right)
        else:
            ctx.save_for_backward(x, weight)
        return multiply(left, right.T, x.dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx = dweight = None
        if ctx.by == "tensor":
            x_codes, x_scale, codes, scale = ctx.saved_tensors
            g = cast(grad, GRADIENTS, None, ctx.agree.gradient)
            if needs_x:
                dx = multiply(g, Cast(codes, scale), grad.dtype, is_fast=False)
            if needs_weight:
                dweight = multiply(g.T, Cast(x_codes, x_scale), grad.dtype, is_fast=False)
            return dx, dweight, None, None, None
        if ctx.by == "block":
            x, codes, scale = ctx.saved_tensors
            if needs_x:
                left, right = cast_blocks(grad, 1), Cast(codes, scale)
                dx = multiply_blocks(left, right, grad.dtype, turned=False, narrow=ctx.narrow)
            return dx, grad.t() @ x if needs_weight else None, None, None, None
        x, weight = ctx.saved_tensors
        if needs_x:
            right = cast(weight, VALUES, 0, ctx.agree.weight_back)
            dx = multiply(cast(grad, VALUES, 1, ctx.agree.gradient), right, grad.dtype, is_fast=False)
        if needs_weight:
            dweight = grad.t() @ x
        return dx, dweight, None, None, None


@dataclass(frozen=True)
class EightBits(DenseMatrix):
    """A weight of the model's dtype that is multiplied in 8 bits, forward and back. `by`: what has a scale; narrow:
    whether there is a product in blocks of 8 bits, and not only of what they stand for."""

    by: Fp8Scales = "tensor"
    narrow: bool = False

    def affine(self, layer: WeightHolder, x: Tensor, bias: Tensor | None) -> Tensor:
        function: Any = _Product
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = function.apply(rows, layer.weight, self.by, self._agreements(layer), self.narrow)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias.to(y.dtype)

    def agrees(self, by: str) -> bool:
        return self.by != "block"  # a block lies on one rank

    def why_not(self, by: str, width: int) -> str:
        if self.by != "block" or width % BLOCK == 0:
            return ""
        share = f"{width} {'inputs' if by == 'row' else 'outputs'}"
        return (
            f"plan.fp8_scales is block and a rank has {share}: blocks of {BLOCK} would lie on two ranks; set a smaller "
            "tp, or plan.fp8_scales=row"
        )

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


def multiply_in_8_bits(model: Transformer, by: Fp8Scales, device: torch.device) -> None:
    """Let the matrices of a model's layers that gain by it be multiplied in 8 bits on this device."""
    kind = EightBits(by=by, narrow=by == "block" and multiplies_blocks(device))
    dense = {name for name, layer in projections(model) if isinstance(layer.kind, DenseMatrix)}
    put_kinds(model, dict.fromkeys(dense.intersection(in_8_bits(model.config, by)), kind))


def fp8_words(config: ModelConfig, by: Fp8Scales, device: torch.device) -> str:
    """What a run says of its products."""
    of = sum(len(layer_matrices(config.of_layer(layer))) for layer in range(config.layers))
    count = len(in_8_bits(config, by))
    words = f"fp8: products with {count} of the layers' {of} matrices take 8 bits"
    words += ", the others are too narrow to gain by it" if count < of else ""
    if device.type == "cpu":
        return words + "; a CPU emulates them, slower than 16 bits"
    if by == "block" and not multiplies_blocks(device):
        return words + "; in blocks this GPU emulates them, slower than 16 bits: plan.fp8_scales=row is faster"
    return words


def require_fp8(device: torch.device) -> None:
    """Refuse a GPU without products of 8-bit floats. A CPU emulates them."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UsageError(
            f"plan.precision is fp8 and {torch.cuda.get_device_name(device)} has no products of 8-bit floats: use "
            "plan.precision=bf16-master"
        )
