"""What the likeliest token of each row cannot do without: every logit once."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import sized_form


def cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of the largest of `columns` logits in each row. Launched once for pieces of rows and once to compare those."""
    short, size = short_dtype(dtype)
    return Cost(rows * columns, size * rows * columns, 8 * rows, launches=2, dtype=short)


FORM = sized_form("ROWSxCOLUMNS", ("1x128256", "16x128256", "64x128256", "64x32000", "256x50304"), cost)
