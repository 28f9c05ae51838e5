"""The Triton kernels of grouped products, forward and both gradients, and the plans that launch them.

A program finds its group on the device: each group takes as many tiles of rows as it needs, so there are at most
rows / tile + groups of them, and the programs beyond have nothing to do. Tiles are copied by TMA; one at the end of a
group also brings rows of the next, which are not written, and in the gradient of weights count 0.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.steps import Argument, Descriptor, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.launch.tensors import for_tma

_TILES = 8  # of rows that take their turns with the tiles of outputs: their weights stay in the L2


@triton.jit
def turn(tiles_m, tiles_n, TILES: tl.constexpr):
    """Which tile of rows and which of columns a program has: neighbours share weights and rows."""
    number = tl.program_id(0)
    first = number // (TILES * tiles_n) * TILES
    height = tl.minimum(tiles_m - first, TILES)
    within = number % (TILES * tiles_n)
    return first + within % height, within // height


@triton.jit
def rows_of(ends, X, tile_m, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The group of a tile of rows, or X; its first row here, and where the group ends."""
    groups = tl.arange(0, GROUPS)
    known = groups < X
    stop = tl.load(ends + groups, mask=known, other=0)
    start = tl.load(ends + groups - 1, mask=known & (groups > 0), other=0)
    tiles = (stop - start + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, 0)
    group = tl.sum(((after <= tile_m) & known).to(tl.int32), 0)
    mine = groups == group
    before = tl.sum(tl.where(mine, after - tiles, 0), 0)
    first = tl.sum(tl.where(mine, start, 0), 0) + (tile_m - before) * BLOCK_M
    return group, first, tl.sum(tl.where(mine, stop, 0), 0)


@triton.jit
def rows_pass(
    x, w, ends, y, X, N, K, tiles_m, tiles_n, HIGH, y_m,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr,
    TURNED: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of a group by BLOCK_N of the N results, over K columns. HIGH: rows of one group's matrix, which is
    (N, K), or TURNED (K, N). EVEN: BLOCK_K divides K."""
    tile_m, tile_n = turn(tiles_m, tiles_n, TILES)
    group, first, stop = rows_of(ends, X, tile_m, GROUPS, BLOCK_M)
    if group < X:
        column = tile_n * BLOCK_N
        made = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            rows = x.load([first, k])
            if TURNED:
                weight = w.load([group * HIGH + k, column])
                if not EVEN:  # below this group's matrix lies the next one's
                    inside = k + tl.arange(0, BLOCK_K) < K
                    weight = tl.where(inside[:, None], weight, 0.0)
            else:
                weight = w.load([group * HIGH + column, k]).T
            if UPCAST:
                rows, weight = rows.to(tl.float32), weight.to(tl.float32)
            made = tl.dot(rows, weight, made)
        row = first + tl.arange(0, BLOCK_M)
        at = column + tl.arange(0, BLOCK_N)
        inside = (row < stop)[:, None] & (at < N)[None, :]
        tl.store(y + row[:, None].to(tl.int64) * y_m + at[None, :], made.to(y.dtype.element_ty), mask=inside)


@triton.jit
def weights_pass(
    grad, x, ends, dw, N, K, tiles_n, tiles_k, d_g, d_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of one group's gradient: grad^T x over the group's rows, zeros where it has none."""
    group = tl.program_id(1)
    row0 = tl.program_id(0) // tiles_k * BLOCK_N
    column = tl.program_id(0) % tiles_k * BLOCK_K
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)
    made = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    whole = start + (stop - start) // BLOCK_M * BLOCK_M
    for row in range(start, whole, BLOCK_M):
        above, rows = grad.load([row, row0]), x.load([row, column])
        if UPCAST:
            above, rows = above.to(tl.float32), rows.to(tl.float32)
        made = tl.dot(above.T, rows, made)
    if whole < stop:  # the rows after them are another group's
        inside = whole + tl.arange(0, BLOCK_M) < stop
        above = tl.where(inside[:, None], grad.load([whole, row0]), 0.0)
        rows = tl.where(inside[:, None], x.load([whole, column]), 0.0)
        if UPCAST:
            above, rows = above.to(tl.float32), rows.to(tl.float32)
        made = tl.dot(above.T, rows, made)
    at_n, at_k = row0 + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_K)
    to = dw + group.to(tl.int64) * d_g + at_n[:, None].to(tl.int64) * d_n + at_k[None, :]
    tl.store(to, made.to(dw.dtype.element_ty), mask=(at_n < N)[:, None] & (at_k < K)[None, :])


