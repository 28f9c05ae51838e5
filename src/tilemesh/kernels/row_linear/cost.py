"""What the product of one row with a matrix cannot do without: every weight once."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import Setting, sized_form

GATES = ("none", "silu")


def cost(outputs: int, inputs: int, dtype: str = "bfloat16", gate: str = "none") -> Cost:
    """Of `outputs` results; with a gate there are twice as many rows of weights."""
    short, size = short_dtype(dtype)
    weights = outputs * inputs * (1 if gate == "none" else 2)
    return Cost(2 * weights, size * (weights + inputs), size * outputs, launches=1, dtype=short)


def norm_cost(outputs: int, inputs: int, dtype: str = "bfloat16", gate: str = "none") -> Cost:
    """With the norm of the sum of two rows before it, which is read, scaled and kept."""
    _, size = short_dtype(dtype)
    product = cost(outputs, inputs, dtype, gate)
    read, written = product.bytes_read + 2 * size * inputs, product.bytes_written + size * inputs
    return Cost(product.flops + 5 * inputs, read, written, launches=1, dtype=product.dtype)


_GATE = Setting(GATES, "none", named=False)
_SUITE = ("2560x2048", "5632x2048", "2048x5632", "14336x4096", "4096x14336", "128256x4096")
FORM = sized_form("OUTPUTSxINPUTS", _SUITE, cost, gate=_GATE)
NORM_ROW_LINEAR_FORM = sized_form("OUTPUTSxINPUTS", _SUITE, norm_cost, gate=_GATE)
