"""Rows for the fused matmul: ours beside what a user would write instead, kernel time and call time.

Peers: eager (three operators), addmm + relu_, torch.compile (default and max-autotune), cuBLASLt's own epilogue where
it applies. `a @ b` alone is measured too, as a reference for what fusion adds on top; it computes less, so it is no
peer but a column of its own name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tilemesh.core import calibration
from tilemesh.core.cost import Ceiling, limit_s
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import device_for
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.activations import reference as activations
from tilemesh.kernels.launch.gpu import gpu_of
from tilemesh.kernels.matmul import reference
from tilemesh.kernels.matmul.choose import choose
from tilemesh.kernels.matmul.cost import cost, device_or_nearest, predict_s, rates_of
from tilemesh.kernels.matmul.op import fused_matmul
from tilemesh.kernels.matmul.problem import Problem, dense
from tilemesh.kernels.matmul.trial import Inputs, allowed_error, checked_rows, exact_rows, input_bytes, make_inputs
from tilemesh.measure.gpu import KernelTimer, call_timer, rotating_sets
from tilemesh.measure.machine import stamp, this_machine
from tilemesh.measure.row import Row
from tilemesh.measure.timing import Check, compare

SUITE = (
    "512x512x512", "1024x1024x1024", "2048x2048x2048", "4096x4096x4096", "8192x8192x8192", "4096x11008x4096",
    "8192x8192x1024", "64x4096x4096", "16x8192x8192", "2049x2047x2051", "4096x4096x512", "128x28672x8192",
    "8192x128x8192", "3000x3000x3000",
)  # fmt: skip
ALONE = "a @ b alone"
COMPILED = ("compile", "compile max-autotune")

Progress = Callable[[int, int, str], None]


def parse_shape(text: str) -> tuple[int, int, int]:
    """MxNxK."""
    sides = text.lower().split("x")
    if len(sides) != 3 or not all(re.fullmatch("[1-9][0-9]{0,9}", side) for side in sides):
        raise UsageError(f"shape '{text}' is not understood: write MxNxK, as in 2048x2048x2048")
    return int(sides[0]), int(sides[1]), int(sides[2])


def bench_matmul(
    shapes: Sequence[str] = SUITE, *, dtype: str = "float16", c_kind: str = "full", activation: str = "relu",
    compiled: bool = True, repeats: int = 30, progress: Progress | None = None,
) -> list[Row]:  # fmt: skip
    """Two rows a shape: kernel time (graph replay) and call time (host loop)."""
    if not torch.cuda.is_available():
        raise UsageError(
            "bench kernel needs an NVIDIA GPU and torch with CUDA; here torch sees none "
            "(`tilemesh report ROWS.jsonl --html FILE` makes the page of rows measured elsewhere)"
        )
    rows = []
    for done, shape in enumerate(shapes):
        if progress:
            progress(done, len(shapes), f"{shape} {dtype}")
        problem = dense(*parse_shape(shape), dtype=dtype, c_kind=c_kind, activation=activation)
        rows += _rows(shape, problem, compiled, repeats)
    return rows


def _rows(shape: str, problem: Problem, compiled: bool, repeats: int) -> list[Row]:
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = choose(problem, "auto", None, device)
    gpu = gpu_of(device.index)
    rates = rates_of(device_or_nearest(gpu.name), problem.dtype, problem.precision)
    predicted = predict_s(problem, chosen, rates)  # before anything is timed
    sets = rotating_sets(lambda i: make_inputs(problem, device, i), input_bytes(problem))
    calls = _calls(problem, sets, compiled)
    missing = {} if compiled else dict.fromkeys(COMPILED, "left out: --no-compile")
    limit, why = _limit(problem, gpu.name)
    case = {"shape": shape, "dtype": problem.dtype, "c": problem.c_kind, "activation": problem.activation}
    if limit is not None and why:
        case["limit"] = why  # rows of two ceilings in one chart or table must be told apart
    rows = []
    for figure, timer in (("kernel", KernelTimer()), ("call", call_timer())):
        check = _check(problem, sets) if figure == "kernel" else None
        result = compare(calls, timer=timer, repeats=repeats, sets=len(sets), seconds=4.0, check=check)
        ours = result.get("ours")
        if ours is None:
            raise RunError(f"{shape}: {result.missing['ours']}")
        without = {**missing, **{name: why for name, why in result.missing.items() if name != "ours"}}
        if limit is None:
            without["limit"] = why
        if figure == "call":
            without["predicted"] = "the cost model is of kernel time"
        rows.append(
            Row(
                name="fused_matmul", case={**case, "time": figure, "config": chosen.label}, unit="s",
                predicted=predicted if figure == "kernel" else None, measured=ours, limit=limit,
                peers={name: sample for name, sample in result.items() if name != "ours"}, missing=without, **stamp(),
            )
        )  # fmt: skip
    return rows


def _calls(problem: Problem, sets: Sequence[Inputs], compiled: bool) -> dict[str, Callable[[int], object]]:
    activation = problem.activation

    def on(function: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Callable[[int], object]:
        return lambda index: function(sets[index].a, sets[index].b, sets[index].c)

    def eager(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
        return reference.fused_matmul(a, b, c, activation)

    calls = {"ours": on(lambda a, b, c: fused_matmul(a, b, c, activation=activation)), "eager": on(eager)}
    if problem.c is not None:
        in_place: dict[str, Callable[[Tensor], Tensor]] = {
            "relu": torch.relu_,
            "silu": partial(torch.nn.functional.silu, inplace=True),
        }
        after = in_place.get(activation, lambda x: activations.activate(x, activation))
        calls["addmm"] = on(lambda a, b, c: after(torch.addmm(_given(c), a, b)))
    if problem.c_kind == "row" and activation in ("relu", "gelu_tanh"):
        gelu = activation == "gelu_tanh"
        calls["cublaslt"] = on(lambda a, b, c: torch._addmm_activation(_given(c).reshape(-1), a, b, use_gelu=gelu))
    if compiled:
        torch._dynamo.reset()  # each shape is compiled for itself, not for a range of shapes
        calls["compile"] = on(torch.compile(eager, dynamic=False))
        calls["compile max-autotune"] = on(torch.compile(eager, mode="max-autotune-no-cudagraphs", dynamic=False))
    calls[ALONE] = on(lambda a, b, c: a @ b)
    return calls


def _given(c: Tensor | None) -> Tensor:
    assert c is not None
    return c


def _check(problem: Problem, sets: Sequence[Inputs]) -> Check:
    """Every candidate but `a @ b` alone must be within `allowed_error` of float64; outputs are poisoned."""

    def poison(name: str, result: object) -> None:
        if isinstance(result, Tensor):
            result.fill_(float("nan"))

    def verify(name: str, result: object, index: int) -> None:
        if name == ALONE or not isinstance(result, Tensor):
            return
        inputs = sets[index]
        rows = checked_rows(problem.m, result.device)
        exact = exact_rows(inputs, problem.activation, rows)
        wrong = excess(result[rows], exact, allowed_error(problem, inputs, rows, exact))
        if wrong or not bool(result.isfinite().all()):
            raise RunError(f"{name} is wrong: {wrong or 'not finite'}")

    return Check(poison, verify)


def _limit(problem: Problem, gpu_name: str) -> tuple[float | None, str]:
    """The least time this machine allows, as calibrated; else by its datasheet, with that word; else None and why."""
    found = calibration.find(this_machine().id)
    if found is not None:
        try:
            return limit_s(cost(problem), Ceiling.of_calibration(found, "gpu")), ""
        except UsageError:
            pass
    device = device_for(gpu_name)
    if device is None:
        return None, f"no figures for {gpu_name}: run tilemesh calibrate"
    return limit_s(cost(problem), Ceiling.of_device(device)), "datasheet"
