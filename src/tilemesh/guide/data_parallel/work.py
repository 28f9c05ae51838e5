"""What the ranks of chapter 5 run: a two-layer MLP with its backward pass by hand, cut over the data in several ways.

Shapes: B samples, D inputs, F hidden, E outputs. Everything is float64, so that a parallel step can be held to what one
process computes. A step takes numpy arrays and torch tensors alike: `clip(0)`, which both have, is relu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilemesh.comm import Communicator
from tilemesh.guide import on_gpu
from tilemesh.measure.row import Row

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MlpWeights:
    """θ: two matrices."""

    w1_DF: Array
    w2_FE: Array

    @property
    def count(self) -> int:
        return int(self.w1_DF.size + self.w2_FE.size)


def make(inputs: int, hidden: int, outputs: int, samples: int) -> tuple[MlpWeights, Array, Array]:
    """Weights, inputs and targets that every rank makes alike."""
    random = np.random.default_rng(5)
    weights = MlpWeights(random.normal(size=(inputs, hidden)) / inputs, random.normal(size=(hidden, outputs)) / hidden)
    return weights, random.normal(size=(samples, inputs)), random.normal(size=(samples, outputs))


def loss_sum(weights: MlpWeights, x_BD: Array, y_BE: Array) -> float:
    """Half the squared distance to the targets, summed over the samples."""
    return float((((x_BD @ weights.w1_DF).clip(0) @ weights.w2_FE - y_BE) ** 2).sum() / 2)


def gradient_sums(weights: MlpWeights, x_BD: Array, y_BE: Array) -> MlpWeights:
    """∇ of `loss_sum`: five matrix products, two forward and three backward."""
    h_BF = (x_BD @ weights.w1_DF).clip(0)  # forward 1, with relu: rows of x give rows of h
    z_BE = h_BF @ weights.w2_FE  # forward 2
    dz_BE = z_BE - y_BE
    dw2_FE = h_BF.T @ dz_BE  # type 2: sums over samples
    dh_BF = dz_BE @ weights.w2_FE.T  # type 1: rows of dz give rows of dh
    dw1_DF = x_BD.T @ (dh_BF * (h_BF > 0))  # type 2
    return MlpWeights(dw1_DF, dw2_FE)


def update(weights: MlpWeights, gradient: MlpWeights, rate: float) -> MlpWeights:
    """f: here plain gradient descent."""
    return MlpWeights(weights.w1_DF - rate * gradient.w1_DF, weights.w2_FE - rate * gradient.w2_FE)


def step_alone(weights: MlpWeights, x_BD: Array, y_BE: Array, rate: float = 0.1) -> MlpWeights:
    """θ' = f(θ, ∇L(θ, D)) in one process; L is the mean over the samples."""
    sums = gradient_sums(weights, x_BD, y_BE)
    return update(weights, MlpWeights(sums.w1_DF / len(x_BD), sums.w2_FE / len(x_BD)), rate)


def step_parallel(comm: Communicator, weights: MlpWeights, x_BD: Array, y_BE: Array, rate: float = 0.1) -> MlpWeights:
    """The same step, the samples dealt out over the ranks; the sums over samples become sums over ranks."""
    mine = _share(len(x_BD), comm)
    sums = gradient_sums(weights, x_BD[mine], y_BE[mine])
    dw1_DF, dw2_FE = comm.all_reduce(sums.w1_DF), comm.all_reduce(sums.w2_FE)  # the only communication
    return update(weights, MlpWeights(dw1_DF / len(x_BD), dw2_FE / len(x_BD)), rate)


