"""y = act(x * scale + shift) in plain torch: what is computed, on which shapes, and how exactly.

The smallest operator: no tuner, one kernel each way. A folded batch norm or a LayerScale with its activation is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.accuracy import accumulator, rounding_error, unit
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.activations.reference import activate, activation_error
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.scale_shift.cost import FORM


def check(x: Tensor, scale: Tensor, shift: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise unknown("activation", str(activation), ACTIVATIONS)
    if x.dim() == 0 or scale.shape != x.shape[-1:] or shift.shape != x.shape[-1:]:
        given = f"x {tuple(x.shape)}, scale {tuple(scale.shape)}, shift {tuple(shift.shape)}"
        raise UsageError(f"shapes do not fit: {given}; expected x (…, N), scale (N,) and shift (N,)")


@operator(kernel="tilemesh.kernels.scale_shift.kernel", check=check)
def scale_shift(x: Tensor, scale: Tensor, shift: Tensor, *, activation: str = "none") -> Tensor:
    """y = act(x * scale + shift), elementwise and in one pass.

    x: (…, N); scale and shift: (N,); all of one dtype and device, any strides. activation: none, relu, gelu (exact),
    gelu_tanh, silu or squared_relu. Kernels compute in float32 (float64 for float64).
    """
    return activate(x * scale + shift, activation)


def exact(x: Tensor, scale: Tensor, shift: Tensor, activation: str = "none") -> Tensor:
    """The float64 result, for errors to be measured against."""
    return activate(x.double() * scale.double() + shift.double(), activation)


def error_bound(x: Tensor, scale: Tensor, shift: Tensor, activation: str = "none") -> Tensor:
    """How far each element of a correct y may be from `exact`: two roundings of the sum, the activation, one of y."""
    product = (x.double() * scale.double()).abs()
    total = (x.double() * scale.double() + shift.double()).abs()
    error = 2 * (product + shift.double().abs()) * unit(accumulator(x.dtype))
    bound = activation_error(total, error, activation, accumulator(x.dtype))
    return 1.01 * (bound + rounding_error(exact(x, scale, shift, activation), x.dtype))


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    rows, columns = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    shapes = ((rows, columns), (columns,), (columns,))
    x, scale, shift = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    return x, scale, shift


BENCH = FunctionBench(scale_shift, FORM, arguments, exact=exact, bound=error_bound)
