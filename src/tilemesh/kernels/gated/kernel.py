"""The Triton kernels of act(gate) * x, forward and backward, and the plans that launch them.

A program owns ROWS x COLUMNS elements. Backward reads gate, x and y's gradient and writes both gradients: nothing is
kept of the forward pass, since the activation costs less than reading it.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.activations.kernel import activate, slope
from tilemesh.kernels.gated.reference import GELUS
from tilemesh.kernels.launch.call import Place, one_launch
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, blocks
from tilemesh.kernels.rows import by_rows

_ELEMENTS = 2048  # of a program: 16 per thread, two loads of 16 bytes per tensor in 16-bit precision


@triton.jit
def tile(M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of this program's block, and which of them are inside."""
    across = (N + COLUMNS - 1) // COLUMNS
    rows = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    return rows[:, None], columns[None, :], (rows[:, None] < M) & (columns[None, :] < N)


@triton.jit
def forward_pass(
    gate, x, y, M, N, a_m, a_n, x_m, x_n, y_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Reads 2 MN, writes MN."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows, columns, inside = tile(M, N, ROWS, COLUMNS)
    opened = activate(tl.load(gate + rows * a_m + columns * a_n, mask=inside, other=0.0).to(kind), ACTIVATION)
    value = tl.load(x + rows * x_m + columns * x_n, mask=inside, other=0.0).to(kind)
    tl.store(y + rows * y_m + columns, (opened * value).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_pass(
    grad, gate, x, dgate, dx, M, N, g_m, g_n, a_m, a_n, x_m, x_n, d_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Reads 3 MN, writes 2 MN."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows, columns, inside = tile(M, N, ROWS, COLUMNS)
    before = tl.load(gate + rows * a_m + columns * a_n, mask=inside, other=0.0).to(kind)
    value = tl.load(x + rows * x_m + columns * x_n, mask=inside, other=0.0).to(kind)
    above = tl.load(grad + rows * g_m + columns * g_n, mask=inside, other=0.0).to(kind)
    of_gate = above * value * slope(before, ACTIVATION)
    tl.store(dgate + rows * d_m + columns, of_gate.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dx + rows * d_m + columns, (above * activate(before, ACTIVATION)).to(dx.dtype.element_ty), mask=inside)


def forward_plan(places: Mapping[str, Place], *, activation: str) -> LaunchPlan:
    gate, x, y = (places[name] for name in ("gate", "x", "y"))
    strides: dict[str, Argument] = {
        "a_m": gate.strides[0], "a_n": gate.strides[1], "x_m": x.strides[0], "x_n": x.strides[1], "y_m": y.strides[0],
    }  # fmt: skip
    return _plan("forward_pass", places, strides, activation)


def backward_plan(places: Mapping[str, Place], *, activation: str) -> LaunchPlan:
    grad, gate, x, dx = (places[name] for name in ("grad", "gate", "x", "dx"))
    strides: dict[str, Argument] = {
        "g_m": grad.strides[0], "g_n": grad.strides[1], "a_m": gate.strides[0], "a_n": gate.strides[1],
        "x_m": x.strides[0], "x_n": x.strides[1], "d_m": dx.strides[0],
    }  # fmt: skip
    return _plan("backward_pass", places, strides, activation)


def _plan(kernel: str, places: Mapping[str, Place], strides: dict[str, Argument], activation: str) -> LaunchPlan:
    m, n = places["x"].shape
    columns = min(1024, triton.next_power_of_2(n))
    rows = _ELEMENTS // columns
    constants = {"ROWS": rows, "COLUMNS": columns, "ACTIVATION": activation, "WIDE": places["x"].dtype == "float64"}
    grid = (blocks(m, rows) * blocks(n, columns), 1)
    return one_launch(f"{__name__}:{kernel}", grid, places, {**strides, "M": m, "N": n}, constants)


class Gated:
    """One of the operators, by its activation; geglu's is an argument."""

    def __init__(self, activation: str | None = None) -> None:
        self.activation = activation

    def _activation(self, options: tuple[str, ...]) -> str:
        return self.activation or GELUS[options[0]]

    def forward(self, launch: Any, gate: Tensor, x: Tensor, *options: str) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        given = {"gate": _rows(gate), "x": _rows(x), "y": _rows(y)}
        launch(forward_plan, given, written=("y",), activation=self._activation(options))
        return y

    def backward(
        self, launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        gate, x, *options = arguments
        dgate, dx = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        given = {
            "grad": _rows(gradients[0]), "gate": _rows(gate), "x": _rows(x), "dgate": _rows(dgate), "dx": _rows(dx),
        }  # fmt: skip
        launch(backward_plan, given, written=("dgate", "dx"), activation=self._activation(tuple(options)))
        return dgate, dx


def _rows(tensor: Tensor) -> Tensor:
    return by_rows(tensor) if tensor.dim() else tensor.view(1, 1)


SWIGLU, GEGLU = Gated("silu"), Gated()
