"""A run as a page shows it: what its folder holds (`runs.contents`), and what follows from that.

The folder may be of a run that has ended, died or is still running: which one it is, is decided here. What only some
kinds of run have (a plan, a loss) is empty for the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilemesh.core.axes import ORDER
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.report import spans
from tilemesh.runs import metrics
from tilemesh.runs.contents import QUIET_S, read_contents
from tilemesh.runs.files import Unread
from tilemesh.runs.metrics import CHECKPOINT, Event
from tilemesh.runs.names import SAMPLE, SUMMARY, TRACE
from tilemesh.runs.values import count, number, section

RUNNING, DONE, STOPPED, DIED, STARTING = "running", "done", "stopped", "died", "starting"
"""Writing; ended with a summary; stopped itself or was asked to; failed, or silent for `QUIET_S`; no step done yet."""
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
    timeline: spans.TraceTimeline | None = None
    sample: str = ""
    samples: Sequence[Mapping[str, Any]] = ()
    rows: Sequence[Row] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """Files that gave nothing, or not all, and why."""
    absent: frozenset[str] = frozenset()
    """Those of them that are not there."""
    ending: Event | None = None
    """That it stopped or failed, and why, where that is the last thing written."""
    silent_s: float | None = None
    """How long ago the metrics were last written to."""
    is_behind: bool = False
    """Whether the summary is of an earlier attempt: the run has gone on since."""
    is_unread: bool = False
    """Whether there are lines of metrics and none of them can be read."""

    def figure(self, key: str) -> list[tuple[int, float]]:
        """(step, value) wherever a step has this key; what is not a number is NaN."""
        return [(step["step"], number(step[key])) for step in self.steps if key in step]

    @property
    def figures(self) -> list[str]:
        """Names of what the steps say that is a number, in the order in which they first appear."""
        names = dict.fromkeys(
            key for step in self.steps for key, value in step.items() if not math.isnan(number(value))
        )
        return [key for key in names if key not in ("step", "at")]

    @property
    def points(self) -> list[Mapping[str, Any]]:
        """Cases that the summary tells of: loads of a server, recipes of a compression."""
        points = [] if self.is_behind else self.summary.get("points")
        return [point for point in points if isinstance(point, dict)] if isinstance(points, list) else []

    @property
    def servers(self) -> list[Mapping[str, Any]]:
        """What parameter servers said of themselves."""
        servers = section(self.summary, "method").get("servers")
        return [server for server in servers if isinstance(server, dict)] if isinstance(servers, list) else []

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def was_cut_short(self) -> bool:
        """Whether it failed, died, or stopped without a summary of what it had done until then."""
        return self.state == DIED or (self.state == STOPPED and (not self.summary or self.is_behind))

    @property
    def planned_steps(self) -> int | None:
        return count(section(self.config, "train").get("steps"), 0) or None

    @property
    def plan(self) -> Mapping[str, Any]:
        return section(self.summary, "plan") or section(self.config, "plan")

    @property
    def world(self) -> int:
        return count(self.summary.get("world"), 0) or math.prod(count(self.plan.get(axis)) for axis in ORDER)

    @property
    def began_at(self) -> float | None:
        """When the first step of all was done, where lines say when."""
        return self.clock[0][0] if self.clock else None

    def step_time(self) -> Sample | None:
        """Of ordinary steps: what the run says, else of the steps after the first few."""
        sample = self.summary.get("step_time_s")
        if isinstance(sample, dict) and not self.is_behind:
            values = [number(sample.get(key)) for key in ("median", "p20", "p80")]
            if all(math.isfinite(value) and value > 0 for value in values):
                return Sample(values[0], values[1], values[2], count(sample.get("n")))
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
        values = [value for step in self.last_steps() if key in step and math.isfinite(value := number(step[key]))]
        return Sample.of(values) if values else None


# ---- reading ---------------------------------------------------------------------------------------------------


def read(folder: str | Path, *, now: float | None = None) -> Run:
    """The run in a folder, whatever its state; see `read_contents` for what is refused."""
    contents = read_contents(folder)
    now = time.time() if now is None else now
    journal, missing, timeline = contents.told, dict(contents.missing), None
    if contents.trace is not None:
        try:
            timeline = spans.with_steps(contents.trace)
        except Unread as why:
            missing[TRACE] = str(why)
    steps = [journal.steps[step] for step in sorted(journal.steps)]
    run = Run(
        name=Path(folder).resolve().name,
        folder=str(folder),
        state="",
        kind=contents.kind,
        config=contents.config,
        steps=steps,
        clock=journal.clock,
        events=sorted(journal.events, key=lambda event: event.step),
        summary=contents.summary,
        predicted=contents.predicted,
        environment=contents.environment,
        timeline=timeline,
        sample=contents.sample,
        samples=contents.samples,
        rows=contents.rows,
        missing=missing,
        absent=contents.absent,
        ending=journal.ending,
        silent_s=None if contents.written_at is None else now - contents.written_at,
        is_unread=contents.is_unread,
        is_behind=_is_behind(contents.summary, steps, journal.resumed_at, contents.summed_at),
    )
    return _settled(run)


def _is_behind(
    summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], resumed_at: float, summed_at: float | None
) -> bool:
    """Whether the run has gone on after this summary: it has more steps, or was taken up since."""
    done = int(steps[-1]["step"]) if steps else 0
    summarized = number(summary.get("step"), float(done) if summary else 0.0)  # not every kind of run says it
    return summarized < done or (summed_at is not None and resumed_at > summed_at)


def _settled(run: Run) -> Run:
    """The run with its state, and what is missing in the words of that state."""
    missing = dict(run.missing)
    state = _state(run)
    if state in (RUNNING, STARTING):
        missing |= {name: "comes when the run ends" for name in (SUMMARY, SAMPLE) if name in run.absent}
    if run.summary and run.is_behind:
        missing[SUMMARY] = f"the one there is of step {number(run.summary.get('step')):g}"
    return replace(run, state=state, missing=missing)


def _state(run: Run) -> str:
    ending = "" if run.ending is None else run.ending.kind
    if ending == metrics.FAILED:
        return DIED
    if run.summary and not run.is_behind:
        return STOPPED if ending or run.summary.get("interrupted") else DONE
    if ending:
        return STOPPED
    if not run.steps:
        return STARTING
    step_time = run.step_time()
    patience = max(QUIET_S, 10 * step_time.median if step_time else 0.0)
    return RUNNING if run.silent_s is not None and run.silent_s < patience else DIED


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"steps": 2}}` as `{"train.steps": 2}`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return leaves
