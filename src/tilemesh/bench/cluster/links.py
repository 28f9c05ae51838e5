"""Which pairs of ranks are measured when, and what their readings say: who is slow, by name. Pure.

The one idea: a link is judged by links of its kind (inside a host, between hosts), a rank by the other ranks. Who is at
an end of every slow link is named instead of the links. That takes three alike; with fewer a reading is only held to
what the hardware promises, and to itself: messages that took far longer than the others were lost on the way.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tilemesh.core.units import format_bytes, format_seconds

Kind = Literal["inside a host", "between hosts"]

SLOW = 0.7
"""Of a good link's bandwidth, or of the ranks' median speed: below that it is called slow."""
FAR = 3.0
"""Times a good link's latency: beyond that it is called far."""
GOOD = 0.8
"""Of all links of a kind, so many may be worse than a good one: of three hosts a bad one spoils two links of three."""
UNSTEADY = 20.0
"""Times its own median latency, and beyond `UNSTEADY_S`: a message that took so long was sent again, or held up."""
UNSTEADY_S = 0.05
PROMISED = 0.5
"""Of the bandwidth that the hardware promises: below that it is said."""


@dataclass(frozen=True)
class RankSeat:
    """Where a rank is."""

    rank: int
    host: str
    device: str

    @property
    def words(self) -> str:
        return f"rank {self.rank} ({self.device} of {self.host})"


@dataclass(frozen=True)
class LinkReading:
    """What was read between two ranks: a small message's time one way, that of the slowest in a hundred, and the rate
    of large ones."""

    a: int
    b: int
    latency_s: float
    slowest_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Fault:
    """What is not as it should be: whose, in what, and what was read beside what was expected."""

    who: str
    what: str


def kind_of(seats: Sequence[RankSeat], a: int, b: int) -> Kind:
    return "inside a host" if seats[a].host == seats[b].host else "between hosts"


def rounds(seats: Sequence[RankSeat]) -> list[list[tuple[int, int]]]:
    """Pairs to measure, those of a round at one time: no host is in two of them, so that no link is shared.

    Inside a host all pairs; between two hosts the first rank of one with the first of the other, and so on: with an
    adapter for each GPU these are the rails.
    """
    hosts: dict[str, list[int]] = defaultdict(list)
    for seat in seats:
        hosts[seat.host].append(seat.rank)
    inside = [list(itertools.combinations(ranks, 2)) for ranks in hosts.values()]
    taken = [
        [pair for pair in group if pair is not None]
        for group in itertools.zip_longest(*inside)
        if inside and any(group)
    ]
    for meetings in _tournament(list(hosts)):
        rails = [list(zip(hosts[one], hosts[other], strict=False)) for one, other in meetings]
        taken += [[pair for pair in group if pair is not None] for group in itertools.zip_longest(*rails)]
    return taken


def _tournament(names: list[str]) -> list[list[tuple[str, str]]]:
    """Every two meet once, each in at most one meeting of a round (the circle method)."""
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    days = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        days.append([(one, other) for one, other in pairs if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return days


def faults(
    seats: Sequence[RankSeat],
    links: Sequence[LinkReading],
    speeds: Mapping[int, float],
    promised: Mapping[Kind, float] | None = None,
) -> list[Fault]:
    """What is slow. `speeds`: of each rank's own computing, in any unit; `promised`: bytes per second by kind."""
    return [*_slow_ranks(seats, speeds), *_slow_links(seats, links), *_unpromised(seats, links, promised or {})]


def _slow_ranks(seats: Sequence[RankSeat], speeds: Mapping[int, float]) -> Iterable[Fault]:
    if len(speeds) < 3:
        return
    usual = statistics.median(speeds.values())
    for rank, speed in sorted(speeds.items(), key=lambda item: item[1]):
        if speed < SLOW * usual:
            yield Fault(seats[rank].words, f"computes at {speed / usual:.2f} of the others' speed")


def _slow_links(seats: Sequence[RankSeat], links: Sequence[LinkReading]) -> Iterable[Fault]:
    """By kind: a host or rank at one end of every slow link is named, else the links."""
    for kind in ("inside a host", "between hosts"):
        mine = [link for link in links if kind_of(seats, link.a, link.b) == kind]
        bad = {link: words for link in mine if (words := _ails(link, mine))}
        while bad:
            culprit = _culprit(seats, kind, mine, bad)
            if culprit is None:
                for link, words in bad.items():
                    yield Fault(f"{seats[link.a].words} with {seats[link.b].words}", words)
                break
            name, ends = culprit
            worst = min((link for link in bad if ends & {link.a, link.b}), key=lambda link: link.bytes_per_s)
            yield Fault(name, f"every link {kind}: {bad[worst]} at worst")
            bad = {link: words for link, words in bad.items() if not ends & {link.a, link.b}}


def _ails(link: LinkReading, alike: Sequence[LinkReading]) -> str:
    """What is wrong with a link beside those of its kind; empty where nothing is."""
    if link.slowest_s > max(UNSTEADY_S, UNSTEADY * link.latency_s):
        slowest, usual = format_seconds(link.slowest_s), format_seconds(link.latency_s)
        return f"of 100 messages one took {slowest} where {usual} is usual: lost and sent again, or held up"
    if len(alike) < 3:
        return ""
    rate = _usual(sorted(other.bytes_per_s for other in alike))
    if link.bytes_per_s < SLOW * rate:
        return f"{format_bytes(round(link.bytes_per_s))}/s beside {format_bytes(round(rate))}/s of good ones"
    latency = _usual(sorted((other.latency_s for other in alike), reverse=True))
    if link.latency_s > FAR * latency:
        return f"{format_seconds(link.latency_s)} for a small message beside {format_seconds(latency)} of good ones"
    return ""


def _usual(from_worst: Sequence[float]) -> float:
    """What a good one reads."""
    return from_worst[math.ceil(GOOD * (len(from_worst) - 1))]


def _culprit(
    seats: Sequence[RankSeat], kind: Kind, alike: Sequence[LinkReading], bad: Mapping[LinkReading, str]
) -> tuple[str, set[int]] | None:
    """Who is at an end of at least two links of which all are bad, while others' are not: a host, or a rank of one."""
    ends: dict[str, set[int]] = defaultdict(set)
    for seat in seats:
        ends[f"host {seat.host}" if kind == "between hosts" else seat.words].add(seat.rank)
    guilty = []
    for name, ranks in ends.items():
        touching = [link for link in alike if ranks & {link.a, link.b}]
        if len(touching) >= 2 and all(link in bad for link in touching) and len(touching) < len(alike):
            guilty.append((len(touching), name, ranks))
    if not guilty:
        return None
    _, name, ranks = max(guilty, key=lambda entry: entry[0])
    return name, ranks


def _unpromised(
    seats: Sequence[RankSeat], links: Sequence[LinkReading], promised: Mapping[Kind, float]
) -> Iterable[Fault]:
    for kind, rate in promised.items():
        read = [link.bytes_per_s for link in links if kind_of(seats, link.a, link.b) == kind]
        if read and statistics.median(read) < PROMISED * rate:
            got, rated = format_bytes(round(statistics.median(read))), format_bytes(round(rate))
            yield Fault(f"links {kind}", f"{got}/s at the median, and the hardware promises {rated}/s")
