"""Inputs of a matmul problem, the float64 result of some of its rows, and how far from it a correct result may be.

Used by the tuner, by the rows of `bench kernel matmul` and by scripts/fit_matmul.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.matmul import reference
from tilemesh.kernels.matmul.config import Config
from tilemesh.kernels.matmul.problem import Matrix, Problem
from tilemesh.kernels.matmul.run import Runner, prepare
from tilemesh.kernels.tuning.trial import ConfigTimer
from tilemesh.measure.gpu import KernelTimer, rotating_sets

# a, b and c
Given = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class MatmulInputs:
    """One set of tensors for a problem."""

    a: Tensor
    b: Tensor
    c: Tensor | None
    d: Tensor

    @property
    def given(self) -> Given:
        return self.a, self.b, self.c


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> MatmulInputs:
    """Random tensors that lie in memory exactly as the problem says: kernels index them by the problem's strides."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def place(matrix: Matrix, scale: float = 1.0) -> Tensor:
        before = 0 if matrix.aligned else 1  # one element off what the allocator aligns
        storage = torch.randn(before + matrix.reach, generator=generator, device=device, dtype=dtype) * scale
        return storage.as_strided((matrix.rows, matrix.columns), (matrix.row_stride, matrix.column_stride), before)

    c = None if problem.c is None else place(problem.c)
    scale = 1 / math.sqrt(max(problem.k, 1))  # D of order one: gelu and fp16 stay in range
    return MatmulInputs(place(problem.a), place(problem.b, scale), c, place(problem.d))


def input_bytes(problem: Problem) -> int:
    matrices = [problem.a, problem.b, problem.d] + ([problem.c] if problem.c else [])
    return problem.element_bytes * sum(matrix.reach for matrix in matrices)


class MatmulBench(ConfigTimer[Config]):
    """Times configurations of one problem."""

    def __init__(self, problem: Problem, device: torch.device, *, seed: int = 0) -> None:
        self.problem, self.device = problem, device
        self.timer = KernelTimer()
        self.sets = rotating_sets(lambda i: make_inputs(problem, device, seed * 1000 + i), input_bytes(problem))
        first = self.sets[0]
        self.rows = checked_rows(problem.m, device)
        self.exact = exact_rows(first.given, problem.activation, self.rows)
        self.allowed = allowed_error(problem, first.given, self.rows, self.exact)

    def runner(self, config: Config) -> Runner:
        return prepare(self.problem, config, self.device)

    def call(self, runner: Runner) -> Callable[[int], object]:
        def once(index: int) -> Tensor:
            inputs = self.sets[index]
            runner(inputs.a, inputs.b, inputs.c, inputs.d, None)
            return inputs.d

        return once

    def wrong(self, runner: Runner) -> str | None:
        first = self.sets[0]
        first.d.fill_(float("nan"))
        runner(first.a, first.b, first.c, first.d, None)
        finite = bool(torch.isfinite(first.d).all())
        return excess(first.d[self.rows], self.exact, self.allowed) or (None if finite else "not finite")


def checked_rows(m: int, device: torch.device, most: int = 256) -> Tensor:
    """Rows from the first to the last, evenly: where M is large, still some of every tile up to 8192 rows of 32."""
    return torch.linspace(0, m - 1, min(m, most), dtype=torch.float64, device=device).round().long()


def exact_rows(given: Given, activation: str, rows: Tensor) -> Tensor:
    """The float64 result of some rows: enough to see a wrong tile, and cheap (all rows are checked finite)."""
    a, b, c = given
    return reference.exact(a[rows], b, rows_of_c(c, rows), activation)


def allowed_error(problem: Problem, given: Given, rows: Tensor, exact: Tensor) -> Tensor:
    """What arithmetic allows, or twice plain torch's error where that is more: vendors round in ways of their own."""
    a, b, c = given[0][rows], given[1], rows_of_c(given[2], rows)
    plain = reference.fused_matmul(a, b, c, problem.activation)
    tf32 = problem.dtype == "float32" and problem.precision == "tf32"
    bound = reference.error_bound(a, b, c, problem.activation, separate=True, tf32=tf32)
    return bound.clamp(min=2 * (plain.double() - exact).abs().max().item())


def rows_of_c(c: Tensor | None, rows: Tensor) -> Tensor | None:
    return c[rows] if c is not None and c.shape[0] > 1 else c
