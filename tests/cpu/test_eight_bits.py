"""Products of 8-bit floats while training: casts, the three products of a layer, layouts, and a run."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tilemesh.model import eight_bits
from tilemesh.model.config import preset
from tilemesh.model.eight_bits import BLOCK, GRADIENTS, VALUES, EightBits, cast, cast_blocks, fp8_words, in_8_bits
from tilemesh.model.linear import Linear

NUMBERS = st.floats(-(2.0**100), 2.0**100, allow_subnormal=False, width=32)


def nearest(value: float, dtype: torch.dtype, power: int) -> float:
    """The nearest of all 256 codes times two to `power`, the even one of two, by trying them."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    known = [
        (abs(value - math.ldexp(float(number), power)), int(code) & 1, math.ldexp(float(number), power))
        for code, number in zip(codes, numbers, strict=True)
        if math.isfinite(number)
    ]
    return min(known)[2]


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.sampled_from([VALUES, GRADIENTS]))
def test_a_cast_is_the_nearest_code_under_the_largest_power_of_two_that_fits(values, dtype):
    x = torch.tensor([values])
    codes, scale = cast(x, dtype, None)
    most, top = float(x.abs().max()), torch.finfo(dtype).max
    power = math.frexp(float(scale))[1] - 1
    assert float(scale) == 2.0**power
    if most > 1e-30:
        assert top / 2 < most / 2.0**power <= top
    for value, code in zip(x[0].tolist(), codes[0], strict=True):
        assert float(code.double()) * 2.0**power == nearest(value, dtype, power)


def test_zeros_stay_and_what_is_no_number_shows():
    assert not cast(torch.zeros(3, 4), VALUES, 1).codes.float().any()
    for wrong in (math.nan, math.inf):
        layer = made("tensor", 16, 16)
        assert not torch.isfinite(layer(torch.full((1, 16), wrong, dtype=torch.bfloat16))).all()


def test_scales_differ_by_layout_and_roundings_do_not():
    """Powers of two: a tensor of halves rounds to the same numbers as the whole, where nothing is too small."""
    x = (torch.rand(64, 64) + 0.01) * torch.where(torch.rand(64, 64) > 0.5, 1.0, -1.0)
    x[:32] *= 0.01
    whole = cast(x, VALUES, None)
    halves = [cast(part, VALUES, None) for part in x.split(32)]
    assert whole.scale != halves[0].scale
    assert torch.equal(
        whole.codes.float() * whole.scale, torch.cat([part.codes.float() * part.scale for part in halves])
    )


def made(by: str, inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16) -> Linear:
    layer = Linear(inputs, outputs, kind=EightBits(by=by), dtype=dtype)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(outputs)
    with torch.no_grad():
        layer.weight.copy_(0.02 * torch.randn(outputs, inputs, generator=generator))
        layer.bias.zero_()
    return layer


def decibels(value: Tensor, exact: Tensor) -> float:
    """Signal over noise."""
    noise = (value.double() - exact).pow(2).sum()
    return float(10 * torch.log10(exact.pow(2).sum() / noise))


def three_products(by: str, x: Tensor, grad: Tensor) -> tuple[float, float, float]:
    layer = made(by, x.shape[1], grad.shape[1])
    x = x.to(torch.bfloat16).requires_grad_()
    y = layer(x)
    y.backward(grad.to(torch.bfloat16))
    exact_x, exact_weight = (value.detach().double().requires_grad_() for value in (x, layer.weight))
    exact = functional.linear(exact_x, exact_weight)
    exact.backward(grad.to(torch.bfloat16).double())
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert exact_x.grad is not None
    assert exact_weight.grad is not None
    pairs = ((y.detach(), exact.detach()), (x.grad, exact_x.grad), (layer.weight.grad, exact_weight.grad))
    forward, back, weight = (decibels(value, wanted) for value, wanted in pairs)
    return forward, back, weight


@pytest.mark.parametrize("by", ["tensor", "row", "block"])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(192, 256, 384), (33, 100, 7)])
def test_outputs_and_all_gradients_are_above_20_decibels(by, tokens, inputs, outputs):
    """Three places after the point are 31.5 dB for one operand (relative errors even within 2^-4), two are 25.5."""
    generator = torch.Generator().manual_seed(tokens)
    x, grad = torch.randn(tokens, inputs, generator=generator), torch.randn(tokens, outputs, generator=generator)
    forward, back, weight = three_products(by, x, grad)
    assert min(forward, back, weight) > 20
    assert forward > 27
    assert (back > 27) == (weight > 27) == (by != "tensor")


