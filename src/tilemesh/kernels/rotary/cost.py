"""What a rotary embedding cannot do without: x is read, y is written; the tables stay in caches."""

from __future__ import annotations

from tilemesh.core.cost import SHORT_DTYPES, Cost, short_dtype
from tilemesh.kernels.problems import PASSES, ProblemForm, Setting, SizedProblem


def cost(batch: int, tokens: int, heads: int, width: int, dtype: str = "bfloat16") -> Cost:
    """Of one pass, forward or backward, with float32 tables: a pair takes four products and two sums."""
    short, size = short_dtype(dtype)
    elements, table = batch * tokens * heads * width, tokens * width
    return Cost(3 * elements, size * elements + 4 * table, size * elements, launches=1, dtype=short)


def of_problem(problem: SizedProblem) -> Cost:
    """Of a benchmark's problem."""
    batch, tokens, heads, width = problem.sizes
    once = cost(batch, tokens, heads, 2 * max(1, width // 2), problem.dtype)
    return once + once if problem.options["passes"] == "both" else once


FORM = ProblemForm(
    sizes="BATCHxTOKENSxHEADSxWIDTH",
    suite=("8x2048x32x64", "8x2048x32x128", "4x8192x8x128", "1x64x4x64"),
    settings={"dtype": Setting(tuple(SHORT_DTYPES), "bfloat16"), "passes": PASSES},
    make=SizedProblem.of,
    cost=of_problem,
)
