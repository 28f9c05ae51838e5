"""Rows of operators for a GPU that is not here: counted, predicted, checked by Triton's interpreter at a small size.

What a kernel computes and what it has to move do not depend on the machine; how long it takes does, and is not said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilemesh.bench.harness import Estimate, KeptRows, make_row
from tilemesh.bench.kernel.book import bench_of
from tilemesh.bench.kernel.cases import KernelCase
from tilemesh.bench.kernel.measure import MeasuredDevice, check_of
from tilemesh.core.cost import Ceiling, limit_s
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import CPU, find_device
from tilemesh.kernels import context, registry
from tilemesh.kernels.operator_bench import OURS, OperatorBench
from tilemesh.measure.row import Row
from tilemesh.measure.timing import reason_of

COUNTED = ("on", "checked", "bytes", "flops")
"""What a row's case has beside the problem."""
_MOST = 2**14  # product of the sizes that are interpreted, so that a check takes about a second
_LEAST = 16  # no size is made smaller: widths of heads, say


def counted_rows(
    cases: Sequence[KernelCase],
    gpu: str,
    *,
    progress: Callable[[int, KernelCase], None] = lambda done, case: None,
    rows: KeptRows | None = None,
) -> tuple[list[Row], dict[str, str]]:
    """A row for each case, without a measurement, and the cases that are wrong or cannot be counted, each with why."""
    device = find_device(gpu)
    if device is CPU:
        raise UsageError("--on cpu: kernels are counted for a GPU, as in --on h200")
    rows = KeptRows(None) if rows is None else rows
    without: dict[str, str] = {}
    for done, case in enumerate(cases):
        progress(done, case)
        bench = bench_of(registry.find(case.operator))
        problem = bench.form.problem(case.shape, case.settings)
        try:
            checked = _checked_shape(bench, case)
        except Exception as error:  # an operator of the user's own may fail in any way
            without[case.words] = reason_of(error)
            continue
        work = bench.form.cost(problem)
        labels = bench.form.case(case.shape, case.settings)
        labels |= dict(zip(COUNTED, (gpu, checked, work.bytes_moved, work.flops), strict=True))
        row = make_row(
            bench.name, labels, None, predicted=Estimate(bench.predict_s(problem, torch.device("cpu"), device)),
            limit=Estimate(limit_s(work, Ceiling.of_device(device))),
            missing={"measured": f"there is no GPU here: counted for {gpu}"}, no_peers="nothing was timed",
        )  # fmt: skip
        rows.add([row])
    if not rows:
        first = next(iter(without.items()))
        raise RunError(f"none of {len(cases)} cases could be counted; {first[0]}: {first[1]}")
    return rows, without


def _checked_shape(bench: OperatorBench[Any], case: KernelCase) -> str:
    """The shape at which the kernel's own code computes what it should, by the interpreter; RunError where it errs."""
    sizes = list(bench.form.parse_sizes(case.shape))
    while math.prod(sizes) > _MOST and max(sizes) > _LEAST:
        largest = sizes.index(max(sizes))
        sizes[largest] = max(_LEAST, (sizes[largest] + 1) // 2)
    shape = "x".join(map(str, sizes))
    problem = bench.form.problem(shape, case.settings)
    here = MeasuredDevice(torch.device("cpu"), "", 0, {})
    arguments = bench.arguments(problem, here.device, 0)
    with context.use(context.Context(on_cpu="interpret")):
        function = bench.timed(problem, bench.calls(problem)[OURS])
        result = None if bench.in_place else function(*arguments)
        check_of(bench, problem, {OURS: function}, frozenset(), [arguments], here).verify(OURS, result, 0)
    return shape
