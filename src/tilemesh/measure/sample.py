"""What repeated measurements of one thing are boiled down to: median, p20, p80 and how many.

Means hide a stalled core and minima hide everything else, so neither is kept. Two samples are
equal when nothing in them says otherwise: a difference under 2 %, or spreads that overlap, is
not a result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tilemesh.core.errors import UsageError

EQUAL_WITHIN = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """Median and spread of `n` measurements, all in the unit of the row that holds them."""

    median: float
    p20: float
    p80: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        """Boil measurements down; quantiles between two measurements are interpolated."""
        ordered = sorted(values)
        if not ordered:
            raise UsageError("a sample of no measurements: at least one value is needed")
        if not all(math.isfinite(value) for value in ordered):
            raise UsageError(f"a sample of measurements that are not finite: {ordered}")
        return cls(_quantile(ordered, 0.5), _quantile(ordered, 0.2), _quantile(ordered, 0.8), len(ordered))

    def scaled(self, factor: float) -> Sample:
        """The same measurements in another unit: every value times a positive factor."""
        return Sample(self.median * factor, self.p20 * factor, self.p80 * factor, self.n)

    def rate(self, amount: float) -> Sample:
        """Times turned into rates of `amount` (bytes, FLOPs, tokens) a second; the slow end becomes p20."""
        return Sample(amount / self.median, amount / self.p80, amount / self.p20, self.n)


def equal(a: Sample, b: Sample, unit: str = "") -> bool:
    """Whether two samples cannot be told apart: medians closer than 2 % (not of a loss), or p20-p80 that overlap."""
    close = unit != "nats" and abs(a.median - b.median) < EQUAL_WITHIN * min(abs(a.median), abs(b.median))
    return a.median == b.median or close or (a.p20 <= b.p80 and b.p20 <= a.p80)


def speedup(ours: Sample, peer: Sample, *, higher_is_better: bool = False) -> float:
    """How many times faster ours is: peer / ours for times, ours / peer for rates; above 1, ours is faster."""
    return ours.median / peer.median if higher_is_better else peer.median / ours.median


def _quantile(ordered: list[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
