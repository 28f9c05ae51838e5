"""The fused matmul as the tuner sees it: its grid, its cost model, its built-ins and a way to time them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tilemesh.kernels import context
from tilemesh.kernels.launch.gpu import Gpu
from tilemesh.kernels.matmul import learnt, select
from tilemesh.kernels.matmul.config import TILE_KINDS, Config, libraries, space
from tilemesh.kernels.matmul.cost import device_or_nearest, predict_s, rates_of
from tilemesh.kernels.matmul.plan import tiles_plan
from tilemesh.kernels.matmul.problem import Problem
from tilemesh.kernels.matmul.run import operands_of, runs_on
from tilemesh.kernels.matmul.trial import MatmulBench
from tilemesh.measure.timing import reason_of

SHORTLIST = 6  # for 104 of 105 shapes the model had not seen, one of its first six was within 1 % of the best trial
_KINDS = ("pointer", "tma", "persistent", "split", "pingpong", "library")


class MatmulTuning:
    """See `tuning.operator.Tunable`."""

    tables = select.TABLES
    last_resort = Config("torch")

    def refusal(self, problem: Problem) -> str | None:
        if 0 in (problem.m, problem.n, problem.k) or problem.element_bytes != 2:
            return "only non-empty float16 and bfloat16 problems are tuned"
        return None

    def grid(self, problem: Problem, gpu: Gpu) -> list[Config]:
        return [config for config in space(problem, shared_limit=gpu.shared_bytes) if runs_on(gpu, config.kind)]

    def predict_s(self, problem: Problem, gpu: Gpu) -> Callable[[Config], float]:
        rates = rates_of(device_or_nearest(gpu.name), problem.dtype, problem.precision)
        return lambda config: predict_s(problem, config, rates)

    def features(self, config: Config) -> list[float]:
        kinds = [1.2 * (config.kind == kind) for kind in _KINDS]
        sides = [math.log2(config.block_m), math.log2(config.block_n), 0.7 * math.log2(config.block_k)]
        depth = [0.7 * math.log2(config.warps), 0.4 * config.stages, 0.7 * math.log2(config.split_k)]
        epilogue = [
            0.6 * config.c_first,
            0.6 * config.c_early,
            0.5 * config.tma_epilogue,
            0.4 * math.log2(config.subtile),
        ]
        order = [0.3 * math.log2(config.group), 0.5 * config.per_sm, 0.6 * config.tail, 0.6 * config.flatten]
        return [*kinds, *sides, *depth, *epilogue, *order]

    def untuned(self, problem: Problem, gpu: Gpu) -> Config:
        """The table that travels with the package may know a better one than the grid has."""
        shipped = context.current.state("matmul").shipped_table(self.tables, gpu.name)
        rates = rates_of(device_or_nearest(gpu.name), problem.dtype, problem.precision)
        tables = [] if shipped is None else [shipped]
        model = learnt.shipped(gpu.name)
        return select.choose(problem, tables, rates, model, gpu)

    def shortlist(self, problem: Problem, gpu: Gpu) -> list[Config]:
        """The best few by the model learnt from trials of other shapes."""
        model, rates = learnt.shipped(gpu.name), rates_of(device_or_nearest(gpu.name), problem.dtype, problem.precision)
        if model is None or not model.speaks_for(problem):
            return []
        return select.ranked(problem, model, rates, gpu)[:SHORTLIST]

    def built_ins(self, problem: Problem) -> list[Config]:
        return libraries(problem)

    def bench(self, problem: Problem, device: torch.device, seed: int) -> MatmulBench:
        return MatmulBench(problem, device, seed=seed)

    def compiling(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Any, ...] | None:
        if config.kind not in TILE_KINDS:
            return None
        return compile_ahead, problem, config, gpu.multiprocessors, gpu.arch


TUNING = MatmulTuning()


def compile_ahead(problem: Problem, config: Config, multiprocessors: int, arch: int) -> str | None:
    """In a worker: compile what `prepare` will ask for, exactly, so that it finds it on disk."""
    from triton.backends.compiler import GPUTarget

    from tilemesh.kernels.launch.program import compile_step

    try:
        plan = tiles_plan(problem, config if arch >= 90 else replace(config, chained=False), multiprocessors)
        operands = operands_of(problem, plan.buffers)
        for step in plan.steps:
            compile_step(step, operands, GPUTarget("cuda", arch, 32))
    except Exception as error:
        return reason_of(error)
    return None
