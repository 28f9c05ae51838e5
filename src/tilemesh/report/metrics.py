"""The lines of metrics.jsonl as steps and events, read in the order in which they were written.

The order matters: a run that went back to a checkpoint has undone what came after it, and a run that has ended may
have been taken up again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilemesh.report.values import MOST, number, section


@dataclass(frozen=True)
class Event:
    """Something that happened at a step: a checkpoint, a restart, a warning, a stop."""

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
    is_over: bool = False
    """Whether the last word is that the run has ended."""
    resumed_at: float = -math.inf
    at_step: int = 0


def read_metrics(lines: Sequence[Mapping[str, Any]]) -> Told:
    told = Told()
    for one in lines:
        step = one.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MOST:
            continue
        at = number(one.get("at"))
        when = at if math.isfinite(at) else None
        kind = one.get("kind", "step")
        told.is_over = kind in ("stopped", "failed")
        if kind == "step":
            told.steps[step], told.at_step = dict(one), step
            if when is not None:
                told.clock.append((when, step))
            continue
        told.events.append(_event(kind, step, one, when, told.at_step))
        if kind == "resumed":
            # What was done after this checkpoint is undone: it will be done again.
            told.steps = {number: line for number, line in told.steps.items() if number <= step}
            told.resumed_at, told.at_step = when if when is not None else told.resumed_at, step
    for step, line in told.steps.items():
        if "loss" in line and not math.isfinite(number(line["loss"])):
            told.events.append(Event(step, "warning", f"the loss of step {step} is not a number"))
    return told


def _event(kind: str, step: int, one: Mapping[str, Any], when: float | None, before: int) -> Event:
    """A line of metrics that is no step; `before`: the step that had been done."""
    why = str(one.get("text") or one.get("why") or "")
    after = f": {why}" if why else ""
    if kind == "resumed":
        return Event(step, "restart", _resumed_words(one, before) + after, when)
    if kind == "restart":
        return Event(step, "restart", f"failed at step {step} and was started again{after}", when)
    if kind == "checkpoint":
        failed = one.get("ok") is False or one.get("failed") is True
        words = f"checkpoint of step {step} failed{after}" if failed else f"checkpoint of step {step}"
        return Event(step, "warning" if failed else "checkpoint", words, when)
    if kind == "failed":
        return Event(step, "stopped", f"failed at step {step}{after}", when)
    if kind == "stopped":
        return Event(step, "stopped", f"stopped at step {step}{after}", when)
    return Event(step, "warning", why or str(kind), when)


def _resumed_words(one: Mapping[str, Any], before: int) -> str:
    plan, step = section(one, "plan"), int(one["step"])
    axes = ", ".join(f"{axis} {plan[axis]}" for axis in ("dp", "tp", "pp") if plan.get(axis, 1) != 1)
    again = f"; {before - step:,} step{'s' * (before > step + 1)} done again" if before > step else ""
    return f"went on after step {step}{f' on {axes}' if axes else ''}{again}"