def _share(samples: int, comm: Communicator) -> slice:
    """Which samples are this rank's; shares differ by one where they do not come out even."""
    return slice(samples * comm.rank // comm.size, samples * (comm.rank + 1) // comm.size)


def step_accumulated(weights: MlpWeights, x_BD: Array, y_BE: Array, pieces: int, rate: float = 0.1) -> MlpWeights:
    """The same step in one process that never sees more than a piece of the batch at once."""
    dw1_DF, dw2_FE = np.zeros_like(weights.w1_DF), np.zeros_like(weights.w2_FE)
    for some in np.array_split(np.arange(len(x_BD)), pieces):
        sums = gradient_sums(weights, x_BD[some], y_BE[some])
        dw1_DF += sums.w1_DF
        dw2_FE += sums.w2_FE
    return update(weights, MlpWeights(dw1_DF / len(x_BD), dw2_FE / len(x_BD)), rate)


# ZeRO ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptBytes:
    """Bytes a rank keeps between steps, counted from arrays that were really made."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def kept_bytes(stage: int, ranks: int, parameters: int) -> KeptBytes:
    """Mixed-precision Adam: 16-bit weights and gradients, 32-bit master weights and two moments; each cut or whole."""
    part = parameters // ranks
    weights = np.zeros(part if stage >= 3 else parameters, np.float16)
    gradients = np.zeros(part if stage >= 2 else parameters, np.float16)
    optimizer = [np.zeros(part if stage >= 1 else parameters, np.float32) for _ in ("master", "mean", "variance")]
    return KeptBytes(weights.nbytes, gradients.nbytes, sum(array.nbytes for array in optimizer))


def zero_step(
    comm: Communicator, stage: int, weights: MlpWeights, x_BD: Array, y_BE: Array, rate: float = 0.1
) -> tuple[MlpWeights, int]:
    """One step by ZeRO's stage 0 to 3; the new weights, put together to compare, and the bytes this rank sent.

    Stages 1 and 2 send alike and differ in what is kept: stage 2 drops a matrix's gradient as soon as its part is
    reduced. Stage 3 also holds only a part of the weights, and gathers each matrix before forward and before backward.
    """
    mine = _share(len(x_BD), comm)
    x_BD, y_BE, samples = x_BD[mine], y_BE[mine], len(x_BD)
    began = comm.sent.nbytes
    if stage == 0:
        sums = gradient_sums(weights, x_BD, y_BE)
        summed = [comm.all_reduce(matrix.ravel(), algorithm="ring") for matrix in (sums.w1_DF, sums.w2_FE)]
        flat = [matrix.ravel() - rate * total / samples for matrix, total in zip(_both(weights), summed, strict=True)]
        return _shaped(flat, weights), comm.sent.nbytes - began
    parts = [
        matrix.ravel().reshape(comm.size, -1)[comm.rank].copy() for matrix in _both(weights)
    ]  # what this rank owns
    if stage == 3:
        _gathered(comm, parts, weights)  # for forward; freed layer by layer
        weights = _gathered(comm, parts, weights)  # again for backward
    sums = gradient_sums(weights, x_BD, y_BE)
    reduced = [comm.reduce_scatter(matrix.ravel(), algorithm="ring") for matrix in _both(sums)]
    parts = [part - rate * total / samples for part, total in zip(parts, reduced, strict=True)]  # f, on a part
    if stage == 3:
        sent = comm.sent.nbytes - began  # weights stay cut: putting them together is only for the comparison
        return _gathered(comm, parts, weights), sent
    return _gathered(comm, parts, weights), comm.sent.nbytes - began


def _both(weights: MlpWeights) -> tuple[Array, Array]:
    return weights.w1_DF, weights.w2_FE


def _gathered(comm: Communicator, parts: Sequence[Array], like: MlpWeights) -> MlpWeights:
    return _shaped([comm.all_gather(part, algorithm="ring") for part in parts], like)


def _shaped(flat: Sequence[Array], like: MlpWeights) -> MlpWeights:
    return MlpWeights(flat[0].reshape(like.w1_DF.shape), flat[1].reshape(like.w2_FE.shape))


def distance(one: MlpWeights, other: MlpWeights) -> float:
    """The largest difference of any weight."""
    return max(float(abs(a - b).max()) for a, b in zip(_both(one), _both(other), strict=True))


# On a GPU -----------------------------------------------------------------------------------------------------------


def gpu_row(device: str, samples: int = 2048, width: int = 1024) -> tuple[Row, float]:
    """`step_parallel` by two ranks that share a GPU; the row, and how far their weights are from one process's."""
    weights, x_BD, y_BE = make(width, width, width, samples)
    weights = MlpWeights(*(on_gpu.moved(device, matrix) for matrix in _both(weights)))
    x_BD, y_BE = on_gpu.moved(device, x_BD), on_gpu.moved(device, y_BE)
    ranks, gradient_bytes = 2, 2 * width * width * 8
    row, expected, stepped = on_gpu.shared_row(
        "data-parallel step on the GPU",
        device,
        ranks,
        lambda: step_alone(weights, x_BD, y_BE),
        lambda comm: step_parallel(comm, weights, x_BD, y_BE),
        sizes={"samples": samples, "width": width},
        flops=5 * 2.0 * samples * width * width,
        added_s=ranks * on_gpu.staging_seconds(device, gradient_bytes) + on_gpu.summing_seconds(ranks, gradient_bytes),
    )
    return row, max(distance(weights_of_rank, expected) for weights_of_rank in stepped)
