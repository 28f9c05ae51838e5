"""A run folder as plain values: whatever is there, and for whatever is not, why.

The folder may be of a run that has ended, died, is still running or was made by an older version; the reader never
fails over its contents. This is the only file that knows the names of the folder's files and their keys.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.report import spans
from tilemesh.report.files import Unread, names_in, read_lines, read_object, read_text, read_toml

CONFIG, METRICS, SUMMARY, PREDICTED, SAMPLE = (
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "predicted.json",
    "sample.txt",
)
ENVIRONMENT, ROWS, TRACE, CHECKPOINTS = "environment.json", "rows.jsonl", "trace.json", "checkpoints"
WATCHED = (CONFIG, METRICS, SUMMARY, PREDICTED, SAMPLE, ENVIRONMENT, ROWS, TRACE)

RUNNING, DONE, STOPPED, DIED, STARTING = "running", "done", "stopped", "died", "starting"
QUIET_S = 60.0
"""A run that has written nothing for so long (and for ten steps) is taken for dead."""
_CHECKPOINT = re.compile(r"step-(\d{8,})")
_BAD_BATCH = re.compile(r"bad-batch-step-(\d+)-")
_KEEPS_TAIL = 0.1  # of the steps: what "the end of a run" is


@dataclass(frozen=True)
class Event:
    """Something that happened at a step: a checkpoint, a restart, a warning, a stop."""

    step: int
    kind: str
    words: str
    at: float | None = None


@dataclass(frozen=True)
class Run:
    """Everything a page says of one run."""

    name: str
    folder: str
    state: str
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    """One a step, by step; of a step done twice the later."""
    events: Sequence[Event] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    timeline: spans.Timeline | None = None
    sample: str = ""
    rows: Sequence[Row] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """What a page of a whole run would show, and why this one does not."""
    written_at: float | None = None
    """When the metrics were last written to."""

    def figure(self, key: str) -> list[tuple[int, float]]:
        """(step, value) wherever a step has this key; what is no number is NaN."""
        return [(one["step"], number(one[key])) for one in self.steps if key in one]

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def planned_steps(self) -> int | None:
        return count(section(self.config, "train").get("steps"), 0) or None

    @property
    def plan(self) -> Mapping[str, Any]:
        return section(self.summary, "plan") or section(self.config, "plan")

    @property
    def world(self) -> int:
        return count(self.summary.get("world"), 0) or math.prod(
            count(self.plan.get(axis)) for axis in ("dp", "tp", "pp")
        )

    @property
    def began_at(self) -> float | None:
        """When the first step of those that are there was done, where lines say when."""
        times = [number(one.get("at")) for one in self.steps[:1]]
        return times[0] if times and math.isfinite(times[0]) else None

    def step_time(self) -> Sample | None:
        """Of ordinary steps: what the run says, else of the steps after the first few."""
        told = self.summary.get("step_time_s")
        if isinstance(told, dict) and not self.is_behind:
            values = [number(told.get(key)) for key in ("median", "p20", "p80")]
            if all(math.isfinite(value) and value > 0 for value in values):
                return Sample(values[0], values[1], values[2], count(told.get("n")))
        marked = {event.step for event in self.events if event.kind == "checkpoint"}
        seconds = [
            value for step, value in self.figure("seconds") if step > spans.WARM_UP and step not in marked and value > 0
        ]
        finite = [value for value in seconds if math.isfinite(value)]
        return Sample.of(finite) if finite else None

    def tail(self, key: str) -> Sample | None:
        """A figure over the last tenth of the run's steps (ten at least)."""
        found = self.figure(key)
        values = [value for _, value in found[-max(10, int(len(found) * _KEEPS_TAIL)) :] if math.isfinite(value)]
        return Sample.of(values) if values else None

    @property
    def is_behind(self) -> bool:
        """Whether the summary is of an earlier attempt: the run has gone on since."""
        return number(self.summary.get("step"), 0.0) < self.last_step


def number(value: object, otherwise: float = math.nan) -> float:
    """A JSON value as a number; NaN for what is none (`null` and "nan" are how files write it)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return otherwise
    # Beyond this nothing is measured, and sums would overflow.
    return float(value) if abs(value) < 1e100 else math.copysign(math.inf, value) if value == value else math.nan


def count(value: object, otherwise: int = 1) -> int:
    """A whole number of ranks, steps or parts; `otherwise` for what cannot be meant."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value < spans.MOST
    return int(value) if is_count else otherwise  # type: ignore[call-overload]


