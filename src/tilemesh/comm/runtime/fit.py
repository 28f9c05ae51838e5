"""What collectives cost on this machine, as measured: curves of seconds over bytes, and what follows from them.

A fit belongs to one machine, transport, number of ranks and of the cores that they may use together, and was measured
with all ranks busy, because ranks that share cores are slowed by one another. It holds a curve for each collective of
the library's own and each shared-memory algorithm, and curves of the parts of which all others are made: one round of
messages (α and β), a reduction (γ), a copy, a meeting. What has no curve of its own is simulated over those. β is not
one number: bandwidth falls once buffers leave the caches, so a curve is a line in logarithms between each two measured
sizes.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tilemesh.comm.schedules.book import BOOK, build, is_shared
from tilemesh.comm.schedules.simulate import simulate
from tilemesh.comm.schedules.topology import Flat
from tilemesh.core.busy import Busyness
from tilemesh.core.calibration import find
from tilemesh.core.errors import RunError
from tilemesh.measure.machine import this_machine

SECTION = "collectives"  # of a calibration
PARTS = ("message", "reduce", "copy")


@dataclass(frozen=True)
class Curve:
    """Seconds over bytes. Below the first point as there, beyond the last in proportion to bytes.

    `spreads`: p20 and p80 of the readings at each point; empty where they are not known.
    """

    points: tuple[tuple[float, float], ...]
    spreads: tuple[tuple[float, float], ...] = ()

    def seconds(self, nbytes: float) -> float:
        points = self.points
        if nbytes <= points[0][0]:
            return points[0][1]
        if nbytes >= points[-1][0]:
            return points[-1][1] * nbytes / points[-1][0]
        place = bisect_right(points, (nbytes, math.inf))
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        share = math.log(nbytes / x0) / math.log(x1 / x0)
        return float(y0 * (y1 / y0) ** share)

    def around(self, nbytes: float) -> tuple[float, ...]:
        """The sizes measured on both sides of this one; itself, or the nearest, where there are no two."""
        sizes = [size for size, _ in self.points]
        if nbytes in sizes:
            return (nbytes,)
        place = bisect_right(sizes, nbytes)
        return tuple(sizes[max(0, place - 1) : place + 1])

    def spread(self, nbytes: float) -> tuple[float, float] | None:
        """p20 and p80 of what was read at this very size; None: nothing was, or nobody kept them."""
        sizes = [size for size, _ in self.points]
        return self.spreads[sizes.index(nbytes)] if self.spreads and nbytes in sizes else None

    @property
    def latency_s(self) -> float:
        """α: what the smallest costs."""
        return self.points[0][1]

    def bytes_per_s(self) -> list[tuple[float, float, float]]:
        """β by piece: (from, to, bytes per second more)."""
        pairs = zip(self.points, self.points[1:], strict=False)
        return [(x0, x1, (x1 - x0) / (y1 - y0)) for (x0, y0), (x1, y1) in pairs if y1 > y0]


@dataclass(frozen=True)
class Fit:
    """What was measured for one transport, number of ranks and of cores that these may use together.

    `curves`: by "collective/algorithm", and `PARTS`. `busy`: how much else the machine had to do; None: nobody looked.
    `layer_s`: seconds of a layer's passes on one rank while the others sleep, and while all do the same; None: of an
    earlier version. `worked_s`: what an exchange takes more where ranks come to it from computing than in a loop of
    exchanges; None: the same.
    """

    transport: str
    ranks: int
    cores: int
    sync_s: float
    curves: Mapping[str, Curve]
    when: str = ""
    busy: Busyness | None = None
    layer_s: tuple[float, float] | None = None
    worked_s: float | None = None

    def seconds(self, collective: str, algorithm: str, nbytes: int, node_size: int | None = None) -> float | None:
        """What a call is predicted to take; None when nothing is known that would tell."""
        curve = self.curves.get(f"{collective}/{algorithm}")
        if curve is not None:
            return curve.seconds(max(1, nbytes))
        if algorithm == "native" or algorithm not in BOOK[collective] or "message" not in self.curves:
            return None
        if is_shared(algorithm):
            return None  # without a curve of its own: no arena when it was fitted
        return float(self._simulated(collective, algorithm, _rounded(nbytes), node_size))

    def has_measured(self, collective: str, algorithm: str) -> bool:
        return f"{collective}/{algorithm}" in self.curves

    def beats(
        self, collective: str, one: str, other: str, nbytes: int, margin: float = 1.0, *, apart: bool = False
    ) -> bool:
        """Whether one was measured to be quicker by that factor at the sizes on both sides, not only in between.

        A curve has steps (a payload leaves a cache, an algorithm goes over to segments), which a line between two
        measured sizes does not know. Where the two cross inside, neither is sure. `apart`: nor is it where the readings
        of the two overlap (p20 to p80), because what was quicker in one run may then be the slower in the next.
        """
        first, second = (self.curves.get(f"{collective}/{name}") for name in (one, other))
        if first is None or second is None:
            seconds = [self.seconds(collective, name, nbytes) for name in (one, other)]
            return seconds[0] is not None and seconds[1] is not None and seconds[0] * margin <= seconds[1]
        sizes = {*first.around(max(1, nbytes)), *second.around(max(1, nbytes))}
        return all(
            first.seconds(size) * margin <= second.seconds(size)
            and not (apart and _overlap(first.spread(size), second.spread(size)))
            for size in sizes
        )

    @cached_property
    def _simulated(self) -> Any:
        return lru_cache(maxsize=4096)(self._simulate)

    def _simulate(self, collective: str, algorithm: str, nbytes: int, node_size: int | None) -> float:
        schedule = build(collective, algorithm, self.ranks, node_size=node_size)
        topology = Flat(self.ranks, self.curves["message"], is_uniform=False)
        return simulate(schedule, nbytes, topology, self).seconds + self.call_s

    @property
    def call_s(self) -> float:
        """What our own call costs before anything moves."""
        curve = self.curves.get("call")
        return 0.0 if curve is None else curve.latency_s

    # As a simulation's Work.
    def reduce_s(self, nbytes: float) -> float:
        return self.curves["reduce"].seconds(nbytes) if nbytes else 0.0

    def copy_s(self, nbytes: float) -> float:
        return self.curves["copy"].seconds(nbytes) if nbytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        curves = {name: [list(point) for point in curve.points] for name, curve in self.curves.items()}
        spreads = {name: [list(spread) for spread in curve.spreads] for name, curve in self.curves.items()}
        layer: dict[str, Any] = {} if self.layer_s is None else {"layer_s": list(self.layer_s)}
        layer |= {} if self.worked_s is None else {"worked_s": self.worked_s}
        return (
            layer
            | {
                "transport": self.transport,
                "ranks": self.ranks,
                "cores": self.cores,
                "sync_s": self.sync_s,
                "when": self.when,
                "curves": curves,
                "spreads": spreads,
            }
            | ({} if self.busy is None else {"busy": self.busy.to_dict()})
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fit:
        """The inverse of `to_dict`; raises KeyError, TypeError or ValueError for anything else."""
        curves = {}
        for name, points in data["curves"].items():
            pairs = tuple(sorted((float(x), float(y)) for x, y in points))
            # None in a fit that an earlier version has stored.
            spreads = tuple((float(p20), float(p80)) for p20, p80 in data.get("spreads", {}).get(name, ()))
            if not pairs or any(not 0 < number < math.inf for pair in (*pairs, *spreads) for number in pair):
                raise ValueError(f"curve {name} has points that are no measurements")
            if len(spreads) not in (0, len(pairs)):
                raise ValueError(f"curve {name} has {len(pairs)} points and {len(spreads)} spreads")
            curves[str(name)] = Curve(pairs, spreads)
        ranks, cores, sync_s = int(data["ranks"]), int(data["cores"]), float(data["sync_s"])
        busy = Busyness.from_dict(data.get("busy"))
        layer = data.get("layer_s")
        layer_s = None if layer is None else (float(layer[0]), float(layer[1]))
        if layer_s is not None and not all(0 < each < math.inf for each in layer_s):
            raise ValueError(f"layer_s is {layer_s}, which is no measurement")
        worked_s = None if data.get("worked_s") is None else float(data["worked_s"])
        if worked_s is not None and not 0 <= worked_s < math.inf:
            raise ValueError(f"worked_s is {worked_s}, which is no measurement")
        when = str(data.get("when", ""))
        return cls(str(data["transport"]), ranks, cores, sync_s, curves, when, busy, layer_s, worked_s)


def _overlap(first: tuple[float, float] | None, second: tuple[float, float] | None) -> bool:
    """Whether the readings of two (p20, p80) are known to overlap."""
    return first is not None and second is not None and first[0] <= second[1] and second[0] <= first[1]


def key_of(transport: str, ranks: int, cores: int) -> str:
    """Under which a fit lies in a calibration's section: ranks pinned to fewer cores have a fit of their own."""
    return f"{transport}/{ranks}/{cores}"


def stored_fit(transport: str, ranks: int, cores: int) -> str:
    """This machine's fit as JSON text; empty when there is none that can be read."""
    try:
        calibration = find(this_machine().id)
        if calibration is None:
            return ""
        fit = Fit.from_dict(calibration.extra[SECTION][key_of(transport, ranks, cores)])
    except (RunError, LookupError, TypeError, ValueError, AttributeError):  # damaged, or of another version: as if none
        return ""
    return json.dumps(fit.to_dict())


def _rounded(nbytes: int) -> int:
    """To three binary digits: a simulation is kept for sizes alike."""
    shift = max(0, nbytes.bit_length() - 3)
    return nbytes >> shift << shift
