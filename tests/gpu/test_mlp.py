"""The MLP as one operator on a GPU: both products of a step with their activation inside, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import tilemesh as tm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GELU = {"gelu_tanh": "tanh", "gelu": "none"}


def drawn(rows, width, hidden, dtype):
    generator = torch.Generator("cuda").manual_seed(rows)

    def draw(*shape, by=1.0):
        made = torch.randn(shape, generator=generator, device="cuda") * by
        return made.to(dtype).requires_grad_()

    return [
        draw(rows, width), draw(hidden, width, by=width**-0.5), draw(hidden), draw(width, hidden, by=hidden**-0.5),
        draw(width),
    ]  # fmt: skip


def plain(x, w_in, b_in, w_out, b_out, activation):
    z = functional.linear(x, w_in, b_in)
    h = functional.gelu(z, approximate=GELU[activation]) if activation in GELU else functional.relu(z)
    return functional.linear(h, w_out, b_out)


def results(function, arguments, activation):
    y = function(*arguments, activation=activation)
    upstream = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda").to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, arguments, upstream)]


# The product with the derivative inside (aligned rows, whole and cut tiles), and the pass after a product.
@pytest.mark.parametrize(
    ("sizes", "activation", "dtype"),
    [
        ((2048, 768, 3072), "gelu_tanh", torch.bfloat16),
        ((1000, 136, 520), "gelu_tanh", torch.float16),
        ((300, 64, 200), "relu", torch.bfloat16),
        ((257, 33, 77), "gelu", torch.bfloat16),
        ((130, 40, 72), "gelu_tanh", torch.float32),
    ],
)
def test_results_and_gradients(sizes, activation, dtype):
    arguments = drawn(*sizes, dtype)
    exact = results(plain, [one.detach().double().requires_grad_() for one in arguments], activation)
    ours, torchs = results(tm.kernels.mlp, arguments, activation), results(plain, arguments, activation)
    for mine, theirs, wanted in zip(ours, torchs, exact, strict=True):
        # Twice torch's own error over the whole tensor; in float32 both are near rounding.
        assert (mine - wanted).norm() <= 2 * (theirs - wanted).norm() + 1e-6 * wanted.norm()
    again = results(tm.kernels.mlp, arguments, activation)
    assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))


def test_the_gradient_takes_the_fused_product():
    """On Hopper the activation's derivative is inside of the product: one launch of the warp-specialised kernel."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("written for Hopper")
    arguments = drawn(2048, 768, 3072, torch.bfloat16)
    results(tm.kernels.mlp, arguments, "gelu_tanh")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        results(tm.kernels.mlp, arguments, "gelu_tanh")
        torch.cuda.synchronize()
    names = [event.key for event in seen.key_averages()]
    assert any("pingpong_tiles" in name for name in names)
    assert not any("gradient_pass" in name for name in names)
