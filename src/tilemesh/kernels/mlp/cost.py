"""What a Transformer's MLP cannot do without: two products forward, four backward, and what must pass between them."""

from __future__ import annotations

from tilemesh.core.cost import Cost, short_dtype
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.problems import PASSES, Setting, sized_form


def cost(rows: int, width: int, hidden: int, dtype: str = "bfloat16") -> Cost:
    """Of the forward pass: x and both weights are read, y is written, and so is what lies between the products."""
    short, size = short_dtype(dtype)
    read = size * (rows * width + 2 * width * hidden + rows * hidden)
    return Cost(4 * rows * width * hidden, read, size * rows * (width + hidden), launches=2, dtype=short)


def backward_cost(rows: int, width: int, hidden: int, dtype: str = "bfloat16") -> Cost:
    """Of the backward pass: the hidden values before and after the activation are read, their gradient is written and
    read by two products."""
    short, size = short_dtype(dtype)
    read = size * (2 * rows * width + 2 * width * hidden + 3 * rows * hidden)
    written = size * (rows * (width + hidden) + 2 * width * hidden)
    return Cost(8 * rows * width * hidden, read, written, launches=4, dtype=short)


_ACTIVATION = Setting(tuple(ACTIVATIONS), "gelu_tanh", named=False)
_SUITE = ("32768x768x3072", "8192x2048x8192")
FORM = sized_form("ROWSxWIDTHxHIDDEN", _SUITE, cost, backward_cost, passes=PASSES, activation=_ACTIVATION)
