"""silu(gate) * x and gelu(gate) * x in plain torch, and how exact they must be.

The gate of a Transformer's MLP. gate and x may be the halves of one product: `gate, x = both.chunk(2, -1)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.accuracy import accumulator, rounding_error, unit
from tilemesh.kernels.activations.reference import activate, activation_error
from tilemesh.kernels.gated.cost import GEGLU_FORM, SWIGLU_FORM
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem

KERNEL = "tilemesh.kernels.gated.kernel"
GELUS = {"tanh": "gelu_tanh", "none": "gelu"}
"""Activations by torch's word for how gelu is approximated."""


def check_swiglu(gate: Tensor, x: Tensor) -> None:
    if gate.shape != x.shape:
        raise UsageError(f"gate has shape {tuple(gate.shape)} and x {tuple(x.shape)}: expected the same")


def check_geglu(gate: Tensor, x: Tensor, approximate: str) -> None:
    check_swiglu(gate, x)
    if approximate not in GELUS:
        raise unknown("approximate", approximate, GELUS)


@operator(kernel=f"{KERNEL}:SWIGLU", check=check_swiglu)
def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) * x, elementwise and in one pass each way.

    gate and x: one shape, dtype and device, any strides. Kernels compute in float32 (float64 for float64).
    """
    return _gated(gate, x, "silu")


@operator(kernel=f"{KERNEL}:GEGLU", check=check_geglu)
def geglu(gate: Tensor, x: Tensor, *, approximate: str = "tanh") -> Tensor:
    """gelu(gate) * x, elementwise and in one pass each way; approximate: tanh, or none for the exact gelu."""
    return _gated(gate, x, GELUS[approximate])


def _gated(gate: Tensor, x: Tensor, activation: str) -> Tensor:
    wide = accumulator(x.dtype)
    return (activate(gate.to(wide), activation) * x.to(wide)).to(x.dtype)


def exact(gate: Tensor, x: Tensor, activation: str = "silu") -> Tensor:
    """The float64 result, for errors to be measured against."""
    return activate(gate.double(), activation) * x.double()


def error_bound(gate: Tensor, x: Tensor, activation: str = "silu") -> Tensor:
    """How far each element of a correct result may be from `exact`: the activation's error, a product, one rounding."""
    kind, wide = accumulator(x.dtype), gate.double()
    bound = activation_error(wide.abs(), torch.zeros_like(wide), activation, kind) * x.double().abs()
    whole = exact(gate, x, activation)
    return 1.01 * (bound + whole.abs() * unit(kind) + rounding_error(whole, x.dtype))


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    gate, x = (torch.randn(problem.sizes, generator=generator, device=device).to(dtype) for _ in range(2))
    return gate, x


def _plain_swiglu(gate: Tensor, x: Tensor) -> Tensor:
    return activate(gate, "silu") * x


def _plain_geglu(gate: Tensor, x: Tensor, approximate: str = "tanh") -> Tensor:
    return activate(gate, GELUS[approximate]) * x


SWIGLU_BENCH = FunctionBench(swiglu, SWIGLU_FORM, arguments, exact=exact, bound=error_bound, eager=_plain_swiglu)
GEGLU_BENCH = FunctionBench(geglu, GEGLU_FORM, arguments, eager=_plain_geglu)
