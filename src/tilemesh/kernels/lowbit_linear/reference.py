"""A product with weights of 4 or 8 bits under scales, in plain torch: dequantise, then multiply."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.accuracy import accumulator, rounding_error, sum_error, unit
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.lowbit.codes import decode, pack, quantize, unpack
from tilemesh.kernels.lowbit.formats import FORMATS, Scheme
from tilemesh.kernels.lowbit_linear.cost import CODE_BITS, FORM, group_of
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem

_LEAST_GROUP = 32  # inputs that a step of the kernel takes at least


def check(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str) -> None:
    if code not in CODE_BITS:
        raise unknown("code", code, CODE_BITS)
    wanted = (torch.uint8, 2) if code == "int4" else (torch.int8, 1)
    if x.dim() < 1 or codes.dim() != 2 or codes.dtype is not wanted[0] or codes.shape[1] * wanted[1] != x.shape[-1]:
        raise UsageError(
            f"x {tuple(x.shape)} and codes {tuple(codes.shape)} of {codes.dtype}: expected (..., K) and, for {code}, "
            f"(N, K{' / 2' if wanted[1] == 2 else ''}) of {wanted[0]}"
        )
    if scales.dim() != 2 or len(scales) not in (1, len(codes)) or x.shape[-1] % scales.shape[1]:
        raise UsageError(f"scales {tuple(scales.shape)}: expected (N or 1, G) where G divides K = {x.shape[-1]}")
    if zeros is not None and zeros.shape != scales.shape:
        raise UsageError(f"zeros {tuple(zeros.shape)}: expected the shape of the scales, {tuple(scales.shape)}")


def served(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str) -> bool:
    group = x.shape[-1] // scales.shape[1]
    return x.dtype is not torch.float64 and (scales.shape[1] == 1 or group % _LEAST_GROUP == 0)


@operator(
    kernel="tilemesh.kernels.lowbit_linear.kernel", check=check, served=served, own_dtype=("scales",), casts=False
)
def lowbit_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, *, code: str = "int4"
) -> Tensor:
    """x W^T for x (..., K), where W[n, k] = scales[n, g] (code[n, k] - zeros[n, g]) and g is the group of input k.

    codes: (N, K) int8, or for int4 (N, K / 2) bytes with two codes each, the first in the low half, plus 8. scales:
    (N or 1, G) float32. zeros: int8. `kernels/lowbit/codes.py` makes them.
    """
    return functional.linear(x, _decoded(codes, scales, zeros, code, x.dtype, x.shape[-1]))


def _decoded(codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str, dtype: torch.dtype, inputs: int) -> Tensor:
    return decode(unpack(codes, FORMATS[code], inputs), Scheme(code), scales, zeros, dtype)


def exact(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, code: str = "int4") -> Tensor:
    """The float64 result, for errors to be measured against."""
    return functional.linear(x.double(), _decoded(codes, scales, zeros, code, torch.float64, x.shape[-1]))


def error_bound(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, code: str = "int4") -> Tensor:
    """How far each element of a correct result may be from `exact`.

    A kernel may add up x times codes of up to 1,032 (their offset, and the leading one of a float16 that a code is put
    behind) and take the offset off afterwards; plain torch rounds the dequantised weight to the dtype.
    """
    weight = _decoded(codes, scales, zeros, code, torch.float64, x.shape[-1]).abs()
    most = scales.double().repeat_interleave(x.shape[-1] // scales.shape[1], 1).expand_as(weight)
    magnitude = x.double().abs()
    wide = accumulator(x.dtype)
    summed = sum_error(functional.linear(magnitude, 1032 * most), x.shape[-1] + 2, wide)
    return 1.01 * (
        summed
        + unit(x.dtype) * functional.linear(magnitude, weight)
        + rounding_error(exact(x, codes, scales, zeros, code), x.dtype)
    )


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    rows, outputs, inputs = problem.sizes
    generator, code = torch.Generator(device).manual_seed(seed), problem.options["code"]
    x = torch.randn(rows, inputs, generator=generator, device=device).to(getattr(torch, problem.dtype))
    weight = torch.randn(outputs, inputs, generator=generator, device=device)
    group = group_of(inputs)
    scheme = Scheme(code, "group", group) if group < inputs else Scheme(code)
    made = quantize(weight, scheme)
    return x, pack(made.codes, FORMATS[code]), made.scales


BENCH = FunctionBench(lowbit_linear, FORM, arguments, exact=exact, bound=error_bound, constant=(2,))
