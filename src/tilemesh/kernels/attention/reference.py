"""Attention in plain torch: softmax(scale * q k^T) v per head, where each query sees one interval of the keys.

Causal and sliding-window masks and packed sequences all mean that: which keys a query sees is an interval, and both of
its ends grow with the query's position. The kernels are written over those intervals (kernel.py).

Names: B batch, H heads of queries, K heads of keys and values, T queries, S keys, E width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import CONFIDENCE, accumulator, rounding_error, unit
from tilemesh.kernels.attention.sinks import with_sinks
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.launch.tensors import is_plain, is_traced, is_transformed

WIDEST_HEAD = 256
_FASTER_FROM = 3000  # tokens


def check(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, sinks: Tensor | None, causal: bool, window: int,
    scale: float, deterministic: bool,
) -> None:  # fmt: skip
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if any(tensor.dim() != 4 for tensor in (q, k, v)) or k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise UsageError(f"{shapes}: expected q (B, H, T, E), and k and v (B, K, S, E)")
    (_, heads, queries, width), (_, kv_heads, keys, kv_width) = q.shape, k.shape
    if width != kv_width or not 1 <= width <= WIDEST_HEAD:
        raise UsageError(
            f"{shapes}: expected heads of one width E, from 1 to {WIDEST_HEAD} (64 and 128 are the fastest)"
        )
    if (kv_heads == 0) != (heads == 0) or (kv_heads and heads % kv_heads):
        raise UsageError(f"{heads} heads of queries over {kv_heads} of keys and values: expected a multiple")
    if window < 0:
        raise UsageError(f"window is {window}: expected a number of keys, or 0 for all of them")
    if (causal or window) and queries > keys:
        raise UsageError(
            f"{'causal' if causal else 'windowed'} attention of {queries} queries over {keys} keys: expected at least "
            "as many keys, since the last query stands at the last key"
        )
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_floating_point()):
        raise UsageError(
            f"sinks {tuple(sinks.shape)} of {sinks.dtype}: expected a number of each of {heads} query heads"
        )
    if starts is None:
        return
    if starts.dim() != 1 or starts.shape[0] < 2 or starts.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            f"starts is {starts.dtype} of shape {tuple(starts.shape)}: expected int32 or int64 (N + 1,), where each of "
            "the N packed sequences begins and where the last one ends"
        )
    if q.shape[0] != 1 or queries != keys:
        raise UsageError(f"{shapes}: expected packed sequences in a batch of 1, with as many queries as keys")


def check_values(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, *_: object) -> None:
    """That packed sequences lie one after another. Reads `starts`: on a GPU that would wait for it."""
    if starts is None or is_traced() or not is_plain(starts):
        return
    bounds = starts.tolist()
    if bounds[0] != 0 or bounds[-1] != q.shape[2] or sorted(bounds) != bounds:
        shown = f"{bounds}" if len(bounds) <= 8 else f"{bounds[:4]}…{bounds[-3:]}"
        raise UsageError(f"starts is {shown}: expected ascending numbers from 0 to the {q.shape[2]} tokens")


def log_sums(q: Tensor, *_: object) -> Tensor:
    """Kept of each query: log2 of the sum of 2 to its scores, in the kernels' precision."""
    return q.new_empty(q.shape[:-1], dtype=accumulator(q.dtype))


def served(q: Tensor, *_: object) -> bool:
    """On a GPU float64 is torch's; in the interpreter, whose tensors are on a CPU, it is ours too."""
    return q.dtype is not torch.float64 or q.device.type == "cpu"


def gains(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, sinks: Tensor | None, causal: bool, window: int,
    scale: float, deterministic: bool,
) -> bool:  # fmt: skip
    """Whether `auto` takes the kernels on a GPU: where torch has no kernel of its own, or none that repeats, or ours is
    the faster one. A window or packed sequences would be a dense mask there, sinks all scores in memory."""
    shifted = causal and q.shape[2] != k.shape[2]  # torch's causal mask stands at the first key
    if starts is not None or sinks is not None or window or shifted or deterministic:
        return True
    differentiates = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    is_hopper = q.device.type == "cuda" and gpu_of(device_index(q.device)).hopper
    return is_hopper and causal and not differentiates and is_faster(q.shape[2], q.shape[3], q.dtype)


def is_faster(tokens: int, width: int, dtype: torch.dtype) -> bool:
    """Whether our forward pass of causal attention is ahead of cuDNN's, measured on an H200 (docs/kernels/README.md):
    1.03 at 3,000 tokens to 1.07 at 16,384, .92 at 2,048; backward, heads of 64 and 96 and full attention are not."""
    return tokens >= _FASTER_FROM and width == 128 and dtype in (torch.float16, torch.bfloat16)


