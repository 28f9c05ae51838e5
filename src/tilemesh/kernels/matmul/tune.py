"""Tuning one problem on this GPU: search the grid, time the finalists again beside the built-ins, keep the winner.

The finalists meet fresh inputs, interleaved with the library, three plain operators and what `auto` would take untuned:
if one of those wins there, it is the answer, so tuning never makes a call slower. Nothing here decides
when to tune; `ops` (TILEMESH_TUNE) and the command line do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch

from tilemesh.core.errors import RunError, UsageError
from tilemesh.kernels.matmul import cache, search, select
from tilemesh.kernels.matmul.cache import Entry
from tilemesh.kernels.matmul.config import Config, FitError, libraries, space
from tilemesh.kernels.matmul.cost import Rates, device_or_nearest, predict_s, rates_of
from tilemesh.kernels.matmul.problem import Problem
from tilemesh.kernels.matmul.run import Gpu, device_index, gpu_of
from tilemesh.kernels.matmul.trial import Bench, Compiler
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import compare

SHARE = 4  # a quarter of the grid is tried
FINALISTS = 4
FINAL_ROUNDS = 20

# done, total, what is being timed
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Tuned:
    """What tuning found: the winner, the finalists' times on fresh inputs, and how much of the grid was tried."""

    problem: Problem
    config: Config
    finals: dict[str, Sample]
    grid: int
    trials: tuple[search.Tried, ...]
    """Every configuration that was timed, in the order it was."""

    @property
    def tried(self) -> int:
        return len(self.trials)

    @property
    def entry(self) -> Entry:
        library = self.finals.get("library")
        return Entry(self.config, self.finals[self.config.label].median, library.median if library else None)


def tune(
    problem: Problem, device: torch.device, *, compiler: Compiler | None = None, progress: Progress | None = None
) -> Tuned:
    """Search, then decide among the finalists. Takes seconds with a compiler pool, about a minute without."""
    if 0 in (problem.m, problem.n, problem.k) or problem.element_bytes != 2:
        raise UsageError(f"{problem.key}: only non-empty float16 and bfloat16 problems are tuned")
    gpu = gpu_of(device_index(device))
    rates = rates_of(device_or_nearest(gpu.name), problem.dtype, problem.precision)
    grid = [c for c in space(problem, shared_limit=gpu.shared_bytes) if gpu.runs(c.kind)]
    budget = max(8, len(grid) // SHARE)
    hopeful = search.prune(grid, [predict_s(problem, config, rates) for config in grid])
    with _own(compiler, device) as pool:
        bench = Bench(problem, device)
        trials = search.search(
            hopeful, lambda c: predict_s(problem, c, rates), _measure(bench, pool, budget, progress), budget
        )
        del bench
        finals = _finals(problem, device, trials, _untuned(problem, gpu, rates), progress)
    if not finals:
        raise RunError(f"{problem.key}: no configuration ran on {gpu.name}; run with --debug for the reasons")
    return Tuned(problem, _winner(finals), {c.label: sample for c, sample in finals.items()}, len(grid), tuple(trials))


def tune_problem(problem: Problem, device: torch.device) -> Entry:
    """Tune from inside a user's program and remember the result on disk; compiles in this process, one by one."""
    from tilemesh.kernels.matmul.choice import versions

    with Compiler(device, workers=0) as pool:
        entry = tune(problem, device, compiler=pool).entry
    try:
        cache.store(gpu_of(device_index(device)).name, versions(), {problem.key: entry})
    except OSError as error:  # a full or read-only disk costs the next process a tuning, not this one its result
        warnings.warn(f"what was tuned for {problem.key} could not be remembered: {error}", stacklevel=2)
    return entry


def _own(compiler: Compiler | None, device: torch.device) -> AbstractContextManager[Compiler]:
    return Compiler(device) if compiler is None else nullcontext(compiler)


def _measure(
    bench: Bench, compiler: Compiler, budget: int, progress: Progress | None
) -> Callable[[Sequence[Config]], list[float]]:
    done = 0

    def measure(batch: Sequence[Config]) -> list[float]:
        nonlocal done
        failures = compiler.ahead([(bench.problem, config) for config in batch])
        seconds = []
        for config in batch:
            if progress:
                progress(done, budget, config.label)
            failed = (bench.problem.key, config) in failures
            seconds.append(float("inf") if failed else bench.time(config).seconds)
            done += 1
        return seconds

    return measure


def _untuned(problem: Problem, gpu: Gpu, rates: Rates) -> Config:
    """What `auto` takes where the user tuned nothing: the table that travels with the package may know a better one."""
    tables = [table] if (table := cache.shipped(gpu.name)) else []
    return select.choose(problem, tables, rates, tma=gpu.tma, hopper=gpu.hopper, shared_limit=gpu.shared_bytes)


def _finals(
    problem: Problem, device: torch.device, trials: Sequence[search.Tried], untuned: Config, progress: Progress | None
) -> dict[Config, Sample]:
    """The best of the search against the built-ins, on inputs none of them has seen."""
    ranked = sorted((trial for trial in trials if trial.seconds != float("inf")), key=lambda trial: trial.seconds)
    best = (trial.config for trial in ranked[:FINALISTS])
    configs = list(dict.fromkeys([*best, untuned, *libraries(problem), Config("torch")]))
    bench = Bench(problem, device, seed=1)
    calls = {}
    for config in configs:
        with suppress(FitError):  # the untuned choice was never tried here
            calls[config.label] = bench.call(bench.runner(config))
    if progress:
        progress(len(trials), len(trials), "finalists and built-ins")
    result = compare(calls, timer=bench.timer, repeats=FINAL_ROUNDS, sets=len(bench.sets))
    return {config: result[config.label] for config in configs if config.label in result}


def _winner(finals: dict[Config, Sample]) -> Config:
    """The lowest median; three plain operators only when nothing else ran."""
    offered = {config: sample for config, sample in finals.items() if config.kind != "torch"} or finals
    return min(offered, key=lambda config: offered[config].median)
