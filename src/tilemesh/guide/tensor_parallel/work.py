"""What the ranks of chapter 6 run: z = relu(x·A)·B with its backward pass, on one rank and cut in three ways.

Shapes: T tokens (rows), D width, F hidden. float64, so that every cut can be held to one process. Collectives are
rings, so that what is sent can be counted exactly. All of it takes numpy arrays and torch tensors: both have `clip`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilemesh.comm import Communicator
from tilemesh.guide import on_gpu
from tilemesh.measure.row import Row

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class BlockResult:
    """Forward and backward of the two products; of cut arrays this rank's part. Bytes are what this rank sent."""

    z_TD: Array
    dx_TD: Array
    da_DF: Array
    db_FD: Array
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True)
class BlockProblem:
    """Input, two matrices, and the gradient that comes from above."""

    x_TD: Array
    a_DF: Array
    b_FD: Array
    dz_TD: Array


def make(tokens: int, width: int, hidden: int) -> BlockProblem:
    """The same on every rank."""
    random = np.random.default_rng(6)
    shapes = (tokens, width), (width, hidden), (hidden, width), (tokens, width)
    return BlockProblem(*(random.normal(size=shape) / 4 for shape in shapes))


def alone(p: BlockProblem) -> BlockResult:
    """On one rank: two products forward, four backward."""
    h_TF = (p.x_TD @ p.a_DF).clip(0)  # relu
    z_TD = h_TF @ p.b_FD
    dh_TF = (p.dz_TD @ p.b_FD.T) * (h_TF > 0)
    return BlockResult(z_TD, dh_TF @ p.a_DF.T, p.x_TD.T @ dh_TF, h_TF.T @ p.dz_TD)


def by_rows(comm: Communicator, p: BlockProblem) -> BlockResult:
    """Tokens cut, both matrices whole: chapter 5. The gradients of the matrices are sums over ranks."""
    mine = _part(len(p.x_TD), comm)
    local = alone(BlockProblem(p.x_TD[mine], p.a_DF, p.b_FD, p.dz_TD[mine]))
    began = comm.sent.nbytes
    da_DF, db_FD = (comm.all_reduce(gradient, algorithm="ring") for gradient in (local.da_DF, local.db_FD))
    return BlockResult(local.z_TD, local.dx_TD, da_DF, db_FD, 0, comm.sent.nbytes - began)


def columns_then_rows(comm: Communicator, p: BlockProblem) -> BlockResult:
    """Megatron's way: A cut by columns, B by rows. One sum forward, one sum backward."""
    mine = _part(p.a_DF.shape[1], comm)
    a_Df, b_fD = p.a_DF[:, mine], p.b_FD[mine]  # f: this rank's part of F
    began = comm.sent.nbytes
    h_Tf = (p.x_TD @ a_Df).clip(0)  # whole columns: nothing to send before relu
    z_TD = comm.all_reduce(h_Tf @ b_fD, algorithm="ring")  # F was summed over, and F is cut
    forward = comm.sent.nbytes - began
    dh_Tf = (p.dz_TD @ b_fD.T) * (h_Tf > 0)  # dz is whole on every rank
    dx_TD = comm.all_reduce(dh_Tf @ a_Df.T, algorithm="ring")  # again a sum over F
    backward = comm.sent.nbytes - began - forward
    return BlockResult(z_TD, dx_TD, p.x_TD.T @ dh_Tf, h_Tf.T @ p.dz_TD, forward, backward)


def with_sequence(comm: Communicator, p: BlockProblem) -> BlockResult:
    """The same with sequence parallelism: between the blocks every rank keeps only its tokens."""
    mine, tokens = _part(p.a_DF.shape[1], comm), _part(len(p.x_TD), comm)
    a_Df, b_fD = p.a_DF[:, mine], p.b_FD[mine]
    x_tD, dz_tD = p.x_TD[tokens], p.dz_TD[tokens]  # t: this rank's part of T
    began = comm.sent.nbytes
    h_Tf = (comm.all_gather(x_tD, algorithm="ring") @ a_Df).clip(0)
    z_tD = comm.reduce_scatter(h_Tf @ b_fD, algorithm="ring")
    forward = comm.sent.nbytes - began
    dz_TD = comm.all_gather(dz_tD, algorithm="ring")
    dh_Tf = (dz_TD @ b_fD.T) * (h_Tf > 0)
    x_TD = comm.all_gather(x_tD, algorithm="ring")  # only the part was kept: gather it again for da
    dx_tD = comm.reduce_scatter(dh_Tf @ a_Df.T, algorithm="ring")
    backward = comm.sent.nbytes - began - forward
    return BlockResult(z_tD, dx_tD, x_TD.T @ dh_Tf, h_Tf.T @ dz_TD, forward, backward)


def _part(length: int, comm: Communicator) -> slice:
    share = length // comm.size
    return slice(comm.rank * share, (comm.rank + 1) * share)


def distance(parts: list[Array], expected: Array, axis: int) -> float:
    """How far parts, joined along an axis, are from the whole; axis -1: every part is the whole."""
    if axis < 0:
        return max(float(np.abs(part - expected).max()) for part in parts)
    return float(np.abs(np.concatenate(parts, axis) - expected).max())


def gpu_row(device: str, tokens: int = 1024, width: int = 1024, hidden: int = 4096) -> tuple[Row, float]:
    """`columns_then_rows` by two ranks that share a GPU; the row, and how far they are from one process."""
    host = make(tokens, width, hidden)
    problem = BlockProblem(*(on_gpu.moved(device, array) for array in (host.x_TD, host.a_DF, host.b_FD, host.dz_TD)))
    ranks, summed_bytes = 2, 2 * tokens * width * 8  # z forward, dx backward
    row, expected, cut = on_gpu.shared_row(
        "column, row: step on the GPU",
        device,
        ranks,
        lambda: alone(problem),
        lambda comm: columns_then_rows(comm, problem),
        sizes={"tokens": tokens, "width": width, "hidden": hidden},
        flops=6 * 2.0 * tokens * width * hidden,
        added_s=ranks * on_gpu.staging_seconds(device, summed_bytes) + on_gpu.summing_seconds(ranks, summed_bytes),
    )
    apart = [
        distance([part.z_TD.cpu().numpy() for part in cut], expected.z_TD.cpu().numpy(), -1),
        distance([part.dx_TD.cpu().numpy() for part in cut], expected.dx_TD.cpu().numpy(), -1),
        distance([part.da_DF.cpu().numpy() for part in cut], expected.da_DF.cpu().numpy(), 1),
        distance([part.db_FD.cpu().numpy() for part in cut], expected.db_FD.cpu().numpy(), 0),
    ]
    return row, max(apart)
