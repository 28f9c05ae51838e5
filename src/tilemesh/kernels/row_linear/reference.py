"""One row times a matrix in plain torch, with a gate if there is one: what a model's products are when one sequence
decodes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.accuracy import accumulator, rounding_error, sum_error, unit
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.row_linear.cost import FORM, GATES


def check(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> None:
    if x.dim() != 2 or x.shape[0] != 1 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise UsageError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected (1, K) and (N, K)")
    if gate not in GATES:
        raise unknown("gate", gate, GATES)
    if gate != "none" and weight.shape[0] % 2:
        raise UsageError(f"weight has {weight.shape[0]} rows: expected as many for the gate as for the values")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"bias has shape {tuple(bias.shape)}: expected ({weight.shape[0]},)")


def served(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> bool:
    return x.dtype is not torch.float64 or x.device.type == "cpu"


@operator(kernel="tilemesh.kernels.row_linear.kernel", check=check, served=served)
def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gate: str = "none") -> Tensor:
    """x W^T + b of one row (1, K): (1, N). With a gate silu(x G^T) * (x V^T), the weight being G above V: (1, N/2).

    A library's product reads whole tiles of rows and has only one to compute. Kernels add up in float32.
    """
    y = functional.linear(x, weight, bias)
    if gate == "none":
        return y
    gates, values = y.to(accumulator(x.dtype)).chunk(2, -1)
    return (functional.silu(gates) * values).to(x.dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: str = "none") -> Tensor:
    """The float64 result, for errors to be measured against."""
    y = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if gate == "none":
        return y
    gates, values = y.chunk(2, -1)
    return functional.silu(gates) * values


def error_bound(x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: str = "none") -> Tensor:
    """How far each element of a correct result may be from `exact`: the sums' errors, a few roundings, the dtype's."""
    y = exact(x, weight, bias)
    magnitude = functional.linear(
        x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs()
    )
    wide = accumulator(x.dtype)
    each = sum_error(magnitude, x.shape[1] + 1, wide)
    whole = exact(x, weight, bias, gate)
    if gate == "none":
        return 1.01 * (each + rounding_error(whole, x.dtype))
    (gates, values), (gate_error, value_error) = y.chunk(2, -1), each.chunk(2, -1)
    # silu's slope is at most 1.1, and it is computed with a few roundings.
    part = 1.1 * gate_error * values.abs() + functional.silu(gates).abs() * value_error
    return 1.01 * (part + 8 * unit(wide) * whole.abs() + rounding_error(whole, x.dtype))


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    outputs, inputs = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    rows = outputs * (1 if problem.options["gate"] == "none" else 2)
    x = torch.randn(1, inputs, generator=generator, device=device).to(dtype)
    return x, torch.randn(rows, inputs, generator=generator, device=device).to(dtype)


BENCH = FunctionBench(row_linear, FORM, arguments, exact=exact, bound=error_bound)
