"""What y = act(x * scale + shift) cannot do without: x read once, y written once; the vectors stay in caches."""

from __future__ import annotations

from tilemesh.core.cost import Cost

_SHORT = {"float16": ("fp16", 2), "bfloat16": ("bf16", 2), "float32": ("fp32", 4), "float64": ("fp64", 8)}


def cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of one forward pass over (rows, columns); a multiplication and an addition for each element."""
    short, size = _SHORT[dtype]
    elements = rows * columns
    return Cost(2 * elements, size * (elements + 2 * columns), size * elements, launches=1, dtype=short)
