"""One row times a matrix in plain torch, with a norm before it and a gate after it where asked for: what a model's
products are when one sequence decodes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.accuracy import accumulator, rounding_error, sum_error, unit
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.row_linear.cost import FORM, GATES, NORM_ROW_LINEAR_FORM


def check(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str, settled: bool) -> None:
    if x.dim() != 2 or x.shape[0] != 1 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise UsageError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected (1, K) and (N, K)")
    if gate not in GATES:
        raise unknown("gate", gate, GATES)
    if gate != "none" and weight.shape[0] % 2:
        raise UsageError(f"weight has {weight.shape[0]} rows: expected as many for the gate as for the values")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"bias has shape {tuple(bias.shape)}: expected ({weight.shape[0]},)")


def check_norm(x: Tensor, branch: Tensor, scale: Tensor, weight: Tensor, eps: float, gate: str, settled: bool) -> None:
    check(x, weight, None, gate, settled)
    if branch.shape != x.shape or scale.shape != x.shape[1:]:
        raise UsageError(
            f"x {tuple(x.shape)}, branch {tuple(branch.shape)} and scale {tuple(scale.shape)}: expected (1, K) twice "
            "and (K,)"
        )


def served(x: Tensor, *_: object) -> bool:
    return x.dtype is not torch.float64 or x.device.type == "cpu"


@operator(kernel="tilemesh.kernels.row_linear.kernel", check=check, served=served, casts=True)
def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gate: str = "none", settled: bool = False
) -> Tensor:
    """x W^T + b of one row (1, K): (1, N). With a gate silu(x G^T) * (x V^T), the weight being G above V: (1, N/2).

    A library's product reads whole tiles of rows and has only one to compute. Kernels add up in float32. settled: the
    weight is not a result of the kernel launched just before, and may be read before that one has ended.
    """
    return gated(functional.linear(x, weight, bias), gate)


@operator(kernel="tilemesh.kernels.row_linear.kernel:NORMED", check=check_norm, served=served)
def norm_row_linear(
    x: Tensor,
    branch: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    gate: str = "none",
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`row_linear` of the RMSNorm of x + branch, times scale (K,); and x + branch. The norm is not rounded between."""
    total = x + branch
    return gated(functional.linear(functional.rms_norm(total, x.shape[1:], scale, eps), weight), gate), total


def gated(y: Tensor, gate: str) -> Tensor:
    """Of gates and values side by side: the values after the gate."""
    if gate == "none":
        return y
    gates, values = y.to(accumulator(y.dtype)).chunk(2, -1)
    return (functional.silu(gates) * values).to(y.dtype)


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
    return bound_after_gate(y, sum_error(magnitude, x.shape[1] + 1, accumulator(x.dtype)), x.dtype, gate)


def bound_after_gate(y: Tensor, each: Tensor, dtype: torch.dtype, gate: str) -> Tensor:
    """Of results y before the gate, each with its error; the last rounding is to `dtype`."""
    if gate == "none":
        return 1.01 * (each + rounding_error(y, dtype))
    (gates, values), (gate_error, value_error) = y.chunk(2, -1), each.chunk(2, -1)
    whole = functional.silu(gates) * values
    # silu's slope is at most 1.1, and it is computed with a few roundings.
    part = 1.1 * gate_error * values.abs() + functional.silu(gates).abs() * value_error
    return 1.01 * (part + 8 * unit(accumulator(dtype)) * whole.abs() + rounding_error(whole, dtype))


def norm_exact(
    x: Tensor, branch: Tensor, scale: Tensor, weight: Tensor, eps: float = 1e-6, gate: str = "none"
) -> Tensor:
    """`norm_row_linear`'s first result in float64, from x + branch as it is stored."""
    row = functional.rms_norm((x + branch).double(), x.shape[1:], scale.double(), eps)
    return exact(row, weight, None, gate)


def norm_error_bound(
    x: Tensor, branch: Tensor, scale: Tensor, weight: Tensor, eps: float = 1e-6, gate: str = "none"
) -> Tensor:
    """As `error_bound`, of a row that was normalized before: its own relative error is a few roundings more."""
    row = functional.rms_norm((x + branch).double(), x.shape[1:], scale.double(), eps)
    wide = accumulator(x.dtype)
    more = (x.shape[1] ** 0.5 + 8) * unit(wide)
    y, magnitude = exact(row, weight), functional.linear(row.abs(), weight.double().abs())
    return bound_after_gate(y, sum_error(magnitude, x.shape[1], wide) + more * magnitude, x.dtype, gate)


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    outputs, inputs = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    rows = outputs * (1 if problem.options["gate"] == "none" else 2)
    x = torch.randn(1, inputs, generator=generator, device=device).to(dtype)
    return x, torch.randn(rows, inputs, generator=generator, device=device).to(dtype)


BENCH = FunctionBench(row_linear, FORM, arguments, exact=exact, bound=error_bound)


def norm_arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """As `arguments`, with a branch to add and a norm's scale."""
    x, weight = arguments(problem, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    branch, scale = (
        torch.rand(shape, generator=generator, device=device).to(x.dtype) for shape in (x.shape, x.shape[1])
    )
    return x, branch, scale, weight


NORM_ROW_LINEAR_BENCH = FunctionBench(
    norm_row_linear, NORM_ROW_LINEAR_FORM, norm_arguments, exact=norm_exact, bound=norm_error_bound
)
