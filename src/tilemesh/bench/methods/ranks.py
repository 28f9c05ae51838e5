"""What a rank of `tilemesh bench methods` does: a small classifier trained by each method, with ranks that are slow.

Computing is real and then sleeps until its time is over, so that 4 workers and 2 servers fit on two cores and a slow
rank is exactly as slow as asked. Times are of one clock of the machine, so that ranks can be compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.measure.ranks import slowest_s
from tilemesh.measure.timing import in_turns
from tilemesh.methods.link import ServerLink, even_cuts, wait_in_naps
from tilemesh.methods.programs import k_means
from tilemesh.methods.record import ServerEvent, largest_lead, replay
from tilemesh.methods.rules import Push
from tilemesh.methods.server import ParameterServer, SgdShard, mean_update
from tilemesh.methods.simulate import Durations, random_straggler, slow_rank

INPUTS, HIDDEN, CLASSES, ROWS = 32, 64, 10, 32
LENGTH = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
RATE = 0.5
_IDLE = 9  # a tag


def first_weights() -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.2


def examples(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Inputs, and the class that a fixed linear map gives them."""
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, (x @ teacher).argmax(dim=1)


def loss_of(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
    sizes = [INPUTS * HIDDEN, HIDDEN, HIDDEN * CLASSES, CLASSES]
    first, bias, second, last = flat.split_with_sizes(sizes)
    hidden = torch.tanh(x @ first.view(INPUTS, HIDDEN) + bias)
    return torch.nn.functional.cross_entropy(hidden @ second.view(HIDDEN, CLASSES) + last, y)


def gradient(weights: Tensor, worker: int, clock: int) -> Tensor:
    flat = weights.detach().clone().requires_grad_()
    (result,) = torch.autograd.grad(loss_of(flat, *examples(1000 + 7919 * clock + worker, ROWS)), flat)
    return result


class Straggling:
    """A worker's computing: as long as it is asked to be, with the times at which it began and ended."""

    def __init__(self, durations: Durations, worker: int) -> None:
        self.durations, self.worker = durations, worker
        self.held_out = examples(1, 256)
        self.spans: list[tuple[float, float]] = []
        self.losses: list[tuple[float, float]] = []

    def __call__(self, weights: Tensor, clock: int) -> Tensor:
        def computed() -> Tensor:
            if self.worker == 0:
                self.losses.append((time.time(), float(loss_of(weights, *self.held_out))))
            return gradient(weights, self.worker, clock)

        return self.slept(clock, computed)

    def slept(self, clock: int, compute: Callable[[], Tensor]) -> Tensor:
        """Compute, then sleep until the time of this step is over."""
        began = time.time()
        result = compute()
        left = began + self.durations(self.worker, clock) - time.time()
        if left > 0:
            time.sleep(left)
        self.spans.append((began, time.time()))
        return result


def durations_of(slow: dict[str, Any], workers: int, compute_s: float) -> Durations:
    if slow["rank"] is None:
        return random_straggler(workers, slow["factor"], seed=5, compute_s=compute_s)
    return slow_rank(slow["rank"], slow["factor"], compute_s)


def straggler_runs(
    cases: list[dict[str, Any]],
    workers: int,
    servers: int,
    clocks: int,
    compute_s: float,
    comm: Communicator | None = None,
) -> list[dict[str, Any]]:
    """Each case (method, bound, period, slow) after the other; what this rank saw of it."""
    torch.set_num_threads(1)
    comm = connect() if comm is None else comm
    among = comm.split(0 if comm.rank < workers else None)
    runs = []
    for case in cases:
        comm.barrier()
        began = time.time()
        durations = durations_of(case["slow"], workers, compute_s)
        if case["method"] == "server":
            mine = _by_servers(comm, workers, servers, clocks, durations, case["bound"])
        else:
            mine = {} if among is None else _together(among, clocks, durations, case["period"])
            leave_the_cores(comm, range(workers, comm.size))
        runs.append({"began": began, **mine})
    comm.barrier()
    return runs


def leave_the_cores(comm: Communicator, idle: Sequence[int]) -> None:
    """Ranks that take no part wait in naps until rank 0, which does, is through: whoever waits in a call of the
    communicator looks 10,000 times a second, on cores that the others need."""
    token = torch.zeros(1)
    if comm.rank in idle:
        wait_in_naps([comm.irecv(token, 0, _IDLE)])
    elif comm.rank == 0:
        for rank in idle:
            comm.send(token, rank, _IDLE)


def _together(comm: Communicator, clocks: int, durations: Durations, period: int) -> dict[str, Any]:
    """Data parallelism, or local updates that average weights every `period` steps."""
    weights, work, steps = first_weights(), Straggling(durations, comm.rank), []
    for clock in range(clocks):
        step = work(weights, clock)
        if period == 1:
            step = comm.all_reduce(step) / comm.size
        weights -= RATE * step
        if period > 1 and ((clock + 1) % period == 0 or clock + 1 == clocks):
            weights = comm.all_reduce(weights) / comm.size
        steps.append(time.time())
    return {"steps": steps, "spans": work.spans, "losses": work.losses}


def _by_servers(
    comm: Communicator, workers: int, servers: int, clocks: int, durations: Durations, bound: float | None
) -> dict[str, Any]:
    cuts, limit = even_cuts(LENGTH, servers), math.inf if bound is None else bound
    ranks = range(workers, workers + servers)
    if comm.rank in ranks:
        cut = cuts[comm.rank - workers]
        shard = SgdShard(first_weights()[cut].clone(), RATE)
        server = ParameterServer(comm, range(workers), shard, limit)
        server.run()
        return {
            "figures": server.figures(), "lead": largest_lead(server.events, range(workers)),
            "events": [event.to_json() for event in server.events], "weights": shard.weights.tolist(),
        }  # fmt: skip
    if comm.rank >= workers:
        return {}
    link, weights, work = ServerLink(comm, ranks, cuts), torch.empty(LENGTH, dtype=torch.float64), None
    work, steps, clock = Straggling(durations, comm.rank), [], link.pull(weights)
    while clock < clocks:
        link.push(work(weights, clock), clock)
        steps.append(time.time())
        clock = link.pull(weights)
    link.end()
    return {"steps": steps, "spans": work.spans, "losses": work.losses}


def replay_difference(records: list[dict[str, Any]], workers: int) -> float:
    """By how much a serial replay of the servers' records differs from the weights that they came to."""
    events = [[ServerEvent.from_json(event) for event in record["events"]] for record in records]
    cuts = even_cuts(LENGTH, len(records))
    again = [SgdShard(first_weights()[cut].clone(), RATE) for cut in cuts]

    def gradients_of(push: Push, shards: list[Tensor]) -> list[Tensor]:
        flat = gradient(torch.cat(shards), push.worker, push.clock)
        return [flat[cut] for cut in cuts]

    replay(
        events,
        lambda server: again[server].weights.clone(),
        gradients_of,
        lambda server, pushes, gradients, scale: mean_update(again[server], pushes, gradients, workers, scale),
    )
    ends = [torch.tensor(record["weights"], dtype=torch.float64) for record in records]
    return max(float((end - shard.weights).abs().max()) for end, shard in zip(ends, again, strict=True))


def traffic_runs(counts: list[tuple[int, int]], length: int, clocks: int) -> list[list[float]]:
    """For each number of workers and servers, of pulls and pushes of a vector without any computing: of a worker the
    seconds they took and its seconds on a core, of a server those at messages and its seconds on a core.

    Ranks are workers from 0 on and servers from the last rank down."""
    comm = connect()
    runs = []
    for workers, servers in counts:
        comm.barrier()
        cuts, ranks = even_cuts(length, servers), [comm.size - 1 - number for number in range(servers)]
        seconds: list[float] = []
        on_core = time.process_time()
        if comm.rank in ranks:
            shard = SgdShard(torch.zeros(length)[cuts[ranks.index(comm.rank)]].clone(), 1.0)
            server = ParameterServer(comm, range(workers), shard, math.inf)
            server.run()
            seconds = [server.busy_s, time.process_time() - on_core]
        elif comm.rank < workers:
            link, weights, pushed = ServerLink(comm, ranks, cuts), torch.empty(length), torch.ones(length)
            clock = link.pull(weights)
            began = time.perf_counter()
            while clock < clocks:
                link.push(pushed, clock)
                clock = link.pull(weights)
            seconds = [time.perf_counter() - began, time.process_time() - on_core]
            link.end()
        leave_the_cores(comm, range(workers, comm.size - servers))
        runs.append(seconds)
    comm.barrier()
    return runs


def clustering(points: int, dims: int, clusters: int, iterations: int, repeats: int) -> list[list[float]]:
    """Seconds of K-means by rank 0 alone while the others leave it the cores, by all ranks, and of the sum over ranks
    alone; the slowest rank's, in turns."""
    comm = connect()
    alone, cut = comm.split(comm.rank), even_cuts(points, comm.size)[comm.rank]
    assert alone is not None
    all_points = np.random.default_rng(0).normal(size=(points, dims))
    first = np.random.default_rng(99).normal(size=(clusters, dims))
    sums = np.zeros(clusters * dims + clusters + 1)

    def by_one() -> None:
        if comm.rank == 0:
            k_means(alone, all_points, first, iterations, tolerance=-1.0)
        leave_the_cores(comm, range(1, comm.size))

    def by_all() -> None:
        k_means(comm, all_points[cut], first, iterations, tolerance=-1.0)

    def summing() -> None:
        for _ in range(iterations):
            comm.all_reduce(sums)

    runs = {run.__name__: partial(slowest_s, comm, run) for run in (by_one, by_all, summing)}
    return [*in_turns(runs, repeats).values()]
