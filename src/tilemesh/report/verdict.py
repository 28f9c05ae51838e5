"""One sentence a run: how near the limit, how much of the step is communication, and where the most can be saved.

A saving is the part of a step that would go if its cause did: an upper bound from what was measured, never a promise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilemesh.core import advice
from tilemesh.core.units import format_seconds
from tilemesh.report.run import DIED, DONE, RUNNING, STARTING, STOPPED, Run
from tilemesh.runs.values import count, number, section

_NAMES = {
    "exchange": "exchanges that hide behind compute",
    "idle": "ranks that arrive together",
    "data": "data that is ready in time",
    "compute": "compute at the calibrated peak",
}


@dataclass(frozen=True)
class Saving:
    """What could be saved, at most, as a fraction of the step."""

    what: str
    fraction: float


@dataclass(frozen=True)
class Verdict:
    sentence: str
    is_bad: bool
    savings: tuple[Saving, ...] = ()


def shares_of(run: Run) -> dict[str, float]:
    """Parts of a step by kind; empty when the run does not say."""
    told = {} if run.is_behind else section(run.summary, "shares")
    found = {key: number(told.get(key)) for key in ("compute", "exchange", "data", "idle")}
    if all(math.isfinite(value) for value in found.values()):
        return found
    # Of the same steps, the last ones: a machine that others use is not as fast all the time.
    lines = [[number(one.get(key)) for key in ("seconds", "exchange_s", "data_s")] for one in run.last_steps()]
    known = [line for line in lines if all(math.isfinite(value) and value >= 0 for value in line)]
    seconds, exchange, data = (sum(line[part] for line in known) for part in range(3))
    if seconds <= 0:
        return {}
    # Without a summary the waiting of ranks cannot be told from the exchange it happens in.
    parts = [min(1.0, exchange / seconds), min(1.0, data / seconds)]
    return {"exchange": parts[0], "data": parts[1], "idle": 0.0, "compute": max(0.0, 1 - sum(parts))}


def savings(shares: Mapping[str, float], of_limit: float | None) -> list[Saving]:
    """Largest first. `of_limit`: the step the machine allows over the step it took; below it nothing can be saved."""
    return [Saving(_NAMES[kind], value) for kind, value in advice.savings(shares, of_limit).items()]


def improve(run: Run, of_limit: float | None) -> str:
    """What acts on the largest saving, the one the sentence names. A run that says nothing of it gets none."""
    told, shares = "" if run.is_behind else str(run.summary.get("improve") or ""), shares_of(run)
    if not told or not shares or run.step_time() is None:
        return told
    exchanges = section(run.summary, "exchanges")
    return advice.improvement(
        shares,
        _finite(section(run.summary, "exchange_seconds")),
        {axis: _finite(section(exchanges, axis)) for axis in exchanges},
        ranks=run.world,
        cores=count(run.summary.get("cores"), run.world),
        of_limit=of_limit,
    )


def _finite(told: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, one in told.items() if math.isfinite(value := number(one))}


def judge(run: Run, of_limit: float | None, why_no_limit: str = "") -> Verdict:
    """The sentence for the top of the page. `why_no_limit`: what keeps the step from being held against it."""
    shares = {} if run.state == DIED else shares_of(run)  # of a run that failed, speed is not the question
    found = savings(shares, of_limit)
    learned = _learned(run)
    parts = [_state(run), learned, _next(run)]
    if of_limit is not None:
        parts.append(f"{of_limit:.0%} of the calibrated limit".replace("%", " %"))
    elif run.state in (DONE, STOPPED) and run.steps:
        parts.append(f"how near the limit is not known ({why_no_limit or '`tilemesh calibrate` measures it'})")
    if shares and run.world > 1:
        share = f"{shares['exchange'] + shares['idle']:.0%}".replace("%", " %")
        parts.append(f"communication (with waiting for ranks) is {share} of the step")
    if found:
        most = f"{found[0].fraction:.0%}".replace("%", " %")
        known = "the largest saving" if of_limit is not None else "the largest saving beside compute"
        parts.append(f"{known} is {found[0].what}, at most {most} of the step")
    elif shares and of_limit is not None:
        parts.append("nothing measured leaves more than half a percent to save")
    sentence = "; ".join(part for part in parts if part) or "the folder says nothing of how it went"
    is_bad = run.state == DIED or run.is_unread or _is_lost(run) or " rose " in learned
    return Verdict(sentence[0].upper() + sentence[1:] + ".", is_bad, tuple(found))


def _state(run: Run) -> str:
    planned = f" of {run.planned_steps:,}" if run.planned_steps else ""
    step = f"step {run.last_step:,}{planned}"
    stops = [event for event in run.events if event.kind == "stopped"]
    stop = max(stops, key=lambda event: event.at or 0.0).words if stops else ""
    return {
        STARTING: "no step is done yet" if not run.is_unread else "no step can be read: the metrics are damaged",
        RUNNING: f"running, {step}{_left(run)}",
        DONE: "" if not _is_lost(run) else f"the loss is no number at {step}",
        STOPPED: f"stopped when asked to, at {step}",
        DIED: stop or f"ended at {step} without a summary: it was killed, or it failed",
    }[run.state]


def _learned(run: Run) -> str:
    """What became of the loss, where there is enough of it: the first steps' against the last tenth's."""
    values = [value for _, value in run.figure("loss")]
    last = run.tail("loss")
    if run.state != DONE or len(values) < 20 or last is None or not all(map(math.isfinite, values[:3])):
        return ""
    first = sum(values[:3]) / 3
    way = "fell" if last.p80 < first else "rose" if last.p20 > first else "stayed as it was,"
    return f"the loss {way} from {first:.3g} to {last.median:.3g}"


def _next(run: Run) -> str:
    """How to go on with a run that has not come to its end."""
    if run.state not in (DIED, STOPPED):
        return ""
    kept = [event.step for event in run.events if event.kind == "checkpoint"]
    if not kept:
        return "there is no checkpoint to go on from"
    return f"`tilemesh train --resume {run.folder.rstrip('/')}` goes on after step {max(kept):,}"


def _left(run: Run) -> str:
    taken = run.step_time()
    if taken is None or run.planned_steps is None:
        return ""
    if run.last_step >= run.planned_steps:
        return ", ending"
    return f", about {format_seconds(max(1.0, (run.planned_steps - run.last_step) * taken.median))} left"


def _is_lost(run: Run) -> bool:
    found = run.figure("loss")
    return bool(found) and not math.isfinite(found[-1][1])
