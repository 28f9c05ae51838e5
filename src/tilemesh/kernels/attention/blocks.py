"""Attention of a block of queries over a block of keys, to be put together with that over other blocks.

The one idea: forward gives each query's result over these keys alone and the logarithm of its sum of exponentials;
results over several blocks are then weighed by their sums. Backward is given the result and logarithm over *all* keys,
so what it computes are this block's parts of the gradients, to be added up. Which keys a query sees is an interval, as
everywhere here: all, those up to itself, or bounds of its own (packed documents, windows).

On a GPU by the kernels of `attention`, on a CPU by torch's own, which gives the logarithms too; in float64 on a GPU,
which has neither, operation by operation, a few queries at a time.
Names: B batch, H heads of queries, K heads of keys and values, G = H / K, T queries, S keys, E width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.attention.sinks import backward_on_cpu, forward_on_cpu
from tilemesh.kernels.launch.computation import launcher
from tilemesh.kernels.launch.implementation import implementation_of

_SCORES = 1 << 20  # numbers: what is held of them, or of a mask, at a time


class SeenKeys(NamedTuple):
    """Which keys the queries of a block see: [low, high), and by which queries each key is seen. Ends never shrink."""

    low_BT: Tensor
    high_BT: Tensor
    first_BS: Tensor
    last_BS: Tensor


class BlockGradients(NamedTuple):
    """In the precision that sums are kept in."""

    q: Tensor
    k: Tensor
    v: Tensor


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    seen: SeenKeys | None = None,
    implementation: str = "auto",
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(B, H, T, E) and natural logarithms of the sums (B, H, T), -inf of a query that sees no key here.

    `causal`: queries and keys are the same tokens. `seen`: takes its place. `cap`: scores s are cap tanh(s / cap), in
    plain torch; 0: as they are.
    """
    how = _implementation(implementation, q, cap)
    if how != "torch":
        return _by_kernel(how, q, k, v, causal, seen)
    if _is_fused(q) and not cap:
        return _on_cpu(q, k, v, causal, seen)
    wide = accumulator(q.dtype)
    y, sums = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[:-1], dtype=wide)
    for rows, scores, mask in _scores(q, k, causal, seen, cap):
        if mask is not None:
            scores.masked_fill_(~mask, -math.inf)
        log = scores.logsumexp(-1)
        weight = scores.sub_(log.clamp_min(torch.finfo(wide).min)[..., None]).exp_()
        y[:, :, rows] = _by_heads(weight.flatten(2, 3) @ v.to(wide), weight)
        sums[:, :, rows] = log.flatten(1, 2)
    return y, sums


def attend_block_back(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    sums: Tensor,
    *,
    causal: bool = False,
    seen: SeenKeys | None = None,
    implementation: str = "auto",
    cap: float = 0.0,
) -> BlockGradients:
    """Gradients through this block. `y`, `sums`: of the queries over all keys, whatever block they are in."""
    how = _implementation(implementation, q, cap)
    if how != "torch":
        return _back_by_kernel(how, (grad, q, k, v, y), sums, causal, seen)
    if _is_fused(q) and not cap:
        return _back_on_cpu((grad, q, k, v, y), sums, causal, seen)
    wide, scale = accumulator(q.dtype), 1 / math.sqrt(q.shape[-1])
    dq = q.new_empty(q.shape, dtype=wide)
    dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (k, v))
    for rows, scores, mask in _scores(q, k, causal, seen, cap):
        shape = scores.shape[:-1]
        flatter = 1 - (scores / cap).square() if cap else None  # the derivative of cap tanh(s / cap)
        slope, result, query = (x[:, :, rows].to(wide).reshape(*shape, -1) for x in (grad, y, q))
        weight = scores.sub_(sums[:, :, rows].reshape(*shape, 1)).exp_()
        if mask is not None:
            weight.masked_fill_(~mask, 0)
        dv += weight.flatten(2, 3).mT @ slope.flatten(2, 3)
        inner = (slope.flatten(2, 3) @ v.to(wide).mT).view(weight.shape)
        inner = inner.sub_((slope * result).sum(-1, keepdim=True)).mul_(weight).mul_(scale)
        if flatter is not None:
            inner = inner.mul_(flatter)
        dq[:, :, rows] = _by_heads(inner.flatten(2, 3) @ k.to(wide), inner)
        dk += inner.flatten(2, 3).mT @ query.flatten(2, 3)
    return BlockGradients(dq, dk, dv)


def _implementation(implementation: str, q: Tensor, cap: float) -> str:
    how = implementation_of(implementation, (q,))
    return "torch" if cap or (how == "triton" and q.dtype is torch.float64) else how


