"""Soft caps: numbers that stay between -cap and cap, as Gemma 2 has them for attention's scores and for logits; and
attention with these, and with sinks.

B: rows; T: queries; S: keys; H: query heads; K: key and value heads; G: H / K; E: head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.kernels.accuracy import accumulator


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap); 0: x as it is."""
    return torch.tanh(x / cap) * cap if cap else x


def attend_masked(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """torch's attention, (B, H, T, E); with a cap of scores or sinks, which its kernels do not know, by its operators.

    `mask`: where a query sees a key, as wide as (B, H or 1, T, S) or less. `is_causal`: queries and keys are the same
    tokens, and none sees a later one. `sinks_H`: of each head (or of each head and query) a logit
    more, which takes no value. With these or capped, all scores are in memory at once, in float32 at least.
    """
    heads, kv_heads = q_BHTE.shape[1], k_BKSE.shape[1]
    if not cap and sinks_H is None:
        return functional.scaled_dot_product_attention(
            q_BHTE, k_BKSE, v_BKSE, mask, is_causal=is_causal, enable_gqa=heads != kv_heads
        )
    rows, _, queries, width = q_BHTE.shape
    keys, wide = k_BKSE.shape[2], accumulator(q_BHTE.dtype)
    scores = q_BHTE.reshape(rows, kv_heads, -1, width) @ k_BKSE.mT
    scores = soft_capped(scores.to(wide) * (1 / math.sqrt(width)), cap).view(rows, heads, queries, keys)
    if is_causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)  # -inf would make NaN of padding that sees nothing
    if sinks_H is not None:
        sink = sinks_H.to(wide).reshape(heads, -1, 1).expand(*scores.shape[:3], 1)
        weight = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    else:
        weight = torch.softmax(scores, -1)
    weight = weight.to(v_BKSE.dtype).reshape(rows, kv_heads, -1, keys)
    return (weight @ v_BKSE).view(rows, heads, queries, width)
