"""Attention over blocks of keys, put together: that of all keys at once, by torch and by the kernels."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch.nn import functional

from tilemesh.kernels.attention.blocks import SeenKeys, attend_block, attend_block_back

B, H, K, E = 2, 4, 2, 8


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bounds(low_BT, high_BT, keys):
    """With, for each key, the queries that see it."""
    sees = (torch.arange(keys) >= low_BT[..., None]) & (torch.arange(keys) < high_BT[..., None])
    queries = low_BT.shape[1]
    last = torch.where(sees.any(1), queries - sees.flip(1).int().argmax(1), 0).cummax(1).values
    first = torch.where(sees.any(1), sees.int().argmax(1), last)  # of a key that nobody sees, none
    return SeenKeys(low_BT, high_BT, first, last), sees


@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        *((how, kind) for how in ("torch", "by operations") for kind in ("full", "causal", "bounds")),
        ("interpret", "bounds"),
        pytest.param("interpret", "causal", marks=pytest.mark.slow),
    ],
)
def test_a_block_and_the_rest_make_up_all(implementation, kind, monkeypatch):
    """Queries over a first block as the kind says and over a second in full, beside attention under one mask."""
    if implementation == "by operations":  # as on a GPU in float64
        implementation = "torch"
        monkeypatch.setattr(sys.modules[attend_block.__module__], "_is_fused", lambda q: False)
    if implementation == "interpret":
        pytest.importorskip("triton")
    tokens = others = 21
    q, k, v, grad = (normal(B, heads, 2 * tokens if heads == K else tokens, E, seed=seed) for seed, heads in
                     ((1, H), (2, K), (3, K), (4, H)))  # fmt: skip
    low_BT = torch.stack([(torch.arange(tokens) - 3).clamp(0, others), torch.full((tokens,), 5)])
    high_BT = torch.stack([torch.arange(tokens) + 1, (torch.arange(tokens) - 2).clamp(5, others)])
    seen, sees = bounds(low_BT, high_BT, others)
    assert (high_BT == low_BT).any(), "some queries see nothing of the first block"
    options = {"full": {}, "causal": {"causal": True}, "bounds": {"seen": seen}}[kind]
    first = {"full": torch.ones(tokens, others, dtype=bool), "causal": torch.ones(tokens, others, dtype=bool).tril()}
    mask = torch.cat([first.get(kind, sees).expand(B, -1, -1), torch.ones(B, tokens, others, dtype=bool)], dim=-1)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = functional.scaled_dot_product_attention(*leaves, attn_mask=mask[:, None], enable_gqa=True)
    wanted.backward(grad)

    blocks = [(k[:, :, :others], v[:, :, :others], options), (k[:, :, others:], v[:, :, others:], {})]
    parts = [attend_block(q, *block, **how, implementation=implementation) for *block, how in blocks]
    if kind == "bounds":
        assert torch.equal(parts[0][1] == -math.inf, (high_BT <= low_BT)[:, None].expand(B, H, tokens))
    sums = torch.logaddexp(parts[0][1], parts[1][1])
    y = sum(part * (part_sums - sums).exp()[..., None] for part, part_sums in parts)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-13)
    made = [attend_block_back(grad, q, *block, y, sums, **how, implementation=implementation) for *block, how in blocks]
    torch.testing.assert_close(made[0].q + made[1].q, leaves[0].grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.cat([part.k for part in made], 2), leaves[1].grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.cat([part.v for part in made], 2), leaves[2].grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_fused", [True, False])
def test_many_queries_are_taken_a_few_at_a_time(monkeypatch, is_fused):
    q, k, v = normal(1, 2, 37, E), normal(1, 2, 37, E, seed=1), normal(1, 2, 37, E, seed=2)
    module, high_BT = sys.modules[attend_block.__module__], torch.arange(1, 38)[None]
    monkeypatch.setattr(module, "_is_fused", lambda q: is_fused)
    seen, _ = bounds(torch.zeros_like(high_BT), high_BT, 37)
    results = []
    for scores in (1 << 20, 2 * 37 * 5):
        monkeypatch.setattr(module, "_SCORES", scores)
        y, sums = attend_block(q, k, v, seen=seen)
        results.append((y, sums, *attend_block_back(v, q, k, v, y, sums, seen=seen)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    assert attend_block(q.bfloat16(), k.bfloat16(), v.bfloat16())[0].dtype == torch.float32, "sums are wide"


def test_a_cap_on_scores_holds_where_torch_has_a_kernel_without_one():
    """Beside scores, cap, softmax and values written out, with autograd."""
    leaves = [normal(B, heads, 9, E, seed=heads).requires_grad_() for heads in (H, K, K)]
    q, k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in leaves)
    scores = 0.7 * torch.tanh(q @ k.mT / math.sqrt(E) / 0.7)
    wanted = scores.masked_fill(~torch.ones(9, 9, dtype=bool).tril(), -math.inf).softmax(-1) @ v
    grad = normal(B, H, 9, E, seed=5)
    wanted.backward(grad)
    tensors = [x.detach() for x in leaves]
    y, sums = attend_block(*tensors, causal=True, cap=0.7)
    torch.testing.assert_close(y, wanted.detach(), rtol=0, atol=1e-13)
    for made, leaf in zip(attend_block_back(grad, *tensors, y, sums, causal=True, cap=0.7), leaves, strict=True):
        torch.testing.assert_close(made, leaf.grad, rtol=0, atol=1e-12)
