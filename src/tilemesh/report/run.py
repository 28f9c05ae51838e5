"""A training run as a page shows it: what its folder holds (`runs.contents`), and what follows from that.

The folder may be of a run that has ended, died or is still running: which one it is, is decided here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.report import spans
from tilemesh.runs.contents import QUIET_S, comes_last, read_contents
from tilemesh.runs.files import Unread
from tilemesh.runs.metrics import CHECKPOINT, Event
from tilemesh.runs.names import SUMMARY, TRACE
from tilemesh.runs.values import count, number, section

RUNNING, DONE, STOPPED, DIED, STARTING = "running", "done", "stopped", "died", "starting"
_KEEPS_TAIL = 0.1  # of the steps: what "the end of a run" is


@dataclass(frozen=True)
class Run:
    """Everything a page says of one run."""

    name: str
    folder: str
    state: str
    kind: str = "train"
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
    is_unread: bool = False
    """Whether there are lines of metrics and none of them can be read."""

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
        marked = {event.step for event in self.events if event.kind == CHECKPOINT}
        seconds = [
            value for step, value in self.figure("seconds") if step > spans.WARM_UP and step not in marked and value > 0
        ]
        finite = [value for value in seconds if math.isfinite(value)]
        return Sample.of(finite) if finite else None

    def last_steps(self) -> Sequence[Mapping[str, Any]]:
        """The last tenth of the run's steps (ten at least)."""
        return self.steps[-max(10, int(len(self.steps) * _KEEPS_TAIL)) :]

    @property
    def tail_words(self) -> str:
        many = len(self.last_steps())
        return f"the last {many:,} steps" if many > 1 else "the only step"

    def tail(self, key: str) -> Sample | None:
        """A figure over the last tenth of the run's steps."""
        values = [value for one in self.last_steps() if key in one and math.isfinite(value := number(one[key]))]
        return Sample.of(values) if values else None


# ---- reading ---------------------------------------------------------------------------------------------------


def read(folder: str | Path, *, now: float | None = None) -> Run:
    """The run in a folder. UsageError only when there is no such folder, or nothing of a run in it."""
    found = read_contents(folder)
    told, missing, timeline = found.told, dict(found.missing), None
    if found.trace is not None:
        try:
            timeline = spans.with_steps(found.trace)
        except Unread as why:
            missing[f"time by kind and the timeline ({TRACE})"] = str(why)
    steps = [told.steps[step] for step in sorted(told.steps)]
    run = Run(
        name=Path(folder).resolve().name,
        folder=str(folder),
        state="",
        kind=found.kind,
        config=found.config,
        steps=steps,
        clock=told.clock,
        events=sorted(told.events, key=lambda event: event.step),
        summary=found.summary,
        predicted=found.predicted,
        environment=found.environment,
        timeline=timeline,
        sample=found.sample,
        rows=found.rows,
        missing=missing,
        written_at=found.written_at,
        is_unread=found.is_unread,
        is_behind=_is_behind(found.summary, steps, told.resumed_at, found.summed_at),
    )
    return _settled(run, told.is_over, time.time() if now is None else now)


def _is_behind(
    summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], resumed_at: float, summed_at: float | None
) -> bool:
    """Whether the run has gone on after this summary: it has more steps, or was taken up since."""
    done = int(steps[-1]["step"]) if steps else 0
    told = number(summary.get("step"), float(done) if summary else 0.0)  # not every kind of run says it
    return told < done or (summed_at is not None and resumed_at > summed_at)


def _settled(run: Run, is_over: bool, now: float) -> Run:
    """The run with its state, and without what the state explains."""
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
    return replace(run, state=state, missing=missing)


def _for_now(what: str, why: str) -> str:
    return "comes when the run ends" if comes_last(what) and why == "not there" else why
