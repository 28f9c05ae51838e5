"""Others' logs and profiles as what a run of ours leaves: seconds of its steps, the fullest rank's memory, where time
went. `plan/grade.py` then puts them beside their prediction.

The one idea: a log is a pattern with named groups, read line by line, and three ways to say how long a step took. A
profile of `torch.profiler` is intervals: what computes, what exchanges while nothing computes, and what is neither.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.runs.values import number

_GIB = 1 << 30
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MOST_BYTES = 4 << 30
TRAINER_STATE = "trainer_state.json"
PROFILE = "kineto"
"""What a trace of torch.profiler is called where an engine's name stands."""
COMPUTE, EXCHANGE, WAITING, DATA = "computing", "exposed exchange", "waiting", "loading data"
"""Parts of a step that a profile shows; data are loaded on the host, beside the others."""


class LogFormat(NamedTuple):
    """How an engine says what a step took. Groups: `ms`, `tokens` (per second and device) or `samples` (per second)."""

    engine: str
    """Whose layouts it runs (`tables.py`)."""
    line: re.Pattern[str]
    memory: re.Pattern[str]
    memory_unit: int
    skipped: int
    """Readings at the beginning that hold what is done once."""


FORMATS: Mapping[str, LogFormat] = {
    # torchtitan 0.3.0, components/metrics.py: memory is what the allocator reserved, at most.
    "torchtitan": LogFormat(
        "torchtitan", re.compile(r"step: *\d+ .*tps: *(?P<tokens>[\d,]+)"), re.compile(r"memory: *([\d.]+)GiB"), _GIB, 1
    ),
    # Megatron-LM, training.py: its own line for memory.
    "megatron": LogFormat(
        "megatron",
        re.compile(r"iteration +\d+/ *\d+ .*elapsed time per iteration \(ms\): *(?P<ms>[\d.]+)"),
        re.compile(r"max allocated: *([\d.]+)"),
        1 << 20,
        1,
    ),
    # DeepSpeed 0.19.8, utils/timer.py: after every `steps_per_print` steps, at log level info.
    "deepspeed": LogFormat(
        "deepspeed",
        re.compile(r"global_step=\d+, .*CurrSamplesPerSec=(?P<samples>[\d.eE+]+)"),
        re.compile(r"MaxMemAllocated=([\d.]+)GB"),
        _GIB,
        0,
    ),
    "hf-trainer": LogFormat("accelerate", re.compile(r"(?!)"), re.compile(r"(?!)"), 1, 0),
    PROFILE: LogFormat("", re.compile(r"(?!)"), re.compile(r"(?!)"), 1, 0),
}
"""By what `--of` is called."""


@dataclass(frozen=True)
class Measured:
    """What a log or a profile tells."""

    steps_s: tuple[float, ...]
    peak_bytes: int | None = None
    parts_s: Mapping[str, float] | None = None
    """Of a profile: seconds of the middle step that compute, exchange alone, wait for neither, and load data."""

    @property
    def sample(self) -> dict[str, float]:
        ordered = sorted(self.steps_s)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
        return {"median": statistics.median(ordered), "p20": low, "p80": high, "n": len(ordered)}


def read_log(path: Path, kind: str, plan: ParallelPlan, context: int) -> Measured:
    """A log, a folder with one, or a profile, of a run of this plan."""
    if kind == PROFILE:
        return read_profile(path)
    if kind == "hf-trainer":
        return _read_trainer(path / TRAINER_STATE if path.is_dir() else path)
    form = FORMATS[kind]
    lines = [_COLOURS.sub("", line) for file in _files(path) for line in _text(file).splitlines()]
    to_seconds: dict[str, Callable[[float], float]] = {
        "ms": lambda value: value / 1e3,
        "tokens": lambda value: plan.batch * context / (value * plan.world),
        "samples": lambda value: plan.batch * plan.tp / value,  # ranks of a tensor-parallel group are counted each
    }
    found = [match.groupdict() for line in lines if (match := form.line.search(line))]
    values = [(unit, number(_float(text))) for groups in found for unit, text in groups.items()]
    steps = [to_seconds[unit](value) for unit, value in values if value > 0]
    if not steps:
        raise RunError(f"{path} has no line of {kind} that says how long a step took; such lines have {_words(form)}")
    peaks = [float(match[1]) * form.memory_unit for line in lines if (match := form.memory.search(line))]
    kept = steps[form.skipped :] or steps
    return Measured(tuple(kept), round(max(peaks, default=0.0)) or None)


