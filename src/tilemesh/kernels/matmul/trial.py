"""Timing configurations of one problem on this GPU: inputs, compiled ahead in parallel, checked, replayed as graphs.

Used by the tuner and by the scripts in benchmarks/. A configuration that fails to compile, does not fit or computes
something wrong is a `Failure`, not an exception: a search goes on.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.matmul import reference
from tilemesh.kernels.matmul.config import TILE_KINDS, Config
from tilemesh.kernels.matmul.plan import tiles_plan
from tilemesh.kernels.matmul.problem import Matrix, Problem
from tilemesh.kernels.matmul.run import Runner, device_index, gpu_of, prepare
from tilemesh.measure.gpu import KernelTimer, rotating_sets
from tilemesh.measure.timing import reason_of


@dataclass(frozen=True)
class Trial:
    """One configuration, timed: median seconds of kernel time, or why there are none."""

    config: Config
    seconds: float = math.inf
    failure: str | None = None


@dataclass(frozen=True)
class Inputs:
    """One set of tensors for a problem."""

    a: Tensor
    b: Tensor
    c: Tensor | None
    d: Tensor


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> Inputs:
    """Random tensors that lie in memory exactly as the problem says: kernels index them by the problem's strides."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def place(matrix: Matrix, scale: float = 1.0) -> Tensor:
        before = 0 if matrix.aligned else 1  # one element off what the allocator aligns
        storage = torch.randn(before + matrix.reach, generator=generator, device=device, dtype=dtype) * scale
        return storage.as_strided((matrix.rows, matrix.columns), (matrix.row_stride, matrix.column_stride), before)

    c = None if problem.c is None else place(problem.c)
    scale = 1 / math.sqrt(max(problem.k, 1))  # D of order one: gelu and fp16 stay in range
    return Inputs(place(problem.a), place(problem.b, scale), c, place(problem.d))


def input_bytes(problem: Problem) -> int:
    matrices = [problem.a, problem.b, problem.d] + ([problem.c] if problem.c else [])
    return problem.element_bytes * sum(matrix.reach for matrix in matrices)


class Bench:
    """Times configurations of one problem, on inputs that rotate past the L2."""

    def __init__(self, problem: Problem, device: torch.device, *, seed: int = 0) -> None:
        self.problem, self.device = problem, device
        self.timer = KernelTimer()
        self.sets = rotating_sets(lambda i: make_inputs(problem, device, seed * 1000 + i), input_bytes(problem))
        first = self.sets[0]
        self.rows = checked_rows(problem.m, device)
        self.exact = exact_rows(first, problem.activation, self.rows)
        self.allowed = allowed_error(problem, first, self.rows, self.exact)

    def runner(self, config: Config) -> Runner:
        return prepare(self.problem, config, self.device)

    def call(self, runner: Runner) -> Callable[[int], object]:
        def once(index: int) -> Tensor:
            inputs = self.sets[index]
            runner(inputs.a, inputs.b, inputs.c, inputs.d, None)
            return inputs.d

        return once

    def time(self, config: Config, readings: int = 5) -> Trial:
        """Check the configuration's result, then take the median of a few replays."""
        try:
            runner = self.runner(config)
            first = self.sets[0]
            first.d.fill_(float("nan"))
            runner(first.a, first.b, first.c, first.d, None)
            wrong = excess(first.d[self.rows], self.exact, self.allowed)
            if wrong or not bool(torch.isfinite(first.d).all()):
                return Trial(config, failure=f"wrong result: {wrong or 'not finite'}")
            ready = self.timer.prepare(self.call(runner), sets=len(self.sets), warmup=1)
            return Trial(config, statistics.median(ready.read().seconds for _ in range(readings)))
        except Exception as error:
            return Trial(config, failure=reason_of(error))


def checked_rows(m: int, device: torch.device, most: int = 256) -> Tensor:
    """Rows from the first to the last, evenly: where M is large, still some of every tile up to 8192 rows of 32."""
    return torch.linspace(0, m - 1, min(m, most), dtype=torch.float64, device=device).round().long()


def exact_rows(inputs: Inputs, activation: str, rows: Tensor) -> Tensor:
    """The float64 result of some rows: enough to see a wrong tile, and cheap (all rows are checked finite)."""
    return reference.exact(inputs.a[rows], inputs.b, rows_of_c(inputs.c, rows), activation)


def allowed_error(problem: Problem, inputs: Inputs, rows: Tensor, exact: Tensor) -> Tensor:
    """What arithmetic allows, or twice plain torch's error where that is more: vendors round in ways of their own."""
    a, c = inputs.a[rows], rows_of_c(inputs.c, rows)
    plain = reference.fused_matmul(a, inputs.b, c, problem.activation)
    tf32 = problem.dtype == "float32" and problem.precision == "tf32"
    bound = reference.error_bound(a, inputs.b, c, problem.activation, separate=True, tf32=tf32)
    return bound.clamp(min=2 * (plain.double() - exact).abs().max().item())


def rows_of_c(c: Tensor | None, rows: Tensor) -> Tensor | None:
    return c[rows] if c is not None and c.shape[0] > 1 else c


class Compiler:
    """Compiles configurations into Triton's cache on disk, in parallel processes, or not at all with `workers=0`.

    Processes are started afresh and import the main module again, so a script that uses them needs the usual
    `if __name__ == "__main__"`; called from inside somebody else's program, use none.
    """

    def __init__(self, device: torch.device, workers: int | None = None) -> None:
        self.gpu = gpu_of(device_index(device))
        count = max(1, (os.cpu_count() or 2) - 1) if workers is None else workers
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(count, mp_context=context) if count else None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def ahead(self, jobs: Sequence[tuple[Problem, Config]]) -> dict[tuple[str, Config], str]:
        """Compile these; returns what failed, and why. Without processes each is compiled when it is first timed."""
        if self.pool is None:
            return {}
        arch = self.gpu.capability[0] * 10 + self.gpu.capability[1]
        tiles = [job for job in jobs if job[1].kind in TILE_KINDS]
        futures = [self.pool.submit(_compile, *job, self.gpu.multiprocessors, arch) for job in tiles]
        answers = zip(tiles, [future.result() for future in futures], strict=True)
        return {(problem.key, config): error for (problem, config), error in answers if error}


def _compile(problem: Problem, config: Config, multiprocessors: int, arch: int) -> str | None:
    """In a worker: compile what `prepare` will ask for, exactly, so that it finds it on disk."""
    from triton.backends.compiler import GPUTarget

    from tilemesh.kernels.matmul.launch import Operand, compile_step

    try:
        plan = tiles_plan(problem, config if arch >= 90 else replace(config, chained=False), multiprocessors)
        places = {"a": problem.a, "b": problem.b, "c": problem.c, "d": problem.d}
        operands = {name: Operand(problem.dtype, place is None or place.aligned) for name, place in places.items()}
        operands["z"] = Operand(problem.dtype)
        operands |= {name: Operand(buffer.dtype) for name, buffer in plan.buffers.items()}
        for step in plan.steps:
            compile_step(step, operands, GPUTarget("cuda", arch, 32))
    except Exception as error:
        return reason_of(error)
    return None
