"""The lines of metrics.jsonl: what they may say, and reading them as steps and events in the order they were written.

A line is a JSON object with `kind`, `step` and `at` (seconds since 1970, which `Journal.add` fills in). `kind` is
`step` for one step's figures, else the name of an event. The order matters: a run that went back to a checkpoint has
undone what came after it, and a run that has ended may have been resumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilemesh.core.axes import ORDER
from tilemesh.runs.files import Unread, read_lines
from tilemesh.runs.names import METRICS
from tilemesh.runs.values import MOST, number, section

STEP = "step"
STARTED, RESUMED, RESTART, CHECKPOINT, WARNING, STOPPED, FAILED, MESH = (
    "started", "resumed", "restart", "checkpoint", "warning", "stopped", "failed", "mesh"
)  # fmt: skip
"""Events: begun; resumed from a checkpoint; ranks died and are started again; a checkpoint was written or was not; a
warning; the run stopped itself or was asked to; it failed, and nothing starts it again; it goes on with fewer ranks or
with more. The reason is `why` or `text`.
A kind of run may add its own: readers that do not know one show its name and its `text` or `why`."""


@dataclass(frozen=True)
class Event:
    """Something that happened at a step. `kind`: one of the names above, or a name of the run's own."""

    step: int
    kind: str
    words: str
    at: float | None = None


@dataclass
class Told:
    """What the metrics say."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    clock: list[tuple[float, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ending: Event | None = None
    """The last line, where it says that the run has ended: that it stopped or failed, and why."""
    resumed_at: float = -math.inf
    at_step: int = 0


def read_metrics(lines: Sequence[Mapping[str, Any]]) -> Told:
    read = Told()
    for line in lines:
        step = line.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MOST:
            continue
        at = number(line.get("at"))
        when = at if math.isfinite(at) else None
        kind = line.get("kind", STEP)
        read.ending = None
        if kind == STEP:
            read.steps[step], read.at_step = dict(line), step
            if when is not None:
                read.clock.append((when, step))
            continue
        if kind == STARTED:
            continue
        event = _event(kind, step, line, when, read.at_step)
        read.events.append(event)
        read.ending = event if kind in (STOPPED, FAILED) else None
        if kind == RESUMED:
            # What was done after this checkpoint is undone: it will be done again.
            read.steps = {number: line for number, line in read.steps.items() if number <= step}
            read.resumed_at, read.at_step = when if when is not None else read.resumed_at, step
    for step, line in read.steps.items():
        if "loss" in line and not math.isfinite(number(line["loss"])):
            read.events.append(Event(step, WARNING, f"the loss of step {step} is not a number"))
    return read


def _event(kind: str, step: int, line: Mapping[str, Any], when: float | None, before: int) -> Event:
    """A line of metrics that is not a step; `before`: the step that had been done."""
    why = str(line.get("text") or line.get("why") or "")
    after = f": {why}" if why else ""
    if kind == RESUMED:
        # Where nothing is done again, it had been stopped, and goes on as it was meant to.
        return Event(step, RESTART if before > step else RESUMED, _resumed_words(line, before) + after, when)
    if kind == RESTART:
        return Event(step, RESTART, f"failed at step {step} and was started again{after}", when)
    if kind == CHECKPOINT:
        failed = line.get("ok") is False or line.get("failed") is True
        words = f"checkpoint of step {step} failed{after}" if failed else f"checkpoint of step {step}"
        return Event(step, WARNING if failed else CHECKPOINT, words, when)
    if kind == FAILED:
        return Event(step, FAILED, f"failed at step {step}{after}", when)
    if kind == STOPPED:
        return Event(step, STOPPED, f"stopped at step {step}{after}", when)
    if kind == WARNING:
        return Event(step, WARNING, why or "a warning without words", when)
    return Event(step, str(kind), why or _values_of(line), when)


def _values_of(line: Mapping[str, Any]) -> str:
    """What an event of a kind's own says beside its name, where it has no text."""
    return ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("kind", "step", "at"))


def _resumed_words(line: Mapping[str, Any], before: int) -> str:
    plan, step = section(line, "plan"), int(line["step"])
    axes = ", ".join(f"{axis} {plan[axis]}" for axis in reversed(ORDER) if plan.get(axis, 1) != 1)
    again = f"; {before - step:,} step{'s' * (before > step + 1)} done again" if before > step else ""
    return f"went on after step {step}{f' on {axes}' if axes else ''}{again}"


# ---- from a folder ---------------------------------------------------------------------------------------------


def lines_of(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics in the order written, without damaged ones; none where there is no such file."""
    try:
        return read_lines(Path(folder) / METRICS)[0]
    except Unread:
        return []


def latest(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's metrics in order of step: the later one of a step that was done again, none that was undone
    by going back to a checkpoint, and every event."""
    steps: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for line in lines_of(folder):
        if isinstance(line.get("step"), int) and "kind" in line:
            if line["kind"] == STEP:
                steps[line["step"]] = line
            else:
                events.append(line)
            if line["kind"] == RESUMED:
                steps = {number: earlier for number, earlier in steps.items() if number <= line["step"]}
    yield from sorted([*steps.values(), *events], key=lambda line: int(line["step"]))


def last_line(folder: str | Path) -> dict[str, Any]:
    """What a run's metrics say last; empty where they say nothing."""
    return next(_backwards(folder), {})


def last_step(folder: str | Path) -> int:
    """The step a run had done last when its metrics end: not the highest one, where it went back."""
    return next((int(line["step"]) for line in _backwards(folder) if line.get("kind") == STEP), 0)


def _backwards(folder: str | Path) -> Iterator[dict[str, Any]]:
    return (line for line in reversed(lines_of(folder)) if isinstance(line.get("step"), int))
