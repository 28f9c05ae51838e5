"""What a loss from activations and the output projection cannot do without: three products of the same size."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.problems import Setting, sized_form

CHUNK_BYTES = 512 * 2**20
"""Of logits that exist at a time: large enough for products at full speed (measured on an H200)."""


def chunk_rows(rows: int, classes: int, element_bytes: int) -> int:
    """Rows whose logits take about `CHUNK_BYTES`, in equal chunks of a multiple of 128."""
    most = max(128, CHUNK_BYTES // (classes * element_bytes))
    return min(rows, -(-rows // -(-rows // most) // 128) * 128) if rows > 128 else rows


def cost(rows: int, width: int, classes: int, dtype: str = "bfloat16", *, passes: str = "both") -> Cost:
    """Of x (rows, width) and weight (classes, width): logits and, with both passes, the two gradients.

    Bytes are those of x, weight and their gradients: logits that stay on the chip would move none.
    """
    short, size = short_dtype(dtype)
    held, products = size * width * (rows + classes), 3 if passes == "both" else 1
    written = held if passes == "both" else 0
    return Cost(2 * products * rows * classes * width, held, written, launches=products + 1, dtype=short)


_SUITE = ("8192x768x50304", "8192x4096x128256")
FORM = sized_form("ROWSxWIDTHxCLASSES", _SUITE, cost, passes=Setting(("forward", "both"), "both"))
