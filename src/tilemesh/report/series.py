"""A figure over steps, made small enough to draw without hiding what matters: means with lowest and highest.

Steps that are missing break the line, and a NaN or infinite value is kept apart: neither is ever filled in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilemesh.report.draw import Line

MOST = 400
"""Buckets of a line: more than a screen can tell apart."""


@dataclass(frozen=True)
class SeriesBucket:
    """Some steps in a row. `mean`, `low` and `high` are of the numbers; `bad` counts NaN and infinite values."""

    first: int
    last: int
    mean: float | None
    low: float | None
    high: float | None
    bad: int
    follows: bool
    """Whether the step before `first` is there too."""

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2

    @property
    def steps(self) -> str:
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"


def buckets(points: Sequence[tuple[int, float]], most: int = MOST, *, apart: int | None = None) -> list[SeriesBucket]:
    """Points (step, value) in at most `most` buckets; steps further apart than `apart` leave a gap. Without it: than
    nine of ten are, as what is measured every so many steps has no gaps between."""
    ordered = sorted(points)
    if apart is None:
        distances = sorted(after[0] - before[0] for before, after in itertools.pairwise(ordered))
        apart = distances[(len(distances) - 1) * 9 // 10] if distances else 1
    width = max(1, -(-len(ordered) // most))
    done: list[SeriesBucket] = []
    group: list[tuple[int, float]] = []
    previous: int | None = None
    follows = False
    for step, value in ordered:
        is_gap = previous is not None and step - previous > apart
        if group and (is_gap or len(group) == width):
            done.append(_bucket(group, follows))
            group, follows = [], not is_gap
        group.append((step, value))
        previous = step
    return [*done, _bucket(group, follows)] if group else done


def _bucket(group: Sequence[tuple[int, float]], follows: bool) -> SeriesBucket:
    numbers = [value for _, value in group if math.isfinite(value)]
    mean = sum(numbers) / len(numbers) if numbers else None
    low, high = (min(numbers), max(numbers)) if numbers else (None, None)
    return SeriesBucket(group[0][0], group[-1][0], mean, low, high, len(group) - len(numbers), follows)


def ends(buckets: Iterable[SeriesBucket]) -> list[float]:
    """The lowest and highest numbers of all buckets that have any."""
    return [value for bucket in buckets for value in (bucket.low, bucket.high) if value is not None]


def gaps(steps: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of every stretch of steps that is missing between two that are there."""
    ordered = sorted(set(steps))
    return [(a + 1, b - 1) for a, b in itertools.pairwise(ordered) if b - a > 1]


def line(name: str, buckets: Sequence[SeriesBucket], colour: int, *, dashed: bool = False, dots: bool = False) -> Line:
    """The means joined, lowest and highest shaded behind them, broken where steps are missing or no numbers."""
    points: list[tuple[float, float | None]] = []
    band: list[tuple[float, float, float] | None] = []
    for bucket in buckets:
        if not bucket.follows and points:
            points.append((bucket.first, None))
            band.append(None)
        points.append((bucket.middle, bucket.mean))
        shaded = bucket.low is not None and bucket.high is not None and bucket.last > bucket.first
        band.append(
            (bucket.middle, bucket.low, bucket.high)
            if shaded and bucket.low is not None and bucket.high is not None
            else None
        )
    has_band = any(bucket is not None for bucket in band)
    return Line(name, points, colour, dashed=dashed, dots=dots, band=band if has_band else ())
