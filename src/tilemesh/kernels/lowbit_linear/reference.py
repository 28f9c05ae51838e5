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
from tilemesh.kernels.lowbit_linear.cost import CODE_BITS, FORM, NORM_LOWBIT_LINEAR_FORM, group_of
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.row_linear.cost import GATES
from tilemesh.kernels.row_linear.reference import bound_after_gate, gated

_LEAST_GROUP = 32  # inputs that a step of the kernel takes at least


def check(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str, gate: str = "none", settled: bool = False
) -> None:
    if gate not in GATES:
        raise unknown("gate", gate, GATES)
    if gate != "none" and codes.dim() == 2 and len(codes) % 2:
        raise UsageError(f"codes have {len(codes)} rows: expected as many for the gate as for the values")
    if code not in CODE_BITS:
        raise unknown("code", code, CODE_BITS)
    wanted = (torch.uint8, 2) if code == "int4" else (torch.int8, 1)
    if x.dim() < 1 or codes.dim() != 2 or codes.dtype is not wanted[0] or codes.shape[1] * wanted[1] != x.shape[-1]:
        raise UsageError(
            f"x {tuple(x.shape)} and codes {tuple(codes.shape)} of {codes.dtype}: expected (..., K) and, for {code}, "
            f"(N, K{' / 2' if wanted[1] == 2 else ''}) of {wanted[0]}"
        )
    kinds = {"scales": (scales, torch.float32), "zeros": (zeros, torch.int8)}
    for name, (tensor, wanted_dtype) in kinds.items():
        if tensor is not None and tensor.dtype is not wanted_dtype:
            raise UsageError(f"{name} of {tensor.dtype}: expected {wanted_dtype}; cast with .to()")
    if not x.is_floating_point():
        raise UsageError(f"x of {x.dtype}: expected activations in floating point; cast with .to()")
    if scales.dim() != 2 or len(scales) not in (1, len(codes)) or not scales.shape[1] or x.shape[-1] % scales.shape[1]:
        raise UsageError(f"scales {tuple(scales.shape)}: expected (N or 1, G) where G divides K = {x.shape[-1]}")
    if zeros is not None and zeros.shape != scales.shape:
        raise UsageError(f"zeros {tuple(zeros.shape)}: expected the shape of the scales, {tuple(scales.shape)}")


def check_norm(
    x: Tensor, branch: Tensor, gain: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str, eps: float,
    gate: str, settled: bool,
) -> None:  # fmt: skip
    check(x, codes, scales, zeros, code, gate)
    if not eps >= 0:
        raise UsageError(f"eps is {eps}: expected at least 0")
    if x.dim() != 2 or len(x) != 1 or branch.shape != x.shape or gain.shape != x.shape[1:]:
        raise UsageError(
            f"x {tuple(x.shape)}, branch {tuple(branch.shape)} and gain {tuple(gain.shape)}: expected (1, K) twice "
            "and (K,)"
        )


def served(x: Tensor, codes: Tensor, scales: Tensor, *_: object) -> bool:
    group = x.shape[-1] // scales.shape[1]
    return x.dtype is not torch.float64 and (scales.shape[1] == 1 or group % _LEAST_GROUP == 0)


def served_norm(x: Tensor, branch: Tensor, gain: Tensor, codes: Tensor, scales: Tensor, *_: object) -> bool:
    return served(x, codes, scales)


@operator(kernel="tilemesh.kernels.lowbit_linear.kernel", check=check, served=served, own_dtype=("scales",), casts=True)
def lowbit_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    code: str = "int4",
    gate: str = "none",
    settled: bool = False,
) -> Tensor:
    """x W^T for x (..., K), where W[n, k] = scales[n, g] (code[n, k] - zeros[n, g]) and g is the group of input k.

    codes: (N, K) int8, or for int4 (N, K / 2) bytes with two codes each, the first in the low half, plus 8. scales:
    (N or 1, G) float32. zeros: int8. `kernels/lowbit/codes.py` makes them. With a gate silu(x G^T) * (x V^T), the first
    half of W's rows being G and the second V. settled: codes and scales are not results of the kernel launched just
    before, and may be read before that one has ended.
    """
    return gated(functional.linear(x, _decoded(codes, scales, zeros, code, x.dtype, x.shape[-1])), gate)


