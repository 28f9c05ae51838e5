"""The Triton kernels of softmax, forward and backward, and the plans that launch them.

A row that fits the registers of a block of threads is read once. Of longer ones, up to what one multiprocessor holds,
each program walks over several: the next row is on its way to shared memory while this one is computed. A row that
exceeds that, or whose beginning is not aligned, is read twice: once for its largest element and its sum, then again
from the end, so that what was read last, which the L2 cache still holds, comes first. Nothing is atomic: results repeat
bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.core.cost import short_dtype
from tilemesh.kernels.lanes import LOG2_E, group_of, is_inside, load_lanes, row_sums, scaled, store_lanes, tile_group
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.rows import LONGEST, by_rows, load_stages, rows_config

_HELD_BYTES, _HELD_WARPS = 65536, 32  # of a row that one program holds
_LONGEST_RAGGED = 8192  # columns of a row in one tile, where it begins anywhere
_ONE_WARP, _MANY_PROGRAMS = 256, 8 * 132  # columns of a narrow row, and to how many programs such rows are dealt out
_PROGRAMS_INTERPRETED = 3  # where there is no GPU to fill


@triton.jit
def end_of(rows, N, T, CAUSAL: tl.constexpr):
    """Columns that count: all N or, of query `row % T`, keys up to its own."""
    return rows % T + (N - T) + 1 if CAUSAL else N


@triton.jit
def whole_rows(
    x, y, M, N, T, factor, x_m, x_n, y_m, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, UNSEEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program, each in registers: reads MN, writes MN."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, COLUMNS)[None, :]
    end = end_of(rows, N, T, CAUSAL)
    value = load_lanes(x, rows * x_m, lane, end, x_n, rows < M, UNSEEN, GROUP, True, False).to(kind)
    value = scaled(value, is_inside(rows * x_m, lane, end, GROUP), factor, UNSEEN)
    value = tl.exp2((value - tl.max(value, 1)[:, None]) * LOG2_E)
    value = value / tl.sum(value, 1)[:, None]
    store_lanes(y, rows * y_m, lane, N, rows < M, value, GROUP, True)


@triton.jit
def held_rows(
    x, y, M, N, T, P, factor, x_m, x_n, y_m,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, UNSEEN: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p of P takes every P-th row, while the next ones are on their way: reads MN, writes MN."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    lane = tl.arange(0, COLUMNS)
    for row in tl.range(tl.program_id(0), M, P, num_stages=STAGES):
        end = end_of(row, N, T, CAUSAL)
        value = load_lanes(x, row * x_m, lane, end, x_n, row < M, UNSEEN, 1, True, False).to(kind)
        value = scaled(value, lane < end, factor, UNSEEN)
        value = tl.exp2((value - tl.max(value, 0)) * LOG2_E)
        store_lanes(y, row * y_m, lane, N, row < M, value * (1.0 / tl.sum(value, 0)), 1, True)


@triton.jit
def write_block(
    x, y, start, to, first, end, N, factor, x_n, top, inverse,
    ENDS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, UNSEEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Columns from `first` on of a row whose largest element and sum are known."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    lane = first + tl.arange(0, COLUMNS)
    value = load_lanes(x, start, lane, end, x_n, N > 0, UNSEEN, GROUP, ENDS, True).to(kind)
    value = scaled(value, is_inside(start, lane, end, GROUP), factor, UNSEEN)
    store_lanes(y, to, lane, N, N > 0, tl.exp2((value - top) * LOG2_E) * inverse, GROUP, ENDS)


@triton.jit
def long_row(
    x, y, N, T, factor, x_m, x_n, y_m, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, UNSEEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row per program, in blocks: reads 2 N (about half of the second time from the L2 cache), writes N."""
    row = tl.program_id(0)
    start, to, end = row * x_m, row * y_m, end_of(row, N, T, CAUSAL)
    top, total, _ = row_sums(x, start, end, x_n, factor, 0.0, UNSEEN, False, COLUMNS, GROUP, WIDE)
    inverse = 1.0 / total
    whole = end // COLUMNS * COLUMNS
    for first in range(tl.maximum(whole, COLUMNS), N + GROUP - 1, COLUMNS):
        write_block(x, y, start, to, first, end, N, factor, x_n, top, inverse, True, COLUMNS, GROUP, UNSEEN, WIDE)
    for first in range(COLUMNS, whole, COLUMNS):
        back = whole - first
        write_block(x, y, start, to, back, end, N, factor, x_n, top, inverse, False, COLUMNS, GROUP, UNSEEN, WIDE)
    write_block(x, y, start, to, 0, end, N, factor, x_n, top, inverse, True, COLUMNS, GROUP, UNSEEN, WIDE)


