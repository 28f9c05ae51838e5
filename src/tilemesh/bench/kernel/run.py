"""Rows of many cases, one after the other: what fails is named and the others go on, and time may run out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tilemesh.bench.kernel.book import bench_of
from tilemesh.bench.kernel.cases import KernelCase
from tilemesh.bench.kernel.measure import MeasuredDevice, bench_rows, peer_names, this_gpu
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.kernels import registry
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
    keep: Callable[[list[Row]], None] = lambda rows: None,
    on: MeasuredDevice | None = None,
) -> tuple[list[Row], dict[str, str]]:
    """Rows, and the cases without any, each with the reason.

    seconds: after so many no further case begins. keep: is given all rows so far, after each case. on: this GPU, unless
    given. The rest as for `bench_rows`.
    """
    for figure in times:
        if figure not in TIMES:
            raise unknown("kind of time", figure, TIMES)
    if seconds is not None and seconds <= 0:
        raise UsageError(f"--seconds {seconds:g}: expected more than 0")
    benches = {case.operator: bench_of(registry.find(case.operator)) for case in cases}
    problems = [benches[case.operator].form.problem(case.shape, case.settings) for case in cases]
    if peers is not None:
        has = [peer_names(benches[case.operator], problem) for case, problem in zip(cases, problems, strict=True)]
        absent = [] if torch.cuda.is_available() else [name for bench in benches.values() for name in bench.gpu_peers]
        for name in peers:
            if not any(name in names for names in has):
                if name in absent:
                    raise UsageError(f"--peers {name}: this peer needs a GPU, and torch sees none here")
                raise unknown("peer", name, dict.fromkeys([*(name for names in has for name in names), *absent]))
    on = this_gpu() if on is None else on
    on = replace(on, timers={figure: timer for figure, timer in on.timers.items() if figure in times})
    rows: list[Row] = []
    without: dict[str, str] = {}
    end = None if seconds is None else time.monotonic() + seconds
    for done, case in enumerate(cases):
        if end is not None and time.monotonic() > end:
            without[case.words] = "the time was up"
            continue
        progress(done, case)
        try:
            rows += bench_rows(
                benches[case.operator], [case.shape], case.settings, compiled=compiled, peers=peers, repeats=repeats,
                on=on,
            )  # fmt: skip
        except Exception as error:  # of torch, a driver or a peer's compiler; the other cases are worth having
            if len(cases) == 1:
                raise
            without[case.words] = reason_of(error)
        keep(rows)
    if not rows:
        first = next(iter(without.items()))
        raise RunError(f"none of {len(cases)} cases could be measured; {first[0]}: {first[1]}")
    return rows, without
