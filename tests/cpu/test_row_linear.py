"""One row times a matrix: the interpreted kernel against float64, and what the compiler makes of it."""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.program import Operand, compile_step
from tilemesh.kernels.row_linear import kernel
from tilemesh.kernels.row_linear.reference import error_bound, exact, row_linear


@pytest.mark.parametrize("gate", ["none", "silu"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs"), [(torch.float64, 6, 40), (torch.float32, 10, 700), (torch.bfloat16, 18, 513)]
)
def test_the_kernel_is_within_its_bound(dtype: torch.dtype, outputs: int, inputs: int, biased: bool, gate: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, inputs, generator=generator).to(dtype) for rows in (1, outputs))
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    found = row_linear(x, weight, bias, gate=gate, implementation="interpret")
    want, bound = exact(x, weight, bias, gate), error_bound(x, weight, bias, gate)
    assert excess(found, want, bound) is None
    assert excess(found.flip(1), want, bound) is not None
    if dtype is not torch.bfloat16 or gate == "none":  # plain torch rounds before the gate as well
        assert excess(row_linear(x, weight, bias, gate=gate), want, bound) is None


def test_it_compiles_for_an_h200_with_wide_loads() -> None:
    places = {
        "x": Place((1, 2048), (2048, 1), "bfloat16", aligned=True),
        "w": Place((11264, 2048), (2048, 1), "bfloat16", aligned=True),
        "y": Place((1, 5632), (5632, 1), "bfloat16", aligned=True),
    }
    (step,) = kernel.plan(places, gated=True).steps
    ptx = compile_step(step, {name: Operand(one.dtype) for name, one in places.items()}, GPUTarget("cuda", 90, 32)).asm
    assert ".v4.b32" in ptx["ptx"]


def test_what_cannot_be_is_refused() -> None:
    x, weight = torch.randn(1, 8), torch.randn(3, 8)
    with pytest.raises(UsageError, match="as many for the gate"):
        row_linear(x, weight, gate="silu")
    with pytest.raises(UsageError, match="expected \\(1, K\\)"):
        row_linear(torch.randn(2, 8), weight)
    with pytest.raises(UsageError, match="bias has shape"):
        row_linear(x, weight, torch.randn(4))
