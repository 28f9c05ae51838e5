"""What the product of a few rows with a matrix cannot do without: every weight once, and its sums' parts."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import Setting, sized_form

GATES = ("none", "silu")
MOST_ROWS = 64
_ENOUGH = 128  # programs, of which each reads 64 rows of weights: about one for each multiprocessor
_MOST_PARTS = 8
_TILE, _STEP = 64, 128  # rows and columns of weights that a program reads at a time


def parts_of(outputs: int, inputs: int, gate: str = "none") -> int:
    """Into how many parts the sums over the inputs are cut, so that the programs fill a GPU; 0: there is no kernel."""
    if outputs % _TILE or inputs % _STEP:
        return 0
    parts = 1
    while gate == "none" and outputs // _TILE * parts < _ENOUGH and parts < _MOST_PARTS:
        if inputs % (2 * parts * _STEP):
            break
        parts *= 2
    return parts


def cost(rows: int, outputs: int, inputs: int, dtype: str = "bfloat16", gate: str = "none") -> Cost:
    """Of `outputs` results for each row; with a gate there are twice as many rows of weights."""
    short, size = short_dtype(dtype)
    weights, parts = outputs * inputs * (1 if gate == "none" else 2), parts_of(outputs, inputs, gate)
    written = rows * outputs * (size if parts <= 1 else 4 * parts)
    return Cost(2 * rows * weights, size * (weights + rows * inputs), written, launches=1, dtype=short)


def norm_cost(parts: int, rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the norm of rows and the parts that are added to them: each read once; the norm and the sum are written."""
    short, size = short_dtype(dtype)
    values = rows * columns
    part = size if parts == 1 else 4
    return Cost(
        (parts + 4) * values,
        (parts * part + size) * values + size * columns,
        2 * size * values,
        launches=1,
        dtype=short,
    )


_SUITE = ("8x2560x2048", "64x2560x2048", "64x2048x5632", "16x6144x4096", "64x4096x14336")
FORM = sized_form("ROWSxOUTPUTSxINPUTS", _SUITE, cost, gate=Setting(GATES, "none", named=False))
PARTS_RMS_NORM_FORM = sized_form("PARTSxROWSxCOLUMNS", ("4x8x2048", "4x64x2048", "2x64x4096"), norm_cost)
