"""A parameter server on a clock: what throughput, waiting and staleness a consistency gives, for any number of workers.

The one idea: the simulator drives the same `StalenessRule` as a real server and only replaces computing and messages by
durations. A server takes one message at a time, so that requests queue: where the queue grows is where it is a hotspot.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilemesh.measure.method_curve import ServerLoad
from tilemesh.methods.rules import StalenessRule

NAP_S = 2e-4
"""How long a server or worker without a message sleeps before it looks again."""
Durations = Callable[[int, int], float]
"""Seconds of computing of a worker at a clock."""


def random_straggler(workers: int, factor: float, seed: int = 0, compute_s: float = 1.0) -> Durations:
    """At every clock one worker, drawn at random, takes `factor` times as long."""

    draw = random.Random(seed)
    slow: list[int] = []

    def of(worker: int, clock: int) -> float:
        while len(slow) <= clock:
            slow.append(draw.randrange(workers))
        return compute_s * (factor if worker == slow[clock] else 1.0)

    return of


def slow_rank(rank: int, factor: float, compute_s: float = 1.0) -> Durations:
    """One worker always takes `factor` times as long."""
    return lambda worker, clock: compute_s * (factor if worker == rank else 1.0)


@dataclass(frozen=True)
class ServerTimes:
    """Seconds of what is not computing. Shards of several servers are served side by side, each its part of the bytes.

    `pull_s`, `push_s`: of a server at the whole model's message; `message_s`: on the way, during which the server is
    free.
    """

    pull_s: float = 0.0
    push_s: float = 0.0
    message_s: float = 0.0
    servers: int = 1


class ComputeSpan(NamedTuple):
    """One step of one worker: from its request for weights to the end of computing."""

    worker: int
    clock: int
    asked_s: float
    began_s: float
    ended_s: float


@dataclass
class SimulatedRun:
    """What a run came to. Throughput counts the pushes until the first worker is through: nobody idles before."""

    seconds: float = 0.0
    pushes: int = 0
    busy_s: list[float] = field(default_factory=list)
    leads: Counter[int] = field(default_factory=Counter)
    """How far a reader was ahead of the slowest worker, by how often."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Updates between the read and the application of a push."""
    server_busy_s: float = 0.0
    queued_s: float = 0.0
    """All waiting for the server to become free."""
    spans: list[ComputeSpan] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Pushes per second."""
        return self.pushes / self.seconds if self.seconds else 0.0

    @property
    def utilisation(self) -> list[float]:
        return [busy / self.seconds for busy in self.busy_s]


class _Server:
    """One message at a time."""

    def __init__(self, run: SimulatedRun) -> None:
        self.run, self.free_s = run, 0.0

    def serve(self, now: float, took: float) -> float:
        start = max(now, self.free_s)
        self.run.queued_s += start - now
        self.run.server_busy_s += took
        self.free_s = start + took
        return self.free_s


def simulate_server(
    workers: int,
    clocks: int,
    durations: Durations,
    bound: float,
    times: ServerTimes | None = None,
    batch: int = 1,
    keep_spans: bool = False,
) -> SimulatedRun:
    """Workers that pull, compute and push until the first has made `clocks` pushes."""
    times = times or ServerTimes()
    pull_s, push_s = times.pull_s / times.servers, times.push_s / times.servers
    run = SimulatedRun(busy_s=[0.0] * workers)
    rule, server = StalenessRule(range(workers), bound, batch), _Server(run)
    version, read, computing = 0, [0] * workers, [0.0] * workers
    blocked: dict[int, float] = {}
    # (moment, tie-break, worker, what arrives at the server)
    events = [(times.message_s, worker, worker, "pull") for worker in range(workers)]
    heapq.heapify(events)
    count = workers

    def start(worker: int, asked_s: float, now: float) -> None:
        nonlocal count
        clock = rule.clocks[worker]
        run.leads[int(clock - rule.slowest)] += 1
        read[worker] = version
        began = server.serve(now, pull_s) + times.message_s
        took = computing[worker] = durations(worker, clock)
        if keep_spans:
            run.spans.append(ComputeSpan(worker, clock, asked_s, began, began + took))
        count += 1
        heapq.heappush(events, (began + took + times.message_s, count, worker, "push"))

    while events:
        now, _, worker, what = heapq.heappop(events)
        if what == "pull":
            if rule.may_read(worker):
                start(worker, now, now)
            else:
                blocked[worker] = now
            continue
        run.busy_s[worker] += computing[worker]
        now = server.serve(now, push_s)
        rule.push(worker, rule.clocks[worker])
        run.pushes += 1
        for group in rule.due():
            for push in group:
                run.staleness[version - read[push.worker]] += 1
            version += 1
        run.seconds = now
        if rule.clocks[worker] == clocks:
            return run
        count += 1
        heapq.heappush(events, (now + 2 * times.message_s, count, worker, "pull"))
        for other in [other for other in blocked if rule.may_read(other)]:
            start(other, blocked.pop(other), now)
    raise AssertionError("every worker waits: a rule that lets nobody read")


def simulate_synchronous(
    workers: int, clocks: int, durations: Durations, exchange_s: float = 0.0, period: int = 1
) -> SimulatedRun:
    """Data parallelism, which meets at every step, or local updates, which meet every `period` steps."""
    run = SimulatedRun(busy_s=[0.0] * workers, pushes=workers * clocks)
    for begin in range(0, clocks, period):
        took = [
            sum(durations(worker, c) for c in range(begin, min(begin + period, clocks))) for worker in range(workers)
        ]
        run.busy_s = [busy + mine for busy, mine in zip(run.busy_s, took, strict=True)]
        run.seconds += max(took) + exchange_s
    return run


def hotspot(counts: Sequence[int], compute_s: float, times: ServerTimes) -> list[ServerLoad]:
    """For each number of workers, what they do beside as many that never wait for a server, and how busy that is."""
    loads = []
    for workers in counts:
        run = simulate_server(workers, 40, lambda worker, clock: compute_s, math.inf, times)
        ideal = workers / (compute_s + (times.pull_s + times.push_s) / times.servers + 4 * times.message_s)
        busy, queue_s = run.server_busy_s / run.seconds, run.queued_s / run.pushes
        loads.append(ServerLoad(workers, times.servers, run.throughput / ideal, busy, queue_s))
    return loads
