"""What a product with weights of few bits cannot do without: each code once, each activation once."""

from __future__ import annotations

from dataclasses import replace

from tilemesh.core.cost import SHORT_DTYPES, Cost, short_dtype
from tilemesh.kernels.problems import ProblemForm, Setting, SizedProblem

CODE_BITS = {"int4": 4, "int8": 8}
GROUP = 128


def group_of(inputs: int) -> int:
    """Inputs under one scale in a benchmark's problem."""
    return GROUP if inputs % GROUP == 0 else inputs


def cost(rows: int, outputs: int, inputs: int, dtype: str = "bfloat16", code: str = "int4") -> Cost:
    short, size = short_dtype(dtype)
    weights = outputs * (inputs * CODE_BITS[code] // 8 + inputs // group_of(inputs) * 4)
    return Cost(
        2 * rows * outputs * inputs, weights + size * rows * inputs, size * rows * outputs, launches=1, dtype=short
    )


def of_problem(problem: SizedProblem) -> Cost:
    rows, outputs, inputs = problem.sizes
    return cost(rows, outputs, inputs, problem.dtype, problem.options["code"])


FORM = ProblemForm(
    sizes="MxNxK",
    suite=(
        "1x8192x8192", "16x8192x8192", "64x8192x8192", "256x8192x8192", "1024x8192x8192", "8192x8192x8192",
        "1x14336x4096", "1x4096x14336",
    ),
    settings={"dtype": Setting(tuple(SHORT_DTYPES), "bfloat16"), "code": Setting(tuple(CODE_BITS), "int4")},
    make=SizedProblem.of,
    cost=of_problem,
)  # fmt: skip


def grouped_cost(
    rows: int, outputs: int, inputs: int, groups: int, dtype: str = "bfloat16", code: str = "int4"
) -> Cost:
    """Of rows that several matrices share: each of these is read."""
    one = cost(rows, outputs, inputs, dtype, code)
    codes = cost(0, outputs, inputs, dtype, code).bytes_read
    return replace(one, bytes_read=one.bytes_read + (groups - 1) * codes)


def _of_groups(problem: SizedProblem) -> Cost:
    rows, outputs, inputs, groups = problem.sizes
    return grouped_cost(rows, outputs, inputs, groups, problem.dtype, problem.options["code"])


GROUPED_LOWBIT_LINEAR_FORM = replace(
    FORM, sizes="ROWSxOUTPUTSxINPUTSxGROUPS", suite=("128x14336x4096x8", "128x4096x14336x8", "512x768x2048x128"),
    cost=_of_groups,
)  # fmt: skip


def of_normed(problem: SizedProblem) -> Cost:
    """Of one row, with the norm of the sum of two before the product."""
    outputs, inputs = problem.sizes
    _, size = short_dtype(problem.dtype)
    product = cost(1, outputs, inputs, problem.dtype, problem.options["code"])
    read, written = product.bytes_read + 2 * size * inputs, product.bytes_written + size * inputs
    return Cost(product.flops + 5 * inputs, read, written, launches=1, dtype=product.dtype)


NORM_LOWBIT_LINEAR_FORM = replace(
    FORM, sizes="OUTPUTSxINPUTS", suite=("8192x8192", "14336x4096", "4096x14336"), cost=of_normed
)
