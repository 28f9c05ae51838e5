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
from tilemesh.kernels.row_linear.reference import (
    error_bound,
    exact,
    norm_error_bound,
    norm_exact,
    norm_row_linear,
    row_linear,
)


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


@pytest.mark.parametrize("gate", ["none", "silu"])
@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs"), [(torch.float64, 6, 40), (torch.float32, 10, 2200), (torch.bfloat16, 18, 513)]
)
def test_a_norm_before_the_product_is_within_its_bound(
    dtype: torch.dtype, outputs: int, inputs: int, gate: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    # Sums that 16 bits hold: the interpreter does not round to bfloat16.
    x, branch = (torch.randint(-9, 10, (1, inputs), generator=generator).to(dtype) / 4 for _ in range(2))
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    scale = torch.rand(inputs, generator=generator).to(dtype)
    given = (x, branch, scale, weight)
    found, total = norm_row_linear(*given, eps=1e-5, gate=gate, implementation="interpret")
    want, bound = norm_exact(*given, 1e-5, gate), norm_error_bound(*given, 1e-5, gate)
    assert torch.equal(total, x + branch)
    assert excess(found, want, bound) is None
    assert excess(found.flip(1), want, bound) is not None
    if dtype is not torch.bfloat16:  # plain torch rounds after the norm as well
        assert excess(norm_row_linear(*given, eps=1e-5, gate=gate)[0], want, bound) is None


def test_it_compiles_for_an_h200_with_wide_loads_that_are_on_their_way_before_the_kernel_ahead_has_ended() -> None:
    places = {
        "x": Place((1, 2048), (2048, 1), "bfloat16", aligned=True),
        "w": Place((11264, 2048), (2048, 1), "bfloat16", aligned=True),
        "y": Place((1, 5632), (5632, 1), "bfloat16", aligned=True),
    }
    (step,) = kernel.plan(places, gated=True, early=True, settled=True).steps
    operands = {name: Operand(place.dtype) for name, place in places.items()}
    ptx = compile_step(step, operands, GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ".v4.b32" in ptx
    assert 0 < ptx.index("ld.global") < ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch")
    (step,) = kernel.plan(places, gated=True, early=True).steps
    ptx = compile_step(step, operands, GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")


def test_what_cannot_be_is_refused() -> None:
    x, weight = torch.randn(1, 8), torch.randn(3, 8)
    with pytest.raises(UsageError, match="as many for the gate"):
        row_linear(x, weight, gate="silu")
    with pytest.raises(UsageError, match="expected \\(1, K\\)"):
        row_linear(torch.randn(2, 8), weight)
    with pytest.raises(UsageError, match="bias has shape"):
        row_linear(x, weight, torch.randn(4))
    with pytest.raises(UsageError, match="expected \\(1, K\\) twice"):
        norm_row_linear(x, x, torch.randn(4), weight)
