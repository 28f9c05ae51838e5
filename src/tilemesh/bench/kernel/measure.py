"""Rows of any operator: ours beside what a user would write instead, kernel time and call time.

The prediction is made before anything is timed, every candidate is checked against float64, and candidates take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilemesh.bench.harness import BenchCase, Estimate
from tilemesh.bench.kernel.peers import other_peers
from tilemesh.core import calibration
from tilemesh.core.cost import Ceiling, Cost, limit_s
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import device_for
from tilemesh.kernels.launch.gpu import gpu_of
from tilemesh.kernels.launch.native import NATIVE
from tilemesh.kernels.operator_bench import EAGER, OURS, Arguments, OperatorBench
from tilemesh.measure.gpu import KernelTimer, call_timer, l2_cache_bytes, rotating_sets
from tilemesh.measure.machine import this_machine
from tilemesh.measure.row import CaseValue
from tilemesh.measure.timing import Check, Timer

SECONDS = 4.0  # of readings for a row, at most
CHECKED_SEED = 1_000_003  # of arguments that no candidate has changed


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
            "bench kernel times on an NVIDIA GPU, and torch sees none here; --on h200 checks by the interpreter, "
            "counts and predicts (`tilemesh report ROWS.jsonl --html FILE`: the page of rows measured elsewhere)"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    timers: dict[str, Timer] = {"kernel": KernelTimer(), "call": call_timer()}
    return MeasuredDevice(device, gpu_of(device.index).name, l2_cache_bytes(), timers)


def peer_names(bench: OperatorBench[Any], problem: Any) -> list[str]:
    """Columns that rows of this problem may have beside ours, in their order; what computes less comes last."""
    calls = bench.calls(problem)
    first = [name for name in calls if name not in (OURS, *bench.no_peers)]
    others = other_peers(bench.name, getattr(problem, "options", {}))
    return [*first, *bench.compile_modes, *others, *(name for name in bench.no_peers if name in calls)]


@dataclass(frozen=True)
class Candidates:
    """What is timed for one problem: functions of its arguments by name, ours first, and why others are not there.

    modes: of those that torch.compile makes, which is done once their turn has come. overwriting: those that may change
    tensors that others are given too.
    """

    functions: Mapping[str, Callable[..., Any]]
    modes: Mapping[str, str | None]
    overwriting: frozenset[str]
    missing: Mapping[str, str]

    @classmethod
    def of(cls, bench: OperatorBench[Any], problem: Any, compiled: bool, wanted: Sequence[str] | None) -> Candidates:
        calls, others = bench.calls(problem), other_peers(bench.name, getattr(problem, "options", {}))
        order = [OURS, *peer_names(bench, problem)]
        missing = {name: peer.why for name, peer in others.items() if peer.call is None}
        if not compiled:
            missing |= dict.fromkeys(bench.compile_modes, "left out: --no-compile")
        if wanted is not None:
            missing |= {name: "left out: --peers" for name in order if name not in (OURS, *wanted)}
            absent = [name for name in wanted if name not in order]
            missing |= dict.fromkeys(absent, f"{bench.name} has no such peer for this problem")
        functions = calls | dict.fromkeys(bench.compile_modes, calls[EAGER])
        functions |= {name: peer.call for name, peer in others.items() if peer.call is not None}
        chosen = {name: functions[name] for name in order if name not in missing}
        return cls(chosen, bench.compile_modes, frozenset(others), missing)

    def compiled(self) -> dict[str, Callable[..., Any]]:
        """The functions, each compiled for this problem alone where torch.compile is to."""
        if not self.modes.keys() & self.functions.keys():
            return dict(self.functions)  # torch.compile's packages take seconds to load
        torch._dynamo.reset()
        return {
            name: torch.compile(function, mode=self.modes[name], dynamic=False) if name in self.modes else function
            for name, function in self.functions.items()
        }


def prepared_cases(
    bench: OperatorBench[Any],
    problem: Any,
    labels: Mapping[str, CaseValue],
    candidates: Candidates,
    on: MeasuredDevice,
    repeats: int,
) -> list[BenchCase]:
    """One problem with its inputs and candidates on a device: a case for each kind of time."""
    if "call" in on.timers and labels.get("passes") == "both" and NATIVE.functions is None and not NATIVE.why_not:
        NATIVE.load()  # a minute the first time; calls would go by Python meanwhile
    figures, chosen = device_for(on.name), bench.chosen(problem, on.device)
    guess = Estimate(None, f"no figures for {on.name}")
    if figures is not None:
        guess = Estimate(bench.predict_s(problem, on.device, figures))
    limit = Estimate(*_limit(bench.form.cost(problem), on.name))
    # Rows of two ceilings in one chart or table must be told apart.
    ceiling = {"limit": limit.why} if limit.value is not None and limit.why else {}
    sets = rotating_sets(lambda seed: bench.arguments(problem, on.device, seed), bench.bytes_held(problem), on.l2_bytes)
    functions = {name: bench.timed(problem, function) for name, function in candidates.compiled().items()}
    own_sets = [_copied(arguments) for arguments in sets] if candidates.overwriting & functions.keys() else []
    calls = {
        name: _on_sets(function, own_sets if name in candidates.overwriting else sets)
        for name, function in functions.items()
    }
    ours = calls.pop(OURS)
    check = _once(check_of(bench, problem, functions, candidates.overwriting, sets, on))
    not_predicted = Estimate(None, "the cost model is of kernel time")
    return [
        BenchCase(
            name=bench.name, labels={**labels, **ceiling, "time": figure, **chosen}, ours=ours,
            peers={**calls, **candidates.missing}, predict=guess if figure == "kernel" else not_predicted, limit=limit,
            check=check, timer=timer, sets=len(sets), repeats=repeats, seconds=SECONDS,
        )
        for figure, timer in on.timers.items()
    ]  # fmt: skip


def _on_sets(function: Callable[..., object], sets: Sequence[Arguments]) -> Callable[[int], object]:
    return lambda index: function(*sets[index])


def _copied(arguments: Arguments) -> Arguments:
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)


def check_of(
    bench: OperatorBench[Any],
    problem: Any,
    functions: Mapping[str, Callable[..., Any]],
    overwriting: Set[str],
    sets: Sequence[Arguments],
    on: MeasuredDevice,
) -> Check:
    """Every candidate that computes the same is compared with float64; results are filled with NaN in between.

    What changes its arguments is called once more, on arguments that nobody has changed.
    """

    def poison(name: str, result: object) -> None:
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and name not in overwriting:  # it may share memory with its arguments
                tensor.fill_(float("nan"))

    def verify(name: str, result: Any, index: int) -> None:
        if name in bench.no_peers:
            return
        arguments = sets[index]
        if bench.in_place:
            arguments, result = (bench.arguments(problem, on.device, CHECKED_SEED) for _ in range(2))
            functions[name](*result)
        else:
            result = functions[name](*_copied(arguments)) if name in overwriting else result
            result = result[0] if isinstance(result, tuple) else result
            if not isinstance(result, Tensor):
                raise RunError(f"{name} is wrong: it returned {type(result).__name__}, expected a tensor")
        wrong = bench.wrong(problem, arguments, result)
        if wrong or (isinstance(result, Tensor) and not bool(result.isfinite().all())):
            raise RunError(f"{name} is wrong: {wrong or 'not finite'}")

    return Check(poison, verify)


def _once(check: Check) -> Check:
    """Looks at each candidate where it is first timed; what is wrong there is no candidate for another kind of time."""
    wrong: dict[str, RunError | None] = {}

    def verify(name: str, result: object, index: int) -> None:
        if name not in wrong:
            try:
                check.verify(name, result, index)
                wrong[name] = None
            except RunError as error:
                wrong[name] = error
        if (failure := wrong[name]) is not None:
            raise failure

    return Check(check.poison, verify)


def _limit(work: Cost, device_name: str) -> tuple[float | None, str]:
    """The least time this machine allows, as calibrated; else by its datasheet, with that word; else None and why."""
    known = calibration.find(this_machine().id)
    if known is not None:
        try:
            return limit_s(work, Ceiling.of_calibration(known, "gpu")), ""
        except UsageError:
            pass
    device = device_for(device_name)
    if device is None:
        return None, f"no figures for {device_name}: run tilemesh calibrate"
    return limit_s(work, Ceiling.of_device(device)), "datasheet"
