"""What routing cannot do without: scores and rows read once, and written once for each expert that a token has."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import PASSES, Setting, sized_form

INDEX_BYTES = 8


def route_cost(tokens: int, experts: int, picked: int, dtype: str = "float32", *, passes: str = "forward") -> Cost:
    """Of scores to weights, experts, places and loads. Backward reads scores, experts and gradients."""
    short, size = short_dtype(dtype)
    pairs = tokens * picked
    written = pairs * (size + 2 * INDEX_BYTES) + INDEX_BYTES * experts
    forward = Cost(5 * tokens * experts, size * tokens * experts, written, launches=2, dtype=short)
    if passes == "forward":
        return forward
    scores = size * tokens * experts
    return forward + Cost(8 * tokens * experts, scores + pairs * (size + INDEX_BYTES), scores, launches=1, dtype=short)


def cost(tokens: int, width: int, picked: int, dtype: str = "bfloat16", *, passes: str = "forward") -> Cost:
    """Of rows to their experts' order, or back: each token's row and those of its experts are read or written once."""
    short, size = short_dtype(dtype)
    moved = size * tokens * width * (1 + picked) + INDEX_BYTES * tokens * picked
    once = Cost(2 * tokens * picked * width, moved - size * tokens * width, size * tokens * width, 1, dtype=short)
    return once if passes == "forward" else once + once


def unpermute_cost(tokens: int, width: int, picked: int, dtype: str = "bfloat16", *, passes: str = "forward") -> Cost:
    """As `cost`; backward reads the experts' results again, for the gradient of their weights."""
    short, size = short_dtype(dtype)
    again = Cost(2 * tokens * picked * width, size * tokens * width * picked, dtype=short)
    once = cost(tokens, width, picked, dtype, passes=passes)
    return once if passes == "forward" else once + again


_SUITE = ("16384x1024x2", "16384x2048x8", "64x4096x2")
_ROUTE_SUITE = ("16384x8x2", "16384x64x8", "16384x128x8", "64x128x8")
_FLOAT32 = Setting(("float32",), "float32")
ROUTE_TOKENS_FORM = sized_form("TOKENSxEXPERTSxPICKED", _ROUTE_SUITE, route_cost, dtype=_FLOAT32, passes=PASSES)
PERMUTE_ROWS_FORM = sized_form("TOKENSxWIDTHxPICKED", _SUITE, cost, passes=PASSES)
UNPERMUTE_ROWS_FORM = sized_form("TOKENSxWIDTHxPICKED", _SUITE, unpermute_cost, passes=PASSES)
