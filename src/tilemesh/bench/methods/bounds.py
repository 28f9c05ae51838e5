"""What a staleness bound costs in convergence, on real ranks: Ho et al.'s bound beside the measured difference, and a
bound that is too large to converge.

Workers keep what they have read for up to s steps, as the caches of stale synchronous parallel do, while a random one
of them is slow. The first problem is theirs: convex, with gradients of length L at most, in a ball, and with the step
of their theorem. The second is a quadratic at a constant rate r, where gradients of s + 1 steps are of the same
weights: these move by r (s + 1) of the way at once, which overshoots from r (s + 1) = 2 on, the largest curvature being
1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tilemesh.bench.methods.ranks import Straggling
from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.methods.link import ServerLink
from tilemesh.methods.rules import expected_excess
from tilemesh.methods.server import ParameterServer, SgdShard
from tilemesh.methods.simulate import random_straggler

DIMS, ROWS, RADIUS = 8, 16, 2.0
DIAMETER = math.sqrt(2) * RADIUS
"""F of the theorem: half the squared distance of two points of the ball is at most F²."""
LIPSCHITZ = 1.0
CURVATURES = torch.logspace(-1, 0, DIMS, dtype=torch.float64)
RATE = 0.15
CONVERGES_BELOW = 2 / RATE - 1
"""The bound s from which on the quadratic overshoots."""
COMPUTE_S = 0.002


def convex_rows(worker: int, clock: int) -> Tensor:
    """Inputs of length 1, each multiplied with its label, which is wrong one time in ten."""
    draw = torch.Generator().manual_seed(7919 * clock + worker)
    x = torch.nn.functional.normalize(torch.randn(ROWS, DIMS, generator=draw, dtype=torch.float64), dim=1)
    labels = torch.where(x @ torch.ones(DIMS, dtype=torch.float64) > 0, 1.0, -1.0)
    flips = torch.rand(ROWS, generator=draw, dtype=torch.float64) < 0.1
    return x * torch.where(flips, -labels, labels)[:, None]


def convex_loss(weights: Tensor, rows: Tensor) -> Tensor:
    return softplus(-rows @ weights).mean()


def convex_gradient(weights: Tensor, rows: Tensor) -> Tensor:
    mean_gradient: Tensor = -(rows * torch.sigmoid(-rows @ weights)[:, None]).mean(dim=0)
    return mean_gradient


def projected(weights: Tensor) -> Tensor:
    return weights * min(1.0, RADIUS / max(float(weights.norm()), 1e-30))


def least_loss(rows: Tensor) -> float:
    """Of the ball, on all rows: projected gradient descent with the step 1 / (largest curvature), which is 1/4."""
    weights = torch.zeros(DIMS, dtype=torch.float64)
    for _ in range(2000):
        weights = projected(weights - 4 * convex_gradient(weights, rows))
    return float(convex_loss(weights, rows))


class ConvexShard(SgdShard):
    """Steps as in the theorem: F / (L sqrt(2 (s + 1) P t)) for push t, back into the ball."""

    def __init__(self, weights: Tensor, bound: float, workers: int) -> None:
        super().__init__(weights, DIAMETER / (LIPSCHITZ * math.sqrt(2 * (bound + 1) * workers)))
        self.workers, self.pushes = workers, 0

    def apply(self, gradient: Tensor, clock: int, share: float) -> None:
        count = round(share * self.workers)
        size = sum(1 / math.sqrt(self.pushes + turn) for turn in range(1, count + 1))
        self.pushes += count
        self.weights.copy_(projected(self.weights - self.rate * size * gradient))


def bounded_runs(
    bounds: list[int], convex: bool, workers: int, clocks: int, factor: float, comm: Communicator | None = None
) -> list[dict[str, Any]]:
    """For each bound, the losses of this worker's reads, by step; nothing of a server."""
    torch.set_num_threads(1)
    comm = connect() if comm is None else comm
    runs: list[dict[str, Any]] = []
    for bound in bounds:
        comm.barrier()
        if comm.rank >= workers:
            start = torch.zeros(DIMS, dtype=torch.float64)
            shard = ConvexShard(start, bound, workers) if convex else SgdShard(start + 1, RATE)
            ParameterServer(comm, range(workers), shard, bound).run()
            runs.append({})
            continue
        # One generator for all: which worker is slow at a step, all draw alike.
        pace = Straggling(random_straggler(workers, factor, seed=bound, compute_s=COMPUTE_S), comm.rank)
        link, newest = ServerLink(comm, [workers], [slice(0, DIMS)]), torch.empty(DIMS, dtype=torch.float64)
        losses, read_at, clock = list[float](), -math.inf, link.pull(newest)
        weights = newest.clone()
        while clock < clocks:
            if clock - read_at > bound:
                weights, read_at = newest.clone(), clock
            link.push(pace.slept(clock, lambda: _gradient(weights, convex, comm.rank, clock, losses)), clock)  # noqa: B023
            clock = link.pull(newest)
        link.end()
        runs.append({"losses": losses})
    comm.barrier()
    return runs


def _gradient(weights: Tensor, convex: bool, worker: int, clock: int, losses: list[float]) -> Tensor:
    if not convex:
        losses.append(float((CURVATURES * weights**2).sum() / 2))
        return CURVATURES * weights
    rows = convex_rows(worker, clock)
    losses.append(float(convex_loss(weights, rows)))
    return convex_gradient(weights, rows)


def excess(losses: list[list[float]]) -> float:
    """By how much the mean loss of all reads exceeds that of the best weights on the same rows."""
    rows = torch.cat([convex_rows(worker, clock) for worker, own in enumerate(losses) for clock in range(len(own))])
    return sum(sum(own) for own in losses) / sum(len(own) for own in losses) - least_loss(rows)


def excess_limit(bound: int, workers: int, clocks: int) -> float:
    return expected_excess(DIAMETER, LIPSCHITZ, bound, workers, workers * clocks)