def rows_plan(places: Mapping[str, Place], *, groups: int, turned: bool, interpreted: bool = False) -> LaunchPlan:
    """y = x w^T, or where the matrices are turned x w. `w`: those of all groups under one another."""
    x, w, y = places["x"], places["w"], places["y"]
    (rows, inner), outputs, high = x.shape, y.shape[1], w.shape[0] // groups
    m, n, k = (16, 16, 16) if interpreted else (128, 256 if outputs >= 1024 else 128, 64)
    m = m if interpreted or rows >= 64 * groups else 64
    tiles_m, tiles_n = blocks(rows, m) + groups, blocks(outputs, n)
    arguments: dict[str, Argument] = {
        "x": Descriptor("x", x.shape, x.strides, (m, k)),
        "w": Descriptor("w", w.shape, w.strides, (k, n) if turned else (n, k)),
        "ends": Pointer("ends"), "y": Pointer("y"), "X": groups, "N": outputs, "K": inner, "tiles_m": tiles_m,
        "tiles_n": tiles_n, "HIGH": high, "y_m": y.strides[0],
    }  # fmt: skip
    constants = {
        "GROUPS": triton.next_power_of_2(groups), "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "TILES": _TILES,
        "TURNED": turned, "EVEN": inner % k == 0, "UPCAST": interpreted,
    }  # fmt: skip
    step = Step(
        f"{__name__}:rows_pass", (tiles_m * tiles_n, 1), arguments, constants, warps=8, stages=3, wide=w.wide,
        varying=("tiles_m",),
    )  # fmt: skip
    return LaunchPlan((step,))


def weights_plan(places: Mapping[str, Place], *, interpreted: bool = False) -> LaunchPlan:
    grad, x, dw = places["grad"], places["x"], places["dw"]
    groups, outputs, inputs = dw.shape
    m, n, k = (16, 16, 16) if interpreted else (64, 128, 256 if inputs >= 1024 else 128)
    tiles_n, tiles_k = blocks(outputs, n), blocks(inputs, k)
    arguments: dict[str, Argument] = {
        "grad": Descriptor("grad", grad.shape, grad.strides, (m, n)),
        "x": Descriptor("x", x.shape, x.strides, (m, k)),
        "ends": Pointer("ends"), "dw": Pointer("dw"), "N": outputs, "K": inputs, "tiles_n": tiles_n,
        "tiles_k": tiles_k, "d_g": dw.strides[0], "d_n": dw.strides[1],
    }  # fmt: skip
    constants = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "UPCAST": interpreted}
    step = Step(
        f"{__name__}:weights_pass", (tiles_n * tiles_k, groups), arguments, constants, warps=8, stages=3, wide=dw.wide
    )
    return LaunchPlan((step,))


def interpreted_rows_plan(places: Mapping[str, Place], *, groups: int, turned: bool) -> LaunchPlan:
    """In the interpreter, products of 16-bit numbers are taken in float32, and tiles are small."""
    return rows_plan(places, groups=groups, turned=turned, interpreted=True)


def interpreted_weights_plan(places: Mapping[str, Place]) -> LaunchPlan:
    return weights_plan(places, interpreted=True)


def forward(launch: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _rows(launch, x, weight, ends, turned=False)


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, None]:
    (grad,), (x, weight, ends) = gradients, arguments
    dx = _rows(launch, grad, weight, ends, turned=True)
    dw = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    given = {"grad": for_tma(grad), "x": for_tma(x), "ends": ends, "dw": dw}
    launch(interpreted_weights_plan if x.device.type == "cpu" else weights_plan, given, written=("dw",))
    return dx, dw, None


def _rows(launch: Any, x: Tensor, weight: Tensor, ends: Tensor, *, turned: bool) -> Tensor:
    groups, outputs = len(weight), weight.shape[2 if turned else 1]
    y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    given = {"x": for_tma(x), "w": for_tma(weight.flatten(0, 1)), "ends": ends, "y": y}
    plan = interpreted_rows_plan if x.device.type == "cpu" else rows_plan
    launch(plan, given, written=("y",), groups=groups, turned=turned)
    return y
