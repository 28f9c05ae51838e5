"""The MLP's products with what comes after each of them inside.

Forward: the first is a fused matmul, which leaves both the sum and its activation. Backward: (dy W_out) act'(sum) is
one product on Hopper (the warp-specialised kernel of matmul/pingpong.py, with the sum where C is otherwise added), a
product and a pass elsewhere. The other products are the library's. Biases' gradients are column sums, in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.launch.call import Place, place_of
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.matmul import gradient
from tilemesh.kernels.matmul.config import default, refusal
from tilemesh.kernels.matmul.op import product_and_sum
from tilemesh.kernels.matmul.plan import tiles_plan
from tilemesh.kernels.matmul.problem import Problem
from tilemesh.kernels.matmul.run import matrix_at
from tilemesh.kernels.rows import by_rows

_ROWS, _COLUMNS, _WARPS = 64, 64, 4  # of a block that adds up columns: 32 elements per thread
_STAGES = 3  # of blocks whose loads are in flight at once
_PROGRAMS_INTERPRETED = 3
_PER_MULTIPROCESSOR = 6  # programs that add up columns (of 32768 rows of 3072 on an H200 in 50 µs; 78 with one stage)


@triton.jit
def column_sums(
    x, sums, M, N, x_m, x_n, SPAN,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of COLUMNS columns over SPAN rows, a row of `sums` for each stretch of rows."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * SPAN
    end = tl.minimum(begin + SPAN, M)
    total = tl.zeros((ROWS, COLUMNS), kind)
    for first in tl.range(begin, end, ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        inside = (rows[:, None] < end) & (columns[None, :] < N)
        total += tl.load(x + rows[:, None] * x_m + columns[None, :] * x_n, mask=inside, other=0.0).to(kind)
    tl.store(sums + tl.program_id(1) * N + columns, tl.sum(total, 0), mask=columns < N)


def sums_plan(places: Mapping[str, Place], *, span: int) -> LaunchPlan:
    """Columns over stretches of `span` rows, then the stretches."""
    x = places["x"]
    rows, columns = x.shape
    wide = x.dtype == "float64"
    arguments: dict[str, Argument] = {"x": Pointer("x"), "sums": Pointer("sums"), "M": rows, "N": columns}
    arguments |= {"x_m": x.strides[0], "x_n": x.strides[1], "SPAN": span}
    constants = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "WIDE": wide, "STAGES": 1 if wide else _STAGES}
    grid, parts = (blocks(columns, _COLUMNS), blocks(rows, span)), blocks(rows, span)
    first = Step(f"{__name__}:column_sums", grid, arguments, constants, warps=_WARPS, wide=x.wide)
    last_arguments: dict[str, Argument] = {"sums": Pointer("sums"), "dweight": Pointer("out"), "dbias": None}
    last_arguments |= {"P": parts, "N": columns, "s_v": 0}
    last_constants = {"ROWS": 64, "COLUMNS": 32, "WIDE": wide}
    last = Step("tilemesh.kernels.norm.kernel:add_up", (blocks(columns, 32), 1), last_arguments, last_constants)
    return LaunchPlan((first, last))


def sum_columns(launch: Any, x: Tensor) -> Tensor:
    """The sum over rows, added up in at least float32 and always in the same order."""
    rows, columns = x.shape
    programs = _PROGRAMS_INTERPRETED
    if x.is_cuda:
        programs = _PER_MULTIPROCESSOR * gpu_of(device_index(x.device)).multiprocessors
    stretches = max(1, programs // blocks(columns, _COLUMNS))
    span = blocks(blocks(rows, stretches), _ROWS) * _ROWS
    sums = torch.empty(blocks(rows, span), columns, dtype=accumulator(x.dtype), device=x.device)
    out = torch.empty(columns, dtype=x.dtype, device=x.device)
    launch(sums_plan, {"x": x, "sums": sums, "out": out}, written=("sums", "out"), span=span)
    return out


def slope_problem(places: Mapping[str, Place], activation: str) -> Problem:
    """D = (A @ B) act'(C), of matrices that lie like these."""
    a, b, c, d = (matrix_at(places[name]) for name in "abcd")
    return Problem(a, b, c, d, "full", places["a"].dtype, activation, slope=True)


def slope_plan(places: Mapping[str, Place], *, activation: str, multiprocessors: int) -> LaunchPlan:
    problem = slope_problem(places, activation)
    return tiles_plan(problem, default("pingpong", problem), multiprocessors)


def slope_product(launch: Any, a: Tensor, b: Tensor, before: Tensor, activation: str) -> Tensor:
    """(a @ b) act'(before)."""
    if activation == "none":
        return a @ b
    if a.is_cuda:
        gpu = gpu_of(device_index(a.device))
        out = torch.empty(before.shape, dtype=a.dtype, device=a.device)
        given = {"a": a, "b": b, "c": before, "d": out}
        problem = slope_problem({name: place_of(tensor) for name, tensor in given.items()}, activation)
        if gpu.hopper and refusal(default("pingpong", problem), problem, shared_limit=gpu.shared_bytes) is None:
            launch(slope_plan, given, written=("d",), activation=activation, multiprocessors=gpu.multiprocessors)
            return out
    how = "torch" if a.dtype == torch.float64 else "triton" if a.is_cuda else "interpret"
    return gradient.activation_gradient(a @ b, before, activation, "none", how)[0]


def forward(
    launch: Any, x: Tensor, w_in: Tensor, b_in: Tensor | None, w_out: Tensor, b_out: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    implementation = "auto" if x.is_cuda or x.dtype == torch.float64 else "interpret"
    rows = by_rows(x)
    after, before = product_and_sum(rows, w_in.t(), b_in, activation, implementation)
    y = after @ w_out.t() if b_out is None else torch.addmm(b_out, after, w_out.t())
    shape = x.shape[:-1]
    return y.view(*shape, -1), before.view(*shape, -1), after.view(*shape, -1)


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    x, w_in, b_in, w_out, b_out, activation = arguments
    grad, rows, before, after = by_rows(gradients[0]), by_rows(x), *map(by_rows, kept)
    hidden = slope_product(launch, grad, w_out, before, activation)
    return (
        (hidden @ w_in).view(x.shape),
        hidden.t() @ rows,
        None if b_in is None else sum_columns(launch, hidden),
        grad.t() @ after,
        None if b_out is None else sum_columns(launch, grad),
    )
