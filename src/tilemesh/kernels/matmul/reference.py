"""D = act(A @ B + C) in plain torch: the oracle of the tests, the path of a CPU and of float64, and error bounds.

Every function here is differentiable as often as torch allows, and none is fused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.kernels.accuracy import TF32_UNIT, accumulator, rounding_error, sum_error
from tilemesh.kernels.activations.reference import activate, activation_error


def fused_matmul(a: Tensor, b: Tensor, c: Tensor | None, activation: str) -> Tensor:
    """What a user writes today: three operators, three roundings."""
    product = a @ b
    return activate(product if c is None else product + c, activation)


def exact(a: Tensor, b: Tensor, c: Tensor | None, activation: str) -> Tensor:
    """The float64 result, for errors to be measured against."""
    return fused_matmul(a.double(), b.double(), None if c is None else c.double(), activation)


def error_bound(
    a: Tensor, b: Tensor, c: Tensor | None, activation: str, *, separate: bool = False, tf32: bool = False
) -> Tensor:
    """How far each element of a correct D may be from `exact`, from operation counts and magnitudes alone.

    separate: the product, the sum with C and D are each rounded to A's dtype, as by three operators. tf32: operands are
    rounded to tf32 first.
    """
    sums = accumulator(a.dtype)
    product = a.double().abs() @ b.double().abs()
    total = exact(a, b, c, "none").abs()
    added = torch.zeros((), dtype=torch.float64, device=a.device) if c is None else c.double().abs()
    error = sum_error(product + added, a.shape[-1] + 2, sums)
    if tf32:
        error = error + 2.01 * TF32_UNIT * product
    if separate:
        error = error + 2 * rounding_error(total + added, a.dtype)
    bound = activation_error(total, error, activation, sums) + rounding_error(exact(a, b, c, activation), a.dtype)
    return 1.01 * bound  # products of two errors
