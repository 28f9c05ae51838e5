"""The operators of `tm.kernels` as the differential gate calls them: arguments, and what each computes in plain torch.

`plain` is written from the operator's description and shares no line with it. It runs in the tensors' own dtypes and in
float64; where a user of torch would call one function instead (attention), that is `eager`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from differential import ROUNDINGS
from torch import Tensor
from torch.nn import functional

import tilemesh as tm
from tilemesh.kernels.few_linear.reference import few_linear, parts_rms_norm
from tilemesh.kernels.likeliest.reference import likeliest
from tilemesh.kernels.lowbit_linear.reference import norm_lowbit_linear
from tilemesh.kernels.row_linear.reference import norm_row_linear

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Draw:
    """Random tensors of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int) -> None:
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return made.to(dtype or self.dtype).to(self.device)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(dtype).to(self.device)


@dataclass(frozen=True)
class Subject:
    """One operator. moved: places of the tensors that have gradients; values: of those that get special values."""

    run: Callable[..., Any]
    plain: Callable[..., Any]
    make: Callable[[Draw], tuple[Any, ...]]
    moved: Sequence[int] = (0,)
    options: Sequence[Mapping[str, Any]] = ({},)
    dtypes: Sequence[torch.dtype] = FLOATS
    eager: Callable[..., Any] | None = None
    values: Sequence[int] = (0,)
    fixed: Sequence[int] = ()
    """Places of tensors that must be contiguous."""
    signs: bool = False
    """Whether zeros keep their signs."""
    skips: Sequence[str] = ()
    """Kinds of values that say nothing, after a dtype where only there. The mean of a layer norm is a float32: beside
    an offset the rounding of that one number is all the error there is, eager's as ours, and one is no bound of the
    other. Attention's slopes are operands in 16 bits: float16's least number times its largest is 0.004, and beside an
    offset (in float32 of q and k both) no score is left. Codes of 4 bits are multiplied with an offset: of infinities
    that leaves NaN."""
    roundings: int = ROUNDINGS
    """More for attention: the error of a score, a sum of products, is the relative error of its probability. More where
    codes of 4 bits are multiplied with their offset before a gate: what is left of a sum that cancels has the error of
    its terms, 15 times as large, and is multiplied with a gate that may be the row's largest."""
    same: Mapping[str, Any] = field(default_factory=dict)
    """What only ours is told."""


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def act(x: Tensor, name: str) -> Tensor:
    return {
        "none": lambda: x,
        "relu": lambda: x.relu(),
        "gelu": lambda: functional.gelu(x),
        "gelu_tanh": lambda: functional.gelu(x, approximate="tanh"),
        "silu": lambda: functional.silu(x),
        "squared_relu": lambda: x.relu().square(),
    }[name]()


def matmul(a: Tensor, b: Tensor, c: Tensor, activation: str = "relu") -> Tensor:
    return act(functional.linear(a, b.mT, c), activation)


def gate(y: Tensor, name: str) -> Tensor:
    if name == "none":
        return y
    gates, values = y.chunk(2, -1)
    return functional.silu(gates) * values


