"""What attention over pages cannot do without: every key and value it sees once, two products per query and key."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import sized_form

PAGE_TOKENS = 16
"""Of a benchmark's pages."""


def cost(sequences: int, keys: int, kv_heads: int, group: int, width: int, dtype: str = "bfloat16") -> Cost:
    """Of one new token in each of so many sequences, which attends to `keys` tokens. Launched once for the parts of the
    sequences and once to add them up."""
    short, size = short_dtype(dtype)
    queries = sequences * kv_heads * group * width * size
    stored = 2 * sequences * keys * kv_heads * width * size
    flops = 4 * sequences * kv_heads * group * keys * width
    return Cost(flops, queries + stored, queries, launches=2, dtype=short)


_SUITE = ("64x1024x4x8x64", "64x1024x8x4x128", "1x8192x8x4x128", "256x2048x8x4x128")
FORM = sized_form("SEQUENCESxTOKENSxKVHEADSxGROUPxWIDTH", _SUITE, cost)
