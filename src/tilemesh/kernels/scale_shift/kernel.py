"""The Triton kernels of y = act(x * scale + shift), forward and backward, and the plans that launch them.

A program owns ROWS x COLUMNS elements. Backward leaves the two vectors' gradients as one partial row per row of blocks,
summed afterwards in a fixed order: nothing is atomic, so results repeat bit by bit.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.activations.kernel import activate, slope
from tilemesh.kernels.launch.call import Place, one_launch
from tilemesh.kernels.launch.steps import LaunchPlan, blocks

ROWS, COLUMNS = 4, 512
TALL, NARROW = 32, 64  # of the backward pass: fewer partial rows to add afterwards


@triton.jit
def tile(M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of this program's block, and which of them are inside."""
    across = (N + COLUMNS - 1) // COLUMNS
    rows = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    return rows, columns, (rows[:, None] < M) & (columns[None, :] < N)


@triton.jit
def forward_pass(
    x, scale, shift, y, M, N, x_m, x_n, a_n, b_n, y_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Reads MN, writes MN."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows, columns, inside = tile(M, N, ROWS, COLUMNS)
    a = tl.load(scale + columns * a_n, mask=columns < N, other=0.0).to(kind)[None, :]
    b = tl.load(shift + columns * b_n, mask=columns < N, other=0.0).to(kind)[None, :]
    value = tl.load(x + rows[:, None] * x_m + columns[None, :] * x_n, mask=inside, other=0.0).to(kind)
    value = activate(value * a + b, ACTIVATION)
    tl.store(y + rows[:, None] * y_m + columns[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_pass(
    grad, x, scale, shift, dx, sums, M, N, g_m, g_n, x_m, x_n, a_n, b_n, d_m, s_r, s_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dx, and the sums over this block's rows for scale and shift. Reads 2 MN, writes MN."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows, columns, inside = tile(M, N, ROWS, COLUMNS)
    a = tl.load(scale + columns * a_n, mask=columns < N, other=0.0).to(kind)[None, :]
    b = tl.load(shift + columns * b_n, mask=columns < N, other=0.0).to(kind)[None, :]
    value = tl.load(x + rows[:, None] * x_m + columns[None, :] * x_n, mask=inside, other=0.0).to(kind)
    dz = tl.load(grad + rows[:, None] * g_m + columns[None, :] * g_n, mask=inside, other=0.0).to(kind)
    if ACTIVATION != "none":
        total = value * a + b
        steep = slope(total, ACTIVATION)
        dz = tl.where(steep == 0.0, 0.0, dz * steep)
    tl.store(dx + rows[:, None] * d_m + columns[None, :], (dz * a).to(dx.dtype.element_ty), mask=inside)
    part = sums + tl.program_id(0) // ((N + COLUMNS - 1) // COLUMNS) * s_r + columns
    tl.store(part, tl.sum(dz * value, 0), mask=columns < N)
    tl.store(part + s_p, tl.sum(dz, 0), mask=columns < N)


def forward_plan(places: Mapping[str, Place], *, activation: str) -> LaunchPlan:
    x, scale, shift, y = (places[name] for name in ("x", "scale", "shift", "y"))
    m, n = x.shape
    numbers = {
        "M": m, "N": n, "x_m": x.strides[0], "x_n": x.strides[1], "a_n": scale.strides[0], "b_n": shift.strides[0],
        "y_m": y.strides[0],
    }  # fmt: skip
    constants = {"ROWS": ROWS, "COLUMNS": COLUMNS, "ACTIVATION": activation, "WIDE": x.dtype == "float64"}
    grid = (blocks(m, ROWS) * blocks(n, COLUMNS), 1)
    return one_launch(f"{__name__}:forward_pass", grid, places, numbers, constants)


def backward_plan(places: Mapping[str, Place], *, activation: str) -> LaunchPlan:
    grad, x, scale, shift, dx, sums = (places[name] for name in ("grad", "x", "scale", "shift", "dx", "sums"))
    m, n = x.shape
    numbers = {
        "M": m, "N": n, "g_m": grad.strides[0], "g_n": grad.strides[1], "x_m": x.strides[0], "x_n": x.strides[1],
        "a_n": scale.strides[0], "b_n": shift.strides[0], "d_m": dx.strides[0],
        "s_r": sums.strides[1], "s_p": sums.strides[0],
    }  # fmt: skip
    constants = {"ROWS": TALL, "COLUMNS": NARROW, "ACTIVATION": activation, "WIDE": x.dtype == "float64"}
    grid = (blocks(m, TALL) * blocks(n, NARROW), 1)
    return one_launch(f"{__name__}:backward_pass", grid, places, numbers, constants)


def forward(launch: Any, x: Tensor, scale: Tensor, shift: Tensor, activation: str) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = x.shape[-1]
    given = {"x": x.reshape(-1, columns), "scale": scale, "shift": shift, "y": y.view(-1, columns)}
    launch(forward_plan, given, written=("y",), activation=activation)
    return y


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    x, scale, shift, activation = arguments
    columns = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, columns)
    sums_dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    sums = torch.empty(2, blocks(rows.shape[0], TALL), columns, dtype=sums_dtype, device=x.device)
    given = {
        "grad": gradients[0].reshape(-1, columns), "x": rows, "scale": scale, "shift": shift,
        "dx": dx.view(-1, columns), "sums": sums,
    }  # fmt: skip
    launch(backward_plan, given, written=("dx", "sums"), activation=activation)
    dscale, dshift = sums.sum(1).to(x.dtype)
    return dx, dscale, dshift
