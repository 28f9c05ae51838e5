"""Rows of any operator: ours beside what a user would write instead, kernel time and call time.

The prediction is made before anything is timed, every candidate is checked against float64, and candidates take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilemesh.core import calibration
from tilemesh.core.cost import Ceiling, Cost, limit_s
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import device_for
from tilemesh.kernels.bench.operator import EAGER, OURS, Arguments, OperatorBench
from tilemesh.kernels.launch.gpu import gpu_of
from tilemesh.measure.gpu import KernelTimer, call_timer, l2_cache_bytes, rotating_sets
from tilemesh.measure.machine import stamp, this_machine
from tilemesh.measure.row import Row
from tilemesh.measure.timing import Check, Timer, compare

SECONDS = 4.0  # of readings for a row, at most

# done, total, what is being timed
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class MeasuredDevice:
    """Where rows are measured: the device, its name in datasheets, its L2, and a timer for each kind of time."""

    device: torch.device
    name: str
    l2_bytes: int
    timers: Mapping[str, Timer]


def this_gpu() -> MeasuredDevice:
    if not torch.cuda.is_available():
        raise UsageError(
            "bench kernel needs an NVIDIA GPU and torch with CUDA; here torch sees none "
            "(`tilemesh report ROWS.jsonl --html FILE` makes the page of rows measured elsewhere)"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    timers: dict[str, Timer] = {"kernel": KernelTimer(), "call": call_timer()}
    return MeasuredDevice(device, gpu_of(device.index).name, l2_cache_bytes(), timers)


def bench_rows(
    bench: OperatorBench[Any],
    shapes: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    *,
    compiled: bool = True,
    repeats: int = 30,
    progress: Progress | None = None,
    on: MeasuredDevice | None = None,
) -> list[Row]:
    """A row per shape (the operator's suite where none is given) and kind of time. `on`: this GPU, unless given."""
    settings, shapes = settings or {}, shapes or bench.form.suite
    problems = [bench.form.problem(shape, settings) for shape in shapes]  # refused before anything is measured
    on = this_gpu() if on is None else on
    rows = []
    for done, (shape, problem) in enumerate(zip(shapes, problems, strict=True)):
        case = bench.form.case(shape, settings)
        if progress:
            progress(done, len(shapes), f"{shape} {case['dtype']}")
        rows += _rows(bench, problem, case, on, compiled=compiled, repeats=repeats)
    return rows


def _rows(
    bench: OperatorBench[Any], problem: Any, case: dict[str, Any], on: MeasuredDevice, *, compiled: bool, repeats: int
) -> list[Row]:
    chosen, figures = bench.chosen(problem, on.device), device_for(on.name)
    predicted = None if figures is None else bench.predict_s(problem, on.device, figures)  # before anything is timed
    limit, why = _limit(bench.form.cost(problem), on.name)
    missing = {} if compiled else dict.fromkeys(bench.compile_modes, "left out: --no-compile")
    if limit is None:
        missing["limit"] = why
    elif why:
        case = {**case, "limit": why}  # rows of two ceilings in one chart or table must be told apart
    sets = rotating_sets(lambda seed: bench.arguments(problem, on.device, seed), bench.bytes_held(problem), on.l2_bytes)
    calls = _calls(bench, problem, sets, compiled)
    rows = []
    for figure, timer in on.timers.items():
        check = _check(bench, problem, sets, on.device) if figure == "kernel" else None
        result = compare(calls, timer=timer, repeats=repeats, sets=len(sets), seconds=SECONDS, check=check)
        ours = result.get(OURS)
        if ours is None:
            raise RunError(f"{case['shape']}: {result.missing[OURS]}")
        without = {**missing, **{name: why for name, why in result.missing.items() if name != OURS}}
        if figure != "kernel":
            without["predicted"] = "the cost model is of kernel time"
        elif predicted is None:
            without["predicted"] = f"no figures for {on.name}"
        rows.append(
            Row(
                name=bench.name, case={**case, "time": figure, **chosen}, unit="s",
                predicted=predicted if figure == "kernel" else None, measured=ours, limit=limit,
                peers={name: sample for name, sample in result.items() if name != OURS}, missing=without, **stamp(),
            )
        )  # fmt: skip
    return rows


def _calls(
    bench: OperatorBench[Any], problem: Any, sets: Sequence[Arguments], compiled: bool
) -> dict[str, Callable[[int], object]]:
    functions = bench.calls(problem)
    plain = {name: function for name, function in functions.items() if name not in bench.no_peers}
    if compiled:
        torch._dynamo.reset()  # each shape is compiled for itself, not for a range of shapes
        for name, mode in bench.compile_modes.items():
            plain[name] = torch.compile(functions[EAGER], mode=mode, dynamic=False)
    plain |= {name: functions[name] for name in bench.no_peers if name in functions}

    def on_sets(function: Callable[..., object]) -> Callable[[int], object]:
        return lambda index: function(*sets[index])

    return {name: on_sets(bench.timed(problem, function)) for name, function in plain.items()}


def _check(bench: OperatorBench[Any], problem: Any, sets: Sequence[Arguments], device: torch.device) -> Check:
    """Every candidate that computes the same is compared with float64; results are filled with NaN in between."""
    functions = bench.calls(problem)

    def poison(name: str, result: object) -> None:
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                tensor.fill_(float("nan"))

    def verify(name: str, result: object, index: int) -> None:
        result = result[0] if isinstance(result, tuple) else result
        if name in bench.no_peers:
            return
        if not isinstance(result, Tensor):
            wrong = bench.wrong_in_place(problem, functions[name], device) if name in functions else None
            if wrong:
                raise RunError(f"{name} is wrong: {wrong}")
            return
        wrong = bench.wrong(problem, sets[index], result)
        if wrong or not bool(result.isfinite().all()):
            raise RunError(f"{name} is wrong: {wrong or 'not finite'}")

    return Check(poison, verify)


def _limit(work: Cost, device_name: str) -> tuple[float | None, str]:
    """The least time this machine allows, as calibrated; else by its datasheet, with that word; else None and why."""
    found = calibration.find(this_machine().id)
    if found is not None:
        try:
            return limit_s(work, Ceiling.of_calibration(found, "gpu")), ""
        except UsageError:
            pass
    device = device_for(device_name)
    if device is None:
        return None, f"no figures for {device_name}: run tilemesh calibrate"
    return limit_s(work, Ceiling.of_device(device)), "datasheet"
