"""`self_attention` by attention's kernels: the same launches, on views of joined tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilemesh.kernels.attention.joined import log_sums, parts
from tilemesh.kernels.attention.plan import attend, attend_back


def _turned(flat: Tensor, heads: int) -> Tensor:
    """(B, T, H E) as (B, H, T, E)."""
    return flat.view(*flat.shape[:-1], heads, -1).transpose(1, 2)


def forward(
    launch: Any, qkv: Tensor, heads: int, kv_heads: int, causal: bool, window: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = parts(qkv, heads, kv_heads)
    batch, tokens, _ = qkv.shape
    y = torch.empty((batch, tokens, heads * q.shape[-1]), dtype=qkv.dtype, device=qkv.device)
    kept = log_sums(qkv, heads, kv_heads, causal, window)
    attend(launch, {"q": q, "k": k, "v": v, "y": _turned(y, heads), "kept": kept}, causal, window, 0.0)
    return y, kept


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor]:
    (grad,), (y, sums) = gradients, kept
    qkv, heads, kv_heads, causal, window = arguments
    q, k, v = parts(qkv, heads, kv_heads)
    made = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    dq, dk, dv = parts(made, heads, kv_heads)
    given = {"q": q, "k": k, "v": v, "y": _turned(y, heads), "grad": _turned(grad.contiguous(), heads), "kept": sums}
    attend_back(launch, given, {"dq": dq, "dk": dk, "dv": dv}, causal, window, 0.0)
    return (made,)
