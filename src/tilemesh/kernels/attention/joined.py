"""Self-attention over queries, keys and values that lie side by side, as one product makes them.

The one idea: attention's kernels follow strides, so results and gradients can lie where the products around them read
them. Nothing is cut apart, turned or joined by copies, forward or backward.

B: batch; T: tokens; H, K: heads of queries, and of keys and values; E: width of a head; F = (H + 2 K) E.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.attention import reference
from tilemesh.kernels.launch.operator import operator


def parts(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, T, E), keys and values (B, K, T, E): views of qkv (B, T, F)."""
    width = qkv.shape[-1] // (heads + 2 * kv_heads)
    split = torch.split(qkv, [heads * width, kv_heads * width, kv_heads * width], dim=-1)
    counts = (heads, kv_heads, kv_heads)
    q, k, v = (part.unflatten(-1, (count, width)).transpose(1, 2) for part, count in zip(split, counts, strict=True))
    return q, k, v


def check(qkv: Tensor, heads: int, kv_heads: int, causal: bool, window: int) -> None:
    together = heads + 2 * kv_heads
    if qkv.dim() != 3 or heads < 1 or kv_heads < 1 or heads % kv_heads or qkv.shape[-1] % together:
        raise UsageError(
            f"qkv has shape {tuple(qkv.shape)}, with {heads} heads over {kv_heads}: expected (B, T, (H + 2 K) E) "
            "with H a multiple of K"
        )
    width = qkv.shape[-1] // together
    if not 1 <= width <= reference.WIDEST_HEAD:
        raise UsageError(f"heads are {width} wide: expected 1 to {reference.WIDEST_HEAD} (64 and 128 are the fastest)")
    if window < 0:
        raise UsageError(f"window is {window}: expected a number of keys, or 0 for all of them")


def log_sums(qkv: Tensor, heads: int, kv_heads: int, causal: bool, window: int) -> Tensor:
    """Kept of each query, as `reference.log_sums`."""
    batch, tokens, _ = qkv.shape
    return qkv.new_empty((batch, heads, tokens), dtype=accumulator(qkv.dtype))


def served(qkv: Tensor, heads: int, kv_heads: int, causal: bool, window: int) -> bool:
    return qkv.dtype is not torch.float64 or qkv.device.type == "cpu"


@operator(
    kernel="tilemesh.kernels.attention.joined_plan",
    check=check,
    kept=(log_sums,),
    keeps_results=True,
    casts=True,
    served=served,
)
def self_attention(
    qkv: Tensor,
    *,
    heads: int,
    kv_heads: int,
    causal: bool = True,
    window: int = 0,
) -> Tensor:
    """`attention` of qkv (B, T, (H + 2 K) E), its heads of queries, of keys and of values in this order: (B, T, H E).

    For the result of one product for all three projections: its gradient is one tensor too. `auto` takes the kernels on
    every GPU; causal and window are `attention`'s.
    """
    y = reference.attention.reference(  # type: ignore[attr-defined]
        *parts(qkv, heads, kv_heads), causal=causal, window=window
    )
    flat: Tensor = y.transpose(1, 2).flatten(-2)
    return flat
