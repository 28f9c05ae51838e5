"""A product of activations and weights that are both 8-bit codes, one scale per token and one per output, in plain
torch: the codes' product, then the scales.

M: tokens; N: outputs; K: inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.accuracy import rounding_error, sum_error
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.lowbit.codes import quantize
from tilemesh.kernels.lowbit.formats import Scheme
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.scaled_matmul.cost import CODES, FORM

_KINDS = {"int8": torch.int8, "fp8": torch.uint8}
_RESULTS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FLOAT8_UNIT = 2.0**-13
"""Of the sums of 8-bit floats in tensor cores, which keep fewer places than a float32 (DeepSeek-V3 report, 3.3.2:
about 14 bits) after each instruction of 32 inputs."""


def check(x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, code: str, dtype: str) -> None:
    if code not in CODES:
        raise unknown("code", code, CODES)
    if dtype not in _RESULTS:
        raise unknown("dtype", dtype, _RESULTS)
    kind = _KINDS[code]
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or {x.dtype, weight.dtype} != {kind}:
        raise UsageError(
            f"x {tuple(x.shape)} of {x.dtype} and weight {tuple(weight.shape)} of {weight.dtype}: expected (M, K) and "
            f"(N, K) of {kind} for {code}"
        )
    for name, given, count in (("x_scales", x_scales, len(x)), ("scales", scales, len(weight))):
        if given.dtype is not torch.float32 or tuple(given.shape) not in ((1, 1), (count, 1)):
            raise UsageError(
                f"{name} {tuple(given.shape)} of {given.dtype}: expected ({count}, 1) or (1, 1) of torch.float32"
            )


def served(x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, code: str, dtype: str) -> bool:
    """Rows that TMA can read: multiples of 16 bytes."""
    return x.shape[1] % 16 == 0 and (x.device.type == "cpu" or torch.cuda.get_device_capability(x.device)[0] >= 9)


@operator(kernel="tilemesh.kernels.scaled_matmul.kernel", check=check, served=served)
def scaled_matmul(
    x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, *, code: str = "int8", dtype: str = "bfloat16"
) -> Tensor:
    """x_scales (x W^T) scales: (M, N) of a floating-point dtype.

    x (M, K) and weight (N, K) are int8, or the bits of fp8 (e4m3) numbers as uint8; `lowbit.codes.quantize` makes them.
    x_scales: (M, 1), or (1, 1) for all tokens; scales: (N, 1) or (1, 1). Whole numbers are added up in 32 bits,
    floats in what the tensor cores have, and the scales multiply the sums before these are rounded to `dtype`.
    """
    wide = torch.float64 if x.device.type == "cpu" else torch.float32
    made = _values(x, code, wide) @ _values(weight, code, wide).mT
    return (made * x_scales.to(wide) * scales.to(wide).mT).to(_RESULTS[dtype])


def _values(codes: Tensor, code: str, dtype: torch.dtype) -> Tensor:
    return (codes.view(torch.float8_e4m3fn) if code == "fp8" else codes).to(dtype)


def by_library(
    x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, *, code: str = "int8", dtype: str = "bfloat16",
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What a user of plain torch calls on a GPU: `_scaled_mm`, into `out` if given, or `_int_mm` and the scales."""
    if code == "fp8":
        left, right = x.view(torch.float8_e4m3fn), weight.view(torch.float8_e4m3fn)
        given = {"scale_a": x_scales.expand(len(x), 1), "scale_b": scales.expand(len(weight), 1).mT}
        given = {name: value.contiguous() for name, value in given.items()}
        return torch._scaled_mm(left, right.mT, **given, out_dtype=_RESULTS[dtype], use_fast_accum=True, out=out)
    return (torch._int_mm(x, weight.mT) * x_scales * scales.mT).to(_RESULTS[dtype])


def exact(
    x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, code: str = "int8", dtype: str = "bfloat16"
) -> Tensor:
    """The float64 result, for errors to be measured against."""
    made = _values(x, code, torch.float64) @ _values(weight, code, torch.float64).mT
    return made * x_scales.double() * scales.double().mT


def error_bound(
    x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, code: str = "int8", dtype: str = "bfloat16"
) -> Tensor:
    """How far each element of a correct result may be from `exact`: whole numbers are added up without error."""
    y = exact(x, weight, x_scales, scales, code)
    bound = rounding_error(y, _RESULTS[dtype]) + 4 * 2.0**-24 * y.abs()
    if code == "fp8":
        sizes = _values(x, code, torch.float64).abs() @ _values(weight, code, torch.float64).abs().mT
        size = sizes * x_scales.double() * scales.double().mT
        bound += sum_error(size, x.shape[1], torch.float32) + FLOAT8_UNIT * math.sqrt(x.shape[1] / 32 + 1) * size
    return 1.01 * bound


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    rows, outputs, inputs = problem.sizes
    generator, scheme = torch.Generator(device).manual_seed(seed), Scheme(problem.options["code"])
    x, weight = (
        quantize(torch.randn(count, inputs, generator=generator, device=device), scheme) for count in (rows, outputs)
    )
    return x.codes, weight.codes, x.scales, weight.scales


class _Bench(FunctionBench):
    """Problems' dtype is that of the result."""

    def _options(self, problem: SizedProblem) -> dict[str, str]:
        return {"code": problem.options["code"], "dtype": problem.dtype}


BENCH = _Bench(scaled_matmul, FORM, arguments, exact=exact, bound=error_bound, eager=by_library, constant=(2, 3))
