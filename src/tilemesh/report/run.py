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
from tilemesh.report.metrics import Event, read_metrics
from tilemesh.report.values import count, number, section

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
class Run:
    """Everything a page says of one run."""

    name: str
    folder: str
    state: str
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    """One a step, by step; of a step done twice the later, and none that a restart has undone."""
    clock: Sequence[tuple[float, int]] = ()
    """(when, step) of every line, in the order written: it falls where a restart went back."""
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
    is_behind: bool = False
    """Whether the summary is of an earlier attempt: the run has gone on since."""

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
        """When the first step of all was done, where lines say when."""
        return self.clock[0][0] if self.clock else None

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

    def last_steps(self) -> Sequence[Mapping[str, Any]]:
        """The last tenth of the run's steps (ten at least)."""
        return self.steps[-max(10, int(len(self.steps) * _KEEPS_TAIL)) :]

    def tail(self, key: str) -> Sample | None:
        """A figure over the last tenth of the run's steps."""
        values = [value for one in self.last_steps() if key in one and math.isfinite(value := number(one[key]))]
        return Sample.of(values) if values else None


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
    told = read_metrics(lines)
    steps, events = [told.steps[step] for step in sorted(told.steps)], told.events
    summary = take(SUMMARY, "the run's own summary", read_object) or {}
    environment = _quiet(place / ENVIRONMENT)
    events += _from_folder(place, names, {(event.step, event.kind) for event in events})
    run = Run(
        name=place.resolve().name,
        folder=str(folder),
        state="",
        config=config,
        steps=steps,
        clock=told.clock,
        events=sorted(events, key=lambda event: event.step),
        summary=summary,
        predicted=take(PREDICTED, "predictions", read_object) or {},
        environment=environment,
        timeline=take(TRACE, "time by kind and the timeline", lambda _: spans.read(place)),
        sample=take(SAMPLE, "the text it wrote", read_text) or "",
        rows=_rows(place),
        missing=missing,
        written_at=_written_at(place / METRICS),
        is_behind=_is_behind(summary, steps, told.resumed_at, _written_at(place / SUMMARY)),
    )
    return _settled(run, told.is_over, time.time() if now is None else now)


def version(folder: str | Path) -> str:
    """Changes when a file that the page is made of does, and now and then while nothing does: a run that is silent for
    long is dead, and the page has to say so."""
    written = _written_at(Path(folder) / METRICS)
    silent = 0.0 if written is None else max(0.0, time.time() - written)
    marks = [f"{math.floor(math.log2(1 + silent / QUIET_S))}"]
    for name in (*WATCHED, CHECKPOINTS, "trace"):
        try:
            found = (Path(folder) / name).lstat()
            marks.append(f"{found.st_mtime_ns:x}.{found.st_size:x}")
        except OSError:
            marks.append("-")
    return "_".join(marks)


def _is_behind(
    summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], resumed_at: float, summed_at: float | None
) -> bool:
    """Whether the run has gone on after this summary: it has more steps, or was taken up since."""
    done = int(steps[-1]["step"]) if steps else 0
    return number(summary.get("step"), 0.0) < done or (summed_at is not None and resumed_at > summed_at)


def _settled(run: Run, is_over: bool, now: float) -> Run:
    """The run with its state, and without what the state explains."""
    values = dict(run.__dict__)
    missing = dict(run.missing)
    planned = run.planned_steps
    step_time = run.step_time()
    patience = max(QUIET_S, 10 * step_time.median if step_time else 0.0)
    is_fresh = run.written_at is not None and now - run.written_at < patience
    if run.summary and not run.is_behind:
        state = STOPPED if run.summary.get("interrupted") else DONE
    elif is_over:
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


def _from_folder(place: Path, names: Sequence[str], known: set[tuple[int, str]]) -> list[Event]:
    """Checkpoints that are on disk, and batches kept because of a loss that was no number."""
    made = []
    for name in names_in(place / CHECKPOINTS):
        if (match := _CHECKPOINT.fullmatch(name)) and (int(match[1]), "checkpoint") not in known:
            made.append(Event(int(match[1]), "checkpoint", f"checkpoint of step {int(match[1])}"))
        elif name.startswith("damaged-") and (match := _CHECKPOINT.fullmatch(name.removeprefix("damaged-"))):
            made.append(Event(int(match[1]), "warning", f"the checkpoint of step {int(match[1])} was damaged"))
    bad = {int(match[1]) for name in names if (match := _BAD_BATCH.match(name))}
    words = "stopped at step {}: it came to no number; the batch is kept"
    made += [Event(step, "stopped", words.format(step)) for step in sorted(bad) if (step, "stopped") not in known]
    return made


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
