"""What lies between ranks: wires, and the links that messages of one round share.

A topology says how long each message of a round takes when all of them are under way at once. A rank's own messages
follow each other (`simulate` sees to that), so only those of *different* ranks share a link: with u ranks on a link
that carries c wires' worth, each gets c/u of a wire. Where ranks `period` apart are alike, the messages of one period
stand for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from tilemesh.core.errors import UsageError


class LinkCost(Protocol):
    """Seconds for a number of bytes: a wire's, or a curve that was measured."""

    def seconds(self, nbytes: float) -> float: ...


@dataclass(frozen=True)
class Wire:
    """One direction between two ranks."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


Sent = tuple[int, int, float]  # source, target, bytes


class Topology(Protocol):
    @property
    def ranks(self) -> int: ...

    @property
    def period(self) -> int:
        """Ranks this far apart (or a multiple) are alike: 1 where all are, the number of ranks where none are."""

    def times(self, messages: Sequence[Sent], period: int) -> list[float]:
        """Seconds of each message when all are under way.

        `period`: these are the messages of (to) the first so many ranks, and all others do alike.
        """


@dataclass(frozen=True)
class Flat:
    """Every rank reaches every other over a wire of its own: nothing is shared but the ranks' own ends."""

    ranks: int
    every: LinkCost
    is_uniform: bool = True  # False: count every rank, for tests of the counting

    @property
    def period(self) -> int:
        return 1 if self.is_uniform else self.ranks

    def times(self, messages: Sequence[Sent], period: int) -> list[float]:
        return [self.every.seconds(nbytes) for _, _, nbytes in messages]


@dataclass(frozen=True)
class Ring:
    """Ranks in a circle, a wire each way between neighbours; what goes further shares the wires on its way.

    The shorter way is taken; each hop after the first adds `hop_s`.
    """

    ranks: int
    every: Wire
    hop_s: float = 0.0

    @property
    def period(self) -> int:
        return 1

    def times(self, messages: Sequence[Sent], period: int) -> list[float]:
        ways = [self._way(source, target) for source, target, _ in messages]
        routes = [(source, *way) for (source, _, _), way in zip(messages, ways, strict=True)]
        users = self._most_users(routes) if period == self.ranks else self._most_of_alike(routes, period)
        return [
            self.every.latency_s + max(0, hops - 1) * self.hop_s + nbytes * max(1, shared) / self.every.bytes_per_s
            for (_, _, nbytes), (_, hops), shared in zip(messages, ways, users, strict=True)
        ]

    def _way(self, source: int, target: int) -> tuple[int, int]:
        """(+1 or -1, hops)."""
        ahead = (target - source) % self.ranks
        return (1, ahead) if 2 * ahead <= self.ranks else (-1, self.ranks - ahead)

    def _most_users(self, routes: Sequence[tuple[int, int, int]]) -> list[int]:
        """For each route the most messages on any wire of it: loads by prefix sums, their maxima by doubling."""
        tables = {step: self._maxima([route for route in routes if route[1] == step]) for step in (1, -1)}
        result = []
        for source, step, hops in routes:
            first = source if step == 1 else (source - hops) % self.ranks
            level = hops.bit_length() - 1
            table = tables[step][level] if hops else [0]
            last = (first + hops - (1 << level)) % self.ranks if hops else 0
            result.append(max(table[first], table[last]) if hops else 0)
        return result

    def _most_of_alike(self, routes: Sequence[tuple[int, int, int]], period: int) -> list[int]:
        """The same where every route is taken again from each rank a period on: wires a period apart are alike, too."""
        loads = {step: [0] * period for step in (1, -1)}
        places = []
        for source, step, hops in routes:
            first = source if step == 1 else source - hops
            places.append([(first + i) % period for i in range(min(hops, period))])
            for i in range(period):
                loads[step][(first + i) % period] += (hops + period - 1 - i) // period
        return [
            max((loads[step][place] for place in passed), default=0)
            for (_, step, _), passed in zip(routes, places, strict=True)
        ]

    def _maxima(self, routes: Sequence[tuple[int, int, int]]) -> list[list[int]]:
        """[level][wire]: the highest load among 2^level wires from there on. Wire i lies between i and i + 1."""
        n = self.ranks
        change = [0] * (n + 1)
        for source, step, hops in routes:
            first = source if step == 1 else (source - hops) % n
            change[first] += 1
            change[min(first + hops, n)] -= 1
            if first + hops > n:  # round the end
                change[0] += 1
                change[first + hops - n] -= 1
        table = [list(accumulate(change[:n]))]
        longest = max((hops for _, _, hops in routes), default=1)
        while 2 << (len(table) - 1) <= longest:
            below, half = table[-1], 1 << (len(table) - 1)
            table.append([max(below[i], below[(i + half) % n]) for i in range(n)])
        return table


