"""The library on operands that it can read fast: aligned copies, its matmul, one fused pass from padded rows to D.

Vendor kernels want rows that start on 16 bytes and an N and K of whole 16-byte groups; without, they are two to four
times slower. Copies give them both: what is added along K is zero, what is added along N is never read. Like plan.py,
this only says what is to be done, as plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilemesh.kernels.launch.steps import Buffer, LaunchPlan, Step, blocks
from tilemesh.kernels.matmul.copies import ALIGNMENT_BYTES, aligned_copies
from tilemesh.kernels.matmul.plan import epilogue_plan
from tilemesh.kernels.matmul.problem import Matrix, Problem


@dataclass(frozen=True)
class View:
    """A tensor or buffer, read or written as a matrix."""

    of: str
    matrix: Matrix


@dataclass(frozen=True)
class PaddedPlan:
    """`before`, then out = a @ b by the library, then `after`."""

    before: LaunchPlan
    a: View
    b: View
    out: View
    after: LaunchPlan
    buffers: Mapping[str, Buffer]


def padded_plan(problem: Problem) -> PaddedPlan:
    """Copies of what the library reads slowly, the product, and the pass that follows."""
    size, group = problem.element_bytes, problem.library_group
    names = problem.slow_operands
    m, n, k = problem.m, problem.n, problem.k
    if "a" in names and abs(problem.a.row_stride) < abs(problem.a.column_stride):  # its copy runs along M
        m = blocks(m, group) * group
    if "b" in names:
        n = blocks(n, group) * group
    if len(names) == 2:
        k = blocks(k, group) * group
    steps: list[Step] = []
    buffers: dict[str, Buffer] = {}
    copies = aligned_copies(problem, names, steps, buffers, {"a": (m, k), "b": (k, n)})
    a, b = copies.get("a", ("a", problem.a)), copies.get("b", ("b", problem.b))
    unit = ALIGNMENT_BYTES // size
    leading = blocks(n, unit) * unit
    buffers["product"] = Buffer(m * leading, problem.dtype)
    out = View("product", Matrix(m, n, leading, 1))
    after = epilogue_plan(problem, Matrix(problem.m, problem.n, leading, 1))
    return PaddedPlan(LaunchPlan(tuple(steps)), View(*a), View(*b), out, after, buffers)
