"""Activations and their derivatives in plain torch, and how an error passes through them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.kernels.accuracy import unit

# The steepest slope of each; squared_relu's grows with its argument.
_STEEPEST = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}


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


def activation_error(size: Tensor, error: Tensor, activation: str, computed: torch.dtype) -> Tensor:
    """How far act(z) may be from the exact one, for a z of this size and error, computed in a dtype and not stored."""
    steepest = 2 * (size + error) if activation == "squared_relu" else _STEEPEST[activation]
    bound = steepest * error
    if activation in ("none", "relu"):
        return bound
    # exp and erf are right to a few units, and an argument's rounding counts as often as the argument is large.
    return bound + (8 + 2 * size) * size * unit(computed)
