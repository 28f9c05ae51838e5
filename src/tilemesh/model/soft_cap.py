"""Soft caps: numbers that stay between -cap and cap, as Gemma 2 has them for attention's scores and for logits; and
attention with these, and with sinks.

B: rows; T: queries; S: keys; H: query heads; K: key and value heads; G: H / K; E: head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.kernels.attention.sinks import by_operators, with_sinks


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap); 0: x as it is."""
    return torch.tanh(x / cap) * cap if cap else x


def attend_masked(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None = None, *, is_causal: bool = False,
    cap: float = 0.0, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """torch's attention, (B, H, T, E); with a cap of scores, which its kernels do not know, by its operators.

    `mask`: where a query sees a key, as wide as (B, H or 1, T, S) or less. `is_causal`: queries and keys are the same
    tokens, and none sees a later one. `sinks_H`: of each head (or of each head and query) a logit more, which takes no
    value. Capped, with sinks of each query, or on a GPU, all scores are in memory at once, in float32 at least.
    """
    heads, kv_heads = q_BHTE.shape[1], k_BKSE.shape[1]
    if not cap and sinks_H is None:
        return functional.scaled_dot_product_attention(
            q_BHTE, k_BKSE, v_BKSE, mask, is_causal=is_causal, enable_gqa=heads != kv_heads
        )
    scale = 1 / math.sqrt(q_BHTE.shape[-1])
    if cap or sinks_H is None or sinks_H.shape != (heads,):  # of each query
        return by_operators(q_BHTE, k_BKSE, v_BKSE, sinks_H, mask, is_causal, scale, cap)
    return with_sinks(q_BHTE, k_BKSE, v_BKSE, sinks_H, mask, is_causal=is_causal, scale=scale)
