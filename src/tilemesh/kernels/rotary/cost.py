"""What a rotary embedding cannot do without: x is read, y is written; the tables stay in caches."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import PASSES, sized_form


def cost(batch: int, tokens: int, heads: int, width: int, dtype: str = "bfloat16") -> Cost:
    """Of one pass, forward or backward, with float32 tables: a pair takes four products and two sums."""
    short, size = short_dtype(dtype)
    elements, table = batch * tokens * heads * width, tokens * width
    return Cost(3 * elements, size * elements + 4 * table, size * elements, launches=1, dtype=short)


def _of_pairs(batch: int, tokens: int, heads: int, width: int, dtype: str) -> Cost:
    """An odd width is taken one less."""
    return cost(batch, tokens, heads, 2 * max(1, width // 2), dtype)


_SUITE = ("8x2048x32x64", "8x2048x32x128", "4x8192x8x128", "1x64x4x64")
FORM = sized_form("BATCHxTOKENSxHEADSxWIDTH", _SUITE, _of_pairs, _of_pairs, passes=PASSES)
