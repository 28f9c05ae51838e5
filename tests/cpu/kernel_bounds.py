"""How far results of correct kernels may be from exact ones, where only tests ask: by the number of roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.kernels.accuracy import accumulator, rounding_error, sum_error, unit
from tilemesh.kernels.activations.reference import slope
from tilemesh.kernels.adamw.table import NORM_BLOCK, NORM_WARPS
from tilemesh.kernels.matmul.reference import error_bound, exact


def norm_bound(norm: Tensor, dtype: torch.dtype, elements: int) -> Tensor:
    """How far `global_norm` of so many elements of this dtype may be from the exact norm.

    A sum of squares, none of which is negative, is off by at most one unit for each addition that a term goes through:
    those of its thread and of the tree over threads, in the dtype's accumulator, then the same over blocks in float64.
    A root halves what its argument is off by.
    """
    u, blocks = unit(accumulator(dtype)), -(-elements // NORM_BLOCK)
    threads = 32 * NORM_WARPS
    additions = NORM_BLOCK // threads + threads.bit_length()
    last = blocks // 4096 + 8 + 10
    return norm.double() * ((1 + additions) * u + last * unit(torch.float64)) / 2 + rounding_error(
        norm.double(), accumulator(dtype)
    )


def gradient_error_bounds(
    a: Tensor, b: Tensor, c: Tensor | None, activation: str, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """How far gradients of A, B and C, for 2-d A and a gradient of D, may be from those in float64; everything kept is
    rounded once."""
    sums, kept = accumulator(a.dtype), a.dtype
    wide, steep = grad.double().abs(), slope(exact(a, b, c, "none"), activation).abs()
    total = exact(a, b, c, "none").abs()
    before = error_bound(a, b, c, "none", separate=True)
    if activation == "relu":  # its slope jumps at zero
        bend = (total <= before).double()
    else:
        # No activation's slope changes faster than squared_relu's.
        bend = before * (0.0 if activation == "none" else 2.0)
    dz = wide * steep
    dz_error = wide * (bend + (8 + 2 * total) * (1 + total) * unit(sums)) + rounding_error(dz, kept)
    sizes = b.double().abs().mT, a.double().abs().mT
    da = dz_error @ sizes[0] + sum_error(dz @ sizes[0], dz.shape[1] + 2, sums)
    db = sizes[1] @ dz_error + sum_error(sizes[1] @ dz, dz.shape[0] + 2, sums)
    da, db = (error + rounding_error(size, kept) for error, size in ((da, dz @ sizes[0]), (db, sizes[1] @ dz)))
    if c is None:
        return 1.01 * da, 1.01 * db, None
    dc = dz_error + sum_error(dz, max(dz.shape) + 2, sums) + rounding_error(dz, kept)
    return 1.01 * da, 1.01 * db, 1.01 * dc.sum_to_size(c.shape)