def root_mean_square(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = wide(x) / (wide(x).square().mean(-1, keepdim=True) + eps).sqrt()
    return (y if weight is None else y * weight).to(x.dtype)


def centred(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(wide(x), x.shape[-1:], wide(weight), wide(bias), eps).to(x.dtype)


def softmax(x: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    x = x * scale
    if causal:
        rows, columns = x.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=x.device).triu(columns - rows + 1)
        x = x.masked_fill(hidden, -torch.inf)
    return torch.softmax(x, -1)


def cross_entropy(
    logits: Tensor, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Of the rows that count: what is ignored has no part in anything, whatever its logits are."""
    counts = (target != -100).flatten()
    rows, targets = wide(logits).flatten(0, -2)[counts], target.flatten().long()[counts]
    losses = functional.cross_entropy(rows, targets, label_smoothing=label_smoothing, reduction="none")
    losses = losses + z_loss * rows.logsumexp(-1).square()
    if reduction == "none":
        return rows.new_zeros(len(counts)).masked_scatter(counts, losses).view(target.shape)
    return losses.sum() if reduction == "sum" else losses.mean()


def torch_cross_entropy(
    logits: Tensor, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean"
) -> Tensor:
    rows, targets = wide(logits).flatten(0, -2), target.flatten().long()
    options = {"label_smoothing": label_smoothing, "reduction": reduction}
    loss = functional.cross_entropy(rows, targets, **options).view(target.shape if reduction == "none" else ())
    if not z_loss:
        return loss
    more = z_loss * rows.logsumexp(-1).square().masked_fill(targets == -100, 0).view(target.shape)
    total = more.sum() / (targets != -100).sum() if reduction == "mean" else more.sum()
    return loss + (more if reduction == "none" else total)


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return cross_entropy(functional.linear(x, weight), target, **options)


def torch_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return torch_cross_entropy(functional.linear(x, weight), target, **options)


def embedding(tokens: Tensor, weight: Tensor, positions: Tensor, start: int = 0) -> Tensor:
    return weight[tokens.long()] + positions[start : start + tokens.shape[-1]]


def mlp(x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, activation: str) -> Tensor:
    return functional.linear(act(functional.linear(x, w_in, b_in), activation), w_out, b_out)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: int = 0, scale: float = 0.0) -> Tensor:
    """Query by query, over the keys that it sees."""
    (queries, keys), group, made = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1], []
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    for at in range(queries):
        place = at + keys - queries
        end = min(place + 1 if causal else place + window if window else keys, keys)
        begin = max(place - window + 1, 0) if window else 0
        scores = wide(q[:, :, at : at + 1]) @ wide(k[:, :, begin:end]).mT * (scale or 1 / math.sqrt(q.shape[-1]))
        made.append(torch.softmax(scores, -1) @ wide(v[:, :, begin:end]))
    return torch.cat(made, 2).to(q.dtype)


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: int = 0, scale: float = 0.0
) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    place, key = torch.arange(keys - queries, keys, device=q.device)[:, None], torch.arange(keys, device=q.device)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        mask &= key <= place
    if window:
        mask &= (key - place).abs() < window
    # Without a mask where nothing is hidden, as one would call it: on some CPUs torch's kernel then makes 0 of a NaN.
    hidden = mask if causal or window else None
    return functional.scaled_dot_product_attention(q, k, v, hidden, scale=scale or None, enable_gqa=True)


def self_attention(qkv: Tensor, heads: int, kv_heads: int, causal: bool = True, window: int = 0) -> Tensor:
    parts = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
    return attention(*parts, causal=causal, window=window).transpose(1, 2).flatten(-2)


def torch_self_attention(qkv: Tensor, heads: int, kv_heads: int, causal: bool = True, window: int = 0) -> Tensor:
    parts = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
    return torch_attention(*parts, causal=causal, window=window).transpose(1, 2).flatten(-2)


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, window: int = 0) -> Tensor:
    y = torch.zeros_like(q)
    for row, first, count, position in tiles.tolist():
        k, v = (pages[tables[row].long()].flatten(0, 1)[: position + count].transpose(0, 1) for pages in (keys, values))
        if count:
            part = attention(
                q[first : first + count].transpose(0, 1)[None], k[None], v[None], causal=True, window=window
            )
            y[first : first + count] = part[0].transpose(0, 1)
    return y


def pages(draw: Draw) -> tuple[Tensor, ...]:
    """Two sequences of 21 and 9 keys, in pages of 4: one prefills three tokens, one decodes."""
    tables = torch.randperm(9, generator=torch.Generator().manual_seed(1)).to(torch.int32).view(1, 9)
    tables = torch.cat((tables[:, :6], torch.cat((tables[:, 6:], tables[:, :3]), 1))).to(draw.device)
    tiles = torch.tensor([[0, 0, 3, 18], [1, 3, 1, 8]], dtype=torch.int32, device=draw.device)
    return draw.normal(4, 4, 16), draw.normal(9, 4, 2, 16), draw.normal(9, 4, 2, 16), tables, tiles


def geglu(gates: Tensor, x: Tensor, approximate: str) -> Tensor:
    """In float32 at least: there torch's gelu of bfloat16's largest number overflows on some CPUs, in bfloat16 not."""
    return (functional.gelu(wide(gates), approximate=approximate) * wide(x)).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = wide(x).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor, **options: str) -> Tensor:
    return gate(functional.linear(x, weight, bias), options.get("gate", "none"))


def norm_linear(x: Tensor, branch: Tensor, scale: Tensor, weight: Tensor, eps: float, **options: str) -> Any:
    """In the dtype of x, also under autocast."""
    total = x + branch
    y = functional.linear(root_mean_square(total, scale, eps), weight).to(x.dtype)
    return gate(y, options.get("gate", "none")), total


def decoded(codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str) -> Tensor:
    if code == "int4":
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - 8
    each = codes.shape[1] // scales.shape[1]
    values = codes.to(scales.dtype) - (0 if zeros is None else zeros.repeat_interleave(each, 1))
    return values * scales.repeat_interleave(each, 1)


def lowbit(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str = "int4", **options: str
) -> Tensor:
    return gate(functional.linear(x, decoded(codes, scales, zeros, code).to(x.dtype)), options.get("gate", "none"))


def norm_lowbit(
    x: Tensor, branch: Tensor, gain: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, eps: float
) -> Any:
    return norm_linear(x, branch, gain, decoded(codes, scales, zeros, "int4").to(x.dtype), eps)


def low_codes(draw: Draw, code: str, with_zeros: bool) -> tuple[Any, ...]:
    codes = (
        draw.whole(0, 256, 12, 32, dtype=torch.uint8)
        if code == "int4"
        else draw.whole(-128, 128, 12, 64, dtype=torch.int8)
    )
    scales = draw.normal(12, 2, dtype=torch.float32).abs() / 8
    return codes, scales, draw.whole(-3, 4, 12, 2, dtype=torch.int8) if with_zeros else None


def scaled_matmul(x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, code: str, dtype: str) -> Tensor:
    left, right = (codes.view(torch.float8_e4m3fn) if code == "fp8" else codes for codes in (x, weight))
    kind = scales.dtype
    made = (left.to(kind) @ right.to(kind).mT) * x_scales * scales.mT
    return made if kind is torch.float64 else made.to(getattr(torch, dtype))


def adamw(p: Tensor, grad: Tensor, first: Tensor, second: Tensor, rate: Any, step: Any, divisor: Any) -> Any:
    rate, step, divisor = (float(value) for value in (rate, step, divisor))
    value, slope = wide(p), wide(grad) / divisor
    first = 0.9 * first + (1 - 0.9) * slope
    second = 0.999 * second + (1 - 0.999) * slope * slope
    value = value - rate * 0.01 * value
    value = value - rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    return value.to(p.dtype), first, second


def our_adamw(p: Tensor, grad: Tensor, first: Tensor, second: Tensor, **options: Any) -> Any:
    p, first, second = (x.detach().clone(memory_format=torch.contiguous_format) for x in (p, first, second))
    tm.kernels.adamw([p], [grad.detach()], [first], [second], **options)
    return p, first, second


def our_norm(*tensors: Tensor, **options: Any) -> Tensor:
    return tm.kernels.global_norm([tensor.detach() for tensor in tensors], **options)


def global_norm(*tensors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(torch.cat([wide(tensor).flatten() for tensor in tensors]))


def place_of_largest(logits: Tensor) -> Tensor:
    return torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1)


def parts_norm(parts: Tensor, x: Tensor, scale: Tensor, eps: float) -> Any:
    total = (wide(x) + wide(parts).sum(0)).to(x.dtype)
    return root_mean_square(total, scale, eps), total


def add_rms(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
    return root_mean_square(residual + x, weight, eps).to(x.dtype), residual + x


def add_layer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    return centred(residual + x, weight, bias, eps).to(x.dtype), residual + x


def few(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(wide(x), wide(weight)).to(x.dtype)[None]


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    begins = [0, *ends.tolist()]
    parts = [
        wide(x[begin:end]) @ wide(matrix).T for begin, end, matrix in zip(begins, begins[1:], weight, strict=False)
    ]
    return torch.cat(parts).to(x.dtype)


def low_groups(draw: Draw) -> tuple[Any, ...]:
    three = [low_codes(draw, "int4", True) for _ in range(3)]
    codes, scales, zeros = (torch.stack(pieces) for pieces in zip(*three, strict=True))
    return draw.normal(7, 64), codes, scales, zeros, torch.tensor([4, 4, 7], dtype=torch.int32)


def grouped_lowbit(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, ends: Tensor) -> Tensor:
    return torch.cat([lowbit(x[:4], codes[0], scales[0], zeros[0]), lowbit(x[4:], codes[2], scales[2], zeros[2])])


def routed(scores: Tensor, experts: Tensor, picked: int, renormalized: bool) -> tuple[Tensor, ...]:
    likely = scores.softmax(-1)
    weights = torch.stack([likely[row, experts[row]] for row in range(len(scores))])
    pairs = sorted((int(expert), at) for at, expert in enumerate(experts.flatten()))
    slots = torch.empty_like(experts).flatten()
    for slot, (_, at) in enumerate(pairs):
        slots[at] = slot
    counts = [sum(expert == number for expert, _ in pairs) for number in range(scores.shape[1])]
    weights = weights / weights.sum(-1, keepdim=True) if renormalized else weights
    return weights, experts, slots.view(experts.shape), torch.tensor(counts, device=scores.device)


def choices(draw: Draw) -> Tensor:
    """Three of eight experts for each of nine tokens."""
    return draw.normal(9, 8, dtype=torch.float64).argsort(-1)[:, :3].contiguous()


def places(draw: Draw) -> Tensor:
    return draw.normal(27, dtype=torch.float64).argsort().view(9, 3)


def permuted(x: Tensor, slots: Tensor) -> Tensor:
    return x.repeat_interleave(slots.shape[1], 0)[slots.flatten().argsort()]


def summed(results: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    parts = [wide(results)[slots[:, at]] * wide(weights)[:, at, None] for at in range(slots.shape[1])]
    return sum(parts[1:], parts[0]).to(results.dtype)


def classes(draw: Draw, *shape: int) -> Tensor:
    target = draw.whole(0, 40, *shape)
    target.view(-1)[1] = -100
    return target


def tables_of(draw: Draw) -> tuple[Tensor, Tensor]:
    angle = draw.normal(4, 6, dtype=torch.promote_types(draw.dtype, torch.float32))
    return angle.cos(), angle.sin()


SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "none"}
STATES = ({"step": 1}, {"step": torch.tensor([1])}, {"step": torch.tensor(7.0), "rate": torch.tensor([25.0])})
ADAMW_OPTIONS = [{"rate": 50.0, "divisor": 2.0, **state} for state in STATES]
ATTENTION_SKIPS = ("float16 largest", "float16 offset", "bfloat16 offset")
HALVES = (torch.float16, torch.bfloat16)
BELOW_DOUBLE = FLOATS[:3]

SUBJECTS: dict[str, Subject] = {
    "fused_matmul": Subject(
        tm.kernels.fused_matmul, matmul, lambda d: (d.normal(2, 9, 24), d.normal(24, 16), d.normal(16)), (0, 1, 2),
        [{"activation": name} for name in ("relu", "gelu")], BELOW_DOUBLE,
    ),
    "scale_shift": Subject(
        tm.kernels.scale_shift, lambda x, s, t, activation: act(x * s + t, activation),
        lambda d: (d.normal(3, 5, 24), d.normal(24), d.normal(24)), (0, 1, 2),
        [{"activation": name} for name in ("none", "silu", "gelu_tanh")],
    ),
    "softmax": Subject(
        tm.kernels.softmax, softmax, lambda d: (d.normal(2, 6, 24),), (0,),
        [{}, {"scale": 0.5, "causal": True}, {"scale": -2.0}],
    ),
    "rms_norm": Subject(
        tm.kernels.rms_norm, root_mean_square, lambda d: (d.normal(3, 7, 40), d.normal(40)), (0, 1), [{"eps": 1e-6}]
    ),
    "layer_norm": Subject(
        tm.kernels.layer_norm, centred, lambda d: (d.normal(3, 7, 40), d.normal(40), d.normal(40)), (0, 1, 2),
        [{"eps": 1e-5}], skips=("offset",),
    ),
    "add_rms_norm": Subject(
        tm.kernels.add_rms_norm, add_rms, lambda d: (d.normal(21, 40), d.normal(21, 40), d.normal(40)), (0, 1, 2),
        [{"eps": 1e-6}],
    ),
    "add_layer_norm": Subject(
        tm.kernels.add_layer_norm, add_layer,
        lambda d: (d.normal(21, 40), d.normal(21, 40), d.normal(40), d.normal(40)), (0, 1, 2, 3), [{"eps": 1e-5}],
        skips=("offset",),
    ),
    "cross_entropy": Subject(
        tm.kernels.cross_entropy, cross_entropy, lambda d: (d.normal(2, 3, 40), classes(d, 2, 3)), (0,),
        [{}, {"reduction": "sum", "z_loss": 0.01}, SMOOTHED, {"label_smoothing": 0.1}], eager=torch_cross_entropy,
    ),
    "linear_cross_entropy": Subject(
        tm.kernels.linear_cross_entropy, linear_cross_entropy,
        lambda d: (d.normal(2, 3, 16).round(), d.normal(40, 16).round(), classes(d, 2, 3)), (0, 1),
        [{}, {"label_smoothing": 0.1}], eager=torch_linear_cross_entropy,
        values=(1,),  # which gives all logits of a row the same offset, exactly
    ),
    "embedding": Subject(
        tm.kernels.embedding, embedding, lambda d: (d.whole(0, 11, 3, 5), d.normal(11, 24), d.normal(8, 24)), (1, 2),
        [{}, {"start": 2}], values=(1,),
    ),
    "mlp": Subject(
        tm.kernels.mlp, mlp,
        lambda d: (d.normal(2, 5, 16), d.normal(24, 16) / 4, d.normal(24), d.normal(16, 24) / 5, d.normal(16)),
        (0, 1, 2, 3, 4), [{"activation": "gelu_tanh"}, {"activation": "squared_relu"}],
    ),
    "attention": Subject(
        tm.kernels.attention, attention,
        lambda d: (d.normal(2, 4, 7, 16), d.normal(2, 2, 9, 16), d.normal(2, 2, 9, 16)), (0, 1, 2),
        [{}, {"causal": True}, {"causal": True, "window": 3, "scale": -0.5}], eager=torch_attention,
        skips=ATTENTION_SKIPS, roundings=512,
    ),
    "self_attention": Subject(
        tm.kernels.self_attention, self_attention, lambda d: (d.normal(2, 7, 8 * 16),), (0,),
        [{"heads": 4, "kv_heads": 2}], eager=torch_self_attention, skips=("offset", "float16 largest"),
        roundings=512,
    ),
    "paged_attention": Subject(
        tm.kernels.paged_attention, paged_attention, pages, (), [{}, {"window": 5}], fixed=(1, 2, 3, 4), roundings=512,
        same={"tile": 3, "longest": 21},
    ),
    "rotary": Subject(tm.kernels.rotary, rotary, lambda d: (d.normal(2, 3, 4, 12), *tables_of(d)), (0, 1, 2)),
    "row_linear": Subject(
        tm.kernels.row_linear, linear, lambda d: (d.normal(1, 48), d.normal(24, 48), d.normal(24)), (0, 1, 2),
        [{}, {"gate": "silu"}],
    ),
    "norm_row_linear": Subject(
        norm_row_linear, norm_linear, lambda d: (d.normal(1, 48), d.normal(1, 48), d.normal(48), d.normal(24, 48)),
        (0, 1, 2, 3), [{"eps": 1e-6}],
    ),
    "few_linear": Subject(few_linear, few, lambda d: (d.normal(3, 128), d.normal(64, 128)), (0, 1), dtypes=HALVES),
    "grouped_linear": Subject(
        tm.kernels.grouped_linear, grouped,
        lambda d: (d.normal(21, 40), d.normal(5, 24, 40), torch.tensor([3, 3, 20, 20, 21], dtype=torch.int32)), (0, 1),
        dtypes=HALVES, fixed=(2,),
    ),
    "grouped_lowbit_linear": Subject(
        tm.kernels.grouped_lowbit_linear, grouped_lowbit, low_groups, (0,), [{}], HALVES,
        skips=("inf", "-inf", "bfloat16 largest"),
        fixed=(4,), roundings=512,
    ),
    "route_tokens": Subject(
        tm.kernels.route_tokens, routed, lambda d: (d.normal(9, 8), choices(d)), (0,),
        [{"picked": 3, "renormalized": flag} for flag in (True, False)], fixed=(1,),
    ),
    "permute_rows": Subject(
        tm.kernels.permute_rows, permuted, lambda d: (d.normal(9, 24), places(d)), (0,), fixed=(1,), signs=True
    ),
    "unpermute_rows": Subject(
        tm.kernels.unpermute_rows, summed,
        lambda d: (d.normal(27, 24), d.normal(9, 3, dtype=torch.promote_types(d.dtype, torch.float32)), places(d)),
        (0,), fixed=(2,), eager=lambda y, w, slots: (y[slots] * w.to(y.dtype)[..., None]).sum(1),
    ),
    "parts_rms_norm": Subject(
        parts_rms_norm, parts_norm,
        lambda d: (wide(d.normal(3, 4, 24)), d.normal(4, 24), d.normal(24)), (0, 1, 2), [{"eps": 1e-6}],
    ),
    "lowbit_linear": Subject(
        tm.kernels.lowbit_linear, lowbit, lambda d: (d.normal(3, 64), *low_codes(d, "int4", True)), (0,),
        [{}, {"gate": "silu"}], BELOW_DOUBLE, skips=("inf", "-inf"), roundings=512,
    ),
    "lowbit_linear of bytes": Subject(
        tm.kernels.lowbit_linear, lowbit, lambda d: (d.normal(1, 64), *low_codes(d, "int8", False)), (0,),
        [{"code": "int8"}], BELOW_DOUBLE,
    ),
    "norm_lowbit_linear": Subject(
        norm_lowbit_linear, norm_lowbit,
        lambda d: (d.normal(1, 64), d.normal(1, 64), d.normal(64), *low_codes(d, "int4", False)), (0, 1, 2),
        [{"eps": 1e-6}], BELOW_DOUBLE, skips=("inf", "-inf"),
    ),
    "scaled_matmul": Subject(
        tm.kernels.scaled_matmul, scaled_matmul,
        lambda d: (d.whole(-127, 128, 5, 32, dtype=torch.int8), d.whole(-127, 128, 12, 32, dtype=torch.int8),
                   d.normal(5, 1).abs(), d.normal(12, 1).abs()),
        (), [{"code": "int8", "dtype": name} for name in ("bfloat16", "float32")], (torch.float32,), values=(2,),
    ),
    "scaled_matmul of floats": Subject(
        tm.kernels.scaled_matmul, scaled_matmul,
        lambda d: (d.whole(0, 0x7E, 1, 32, dtype=torch.uint8), d.whole(0, 0x7E, 12, 32, dtype=torch.uint8),
                   d.normal(1, 1).abs(), d.normal(12, 1).abs()),
        (), [{"code": "fp8", "dtype": "float16"}], (torch.float32,), values=(2,),
    ),
    "swiglu": Subject(
        tm.kernels.swiglu, lambda g, x: functional.silu(g) * x, lambda d: (d.normal(3, 5, 24), d.normal(3, 5, 24)),
        (0, 1),
    ),
    "geglu": Subject(
        tm.kernels.geglu, geglu,
        lambda d: (d.normal(3, 5, 24), d.normal(3, 5, 24)), (0, 1), [{"approximate": "tanh"}, {"approximate": "none"}],
    ),
    "adamw": Subject(
        our_adamw, adamw,
        lambda d: (d.normal(5, 24), d.normal(5, 24), wide(d.normal(5, 24)), wide(d.normal(5, 24)).square()), (),
        ADAMW_OPTIONS, values=(1,),
    ),
    "global_norm": Subject(our_norm, global_norm, lambda d: (d.normal(5, 24), d.normal(7)), ()),
    "likeliest": Subject(likeliest, place_of_largest, lambda d: (d.normal(6, 40),), ()),
}  # fmt: skip
