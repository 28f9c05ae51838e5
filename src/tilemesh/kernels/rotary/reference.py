"""Rotary position embedding in plain torch (Su et al. 2021): each head's pairs are turned by the token's angles.

A pair is (i, i + E/2), as in Hugging Face's weights of Llama.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import accumulator, rounding_error, unit
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.rotary.cost import FORM

MOST_DIMS = 4


def check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if not 1 <= x.dim() <= MOST_DIMS or x.shape[-1] % 2:
        raise UsageError(
            f"x has shape {tuple(x.shape)}: expected (B, T, H, E) or (B, H, T, E), or fewer dimensions, with an even E"
        )
    wanted = (*x.shape[:-1], x.shape[-1] // 2)
    fits = cos.shape == sin.shape and cos.dim() <= x.dim()
    pairs = zip(reversed(cos.shape), reversed(wanted), strict=False)
    if (
        not fits
        or not cos.dim()
        or cos.shape[-1] != wanted[-1]
        or any(size != 1 and size != want for size, want in pairs)
    ):
        raise UsageError(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}: expected one shape that broadcasts to "
            f"{wanted}, such as (T, E/2) for x (B, H, T, E) and (T, 1, E/2) or (B, T, 1, E/2) for x (B, T, H, E)"
        )
    if cos.dtype != sin.dtype or not cos.is_floating_point():
        raise UsageError(f"cos is {cos.dtype} and sin {sin.dtype}: expected one floating point dtype; cast with .to()")


def served(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """The kernels give x a gradient, the tables none."""
    return not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))


@operator(kernel="tilemesh.kernels.rotary.kernel", check=check, own_dtype=("cos", "sin"), served=served)
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) becomes (a cos - b sin, b cos + a sin), for the halves a and b of x's last dimension, in one pass.

    x: (B, T, H, E) or (B, H, T, E), any strides. cos, sin: what broadcasts to x's first dimensions and E/2, as
    (T, E/2) for heads before tokens and (B, T, 1, E/2) for tokens before heads; of x's dtype or another. Kernels
    compute in float32 (float64 for float64); where a table needs a gradient, torch computes.
    """
    kind = accumulator(x.dtype)
    return _turned(x.to(kind), cos.to(kind), sin.to(kind)).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def exact(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The float64 result, for errors to be measured against."""
    return _turned(x.double(), cos.double(), sin.double())


def error_bound(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """How far each element of a correct result may be from `exact`.

    Each of the two products has a rounding of its own and one of its table's value, and the sum has one.
    """
    a, b = x.double().abs().chunk(2, dim=-1)
    c, s = cos.double().abs(), sin.double().abs()
    magnitude = torch.cat((a * c + b * s, b * c + a * s), dim=-1)
    return 1.01 * (3 * unit(accumulator(x.dtype)) * magnitude + rounding_error(exact(x, cos, sin), x.dtype))


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests: heads before tokens, as a product of (B, T, H E) leaves them.

    The tables are float32, as a model's. An odd width is taken one less.
    """
    batch, tokens, heads, width = problem.sizes
    half = max(1, width // 2)
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    x = torch.randn(batch, tokens, heads, 2 * half, generator=generator, device=device).to(dtype).transpose(1, 2)
    angle = torch.rand(tokens, half, generator=generator, device=device) * 6.283
    return x, angle.cos(), angle.sin()


def _plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(x, cos, sin).to(x.dtype)


BENCH = FunctionBench(rotary, FORM, arguments, exact=exact, bound=error_bound, eager=_plain, constant=(1, 2))
