"""`self_attention` by attention's kernels: the same launches, on views of joined tensors.

Where cuDNN's forward kernel is the faster one (heads of 64 on Hopper, which exponentials bound), it computes the
result; the backward pass is ours in any case, since it writes the joined gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from tilemesh.kernels.attention.joined import log_sums, parts
from tilemesh.kernels.attention.plan import attend, attend_back
from tilemesh.kernels.launch.gpu import device_index, gpu_of

_LOG2_E = 1.4426950408889634


def _turned(flat: Tensor, heads: int) -> Tensor:
    """(B, T, H E) as (B, H, T, E)."""
    return flat.view(*flat.shape[:-1], heads, -1).transpose(1, 2)


def is_for_cudnn(q: Tensor, k: Tensor, causal: bool, window: int) -> bool:
    """Whether cuDNN's forward pass is taken: measured on an H200 for as many heads of keys as of queries."""
    if q.device.type != "cuda" or not causal or window or q.shape[-1] != 64 or q.shape[1] != k.shape[1]:
        return False
    if not gpu_of(device_index(q.device)).hopper:
        return False
    return bool(can_use_cudnn_attention(SDPAParams(q, k, k, None, 0.0, True, False)))


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The result with heads before tokens, and for each query log2 of the sum of 2 to its scores."""
    y, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
    return y, log_sum.view(q.shape[:-1]) * _LOG2_E


def forward(
    launch: Any, qkv: Tensor, heads: int, kv_heads: int, causal: bool, window: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = parts(qkv, heads, kv_heads)
    if is_for_cudnn(q, k, causal, window):
        made, kept = _by_cudnn(q, k, v)
        return made.transpose(1, 2).reshape(*qkv.shape[:-1], -1), kept
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
