"""What act(gate) * x cannot do without: both are read, y is written; backward reads three tensors and writes two."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import PASSES, Setting, rows_form, sized_form


def cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the forward pass; about 6 operations per element, one of them an exponential."""
    return _cost(rows, columns, dtype, read=2, written=1)


def backward_cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the backward pass, which computes the activation again instead of keeping it."""
    return _cost(rows, columns, dtype, read=3, written=2)


def _cost(rows: int, columns: int, dtype: str, *, read: int, written: int) -> Cost:
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(6 * elements, size * read * elements, size * written * elements, launches=1, dtype=short)


_SUITE = ("16384x5632", "16384x14336", "16384x1024", "32x64")
_APPROXIMATE = Setting(("tanh", "none"), "tanh", named=False)
SWIGLU_FORM = rows_form(_SUITE, cost, backward_cost)
GEGLU_FORM = sized_form("ROWSxCOLUMNS", _SUITE, cost, backward_cost, passes=PASSES, approximate=_APPROXIMATE)
