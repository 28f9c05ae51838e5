"""Tuning one problem on this GPU: search the grid, time the finalists again beside the built-ins, keep the winner.

The finalists meet fresh inputs, interleaved with the built-ins and what `auto` would take untuned: if one of those wins
there, it is the answer, so tuning never makes a call slower. Nothing here decides when to tune; `choose.should_tune`
(TILEMESH_TUNE) and the command line do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Generic

import torch

from tilemesh.core.errors import RunError, UsageError
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.steps import FitError
from tilemesh.kernels.tuning import search
from tilemesh.kernels.tuning.compiler import Compiler
from tilemesh.kernels.tuning.operator import Tunable
from tilemesh.kernels.tuning.table import TunedEntry, versions
from tilemesh.kernels.tuning.trial import ConfigTimer
from tilemesh.kernels.tuning.values import ConfigurationT, ProblemT
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import compare

SHARE = 4  # a quarter of the grid is tried
FINALISTS = 4
FINAL_ROUNDS = 20

# done, total, what is being timed
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Tuned(Generic[ConfigurationT]):
    """What tuning found: the winner, the finalists' times on fresh inputs, and how much of the grid was tried."""

    problem: Any
    config: ConfigurationT
    finals: dict[str, Sample]
    grid: int
    trials: tuple[search.Tried[ConfigurationT], ...]
    """Every configuration that was timed, in the order it was."""

    @property
    def tried(self) -> int:
        return len(self.trials)

    @property
    def entry(self) -> TunedEntry[ConfigurationT]:
        library = self.finals.get("library")
        return TunedEntry(self.config, self.finals[self.config.label].median, library.median if library else None)


def tune(
    operator: Tunable[ProblemT, ConfigurationT],
    problem: ProblemT,
    device: torch.device,
    *,
    compiler: Compiler | None = None,
    progress: Progress | None = None,
) -> Tuned[ConfigurationT]:
    """Search, then decide among the finalists. Takes seconds with a compiler pool, about a minute without."""
    if reason := operator.refusal(problem):
        raise UsageError(f"{problem.key}: {reason}")
    gpu = gpu_of(device_index(device))
    predict_s = operator.predict_s(problem, gpu)
    grid = operator.grid(problem, gpu)
    budget = max(8, len(grid) // SHARE)
    hopeful = search.prune(grid, [predict_s(config) for config in grid])
    with _own(compiler, device) as pool:
        bench = operator.bench(problem, device, 0)
        measure = _measure(operator, problem, bench, pool, budget, progress)
        trials = search.search(hopeful, predict_s, measure, budget, operator.features)
        del bench, measure  # their inputs, before the finalists' are made
    ranked = sorted((trial for trial in trials if trial.seconds != float("inf")), key=lambda trial: trial.seconds)
    best = [trial.config for trial in ranked[:FINALISTS]]
    return _decide(operator, problem, device, best, trials, len(grid), progress)


def _decide(
    operator: Tunable[ProblemT, ConfigurationT],
    problem: ProblemT,
    device: torch.device,
    best: Sequence[ConfigurationT],
    trials: Sequence[search.Tried[ConfigurationT]],
    grid: int,
    progress: Progress | None,
) -> Tuned[ConfigurationT]:
    gpu = gpu_of(device_index(device))
    if progress:
        progress(len(trials), len(trials), "finalists and built-ins")
    finals = _finals(operator, problem, device, [*best, operator.untuned(problem, gpu)])
    if not finals:
        raise RunError(f"{problem.key}: no configuration ran on {gpu.name}; run with --debug for the reasons")
    winner = _winner(operator, finals)
    return Tuned(problem, winner, {c.label: sample for c, sample in finals.items()}, grid, tuple(trials))


def tune_now(
    operator: Tunable[ProblemT, ConfigurationT], problem: ProblemT, device: torch.device
) -> TunedEntry[ConfigurationT]:
    """Tune from inside a user's program and remember the result on disk; compiles in this process, one by one.

    Where a model learnt from other problems names the few that may win, only those are timed: seconds, not a minute.
    """
    if few := operator.shortlist(problem, gpu_of(device_index(device))):
        entry = _decide(operator, problem, device, few, (), 0, None).entry
    else:
        with Compiler(device, workers=0) as pool:
            entry = tune(operator, problem, device, compiler=pool).entry
    try:
        operator.tables.add(gpu_of(device_index(device)).name, versions(), {problem.key: entry})
    except OSError as error:  # a full or read-only disk costs the next process a tuning, not this one its result
        warnings.warn(f"what was tuned for {problem.key} could not be remembered: {error}", stacklevel=2)
    return entry


def _own(compiler: Compiler | None, device: torch.device) -> AbstractContextManager[Compiler]:
    return Compiler(device) if compiler is None else nullcontext(compiler)


def _measure(
    operator: Tunable[ProblemT, ConfigurationT],
    problem: ProblemT,
    bench: ConfigTimer[ConfigurationT],
    compiler: Compiler,
    budget: int,
    progress: Progress | None,
) -> Callable[[Sequence[ConfigurationT]], list[float]]:
    done = 0

    def measure(batch: Sequence[ConfigurationT]) -> list[float]:
        nonlocal done
        failures = compiler.ahead(operator, [(problem, config) for config in batch])
        seconds = []
        for config in batch:
            if progress:
                progress(done, budget, config.label)
            failed = (problem.key, config) in failures
            seconds.append(float("inf") if failed else bench.time(config).seconds)
            done += 1
        return seconds

    return measure


def _finals(
    operator: Tunable[ProblemT, ConfigurationT],
    problem: ProblemT,
    device: torch.device,
    best: Sequence[ConfigurationT],
) -> dict[ConfigurationT, Sample]:
    """The best of the search against the built-ins, on inputs none of them has seen."""
    configs = list(dict.fromkeys([*best, *operator.built_ins(problem), operator.last_resort]))
    bench = operator.bench(problem, device, 1)
    calls = {}
    for config in configs:
        with suppress(FitError):  # the untuned choice was never tried here
            runner = bench.runner(config)
            if bench.wrong(runner) is None:
                calls[config.label] = bench.call(runner)
    result = compare(calls, timer=bench.timer, repeats=FINAL_ROUNDS, sets=len(bench.sets))
    return {config: result[config.label] for config in configs if config.label in result}


def _winner(operator: Tunable[ProblemT, ConfigurationT], finals: dict[ConfigurationT, Sample]) -> ConfigurationT:
    """The lowest median; the last resort only when nothing else ran."""
    offered = {config: sample for config, sample in finals.items() if config != operator.last_resort} or finals
    return min(offered, key=lambda config: offered[config].median)