def _scores(
    q: Tensor, k: Tensor, causal: bool, seen: SeenKeys | None, cap: float
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Of a few queries at a time: which, their scores (B, K, G, rows, S), and where they see a key, if not all do."""
    (batch, heads, tokens, width), (kv_heads, keys) = q.shape, k.shape[1:3]
    wide = accumulator(q.dtype)
    key_S, step = torch.arange(keys, device=q.device), max(1, _SCORES // (batch * heads * keys))
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        count = rows.stop - begin
        query = q[:, :, rows].to(wide).reshape(batch, kv_heads, -1, width)
        scores = (query @ k.to(wide).mT).mul_(1 / math.sqrt(width))
        if cap:
            scores = scores.div_(cap).tanh_().mul_(cap)
        mask = None
        if seen is not None:
            mask = _sees(key_S, rows, seen)[:, None, None]
        elif causal:
            mask = key_S <= key_S[rows, None]
        yield rows, scores.view(batch, kv_heads, heads // kv_heads, count, keys), mask


def _by_heads(x: Tensor, like: Tensor) -> Tensor:
    """(B, K, G rows, E) as (B, H, rows, E)."""
    batch, kv_heads, group, rows, _ = like.shape
    return x.view(batch, kv_heads * group, rows, -1)


# By torch's kernel on a CPU ---------------------------------------------------------------------------------------


def _is_fused(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, seen: SeenKeys | None) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(accumulator(x.dtype)) for x in (q, k, v))
    if seen is None:
        return forward_on_cpu(q, k, v, causal)
    parts = [forward_on_cpu(q[:, :, rows], k, v, False, mask) for rows, mask in _masks(q, k, seen)]
    y, sums = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return y, sums.masked_fill((seen.high_BT <= seen.low_BT)[:, None], -math.inf)


def _back_on_cpu(tensors: tuple[Tensor, ...], sums: Tensor, causal: bool, seen: SeenKeys | None) -> BlockGradients:
    grad, q, k, v, y = (x.to(accumulator(x.dtype)) for x in tensors)
    if seen is None:
        return BlockGradients(*backward_on_cpu(grad, q, k, v, y, sums, causal))
    parts = []
    for rows, mask in _masks(q, k, seen):
        slope, query, result, log = (x[:, :, rows] for x in (grad, q, y, sums))
        parts.append(backward_on_cpu(slope, query, k, v, result, log, False, mask))
    dq, dk, dv = zip(*parts, strict=True)
    return BlockGradients(torch.cat(dq, 2), *(sum(each[1:], each[0]) for each in (dk, dv)))


def _masks(q: Tensor, k: Tensor, seen: SeenKeys) -> Iterator[tuple[slice, Tensor]]:
    """Of a few queries at a time: which, and what is added to their scores (B, 1, rows, S)."""
    keys, tokens = k.shape[2], q.shape[2]
    step = max(1, _SCORES // (q.shape[0] * keys))
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        sees = _sees(torch.arange(keys, device=q.device), rows, seen)
        yield rows, torch.zeros(sees.shape, dtype=q.dtype).masked_fill_(~sees, -math.inf)[:, None]


def _sees(key_S: Tensor, rows: slice, seen: SeenKeys) -> Tensor:
    low_BT1, high_BT1 = (x[:, rows, None] for x in (seen.low_BT, seen.high_BT))
    return (key_S >= low_BT1) & (key_S < high_BT1)


# By the kernels ---------------------------------------------------------------------------------------------------


def _by_kernel(how: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, seen: SeenKeys | None) -> tuple[Tensor, Tensor]:
    from tilemesh.kernels.attention import plan  # late: it needs Triton

    tensors = [q, k, v] if seen is None else [_end_to_end(x) for x in (q, k, v)]
    y = torch.empty(tensors[0].shape, dtype=q.dtype, device=q.device)
    kept = q.new_empty(y.shape[:-1], dtype=accumulator(q.dtype))
    given = dict(zip("qkv", tensors, strict=True)) | {"y": y, "kept": kept}
    if seen is not None:
        given |= _bounds(seen.low_BT, seen.high_BT, k.shape[2])
    plan.attend(launcher(how), given, causal and seen is None, 0, 0.0)
    if seen is not None:
        y, kept = _rows(y, q), _rows(kept[..., None], q)[..., 0]
        blind_BT = (seen.high_BT <= seen.low_BT)[:, None]
        y, kept = y.masked_fill(blind_BT[..., None], 0), kept.masked_fill(blind_BT, -math.inf)
    return y, kept * math.log(2)


def _back_by_kernel(
    how: str, tensors: tuple[Tensor, ...], sums: Tensor, causal: bool, seen: SeenKeys | None
) -> BlockGradients:
    from tilemesh.kernels.attention import plan

    _, q, k, v, _ = tensors
    kept = sums / math.log(2)
    if seen is not None:
        tensors, kept = tuple(map(_end_to_end, tensors)), _end_to_end(kept[..., None])[..., 0]
    given = dict(zip(("grad", "q", "k", "v", "y"), tensors, strict=True)) | {"kept": kept.contiguous()}
    made = {f"d{name}": torch.empty(given[name].shape, dtype=q.dtype, device=q.device) for name in "qkv"}
    keys: dict[str, Tensor] = {}
    if seen is not None:
        given |= _bounds(seen.low_BT, seen.high_BT, k.shape[2])
        keys = _bounds(seen.first_BS, seen.last_BS, q.shape[2])
    plan.attend_back(launcher(how), given, made, causal and seen is None, 0, 0.0, keys)
    gradients: list[Any] = list(made.values())
    if seen is not None:
        gradients = [_rows(gradient, like) for gradient, like in zip(gradients, (q, k, v), strict=True)]
    return BlockGradients(*(gradient.to(accumulator(q.dtype)) for gradient in gradients))


def _end_to_end(x: Tensor) -> Tensor:
    """(1, H, B T, E): all rows as one, as the kernels take bounds."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """The inverse: (B, H, T, E)."""
    return x[0].unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1)


def _bounds(low_BT: Tensor, high_BT: Tensor, others: int) -> dict[str, Tensor]:
    """Bounds within each row, of so many on the other side, as bounds in all rows end to end."""
    before_B1 = torch.arange(0, low_BT.shape[0] * others, others, device=low_BT.device)[:, None]
    first, last = ((x + before_B1).flatten().to(torch.int32) for x in (low_BT, high_BT))
    return {"first": first, "last": last}