@operator(
    kernel="tilemesh.kernels.lowbit_linear.kernel:NORMED", check=check_norm, served=served_norm, own_dtype=("scales",)
)  # fmt: skip
def norm_lowbit_linear(
    x: Tensor,
    branch: Tensor,
    gain: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    code: str = "int4",
    eps: float = 1e-6,
    gate: str = "none",
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`lowbit_linear` of the RMSNorm of x + branch, (1, K) each, times gain (K,); and x + branch."""
    total = x + branch
    row = functional.rms_norm(total, x.shape[1:], gain, eps)
    return gated(functional.linear(row, _decoded(codes, scales, zeros, code, x.dtype, x.shape[-1])), gate), total


def takes_one_token(like: Tensor, codes: Tensor, scales: Tensor, code: str) -> bool:
    """Whether the kernel for one token can have a norm before and a gate after it; `like`: a row of activations."""
    if like.device.type != "cuda":
        return False
    from tilemesh.kernels.lowbit_linear import tokens

    return tokens.takes_one(like, codes, scales, code)


def _decoded(codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str, dtype: torch.dtype, inputs: int) -> Tensor:
    return decode(unpack(codes, FORMATS[code], inputs), Scheme(code), scales, zeros, dtype)


def exact(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, code: str = "int4", gate: str = "none"
) -> Tensor:
    """The float64 result, for errors to be measured against."""
    return gated(functional.linear(x.double(), _decoded(codes, scales, zeros, code, torch.float64, x.shape[-1])), gate)


def error_bound(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, code: str = "int4", gate: str = "none",
    *, dtype: torch.dtype | None = None, roundings: int = 1,
) -> Tensor:  # fmt: skip
    """How far each element of a correct result may be from `exact`.

    A kernel may add up x times codes of up to 1,032 (their offset, and the leading one of a float16 that a code is put
    behind) and take the offset off afterwards; plain torch rounds the dequantised weight to the dtype. dtype: of the
    result, where x has more digits. roundings: to it, of activations and weights.
    """
    dtype = dtype or x.dtype
    weight = _decoded(codes, scales, zeros, code, torch.float64, x.shape[-1]).abs()
    most = scales.double().repeat_interleave(x.shape[-1] // scales.shape[1], 1).expand_as(weight)
    magnitude = x.double().abs()
    wide = accumulator(dtype)
    summed = sum_error(functional.linear(magnitude, 1032 * most), x.shape[-1] + 2, wide)
    each = summed + roundings * unit(dtype) * functional.linear(magnitude, weight)
    y = exact(x, codes, scales, zeros, code)
    if gate != "none":  # plain torch rounds before the gate too
        each = each + rounding_error(y, dtype)
    return bound_after_gate(y, each, dtype, gate)


def norm_row(x: Tensor, branch: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """What `norm_lowbit_linear` multiplies, in float64, from x + branch as it is stored."""
    return functional.rms_norm((x + branch).double(), x.shape[1:], gain.double(), eps)


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


def norm_exact(x: Tensor, branch: Tensor, gain: Tensor, codes: Tensor, scales: Tensor, code: str = "int4") -> Tensor:
    """`norm_lowbit_linear`'s first result in float64."""
    return exact(norm_row(x, branch, gain), codes, scales, code=code)


def norm_error_bound(
    x: Tensor, branch: Tensor, gain: Tensor, codes: Tensor, scales: Tensor, code: str = "int4"
) -> Tensor:
    """As `error_bound`; a normalized row is rounded a few times more."""
    return error_bound(norm_row(x, branch, gain), codes, scales, code=code, dtype=x.dtype, roundings=4)


def norm_arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """As `arguments` of one row, with a branch to add and a norm's gain."""
    one = SizedProblem((1, *problem.sizes), problem.dtype, problem.options)
    x, codes, scales = arguments(one, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    branch, gain = (
        torch.rand(shape, generator=generator, device=device).to(x.dtype) for shape in (x.shape, x.shape[1])
    )
    return x, branch, gain, codes, scales


NORM_LOWBIT_LINEAR_BENCH = FunctionBench(
    norm_lowbit_linear, NORM_LOWBIT_LINEAR_FORM, norm_arguments, exact=norm_exact, bound=norm_error_bound
)
