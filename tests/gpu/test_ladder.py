"""The matmul ladder on a GPU: NVRTC compiles what the interpreter runs, and both compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilemesh.guide.ladder import gpu, rungs, studies
from tilemesh.guide.ladder.ours import our_rungs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("rung", rungs.ladder(), ids=lambda rung: rung.key)
def test_a_rung_computes_the_product(rung):
    n = 2 * max(rung.tile)
    dtype = torch.float16 if rung.dtype == "float16" else torch.float32
    a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
    c = torch.full_like(a, float("nan"))
    kernel = gpu.compiled(rung.text(), "matmul", rung.dynamic * 2)
    kernel(rung.grid(n), rung.block, [a, b, c, n])
    exact = a.double() @ b.double()
    bound = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 1e-3}[rung.units]
    assert float((c.double() - exact).norm() / exact.norm()) <= bound
    assert kernel.registers > 0


@pytest.mark.parametrize("units", ["tf32", "fp16"])
def test_fragments_lie_where_the_interpreter_has_them(units):
    """Integers are exact in tf32 and float16: tensor cores and numpy must agree bit by bit."""
    rung = rungs.tensor_cores() if units == "tf32" else rungs.half()
    n = max(rung.tile)
    random = np.random.default_rng(0)
    a, b = (random.integers(-3, 4, (n, n)).astype(rung.dtype) for _ in range(2))
    c = torch.empty(n, n, dtype=torch.float16 if units == "fp16" else torch.float32, device="cuda")
    kernel = gpu.compiled(rung.text(), "matmul", rung.dynamic * 2)
    kernel(rung.grid(n), rung.block, [*(torch.from_numpy(x).cuda() for x in (a, b)), c, n])
    assert np.array_equal(c.cpu().numpy(), (a.astype(np.float64) @ b).astype(rung.dtype))


@pytest.mark.parametrize("shared", [False, True])
def test_the_convolution_computes_what_the_interpreter_does(shared):
    small = studies.convolution(shared=shared)
    values = np.random.default_rng(0).standard_normal(small.inputs).astype(np.float32)
    output = torch.empty(small.grid[0] * small.block[0], device="cuda")
    kernel = gpu.compiled(small.text(), small.name)
    kernel(small.grid, small.block, [torch.from_numpy(values).cuda(), output, output.numel()])
    np.testing.assert_allclose(output.cpu().numpy(), small.run(values)[1], rtol=1e-6)
    assert kernel.shared_bytes == (520 if shared else 0)


def test_a_row_for_each_rung():
    rows = gpu.ladder_rows(1024, repeats=2, seconds=1.0)
    assert len(rows) == len(rungs.ladder()) + len(our_rungs())
    assert all(row.measured is not None for row in rows)
