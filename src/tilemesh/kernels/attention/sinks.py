"""Attention with sinks in plain torch: of each head a score more in the softmax, which takes no value (gpt-oss).

The one idea: a sink is one more term of the sum of exponentials. From a result y and the logarithm L of its sum come
those with the sink s: L' = log(exp(L) + exp(s)), y' = y exp(L - L'). Given y' and L' in their place, the backward pass
of attention without sinks computes the gradients of q, k and v; the sink's is -sum of exp(s - L') (grad . y') over the
queries. So whatever fused pair of passes there is serves as it is. torch's of a CPU is one; its GPU kernels go by the
kernels here (`plan.py`), which do the same.

B: batch; H: query heads; K: key and value heads; T: queries; S: keys; E: width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.launch.tensors import is_transformed

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float
) -> Tensor:
    """(B, H, T, E). `mask`: where a query sees a key, of a shape that fits (B, H, T, S). `is_causal`: queries and keys
    are the same tokens, and none sees a later one."""
    if q.device.type != "cpu" or is_transformed(q, k, v, sinks_H):
        return by_operators(q, k, v, sinks_H, mask, is_causal, scale)
    bias = None
    if mask is not None:  # finite: a query that sees nothing has a sum that the sink outweighs
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, torch.finfo(q.dtype).min)
    function: Any = _FusedOnCpu
    y: Tensor = function.apply(q, k, v, sinks_H, bias, is_causal, scale)
    return y


def by_operators(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, is_causal: bool, scale: float,
    cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """The same with all scores in memory, in float32 at least, which torch differentiates as often as asked to.

    `sinks`: of each head, of each head and query, or none. `cap`: scores s are cap tanh(s / cap); 0: as they are.
    """
    (rows, heads, queries, width), (kv_heads, keys) = q.shape, k.shape[1:3]
    wide = accumulator(q.dtype)
    scores = (q.reshape(rows, kv_heads, -1, width) @ k.mT).to(wide) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.view(rows, heads, queries, keys)
    if is_causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)  # -inf would make NaN of padding that sees nothing
    if sinks is not None:
        sink = sinks.to(wide).reshape(heads, -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    weight = torch.softmax(scores, -1)[..., :keys].to(v.dtype).reshape(rows, kv_heads, -1, keys)
    return (weight @ v).view(rows, heads, queries, v.shape[3])


class _FusedOnCpu(torch.autograd.Function):
    """Keeps q, k, v, the mask, the result and the logarithms of its sums."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        y, sums = forward_on_cpu(q, k, v, is_causal, bias, scale)
        total = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
        # Not in its place: recomputation by operators keeps what the kernel gave.
        y = (y * (sums - total).exp_()[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, bias, y, total)
        ctx.options = is_causal, scale
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, bias, y, total = ctx.saved_tensors
        is_causal, scale = ctx.options
        if torch.is_grad_enabled():  # it is recorded itself, and these kernels have no derivative
            mask = None if bias is None else bias == 0
            inputs = q, k, v, sinks = [x.view_as(x) for x in (q, k, v, sinks)]
            again = by_operators(q, k, v, sinks, mask, is_causal, scale)
            return (*torch.autograd.grad(again, inputs, grad, create_graph=True), None, None, None)
        dq, dk, dv = backward_on_cpu(grad, q, k, v, y, total, is_causal, bias, scale)
        weight = (sinks.to(total.dtype)[:, None] - total).exp_()
        dsinks = -(weight * (grad * y).sum(-1, dtype=total.dtype)).sum((0, 2))
        return dq, dk, dv, dsinks.to(sinks.dtype), None, None, None


# torch's kernels of a CPU want keys and values as often as query heads share them, and do not look at the last stride


def forward_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, bias: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The result and the natural logarithms of the sums. `bias`: what is added to scores."""
    group = q.shape[1] // k.shape[1]
    y, sums = _FORWARD(_dense(q), *_for_each(group, k, v), 0.0, is_causal, attn_mask=bias, scale=scale)
    return y, sums


def backward_on_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, is_causal: bool,
    bias: Tensor | None = None, scale: float | None = None,
) -> list[Tensor]:  # fmt: skip
    """Of q, k and v."""
    group = q.shape[1] // k.shape[1]
    dq, *others = _BACKWARD(
        _dense(grad), _dense(q), *_for_each(group, k, v), y, sums, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return [dq, *(x if group == 1 else x.unflatten(1, (-1, group)).sum(2) for x in others)]


def _for_each(group: int, *tensors: Tensor) -> list[Tensor]:
    return [_dense(x) if group == 1 else x.repeat_interleave(group, 1) for x in tensors]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
