"""What an AdamW step cannot do without: 28 bytes per element, in float32 and with 16-bit parameters beside masters."""

from __future__ import annotations

from tilemesh.core.cost import SHORT_DTYPES, Cost, short_dtype
from tilemesh.kernels.problems import Setting, sized_form


def cost(tensors: int, elements: int, dtype: str = "float32") -> Cost:
    """Of one step over `tensors` parameters of `elements` each; 16-bit ones have float32 masters and 16-bit gradients.

    The gradient is read; the weight (the master, where there is one) and both averages are read and written; a 16-bit
    parameter is written.
    """
    _, size = short_dtype(dtype)
    count, own = tensors * elements, max(size, 4)
    read, written = size + 3 * own, 3 * own + (size if size < own else 0)
    return Cost(12 * count, read * count, written * count, launches=1, dtype="fp64" if size == 8 else "fp32")


FORM = sized_form(
    "TENSORSxELEMENTS", ("148x838656", "200x5500000", "16x65536"), cost, dtype=Setting(tuple(SHORT_DTYPES), "float32")
)
