"""The embedding on a GPU: the compiled kernels against float64, and a gradient that repeats bit for bit."""

from __future__ import annotations

import pytest
import torch

import tilemesh as tm
from tilemesh.kernels.accuracy import accumulator, excess, rounding_error, sum_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

kernels = tm.kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "context", "width", "vocabulary"),
    [(1, 1, 1, 1), (3, 70, 37, 9), (8, 1024, 768, 50304), (4, 512, 4096, 300)],
)
def test_forward_and_gradients(rows, context, width, vocabulary, dtype):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64).to(dtype)

    drawn = torch.rand(rows, context, generator=generator, device="cuda") ** 6
    tokens = (vocabulary * drawn).long().clamp(max=vocabulary - 1)
    weight, positions = normal(vocabulary, width).requires_grad_(), normal(context + 3, width).requires_grad_()
    upstream = normal(rows, context, width)
    y = kernels.embedding(tokens, weight, positions, start=2, implementation="triton")
    wide = [leaf.detach().double().requires_grad_() for leaf in (weight, positions)]
    exact = kernels.embedding(tokens, *wide, start=2, implementation="torch")
    assert excess(y, exact.detach(), 2 * rounding_error(exact.detach(), dtype)) is None
    found = torch.autograd.grad(y, (weight, positions), upstream, retain_graph=True)
    again = torch.autograd.grad(y, (weight, positions), upstream)
    wanted = torch.autograd.grad(exact, wide, upstream.double(), retain_graph=True)
    sizes = torch.autograd.grad(exact, wide, upstream.double().abs())
    for mine, same, true, size in zip(found, again, wanted, sizes, strict=True):
        assert torch.equal(mine, same)
        allowed = sum_error(size, tokens.numel(), accumulator(dtype)) + rounding_error(true, dtype)
        assert excess(mine, true, 1.01 * allowed) is None


def test_a_token_outside_of_the_table_is_nan_and_harmless():
    weight = torch.randn(5, 64, device="cuda", requires_grad=True)
    tokens = torch.tensor([0, 5, -1, 1 << 40, 4], device="cuda")
    y = kernels.embedding(tokens, weight)
    assert y.isnan().all(1).tolist() == [False, True, True, True, False]
    (found,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert found.sum(1).tolist() == [64, 0, 0, 0, 64]


def test_a_captured_step():
    weight = torch.randn(50, 64, device="cuda", requires_grad=True)
    tokens = torch.randint(50, (4, 32), device="cuda")

    def step():
        return torch.autograd.grad(kernels.embedding(tokens, weight).square().sum(), weight)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    tokens.copy_(torch.randint(50, (4, 32), device="cuda"))
    graph.replay()
    assert torch.equal(held, step())
