"""Programs on MapReduce: K-means, logistic regression, a small convolutional network and word counts.

All of them are one pattern: a rank maps its part of the data to a few sums, and the sums of all ranks are one small
all_reduce, which is a MapReduce whose keys are known beforehand (a cluster, a parameter). Only words need a shuffle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilemesh.comm.map_reduce import mapreduce
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError

Array = NDArray[np.float64]
_BLOCK = 1 << 13  # points at once: distances to all centres stay in the cache of a core


def word_counts(comm: Communicator, lines: Iterable[str]) -> dict[str, int]:
    """How often each word occurs in the lines of all ranks; each rank has its part of the words."""
    return {
        word: int(count) for word, count in mapreduce(comm, lines, lambda line: ((w, 1) for w in line.split())).items()
    }


@dataclass(frozen=True)
class Clusters:
    """What K-means came to. `inertia`: the sum of squared distances to the nearest centre, before the last move."""

    centres: Array
    inertia: float
    iterations: int


def assign(points: Array, centres: Array) -> tuple[Array, Array, float]:
    """The map and combine of K-means: per centre the sum and number of its points; and all squared distances."""
    clusters = len(centres)
    totals, counts, inertia = np.zeros_like(centres), np.zeros(clusters), 0.0
    squares = (centres**2).sum(axis=1)
    for begin in range(0, len(points), _BLOCK):
        block = points[begin : begin + _BLOCK].astype(np.float64)  # bytes would wrap around
        distances = squares - 2 * block @ centres.T  # without |x|², which is the same for all centres
        nearest = distances.argmin(axis=1)
        counts += np.bincount(nearest, minlength=clusters)
        for dim, column in enumerate(block.T):
            totals[:, dim] += np.bincount(nearest, weights=column, minlength=clusters)
        inertia += float(distances.min(axis=1).sum() + np.vdot(block, block))
    return totals, counts, inertia


def k_means(comm: Communicator, points: Array, first: Array, iterations: int, tolerance: float = 0.0) -> Clusters:
    """Lloyd's iterations from given centres, on the points of all ranks. A centre without points stays.

    `tolerance`: the squared distance that all centres together move by, at which it ends early.
    """
    if points.ndim != 2 or first.ndim != 2 or points.shape[1] != first.shape[1]:
        raise UsageError(f"points of shape {points.shape} and centres of {first.shape}: expected rows of one length")
    centres, inertia, done = first.astype(np.float64).copy(), 0.0, 0
    while done < iterations:
        done += 1
        totals, counts, mine = assign(points, centres)
        flat = comm.all_reduce(np.concatenate([totals.reshape(-1), counts, [mine]]))
        totals, counts = flat[: totals.size].reshape(totals.shape), flat[totals.size : -1]
        inertia = float(flat[-1])
        moved = np.where(counts[:, None] > 0, totals / np.maximum(counts, 1)[:, None], centres)
        shift, centres = float(((moved - centres) ** 2).sum()), moved
        if shift <= tolerance:
            break
    return Clusters(centres, inertia, done)


def logistic_regression(comm: Communicator, x: Array, y: Array, steps: int, rate: float) -> tuple[Array, float]:
    """Weights by gradient descent on the mean loss over all ranks' rows, and the last loss; labels are 0 and 1."""
    weights, loss = np.zeros(x.shape[1]), 0.0
    for _ in range(steps):
        scores = x @ weights
        chance = 1 / (1 + np.exp(-scores))
        mine = float(np.logaddexp(0, scores).sum() - y @ scores)
        sums = comm.all_reduce(np.concatenate([x.T @ (chance - y), [mine, len(y)]]))
        weights -= rate * sums[:-2] / sums[-1]
        loss = float(sums[-2] / sums[-1])
    return weights, loss


def small_cnn(comm: Communicator, images: Any, labels: Any, steps: int, rate: float) -> tuple[Any, float]:
    """A convolutional network of two layers trained in data parallel: its parameters, flat, and the last loss.

    The map is a rank's gradient, the reduce one sum over ranks: the gradient protocol of `parallel/` in five lines.
    """
    import torch
    from torch import nn

    classes = int(comm.all_reduce(labels.max().reshape(1), op="max")) + 1
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * (images.shape[-1] - 2) ** 2, classes)
    ).to(images.dtype)
    parameters, loss = list(model.parameters()), 0.0
    generator = torch.Generator().manual_seed(0)  # of its own: ranks may be threads, which share torch's
    for parameter in parameters:
        nn.init.uniform_(parameter, -0.2, 0.2, generator=generator)
    for _ in range(steps):
        total = nn.functional.cross_entropy(model(images), labels, reduction="sum")
        flat = torch.cat([g.reshape(-1) for g in torch.autograd.grad(total, parameters)])
        count = torch.tensor([float(total.detach()), float(len(labels))], dtype=flat.dtype)
        flat = comm.all_reduce(torch.cat([flat, count]))
        vector = nn.utils.parameters_to_vector(parameters).detach() - rate * flat[:-2] / flat[-1]
        nn.utils.vector_to_parameters(vector, parameters)
        loss = float(flat[-2] / flat[-1])
    return nn.utils.parameters_to_vector(parameters).detach(), loss


def k_means_speedup(
    points: int, clusters: int, dims: int, ranks: int, iterations: int, rate: float, reduce_s: float
) -> tuple[float, float, float]:
    """(sequential seconds, parallel seconds, their ratio). `rate`: distances times dims that one rank computes per
    second; `reduce_s`: of the sum over ranks in each iteration."""
    alone_s = iterations * points * clusters * dims / rate
    together_s = alone_s / ranks + iterations * reduce_s
    return alone_s, together_s, alone_s / together_s