def test_an_outlier_that_tensors_fail_for_rows_pass():
    """One token far above all others: under one scale they fall below the smallest code."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator)
    x[0] *= 3e6
    quality = {}
    for by in ("tensor", "row", "block"):
        layer = made(by, 256, 128)
        y = layer(x.to(torch.bfloat16))[1:].detach()
        exact = functional.linear(x.to(torch.bfloat16)[1:].double(), layer.weight.detach().double())
        quality[by] = decibels(y, exact)
    assert quality["tensor"] < 20 < 27 < min(quality["row"], quality["block"])


def test_blocks_pass_an_outlier_that_rows_fail_for():
    """Of each token one number far above its others: under one scale per token they fall below the smallest code."""
    generator = torch.Generator().manual_seed(0)
    x, wide = torch.randn(64, 512, generator=generator), torch.zeros(64, 512)
    x[:, 7] *= 3e6
    wide[:, 128:] = x[:, 128:]  # what the other blocks hold
    quality = {}
    for by in ("row", "block"):
        layer = made(by, 512, 128)
        with torch.no_grad():
            layer.weight[:, :128] = 0
        y, weight = layer(x.to(torch.bfloat16)).detach(), layer.weight.detach().double()
        quality[by] = decibels(y, functional.linear(wide.to(torch.bfloat16).double(), weight))
    assert quality["row"] < 20 < 27 < quality["block"]


def test_a_block_is_cast_as_a_matrix_of_its_own():
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 200)
    for rows in (1, BLOCK):
        made_of = cast_blocks(x, rows)
        for at, down in enumerate(range(0, 300, rows)):
            for across in (0, BLOCK):
                alone = cast(x[down : down + rows, across : across + BLOCK].contiguous(), VALUES, None)
                codes = made_of.codes[down : down + rows, across : across + BLOCK]
                assert torch.equal(codes.contiguous().view(torch.uint8), alone.codes.view(torch.uint8))
                assert made_of.scale[at, across // BLOCK] == alone.scale


@pytest.mark.parametrize("by", ["tensor", "row", "block"])
def test_no_rows_have_no_outputs_and_no_gradient(by: str) -> None:
    """An expert without tokens."""
    layer = made(by, 256, 128)
    x = torch.zeros(0, 256, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 128)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def test_recomputed_products_are_the_same_and_frozen_weights_have_no_gradient():
    from torch.utils.checkpoint import checkpoint

    layer, x = made("tensor", 64, 32), torch.randn(16, 64).to(torch.bfloat16).requires_grad_()
    layer(x).sum().backward()
    plain, x.grad = x.grad, None
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert torch.equal(plain, x.grad)
    layer.weight.requires_grad_(False)
    layer.weight.grad = None
    layer(x).sum().backward()
    assert layer.weight.grad is None


def test_narrow_matrices_the_head_and_experts_stay_in_16_bits():
    names = in_8_bits(preset("llama-3-8b"), "tensor")
    assert len(names) == 7 * 32
    assert len(in_8_bits(preset("llama-3-8b"), "row")) == 5 * 32
    assert fp8_words(preset("gpt2-124m"), "row", torch.device("cpu")) == (
        "fp8: products with 0 of the layers' 72 matrices take 8 bits, the others are too narrow to gain by it; a CPU "
        "emulates them, slower than 16 bits"
    )


def test_a_gpu_without_products_in_blocks_is_said_to_emulate_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = preset("llama-3-8b"), torch.device("cuda")
    monkeypatch.setattr(eight_bits, "multiplies_blocks", lambda device: False)
    assert fp8_words(model, "block", gpu).endswith(
        "take 8 bits, the others are too narrow to gain by it; in blocks this GPU emulates them, slower than 16 bits: "
        "plan.fp8_scales=row is faster"
    )
    assert "emulates" not in fp8_words(model, "row", gpu)
    monkeypatch.setattr(eight_bits, "multiplies_blocks", lambda device: True)
    assert "emulates" not in fp8_words(model, "block", gpu)
