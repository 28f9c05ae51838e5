"""Rows of many cases, one after the other: what fails is named and the others go on, and time may run out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from tilemesh.bench.harness import BenchCase, KeptRows, TimingTurn
from tilemesh.bench.kernel.book import bench_of
from tilemesh.bench.kernel.cases import KernelCase
from tilemesh.bench.kernel.measure import Candidates, MeasuredDevice, peer_names, prepared_cases, this_gpu
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.kernels import registry
from tilemesh.kernels.operator_bench import OperatorBench
from tilemesh.measure.row import Row
from tilemesh.measure.timing import reason_of

TIMES = ("kernel", "call")


def measure_cases(
    cases: Sequence[KernelCase],
    *,
    compiled: bool = True,
    peers: Sequence[str] | None = None,
    times: Sequence[str] = TIMES,
    repeats: int = 30,
    seconds: float | None = None,
    progress: Callable[[int, KernelCase], None] = lambda done, case: None,
    rows: KeptRows | None = None,
    on: MeasuredDevice | None = None,
    turn: TimingTurn | None = None,
) -> tuple[list[Row], dict[str, str]]:
    """Rows, and the cases without any, each with the reason.

    compiled: also what torch.compile makes. peers: these alone, by the names of their columns. seconds: after so many
    no further case begins. rows: where they are put, case by case. on: this GPU, unless given. turn: all cases compile
    first, and are timed while no other process is.
    """
    for figure in times:
        if figure not in TIMES:
            raise unknown("kind of time", figure, TIMES)
    if seconds is not None and seconds <= 0:
        raise UsageError(f"--seconds {seconds:g}: expected more than 0")
    benches = {case.operator: bench_of(registry.find(case.operator)) for case in cases}
    problems = {case.words: benches[case.operator].form.problem(case.shape, case.settings) for case in cases}
    if peers is not None:
        _check_peers(peers, benches, [(case.operator, problems[case.words]) for case in cases])
    on = this_gpu() if on is None else on
    on = replace(on, timers={figure: timer for figure, timer in on.timers.items() if figure in times})
    rows = KeptRows(None) if rows is None else rows
    without: dict[str, str] = {}
    end = None if seconds is None else time.monotonic() + seconds

    def prepared(case: KernelCase) -> list[BenchCase]:
        bench, problem = benches[case.operator], problems[case.words]
        candidates = Candidates.of(bench, problem, compiled, peers)
        return prepared_cases(bench, problem, bench.form.case(case.shape, case.settings), candidates, on, repeats)

    ready = {} if turn is None else {case.words: _warmed(prepared, case, without) for case in cases}
    with nullcontext() if turn is None else turn.alone():
        for done, case in enumerate(cases):
            if end is not None and time.monotonic() > end:
                without[case.words] = "the time was up"
            if case.words in without:
                continue
            progress(done, case)
            try:
                rows.add([figure.measure() for figure in ready.pop(case.words, None) or prepared(case)])
            except Exception as error:  # of torch, a driver or a peer's compiler; the other cases are worth having
                if len(cases) == 1:
                    raise
                without[case.words] = reason_of(error)
    if not rows:
        first = next(iter(without.items()))
        raise RunError(f"none of {len(cases)} cases could be measured; {first[0]}: {first[1]}")
    return rows, without


def _warmed(
    prepared: Callable[[KernelCase], list[BenchCase]], case: KernelCase, without: dict[str, str]
) -> list[BenchCase] | None:
    try:
        ready = prepared(case)
        ready[0].warm()  # the others have the same calls
        return ready
    except Exception as error:
        without[case.words] = reason_of(error)
        return None


def _check_peers(
    peers: Sequence[str], benches: Mapping[str, OperatorBench[Any]], problems: Sequence[tuple[str, Any]]
) -> None:
    """Refuse a peer that no problem has."""
    has = [peer_names(benches[operator], problem) for operator, problem in problems]
    absent = [] if torch.cuda.is_available() else [name for bench in benches.values() for name in bench.gpu_peers]
    for name in peers:
        if not any(name in names for names in has):
            if name in absent:
                raise UsageError(f"--peers {name}: this peer needs a GPU, and torch sees none here")
            raise unknown("peer", name, dict.fromkeys([*(name for names in has for name in names), *absent]))
