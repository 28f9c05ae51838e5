"""What a warp does as one: tensor-core products and fragment loads; for the GPU as PTX, for the interpreter in numpy.

The PTX is written out because NVRTC may come without CUDA's headers. `cuda/warp_ops.cuh` holds it; the functions below
do the same to the registers of all warps of a grid. Which lane holds which element of a fragment is the PTX manual's
layout (sections on `mma.m16n8k8`, `mma.m16n8k16` and `ldmatrix`); a GPU test compares the two.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tilemesh.core.errors import UsageError
from tilemesh.guide.ladder.memory import WARP, Array, SharedArray

_LANE = np.arange(WARP)
_GROUP, _WITHIN = _LANE // 4, _LANE % 4  # a fragment's rows lie on groups of four lanes


class Registers(Protocol):
    """An array in registers: its last dim is the lanes."""

    data: Array


def to_tf32(values: Array) -> Array:
    """float32 rounded to 10 bits of mantissa, halves away from zero, as `cvt.rna.tf32.f32` does; the bits as uint32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def _warps(registers: Registers, count: int) -> Array:
    """(warps, count, lanes)"""
    if registers.data.ndim != 2 or registers.data.shape[0] < count:
        raise UsageError(
            f"a fragment of {count} registers was expected, the kernel gives shape {registers.data.shape[:-1]}"
        )
    return registers.data[:count].reshape(count, -1, WARP).swapaxes(0, 1)


def _put_c(c: Registers, product: Array) -> None:
    """Adds (warps, 16, 8) to the accumulators: lane l holds rows l/4 and l/4 + 8, columns 2(l%4) and the next."""
    fragments = [product[:, _GROUP + 8 * half, 2 * _WITHIN + odd] for half in (0, 1) for odd in (0, 1)]
    c.data += np.stack(fragments).reshape(4, -1).astype(np.float32)


def mma_tf32(c: Registers, a: Registers, b: Registers) -> None:
    """c += a b, where a is 16 x 8 and b 8 x 8 in tf32, c 16 x 8 in float32."""
    a_held, b_held = (_warps(x, n).copy().view(np.float32).astype(np.float64) for x, n in ((a, 4), (b, 2)))
    warps = a_held.shape[0]
    left, right = np.zeros((warps, 16, 8)), np.zeros((warps, 8, 8))
    for register in range(4):
        left[:, _GROUP + 8 * (register % 2), _WITHIN + 4 * (register // 2)] = a_held[:, register]
    for register in range(2):
        right[:, _WITHIN + 4 * register, _GROUP] = b_held[:, register]
    _put_c(c, left @ right)


def mma_f16(c: Registers, a: Registers, b: Registers) -> None:
    """c += a b, where a is 16 x 16 and b 16 x 8 in float16 (two in a register), c 16 x 8 in float32."""
    a_held, b_held = (_halves(_warps(x, n)) for x, n in ((a, 4), (b, 2)))
    warps = a_held.shape[0]
    left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
    for register in range(4):
        for odd in (0, 1):
            columns = 2 * _WITHIN + odd + 8 * (register // 2)
            left[:, _GROUP + 8 * (register % 2), columns] = a_held[:, register, :, odd]
    for register in range(2):
        for odd in (0, 1):
            right[:, 2 * _WITHIN + odd + 8 * register, _GROUP] = b_held[:, register, :, odd]
    _put_c(c, left @ right)


def _halves(packed: Array) -> Array:
    """(..., lanes) of two float16 each -> (..., lanes, 2) in float64."""
    return np.ascontiguousarray(packed).view(np.float16).reshape(*packed.shape, 2).astype(np.float64)


def load_matrices(registers: Registers, memory: SharedArray, at: Array, mask: Array, *, turned: bool) -> None:
    """Four 8 x 8 matrices of 16-bit elements: lane l names row l%8 of matrix l/8, and is given two elements of each."""
    if not mask.all():
        raise UsageError("ldmatrix needs all threads of a warp")
    rows = memory.load(at, mask, 8)  # (8 elements, lanes)
    matrices = rows.reshape(8, -1, 4, 8).transpose(1, 2, 3, 0)  # (warps, matrix, row, column)
    if turned:
        matrices = matrices.swapaxes(2, 3)
    low, high = (matrices[:, :, _GROUP, 2 * _WITHIN + odd].astype(np.uint32) for odd in (0, 1))
    registers.data[:] = (low | (high << np.uint32(16))).swapaxes(0, 1).reshape(4, -1)


def half_of(value: Array) -> Array:
    """The bits of float32 rounded to float16."""
    return np.asarray(value, np.float32).astype(np.float16).view(np.uint16)


def pack_halves(low: Array, high: Array) -> Array:
    return half_of(low).astype(np.uint32) | (half_of(high).astype(np.uint32) << np.uint32(16))


# Those which read nothing but their arguments.
PURE: dict[str, Callable[..., Any]] = {
    "tf32_of": to_tf32,
    "mma_tf32": mma_tf32,
    "mma_f16": mma_f16,
    "half_of": half_of,
    "pack_halves": pack_halves,
}
