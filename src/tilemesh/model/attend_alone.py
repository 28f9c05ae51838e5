"""Attention in which a token's bits depend on its own sequence alone: in an engine's invariant mode, and in training.

The one idea: keys are reduced in blocks that begin at multiples of their size, in the order of positions, and queries
stand in tiles of one size, wherever keys and values lie. On a CPU that is torch's products of constant shapes, which
autograd differentiates; on a GPU it is the kernel over pages, whose gradient is that of the ordinary operator.

N: tokens of all sequences; T: tokens of one; S: keys of a block; H: query heads; K: key and value heads; G: query heads
of a key head times queries; E: head width; D: sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.kernels.attention.reference import attention, seen
from tilemesh.kernels.paged_attention.reference import EVEN_SPLIT, paged_attention, prompt_tile
from tilemesh.model.soft_cap import attend_masked, soft_capped

ALONE_BY_TOKEN = "alone"
"""As an implementation in `ModelKernels`' words."""
KEY_BLOCK = 64
QUERY_BLOCK = 8
"""On a CPU: queries of one sequence in one product, padded to as many."""
_PAGE = 64

KeyBlock = Callable[[int, int], tuple[Tensor, Tensor]]
"""Keys and values (S, K, E) from a position on, so many; behind the sequence's end, any finite ones."""


