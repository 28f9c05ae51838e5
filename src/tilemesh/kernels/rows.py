"""What operators on rows share: softmax, norms and losses read a row at a time, whatever its length.

A row up to `LONGEST` columns is held in registers by the threads of one block; how many rows and warps such a block
takes was measured on an H200 (`benchmarks/results/`), where all of the best choices give each thread 16 to 32 elements.
"""

from __future__ import annotations

from torch import Tensor

LONGEST = 16384
"""Columns of a row that is held in registers; longer ones are read in blocks of `LONG_BLOCK`, twice."""
LONG_BLOCK = 4096  # by 32 warps: 4 elements per thread, so that many loads are in flight
_STAGES = 3  # of loads in flight where a program walks over rows (norms backward on an H200: 46 µs, 54 with one)
_ROOM_FOR_SUMS = 4096  # bytes of shared memory
_PER_THREAD = 16  # elements; two loads of 16 bytes in 16-bit precision
_MOST_WARPS = 16


def rows_config(columns: int) -> tuple[int, int]:
    """Rows per block and its warps, for rows of this many columns."""
    wide = 1 << max(columns - 1, 0).bit_length()
    rows = max(1, 1024 // wide)
    warps = min(_MOST_WARPS, max(1, rows * wide // (32 * _PER_THREAD)))
    return rows, warps


def load_stages(stage_bytes: int, shared_bytes: int) -> int:
    """Groups of rows whose loads are in flight at once: three, or as many as shared memory holds.

    stage_bytes: of the tensors that are loaded for one group; the group in work is in registers, those after it wait in
    shared memory. Some room is left for what sums over a row take.
    """
    room = max(0, shared_bytes - _ROOM_FOR_SUMS)
    return min(_STAGES, 1 + room // max(stage_bytes, 1))


def by_rows(tensor: Tensor) -> Tensor:
    """(…, N) as (rows, N): a view where strides allow one, else a copy."""
    return tensor.reshape(-1, tensor.shape[-1])
