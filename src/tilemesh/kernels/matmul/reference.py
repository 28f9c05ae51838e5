"""D = act(A @ B + C) in plain torch: the oracle of the tests, the path of a CPU and of float64, and the derivatives.

Every function here is differentiable as often as torch allows, and none is fused.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def activate(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.relu(x)
    if activation == "gelu":
        return functional.gelu(x)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if activation == "silu":
        return functional.silu(x)
    if activation == "squared_relu":
        return torch.relu(x).square()
    return x


def fused_matmul(a: Tensor, b: Tensor, c: Tensor | None, activation: str) -> Tensor:
    """What a user writes today: three operators, three roundings."""
    product = a @ b
    return activate(product if c is None else product + c, activation)


def exact(a: Tensor, b: Tensor, c: Tensor | None, activation: str) -> Tensor:
    """The float64 result, for errors to be measured against."""
    return fused_matmul(a.double(), b.double(), None if c is None else c.double(), activation)


def slope(saved: Tensor, activation: str) -> Tensor:
    """act' from what the forward pass kept: D for relu, the value before the activation otherwise."""
    if activation == "relu":
        return (~(saved <= 0)).to(saved.dtype)
    if activation == "squared_relu":
        return 2 * torch.relu(saved)
    if activation == "gelu":
        below = 0.5 * (1 + torch.erf(saved * 0.7071067811865476))
        return below + saved * torch.exp(-0.5 * saved * saved) * 0.3989422804014327
    if activation == "gelu_tanh":
        inner = 0.7978845608028654 * (saved + 0.044715 * saved**3)
        gate = torch.sigmoid(2 * inner)
        return gate + saved * 2 * gate * (1 - gate) * 0.7978845608028654 * (1 + 0.134145 * saved**2)
    if activation == "silu":
        gate = torch.sigmoid(saved)
        return gate * (1 + saved * (1 - gate))
    return torch.ones_like(saved)


def gradient(grad: Tensor, saved: Tensor, activation: str) -> Tensor:
    """grad * act'(saved). A closed relu passes nothing on, not even an infinite gradient."""
    if activation == "none":
        return grad
    if activation in ("relu", "squared_relu"):
        return torch.where(saved <= 0, torch.zeros_like(grad), grad * slope(saved, activation))
    return grad * slope(saved, activation)
