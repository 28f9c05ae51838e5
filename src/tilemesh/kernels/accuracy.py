"""How far a correct result may be from the exact one: bounds from arithmetic, for the tuner's check and for tests.

One rounding in a precision with unit u (half its eps) changes a value by at most u of its size. A sum of n terms is
rounded n times; rounding errors are as good as independent, so the sum's error stays below
CONFIDENCE * sqrt(n) * u * (sum of the terms' sizes), except with a probability of 2 n exp(-CONFIDENCE**2 / 2) (Higham
and Mary, A new approach to probabilistic rounding error analysis, 2019). No bound here comes from what one machine
happened to compute.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CONFIDENCE = 8.0  # a correct sum of 1000 terms is over the bound with a probability below 3e-11
TF32_UNIT = 2.0**-11


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The precision in which kernels add up: float32, and float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def sum_error(magnitude: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """The error of adding `terms` terms in a dtype; `magnitude` is the sum of their absolute values."""
    return magnitude * (CONFIDENCE * math.sqrt(max(terms, 1)) * unit(dtype))


def norm_error(operations: int, dtype: torch.dtype) -> float:
    """The relative error of the norm of many values that went through so many operations, each of which rounds.

    Independent errors add up by their squares; over many values they average, so that no confidence is needed.
    """
    return math.sqrt(operations) * unit(dtype)


def rounding_error(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of storing values in a dtype, the smallest of which are spaced evenly."""
    return value.abs() * unit(dtype) + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def excess(result: Tensor, exact: Tensor, allowed: Tensor | float) -> str | None:
    """What is wrong with a result, by its worst element; None where every element is within its bound."""
    if result.numel() == 0:
        return None
    error = (result.double() - exact).abs()
    allowed = torch.as_tensor(allowed, dtype=torch.float64, device=error.device).expand(error.shape)
    over = ~(error <= allowed)  # a NaN is over
    if not bool(over.any()):
        return None
    worst = torch.where(over, torch.nan_to_num(error / allowed, nan=math.inf), -1.0).flatten().argmax()
    at = tuple(int(index) for index in torch.unravel_index(worst, error.shape))
    return (
        f"error {error.flatten()[worst].item():.3g} at {at}, allowed {allowed.flatten()[worst].item():.3g} "
        f"({int(over.sum())} of {error.numel()} elements)"
    )
