"""What a loss from activations and the output projection cannot do without: three products of the same size."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype


def cost(rows: int, columns: int, dtype: str = "bfloat16", *, width: int = 768) -> Cost:
    """Forward and backward over x (rows, width) and weight (columns, width): logits, x's and the weight's gradient.

    Bytes are those of x, weight and their gradients: logits that stay on the chip would move none.
    """
    short, size = short_dtype(dtype)
    held = size * width * (rows + columns)
    return Cost(6 * rows * columns * width, held, held, launches=4, dtype=short)