def attend_alone(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, starts: Tensor, longest: int, window: int = 0, cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of sequences laid end to end: (N, H, E). `starts`: where each begins, and the end of the last;
    `longest`: tokens of the longest, at least. `window`, `cap`, `sinks_H`: as in `model.attend`."""
    if q_NHE.is_cuda:
        by_tiles: Any = _ByTiles
        y_NHE: Tensor = by_tiles.apply(q_NHE, k_NKE, v_NKE, starts, longest, window, cap, sinks_H)
        return y_NHE
    results = []
    for begin, end in pairwise(starts.tolist()):
        k_TKE, v_TKE = k_NKE[begin:end], v_NKE[begin:end]

        def block(at: int, count: int, k_TKE: Tensor = k_TKE, v_TKE: Tensor = v_TKE) -> tuple[Tensor, Tensor]:
            k_SKE, v_SKE = k_TKE[at : at + count], v_TKE[at : at + count]
            padding = (0, 0, 0, 0, 0, count - len(k_SKE))
            return functional.pad(k_SKE, padding), functional.pad(v_SKE, padding)

        results.append(attend_in_blocks(q_NHE[begin:end], 0, block, window, cap, sinks_H))
    return torch.cat(results)


# In blocks ------------------------------------------------------------------------------------------------------------


def attend_in_blocks(
    q_THE: Tensor, first: int, block: KeyBlock, window: int = 0, cap: float = 0.0, sinks_H: Tensor | None = None
) -> Tensor:
    """Of the queries of one sequence from position `first` on, a few at a time: all shapes are constants."""
    results = []
    last = first + len(q_THE) - 1
    for begin in range(0, len(q_THE), QUERY_BLOCK):
        some_THE = q_THE[begin : begin + QUERY_BLOCK]
        padded_THE = functional.pad(some_THE, (0, 0, 0, 0, 0, QUERY_BLOCK - len(some_THE)))
        # Padded queries stand where the last real one does: every query has at least one key.
        at_T = (first + begin + torch.arange(QUERY_BLOCK, device=q_THE.device)).clamp(max=last)
        end = min(first + begin + QUERY_BLOCK - 1, last) + 1
        scaled_THE, span = padded_THE * q_THE.shape[-1] ** -0.5, (first + begin, end)
        y_THE = _reduce(scaled_THE, at_T, span, block, window, cap, sinks_H)
        results.append(y_THE[: len(some_THE)])
    return torch.cat(results)


def _reduce(
    q_THE: Tensor, at_T: Tensor, span: tuple[int, int], block: KeyBlock, window: int, cap: float, sinks_H: Tensor | None
) -> Tensor:
    """Softmax over blocks of keys in their order, of queries at these positions, the first and past the last `span`."""
    width, total = q_THE.shape[-1], None
    # Blocks that lie before every query's window are passed over.
    first = max(0, span[0] + 1 - window) // KEY_BLOCK * KEY_BLOCK if window else 0
    for begin in range(first, span[1], KEY_BLOCK):
        k_KSE, v_KSE = (x_SKE.transpose(0, 1).contiguous() for x_SKE in block(begin, KEY_BLOCK))
        if total is None:
            q_KGE = q_THE.view(QUERY_BLOCK, len(k_KSE), -1, width).permute(1, 2, 0, 3).flatten(1, 2)
            most_KG = q_KGE.new_full(q_KGE.shape[:2], -torch.inf)
            sum_KG = q_KGE.new_zeros(q_KGE.shape[:2])
            total = torch.zeros_like(q_KGE)
            if sinks_H is not None:
                sink_KG = sinks_H.to(q_KGE.dtype).view(len(k_KSE), -1, 1).repeat(1, 1, QUERY_BLOCK).flatten(1)
                most_KG = sink_KG.detach()
                sum_KG = (sink_KG - most_KG).exp()
        key_S = begin + torch.arange(KEY_BLOCK, device=at_T.device)
        behind_TS = key_S > at_T[:, None]
        if window:
            behind_TS |= key_S <= at_T[:, None] - window
        score_KGS = soft_capped(torch.bmm(q_KGE, k_KSE.transpose(1, 2)), cap)
        score_KGS = score_KGS.masked_fill(behind_TS.repeat(q_KGE.shape[1] // len(at_T), 1), -torch.inf)
        # A softmax does not change with the score that is subtracted, so no gradient flows through it.
        now_KG = torch.maximum(most_KG, score_KGS.detach().amax(-1))
        if window:  # a query may see no key of its first blocks: -inf less -inf would be NaN
            now_KG = now_KG.clamp(min=torch.finfo(now_KG.dtype).min)
        weight_KGS = (score_KGS - now_KG[..., None]).exp()
        before_KG = (most_KG - now_KG).exp()
        sum_KG = sum_KG * before_KG + weight_KGS.sum(-1)
        total = total * before_KG[..., None] + torch.bmm(weight_KGS, v_KSE)
        most_KG = now_KG
    assert total is not None
    y_KGTE = (total / sum_KG[..., None]).view(len(total), -1, QUERY_BLOCK, width)
    return y_KGTE.permute(2, 0, 1, 3).flatten(1, 2)


# By tiles -------------------------------------------------------------------------------------------------------------


class _ByTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int, cap: float,
        sinks_H: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q, k, v, starts, sinks_H)
        ctx.window, ctx.cap = window, cap
        return attend_by_tiles(q, k, v, starts, longest, window, cap, sinks_H)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, starts, sinks_H = ctx.saved_tensors
        inputs = [x.detach().requires_grad_() for x in (*saved, *([] if sinks_H is None else [sinks_H]))]
        with torch.enable_grad():
            q, k, v = (x.transpose(0, 1)[None] for x in inputs[:3])
            y: Tensor
            if ctx.cap:
                mask = seen(q, k, starts, causal=True, window=ctx.window)
                y = attend_masked(q, k, v, mask, cap=ctx.cap, sinks_H=inputs[3] if inputs[3:] else None)
            else:
                y = attention(q, k, v, starts, *inputs[3:], causal=True, window=ctx.window)
            made = torch.autograd.grad(y[0].transpose(0, 1), inputs, grads[0])
        return (*made[:3], None, None, None, None, made[3] if made[3:] else None)


def attend_by_tiles(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int = 0, cap: float = 0.0,
    sinks_H: Tensor | None = None, implementation: str = "auto",
) -> Tensor:  # fmt: skip
    """As `attend_alone` by the kernel over pages, which keys and values are first laid into. Without gradients."""
    (_, heads, width), kv_heads = q.shape, k.shape[1]
    tile = prompt_tile(heads // kv_heads, width, q.element_size(), even=True)
    layout = _layout(starts, len(q), longest, tile)
    pages = []
    for x_NKE in (k, v):
        # Zeros: a weight of 0 times NaN in unused memory would be NaN.
        held = x_NKE.new_zeros(layout.pages * _PAGE, kv_heads, width)
        held[layout.places_N] = x_NKE
        pages.append(held.view(-1, _PAGE, kv_heads, width))
    y: Tensor = paged_attention(
        q, *pages, layout.tables_DM, layout.tiles_B4, sinks=sinks_H, tile=tile, split=EVEN_SPLIT, longest=longest,
        window=window, cap=cap, even=True, implementation=implementation,
    )  # fmt: skip
    return y


class _SequenceLayout(NamedTuple):
    places_N: Tensor
    """Of each token in the pages."""
    tables_DM: Tensor
    tiles_B4: Tensor
    pages: int
    """At least as many as there are: how long each sequence is, the host never asks."""


def _layout(starts: Tensor, tokens: int, longest: int, tile: int) -> _SequenceLayout:
    device, sequences = starts.device, len(starts) - 1
    lengths_D = starts.diff()
    first_page_D, pages = _begins((lengths_D + _PAGE - 1) // _PAGE), tokens // _PAGE + sequences
    token_N = torch.arange(tokens, device=device)
    of_N = torch.searchsorted(starts, token_N, right=True) - 1
    places_N = first_page_D[of_N] * _PAGE + token_N - starts[of_N]
    tables_DM = first_page_D[:, None] + torch.arange(-(-longest // _PAGE), device=device)
    # Tiles beyond those of all sequences have no token.
    tiles_D = (lengths_D + tile - 1) // tile
    tile_B = torch.arange(tokens // tile + sequences, device=device)
    of_B = torch.searchsorted(tiles_D.cumsum(0), tile_B, right=True).clamp(max=sequences - 1)
    at_B = (tile_B - _begins(tiles_D)[of_B]) * tile
    count_B = (lengths_D[of_B] - at_B).clamp(0, tile)
    tiles_B4 = torch.stack((of_B, starts[of_B] + at_B, count_B, at_B), 1)
    return _SequenceLayout(places_N, tables_DM.clamp(max=pages - 1).int(), tiles_B4.int(), pages)


def _begins(counts_D: Tensor) -> Tensor:
    """Where each one's begin, if all are counted one after the other."""
    return counts_D.cumsum(0) - counts_D


def starts_of(rows: int, tokens: int, device: torch.device) -> Tensor:
    """Of sequences of one length."""
    return torch.arange(0, rows * tokens + 1, tokens, device=device)
