"""What the product of a few rows with a matrix cannot do without: every weight once, and its sums' parts."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype

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
