"""self_attention: the kernels on joined tensors, by the interpreter; as torch sees it; in the Transformer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.library import opcheck

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.attention import reference
from tilemesh.kernels.attention.joined import parts
from tilemesh.model.config import ModelConfig
from tilemesh.model.kernels import PLAIN
from tilemesh.model.loss import loss_sum
from tilemesh.model.programs.joined import JOINED
from tilemesh.model.programs.prepare import prepare
from tilemesh.model.programs.program import Use
from tilemesh.model.transformer import Transformer

pytest.importorskip("triton")

self_attention = tm.kernels.self_attention


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "dtype"), [(2, 2, 0, torch.bfloat16), (4, 1, 7, torch.float32)]
)
def test_forward_is_within_its_bound(heads, kv_heads, window, dtype):
    qkv = normal(1, 37, (heads + 2 * kv_heads) * 16, dtype=dtype)
    y = self_attention(qkv, heads=heads, kv_heads=kv_heads, window=window, implementation="interpret")
    assert y.shape == (1, 37, heads * 16)
    assert y.is_contiguous()
    found = y.unflatten(-1, (heads, 16)).transpose(1, 2)
    given, options = parts(qkv, heads, kv_heads), {"causal": True, "window": window}
    assert excess(found, reference.exact(*given, **options), reference.error_bound(*given, **options)) is None


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1)])
def test_one_gradient_for_all_three(heads, kv_heads):
    qkv = normal(1, 21, (heads + 2 * kv_heads) * 8).requires_grad_()
    upstream = normal(1, 21, heads * 8, seed=1)
    made = [
        torch.autograd.grad(self_attention(qkv, heads=heads, kv_heads=kv_heads, implementation=how), qkv, upstream)[0]
        for how in ("interpret", "torch")
    ]
    torch.testing.assert_close(*made, rtol=1e-9, atol=1e-11)


def test_torch_library():
    opcheck(torch.ops.tilemesh.self_attention, (normal(1, 3, 4 * 2).requires_grad_(), 2, 1, True, 0, "interpret"))


def test_what_does_not_fit_is_refused():
    for shape, heads, kv_heads in (((4, 12), 2, 1), ((1, 4, 13), 2, 1), ((1, 4, 20), 3, 2)):
        with pytest.raises(UsageError, match="expected"):
            self_attention(torch.zeros(shape), heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(("positions", "joined"), [("learned", True), ("learned", False), ("rotary", False)])
def test_a_transformer_computes_the_same(positions, joined):
    """The model's own attention by interpreted kernels, and the program that gives them one product."""
    config = ModelConfig(
        layers=1, width=24, heads=3, kv_heads=1, context=19, vocabulary=40, positions=positions, dropout=0.0
    )
    tokens = torch.randint(40, (2, 19), generator=torch.Generator().manual_seed(0))
    found = []
    for how in ("interpret", "torch"):
        model = Transformer(config, dtype=torch.float64, kernels=dataclasses.replace(PLAIN, attention=how))
        programs = prepare(model, Use(trains=True, compiled=joined, casts=True))
        assert (programs.choices["more"][0].programs[0] is JOINED) == joined
        loss, _ = loss_sum(programs(tokens), tokens)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def test_compiled_a_rotary_table_is_one_operator(recording):
    """Else the compiler computes its powers and cosines anew for every element of every head."""
    config = ModelConfig(layers=2, width=16, heads=2, context=9, vocabulary=11, positions="rotary", dropout=0.0)
    model = Transformer(config, dtype=torch.float64, kernels=PLAIN)
    tokens = torch.arange(9)[None]
    backend, recorded = recording
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=backend)(tokens), model(tokens))
    assert recorded.count("tilemesh.cosines_and_sines.default") == 1
    assert not any("aten.cos" in name for name in recorded)
