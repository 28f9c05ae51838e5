"""What a product with weights of few bits cannot do without: each code once, each activation once."""

from __future__ import annotations

from dataclasses import replace

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import Setting, sized_form

CODE_BITS = {"int4": 4, "int8": 8}
GROUP = 128


def group_of(inputs: int) -> int:
    """Inputs under one scale in a benchmark's problem."""
    return GROUP if inputs % GROUP == 0 else inputs


def cost(rows: int, outputs: int, inputs: int, dtype: str = "bfloat16", code: str = "int4") -> Cost:
    short, size = short_dtype(dtype)
    weights = outputs * (inputs * CODE_BITS[code] // 8 + inputs // group_of(inputs) * 4)
    return Cost(
        2 * rows * outputs * inputs, weights + size * rows * inputs, size * rows * outputs, launches=1, dtype=short
    )


_CODE = Setting(tuple(CODE_BITS), "int4")
_SUITE = (
    "1x8192x8192", "16x8192x8192", "64x8192x8192", "256x8192x8192", "1024x8192x8192", "8192x8192x8192",
    "1x14336x4096", "1x4096x14336",
)  # fmt: skip
FORM = sized_form("MxNxK", _SUITE, cost, code=_CODE)


def grouped_cost(
    rows: int, outputs: int, inputs: int, groups: int, dtype: str = "bfloat16", code: str = "int4"
) -> Cost:
    """Of rows that several matrices share: each of these is read."""
    one = cost(rows, outputs, inputs, dtype, code)
    codes = cost(0, outputs, inputs, dtype, code).bytes_read
    return replace(one, bytes_read=one.bytes_read + (groups - 1) * codes)


_GROUPED_SUITE = ("128x14336x4096x8", "128x4096x14336x8", "512x768x2048x128")
GROUPED_LOWBIT_LINEAR_FORM = sized_form("ROWSxOUTPUTSxINPUTSxGROUPS", _GROUPED_SUITE, grouped_cost, code=_CODE)


def norm_cost(outputs: int, inputs: int, dtype: str = "bfloat16", code: str = "int4") -> Cost:
    """Of one row, with the norm of the sum of two before the product."""
    _, size = short_dtype(dtype)
    product = cost(1, outputs, inputs, dtype, code)
    read, written = product.bytes_read + 2 * size * inputs, product.bytes_written + size * inputs
    return Cost(product.flops + 5 * inputs, read, written, launches=1, dtype=product.dtype)


NORM_LOWBIT_LINEAR_FORM = sized_form("OUTPUTSxINPUTS", ("8192x8192", "14336x4096", "4096x14336"), norm_cost, code=_CODE)
