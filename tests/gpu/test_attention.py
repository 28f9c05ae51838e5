"""Attention on a GPU: the compiled kernels against float64, gradients, repeatability, and through torch.compile."""

from __future__ import annotations

import pytest
import torch

import tilemesh as tm
from tilemesh.kernels.accuracy import excess, norm_error
from tilemesh.kernels.attention import reference
from tilemesh.kernels.attention.blocks import SeenKeys, attend_block, attend_block_back
from tilemesh.kernels.attention.joined import parts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

attention = tm.kernels.attention
PACKED = torch.tensor([0, 5, 5, 200, 333, 700], dtype=torch.int32)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 100},
    "both sides": {"window": 70},
    "packed": {"causal": True, "starts": PACKED},
    "packed, full": {"starts": PACKED},
    "packed window": {"window": 64, "causal": True, "starts": PACKED},
}


def heads(batch, count, tokens, width, *, dtype=torch.bfloat16, seed=0, turned=True):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, tokens, count, width) if turned else (batch, count, tokens, width)
    made = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    return made.transpose(1, 2) if turned else made


def on_gpu(options):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def gradients(given, upstream, options, implementation):
    inputs = [tensor.detach().requires_grad_() for tensor in given]
    y = attention(*inputs, **options, implementation=implementation)
    return torch.autograd.grad(y, inputs, upstream)


def distance(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16)])
def test_forward_and_backward(mask, width, dtype):
    options = on_gpu(MASKS[mask])
    q, k, v = (heads(1, count, 700, width, seed=seed, dtype=dtype) for seed, count in enumerate((4, 2, 2)))
    upstream = heads(1, 4, 700, width, seed=4, dtype=dtype)
    y = attention(q, k, v, **options, implementation="triton")
    assert excess(y, reference.exact(q, k, v, **options), reference.error_bound(q, k, v, **options)) is None
    mine, again, torchs = (gradients((q, k, v), upstream, options, how) for how in ("triton", "triton", "torch"))
    inputs = [tensor.double().detach().requires_grad_() for tensor in (q, k, v)]
    exact = torch.autograd.grad(reference.exact(*inputs, **options), inputs, upstream.double())
    for found, repeated, theirs, true in zip(mine, again, torchs, exact, strict=True):
        assert torch.equal(found, repeated)
        assert distance(found, true) <= 2 * distance(theirs, true) + torch.finfo(dtype).eps


@pytest.mark.parametrize("mask", ["causal", "window", "packed"])
@pytest.mark.parametrize("width", [64, 128])
def test_sinks_on_hopper_and_elsewhere(mask, width):
    """Of each head a score more: the result, and all four gradients; `auto` takes the kernels."""
    options = on_gpu(MASKS[mask])
    starts = options.pop("starts", None)
    q, k, v = (heads(1, count, 700, width, seed=seed) for seed, count in enumerate((8, 2, 2)))
    sinks, upstream = 2 * torch.randn(8, device="cuda"), heads(1, 8, 700, width, seed=4)
    found = [tensor.detach().requires_grad_() for tensor in (q, k, v, sinks)]
    true = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, sinks)]
    y, exact = (
        attention(*found[:3], starts, found[3], **options),
        reference.exact(*true[:3], starts, true[3], **options),
    )
    assert excess(y, exact, reference.error_bound(q, k, v, starts, sinks, **options)) is None
    made = torch.autograd.grad(y, found, upstream)
    assert made[3].dtype is torch.float32
    for mine, wanted in zip(made, torch.autograd.grad(exact, true, upstream.double()), strict=True):
        assert distance(mine, wanted) < 2 * torch.finfo(q.dtype).eps  # the result and the probabilities are rounded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "width"),
    [(1, 1, 1, 1), (2, 17, 33, 40), (1, 130, 257, 64), (3, 129, 129, 128), (1, 100, 300, 200), (1, 1, 500, 128)],
)
def test_any_size(batch, queries, keys, width, dtype):
    """Each mask is three kernels of its own, and a dtype another three: all masks in one dtype, one in each other."""
    masks = {torch.float16: ({"causal": True, "scale": -0.3},), torch.float32: ({"window": 20},)}
    q = heads(batch, 2, queries, width, dtype=dtype, turned=False)
    k, v = (heads(batch, 1, keys, width, seed=seed, dtype=dtype, turned=False) for seed in (1, 2))
    for options in masks.get(dtype, ({}, {"causal": True}, {"window": 20}, {"causal": True, "scale": -0.3})):
        y = attention(q, k, v, **options, implementation="triton")
        assert excess(y, reference.exact(q, k, v, **options), reference.error_bound(q, k, v, **options)) is None
        upstream = torch.randn_like(y)
        mine, torchs = (gradients((q, k, v), upstream, options, how) for how in ("triton", "torch"))
        inputs = [tensor.double().detach().requires_grad_() for tensor in (q, k, v)]
        exact = torch.autograd.grad(reference.exact(*inputs, **options), inputs, upstream.double())
        # A gradient that is small, as that of one key alone, has the rounding error of its large terms.
        floor = 4 * torch.finfo(dtype).eps * max(upstream.double().norm().item(), *(x.norm().item() for x in exact))
        for found, theirs, true in zip(mine, torchs, exact, strict=True):
            error, torchs_error = ((x.double() - true).norm() for x in (found, theirs))
            allowed = 2 * torchs_error.nan_to_num(0.0) + floor  # where torch's kernel gives up, ours need not
            assert bool(error <= allowed), (options, error, torchs_error, floor)


