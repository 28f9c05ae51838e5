"""Products of 8-bit floats on a GPU: the same casts as a CPU's, products within their rounding, compiled."""

from __future__ import annotations

import pytest
import torch

from tilemesh.model.eight_bits import (
    BLOCK,
    GRADIENTS,
    VALUES,
    Cast,
    EightBits,
    cast,
    cast_blocks,
    multiplies_blocks,
    multiply,
    multiply_blocks,
)
from tilemesh.model.linear import Linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with 8-bit floats"
)


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_casts_have_the_bits_of_a_cpu(dtype, dim):
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 200)
    here, there = cast(x, dtype, dim), cast(x.cuda(), dtype, dim)
    assert torch.equal(here.codes.view(torch.uint8), there.codes.cpu().view(torch.uint8))
    assert torch.equal(here.scale, there.scale.cpu())


@pytest.mark.parametrize("by", ["tensor", "row"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(256, 512, 384), (33, 100, 7)])
def test_products_are_those_of_a_cpu(by, rows, inputs, outputs):
    """Codes are equal; sums of exact products in tensor cores keep about 14 bits (DeepSeek-V3 report, 3.3.2)."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    dim = None if by == "tensor" else 1
    left, right = (cast(value.cuda(), VALUES, dim) for value in (x, weight))
    exact = (left.codes.double() * left.scale) @ (right.codes.double() * right.scale).t()
    size = (left.codes.double() * left.scale).abs() @ (right.codes.double() * right.scale).abs().t()
    for is_fast in (True, False):
        y = multiply(left, right.T, torch.bfloat16, is_fast)
        assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-11 * size).all()


@pytest.mark.parametrize("narrow", [False, True])
def test_products_in_blocks_are_those_of_a_cpu(narrow):
    if narrow and not multiplies_blocks(torch.device("cuda", 0)):
        pytest.skip("the library here multiplies no 8-bit floats in blocks")
    generator = torch.Generator().manual_seed(1)
    x, weight, grad = (torch.randn(*size, generator=generator) for size in ((256, 512), (384, 512), (256, 384)))
    x *= torch.logspace(-4, 4, 512)
    left, right, back = (cast_blocks(value.cuda(), rows) for value, rows in ((x, 1), (weight, BLOCK), (grad, 1)))
    for rows, turned in ((left, True), (back, False)):
        here = [Cast(*(part.cpu() for part in each)) for each in (rows, right)]
        exact = multiply_blocks(*here, torch.float64, turned, narrow=False)
        y = multiply_blocks(rows, right, torch.bfloat16, turned, narrow)
        assert (y.double().cpu() - exact).norm() <= 2.0**-8 * exact.norm()


@pytest.mark.parametrize("by", ["tensor", "row", "block"])
def test_a_compiled_layer_has_the_gradients_of_a_cpu(by):
    generator = torch.Generator().manual_seed(2)
    weight = (0.02 * torch.randn(1024, 2048, generator=generator)).to(torch.bfloat16)
    x, grad = (torch.randn(64, width, generator=generator).to(torch.bfloat16) for width in (2048, 1024))

    def gradients(device: str) -> list[torch.Tensor]:
        narrow = by == "block" and multiplies_blocks(torch.device(device))
        layer = Linear(2048, 1024, False, kind=EightBits(by, narrow), dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            layer.weight.copy_(weight)
        own = x.detach().clone().to(device).requires_grad_()
        run = torch.compile(layer) if device == "cuda" else layer
        y = run(own)
        y.backward(grad.to(device))
        return [value.detach().double().cpu() for value in (y, own.grad, layer.weight.grad)]

    for here, there in zip(gradients("cpu"), gradients("cuda"), strict=True):
        assert ((here - there).norm() / here.norm()) < 2.0**-7
