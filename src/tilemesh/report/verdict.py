"""One sentence a run: how near the limit, how much of the step is communication, and where the most can be saved.

A saving is the part of a step that would go if its cause did: an upper bound from what was measured, never a promise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilemesh.core.advice import improvement
from tilemesh.core.advice import savings as fractions
from tilemesh.core.units import format_seconds
from tilemesh.report.kind_page import Verdict
from tilemesh.report.run import DIED, DONE, RUNNING, STARTING, STOPPED, Run
from tilemesh.runs import metrics
from tilemesh.runs.contents import QUIET_S
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


def shares_of(run: Run) -> dict[str, float]:
    """Parts of a step by kind; empty when the run does not say."""
    summarized = {} if run.is_behind else section(run.summary, "shares")
    shares = {key: number(summarized.get(key)) for key in ("compute", "exchange", "data", "idle")}
    if all(math.isfinite(value) for value in shares.values()):
        return shares
    # Of the same steps, the last ones: a machine that others use is not as fast all the time.
    lines = [[number(step.get(key)) for key in ("seconds", "exchange_s", "data_s")] for step in run.last_steps()]
    known = [line for line in lines if all(math.isfinite(value) and value >= 0 for value in line)]
    seconds, exchange, data = (sum(line[part] for line in known) for part in range(3))
    if seconds <= 0:
        return {}
    # Without a summary the waiting of ranks cannot be told from the exchange it happens in.
    parts = [min(1.0, exchange / seconds), min(1.0, data / seconds)]
    return {"exchange": parts[0], "data": parts[1], "idle": 0.0, "compute": max(0.0, 1 - sum(parts))}


def savings(shares: Mapping[str, float], of_limit: float | None) -> list[Saving]:
    """Largest first. `of_limit`: the step the machine allows over the step it took; below it nothing can be saved."""
    return [Saving(_NAMES[kind], value) for kind, value in fractions(shares, of_limit).items()]


def improve(run: Run, of_limit: float | None) -> str:
    """What acts on the largest saving, the one the sentence names. A run that says nothing of it gets none."""
    advice, shares = "" if run.is_behind else str(run.summary.get("improve") or ""), shares_of(run)
    if not advice or not shares or run.step_time() is None:
        return advice
    exchanges = section(run.summary, "exchanges")
    return improvement(
        shares,
        _finite(section(run.summary, "exchange_seconds")),
        {axis: _finite(section(exchanges, axis)) for axis in exchanges},
        ranks=run.world,
        cores=count(run.summary.get("cores"), run.world),
        of_limit=of_limit,
    )


def _finite(figures: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, figure in figures.items() if math.isfinite(value := number(figure))}


def judge(run: Run, of_limit: float | None, why_no_limit: str = "", advice: str = "") -> Verdict:
    """The sentence for the top of the page. `why_no_limit`: what keeps the step from being held against it."""
    shares = {} if run.was_cut_short else shares_of(run)  # of a run that failed, speed is not the question
    possible = savings(shares, of_limit)
    learned = _learned(run)
    parts = [_state(run), learned, _next(run)]
    if of_limit is not None:
        parts.append(f"{of_limit:.0%} of the calibrated limit".replace("%", " %"))
    elif run.state in (DONE, STOPPED) and run.steps and not run.was_cut_short:
        parts.append(f"how near the limit is not known ({why_no_limit or '`tilemesh calibrate` measures it'})")
    if shares and run.world > 1:
        share = f"{shares['exchange'] + shares['idle']:.0%}".replace("%", " %")
        parts.append(f"communication (with waiting for ranks) is {share} of the step")
    if possible:
        most = f"{possible[0].fraction:.0%}".replace("%", " %")
        known = "the largest saving" if of_limit is not None else "the largest saving beside compute"
        parts.append(f"{known} is {possible[0].what}, at most {most} of the step")
    elif shares and of_limit is not None:
        parts.append("nothing measured leaves more than half a percent to save")
    sentence = "; ".join(part for part in parts if part) or "the folder says nothing of how it went"
    is_bad = run.was_cut_short or run.is_unread or _is_lost(run) or "loss rose" in learned or "reward fell" in learned
    return Verdict(sentence[0].upper() + sentence[1:] + ".", is_bad, advice)


def _state(run: Run) -> str:
    if run.state == DONE:
        return "" if not _is_lost(run) else f"the loss is no number at {_step(run)}"
    return f"{state_words(run)}{_left(run)}" if run.state == RUNNING else state_words(run)


def _step(run: Run) -> str:
    return f"step {run.last_step:,}{f' of {run.planned_steps:,}' if run.planned_steps else ''}"


def state_words(run: Run) -> str:
    """Where a run of any kind stands, and for one that stopped or failed: why."""
    if run.ending is not None:
        return run.ending.words
    # A run that was killed while it stopped has left the reason in an event, not in its last line.
    stops = [event for event in run.events if event.kind in (metrics.STOPPED, metrics.FAILED)]
    return {
        STARTING: _starting(run),
        RUNNING: f"running, {_step(run)}",
        DONE: f"done after {_step(run)}",
        STOPPED: f"stopped when asked to, at {_step(run)}",
        DIED: max(stops, key=lambda event: event.at or 0.0).words
        if stops
        else f"ended at {_step(run)} without a summary: it was killed, or it failed",
    }[run.state]


def state_verdict(run: Run) -> Verdict:
    """Where a run stands, as the sentence of a page that has nothing else to judge by."""
    words = state_words(run)
    return Verdict(words[0].upper() + words[1:] + ("" if words.endswith(".") else "."), run.was_cut_short)


def _starting(run: Run) -> str:
    if run.is_unread:
        return "no step can be read: the metrics are damaged"
    silent_s = run.silent_s or 0.0
    silence = f", and nothing was written for {format_seconds(silent_s)}" if silent_s > QUIET_S else ""
    return f"no step is done yet{silence}"


def _learned(run: Run) -> str:
    """What became of the loss, or of rewards, where there are enough: the first steps' against the last tenth's."""
    name = "reward" if run.figure("reward") else "loss"
    values, last = [value for _, value in run.figure(name)], run.tail(name)
    if run.state != DONE or len(values) < 20 or last is None or not all(map(math.isfinite, values[:3])):
        return ""
    first = sum(values[:3]) / 3
    way = "fell" if last.p80 < first else "rose" if last.p20 > first else "stayed as it was,"
    return f"the {name} {way} from {first:.3g} in the first 3 steps to {last.median:.3g} in {run.tail_words}"


def _next(run: Run) -> str:
    """How to go on with a run that has not come to its end."""
    if run.state not in (DIED, STOPPED):
        return ""
    kept = [event.step for event in run.events if event.kind == metrics.CHECKPOINT]
    if not kept:
        return "there is no checkpoint to go on from"
    return f"`tilemesh {run.kind} --resume {run.folder.rstrip('/')}` goes on after step {max(kept):,}"


def _left(run: Run) -> str:
    taken = run.step_time()
    if taken is None or run.planned_steps is None:
        return ""
    if run.last_step >= run.planned_steps:
        return ", ending"
    return f", about {format_seconds(max(1.0, (run.planned_steps - run.last_step) * taken.median))} left"


def _is_lost(run: Run) -> bool:
    losses = run.figure("loss")
    return bool(losses) and not math.isfinite(losses[-1][1])
