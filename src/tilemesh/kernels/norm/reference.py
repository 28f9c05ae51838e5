"""RMSNorm and LayerNorm over the last dimension in plain torch, each also with the addition before it.

add_rms_norm(x, residual, weight) returns norm(x + residual) and the sum: a Transformer's residual stream is read and
written once instead of twice. The stream may be float32 beside a 16-bit x (autocast): the norm has x's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import CONFIDENCE, accumulator, rounding_error, unit
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.norm.cost import ADD_LAYER_NORM_FORM, ADD_RMS_NORM_FORM, LAYER_NORM_FORM, RMS_NORM_FORM
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem

KERNEL = "tilemesh.kernels.norm.kernel"


def _check(x: Tensor, eps: float, **vectors: Tensor | None) -> None:
    if x.dim() == 0:
        raise UsageError("x is a scalar: expected x (…, N)")
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise UsageError(
                f"{name} has shape {tuple(vector.shape)}: expected ({x.shape[-1]},) for x {tuple(x.shape)}"
            )
    if not eps >= 0:
        raise UsageError(f"eps is {eps}: expected 0 or more")


def _check_sum(x: Tensor, residual: Tensor) -> None:
    if x.shape != residual.shape:
        raise UsageError(f"x has shape {tuple(x.shape)} and residual {tuple(residual.shape)}: expected the same")
    if residual.dtype != torch.promote_types(x.dtype, residual.dtype):
        raise UsageError(
            f"x is {x.dtype} and residual {residual.dtype}: expected a residual that can hold x; cast with .to()"
        )


def check_rms(x: Tensor, weight: Tensor | None, eps: float) -> None:
    _check(x, eps, weight=weight)


def check_layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    _check(x, eps, weight=weight, bias=bias)


def check_add_rms(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> None:
    _check(x, eps, weight=weight)
    _check_sum(x, residual)


def check_add_layer(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    _check(x, eps, weight=weight, bias=bias)
    _check_sum(x, residual)


def inverse_root(x: Tensor, *_: object) -> Tensor:
    """Kept of each row: 1 / sqrt(mean of squares + eps)."""
    return x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype))


def inverse_root_of_sum(x: Tensor, residual: Tensor, *_: object) -> Tensor:
    return inverse_root(residual)


def from_sum(values: list[Any], kept: Sequence[Tensor]) -> list[Any]:
    """Arguments of an addition that has the same sum: zeros in the place of x, the sum in that of the residual."""
    x, _, *rest = values
    total = kept[0]
    zeros = torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=total.requires_grad)
    return [zeros.expand(total.shape), total, *rest]


@operator(kernel=f"{KERNEL}:RMS_NORM", check=check_rms, kept=(inverse_root,), own_dtype=("weight",))
def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) * weight over the last dimension.

    x: (…, N), any strides; weight: (N,), of x's dtype or another. Kernels compute in float32 (float64 for float64) and
    add up the weight's gradient in a fixed order.
    """
    return _normalized(x, weight, None, eps, centred=False, dtype=x.dtype)


@operator(
    kernel=f"{KERNEL}:LAYER_NORM",
    check=check_layer,
    kept=(inverse_root, inverse_root),
    own_dtype=("weight", "bias"),
)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension; as rms_norm otherwise."""
    return _normalized(x, weight, bias, eps, centred=True, dtype=x.dtype)


@operator(
    kernel=f"{KERNEL}:ADD_RMS_NORM",
    check=check_add_rms,
    kept=(inverse_root_of_sum,),
    keeps_results=(1,),
    own_dtype=("residual", "weight"),
    forgets=("x", "residual"),
    restored=from_sum,
    partial=True,
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual, weight) in x's dtype, and x + residual in the residual's, in one pass."""
    total = residual + x
    return _normalized(total, weight, None, eps, centred=False, dtype=x.dtype), total


@operator(
    kernel=f"{KERNEL}:ADD_LAYER_NORM",
    check=check_add_layer,
    kept=(inverse_root_of_sum, inverse_root_of_sum),
    keeps_results=(1,),
    own_dtype=("residual", "weight", "bias"),
    forgets=("x", "residual"),
    restored=from_sum,
    partial=True,
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """layer_norm(x + residual, weight, bias) in x's dtype, and x + residual in the residual's, in one pass."""
    total = residual + x
    return _normalized(total, weight, bias, eps, centred=True, dtype=x.dtype), total


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool, dtype: torch.dtype
) -> Tensor:
    wide = x.to(accumulator(x.dtype))
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    # Where squares overflow, this quotient and its gradient are 0; those of rsqrt and square would be 0 times infinity.
    wide = wide / ((wide * wide).mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        wide = wide * weight.to(wide.dtype)
    if bias is not None:
        wide = wide + bias.to(wide.dtype)
    return wide.to(dtype)


def exact(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float, centred: bool) -> Tensor:
    """The float64 result, for errors to be measured against."""
    return _normalized(x.double(), weight, bias, eps, centred=centred, dtype=torch.float64)


def error_bound(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float, centred: bool
) -> Tensor:
    """How far each element of a correct y may be from `exact`: sums of n terms, a root, three products, one rounding.

    Centring subtracts a mean whose error is that of a sum; it moves each element by up to that much, and it moves the
    mean of squares by the same share.
    """
    u, n = unit(accumulator(x.dtype)), x.shape[-1]
    wide = x.double()
    spread = CONFIDENCE * n**0.5 * u
    shift = torch.zeros_like(wide[..., :1])
    if centred:
        shift = wide.abs().mean(-1, keepdim=True) * (spread + 2 * u)
        wide = wide - wide.mean(-1, keepdim=True)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scale = 1.0 if weight is None else weight.double().abs()
    added = 0.0 if bias is None else bias.double().abs()
    relative = spread + 6 * u + shift * inverse  # of the inverse root: half of its argument's, which counts shift twice
    bound = ((wide.abs() + shift) * relative + shift + (wide.abs() + x.double().abs()) * 2 * u) * inverse * scale
    bound = bound + 2 * u * (wide.abs() * inverse * scale + added)
    return 1.01 * (bound + rounding_error(exact(x, weight, bias, eps=eps, centred=centred), x.dtype))


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests: x and the weight."""
    rows, columns = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    x = torch.randn(rows, columns, generator=generator, device=device).to(dtype)
    return x, torch.randn(columns, generator=generator, device=device).to(dtype)


def layer_arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a bias."""
    x, weight = arguments(problem, device, seed)
    return x, weight, weight.flip(0)


def sum_arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `arguments` with a residual."""
    x, weight = arguments(problem, device, seed)
    return x, x.flip(0), weight


def _plain_rms(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _plain_layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def _plain_add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _plain_rms(total, weight), total


def _plain_add_layer(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _plain_layer(total, weight), total


RMS_NORM_BENCH = FunctionBench(rms_norm, RMS_NORM_FORM, arguments, eager=_plain_rms)
LAYER_NORM_BENCH = FunctionBench(layer_norm, LAYER_NORM_FORM, layer_arguments, eager=_plain_layer)
ADD_RMS_NORM_BENCH = FunctionBench(add_rms_norm, ADD_RMS_NORM_FORM, sum_arguments, eager=_plain_add_rms)
ADD_LAYER_NORM_BENCH = FunctionBench(add_layer_norm, ADD_LAYER_NORM_FORM, sum_arguments, eager=_plain_add_layer)
