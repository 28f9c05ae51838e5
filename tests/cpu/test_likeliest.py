"""The likeliest token of each row: interpreted kernels and plain torch, equal logits and ones that are no numbers."""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget

from tilemesh.core.errors import UsageError
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.program import Operand, compile_step
from tilemesh.kernels.likeliest import draw, kernel
from tilemesh.kernels.likeliest.draw import draw_rows
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


@pytest.mark.parametrize("columns", [1, 300, 9000])
def test_a_token_is_drawn_where_the_number_falls(columns: int) -> None:
    """Beside the definition in float64: the token whose part of the sum holds the number, unless a rounding of float32
    shares could carry it over an edge; and its log-probabilities."""
    chance = torch.Generator().manual_seed(columns)
    logits = torch.randn(16, columns, generator=chance, dtype=torch.float64) * 3
    logits = logits.to(torch.bfloat16)
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0] * 4, dtype=torch.float64)
    uniform = torch.rand(16, generator=chance, dtype=torch.float64)
    uniform[:4] = 1 - 2**-53
    spread = torch.zeros(16, 2 * columns, dtype=logits.dtype)[:, ::2].copy_(logits)
    tokens, scores = draw_rows(spread, temperature, uniform, interpreted=True)
    own = logits.double().log_softmax(-1)
    drawn = (logits.double() / temperature.clamp(min=1e-30)[:, None]).log_softmax(-1)
    ends = torch.cat((torch.zeros(16, 1), drawn.exp().cumsum(-1)), 1)
    rows = torch.arange(16)
    is_drawn = temperature > 0
    at = rows[is_drawn], tokens[is_drawn]
    edge = 4 * columns**0.5 * 2**-24 + 2**-22
    assert (ends[at] <= uniform[is_drawn] + edge).all()
    assert (uniform[is_drawn] < ends[at[0], at[1] + 1] + edge).all()
    assert (tokens == logits.argmax(-1))[~is_drawn].all()
    torch.testing.assert_close(scores[0], own[rows, tokens], rtol=0, atol=1e-5)
    torch.testing.assert_close(scores[1][is_drawn], drawn[at], rtol=1e-6, atol=1e-5)
    assert (scores[1][~is_drawn] == 0).all()
    logits[3, columns // 2], logits[5, 0] = torch.nan, torch.inf
    again, _ = draw_rows(logits, temperature, uniform, interpreted=True)
    assert again[[3, 5]].tolist() == [-1, -1]
    assert torch.equal(again[6:], tokens[6:])


def test_drawing_compiles_for_an_h200() -> None:
    float64 = {name: Place((1024,), (1,), "float64", aligned=True) for name in ("temperature", "uniform")}
    places = {"logits": Place((1024, 32000), (32000, 1), "bfloat16", aligned=True), **float64}
    places |= {"tokens": Place((1024,), (1,), "int64", aligned=True)}
    places |= {"scores": Place((2, 1024), (1024, 1), "float64", aligned=True)}
    planned = draw.plan(places, early=True)
    operands = {name: Operand(place.dtype) for name, place in places.items()}
    compiled = compile_step(planned.steps[0], operands, GPUTarget("cuda", 90, 32))
    assert ".v4.b32" in compiled.asm["ptx"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="expected \\(N, V\\)"):
        likeliest(torch.randn(3))