@dataclass(frozen=True)
class LinearArray:
    """Ranks in a row, a wire each way between neighbours and none between the ends.

    A logical ring on it sends its message from the last rank to the first back over all wires. With wormhole routing a
    node passes on what comes while it still comes: the message takes as long as over one wire, plus `hop_s` for each
    further hop, and since the others all go the other way it shares no wire. Where nodes store a message before they
    pass it on (`stores`), every hop costs the whole message again.
    """

    ranks: int
    every: Wire
    hop_s: float = 0.0
    stores: bool = False

    @property
    def period(self) -> int:
        return self.ranks

    def times(self, messages: Sequence[Sent], period: int) -> list[float]:
        loads: Counter[tuple[int, int]] = Counter()
        for source, target, _ in messages:
            loads.update(self._wires(source, target))
        result = []
        for source, target, nbytes in messages:
            wires = self._wires(source, target)
            shared = max((loads[wire] for wire in wires), default=1)
            one_s = self.every.latency_s + nbytes * shared / self.every.bytes_per_s
            further = max(0, len(wires) - 1)
            result.append(one_s * (1 + further) if self.stores else one_s + further * self.hop_s)
        return result

    def _wires(self, source: int, target: int) -> list[tuple[int, int]]:
        """The wires on the way, each as the two neighbours it leads from and to."""
        step = 1 if target > source else -1
        return [(place, place + step) for place in range(source, target, step)]


@dataclass(frozen=True)
class TwoLevel:
    """Nodes of neighbouring ranks: fast wires inside (NVLink), slower ones between (InfiniBand).

    `adapters`: how many wires leave and enter a node; as many as it has ranks unless said otherwise.
    """

    ranks: int
    node_size: int
    inside: Wire
    between: Wire
    adapters: int | None = None

    def __post_init__(self) -> None:
        if self.node_size < 1 or (self.adapters is not None and self.adapters < 1):
            raise UsageError(f"nodes of {self.node_size} ranks with {self.adapters} adapters: expected at least 1")

    @property
    def period(self) -> int:
        if self.inside == self.between and self.adapters is None:
            return 1
        return min(self.node_size, self.ranks) if self.ranks % min(self.node_size, self.ranks) == 0 else self.ranks

    def times(self, messages: Sequence[Sent], period: int) -> list[float]:
        size, wires = self.node_size, self.adapters or self.node_size
        nodes = -(-period // size)  # nodes beyond are alike; the last may not be full
        across = [(source, target) for source, target, _ in messages if source // size != target // size]
        leaving = Counter(source // size % nodes for source in {source for source, _ in across})
        entering = Counter(target // size % nodes for target in {target for _, target in across})
        result = []
        for source, target, nbytes in messages:
            if source // size == target // size:
                result.append(self.inside.seconds(nbytes))
                continue
            users = max(leaving[source // size % nodes], entering[target // size % nodes])
            share = max(1.0, users / wires)
            result.append(self.between.latency_s + nbytes * share / self.between.bytes_per_s)
        return result
