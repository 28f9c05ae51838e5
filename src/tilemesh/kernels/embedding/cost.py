"""What an embedding cannot do without: forward copies a row per token, backward reads them and writes the table."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import PASSES, sized_form

CONTEXT = 1024
"""Tokens of a sequence in a problem, where that divides its tokens: as many rows has the table of positions."""


def cost(tokens: int, width: int, vocabulary: int, dtype: str = "bfloat16", *, passes: str = "forward") -> Cost:
    """Of so many tokens: their rows are read and written; a backward pass also writes a gradient of the whole table."""
    short, size = short_dtype(dtype)
    moved = size * tokens * width
    forward = Cost(tokens * width, moved + 8 * tokens, moved, launches=1, dtype=short)
    if passes == "forward":
        return forward
    return forward + Cost(tokens * width, moved + 16 * tokens, size * vocabulary * width, launches=4, dtype=short)


def context_of(tokens: int) -> int:
    return CONTEXT if tokens % CONTEXT == 0 else tokens


_SUITE = ("32768x768x50304", "16384x2048x32000", "8192x4096x128256")
FORM = sized_form("TOKENSxWIDTHxVOCABULARY", _SUITE, cost, passes=PASSES)
