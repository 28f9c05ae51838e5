"""Activations and their derivatives in Triton, for kernels to call; loaded twice (kernels/launch/interpret.py)."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation, in the dtype of x. NaN passes through each, as in torch."""
    if ACTIVATION == "relu":
        x = tl.where(x <= 0.0, 0.0, x)
    elif ACTIVATION == "squared_relu":
        x = tl.where(x <= 0.0, 0.0, x)
        x = x * x
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 x (1 + tanh(u)) is x sigmoid(2u): one exponential and no tanh.
        u = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
        x = x / (1.0 + tl.exp(-2.0 * u))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def slope(saved, ACTIVATION: tl.constexpr):
    """The activation's derivative: from D for relu (its sign is enough), from the value before it for the others."""
    if ACTIVATION == "relu":
        steep = tl.where(saved <= 0.0, 0.0, 1.0)
    elif ACTIVATION == "squared_relu":
        steep = tl.where(saved <= 0.0, 0.0, 2.0 * saved)
    elif ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.erf(saved * 0.7071067811865476))
        steep = below + saved * 0.3989422804014327 * tl.exp(-0.5 * saved * saved)
    elif ACTIVATION == "gelu_tanh":
        # x sigmoid(v) with v = 1.5958 x + 0.0714 x^3: the derivative is sigmoid(v) (1 + x (1 - sigmoid(v)) v').
        square = saved * saved
        gate = 1.0 / (1.0 + tl.exp(saved * (-1.5957691216057308 - 0.07135481627260025 * square)))
        steep = gate * (1.0 + saved * (1.0 - gate) * (1.5957691216057308 + 0.21406444881780073 * square))
    elif ACTIVATION == "silu":
        gate = 1.0 / (1.0 + tl.exp(-saved))
        steep = gate * (1.0 + saved * (1.0 - gate))
    else:
        steep = tl.full(saved.shape, 1.0, saved.dtype)
    return steep


@triton.jit
def through(grad, saved, ACTIVATION: tl.constexpr):
    """grad * act'(saved); an infinite gradient of a closed relu stays zero, as in torch."""
    made = grad * slope(saved, ACTIVATION)
    if ACTIVATION == "relu" or ACTIVATION == "squared_relu":
        made = tl.where(saved <= 0.0, 0.0, made)
    return made
