"""softmax(scale * x) over the last dimension, optionally causal, in plain torch; and how exact it must be."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import CONFIDENCE, accumulator, rounding_error, unit
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.softmax.cost import FORM


def check(x: Tensor, scale: float, causal: bool) -> None:
    least = 2 if causal else 1
    if x.dim() < least:
        wanted = "x (…, queries, keys)" if causal else "x (…, N)"
        raise UsageError(f"x has shape {tuple(x.shape)}: expected {wanted}")
    if causal and x.shape[-2] > x.shape[-1]:
        raise UsageError(
            f"causal softmax of {x.shape[-2]} queries over {x.shape[-1]} keys: expected at least as many keys, since "
            "the last query is aligned with the last key"
        )


@operator(kernel="tilemesh.kernels.softmax.kernel", check=check, keeps_results=True)
def softmax(x: Tensor, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    """softmax(scale * x) over the last dimension, in one pass where a row fits a multiprocessor.

    x: (…, N), any strides. causal: x is (…, queries, keys), and a query sees the keys up to its own position, where the
    last query stands at the last key; what it does not see is 0. Kernels compute in float32 (float64 for float64).
    """
    return torch.softmax(_masked(x * scale, causal), -1)


def exact(x: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """The float64 result, for errors to be measured against."""
    return torch.softmax(_masked(x.double() * scale, causal), -1)


def error_bound(x: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """How far each element of a correct result may be from `exact`.

    An exponent's relative error is the absolute error of its argument, scale * (x - largest), plus a few units of the
    exponential itself; a sum of positive terms adds CONFIDENCE * sqrt(n) units; the result is rounded once.
    """
    unit_here = unit(accumulator(x.dtype))
    scaled = _masked(x.double() * scale, causal)
    largest = scaled.amax(-1, keepdim=True)
    size = scaled.abs().nan_to_num(posinf=0.0) + largest.abs()
    relative = (4 * size + 8 + CONFIDENCE * x.shape[-1] ** 0.5) * unit_here
    whole = exact(x, scale, causal)
    # The weighted mean of the other elements' errors comes in through the sum.
    relative = relative + (whole * relative).sum(-1, keepdim=True)
    return 1.01 * (whole * relative + rounding_error(whole, x.dtype) + torch.finfo(accumulator(x.dtype)).tiny)


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(problem.sizes, generator=generator, device=device).to(getattr(torch, problem.dtype)),)


def _masked(x: Tensor, causal: bool) -> Tensor:
    if not causal:
        return x
    queries, keys = x.shape[-2:]
    unseen = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
    return x.masked_fill(unseen, float("-inf"))


BENCH = FunctionBench(
    softmax, FORM, arguments, exact=exact, bound=error_bound, eager=functools.partial(torch.softmax, dim=-1)
)
