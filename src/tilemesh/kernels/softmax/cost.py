"""What softmax cannot do without: every element read once and written once, forward; two read and one written, back."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import rows_form


def cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of one forward pass over (rows, columns): per element an exponential, a sum, a maximum and two products."""
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(5 * elements, size * elements, size * elements, launches=1, dtype=short)


def backward_cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the backward pass: y and its gradient are read, x's gradient is written."""
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(4 * elements, 2 * size * elements, size * elements, launches=1, dtype=short)


FORM = rows_form(("16384x1024", "8192x8192", "4096x32768", "512x262144", "16384x1000", "32x64"), cost, backward_cost)