def _read_trainer(path: Path) -> Measured:
    """Of transformers' Trainer: the mean over the run, its first step included; nothing else is in the file."""
    try:
        history = json.loads(_text(path)).get("log_history")
        rates = [entry.get("train_steps_per_second") for entry in history if isinstance(entry, Mapping)]
    except (ValueError, AttributeError, TypeError) as error:
        raise RunError(f"{path} is no state of a Trainer: {error}") from None
    seconds = [1 / rate for rate in map(number, rates) if rate > 0]
    if not seconds:
        raise RunError(f"{path} has no train_steps_per_second: it is written when training ends (save_state)")
    return Measured((seconds[-1],))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in (".log", ".txt", ".out", "") and file.is_file())
    if not files:
        raise UsageError(f"{path} has no file that ends in .log, .txt or .out: name the log itself")
    return files


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise RunError(f"{path} is larger than {_MOST_BYTES >> 30} GiB: cut it")
        content = path.read_bytes()
        return (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode(errors="replace")
    except (OSError, EOFError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _float(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _words(form: LogFormat) -> str:
    return re.sub(r"\\[a-z()]?|\(\?P<\w+>.*|[\[\]*+?.]", "", form.line.pattern).strip() or "a rate"


# ---- torch.profiler ----------------------------------------------------------------------------------------------

_Interval = tuple[float, float]
_EXCHANGE = re.compile(r"nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|mpi:", re.IGNORECASE)


def read_profile(path: Path) -> Measured:
    """A trace that `torch.profiler` exported: its steps, and of each what it did. On a GPU by kernels, else by
    operators."""
    try:
        events = json.loads(_text(path))["traceEvents"]
        spans = [event for event in events if isinstance(event, Mapping) and event.get("ph") == "X"]
        spans = [event for event in spans if number(event.get("ts")) >= 0 and number(event.get("dur")) >= 0]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is no trace of torch.profiler: {error}") from None
    kernels = [event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work = kernels or [event for event in spans if event.get("cat") == "cpu_op"]
    host = [event for event in spans if event.get("cat") == "user_annotation"]  # a GPU's lane repeats its steps, later
    steps = _of(host, lambda event: str(event.get("name", "")).startswith("ProfilerStep#"))
    if not steps:
        raise RunError(f"{path} has no ProfilerStep: give the profiler a schedule, and call its step() after each step")
    exchange = _merged(_of(work, lambda event: _EXCHANGE.search(str(event.get("name"))) is not None))
    compute = _merged(_of(work, lambda event: _EXCHANGE.search(str(event.get("name"))) is None))
    if not kernels:  # an operator that exchanges contains operators
        compute = _without(compute, exchange)
    alone = _without(exchange, compute)
    data = _merged(_of(spans, lambda event: str(event.get("name", "")).startswith("enumerate(DataLoader)")))
    ordered = sorted(steps, key=lambda step: step[1] - step[0])
    middle = ordered[(len(steps) - 1) // 2 : len(steps) // 2 + 1]  # whose mean is the median: parts add up to it
    totals = {
        name: sum(_inside(intervals, step) for step in middle) / len(middle) / 1e6
        for name, intervals in ((COMPUTE, compute), (EXCHANGE, alone), (DATA, data))
    }
    seconds = tuple((end - start) / 1e6 for start, end in steps)
    idle = statistics.median(seconds) - totals[COMPUTE] - totals[EXCHANGE]
    return Measured(seconds, parts_s=totals | {WAITING: max(0.0, idle)})


def _of(events: Iterable[Mapping[str, Any]], has: Callable[[Mapping[str, Any]], bool]) -> list[_Interval]:
    return sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events if has(event))


def _merged(intervals: Sequence[_Interval]) -> list[_Interval]:
    """Without overlaps."""
    joined: list[_Interval] = []
    for start, end in intervals:
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _without(intervals: Sequence[_Interval], others: Sequence[_Interval]) -> list[_Interval]:
    """What of merged intervals is in none of the others, in one pass over both."""
    left: list[_Interval] = []
    place = 0
    for start, end in intervals:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                left.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def _inside(intervals: Sequence[_Interval], step: _Interval) -> float:
    return sum(max(0.0, min(end, step[1]) - max(start, step[0])) for start, end in intervals)
