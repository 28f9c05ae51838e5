"""What the product of one row with a matrix cannot do without: every weight once."""

from __future__ import annotations

from dataclasses import replace

from tilemesh.core.cost import SHORT_DTYPES, Cost, short_dtype
from tilemesh.kernels.problems import ProblemForm, Setting, SizedProblem

GATES = ("none", "silu")


def cost(outputs: int, inputs: int, dtype: str = "bfloat16", gate: str = "none") -> Cost:
    """Of `outputs` results; with a gate there are twice as many rows of weights."""
    short, size = short_dtype(dtype)
    weights = outputs * inputs * (1 if gate == "none" else 2)
    return Cost(2 * weights, size * (weights + inputs), size * outputs, launches=1, dtype=short)


def of_problem(problem: SizedProblem) -> Cost:
    """Of a benchmark's problem."""
    outputs, inputs = problem.sizes
    return cost(outputs, inputs, problem.dtype, problem.options["gate"])


def norm_cost(outputs: int, inputs: int, dtype: str = "bfloat16", gate: str = "none") -> Cost:
    """With the norm of the sum of two rows before it, which is read, scaled and kept."""
    _, size = short_dtype(dtype)
    product = cost(outputs, inputs, dtype, gate)
    read, written = product.bytes_read + 2 * size * inputs, product.bytes_written + size * inputs
    return Cost(product.flops + 5 * inputs, read, written, launches=1, dtype=product.dtype)


def of_normed(problem: SizedProblem) -> Cost:
    outputs, inputs = problem.sizes
    return norm_cost(outputs, inputs, problem.dtype, problem.options["gate"])


FORM = ProblemForm(
    sizes="OUTPUTSxINPUTS",
    suite=("2560x2048", "5632x2048", "2048x5632", "14336x4096", "4096x14336", "128256x4096"),
    settings={"dtype": Setting(tuple(SHORT_DTYPES), "bfloat16"), "gate": Setting(GATES, "none", named=False)},
    make=SizedProblem.of,
    cost=of_problem,
)
NORM_ROW_LINEAR_FORM = replace(FORM, cost=of_normed)
