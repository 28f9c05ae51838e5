"""One figure of a calibration: what is predicted, what bounds it, and how it is measured, in that order.

A figure is built whole before anything runs, so its prediction cannot have seen the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tilemesh.core.calibration import Part
from tilemesh.measure.machine import Stamp
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import Comparison

# What well-written code gets of a peak: matrix products lose to edges and clocks, streams to refresh and turnarounds.
MATMUL_SHARE = 0.75
MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class FigureOutcome:
    """What measuring gave, in the figure's unit; `case` says what it settled on (size, routine)."""

    measured: Sample | None
    peers: Mapping[str, Sample] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    case: Mapping[str, CaseValue] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure to be measured. `rate` is the name `core.calibration.Rates` knows it by; `key` for a rate of several."""

    part: Part
    rate: str
    name: str
    case: Mapping[str, CaseValue]
    unit: str
    predicted: float | None
    limit: float | None
    missing: Mapping[str, str]
    measure: Callable[[], FigureOutcome]
    dtype: str = ""
    key: str = ""
    """Which of several: the dtype of a matmul if not said otherwise."""

    def row(self, outcome: FigureOutcome, stamp: Stamp) -> Row:
        """The figure and what was measured, side by side."""
        missing = {**self.missing, **outcome.missing}
        if outcome.measured is None:
            # Peers were run to stand beside ours; without ours they stand beside nothing.
            missing.setdefault("measured", "could not be measured")
        return Row(
            name=self.name,
            case={**self.case, **outcome.case},
            unit=self.unit,
            predicted=self.predicted,
            measured=outcome.measured,
            limit=self.limit,
            peers=outcome.peers,
            missing=missing,
            **stamp,
        )


def best(result: Comparison, amount: float | None, peers: Iterable[str] = ()) -> FigureOutcome:
    """The fastest candidate that is not a peer, as a rate of `amount` a second, or as seconds when that is None."""
    samples = {name: sample if amount is None else sample.rate(amount) for name, sample in result.items()}
    named = set(peers)
    ours = {name: sample for name, sample in result.items() if name not in named}
    missing = {name: why for name, why in result.missing.items() if name in named}
    if not ours:
        reasons = [f"{name}: {why}" for name, why in result.missing.items() if name not in named]
        return FigureOutcome(None, missing={"measured": "; ".join(reasons), "peers": "nothing of ours to compare with"})
    winner = min(ours, key=lambda name: ours[name].median)
    return FigureOutcome(samples[winner], {n: s for n, s in samples.items() if n in named}, missing, {"by": winner})


def best_size(seconds_of: Callable[[int], float], sizes: Iterable[int], longest_s: float, *, slack: float = 0.0) -> int:
    """The size of a square matmul with the highest rate, of those whose one call stays below `longest_s`.

    Sizes go up; the next is tried only when this one's time and its growth say it will fit. So a dtype that the
    processor has no unit for, which may be hundreds of times slower, ends at a small size instead of taking minutes.
    With `slack`, a larger size wins even if slower by that share: for times too rough to choose between close rates.
    """
    fastest, highest, before, seconds = 0, 0.0, 0, 0.0
    for size in sizes:
        if before and seconds * (size / before) ** 3 > longest_s:
            break
        seconds = seconds_of(size)
        rate = size**3 / seconds
        if rate > highest * (1 - slack):
            fastest = size
        highest, before = max(highest, rate), size
    return fastest
