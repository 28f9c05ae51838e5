"""What softmax cannot do without: every element read once and written once, forward; two read and one written, back."""

from __future__ import annotations

from tilemesh.core.cost import SHORT_DTYPES, Cost, short_dtype
from tilemesh.kernels.bench.problems import PASSES, ProblemForm, Setting, SizedProblem


def cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of one forward pass over (rows, columns): per element an exponential, a sum, a maximum and two products."""
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(5 * elements, size * elements, size * elements, launches=1, dtype=short)


def backward_cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the backward pass: y and its gradient are read, x's gradient is written."""
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(4 * elements, 2 * size * elements, size * elements, launches=1, dtype=short)


def of_problem(problem: SizedProblem) -> Cost:
    """Of a benchmark's problem."""
    rows, columns = problem.sizes
    forward = cost(rows, columns, problem.dtype)
    return forward if problem.options["passes"] == "forward" else forward + backward_cost(rows, columns, problem.dtype)


FORM = ProblemForm(
    sizes="ROWSxCOLUMNS",
    suite=("16384x1024", "8192x8192", "4096x32768", "512x262144", "16384x1000", "32x64"),
    settings={"dtype": Setting(tuple(SHORT_DTYPES), "bfloat16"), "passes": PASSES},
    make=SizedProblem.of,
    cost=of_problem,
)
