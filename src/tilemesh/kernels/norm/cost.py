"""What a norm over the last dimension cannot do without, each way, with and without the addition before it."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import rows_form


def cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of rms_norm's or layer_norm's forward pass: x is read, y is written; the vectors stay in caches."""
    return _cost(rows, columns, dtype, read=1, written=1)


def backward_cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of their backward pass: x and y's gradient are read, x's gradient is written."""
    return _cost(rows, columns, dtype, read=2, written=1)


def add_cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of add_rms_norm's or add_layer_norm's forward pass: two summands are read, the sum and its norm are written."""
    return _cost(rows, columns, dtype, read=2, written=2)


def add_backward_cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of their backward pass: the sum and both results' gradients are read, one gradient for both is written."""
    return _cost(rows, columns, dtype, read=3, written=1)


def _cost(rows: int, columns: int, dtype: str, *, read: int, written: int) -> Cost:
    short, size = short_dtype(dtype)
    elements = rows * columns
    vectors = columns * size
    # A square, a sum, a product with the inverse root and one with the weight; backward takes about as many.
    return Cost(4 * elements, size * read * elements + vectors, size * written * elements, launches=1, dtype=short)


_SUITE = ("32768x768", "16384x4096", "8192x8192", "16384x1024", "32x64")
RMS_NORM_FORM = LAYER_NORM_FORM = rows_form(_SUITE, cost, backward_cost)
ADD_RMS_NORM_FORM = ADD_LAYER_NORM_FORM = rows_form(_SUITE, add_cost, add_backward_cost)
