"""A few rows times a matrix in plain torch, and the norm that adds up what the products leave: a decoding batch.

The one idea: where a matrix has too few rows to fill a GPU, its products are cut along the sums, and the parts are left
to whoever reads them, who has to wait for them anyway. So no kernel runs in between.

M: rows; N: outputs; K: inputs; S: parts of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.accuracy import accumulator, rounding_error, sum_error, unit
from tilemesh.kernels.few_linear.cost import FORM, GATES, MOST_ROWS, PARTS_RMS_NORM_FORM, parts_of
from tilemesh.kernels.launch.gpu import launches_early
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem


def check(x: Tensor, weight: Tensor, gate: str) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not 1 <= x.shape[0] <= MOST_ROWS:
        raise UsageError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected (M, K) of at most {MOST_ROWS} rows, and "
            "(N, K)"
        )
    if gate not in GATES:
        raise unknown("gate", gate, GATES)
    if gate != "none" and weight.shape[0] % 2:
        raise UsageError(f"weight has {weight.shape[0]} rows: expected as many for the gate as for the values")


def check_norm(parts: Tensor, x: Tensor, scale: Tensor, eps: float) -> None:
    if x.dim() != 2 or parts.dim() != 3 or parts.shape[1:] != x.shape or scale.shape != x.shape[1:]:
        raise UsageError(
            f"parts {tuple(parts.shape)}, x {tuple(x.shape)} and scale {tuple(scale.shape)}: expected (S, M, K), "
            "(M, K) and (K,)"
        )


def served(x: Tensor, weight: Tensor, gate: str) -> bool:
    """16 bits, sizes that the tiles divide, and a GPU that copies tiles by itself."""
    fits = x.dtype in (torch.bfloat16, torch.float16) and parts_of(*_sizes(weight, gate), gate) > 0
    return fits and (x.device.type == "cpu" or launches_early(x.device))


def norm_served(parts: Tensor, *_: object) -> bool:
    return parts.dtype is not torch.float64 or parts.device.type == "cpu"


@operator(kernel="tilemesh.kernels.few_linear.kernel", check=check, served=served)
def few_linear(x: Tensor, weight: Tensor, *, gate: str = "none") -> Tensor:
    """x W^T of a few rows (M, K), in parts that remain to be added up: (S, M, N); `parts_of` says how many.

    A single part is in x's dtype, several are float32. With a gate silu(x G^T) * (x V^T), the weight being G above V:
    (1, M, N/2). Kernels add up in float32.
    """
    if gate != "none":
        gates, values = functional.linear(x, weight).to(accumulator(x.dtype)).chunk(2, -1)
        return (functional.silu(gates) * values).to(x.dtype)[None]
    parts = max(1, parts_of(*weight.shape))
    if parts == 1:
        return functional.linear(x, weight)[None]
    return _cut(x.to(accumulator(x.dtype)), weight.to(accumulator(x.dtype)), parts)


@operator(
    kernel="tilemesh.kernels.few_linear.kernel:PARTS_NORM", check=check_norm, served=norm_served, own_dtype=("parts",)
)
def parts_rms_norm(parts: Tensor, x: Tensor, scale: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + the sum of the parts (S, M, K), times scale (K,); and that sum in x's dtype."""
    total = (x.to(accumulator(x.dtype)) + parts.to(accumulator(x.dtype)).sum(0)).to(x.dtype)
    return functional.rms_norm(total, x.shape[1:], scale, eps), total


def _cut(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """The products of as many parts of the inputs: (S, M, N)."""
    x_SMK, weight_SNK = (matrix.unflatten(1, (parts, -1)).transpose(0, 1) for matrix in (x, weight))
    return x_SMK @ weight_SNK.transpose(1, 2)


def _sizes(weight: Tensor, gate: str) -> tuple[int, int]:
    return weight.shape[0] // (1 if gate == "none" else 2), weight.shape[1]


def exact(x: Tensor, weight: Tensor, gate: str = "none") -> Tensor:
    """The float64 result with its parts added up, for errors to be measured against."""
    y = functional.linear(x.double(), weight.double())
    if gate == "none":
        return y
    gates, values = y.chunk(2, -1)
    return functional.silu(gates) * values


def error_bound(x: Tensor, weight: Tensor, gate: str = "none") -> Tensor:
    """How far each element of a correct result, its parts added up, may be from `exact`."""
    y, magnitude = exact(x, weight), functional.linear(x.double().abs(), weight.double().abs())
    wide = accumulator(x.dtype)
    each = sum_error(magnitude, x.shape[1] + 1, wide)
    if gate == "none":
        return 1.01 * (each + rounding_error(y, x.dtype))
    (gates, values), (gate_error, value_error) = y.chunk(2, -1), each.chunk(2, -1)
    whole = functional.silu(gates) * values
    # silu's slope is at most 1.1, and it is computed with a few roundings.
    part = 1.1 * gate_error * values.abs() + functional.silu(gates).abs() * value_error
    return 1.01 * (part + 8 * unit(wide) * whole.abs() + rounding_error(whole, x.dtype))


def parts_exact(x: Tensor, weight: Tensor, gate: str = "none") -> Tensor:
    """Each part of `few_linear` in float64."""
    if gate != "none":
        return exact(x, weight, gate)[None]
    return _cut(x.double(), weight.double(), max(1, parts_of(*weight.shape)))


def parts_error_bound(x: Tensor, weight: Tensor, gate: str = "none") -> Tensor:
    """How far each element of each part may be from `parts_exact`."""
    if gate != "none":
        return error_bound(x, weight, gate)[None]
    parts, wide = max(1, parts_of(*weight.shape)), accumulator(x.dtype)
    magnitude = _cut(x.double().abs(), weight.double().abs(), parts)
    rounded = rounding_error(parts_exact(x, weight), x.dtype if parts == 1 else wide)
    return 1.01 * (sum_error(magnitude, x.shape[1] // parts + 1, wide) + rounded)


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    rows, outputs, inputs = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    high = outputs * (1 if problem.options["gate"] == "none" else 2)
    x = torch.randn(rows, inputs, generator=generator, device=device).to(dtype)
    return x, torch.randn(high, inputs, generator=generator, device=device).to(dtype)


def norm_arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random ones of a problem of `parts_rms_norm`; several parts are float32, as `few_linear` leaves them."""
    parts, rows, columns = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    cut = torch.randn(parts, rows, columns, generator=generator, device=device)
    x, scale = (
        torch.rand(shape, generator=generator, device=device).to(dtype) for shape in ((rows, columns), (columns,))
    )
    return cut.to(dtype if parts == 1 else accumulator(dtype)), x, scale


BENCH = FunctionBench(few_linear, FORM, arguments, exact=parts_exact, bound=parts_error_bound)
PARTS_RMS_NORM_BENCH = FunctionBench(parts_rms_norm, PARTS_RMS_NORM_FORM, norm_arguments)
