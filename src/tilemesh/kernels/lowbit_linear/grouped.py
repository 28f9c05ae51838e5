"""Rows of several groups, each group times a matrix of 4 or 8 bits of its own, in plain torch: experts of a layer.

N: rows of all groups; X: groups; O: outputs; I: inputs; G: scales of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.grouped_linear.cost import loads_of
from tilemesh.kernels.grouped_linear.reference import check_values as check_ends
from tilemesh.kernels.grouped_linear.reference import lengths
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.lowbit_linear.cost import GROUPED_LOWBIT_LINEAR_FORM
from tilemesh.kernels.lowbit_linear.reference import arguments as one_group
from tilemesh.kernels.lowbit_linear.reference import check as check_group
from tilemesh.kernels.lowbit_linear.reference import error_bound, exact, lowbit_linear, served
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem


def check(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor, code: str) -> None:
    if x.dim() != 2 or codes.dim() != 3 or scales.dim() != 3 or not len(codes) == len(scales) == len(ends):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x, codes, scales, ends))
        raise UsageError(f"x, codes, scales and ends {shapes}: expected (N, I), (X, O, ...), (X, O, G) and (X,)")
    if ends.dtype is not torch.int32 or scales.shape[1] != codes.shape[1]:
        raise UsageError(
            f"ends are {ends.dtype} and scales {tuple(scales.shape)}: expected int32 and one row per output"
        )
    check_group(x, codes[0], scales[0], None if zeros is None else zeros[0], code)


def check_values(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor, code: str) -> None:
    check_ends(x, codes, ends)


def serves(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor, code: str) -> bool:
    return len(x) > 0 and served(x, codes[0], scales[0])


@operator(
    kernel="tilemesh.kernels.lowbit_linear.kernel:GROUPED", check=check, check_values=check_values, served=serves,
    own_dtype=("scales",), casts=True,
)  # fmt: skip
def grouped_lowbit_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor, *, code: str = "int4"
) -> Tensor:
    """As `grouped_linear`, with matrices as `lowbit_linear` takes them, one of each group: (N, O).

    x: (N, I); codes: (X, O, I) or, of 4 bits, (X, O, I / 2); scales, zeros: (X, O, G); ends: (X,), int32.
    """
    per_group = zip(torch.split(x, lengths(ends)), codes, scales, zeros if zeros is not None else codes, strict=True)
    plain = lowbit_linear.reference  # type: ignore[attr-defined]
    return torch.cat(
        [plain(rows, *pair, None if zeros is None else zero, code=code) for rows, *pair, zero in per_group]
    )


def _arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    rows, outputs, inputs, groups = problem.sizes
    one = [
        one_group(SizedProblem((rows, outputs, inputs), problem.dtype, problem.options), device, seed + group)
        for group in range(groups)
    ]
    codes, scales = (torch.stack([drawn[place] for drawn in one]) for place in (1, 2))
    counts = torch.tensor(loads_of(rows, groups, "even"), device=device)
    return one[0][0], codes, scales, None, counts.cumsum(0).int()


def _each(function: object, x: Tensor, codes: Tensor, scales: Tensor, ends: Tensor, code: str) -> Tensor:
    parts = zip(torch.split(x, lengths(ends)), codes, scales, strict=True)
    return torch.cat([function(rows, *pair, code=code) for rows, *pair in parts])  # type: ignore[operator]


def exact_groups(x: Tensor, codes: Tensor, scales: Tensor, zeros: None, ends: Tensor, code: str = "int4") -> Tensor:
    return _each(exact, x, codes, scales, ends, code)


def groups_bound(x: Tensor, codes: Tensor, scales: Tensor, zeros: None, ends: Tensor, code: str = "int4") -> Tensor:
    return _each(error_bound, x, codes, scales, ends, code)


BENCH = FunctionBench(
    grouped_lowbit_linear, GROUPED_LOWBIT_LINEAR_FORM, _arguments, exact=exact_groups, bound=groups_bound, constant=(2,)
)
