"""Rotary embedding and gated activations on a GPU: the compiled kernels against float64, and gradients."""

from __future__ import annotations

import pytest
import torch

import tilemesh as tm
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.gated import reference as gates
from tilemesh.kernels.rotary import reference as rotaries

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
kernels = tm.kernels


def normal(*shape, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_(grad)


def tables(*shape):
    angle = normal(*shape, seed=7) * 3
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (2, 33, 5, 6), (2, 300, 12, 64), (2, 300, 9, 128), (1, 7, 3, 514)])
def test_rotary_forward_and_back(sizes, dtype):
    batch, tokens, heads, width = sizes
    by_token = normal(batch, tokens, heads, width, dtype=dtype)
    by_head = by_token.transpose(1, 2)
    for x, shape in (
        (by_head, (tokens, width // 2)),
        (by_head.contiguous(), (tokens, width // 2)),
        (by_token, (batch, tokens, 1, width // 2)),
        (by_token, (batch, tokens, heads, width // 2)),
    ):
        cos, sin = tables(*shape)
        y = kernels.rotary(x, cos, sin, implementation="triton")
        assert excess(y, rotaries.exact(x, cos, sin), rotaries.error_bound(x, cos, sin)) is None
        x = x.detach().requires_grad_()
        (back,) = torch.autograd.grad(kernels.rotary(x, cos, sin), x, y)
        assert excess(back, rotaries.exact(y, cos, -sin), rotaries.error_bound(y, cos, -sin)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (300, 1000), (64, 5632)])
def test_gates(shape, dtype):
    for halves in (False, True):
        if halves:
            gate, x = normal(shape[0], 2 * shape[1], dtype=dtype).chunk(2, -1)
        else:
            gate, x = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
        for activation, y in (
            ("silu", kernels.swiglu(gate, x, implementation="triton")),
            ("gelu_tanh", kernels.geglu(gate, x, implementation="triton")),
            ("gelu", kernels.geglu(gate, x, approximate="none", implementation="triton")),
        ):
            assert excess(y, gates.exact(gate, x, activation), gates.error_bound(gate, x, activation)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), [("swiglu", {}), ("geglu", {}), ("geglu", {"approximate": "none"})])
def test_gradients_are_as_near_as_torchs(name, options, dtype):
    function = getattr(kernels, name)
    given = [normal(300, 1000, dtype=dtype, seed=seed, grad=True) for seed in (0, 1)]
    upstream = normal(300, 1000, dtype=dtype, seed=2)

    def gradients(tensors, implementation):
        made = function(*tensors, implementation=implementation, **options)
        return torch.autograd.grad(made, tensors, upstream.to(made.dtype))

    mine, torchs = (gradients(given, how) for how in ("triton", "torch"))
    exact = gradients([tensor.detach().double().requires_grad_() for tensor in given], "torch")
    for found, theirs, true in zip(mine, torchs, exact, strict=True):
        scale = true.norm()
        allowed = 2 * (theirs.double() - true).norm() / scale + 2 * torch.finfo(dtype).eps
        assert (found.double() - true).norm() / scale <= allowed
