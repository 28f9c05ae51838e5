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
    one = tl.full(saved.shape, 1.0, saved.dtype)
    if ACTIVATION == "relu":
        return tl.where(saved <= 0.0, 0.0, one)
    elif ACTIVATION == "squared_relu":  # noqa: RET505  (branches are chosen when compiled)
        return tl.where(saved <= 0.0, 0.0, 2.0 * saved)
    elif ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.erf(saved * 0.7071067811865476))
        return below + saved * 0.3989422804014327 * tl.exp(-0.5 * saved * saved)
    elif ACTIVATION == "gelu_tanh":
        u = 0.7978845608028654 * saved * (1.0 + 0.044715 * saved * saved)
        gate = 1.0 / (1.0 + tl.exp(-2.0 * u))
        return gate + saved * 2.0 * gate * (1.0 - gate) * 0.7978845608028654 * (1.0 + 0.134145 * saved * saved)
    elif ACTIVATION == "silu":
        gate = 1.0 / (1.0 + tl.exp(-saved))
        return gate * (1.0 + saved * (1.0 - gate))
    return one
