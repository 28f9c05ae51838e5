"""A trace as values: what each rank did when, cut into steps, and how its seconds divide by kind.

Spans nest: an exchange inside a backward pass is the pass's time too. A second is counted once, for the innermost span
that covers it, except that whatever happens inside waiting is waiting.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from tilemesh.core.step.action import WITHIN
from tilemesh.runs.files import Unread
from tilemesh.runs.values import MOST

COMPUTE, EXCHANGE, IDLE, DATA, EVALUATE, CHECKPOINT, OTHER = (
    "compute", "exchange", "idle", "data", "evaluate", "checkpoint", "other"
)  # fmt: skip
KINDS: Mapping[str, tuple[str, int]] = {
    COMPUTE: ("compute", 0),
    EXCHANGE: ("exchanges", 1),
    IDLE: ("waiting for ranks", 6),
    DATA: ("waiting for data", 4),
    EVALUATE: ("held-out loss", 5),
    CHECKPOINT: ("checkpoints", 2),
    OTHER: ("between spans", 3),
}
"""By kind: what a page calls it, and its colour."""
ACTION = "action"
"""The kind of spans that are actions of a step's list; their time is computing, but for the waiting inside."""
_WHOLE = (IDLE, EVALUATE, CHECKPOINT)
"""Kinds that keep the seconds of what happens inside them."""
WARM_UP = 3


@dataclass(frozen=True)
class TraceSpan:
    """A stretch of one rank's time, in seconds since the trace began."""

    rank: int
    lane: int
    name: str
    kind: str
    began_s: float
    ended_s: float
    depth: int = 0
    words: str = ""
    action: str = ""
    """The kind of action of a step's list that it is: "F"; empty where it is none."""
    live: float | None = None
    """Bytes kept for backward passes when it had ended, where they were counted."""


@dataclass(frozen=True)
class TracedStep:
    number: int
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class TraceTimeline:
    """All spans of the main lane of each rank, by rank, and the steps they belong to."""

    ranks: Mapping[int, Sequence[TraceSpan]]
    steps: Sequence[TracedStep]
    experts: Mapping[int, Sequence[TraceSpan]] = field(default_factory=dict)
    """What passes exchanged with experts of other ranks, beside the main lane."""


def with_steps(events: Iterable[Any]) -> TraceTimeline:
    """The timeline of a run's trace; `Unread` where it has no steps."""
    traced = timeline(events)
    if not traced.steps:
        raise Unread("holds no steps")
    return traced


def timeline(events: Iterable[Any]) -> TraceTimeline:
    """Spans of the Trace Event Format; what is not one is passed over."""
    all_spans: dict[int, list[TraceSpan]] = {}
    experts: dict[int, list[TraceSpan]] = {}
    numbers: dict[int, list[float]] = {}
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        began, lasted, rank = event.get("ts"), event.get("dur"), event.get("pid")
        if not (_is_time(began) and _is_time(lasted) and lasted >= 0 and _is_small(rank)):
            continue
        began_s, ended_s = began / 1e6, (began + lasted) / 1e6
        details = event.get("args") if isinstance(event.get("args"), dict) else {}
        assert isinstance(details, dict)
        lane = event.get("tid")
        lane = lane if _is_small(lane) else 0
        name, category = str(event.get("name", "?")), str(event.get("cat"))
        kind = category if category in KINDS else COMPUTE
        action = str(details.get("action", "")) if category == ACTION else ""
        words = ", ".join(f"{key} {value}" for key, value in details.items() if key != "step")
        live = details.get("live")
        counted = float(live) if _is_time(live) else None
        span = TraceSpan(rank, lane, name, kind, began_s, ended_s, 0, words, action, counted)
        (experts if action in WITHIN else all_spans).setdefault(rank, []).append(span)
        step = details.get("step")
        if _is_small(step):
            ends = numbers.setdefault(step, [math.inf, -math.inf])
            ends[0], ends[1] = min(ends[0], span.began_s), max(ends[1], span.ended_s)
    # One lane per rank: the one that steps run on, which is where most spans are.
    ranks = {rank: _nested(_main_lane(spans)) for rank, spans in sorted(all_spans.items())}
    steps = [TracedStep(number, *ends) for number, ends in sorted(numbers.items())]
    beside = {rank: sorted(each, key=lambda span: span.began_s) for rank, each in sorted(experts.items())}
    return TraceTimeline(ranks, steps, beside)


def _is_time(value: object) -> TypeGuard[float]:
    """Microseconds that can be meant: within thirty years."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _is_small(value: object) -> TypeGuard[int]:
    """A rank, a lane or a step, and no number gone wild."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _main_lane(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    counts: dict[int, int] = {}
    for span in spans:
        counts[span.lane] = counts.get(span.lane, 0) + 1
    lane = max(counts, key=lambda number: (counts[number], -number))
    return [span for span in spans if span.lane == lane]


def _nested(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """By time, each with its depth; what lies inside waiting (or a checkpoint, or evaluation) takes its kind."""
    open_: list[TraceSpan] = []
    placed_spans = []
    for span in sorted(spans, key=lambda span: (span.began_s, -span.ended_s)):
        while open_ and span.began_s >= open_[-1].ended_s:
            open_.pop()
        kind = open_[-1].kind if open_ and open_[-1].kind in _WHOLE else span.kind
        placed = dataclasses.replace(span, kind=kind, depth=len(open_))
        placed_spans.append(placed)
        open_.append(placed)
    return placed_spans


def ordinary(steps: Sequence[TracedStep]) -> list[TracedStep]:
    """Steps without the first ones, which are slower; all of them where there are no others."""
    return [step for step in steps if step.number > WARM_UP] or list(steps)


def seconds_by_kind(spans: Sequence[TraceSpan], steps: Sequence[TracedStep]) -> dict[str, float]:
    """Seconds a step that one rank spent on each kind, over these steps; between spans is `other`."""
    totals: dict[str, float] = {}
    if not steps:
        return totals
    open_: list[TraceSpan] = []
    total_s, covered = sum(step.ended_s - step.began_s for step in steps), 0.0
    inside = [span for span in spans if any(s.began_s <= span.began_s < s.ended_s for s in _near(steps, span))]
    for span in inside:
        while open_ and span.began_s >= open_[-1].ended_s:
            open_.pop()
        lasted = span.ended_s - span.began_s
        totals[span.kind] = totals.get(span.kind, 0.0) + lasted
        if open_:
            outer = open_[-1].kind
            totals[outer] = totals.get(outer, 0.0) - lasted
        else:
            covered += lasted
        open_.append(span)
    totals[OTHER] = max(0.0, total_s - covered)
    return {kind: max(0.0, totals[kind]) / len(steps) for kind in KINDS if totals.get(kind, 0.0) > 0}


def _near(steps: Sequence[TracedStep], span: TraceSpan) -> Sequence[TracedStep]:
    """The steps that may hold a span: they follow each other, so at most two."""
    begun = bisect_right(steps, span.began_s, key=lambda step: step.began_s)
    return steps[max(0, begun - 2) : begun]


def last_steps(traced: TraceTimeline, most_spans: int, most_steps: int) -> list[TracedStep]:
    """As many of the last steps as can be drawn; one at least."""
    total = sum(len(spans) for spans in traced.ranks.values())
    per_step = max(1.0, total / max(1, len(traced.steps)))
    count = max(1, min(most_steps, int(most_spans / per_step)))
    return list(traced.steps[-count:])
