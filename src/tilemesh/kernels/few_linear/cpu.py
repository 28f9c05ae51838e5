"""The C functions of `cpu.c` on torch tensors: what a step computes beside attention, on a CPU. Activations are
float32, weights that or bfloat16.

torch lays a weight out anew in each product, which for a few rows takes as long as the product, and starts an operator
for each of a norm's and a gate's passes. Where there is no compiler, there are no such functions.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.c_functions import c_functions
from tilemesh.kernels.few_linear.cost import MOST_ROWS

_ADDRESS, _LONG = ctypes.c_void_p, ctypes.c_long


@functools.cache
def library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | None:
    """The compiled functions for weights of this dtype, float32 or bfloat16; None without Linux and a C compiler."""
    arguments = {
        "few_product": [*[_ADDRESS] * 4, *[_LONG] * 3],
        "gate_rows": [*[_ADDRESS] * 2, *[_LONG] * 2],
        "norm_rows": [*[_ADDRESS] * 5, *[_LONG] * 2, ctypes.c_float],
    }
    return c_functions("few_linear", [Path(__file__).with_name("cpu.c")], arguments, dtype)


def few_product(x_RK: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias of at most MOST_ROWS rows."""
    rows, inputs = x_RK.shape
    if weight.shape[1:] != (inputs,) or rows > MOST_ROWS or not weight.is_contiguous():
        got = f"x {tuple(x_RK.shape)}, weight {tuple(weight.shape)}"
        raise UsageError(f"{got}: expected (R, K) of at most {MOST_ROWS} rows, and (N, K) as it is stored")
    x_RK, y_RN = x_RK.contiguous(), torch.empty(rows, len(weight))
    _loaded(weight.dtype).few_product(
        x_RK.data_ptr(), weight.data_ptr(), _address(bias), y_RN.data_ptr(), rows, len(weight), inputs
    )
    return y_RN


def gate_rows(h_RF: Tensor) -> Tensor:
    """silu of the first half of columns times the second."""
    rows, hidden = h_RF.shape[0], h_RF.shape[1] // 2
    h_RF, y_RF = h_RF.float().contiguous(), torch.empty(rows, hidden)
    _loaded(torch.float32).gate_rows(h_RF.data_ptr(), y_RF.data_ptr(), rows, hidden)
    return y_RF


def norm_rows(x_RD: Tensor, branch_RD: Tensor | None, scale_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + branch, times scale; and that sum."""
    x_RD, branch_RD = x_RD.contiguous(), None if branch_RD is None else branch_RD.contiguous()
    y_RD, total_RD = torch.empty_like(x_RD), x_RD if branch_RD is None else torch.empty_like(x_RD)
    _loaded(scale_D.dtype).norm_rows(
        x_RD.data_ptr(), _address(branch_RD), scale_D.data_ptr(), total_RD.data_ptr(), y_RD.data_ptr(), *x_RD.shape,
        epsilon,
    )  # fmt: skip
    return y_RD, total_RD


def _loaded(dtype: torch.dtype) -> ctypes.CDLL:
    loaded = library(dtype)
    assert loaded is not None
    return loaded


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
