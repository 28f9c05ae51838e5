"""The likeliest token of each row: interpreted kernels and plain torch, equal logits and ones that are no numbers."""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget

from tilemesh.core.errors import UsageError
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.program import Operand, compile_step
from tilemesh.kernels.likeliest import kernel
from tilemesh.kernels.likeliest.reference import likeliest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 5, 4096, 9000])
def test_the_first_of_the_largest_is_found_in_sound_rows(dtype: torch.dtype, columns: int) -> None:
    logits = torch.randint(-40, 40, (7, columns), generator=torch.Generator().manual_seed(columns)).to(dtype)
    want = logits.argmax(-1)
    for row, value in ((1, torch.nan), (3, torch.inf), (4, -torch.inf)):
        logits[row, columns // 2] = value
        want[row] = -1
    for implementation in ("interpret", "torch"):
        found = likeliest(logits, implementation=implementation)
        assert found.dtype is torch.int64
        assert found.tolist() == want.tolist()
    spread = torch.zeros(7, 2 * columns, dtype=dtype)[:, ::2].copy_(logits)
    assert likeliest(spread, implementation="interpret").tolist() == want.tolist()


def test_it_compiles_for_an_h200() -> None:
    places = {
        "x": Place((64, 128256), (128256, 1), "bfloat16", aligned=True),
        "y": Place((64,), (1,), "int64", aligned=True),
    }
    planned = kernel.plan(places, early=True)
    operands = {name: Operand(place.dtype) for name, place in places.items()}
    operands |= {name: Operand(buffer.dtype) for name, buffer in planned.buffers.items()}
    ptx = [compile_step(step, operands, GPUTarget("cuda", 90, 32)).asm["ptx"] for step in planned.steps]
    assert ".v4.b32" in ptx[0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="expected \\(N, V\\)"):
        likeliest(torch.randn(3))
