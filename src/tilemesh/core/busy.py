"""How busy a machine was with other work while something was measured on it, judged from what the kernel counts.

A `Busyness` is stored with what was measured (a calibration, a fit, a run), so that whoever reads it knows how far to
trust it. Pure: the counts are read in `measure/busy.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

SECTION = "busy"  # of a calibration, and of what is known of a run's machine

MOST_OTHERS = 0.05  # of the cores, used by others: beyond, figures and choices come out wrong
MOST_STOLEN = 0.02  # of the cores, taken by the hypervisor
MOST_SPREAD = 1.5  # p80 / p20 of a typical figure's readings
MOST_LOAD = 1.0  # processes that wanted to run, per core, before it began; only where nothing else is known


class Counts(NamedTuple):
    """Seconds of the cores that this process may use, since the machine started; `load`: over the last minute."""

    at_s: float
    used_s: float
    idle_s: float
    stolen_s: float
    load: float


@dataclass(frozen=True)
class Busyness:
    """Of a stretch of time. `others`, `stolen`: shares of the cores; None: the kernel does not tell.

    `load`: processes per core that wanted to run before it began. `spread`: p80 / p20 of a typical figure's readings;
    0: there were none.
    """

    others: float | None = None
    stolen: float | None = None
    load: float = 0.0
    spread: float = 0.0

    @property
    def score(self) -> float:
        """How disturbed: above 1, too much. The worst of what is known counts."""
        shares = [self.spread / MOST_SPREAD]
        if self.others is None:
            shares.append(self.load / MOST_LOAD)
        else:
            shares += [self.others / MOST_OTHERS, (self.stolen or 0.0) / MOST_STOLEN]
        return max(shares)

    @property
    def is_busy(self) -> bool:
        return self.score > 1.0

    @property
    def words(self) -> str:
        """What disturbed it; empty: nothing did."""
        causes = []
        if self.others is not None and self.others > MOST_OTHERS:
            causes.append(f"other work used {self.others:.0%} of the cores")
        if self.stolen is not None and self.stolen > MOST_STOLEN:
            causes.append(f"{self.stolen:.0%} of the cores' time was stolen by the hypervisor")
        if self.others is None and self.load > MOST_LOAD:
            causes.append(f"the load average was {self.load:.1f} per core before it began")
        if self.spread > MOST_SPREAD:
            causes.append(f"readings spread {self.spread:.1f}-fold")
        return ", ".join(causes)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: object) -> Busyness | None:
        """The inverse of `to_dict`; None for anything else, such as what an older version stored."""
        if not isinstance(data, Mapping):
            return None
        known = {name: data[name] for name in ("others", "stolen", "load", "spread") if name in data}
        if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in known.values()):
            return None
        return cls(**{name: float(value) for name, value in known.items()})


def judge(before: Counts | None, after: Counts | None, own_s: float, cores: int, visible: int) -> Busyness:
    """`own_s`: core seconds that were not others'. `cores` of the `visible` ones may be used at once.

    Where a quota grants fewer cores than are visible, others matter only as far as they left none idle.
    """
    if before is None or after is None:
        return Busyness(load=0.0 if before is None else before.load / cores)
    passed_s, used_s = after.at_s - before.at_s, after.used_s - before.used_s
    load = before.load / cores
    if passed_s <= 0 or (used_s <= 0 and own_s > 0):
        return Busyness(load=load)
    others_s, stolen_s = max(0.0, used_s - own_s), max(0.0, after.stolen_s - before.stolen_s)
    if cores < visible:
        others_s = max(0.0, others_s - (after.idle_s - before.idle_s))
    return Busyness(min(1.0, others_s / (passed_s * cores)), min(1.0, stolen_s / (passed_s * cores)), load)


def replaces(new: Busyness, stored: Busyness | None) -> bool:
    """Whether what was measured now should take the place of what is stored; None: nobody knows of that."""
    return stored is None or not new.is_busy or new.score <= stored.score


def counts_of(stat: str, cores: Collection[int], ticks_per_s: int, at_s: float, load: float) -> Counts | None:
    """From the text of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq and steal of these cores."""
    names, used, idle, stolen = {f"cpu{core}" for core in cores}, 0, 0, 0
    lines = [line.split() for line in stat.splitlines()]
    times_of_cores = [[int(word) for word in words[1:9]] for words in lines if words and words[0] in names]
    for line in times_of_cores:
        user, nice, system, idle_now, waiting, interrupts, soft, steal = [*line, *[0] * 8][:8]
        used += user + nice + system + interrupts + soft
        idle += idle_now + waiting
        stolen += steal
    if not times_of_cores:
        return None
    return Counts(at_s, used / ticks_per_s, idle / ticks_per_s, stolen / ticks_per_s, load)