@triton.jit
def load_both(
    y, grad, at_y, at_grad, lane, end, g_n, is_row,
    ENDS: tl.constexpr, AGAIN: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Results, and their gradients: what was masked has none, whatever arrives."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    value = load_lanes(y, at_y, lane, end, 1, is_row, 0.0, GROUP, ENDS, AGAIN).to(kind)
    slope = load_lanes(grad, at_grad, lane, end, g_n, is_row, 0.0, GROUP, ENDS, AGAIN).to(kind)
    return value, tl.where(value == 0.0, 0.0, slope)


@triton.jit
def whole_rows_back(
    grad, y, dx, M, N, T, scale, g_m, g_n, y_m, d_m, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dx = scale * y * (grad - sum(grad * y)), and 0 where nothing counts. Reads 2 MN, writes MN."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, COLUMNS)[None, :]
    end = end_of(rows, N, T, CAUSAL)
    value, slope = load_both(y, grad, rows * y_m, rows * g_m, lane, end, g_n, rows < M, True, False, GROUP, WIDE)
    made = scale * value * (slope - tl.sum(slope * value, 1)[:, None])
    if CAUSAL:
        made = tl.where(is_inside(rows * d_m, lane, end, GROUP), made, 0.0)
    store_lanes(dx, rows * d_m, lane, N, rows < M, made, GROUP, True)


@triton.jit
def write_back(
    grad, y, dx, row, first, end, N, scale, mean, g_m, g_n, y_m, d_m,
    ENDS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of columns from `first` on."""
    lane = first + tl.arange(0, COLUMNS)
    value, slope = load_both(y, grad, row * y_m, row * g_m, lane, end, g_n, N > 0, ENDS, True, GROUP, WIDE)
    made = scale * value * (slope - mean)
    if CAUSAL:
        made = tl.where(is_inside(row * d_m, lane, end, GROUP), made, 0.0)
    store_lanes(dx, row * d_m, lane, N, N > 0, made, GROUP, ENDS)


@triton.jit
def long_row_back(
    grad, y, dx, N, T, scale, g_m, g_n, y_m, d_m,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same for one long row: reads 4 N (about half of the second time from the L2 cache), writes N."""
    row = tl.program_id(0)
    at_y, at_grad, end = row * y_m, row * g_m, end_of(row, N, T, CAUSAL)
    whole = end // COLUMNS * COLUMNS
    lane = tl.arange(0, COLUMNS)
    value, slope = load_both(y, grad, at_y, at_grad, lane, end, g_n, N > 0, True, False, GROUP, WIDE)
    total = value * slope
    for first in range(COLUMNS, whole, COLUMNS):
        value, slope = load_both(y, grad, at_y, at_grad, first + lane, end, g_n, N > 0, False, False, GROUP, WIDE)
        total += value * slope
    rest = tl.maximum(whole, COLUMNS)
    for first in range(rest, end + GROUP - 1, COLUMNS):
        value, slope = load_both(y, grad, at_y, at_grad, first + lane, end, g_n, N > 0, True, False, GROUP, WIDE)
        total += value * slope
    mean = tl.sum(total, 0)
    for first in range(rest, N + GROUP - 1, COLUMNS):
        write_back(grad, y, dx, row, first, end, N, scale, mean, g_m, g_n, y_m, d_m, True, COLUMNS, GROUP, CAUSAL, WIDE)
    for first in range(COLUMNS, whole, COLUMNS):
        back = whole - first
        write_back(grad, y, dx, row, back, end, N, scale, mean, g_m, g_n, y_m, d_m, False, COLUMNS, GROUP, False, WIDE)
    write_back(grad, y, dx, row, 0, end, N, scale, mean, g_m, g_n, y_m, d_m, True, COLUMNS, GROUP, CAUSAL, WIDE)


def forward_plan(
    places: Mapping[str, Place], *, scale: float, causal: bool, queries: int, programs: int, shared_bytes: int
) -> LaunchPlan:
    """programs: that walk over rows too long for `whole_rows`, one per multiprocessor, each with its shared memory."""
    x, y = places["x"], places["y"]
    m, n = x.shape
    arguments: dict[str, Argument] = {
        "x": Pointer("x"), "y": Pointer("y"), "N": n, "T": queries, "factor": float(scale),
        "x_m": x.strides[0], "x_n": x.strides[1], "y_m": y.strides[0],
    }  # fmt: skip
    unseen = math.copysign(math.inf, -scale) if scale else 0.0  # which becomes -inf when multiplied
    constants: dict[str, object] = {"CAUSAL": causal, "UNSEEN": unseen, "WIDE": x.dtype == "float64"}
    wide = x.wide or y.wide
    group, columns = group_of(x, y), triton.next_power_of_2(n)
    if n <= (LONGEST if group == 1 else _LONGEST_RAGGED):
        return _tile_plan("whole_rows", arguments | {"M": m}, constants | {"GROUP": tile_group(x, y)}, (m, n), wide)
    stage = columns * short_dtype(x.dtype)[1]
    if stage <= _HELD_BYTES and group == 1:
        walking = min(m, programs)
        arguments |= {"M": m, "P": walking}
        constants |= {"COLUMNS": columns, "STAGES": load_stages(stage, shared_bytes)}
        step = Step(f"{__name__}:held_rows", (walking, 1), arguments, constants, warps=_HELD_WARPS, wide=wide)
        return LaunchPlan((step,))
    block = _block_of(n, 8192)
    constants |= {"GROUP": group, "COLUMNS": block}
    return LaunchPlan((Step(f"{__name__}:long_row", (m, 1), arguments, constants, warps=block // 256, wide=wide),))


def _block_of(columns: int, most: int) -> int:
    """Columns of a block of a row that is read twice: several blocks lie between the two with its ends (measured on an
    H200, both passes: 13396 rows of 10019 in 380 µs with 2048, 885 with 8192)."""
    return 2048 if columns <= LONGEST else min(most, 4096 if columns <= 2 * LONGEST else 8192)


def _tile_plan(
    kernel: str, arguments: Mapping[str, Argument], constants: Mapping[str, object], size: tuple[int, int], wide: bool
) -> LaunchPlan:
    """Rows that one tile holds."""
    rows, warps = rows_config(size[1])
    spread = max(64 // triton.next_power_of_2(size[1]), triton.next_power_of_2(blocks(size[0], _MANY_PROGRAMS)))
    if size[1] <= _ONE_WARP and spread < rows:  # few rows are dealt out, so that no sum crosses warps
        rows, warps = max(1, spread), 1
    elif kernel == "whole_rows_back" and constants["GROUP"] != 1 and size[1] <= 1024:
        warps = 1  # 100000 rows of 333, both passes: 124 µs, else 138
    own = {**constants, "ROWS": rows, "COLUMNS": triton.next_power_of_2(size[1])}
    step = Step(f"{__name__}:{kernel}", (blocks(size[0], rows), 1), arguments, own, warps=warps, wide=wide)
    return LaunchPlan((step,))


def backward_plan(places: Mapping[str, Place], *, scale: float, causal: bool, queries: int) -> LaunchPlan:
    grad, y, dx = (places[name] for name in ("grad", "y", "dx"))
    m, n = y.shape
    arguments: dict[str, Argument] = {name: Pointer(name) for name in places}
    arguments |= {
        "N": n, "T": queries, "scale": float(scale), "g_m": grad.strides[0], "g_n": grad.strides[1],
        "y_m": y.strides[0], "d_m": dx.strides[0],
    }  # fmt: skip
    constants: dict[str, object] = {"CAUSAL": causal, "WIDE": y.dtype == "float64"}
    wide = any(place.wide for place in places.values())
    group = group_of(grad, y, dx)
    if n <= (LONGEST if group == 1 else _LONGEST_RAGGED):
        constants |= {"GROUP": tile_group(grad, y, dx)}
        return _tile_plan("whole_rows_back", arguments | {"M": m}, constants, (m, n), wide)
    block = _block_of(n, 4096)
    constants |= {"GROUP": group, "COLUMNS": block}
    return LaunchPlan((Step(f"{__name__}:long_row_back", (m, 1), arguments, constants, warps=block // 256, wide=wide),))


def forward(launch: Any, x: Tensor, scale: float, causal: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    queries = x.shape[-2] if causal else 1
    programs, shared_bytes = _PROGRAMS_INTERPRETED, 0
    if x.shape[-1] > LONGEST and x.device.type == "cuda":
        gpu = gpu_of(device_index(x.device))
        programs, shared_bytes = gpu.multiprocessors, gpu.shared_bytes
    launch(
        forward_plan, {"x": by_rows(x), "y": by_rows(y)}, written=("y",), scale=float(scale), causal=causal,
        queries=queries, programs=programs, shared_bytes=shared_bytes,
    )  # fmt: skip
    return y


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> Tensor:
    _, scale, causal = arguments
    (y,) = kept
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    given = {"grad": by_rows(gradients[0]), "y": by_rows(y), "dx": by_rows(dx)}
    queries = y.shape[-2] if causal else 1
    launch(backward_plan, given, written=("dx",), scale=float(scale), causal=causal, queries=queries)
    return dx
