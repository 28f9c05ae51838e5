"""The library on operands that it can read fast: aligned copies, its matmul, one fused pass from padded rows to D.

Vendor kernels want rows that start on 16 bytes and an N and K of whole 16-byte groups; without, they are three to five
times slower. Copies give them both: what is added along K is zero, what is added along N is never read. Like plan.py,
this only says what is to be done, as plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilemesh.kernels.matmul.config import PEEL_ROWS, Config, copied_for_library, group_of
from tilemesh.kernels.matmul.copies import ALIGNMENT_BYTES, aligned_copies
from tilemesh.kernels.matmul.plan import epilogue_plan
from tilemesh.kernels.matmul.problem import Matrix, Problem
from tilemesh.kernels.matmul.steps import Buffer, LaunchPlan, Step, blocks


@dataclass(frozen=True)
class View:
    """Part of a tensor or buffer, from an offset in elements on."""

    of: str
    matrix: Matrix
    offset: int = 0


@dataclass(frozen=True)
class Product:
    """One matmul of the library's: out = a @ b."""

    a: View
    b: View
    out: View


@dataclass(frozen=True)
class PaddedPlan:
    before: LaunchPlan
    products: tuple[Product, ...]
    after: LaunchPlan
    buffers: Mapping[str, Buffer]


def padded_plan(problem: Problem, config: Config) -> PaddedPlan:
    """Copies, products and the pass that follows; with `peel`, rows past whole tiles are a product of their own."""
    size, group = problem.element_bytes, group_of(problem)
    names = copied_for_library(problem)
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
    out = Matrix(m, n, leading, 1)
    buffers["product"] = Buffer(m * leading, problem.dtype)
    products = tuple(
        Product(_rows(View(*a), first, last), View(*b), _rows(View("product", out), first, last))
        for first, last in _cuts(m, config)
    )
    after = epilogue_plan(problem, Matrix(problem.m, problem.n, leading, 1))
    return PaddedPlan(LaunchPlan(tuple(steps)), products, after, buffers)


def _cuts(rows: int, config: Config) -> list[tuple[int, int]]:
    whole = rows - rows % PEEL_ROWS
    if not config.peel or whole in (0, rows):
        return [(0, rows)]
    return [(0, whole), (whole, rows)]


def _rows(view: View, first: int, last: int) -> View:
    return View(view.of, replace(view.matrix, rows=last - first), view.offset + first * view.matrix.row_stride)
