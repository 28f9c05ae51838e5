"""Server traffic of `tilemesh bench methods`: bytes per second against workers and servers, and where a server is the
hotspot.

A round trip of one worker alone has two parts: the server at work on its messages, one at a time, and all the rest
(messages on their way, naps of whoever waits), which workers have side by side. From these two the simulator predicts
any number of workers; where ranks outnumber cores, no more than the cores can do is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilemesh.bench.harness import Estimate, make_row
from tilemesh.bench.methods.ranks import LENGTH
from tilemesh.core.cores import available_cores
from tilemesh.launch.calls import Ranks
from tilemesh.measure.method_curve import ServerLoad
from tilemesh.measure.ranks import ranks_case
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.methods.simulate import ServerTimes, hotspot, simulate_server

COUNTS = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 2)]
_LENGTH, _CLOCKS, _REPEATS = 1 << 18, 30, 3
_MANY = [1, 2, 4, 8, 16, 32, 64, 128]
_SERVERS = (1, 2, 4)
_SHARE = 0.9  # of what workers would do without a server's limits, below which it is a hotspot


@dataclass(frozen=True)
class RoundTrip:
    """One worker's pull and push, alone with so many servers: seconds, and seconds on a core of everybody."""

    whole_s: float
    busy_s: float
    """Of the busiest server."""
    cores_s: float
    servers: int = 1
    """That it was measured with."""

    @classmethod
    def of(cls, seen: Sequence[Sequence[float]], clocks: int) -> RoundTrip:
        worker, *servers = (pair for pair in seen if pair)
        on_cores = sum(on for _, on in [worker, *servers])
        return cls(worker[0] / clocks, max(busy for busy, _ in servers) / clocks, on_cores / clocks, len(servers))

    def times(self, servers: int) -> ServerTimes:
        """As the simulator wants them: four messages of a round trip are on their way while a server is free; of more
        servers each has its part of the bytes."""
        part_s = self.busy_s * self.servers / 2
        return ServerTimes(part_s, part_s, max(0.0, self.whole_s - self.busy_s) / 4, servers)

    def rate(self, workers: int, servers: int, clocks: int, cores: int) -> float:
        """Round trips per second of so many workers."""
        run = simulate_server(workers, clocks, lambda worker, clock: 0.0, math.inf, self.times(servers))
        return min(run.throughput, cores / self.cores_s)


def traffic_rows(ranks: Ranks) -> tuple[list[Row], RoundTrip, RoundTrip]:
    """Bytes per second of servers without any computing, and the round trips alone of large and of small messages."""

    def measured(counts: list[tuple[int, int]], length: int) -> list[list[list[float]]]:
        taken = ranks.call("tilemesh.bench.methods.ranks:traffic_runs", counts, length, _CLOCKS, timeout_s=120)
        return [[rank[number] for rank in taken] for number in range(len(counts))]

    small = RoundTrip.of(measured([(1, 1)], LENGTH)[0], _CLOCKS)
    turns = [measured(COUNTS, _LENGTH) for _ in range(_REPEATS)]
    alone = {}
    for servers in {servers for _, servers in COUNTS}:
        trips = [RoundTrip.of(turn[COUNTS.index((1, servers))], _CLOCKS) for turn in turns]
        alone[servers] = sorted(trips, key=lambda trip: trip.whole_s)[len(trips) // 2]
    rows, nbytes = [], 8 * _LENGTH
    for number, (workers, servers) in enumerate(COUNTS):
        taken = [max(pair[0] for pair in turn[number][:workers]) for turn in turns]
        predicted = alone[servers].rate(workers, servers, _CLOCKS, available_cores()) * nbytes
        rows.append(
            make_row(
                "server traffic",
                {"workers": workers, "servers": servers, "bytes": nbytes, **ranks_case(workers + servers)},
                Sample.of([workers * _CLOCKS * nbytes / seconds for seconds in taken]), unit="B/s",
                predicted=Estimate(None if workers == 1 else predicted, "it is what the others are predicted from"),
                limit=Estimate(None, "one copy each way is what the server itself does"),
                no_peers="no other parameter server here",
            )
        )  # fmt: skip
    return rows, alone[1], small


def hotspots(alone: RoundTrip, compute_s: float) -> tuple[list[ServerLoad], list[str]]:
    """Simulated for many workers that compute for so long between two round trips: loads, and where hotspots begin."""
    all_loads, words = [], []
    for servers in _SERVERS:
        loads = hotspot(_MANY, compute_s, alone.times(servers))
        all_loads += loads
        hot = next((load for load in loads if load.share < _SHARE), None)
        where = "none" if hot is None else f"{hot.workers} workers"
        words.append(f"{servers} server{'s' * (servers > 1)}: {where}")
    return all_loads, [
        f"Simulated, {1000 * compute_s:g} ms of computing and {_LENGTH * 4 / 1e6:.3g} MB each way: the first number of "
        f"workers that do less than {_SHARE:.0%} of what they would without waiting for a server: {', '.join(words)}"
    ]
