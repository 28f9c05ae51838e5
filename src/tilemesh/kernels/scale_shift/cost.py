"""What y = act(x * scale + shift) cannot do without: x read once, y written once; the vectors stay in caches."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.problems import Setting, sized_form


def cost(rows: int, columns: int, dtype: str = "bfloat16") -> Cost:
    """Of one forward pass over (rows, columns); a multiplication and an addition for each element."""
    short, size = short_dtype(dtype)
    elements = rows * columns
    return Cost(2 * elements, size * (elements + 2 * columns), size * elements, launches=1, dtype=short)


_SUITE = ("16384x1024", "8192x8192", "4096x32768", "32x64")
FORM = sized_form("ROWSxCOLUMNS", _SUITE, cost, activation=Setting(ACTIVATIONS, "none"))
