"""What act(gate) * x cannot do without: both are read, y is written; backward reads three tensors and writes two."""

from __future__ import annotations

from tilemesh.core.cost import SHORT_DTYPES, Cost, short_dtype
from tilemesh.kernels.problems import PASSES, ProblemForm, Setting, SizedProblem


def cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the forward pass; about 6 operations per element, one of them an exponential."""
    return _cost(rows, columns, dtype, read=2, written=1)


def backward_cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the backward pass, which computes the activation again instead of keeping it."""
    return _cost(rows, columns, dtype, read=3, written=2)


def _cost(rows: int, columns: int, dtype: str, *, read: int, written: int) -> Cost:
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(6 * elements, size * read * elements, size * written * elements, launches=1, dtype=short)


def of_problem(problem: SizedProblem) -> Cost:
    """Of a benchmark's problem."""
    rows, columns = problem.sizes
    forward = cost(rows, columns, problem.dtype)
    return forward + backward_cost(rows, columns, problem.dtype) if problem.options["passes"] == "both" else forward


def _form(**settings: Setting) -> ProblemForm[SizedProblem]:
    return ProblemForm(
        sizes="ROWSxCOLUMNS",
        suite=("16384x5632", "16384x14336", "16384x1024", "32x64"),
        settings={"dtype": Setting(tuple(SHORT_DTYPES), "bfloat16"), "passes": PASSES, **settings},
        make=SizedProblem.of,
        cost=of_problem,
    )


SWIGLU_FORM = _form()
GEGLU_FORM = _form(approximate=Setting(("tanh", "none"), "tanh", named=False))
