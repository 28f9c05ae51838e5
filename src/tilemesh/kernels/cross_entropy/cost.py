"""What cross-entropy cannot do without: forward reads the logits, backward reads them again and writes a gradient."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import rows_form


def cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the forward pass over logits (rows, columns); targets, sums and losses are one number per row."""
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(5 * elements, size * elements + 8 * rows, 8 * rows, launches=2, dtype=short)


def backward_cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the backward pass."""
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(4 * elements, size * elements + 16 * rows, size * elements, launches=1, dtype=short)


FORM = rows_form(("8192x50304", "8192x128256", "8192x256"), cost, backward_cost)
