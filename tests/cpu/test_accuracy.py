"""The bounds themselves: correct results are within them whatever the order of sums, real faults are not."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_bounds import gradient_error_bounds

from tilemesh.kernels.accuracy import excess, rounding_error, sum_error
from tilemesh.kernels.activations import reference as activations
from tilemesh.kernels.matmul import reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def inputs(m, n, k, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n), (m, n))]


def added_up(a, b, c, block, kept=torch.float32):
    """act-free D as a kernel makes it: K in blocks, each block's sum added to one of dtype `kept`, C last."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=kept)
    for at in range(0, a.shape[1], block):
        total = total + (a[:, at : at + block].float() @ b[at : at + block].float()).to(kept)
    return total + c.to(kept)


def wrong_with(result, a, b, c, activation="none"):
    exact = reference.exact(a, b, c, activation)
    return excess(result.to(a.dtype), exact, reference.error_bound(a, b, c, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 40, 16), (7, 5, 3), (70, 66, 40), (64, 64, 4096)])
def test_a_correct_sum_is_within_its_bound_in_any_order(dtype, shape):
    for seed in range(10 if shape[2] < 1000 else 2):
        a, b, c = inputs(*shape, dtype, seed)
        for block in (1, 16, 64, shape[2]):
            assert wrong_with(added_up(a, b, c, block), a, b, c) is None, (seed, block)
            order = torch.randperm(shape[2], generator=torch.Generator().manual_seed(block))
            assert wrong_with(added_up(a[:, order], b[order], c, block), a, b, c) is None, (seed, block)


FAULTS = {
    "a K step left out": lambda a, b, c: added_up(a[:, 32:], b[32:], c, 32),
    "the last element of K left out": lambda a, b, c: added_up(a[:, :-1], b[:-1], c, 32),
    "sums in bfloat16": lambda a, b, c: added_up(a, b, c, 16, torch.bfloat16),
    "sums in float16": lambda a, b, c: added_up(a, b, c, 1, torch.float16),
    "C forgotten": lambda a, b, c: added_up(a, b, 0 * c, 32),
    "one tile written to another's place": lambda a, b, c: torch.cat([added_up(a, b, c, 32)[:64]] * 2),
    "one element not written": lambda a, b, c: added_up(a, b, c, 32).index_put(
        (torch.tensor([5]), torch.tensor([9])), torch.tensor(math.nan)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_over_the_bound(fault, dtype):
    a, b, c = inputs(128, 64, 96, dtype)
    assert wrong_with(added_up(a, b, c, 32), a, b, c) is None
    result = FAULTS[fault](a, b, c)
    if (fault, dtype) == ("sums in float16", torch.bfloat16):
        return  # float16 sums are finer than what bfloat16 keeps of them: nothing is wrong with the result
    assert wrong_with(result, a, b, c) is not None


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "squared_relu"])
def test_an_activation_of_the_wrong_kind_is_over_the_bound(activation):
    a, b, c = inputs(64, 64, 40, torch.float32)
    for other in ("none", "relu", "gelu", "gelu_tanh", "silu", "squared_relu"):
        found = wrong_with(activations.activate(added_up(a, b, c, 40), other), a, b, c, activation)
        assert (found is None) == (other == activation), (other, found)


def test_a_wrong_gradient_is_over_its_bound():
    a, b, c = inputs(70, 66, 40, torch.float32)
    c, grad = c[0], torch.randn(70, 66, generator=torch.Generator().manual_seed(5))
    exact = [t.double().requires_grad_() for t in (a, b, c)]
    reference.fused_matmul(*exact, "silu").backward(grad.double())
    for tensor, bound in zip(exact, gradient_error_bounds(a, b, c, "silu", grad), strict=True):
        assert excess(tensor.grad.float(), tensor.grad, bound) is None
        assert excess(tensor.grad * (1 + 2**-8), tensor.grad, bound) is not None  # as if sums were bfloat16's


def test_the_worst_element_is_named():
    exact = torch.zeros(3, 4, dtype=torch.float64)
    result = exact.clone()
    result[2, 1], result[0, 0] = 0.5, 0.1
    assert excess(result, exact, 0.2) == "error 0.5 at (2, 1), allowed 0.2 (1 of 12 elements)"
    result[1, 3] = math.nan
    assert "at (1, 3)" in excess(result, exact, 0.2)
    assert excess(exact[:0], exact[:0], 0.0) is None


def test_units_are_those_of_the_formats():
    one = torch.ones((), dtype=torch.float64)
    assert rounding_error(one, torch.float16) >= 2**-11
    assert rounding_error(torch.zeros(()), torch.float16) == 2.0**-24
    assert sum_error(one, 100, torch.float32) == 80 * 2**-24