@operator(
    kernel="tilemesh.kernels.attention.plan",
    check=check,
    check_values=check_values,
    kept=(log_sums,),
    keeps_results=True,
    casts=True,
    own_dtype=("sinks",),
    served=served,
    gains=gains,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    causal: bool = False,
    window: int = 0,
    scale: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """softmax(scale * q k^T) v for each head: (B, H, T, E) as q, without the T x S scores ever in memory.

    q: (B, H, T, E). k, v: (B, K, S, E), any strides; H is a multiple of K, and query head h reads key head h // (H/K).
    starts: (N + 1,) int32 or int64, where N sequences packed into one batch begin and end; none sees another.
    sinks: (H,), of each query head a score more in the softmax, which takes no value.
    causal: a query sees the keys up to its own position, where the last query stands at the last key. window: of those
    the last `window`, itself included; without causal, the keys less than `window` away on both sides; 0 for all.
    scale: 0 for 1/sqrt(E). deterministic: gradients repeat bit for bit; our kernels' always do, torch's may not, so
    `auto` then takes ours. Kernels compute in float32 (float64 for float64) and round probabilities to q's dtype.
    """
    factor = scale or 1 / math.sqrt(q.shape[-1])
    if factor < 0:  # torch's kernels take the largest score before they multiply: they would overflow
        q, factor = -q, -factor
    grouped = bool(q.shape[1] != k.shape[1])  # of symbolic sizes it is no bool
    is_square = causal and not window and starts is None and bool(q.shape[2] == k.shape[2])
    mask = None if is_square or not (causal or window or starts is not None) else seen(q, k, starts, causal, window)
    if sinks is not None:
        return with_sinks(q, k, v, sinks, mask, is_causal=is_square, scale=factor)
    if is_square:
        return differentiable(q, k, v, is_causal=True, scale=factor, enable_gqa=grouped)
    return differentiable(q, k, v, attn_mask=mask, scale=factor, enable_gqa=grouped)


def differentiable(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's attention, of which every derivative can be taken.

    Its kernels have one derivative, backwards. Under function transforms and with forward-mode derivatives plain
    operators compute instead; where a derivative is itself recorded (create_graph), they compute that.
    """
    attend = functional.scaled_dot_product_attention
    if is_transformed(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return attend(q, k, v, **options)
    y = attend(q, k, v, **options)
    if not is_traced() and y.requires_grad:
        node = y.grad_fn
        for _ in range(_MOST_VIEWS):  # after a kernel whose heads were padded
            if node is not None and not node.name().startswith(_KERNEL):
                node = node.next_functions[0][0]
        if node is not None and node.name().startswith(_KERNEL):
            node.register_hook(_recorded)
    return y


_KERNEL = "ScaledDotProduct"  # as torch's nodes of such kernels are called
_MOST_VIEWS = 2


def _recorded(gradients: tuple[Tensor | None, ...], upstream: tuple[Tensor | None, ...]) -> Any:
    """In place of what a kernel computed backwards: the same by plain operators, where that is recorded."""
    if not torch.is_grad_enabled() or upstream[0] is None:
        return None
    node: Any = torch._C._current_autograd_node()
    mask = getattr(node, "_saved_attn_mask", getattr(node, "_saved_attn_bias", None))
    # Aliases: where one was computed from another, gradients stop here and do not go on to that one.
    inputs = [x.view_as(x) for x in (node._saved_query, node._saved_key, node._saved_value)]
    q, k, v = inputs
    options = {"is_causal": node._saved_is_causal, "scale": node._saved_scale, "enable_gqa": q.shape[1] != k.shape[1]}
    with sdpa_kernel(SDPBackend.MATH):
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    places = [at for at, gradient in enumerate(gradients[:3]) if gradient is not None]
    made = torch.autograd.grad(y, [inputs[at] for at in places], upstream[0], create_graph=True)
    answer = list(gradients)
    for at, gradient in zip(places, made, strict=True):
        answer[at] = gradient
    return tuple(answer)


def seen(q: Tensor, k: Tensor, starts: Tensor | None, causal: bool, window: int) -> Tensor:
    """(T, S): whether a query sees a key."""
    queries, keys = q.shape[2], k.shape[2]
    key = torch.arange(keys, device=q.device)
    position = torch.arange(keys - queries, keys, device=q.device)[:, None]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        mask = mask & (key <= position)
    if window:
        mask = mask & ((key - position).abs() < window)
    if starts is not None:
        sequence = torch.bucketize(key, starts[1:].long(), right=True)
        mask = mask & (sequence == sequence[:, None])
    return mask


def exact(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, sinks: Tensor | None = None, *,
    causal: bool = False, window: int = 0, scale: float = 0.0, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """The float64 result from q, k and v as they are, for errors to be measured against."""
    return torch.stack([weight @ value for weight, value in _weights(q, k, v, starts, sinks, causal, window, scale)], 1)


def _weights(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, sinks: Tensor | None, causal: bool, window: int,
    scale: float,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Of each head the probabilities and the values, in float64: the scores of one head are in memory at a time."""
    factor = scale or 1 / math.sqrt(q.shape[-1])
    mask = seen(q, k, starts, causal, window)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // group].double().mT * factor
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].double().expand(*scores.shape[:2], 1)), -1)
        yield torch.softmax(scores, -1)[..., : k.shape[2]], v[:, head // group].double()


def error_bound(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, sinks: Tensor | None = None, *,
    causal: bool = False, window: int = 0, scale: float = 0.0, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """How far each element of a correct result may be from `exact`.

    A probability is rounded to the dtype on its own, so a sum of n of them has the error of their norm. A score is a
    sum of E products in the kernels' precision, and its error is the relative error of its probability; the sum of the
    probabilities is wrong by as much again.
    """
    factor, own, wide = abs(scale) or 1 / math.sqrt(q.shape[-1]), unit(q.dtype), unit(accumulator(q.dtype))
    longest = q.double().norm(dim=-1).amax() * k.double().norm(dim=-1).amax() * factor
    relative = wide * (CONFIDENCE * q.shape[-1] ** 0.5 * longest + CONFIDENCE * k.shape[2] ** 0.5 + 16)
    made = []
    for weight, value in _weights(q, k, v, starts, sinks, causal, window, scale):
        rounded = CONFIDENCE * own * (weight.square() @ value.square()).sqrt()
        made.append(rounded + 2 * relative * (weight @ value.abs()) + rounding_error(weight @ value, q.dtype))
    return 1.01 * torch.stack(made, 1)
