"""Rows of any operator: ours beside what a user would write instead, kernel time and call time.

The prediction is made before anything is timed, every candidate is checked against float64, and candidates take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilemesh.bench.kernel.peers import other_peers
from tilemesh.core import calibration
from tilemesh.core.cost import Ceiling, Cost, limit_s
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import device_for
from tilemesh.kernels.launch.gpu import gpu_of
from tilemesh.kernels.operator_bench import EAGER, OURS, Arguments, OperatorBench
from tilemesh.measure.gpu import KernelTimer, call_timer, l2_cache_bytes, rotating_sets
from tilemesh.measure.machine import stamp, this_machine
from tilemesh.measure.row import Row
from tilemesh.measure.timing import Check, Timer, compare

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
    peers: Sequence[str] | None = None,
    repeats: int = 30,
    on: MeasuredDevice | None = None,
) -> list[Row]:
    """A row per shape (the operator's suite where none is given) and kind of time.

    compiled: also what torch.compile makes. peers: these alone, by the names of their columns. on: this GPU, unless
    given.
    """
    settings, shapes = settings or {}, shapes or bench.form.suite
    # Refused before anything is measured.
    problems = [bench.form.problem(shape, settings) for shape in shapes]
    candidates = [Candidates.of(bench, problem, compiled, peers) for problem in problems]
    on = this_gpu() if on is None else on
    rows = []
    for shape, problem, functions in zip(shapes, problems, candidates, strict=True):
        rows += PreparedCase(bench, problem, bench.form.case(shape, settings), functions, on).rows(repeats)
    return rows


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


class PreparedCase:
    """One problem with its inputs and candidates on a device: to be measured once, by `rows`."""

    def __init__(
        self,
        bench: OperatorBench[Any],
        problem: Any,
        case: dict[str, Any],
        candidates: Candidates,
        on: MeasuredDevice,
    ) -> None:
        self.bench, self.problem, self.on, self.overwriting = bench, problem, on, candidates.overwriting
        figures = device_for(on.name)
        self.chosen = bench.chosen(problem, on.device)
        # Before anything is timed.
        self.predicted = None if figures is None else bench.predict_s(problem, on.device, figures)
        self.limit, why = _limit(bench.form.cost(problem), on.name)
        self.missing = dict(candidates.missing)
        if self.limit is None:
            self.missing["limit"] = why
        # Rows of two ceilings in one chart or table must be told apart.
        self.case = {**case, "limit": why} if self.limit is not None and why else case
        self.sets = rotating_sets(
            lambda seed: bench.arguments(problem, on.device, seed), bench.bytes_held(problem), on.l2_bytes
        )
        self.functions = {name: bench.timed(problem, function) for name, function in candidates.compiled().items()}
        own_sets = [_copied(given) for given in self.sets] if self.overwriting & self.functions.keys() else []
        self.calls = {
            name: _on_sets(function, own_sets if name in self.overwriting else self.sets)
            for name, function in self.functions.items()
        }

    def warm(self) -> None:
        """Call every candidate once, which compiles what is to be compiled; one that fails is named by its row."""
        for call in self.calls.values():
            with suppress(Exception):
                call(0)

    def rows(self, repeats: int) -> list[Row]:
        """A row for each kind of time."""
        bench, rows = self.bench, []
        for figure, timer in self.on.timers.items():
            check = None
            if figure == "kernel":
                check = _check(bench, self.problem, self.functions, self.overwriting, self.sets, self.on)
            result = compare(
                self.calls, timer=timer, repeats=repeats, sets=len(self.sets), seconds=SECONDS, check=check
            )
            ours = result.get(OURS)
            if ours is None:
                raise RunError(f"{self.case['shape']}: {result.missing[OURS]}")
            without = {**self.missing, **{name: why for name, why in result.missing.items() if name != OURS}}
            if figure != "kernel":
                without["predicted"] = "the cost model is of kernel time"
            elif self.predicted is None:
                without["predicted"] = f"no figures for {self.on.name}"
            rows.append(
                Row(
                    name=bench.name, case={**self.case, "time": figure, **self.chosen}, unit="s",
                    predicted=self.predicted if figure == "kernel" else None, measured=ours, limit=self.limit,
                    peers={name: sample for name, sample in result.items() if name != OURS}, missing=without, **stamp(),
                )
            )  # fmt: skip
        return rows


def _on_sets(function: Callable[..., object], sets: Sequence[Arguments]) -> Callable[[int], object]:
    return lambda index: function(*sets[index])


def _copied(given: Arguments) -> Arguments:
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in given)


def _check(
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
        given = sets[index]
        if bench.in_place:
            given, result = (bench.arguments(problem, on.device, CHECKED_SEED) for _ in range(2))
            functions[name](*result)
        else:
            result = functions[name](*_copied(given)) if name in overwriting else result
            result = result[0] if isinstance(result, tuple) else result
            if not isinstance(result, Tensor):
                raise RunError(f"{name} is wrong: it returned {type(result).__name__}, expected a tensor")
        wrong = bench.wrong(problem, given, result)
        if wrong or (isinstance(result, Tensor) and not bool(result.isfinite().all())):
            raise RunError(f"{name} is wrong: {wrong or 'not finite'}")

    return Check(poison, verify)


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
