"""What cross-entropy cannot do without: forward reads the logits, backward reads them again and writes a gradient."""

from __future__ import annotations

from tilemesh.core.cost import SHORT_DTYPES, Cost, short_dtype
from tilemesh.kernels.bench.problems import PASSES, ProblemForm, Setting, SizedProblem


def cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the forward pass over logits (rows, columns); targets, sums and losses are one number per row."""
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(5 * elements, size * elements + 8 * rows, 8 * rows, launches=2, dtype=short)


def backward_cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the backward pass."""
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(4 * elements, size * elements + 16 * rows, size * elements, launches=1, dtype=short)


def of_problem(problem: SizedProblem) -> Cost:
    """Of a benchmark's problem."""
    rows, columns = problem.sizes
    forward = cost(rows, columns, problem.dtype)
    return forward if problem.options["passes"] == "forward" else forward + backward_cost(rows, columns, problem.dtype)


FORM = ProblemForm(
    sizes="ROWSxCOLUMNS",
    suite=("8192x50304", "8192x128256", "8192x256"),
    settings={"dtype": Setting(tuple(SHORT_DTYPES), "bfloat16"), "passes": PASSES},
    make=SizedProblem.of,
    cost=of_problem,
)
