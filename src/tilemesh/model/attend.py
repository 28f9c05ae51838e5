"""Tokens of a pass that attend to one another: causal attention over whole sequences, without a cache.

B: rows; T: tokens; H: query heads; K: key and value heads; E: head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.kernels.attention.joined import self_attention
from tilemesh.kernels.attention.reference import attention as windowed_attention
from tilemesh.kernels.attention.reference import seen
from tilemesh.model.attend_alone import ALONE_BY_TOKEN, attend_alone, starts_of
from tilemesh.model.documents import DocumentPlaces, attend_within
from tilemesh.model.kernels import TORCH
from tilemesh.model.rotary import RotaryAngles, rotate
from tilemesh.model.soft_cap import attend_masked


def attend(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    rotary: RotaryAngles | None,
    documents: DocumentPlaces | None = None,
    window: int = 0,
    implementation: str = TORCH,
    cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(q k / sqrt(E)) v of each token over those up to itself, after queries and keys are turned: (B, T, H, E).

    `window`: over the last so many only, itself included; 0: over all. `documents`: none sees another.
    `implementation`: "torch", of tilemesh's for joined q, k and v, which knows neither documents nor caps nor sinks, or
    as `model.attend_alone` does it. `cap`, `sinks_H`: as `model.soft_cap`.
    """
    y_BHTE: Tensor
    heads, kv_heads, is_plain = q_BTHE.shape[2], k_BTKE.shape[2], not cap and sinks_H is None
    if implementation not in (TORCH, ALONE_BY_TOKEN) and documents is None and is_plain:
        if rotary is not None:
            cos, sin = (table[:, None] for table in rotary)  # the same for every head of a token
            q_BTHE, k_BTKE = rotate(q_BTHE, cos, sin), rotate(k_BTKE, cos, sin)
        qkv_BTF = torch.cat([q_BTHE, k_BTKE, v_BTKE], dim=-2).flatten(-2)
        y_BTD: Tensor = self_attention(
            qkv_BTF, heads=heads, kv_heads=kv_heads, window=window, implementation=implementation
        )
        return y_BTD.view(q_BTHE.shape)
    if implementation == ALONE_BY_TOKEN:
        if rotary is not None:
            cos, sin = (table[:, None] if table.dim() == 2 else table.transpose(1, 2) for table in rotary)
            q_BTHE, k_BTKE = rotate(q_BTHE, cos, sin, alone=True), rotate(k_BTKE, cos, sin, alone=True)
        rows, tokens = q_BTHE.shape[:2]
        starts = starts_of(rows, tokens, q_BTHE.device) if documents is None else documents.starts
        q_NHE, k_NKE, v_NKE = (x.flatten(0, 1) for x in (q_BTHE, k_BTKE, v_BTKE))
        return attend_alone(q_NHE, k_NKE, v_NKE, starts, tokens, window, cap, sinks_H).view(q_BTHE.shape)
    # Heads stand before tokens from here on, as torch's kernels want.
    q_BHTE, k_BKTE, v_BKTE = q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
    if rotary is not None:
        q_BHTE, k_BKTE = rotate(q_BHTE, *rotary), rotate(k_BKTE, *rotary)
    if documents is not None:
        y_BHTE = attend_within(q_BHTE, k_BKTE, v_BKTE, documents, window, cap=cap, sinks_H=sinks_H)
    elif 0 < window < q_BHTE.shape[2] and cap:
        mask_TS = seen(q_BHTE, k_BKTE, None, causal=True, window=window)
        y_BHTE = attend_masked(q_BHTE, k_BKTE, v_BKTE, mask_TS, cap=cap, sinks_H=sinks_H)
    elif not cap and (0 < window < q_BHTE.shape[2] or sinks_H is not None):
        y_BHTE = windowed_attention(q_BHTE, k_BKTE, v_BKTE, sinks=sinks_H, causal=True, window=window)
    else:
        y_BHTE = attend_masked(q_BHTE, k_BKTE, v_BKTE, is_causal=True, cap=cap, sinks_H=sinks_H)
    return y_BHTE.transpose(1, 2)
