"""Operators made by `@operator` on a GPU: the compiled kernels against float64, gradients, compilation."""

from __future__ import annotations

import pytest
import torch

import tilemesh as tm
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.scale_shift import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

scale_shift = tm.kernels.scale_shift


def inputs(*shape, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (shape, shape[-1:], shape[-1:])
    return [torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_is_within_its_bound(activation, dtype):
    for shape in ((1,), (7, 5), (3, 130, 1000), (2048, 4096)):
        given = inputs(*shape, dtype=dtype)
        y = scale_shift(*given, activation=activation, implementation="triton")
        wrong = excess(y, reference.exact(*given, activation), reference.error_bound(*given, activation))
        assert wrong is None, f"{shape}: {wrong}"
    x, scale, shift = inputs(130, 257, dtype=dtype)
    for view in (x.t().contiguous().t(), x[:, 1:], x[::2]):
        given = (view, scale[-view.shape[1] :], shift[-view.shape[1] :])
        y = scale_shift(*given, activation=activation)
        assert excess(y, reference.exact(*given, activation), reference.error_bound(*given, activation)) is None


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_gradients(activation):
    given = [tensor.requires_grad_() for tensor in inputs(6, 70, dtype=torch.float64)]
    torch.autograd.gradcheck(lambda *t: scale_shift(*t, activation=activation, implementation="triton"), given)
    many = [tensor.requires_grad_() for tensor in inputs(3000, 513)]
    found = []
    for implementation in ("triton", "triton", "torch"):
        y = scale_shift(*many, activation=activation, implementation=implementation)
        found.append(torch.autograd.grad(y.square().mean(), many))
    assert all(torch.equal(first, again) for first, again in zip(found[0], found[1], strict=True))
    for mine, torchs in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-6)


def test_compile_and_graph_capture(recording):
    call = torch.compile(lambda *t: scale_shift(*t, activation="gelu") * 2, fullgraph=True)
    ours, plain = ([tensor.requires_grad_() for tensor in inputs(64, 100)] for _ in range(2))
    call(*ours).sum().backward()
    (scale_shift(*plain, activation="gelu", implementation="torch") * 2).sum().backward()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    given = inputs(64, 100)
    want = scale_shift(*given)
    backend, recorded = recording
    torch.testing.assert_close(torch.compile(lambda *t: scale_shift(*t), fullgraph=True, backend=backend)(*given), want)
    assert "tilemesh.scale_shift.default" in recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = scale_shift(*given)
    found.fill_(float("nan"))
    graph.replay()
    assert torch.equal(found, want)
