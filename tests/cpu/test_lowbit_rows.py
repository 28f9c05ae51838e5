"""The kernel of 4-bit codes times some rows, under Triton's interpreter; its machine code is for GPUs."""

import pytest
import torch

from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.launch import call
from tilemesh.kernels.lowbit.codes import pack, quantize
from tilemesh.kernels.lowbit.formats import FORMATS, Scheme
from tilemesh.kernels.lowbit_linear import some_rows
from tilemesh.kernels.lowbit_linear.reference import error_bound, exact


@pytest.mark.parametrize(
    ("count", "outputs", "inputs", "group", "split"), [(20, 200, 512, 256, 2), (5, 64, 256, 128, 1)]
)
def test_some_rows_are_within_their_bound(count, outputs, inputs, group, split):
    generator = torch.Generator().manual_seed(3)
    made = quantize(torch.randn(outputs, inputs, generator=generator), Scheme("int4", "group", group))
    x = torch.randn(count, inputs, generator=generator)
    given = (x, pack(made.codes, FORMATS["int4"]), made.scales.contiguous())
    y = torch.full((count, outputs), torch.nan)
    some_rows.product(call.interpreted, *given, y, some_rows.SomeRows(32, 64, 4, 3, split))
    assert excess(y, exact(*given), error_bound(*given)) is None
