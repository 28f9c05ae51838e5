"""Operators over rows on a GPU: the compiled kernels against float64, at real sizes, gradients, repeatability."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import CONFIDENCE, accumulator, excess, norm_error, unit
from tilemesh.kernels.cross_entropy import reference as losses
from tilemesh.kernels.norm import reference as norms
from tilemesh.kernels.softmax import reference as softmaxes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
kernels = tm.kernels


def normal(*shape, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_(grad)


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def each_dtype(shapes):
    """Two of them for large shapes: a kernel takes a second to compile."""
    both = (torch.bfloat16, torch.float32)
    return [(shape, dtype) for shape in shapes for dtype in (DTYPES if shape[0] * shape[1] < 2**17 else both)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    each_dtype(
        [(1, 1), (7, 5), (30, 1000), (9, 4097), (33, 16384), (5, 16385), (300, 30000), (300, 50257), (3, 262144)]
    ),
)
def test_softmax(shape, dtype):
    x = normal(*shape, dtype=dtype)
    for causal in (False, True) if shape[0] <= shape[1] else (False,):
        y = kernels.softmax(x, scale=0.7, causal=causal, implementation="triton")
        assert excess(y, softmaxes.exact(x, 0.7, causal), softmaxes.error_bound(x, 0.7, causal)) is None


@pytest.mark.parametrize(
    ("shape", "dtype"),
    each_dtype([(1, 1), (7, 5), (30, 768), (2000, 1000), (9, 4097), (300, 8192), (5, 32769), (300, 35000)]),
)
def test_norms(shape, dtype):
    x, weight, bias = normal(*shape, dtype=dtype) + 1, *(normal(shape[1], dtype=dtype, seed=s) for s in (1, 2))
    y = kernels.rms_norm(x, weight, eps=1e-5, implementation="triton")
    exact = norms.exact(x, weight, eps=1e-5, centred=False)
    assert excess(y, exact, norms.error_bound(x, weight, eps=1e-5, centred=False)) is None
    y = kernels.layer_norm(x, weight, bias, eps=1e-5, implementation="triton")
    exact = norms.exact(x, weight, bias, eps=1e-5, centred=True)
    assert excess(y, exact, norms.error_bound(x, weight, bias, eps=1e-5, centred=True)) is None


@pytest.mark.parametrize("columns", [9, 35, 62, 333, 1220, 16384])
def test_a_rows_norm_has_the_same_bits_beside_any_number_of_rows(columns):
    x = normal(2**23 // columns, columns, dtype=torch.bfloat16)
    weight, bias = (normal(columns, seed=s) for s in (1, 2))
    whole = kernels.layer_norm(x, weight, bias)
    for rows in (1, 130):
        assert torch.equal(kernels.layer_norm(x[:rows], weight, bias), whole[:rows]), rows


def test_a_norm_with_a_weight_is_no_norm_with_a_bias():
    """Their tensors lie alike in memory: the program of the first served the second."""
    x, vector = normal(7, 96), normal(96, seed=1)
    for weight, bias in ((vector, None), (None, vector), (vector, None)):
        made, plain = (kernels.layer_norm(x, weight, bias, implementation=how) for how in ("triton", "torch"))
        torch.testing.assert_close(made, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["softmax", "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
def test_gradients_are_as_near_as_torchs(name, dtype):
    function = getattr(kernels, name)
    for rows, columns in ((7, 5), (3000, 333), (500, 4096), (9, 20001)):
        given = [normal(rows, columns, dtype=dtype, grad=True)]
        if name.startswith("add_"):
            given.append(normal(rows, columns, dtype=dtype, seed=1, grad=True))
        given += [normal(columns, dtype=dtype, seed=s, grad=True) for s in (2, 3)[: {"softmax": 0}.get(name, 1)]]
        upstream = normal(rows, columns, dtype=dtype, seed=4)

        def gradients(tensors, implementation, function=function, upstream=upstream):
            made = function(*tensors, implementation=implementation)
            made = made if isinstance(made, tuple) else (made,)
            return torch.autograd.grad(made, tensors, [upstream.to(made[0].dtype)] * len(made))

        mine, again, torchs = (gradients(given, how) for how in ("triton", "triton", "torch"))
        exact = gradients([tensor.detach().double().requires_grad_() for tensor in given], "torch")
        for found, repeated, theirs, true in zip(mine, again, torchs, exact, strict=True):
            assert torch.equal(found, repeated)
            # In float64 torch's is the exact one: what sums of that many terms may differ by, whoever adds them up.
            sums = CONFIDENCE * max(rows, columns) ** 0.5 * unit(accumulator(dtype))
            assert error(found, true) <= 2 * error(theirs, true) + 2 * torch.finfo(dtype).eps + sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 7, 256, 1001, 5001, 50304])
def test_the_loss_and_its_gradient(classes, dtype):
    logits, target = normal(300, classes, dtype=dtype, grad=True), torch.randint(classes, (300,), device="cuda")
    target[3] = -100
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.01}):
        found = kernels.cross_entropy(logits, target, reduction="none", **options)
        wide = logits.detach().double().requires_grad_()
        exact = kernels.cross_entropy(wide, target, reduction="none", implementation="torch", **options)
        allowed = losses.error_bound(logits, target, z_loss=options.get("z_loss", 0.0))
        assert excess(found.detach(), exact.detach(), allowed.detach()) is None
        (mine,) = torch.autograd.grad(kernels.cross_entropy(logits, target, **options), logits)
        (true,) = torch.autograd.grad(exact.sum() / 299, wide)
        assert classes == 1 or error(mine, true) <= 2 * torch.finfo(dtype).eps + 1e-6 * (dtype != torch.float64)
        assert not mine[3].any()


def test_a_target_outside_of_the_classes_is_named_in_debug_mode(monkeypatch):
    monkeypatch.setenv("TILEMESH_DEBUG", "values")
    logits, target = torch.randn(5, 7, device="cuda"), torch.tensor([0, 1, 2, 3, 7], device="cuda")
    with pytest.raises(UsageError, match="target 7 is outside the 7 classes"):
        kernels.cross_entropy(logits, target)


def test_a_target_outside_of_the_classes_is_nan_and_harmless():
    logits, target = normal(8, 100, grad=True), torch.full((8,), 100, device="cuda")
    assert kernels.cross_entropy(logits, target).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_loss_without_logits(dtype):
    x, weight = normal(5000, 96, dtype=dtype, grad=True), (normal(30000, 96, seed=1) * 0.1).to(dtype).requires_grad_()
    target = torch.randint(30000, (5000,), device="cuda")
    target[7] = -100
    for reduction, upstream in (("mean", 1.0), ("sum", 0.5)):
        found = []
        for how in ("triton", "torch"):
            loss = kernels.linear_cross_entropy(x, weight, target, reduction=reduction, implementation=how)
            found.append((loss, *torch.autograd.grad(loss * upstream, (x, weight))))
        wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
        loss = functional.cross_entropy(functional.linear(*wide), target, reduction=reduction)
        exact = (loss, *torch.autograd.grad(loss * upstream, wide))
        for mine, torchs, true in zip(*found, exact, strict=True):
            # Logits, their exponentials, the gradient and its products: fewer than 16 roundings of each value.
            assert error(mine, true) <= 2 * error(torchs, true) + norm_error(16, dtype)


def test_a_compiled_and_captured_layer(recording):
    x, residual, weight = normal(64, 256), normal(64, 256, seed=1), normal(256, seed=2, grad=True)
    target = torch.randint(256, (64,), device="cuda")

    def step(x, residual, weight, **how):
        y, total = kernels.add_rms_norm(x, residual, weight, **how)
        return kernels.cross_entropy(y + total, target, **how)

    want = torch.autograd.grad(step(x, residual, weight), weight)[0]
    found = torch.autograd.grad(torch.compile(step, fullgraph=True)(x, residual, weight), weight)[0]
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, residual, weight)]
    exact = torch.autograd.grad(step(*wide, implementation="torch"), wide[2])[0]
    assert error(found, exact) <= 2 * error(want, exact) + norm_error(16, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(step(x, residual, weight), weight)[0]
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, want)
