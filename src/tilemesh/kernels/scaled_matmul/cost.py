"""What a product of 8-bit codes under scales cannot do without: each code once, and the FLOPs at an 8-bit rate."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import Setting, sized_form

CODES = ("int8", "fp8")


def cost(rows: int, outputs: int, inputs: int, dtype: str = "bfloat16", code: str = "fp8") -> Cost:
    """`dtype`: of the result. Tensor cores have one rate for whole numbers and floats of 8 bits."""
    size = short_dtype(dtype)[1]
    read = rows * inputs + outputs * inputs + 4 * (rows + outputs)
    return Cost(2 * rows * outputs * inputs, read, size * rows * outputs, launches=1, dtype="fp8")


_SUITE = ("16x8192x8192", "1024x8192x8192", "4096x4096x4096", "8192x8192x8192")
FORM = sized_form("MxNxK", _SUITE, cost, code=Setting(CODES, "fp8"))