def section(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table inside a table; empty when it is not there or no table."""
    found = of.get(name)
    return found if isinstance(found, Mapping) else {}


def numbers(of: Mapping[str, Any], name: str) -> list[float]:
    """A list of numbers inside a table, one a rank; empty when it is none."""
    found = of.get(name)
    return [number(one, 0.0) for one in found] if isinstance(found, list) else []


# ---- reading ---------------------------------------------------------------------------------------------------


def read(folder: str | Path, *, now: float | None = None) -> Run:
    """The run in a folder. UsageError only when there is no such folder, or nothing of a run in it."""
    place = Path(folder)
    if not place.is_dir():
        raise UsageError(f"{folder} is no folder: expected a run's, such as one under runs/")
    names = names_in(place)
    if not {CONFIG, METRICS, SUMMARY} & set(names):
        raise UsageError(f"{folder} is no run: it has neither {CONFIG} nor {METRICS}")
    missing: dict[str, str] = {}

    def take(name: str, why_it_matters: str, reader: Any) -> Any:
        try:
            return reader(place / name)
        except Unread as why:
            missing[f"{why_it_matters} ({name})"] = str(why)
            return None

    config = take(CONFIG, "configuration", read_toml) or {}
    lines, damaged = take(METRICS, "loss and speed, step by step", read_lines) or ([], 0)
    if damaged:
        missing[f"{damaged} lines of {METRICS}"] = "damaged"
    steps, events = _lines(lines)
    summary = take(SUMMARY, "the run's own summary", read_object) or {}
    environment = _quiet(place / ENVIRONMENT)
    events += _from_folder(place, names, {event.step for event in events if event.kind == "checkpoint"})
    run = Run(
        name=place.resolve().name,
        folder=str(folder),
        state="",
        config=config,
        steps=steps,
        events=sorted(events, key=lambda event: event.step),
        summary=summary,
        predicted=take(PREDICTED, "predictions", read_object) or {},
        environment=environment,
        timeline=take(TRACE, "time by kind and the timeline", lambda _: spans.read(place)),
        sample=take(SAMPLE, "the text it wrote", read_text) or "",
        rows=_rows(place),
        missing=missing,
        written_at=_written_at(place / METRICS),
    )
    return _settled(run, time.time() if now is None else now)


def version(folder: str | Path) -> str:
    """Changes when a file that the page is made of does."""
    marks = []
    for name in (*WATCHED, CHECKPOINTS, "trace"):
        try:
            found = (Path(folder) / name).lstat()
            marks.append(f"{found.st_mtime_ns:x}.{found.st_size:x}")
        except OSError:
            marks.append("-")
    return "_".join(marks)


def _settled(run: Run, now: float) -> Run:
    """The run with its state, and without what the state explains."""
    values = dict(run.__dict__)
    missing = dict(run.missing)
    planned = run.planned_steps
    step_time = run.step_time()
    patience = max(QUIET_S, 10 * step_time.median if step_time else 0.0)
    is_fresh = run.written_at is not None and now - run.written_at < patience
    if run.summary and not run.is_behind:
        state = STOPPED if run.summary.get("interrupted") else DONE
    elif any(event.kind == "stopped" for event in run.events):
        state = DIED
    elif not run.steps:
        state = STARTING
    elif planned is not None and run.last_step >= planned and not is_fresh:
        state = DIED
    else:
        state = RUNNING if is_fresh else DIED
    if state in (RUNNING, STARTING):
        missing = {what: _for_now(what, why) for what, why in missing.items()}
    if run.summary and run.is_behind:
        missing[f"a summary ({SUMMARY})"] = f"the one there is of step {number(run.summary.get('step')):g}"
    return Run(**{**values, "state": state, "missing": missing})


def _for_now(what: str, why: str) -> str:
    is_last = any(f"({name})" in what for name in (SUMMARY, SAMPLE))
    return "comes when the run ends" if is_last and why == "not there" else why


def _lines(lines: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Event]]:
    steps: dict[int, dict[str, Any]] = {}
    events: list[Event] = []
    for one in lines:
        step = one.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < spans.MOST:
            continue
        kind = one.get("kind", "step")
        at = number(one.get("at"))
        when = at if math.isfinite(at) else None
        if kind == "step":
            steps[step] = dict(one)
        elif kind in ("resumed", "restart"):
            events.append(Event(step, "restart", _restart_words(one), when))
        elif kind == "checkpoint":
            failed = one.get("ok") is False or one.get("failed") is True
            why = f": {one.get('why')}" if one.get("why") else ""
            words = f"checkpoint of step {step} failed{why}" if failed else f"checkpoint of step {step}"
            events.append(Event(step, "warning" if failed else "checkpoint", words, when))
        else:
            words = str(one.get("text") or one.get("why") or kind)
            events.append(Event(step, "stopped" if kind == "stopped" else "warning", words, when))
    ordered = [steps[step] for step in sorted(steps)]
    for one in ordered:
        if "loss" in one and not math.isfinite(number(one["loss"])):
            events.append(Event(one["step"], "warning", f"the loss of step {one['step']} is not a number"))
    return ordered, events


def _restart_words(one: Mapping[str, Any]) -> str:
    plan = section(one, "plan")
    axes = ", ".join(f"{axis} {plan[axis]}" for axis in ("dp", "tp", "pp") if plan.get(axis, 1) != 1)
    why = f": {one['why']}" if one.get("why") else ""
    return f"went on after step {one['step']}{f' on {axes}' if axes else ''}{why}"


def _from_folder(place: Path, names: Sequence[str], known: set[int]) -> list[Event]:
    """Checkpoints that are on disk, and batches kept because of a loss that was no number."""
    made = []
    for name in names_in(place / CHECKPOINTS):
        if (match := _CHECKPOINT.fullmatch(name)) and int(match[1]) not in known:
            made.append(Event(int(match[1]), "checkpoint", f"checkpoint of step {int(match[1])}"))
        elif name.startswith("damaged-") and (match := _CHECKPOINT.fullmatch(name.removeprefix("damaged-"))):
            made.append(Event(int(match[1]), "warning", f"the checkpoint of step {int(match[1])} was damaged"))
    bad = {int(match[1]) for name in names if (match := _BAD_BATCH.match(name))}
    return [*made, *(Event(step, "stopped", f"stopped: no number at step {step}, batch kept") for step in sorted(bad))]


def _quiet(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except Unread:
        return {}


def _rows(place: Path) -> list[Row]:
    """Rows the run wrote of itself; none where there are none, or another version's."""
    try:
        return [Row.from_json(line) for line in read_text(place / ROWS).split("\n") if line.strip()]
    except (Unread, UsageError, TypeError):
        return []


def _written_at(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None
