"""A few rows times a matrix in parts, and the norm that adds them up: interpreted kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from triton.backends.compiler import GPUTarget

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.few_linear import kernel
from tilemesh.kernels.few_linear.cost import parts_of
from tilemesh.kernels.few_linear.reference import error_bound, exact, few_linear, parts_rms_norm
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.program import Operand, compile_step


@pytest.mark.parametrize(("rows", "outputs", "inputs", "gate"), [(3, 128, 1024, "none"), (20, 64, 256, "silu")])
def test_the_kernel_is_within_its_bound(rows: int, outputs: int, inputs: int, gate: str) -> None:
    generator = torch.Generator().manual_seed(0)
    high = outputs * (1 if gate == "none" else 2)
    x, weight = (torch.randn(size, inputs, generator=generator).to(torch.bfloat16) for size in (rows, high))
    parts = few_linear(x, weight, gate=gate, implementation="interpret")
    want, bound = exact(x, weight, gate), error_bound(x, weight, gate)
    assert parts.shape == (parts_of(outputs, inputs, gate), rows, outputs)
    assert excess(parts.double().sum(0), want, bound) is None
    assert excess(parts.double().sum(0).flip(1), want, bound) is not None
    if gate == "none":  # plain torch rounds before the gate as well
        assert excess(few_linear(x, weight).double().sum(0), want, bound) is None


@pytest.mark.parametrize(("dtype", "parts"), [(torch.float64, 1), (torch.float32, 4), (torch.bfloat16, 2)])
def test_the_norm_of_parts_is_the_norm_of_their_sum(dtype: torch.dtype, parts: int) -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    # Sums that 16 bits hold: the interpreter does not round to bfloat16.
    x = torch.randint(-9, 10, (3, 70), generator=generator).to(dtype) / 4
    cut = torch.randint(-9, 10, (parts, 3, 70), generator=generator).to(wide) / 4
    scale = torch.rand(70, generator=generator).to(dtype)
    want = functional.rms_norm((x + cut.sum(0)).double(), (70,), scale.double(), 1e-5)
    for implementation in ("interpret", "torch"):
        found, total = parts_rms_norm(cut, x, scale, eps=1e-5, implementation=implementation)
        assert torch.equal(total, (x.to(wide) + cut.sum(0)).to(dtype))
        # A sum of 70 squares, a root, a quotient and two products, then the rounding to the dtype.
        torch.testing.assert_close(found.double(), want, rtol=8 * torch.finfo(dtype).eps, atol=1e-30)


def test_parts_fill_a_gpu_or_there_is_no_kernel() -> None:
    assert [parts_of(*size) for size in ((2560, 2048), (2048, 5632), (6144, 4096), (28672, 4096))] == [4, 4, 2, 1]
    assert parts_of(2000, 2048) == parts_of(2048, 2000) == parts_of(2000, 2048, "silu") == 0
    assert parts_of(5632, 2048, "silu") == 1


@pytest.mark.parametrize(("rows", "outputs", "inputs", "gated"), [(64, 2560, 2048, False), (48, 14336, 4096, True)])
def test_it_compiles_for_an_h200_with_tma_and_tensor_cores(rows: int, outputs: int, inputs: int, gated: bool) -> None:
    high, parts = outputs * (2 if gated else 1), parts_of(outputs, inputs, "silu" if gated else "none")
    places = {
        "x": Place((rows, inputs), (inputs, 1), "bfloat16", aligned=True),
        "w": Place((high, inputs), (inputs, 1), "bfloat16", aligned=True),
        "y": Place((parts, rows, outputs), (rows * outputs, outputs, 1), "float32", aligned=True),
    }
    (step,) = kernel.plan(places, gated=gated, early=True).steps
    compiled = compile_step(
        step, {name: Operand(place.dtype) for name, place in places.items()}, GPUTarget("cuda", 90, 32)
    )
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 232_448


def test_what_cannot_be_is_refused() -> None:
    x, weight = torch.randn(3, 8), torch.randn(3, 8)
    with pytest.raises(UsageError, match="as many for the gate"):
        few_linear(x, weight, gate="silu")
    with pytest.raises(UsageError, match="at most 64 rows"):
        few_linear(torch.randn(65, 8), weight)
    with pytest.raises(UsageError, match="expected \\(S, M, K\\)"):
        parts_rms_norm(torch.randn(2, 3, 9), x, torch.randn(8))