def test_strides_that_no_descriptor_takes():
    wide = torch.randn(1, 2, 300, 256, device="cuda", dtype=torch.bfloat16)
    q, k, v = wide[..., ::2], wide[..., 1::2], wide[..., 3:131]
    y = attention(q, k, v, causal=True, implementation="triton")
    exact, bound = reference.exact(q, k, v, causal=True), reference.error_bound(q, k, v, causal=True)
    assert excess(y, exact, bound) is None


def test_starts_out_of_order_damage_nothing():
    q = heads(1, 2, 300, 64)
    around = torch.full((2, 300), 7, device="cuda", dtype=torch.int32)
    for starts in ([0, 10_000, -5, 300], [50, 20, 10, 0], [0, 0, 0, 0], [-(2**30), 2**30]):
        y = attention(q, q, q, torch.tensor(starts, device="cuda"), causal=True, implementation="triton")
        assert bool(y.isfinite().all())
    assert bool((around == 7).all())


def test_compiled_and_autocast():
    q, k, v = (heads(1, 2, 256, 64, seed=seed, dtype=torch.float32).requires_grad_() for seed in range(3))

    def function(q, k, v):
        with torch.autocast("cuda", torch.bfloat16):
            return attention(q, k, v, causal=True, window=50).float().square().sum()

    function(q, k, v).backward()
    eager = [tensor.grad.clone() for tensor in (q, k, v)]
    for tensor in (q, k, v):
        tensor.grad = None
    torch.compile(function, fullgraph=True)(q, k, v).backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    exact = torch.autograd.grad(reference.exact(*wide, causal=True, window=50).square().sum(), wide)
    for tensor, before, true in zip((q, k, v), eager, exact, strict=True):
        # The same kernels: inputs, result and its gradient are rounded to bfloat16, whoever does it.
        assert distance(tensor.grad, true) <= 2 * distance(before, true) + norm_error(4, torch.bfloat16)


@pytest.mark.parametrize(("count", "kv_count", "width"), [(4, 4, 64), (4, 2, 64), (2, 2, 128)])
def test_joined_projections(count, kv_count, width):
    """One gradient for queries, keys and values; heads of 64 go forward by cuDNN and back by ours."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, 700, (count + 2 * kv_count) * width)
    qkv = torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_()
    upstream = torch.randn(2, 700, count * width, generator=generator, device="cuda").bfloat16()
    given = parts(qkv.detach(), count, kv_count)
    made = []
    for implementation in ("triton", "triton", "torch"):
        y = tm.kernels.self_attention(qkv, heads=count, kv_heads=kv_count, implementation=implementation)
        bound = reference.error_bound(*given, causal=True)
        found = y.detach().unflatten(-1, (count, width)).transpose(1, 2)
        assert y.is_contiguous()
        assert excess(found, reference.exact(*given, causal=True), bound) is None
        made.append(torch.autograd.grad(y, qkv, upstream)[0])
    wide = qkv.detach().double().requires_grad_()
    y = reference.exact(*parts(wide, count, kv_count), causal=True).transpose(1, 2).flatten(-2)
    (true,) = torch.autograd.grad(y, wide, upstream.double())
    assert torch.equal(made[0], made[1])
    assert distance(made[0], true) <= 2 * distance(made[2], true) + torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("kind", ["causal", "full", "bounds"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_make_up_attention_and_its_gradients(kind, dtype):
    """A block of keys as the kind says and another in full, beside float64: each part is rounded on its own."""
    tokens, keys = (300, 300) if kind == "causal" else (300, 420)
    q, grad = heads(2, 8, tokens, 64, dtype=dtype), heads(2, 8, tokens, 64, dtype=dtype, seed=1)
    k, v = (heads(2, 2, 2 * keys, 64, dtype=dtype, seed=seed) for seed in (2, 3))
    query, key = torch.arange(tokens, device="cuda"), torch.arange(keys, device="cuda")
    low = torch.stack([(query - 40).clamp(0, keys), (query + 150).clamp(0, keys)])  # the second row: some see nothing
    high = (query + 121).clamp(0, keys).expand(2, -1).maximum(low)
    sees = (key >= low[..., None]) & (key < high[..., None])
    last = torch.where(sees.any(1), tokens - sees.flip(1).int().argmax(1), 0).cummax(1).values
    first = torch.where(sees.any(1), sees.int().argmax(1), last)
    options = {"full": {}, "causal": {"causal": True}, "bounds": {"seen": SeenKeys(low, high, first, last)}}[kind]
    shapes = {"full": torch.ones_like(sees), "causal": (key <= query[:, None]).expand(2, -1, -1), "bounds": sees}
    mask = torch.cat([shapes[kind], torch.ones_like(shapes[kind])], dim=-1)[:, None]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True)
    wanted.backward(grad.double())
    blocks = [(k[:, :, :keys], v[:, :, :keys], options), (k[:, :, keys:], v[:, :, keys:], {})]
    made = [attend_block(q, *block, **how) for *block, how in blocks]
    sums = torch.logaddexp(made[0][1], made[1][1])
    y = sum(part * (part_sums - sums).exp()[..., None] for part, part_sums in made)
    back = [attend_block_back(grad, q, *block, y.to(dtype), sums, **how) for *block, how in blocks]
    found = [y, back[0].q + back[1].q, *(torch.cat(both, 2) for both in zip(*(part[1:] for part in back), strict=True))]
    bound = 0.02 if dtype == torch.bfloat16 else 1e-4
    for value, right in zip(found, [wanted, *(x.grad for x in exact)], strict=True):
        assert torch.linalg.vector_norm(value.double() - right) <= bound * torch.linalg.vector_norm(right)
