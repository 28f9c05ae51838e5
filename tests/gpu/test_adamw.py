"""AdamW and the global norm on a GPU: the compiled kernels against torch's own, 16-bit parameters, a captured step."""

from __future__ import annotations

import pytest
import torch
from kernel_bounds import norm_bound

import tilemesh as tm
from tilemesh.kernels.accuracy import excess, unit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SHAPES = ((3, 5), (1,), (0, 4), (1500,), (512, 1024), (7, 11, 3), (2, 1024))
kernels = tm.kernels


def drawn(dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64).to(dtype) for shape in SHAPES]


def zeros(dtype=torch.float32):
    return [torch.zeros(shape, device="cuda", dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 40 * 2.0**-24)])
def test_it_is_torchs_step(dtype, tolerance):
    """In float32: three steps of some 12 roundings each, on either side of values of about 1."""
    mine, averages, squares = drawn(dtype), zeros(dtype), zeros(dtype)
    theirs = [torch.nn.Parameter(value) for value in drawn(dtype)]
    ours = kernels.AdamW(mine, averages, squares, weight_decay=0.1, implementation="triton")
    peer = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, fused=True)
    for step in (1, 2, 3):
        gradients = drawn(dtype, seed=step)
        ours.step(gradients, rate=0.01, step=step)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        peer.step()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_16_bit_parameters(dtype):
    """As float32 parameters whose gradients are the same numbers, but for roundings: both are other kernels.

    Each rounds a value twice, and a move of at most the rate some 12 times (a division may be off by 2 units).
    """
    rate, u = 0.01, unit(torch.float32)
    parameters, masters, gradients = drawn(dtype), [value.float() for value in drawn(dtype)], drawn(dtype, seed=1)
    plain, states = [master.clone() for master in masters], [zeros() for _ in range(4)]
    kernels.adamw(parameters, gradients, *states[:2], masters, rate=rate)
    kernels.adamw(plain, [gradient.float() for gradient in gradients], *states[2:], rate=rate)
    for parameter, master, other in zip(parameters, masters, plain, strict=True):
        assert excess(master, other.double(), 2 * u * (2 * (other.double().abs() + rate) + 16 * rate)) is None
        assert torch.equal(parameter, master.to(dtype))


def test_some_parameters_have_masters_and_some_have_none():
    """As a step under autocast has them: 16-bit weights of products beside float32 norms and tables."""
    wide, narrow = drawn(), [value.bfloat16() for value in drawn(seed=3)]
    masters = [value.float() for value in narrow]
    gradients = [*drawn(seed=1), *(value.bfloat16() for value in drawn(seed=2))]
    apart = [value.clone() for value in (*wide, *masters)]
    averages, squares = ([*zeros(), *zeros()] for _ in range(2))
    kernels.adamw([*wide, *narrow], gradients, averages, squares, [None] * len(wide) + masters, rate=0.01)
    others = [[*zeros(), *zeros()] for _ in range(2)]
    kernels.adamw(apart, [gradient.float() for gradient in gradients], *others, rate=0.01)
    for one, other in zip([*wide, *masters], apart, strict=True):
        torch.testing.assert_close(one, other, rtol=40 * 2.0**-24, atol=40 * 2.0**-24)
    for parameter, master in zip(narrow, masters, strict=True):
        assert torch.equal(parameter, master.bfloat16())


def test_a_captured_step_reads_its_scalars_anew():
    parameters, gradients = drawn(), drawn(seed=1)
    rate, step, divisor = (torch.tensor(value, device="cuda") for value in (0.0, 1.0, 1.0))
    optimizer = kernels.AdamW(parameters, zeros(), zeros())
    optimizer.step(gradients, rate=rate, step=step, divisor=divisor)
    for state in (*optimizer.exp_avgs, *optimizer.exp_avg_sqs):
        state.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(gradients, rate=rate, step=step, divisor=divisor)
    plain, states = drawn(), (zeros(), zeros())
    for count in (1, 2):
        rate.fill_(0.01 * count)
        step.fill_(count)
        divisor.fill_(2.0)
        graph.replay()
        kernels.adamw(plain, gradients, *states, rate=rate, step=step, divisor=divisor)
    for one, other in zip(parameters, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_global_norm_repeats(dtype):
    tensors = [*drawn(dtype), torch.ones(100_001, device="cuda", dtype=dtype)]
    found = kernels.global_norm(tensors)
    exact = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    assert excess(found, exact, norm_bound(exact, dtype, sum(tensor.numel() for tensor in tensors))) is None
    assert torch.equal(found, kernels.global_norm(tensors))
