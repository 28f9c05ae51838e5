"""The Triton kernels of RMSNorm and LayerNorm, with and without an addition before, and the plans that launch them.

Forward holds whole rows in registers. Backward runs as few programs as the GPU has multiprocessors (or twice as many):
each walks over rows, keeps the vectors' gradients in registers on the way, and writes them once; a second launch adds
those partial sums up in a fixed order. Where rows are too long for registers to hold those gradients, a pass of its own
over blocks of columns sums them; rows too long for registers altogether are read twice, the second time from the L2
cache. Nothing is atomic: results repeat bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.core.cost import short_dtype
from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.lanes import (
    LONGEST_PERIOD,
    columns_of,
    group_of,
    is_inside,
    load_lanes,
    period_of,
    store_lanes,
    tile_group,
)
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.steps import Argument, Buffer, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.rows import by_rows, load_stages

_PROGRAMS_INTERPRETED = 3  # of the backward pass, where there is no GPU to fill
LONGEST_FORWARD, LONGEST_ALONE, LONGEST_SUMMED = 32768, 16384, 8192
"""Columns of the longest rows that registers hold: forward, backward, and backward with both vectors' gradients; of
float64 half as many."""
LONGEST_INVARIANT = 16384  # columns of the longest rows whose forward pass is the same beside any number of others
_LONG_BLOCK = 2048  # columns of a longer row at once
_ONE_LANE_EACH = 32  # columns of the longest row of which a lane has one, whatever aligns it
_ONE_WARP = 256  # columns of the longest row that one warp takes, so that no sum crosses warps
_ONE_PROGRAM = 2048  # elements of the backward pass that one program takes alone
_FEW_ROWS, _FEW_ROWS_BACK = 264, 128  # of which several programs share each, where they are long
_FEW_TILE = (16, 128)  # rows and columns of a tile of their gradients
_SUMMED_COLUMNS, _SUMMED_ROWS = 256, 64  # of a program that sums the vectors' gradients, at the least
_SUMS_SHARE = 8  # such programs of a multiprocessor
_MANY_PROGRAMS = 132  # enough for any GPU: rows are dealt out to as many, if there are so many


@triton.jit
def forward_pass(
    x, residual, weight, bias, y, total, root, mean, M, N, eps,
    x_m, x_n, r_m, r_n, w_n, b_n, y_m, t_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr, PERIOD: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program, PERIOD apart, so that all begin alike. Reads MN (2 MN with a residual), writes as much."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    first = tl.program_id(0) % PERIOD
    rows = first + PERIOD * (tl.program_id(0) // PERIOD * ROWS + tl.arange(0, ROWS))
    lanes = tl.arange(0, COLUMNS)
    columns, in_row = columns_of(first * x_m, lanes, GROUP), is_inside(first * x_m, lanes, N, GROUP)
    lane, is_row = lanes[None, :], rows[:, None] < M
    value = load_lanes(x, rows[:, None] * x_m, lane, N, x_n, is_row, 0.0, GROUP, True, False).to(kind)
    if residual is not None:
        more = load_lanes(residual, rows[:, None] * r_m, lane, N, r_n, is_row, 0.0, GROUP, True, False)
        # The norm is of the sum as it is stored, which is what backward reads.
        stored = (more.to(kind) + value).to(total.dtype.element_ty)
        store_lanes(total, rows[:, None] * t_m, lane, N, is_row, stored, GROUP, True)
        value = stored.to(kind)
    if CENTRED:
        middle = tl.sum(value, 1) / N
        if mean is not None:
            tl.store(mean + rows, middle, mask=rows < M)
        value = tl.where(is_row & in_row[None, :], value - middle[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / N + eps)
    if root is not None:
        tl.store(root + rows, inverse, mask=rows < M)
    value = value * inverse[:, None]
    if weight is not None:
        value = value * tl.load(weight + columns * w_n, mask=in_row, other=0.0).to(kind)[None, :]
    if bias is not None:
        value = value + tl.load(bias + columns * b_n, mask=in_row, other=0.0).to(kind)[None, :]
    store_lanes(y, rows[:, None] * y_m, lane, N, is_row, value, GROUP, True)


@triton.jit
def add_block(
    x, residual, total, row, block, N, x_m, x_n, r_m, r_n, t_m, middle, squares,
    ENDS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """With a block of a row: each lane's mean and squares of its elements (Welford)."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    start, offsets = row * x_m, tl.arange(0, COLUMNS)
    lane = block * COLUMNS + offsets
    value = load_lanes(x, start, lane, N, x_n, N > 0, 0.0, GROUP, ENDS, False).to(kind)
    if residual is not None:
        more = load_lanes(residual, row * r_m, lane, N, r_n, N > 0, 0.0, GROUP, ENDS, False)
        stored = (more.to(kind) + value).to(total.dtype.element_ty)
        store_lanes(total, row * t_m, lane, N, N > 0, stored, GROUP, ENDS)
        value = stored.to(kind)
    if CENTRED:
        # Lanes before the row's beginning miss the first block.
        one = tl.full([], 1.0, kind)
        share = one / (block + 1)
        if GROUP != 1:
            share = tl.where(offsets < start % GROUP, one / tl.maximum(block, 1), share)
        change = value - middle
        if ENDS:
            change = tl.where(is_inside(start, lane, N, GROUP), change, 0.0)
        middle += change * share
        apart = value - middle
        if ENDS:
            apart = tl.where(is_inside(start, lane, N, GROUP), apart, 0.0)
        squares += change * apart
    else:
        squares += value * value
    return middle, squares


@triton.jit
def write_block(
    source, weight, bias, y, row, block, N, s_m, s_n, w_n, b_n, y_m, centre, inverse,
    ENDS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A block of a row whose mean and root are known; `source`: what is normalised."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    start, lane = row * s_m, block * COLUMNS + tl.arange(0, COLUMNS)
    value = load_lanes(source, start, lane, N, s_n, N > 0, 0.0, GROUP, ENDS, True).to(kind)
    columns = columns_of(start, lane, GROUP)
    inside = (columns >= 0) & (columns < N)
    if CENTRED:
        value = value - centre
    value = value * inverse
    if weight is not None:
        value = value * tl.load(weight + columns * w_n, mask=inside, other=0.0).to(kind)
    if bias is not None:
        value = value + tl.load(bias + columns * b_n, mask=inside, other=0.0).to(kind)
    store_lanes(y, row * y_m, lane, N, N > 0, value, GROUP, ENDS)


@triton.jit
def long_forward(
    x, residual, weight, bias, y, total, root, mean, M, N, eps,
    x_m, x_n, r_m, r_n, w_n, b_n, y_m, t_m,
    COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One row per program, in blocks, of which the first and the last have its ends. Welford's way, since a sum of
    squares less a squared sum would lose the digits that the elements share."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0)
    middle = tl.zeros((COLUMNS,), kind)
    squares = tl.zeros((COLUMNS,), kind)
    whole, count = N // COLUMNS, (N + GROUP - 1 + COLUMNS - 1) // COLUMNS
    middle, squares = add_block(
        x, residual, total, row, 0, N, x_m, x_n, r_m, r_n, t_m, middle, squares, True, COLUMNS, CENTRED, WIDE, GROUP
    )
    for block in range(1, whole):
        middle, squares = add_block(
            x, residual, total, row, block, N, x_m, x_n, r_m, r_n, t_m, middle, squares,
            False, COLUMNS, CENTRED, WIDE, GROUP,
        )  # fmt: skip
    for block in range(tl.maximum(whole, 1), count):
        middle, squares = add_block(
            x, residual, total, row, block, N, x_m, x_n, r_m, r_n, t_m, middle, squares,
            True, COLUMNS, CENTRED, WIDE, GROUP,
        )  # fmt: skip
    centre = tl.sum(middle, 0) * 0.0
    if CENTRED:
        offsets, shift = tl.arange(0, COLUMNS), row * x_m % GROUP
        number = (N + shift - 1 - offsets + COLUMNS) // COLUMNS - tl.where(offsets < shift, 1, 0)
        number = number.to(kind)
        centre = tl.sum(middle * number, 0) / N
        squares += number * (middle - centre) * (middle - centre)
        if mean is not None:
            tl.store(mean + row, centre)
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / N + eps)
    if root is not None:
        tl.store(root + row, inverse)
    source, s_m, s_n = x, x_m, x_n
    if residual is not None:
        tl.debug_barrier()  # the sum is read by other threads than wrote it
        source, s_m, s_n = total, t_m, 1
    for block in range(tl.maximum(whole, 1), count):
        write_block(
            source, weight, bias, y, row, block, N, s_m, s_n, w_n, b_n, y_m, centre, inverse,
            True, COLUMNS, CENTRED, WIDE, GROUP,
        )  # fmt: skip
    for block in range(1, whole):
        write_block(
            source, weight, bias, y, row, whole - block, N, s_m, s_n, w_n, b_n, y_m, centre, inverse,
            False, COLUMNS, CENTRED, WIDE, GROUP,
        )  # fmt: skip
    write_block(
        source, weight, bias, y, row, 0, N, s_m, s_n, w_n, b_n, y_m, centre, inverse,
        True, COLUMNS, CENTRED, WIDE, GROUP,
    )  # fmt: skip


@triton.jit
def part_counts(start, N, PARTS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """How many elements each part of a row has; a part is COLUMNS lanes."""
    parts, shift = tl.arange(0, SIZE), start % GROUP
    begin = tl.maximum(parts * COLUMNS - shift, 0)
    return tl.where(parts < PARTS, tl.maximum(tl.minimum((parts + 1) * COLUMNS - shift, N) - begin, 0), 0)


@triton.jit
def part_sums(
    x, residual, total, parts, N, x_m, x_n, r_m, r_n, t_m,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of few long rows: a part's mean and the squares around it. Grid: (rows, parts)."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row, part = tl.program_id(0), tl.program_id(1)
    start, lane = row * x_m, part * COLUMNS + tl.arange(0, COLUMNS)
    value = load_lanes(x, start, lane, N, x_n, N > 0, 0.0, GROUP, True, False).to(kind)
    if residual is not None:
        more = load_lanes(residual, row * r_m, lane, N, r_n, N > 0, 0.0, GROUP, True, False)
        stored = (more.to(kind) + value).to(total.dtype.element_ty)
        store_lanes(total, row * t_m, lane, N, N > 0, stored, GROUP, True)
        value = stored.to(kind)
    inside = is_inside(start, lane, N, GROUP)
    middle = 0.0
    if CENTRED:
        middle = tl.sum(value, 0) / tl.maximum(tl.sum(inside.to(kind), 0), 1.0)
    apart = tl.where(inside, value - middle, 0.0)
    at = parts + (row * PARTS + part) * 2
    tl.store(at, middle)
    tl.store(at + 1, tl.sum(apart * apart, 0))


@triton.jit
def part_write(
    x, weight, bias, y, parts, root, mean, N, eps, x_m, x_n, w_n, b_n, y_m,
    PARTS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Then every part, by the sums of all; x: what is normalised. Grid: (rows, parts)."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row, each = tl.program_id(0), tl.arange(0, SIZE)
    number = part_counts(row * x_m, N, PARTS, SIZE, COLUMNS, GROUP).to(kind)
    at = parts + (row * PARTS + each) * 2
    middle = tl.load(at, mask=each < PARTS, other=0.0)
    squares = tl.load(at + 1, mask=each < PARTS, other=0.0)
    centre = tl.sum(middle * number, 0) / N
    inverse = 1.0 / tl.sqrt(tl.sum(squares + number * (middle - centre) * (middle - centre), 0) / N + eps)
    if tl.program_id(1) == 0:
        if mean is not None:
            tl.store(mean + row, centre)
        if root is not None:
            tl.store(root + row, inverse)
    write_block(
        x, weight, bias, y, row, tl.program_id(1), N, x_m, x_n, w_n, b_n, y_m, centre, inverse,
        True, COLUMNS, CENTRED, WIDE, GROUP,
    )  # fmt: skip


@triton.jit
def part_slopes(
    grad, x, weight, root, mean, parts, N, g_m, g_n, x_m, x_n, w_n,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of few long rows: a part's two sums for x's gradient. Grid: (rows, parts)."""
    row, part = tl.program_id(0), tl.program_id(1)
    middle = 0.0
    if CENTRED:
        middle = tl.load(mean + row)
    value, slope = load_slopes(
        grad, x, weight, row, part, N, g_m, g_n, x_m, x_n, w_n, middle, tl.load(root + row),
        True, False, COLUMNS, WIDE, GROUP,
    )  # fmt: skip
    at = parts + (row * PARTS + part) * 2
    tl.store(at, tl.sum(value * slope, 0))
    tl.store(at + 1, tl.sum(slope, 0))


@triton.jit
def few_rows_back(
    grad, grad_total, x, weight, root, mean, dx, dtotal, dweight, dbias, parts, M, N,
    g_m, g_n, h_m, h_n, x_m, x_n, w_n, d_m, e_m,
    PARTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Then a block of columns of all rows: their gradients, and those of the vectors. Grid: (blocks of columns,)."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    columns, each = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, SIZE)
    in_row = columns < N
    if weight is not None:
        factor = tl.load(weight + columns * w_n, mask=in_row, other=0.0).to(kind)
    of_weight = tl.zeros((ROWS, COLUMNS), kind)
    of_bias = tl.zeros((ROWS, COLUMNS), kind)
    for first in range(0, M, ROWS):
        rows = first + tl.arange(0, ROWS)
        is_row = rows < M
        at = parts + (rows[:, None] * PARTS + each[None, :]) * 2
        known = is_row[:, None] & (each[None, :] < PARTS)
        product = tl.sum(tl.load(at, mask=known, other=0.0), 1) / N
        inverse = tl.load(root + rows, mask=is_row, other=0.0)[:, None]
        inside = is_row[:, None] & in_row[None, :]
        value = tl.load(x + rows[:, None] * x_m + columns[None, :] * x_n, mask=inside, other=0.0).to(kind)
        slope = tl.load(grad + rows[:, None] * g_m + columns[None, :] * g_n, mask=inside, other=0.0).to(kind)
        if CENTRED:
            value = tl.where(inside, value - tl.load(mean + rows, mask=is_row, other=0.0)[:, None], 0.0)
            of_bias += slope
        value = value * inverse
        of_weight += slope * value
        if weight is not None:
            slope = slope * factor[None, :]
        made = slope - value * product[:, None]
        if CENTRED:
            made -= (tl.sum(tl.load(at + 1, mask=known, other=0.0), 1) / N)[:, None]
        made = made * inverse
        if grad_total is not None:
            more = tl.load(grad_total + rows[:, None] * h_m + columns[None, :] * h_n, mask=inside, other=0.0)
            made += more.to(kind)
        if dtotal is not None:
            tl.store(dtotal + rows[:, None] * e_m + columns[None, :], made.to(dtotal.dtype.element_ty), mask=inside)
        tl.store(dx + rows[:, None] * d_m + columns[None, :], made.to(dx.dtype.element_ty), mask=inside)
    if dweight is not None:
        tl.store(dweight + columns, tl.sum(of_weight, 0).to(dweight.dtype.element_ty), mask=in_row)
    if dbias is not None:
        tl.store(dbias + columns, tl.sum(of_bias, 0).to(dbias.dtype.element_ty), mask=in_row)


@triton.jit
def backward_pass(
    grad, grad_total, x, weight, root, mean, dx, dtotal, sums, dweight, dbias, M, N, P,
    g_m, g_n, h_m, h_n, x_m, x_n, w_n, d_m, e_m, s_v,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr, PERIOD: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Program p of P takes tiles of ROWS rows, PERIOD apart. x is the normalised tensor: with a residual, the sum.

    All rows of a program begin alike, so that the vectors' gradients stay in its lanes. The last tiles come first: the
    gradient was written by the operation before, and its end is still in the L2 cache.
    Reads 2 MN (3 MN with the sum's own gradient), writes MN, and P rows of partial sums per vector, where these are
    wanted; one program alone writes the vectors' gradients at once. ADDS: whether it adds up either.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    first, lanes = tl.program_id(0) % PERIOD, tl.arange(0, COLUMNS)
    columns, in_row = columns_of(first * x_m, lanes, GROUP), is_inside(first * x_m, lanes, N, GROUP)
    if weight is not None:
        factor = tl.load(weight + columns * w_n, mask=in_row, other=0.0).to(kind)
    if ADDS:
        of_weight = tl.zeros((ROWS, COLUMNS), kind)
        of_bias = tl.zeros((ROWS, COLUMNS), kind)
    tiles = ((M + PERIOD - 1) // PERIOD + ROWS - 1) // ROWS
    lane = lanes[None, :]
    for tile in tl.range(tl.program_id(0) // PERIOD, tiles, P // PERIOD, num_stages=STAGES):
        rows = first + PERIOD * ((tiles - 1 - tile) * ROWS + tl.arange(0, ROWS))
        is_row = rows[:, None] < M
        value = load_lanes(x, rows[:, None] * x_m, lane, N, x_n, is_row, 0.0, GROUP, True, False).to(kind)
        slope = load_lanes(grad, rows[:, None] * g_m, lane, N, g_n, is_row, 0.0, GROUP, True, False).to(kind)
        inverse = tl.load(root + rows, mask=rows < M, other=0.0)[:, None]
        if CENTRED:
            middle = tl.load(mean + rows, mask=rows < M, other=0.0)[:, None]
            value = tl.where(is_row & in_row[None, :], value - middle, 0.0)
        value = value * inverse
        if ADDS:
            of_weight += slope * value
            if CENTRED:
                of_bias += slope
        if weight is not None:
            slope = slope * factor[None, :]
        made = slope - value * (tl.sum(slope * value, 1) / N)[:, None]
        if CENTRED:
            made -= (tl.sum(slope, 1) / N)[:, None]
        made = made * inverse
        if grad_total is not None:
            more = load_lanes(grad_total, rows[:, None] * h_m, lane, N, h_n, is_row, 0.0, GROUP, True, False)
            made += more.to(kind)
        if dtotal is not None:
            store_lanes(dtotal, rows[:, None] * e_m, lane, N, is_row, made, GROUP, True)
        store_lanes(dx, rows[:, None] * d_m, lane, N, is_row, made, GROUP, True)
    if sums is not None:
        at = sums + tl.program_id(0) * N + columns
        tl.store(at, tl.sum(of_weight, 0), mask=in_row)
        if CENTRED:
            tl.store(at + s_v, tl.sum(of_bias, 0), mask=in_row)
    if dweight is not None:
        tl.store(dweight + columns, tl.sum(of_weight, 0).to(dweight.dtype.element_ty), mask=in_row)
    if dbias is not None:
        tl.store(dbias + columns, tl.sum(of_bias, 0).to(dbias.dtype.element_ty), mask=in_row)


@triton.jit
def load_slopes(
    grad, x, weight, row, block, N, g_m, g_n, x_m, x_n, w_n, middle, inverse,
    ENDS: tl.constexpr, AGAIN: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A block of a row's normalised values, and of its gradient times the weight."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    start, lane = row * x_m, block * COLUMNS + tl.arange(0, COLUMNS)
    value = load_lanes(x, start, lane, N, x_n, N > 0, 0.0, GROUP, ENDS, AGAIN).to(kind)
    slope = load_lanes(grad, row * g_m, lane, N, g_n, N > 0, 0.0, GROUP, ENDS, AGAIN).to(kind)
    if weight is not None:
        columns = columns_of(start, lane, GROUP)
        slope = slope * tl.load(weight + columns * w_n, mask=(columns >= 0) & (columns < N), other=0.0).to(kind)
    return (value - middle) * inverse, slope


@triton.jit
def write_slopes(
    grad, grad_total, x, weight, dx, dtotal, row, block, N, g_m, g_n, h_m, h_n, x_m, x_n, w_n, d_m, e_m,
    middle, inverse, product, mean_slope,
    ENDS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A block of x's gradient, once the row's two sums are known."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    value, slope = load_slopes(
        grad, x, weight, row, block, N, g_m, g_n, x_m, x_n, w_n, middle, inverse, ENDS, True, COLUMNS, WIDE, GROUP
    )
    made = (slope - value * product - mean_slope) * inverse
    lane = block * COLUMNS + tl.arange(0, COLUMNS)
    if grad_total is not None:
        made += load_lanes(grad_total, row * h_m, lane, N, h_n, N > 0, 0.0, GROUP, ENDS, True).to(kind)
    if dtotal is not None:
        store_lanes(dtotal, row * e_m, lane, N, N > 0, made, GROUP, ENDS)
    store_lanes(dx, row * d_m, lane, N, N > 0, made, GROUP, ENDS)


@triton.jit
def long_backward(
    grad, grad_total, x, weight, root, mean, dx, dtotal, N,
    g_m, g_n, h_m, h_n, x_m, x_n, w_n, d_m, e_m, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """x's gradient alone, of one row per program, in blocks: once for the row's two sums, then again from the end."""
    row = tl.program_id(0)
    inverse = tl.load(root + row)
    middle = 0.0
    if CENTRED:
        middle = tl.load(mean + row)
    whole, count = N // COLUMNS, (N + GROUP - 1 + COLUMNS - 1) // COLUMNS
    value, slopes = load_slopes(
        grad, x, weight, row, 0, N, g_m, g_n, x_m, x_n, w_n, middle, inverse, True, False, COLUMNS, WIDE, GROUP
    )
    products = slopes * value
    for block in range(1, whole):
        value, slope = load_slopes(
            grad, x, weight, row, block, N, g_m, g_n, x_m, x_n, w_n, middle, inverse, False, False, COLUMNS, WIDE, GROUP
        )
        products += slope * value
        slopes += slope
    for block in range(tl.maximum(whole, 1), count):
        value, slope = load_slopes(
            grad, x, weight, row, block, N, g_m, g_n, x_m, x_n, w_n, middle, inverse, True, False, COLUMNS, WIDE, GROUP
        )
        products += slope * value
        slopes += slope
    product, mean_slope = tl.sum(products, 0) / N, 0.0
    if CENTRED:
        mean_slope = tl.sum(slopes, 0) / N
    for block in range(tl.maximum(whole, 1), count):
        write_slopes(
            grad, grad_total, x, weight, dx, dtotal, row, block, N, g_m, g_n, h_m, h_n, x_m, x_n, w_n, d_m, e_m,
            middle, inverse, product, mean_slope, True, COLUMNS, WIDE, GROUP,
        )  # fmt: skip
    for block in range(1, whole):
        write_slopes(
            grad, grad_total, x, weight, dx, dtotal, row, whole - block, N, g_m, g_n, h_m, h_n, x_m, x_n, w_n, d_m, e_m,
            middle, inverse, product, mean_slope, False, COLUMNS, WIDE, GROUP,
        )  # fmt: skip
    write_slopes(
        grad, grad_total, x, weight, dx, dtotal, row, 0, N, g_m, g_n, h_m, h_n, x_m, x_n, w_n, d_m, e_m,
        middle, inverse, product, mean_slope, True, COLUMNS, WIDE, GROUP,
    )  # fmt: skip


@triton.jit
def column_sums(
    grad, x, root, mean, sums, M, N, P, g_m, g_n, x_m, x_n, s_v,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr, PERIOD: tl.constexpr,
):  # fmt: skip
    """Partial sums of the vectors' gradients: of a block of columns, over the second axis' share of rows that begin
    alike."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    first = tl.program_id(1) % PERIOD
    lanes = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    count = (M + PERIOD - 1) // PERIOD
    each = (count + P // PERIOD - 1) // (P // PERIOD)
    begin = tl.program_id(1) // PERIOD * each
    of_weight = tl.zeros((ROWS, COLUMNS), kind)
    of_bias = tl.zeros((ROWS, COLUMNS), kind)
    end = tl.minimum(count, begin + each)
    lane = lanes[None, :]
    for tile in range(begin, end, ROWS):
        places = tile + tl.arange(0, ROWS)
        rows = first + PERIOD * places
        is_row = (places < end) & (rows < M)
        value = load_lanes(x, rows[:, None] * x_m, lane, N, x_n, is_row[:, None], 0.0, GROUP, True, False).to(kind)
        slope = load_lanes(grad, rows[:, None] * g_m, lane, N, g_n, is_row[:, None], 0.0, GROUP, True, False).to(kind)
        if CENTRED:
            value = value - tl.load(mean + rows, mask=is_row, other=0.0)[:, None]
            of_bias += slope
        of_weight += slope * (value * tl.load(root + rows, mask=is_row, other=0.0)[:, None])
    inside = is_inside(first * x_m, lanes, N, GROUP)
    at = sums + tl.program_id(1) * N + columns_of(first * x_m, lanes, GROUP)
    tl.store(at, tl.sum(of_weight, 0), mask=inside)
    if CENTRED:
        tl.store(at + s_v, tl.sum(of_bias, 0), mask=inside)


@triton.jit
def add_up(sums, dweight, dbias, P, N, s_v, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Column sums of the P partial rows, always in the same order; program 1 of an axis takes the bias."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), kind)
    for begin in range(0, P, ROWS):
        rows = begin + tl.arange(0, ROWS)
        inside = (rows[:, None] < P) & (columns[None, :] < N)
        total += tl.load(sums + tl.program_id(1) * s_v + rows[:, None] * N + columns[None, :], mask=inside, other=0.0)
    column_sums = tl.sum(total, 0)
    if tl.program_id(1) == 0:
        if dweight is not None:
            tl.store(dweight + columns, column_sums.to(dweight.dtype.element_ty), mask=columns < N)
    else:
        if dbias is not None:
            tl.store(dbias + columns, column_sums.to(dbias.dtype.element_ty), mask=columns < N)


def _pointers(places: Mapping[str, Place], names: tuple[str, ...]) -> dict[str, Argument]:
    return {name: Pointer(name) if name in places else None for name in names}


def _strides(places: Mapping[str, Place], **letters: str) -> dict[str, Argument]:
    """`x_m`, `x_n` and the like by letter; 0 where a tensor is not given."""
    made: dict[str, Argument] = {}
    for letter, name in letters.items():
        strides = places[name].strides if name in places else (0, 0)
        made |= {f"{letter}_{dim}": stride for dim, stride in zip("mn"[-len(strides) :], strides, strict=True)}
    return made


def forward_plan(places: Mapping[str, Place], *, eps: float, centred: bool) -> LaunchPlan:
    m, n = places["x"].shape
    arguments = _pointers(places, ("x", "residual", "weight", "bias", "y", "total", "root", "mean"))
    arguments |= {"M": m, "N": n, "eps": eps, "w_n": 0, "b_n": 0}
    arguments |= _strides(places, x="x", r="residual", y="y", t="total")
    arguments |= _strides({name: places[name] for name in ("weight", "bias") if name in places}, w="weight", b="bias")
    constants: dict[str, object] = {"CENTRED": centred, "WIDE": places.get("total", places["x"]).dtype == "float64"}
    wide = any(place.wide for place in places.values())
    tensors = [places[name] for name in ("x", "residual", "y", "total") if name in places]
    if n > LONGEST_INVARIANT and m <= _FEW_ROWS:
        return _part_plan(arguments, constants, places, tensors, wide)
    if n > LONGEST_FORWARD:
        constants |= {"COLUMNS": _LONG_BLOCK, "GROUP": group_of(*tensors)}
        return LaunchPlan((_step("long_forward", (m, 1), arguments, constants, 8, wide),))
    group = tile_group(*tensors)
    period = period_of(tensors[0], group)
    rows, warps = _forward_config(m, n)
    constants |= {"ROWS": rows, "COLUMNS": triton.next_power_of_2(n), "GROUP": group, "PERIOD": period}
    grid = (period * blocks(blocks(m, period), rows), 1)
    return LaunchPlan((_step("forward_pass", grid, arguments, constants, warps, wide),))


def _part_plan(
    arguments: dict[str, Argument], constants: dict[str, object], places: Mapping[str, Place], tensors: list[Place],
    wide: bool,
) -> LaunchPlan:  # fmt: skip
    """Few long rows: programs share each of them, and meet between two launches."""
    (m, n), group = places["x"].shape, group_of(*tensors)
    parts = blocks(n + group - 1, _LONG_BLOCK)
    tile = constants | {"PARTS": parts, "COLUMNS": _LONG_BLOCK, "GROUP": group}
    first = _named(arguments, "x residual total N x_m x_n r_m r_n t_m") | {"parts": Pointer("parts")}
    second = _named(arguments, "weight bias y root mean N eps w_n b_n y_m") | {"parts": Pointer("parts")}
    second |= {"x": Pointer("total"), "x_m": arguments["t_m"], "x_n": 1} if "total" in places else {
        name: arguments[name] for name in ("x", "x_m", "x_n")
    }  # fmt: skip
    steps = (
        _step("part_sums", (m, parts), first, tile, 4, wide),
        _step("part_write", (m, parts), second, tile | {"SIZE": triton.next_power_of_2(parts)}, 4, wide),
    )
    kind = "float64" if constants["WIDE"] else "float32"
    return LaunchPlan(steps, {"parts": Buffer(2 * m * parts, kind)})


def _step(
    kernel: str, grid: tuple[int, int], arguments: Mapping[str, Argument], constants: Mapping[str, object], warps: int,
    wide: bool,
) -> Step:  # fmt: skip
    return Step(f"{__name__}:{kernel}", grid, arguments, constants, warps=warps, wide=wide)


def _named(arguments: Mapping[str, Argument], names: str) -> dict[str, Argument]:
    return {name: arguments[name] for name in names.split()}


def backward_plan(
    places: Mapping[str, Place], *, centred: bool, programs: int, splits: int, shared_bytes: int = 0
) -> LaunchPlan:
    """programs: that walk over rows; splits: of the rows, for partial sums of the vectors' gradients; 0: none."""
    m, n = places["x"].shape
    is_double = places["x"].dtype == "float64"
    shape = backward_config(m, n, is_double)
    arguments = _pointers(places, ("grad", "grad_total", "x", "weight", "root", "mean", "dx", "dtotal", "sums"))
    arguments |= {"M": m, "N": n, "s_v": splits * n, "w_n": 0, "P": programs}
    arguments |= _strides(places, g="grad", h="grad_total", x="x", d="dx", e="dtotal")
    arguments |= _strides({"weight": places["weight"]} if "weight" in places else {}, w="weight")
    vectors = _pointers(places, ("dweight", "dbias"))
    adds = "sums" in places or any(vectors.values())
    constants: dict[str, object] = {"CENTRED": centred, "WIDE": is_double}
    wide = any(place.wide for place in places.values())
    tensors = [places[name] for name in ("grad", "grad_total", "x", "dx", "dtotal") if name in places]
    group = group_of(*tensors)
    if is_few_long(m, n):
        parts = blocks(n + group - 1, _LONG_BLOCK)
        arguments["parts"] = Pointer("parts")
        tile = constants | {"PARTS": parts}
        first = _named(arguments, "grad x weight root mean parts N g_m g_n x_m x_n w_n")
        own = {name: value for name, value in arguments.items() if name not in ("sums", "s_v", "P")} | vectors
        size = {"SIZE": triton.next_power_of_2(parts), "ROWS": _FEW_TILE[0], "COLUMNS": _FEW_TILE[1]}
        steps = [_step("part_slopes", (m, parts), first, tile | {"COLUMNS": _LONG_BLOCK, "GROUP": group}, 4, wide)]
        steps += [_step("few_rows_back", (blocks(n, _FEW_TILE[1]), 1), own, tile | size, 4, wide)]
        return LaunchPlan(tuple(steps), {"parts": Buffer(2 * m * parts, "float64" if is_double else "float32")})
    if n > LONGEST_ALONE // (1 + is_double):
        own = {name: value for name, value in arguments.items() if name not in ("sums", "M", "s_v", "P")}
        step = _step("long_backward", (m, 1), own, constants | {"COLUMNS": _LONG_BLOCK, "GROUP": group}, 8, wide)
    else:
        loaded = sum(short_dtype(places[name].dtype)[1] for name in ("grad", "grad_total", "x") if name in places)
        stages = load_stages(shape.rows * shape.columns * loaded, shared_bytes)
        tiled = tile_group(*tensors) if splits else 1
        tile = constants | {"ROWS": shape.rows, "COLUMNS": shape.columns, "STAGES": stages, "GROUP": tiled}
        tile |= {"PERIOD": period_of(places["x"], tiled), "ADDS": adds and shape.sums}
        own = arguments | (vectors if not splits else dict.fromkeys(vectors))
        own |= {} if shape.sums else {"sums": None}
        step = _step("backward_pass", (programs, 1), own, tile, shape.warps, wide)
    if "sums" not in places:
        return LaunchPlan((step,))
    steps = [step]
    if not shape.sums:
        own = _named(arguments, "grad x root mean sums M N s_v g_m g_n x_m x_n") | {"P": splits}
        tile = constants | {"ROWS": 8, "COLUMNS": _SUMMED_COLUMNS, "GROUP": group}
        tile["PERIOD"] = period_of(places["x"], group)
        steps += [_step("column_sums", (blocks(n + group - 1, _SUMMED_COLUMNS), splits), own, tile, 4, wide)]
    own = {"sums": arguments["sums"], "P": splits, "N": n, "s_v": splits * n} | vectors
    rows = min(512, max(16, triton.next_power_of_2(splits)))
    tile = {"ROWS": rows, "COLUMNS": 16, "WIDE": is_double}
    return LaunchPlan((*steps, _step("add_up", (blocks(n, 16), 1 + centred), own, tile, max(1, rows // 64), False)))


def _forward_config(rows: int, columns: int) -> tuple[int, int]:
    """Rows and warps of a program: 32 elements per thread, or less where there are few rows (measured on an H200).

    A row's bits are those of its own elements, whatever is computed beside it, up to `LONGEST_INVARIANT` columns: warps
    follow from the columns alone, and no thread has less than 16 bytes of a row to add up.
    """
    wide = triton.next_power_of_2(columns)
    if wide <= _ONE_LANE_EACH and rows * wide >= 2 * _MANY_PROGRAMS * 4096:
        return 4096 // wide, 4  # a warp has all of a row in any case, and more of them share a multiprocessor
    tall = max(1, (1024 if wide <= _ONE_WARP else 8192 if wide > 1024 else 4096) // wide)
    warps = max(1, tall * wide // 1024)
    least = max(1, 256 * warps // wide)
    return max(least, min(tall, triton.next_power_of_2(blocks(rows, _MANY_PROGRAMS * max(1, 8 // warps))))), warps


def is_few_long(rows: int, columns: int) -> bool:
    """Whether several programs share each row of the backward pass."""
    return rows <= _FEW_ROWS_BACK and columns > LONGEST_SUMMED


def _spread(tall: int, rows: int) -> int:
    """Rows of a program, fewer where there are not enough for all multiprocessors."""
    return min(tall, triton.next_power_of_2(blocks(rows, _MANY_PROGRAMS)))


class BackwardShape(NamedTuple):
    """What a program of the backward pass holds at once. sums: of the vectors' gradients, too."""

    rows: int
    columns: int
    warps: int
    sums: bool


def backward_config(rows: int, columns: int, is_double: bool) -> BackwardShape:
    """For x (rows, columns), where rows are held in registers.

    About 32 elements per thread, which were the fastest on an H200 from 768 columns; 16 of twice the size in float64,
    so that the sums kept on the way fit into registers.
    """
    wide = triton.next_power_of_2(columns)
    each = 512 if is_double else 1024
    if triton.next_power_of_2(rows) * wide <= _ONE_PROGRAM:
        tall = triton.next_power_of_2(rows)
        return BackwardShape(tall, wide, max(1, tall * wide // 128), True)
    most = min(32, max(4 if is_double or wide <= 1024 else 8, wide // each))
    tall = _spread(max(1, most * each // wide), rows)
    return BackwardShape(tall, wide, max(1, min(most, tall * wide // each)), wide <= LONGEST_SUMMED // (1 + is_double))


def _programs(device: torch.device, rows: int, columns: int, is_double: bool) -> dict[str, int]:
    """What `backward_plan` is to know of a device: see there. shared_bytes: of each program."""
    shape = backward_config(rows, columns, is_double)
    multiprocessors, shared_bytes = _PROGRAMS_INTERPRETED, 0
    if device.type == "cuda":
        gpu = gpu_of(device_index(device))
        multiprocessors, shared_bytes = gpu.multiprocessors, gpu.shared_bytes
    share = 2 if shape.warps <= 4 else 1  # programs of a multiprocessor
    period = LONGEST_PERIOD if columns % LONGEST_PERIOD else 1  # in whose multiples rows that begin alike are dealt out
    programs = min(multiprocessors * share // period, blocks(rows, period * shape.rows))
    most = multiprocessors * _SUMS_SHARE // (period * blocks(columns, _SUMMED_COLUMNS))
    splits = programs if shape.sums else min(most, blocks(rows, period * _SUMMED_ROWS))
    programs, splits = period * max(1, programs), period * max(1, splits)
    if is_few_long(rows, columns) or (shape.sums and shape.rows >= rows):
        programs, splits = 1, 0  # who writes the vectors' gradients adds them up
    return {"programs": programs, "splits": splits, "shared_bytes": shared_bytes // share}


class Norm:
    """One of the four operators: with or without centring, with or without the addition before it."""

    def __init__(self, *, centred: bool, adds: bool) -> None:
        self.centred, self.adds = centred, adds

    def _split(self, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, float]:
        x, *rest, eps = arguments
        residual = rest.pop(0) if self.adds else None
        weight, bias = (*rest, None)[:2]
        return x, residual, weight, bias, eps

    def forward(self, launch: Any, *arguments: Any) -> tuple[Tensor, ...]:
        x = arguments[0]
        kind = accumulator(arguments[1 if self.adds else 0].dtype)
        kept = tuple(torch.empty(x.shape[:-1], dtype=kind, device=x.device) for _ in range(1 + self.centred))
        return (*self.forward_alone(launch, *arguments, kept=kept), *kept)

    def forward_alone(self, launch: Any, *arguments: Any, kept: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        x, residual, weight, bias, eps = self._split(arguments)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
        given = {"x": by_rows(x), "y": by_rows(y), "weight": weight, "bias": bias}
        given |= {name: of_rows.view(-1) for name, of_rows in zip(("root", "mean"), kept, strict=False)}
        if residual is not None and total is not None:
            given |= {"residual": by_rows(residual), "total": by_rows(total)}
        there = {name: tensor for name, tensor in given.items() if tensor is not None}
        written = tuple(name for name in ("y", "root", "mean", "total") if name in there)
        launch(forward_plan, there, written=written, eps=float(eps), centred=self.centred)
        return (y,) if total is None else (y, total)

    def backward(
        self, launch: Any, gradients: tuple[Any, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """With an addition, x and residual are empty: the sum that was kept has their place."""
        x, residual, weight, bias, _ = self._split(arguments)
        total = x
        if self.adds:
            total, *kept = kept  # type: ignore[assignment]
        columns, device = total.shape[-1], total.device
        flat = by_rows(total)
        # A result that nothing was computed from has no gradient; the norm's is the rare one.
        grad = torch.zeros(total.shape, dtype=x.dtype, device=device) if gradients[0] is None else gradients[0]
        dx = torch.empty(total.shape, dtype=x.dtype, device=device)
        dtotal = None
        if residual is not None and residual.dtype != x.dtype:
            dtotal = torch.empty(total.shape, dtype=residual.dtype, device=device)
        dweight, dbias = (
            None if vector is None else torch.empty(columns, dtype=vector.dtype, device=device)
            for vector in (weight, bias)
        )
        walk = _programs(device, flat.shape[0], columns, total.dtype == torch.float64)
        sums = None
        if (dweight is not None or dbias is not None) and walk["splits"]:
            sums = torch.empty(1 + self.centred, walk["splits"], columns, dtype=accumulator(total.dtype), device=device)
        given = {
            "grad": by_rows(grad), "x": flat, "root": kept[0].view(-1), "weight": weight,
            "dx": by_rows(dx), "sums": sums, "dweight": dweight, "dbias": dbias,
        }  # fmt: skip
        given |= {"mean": kept[1].view(-1)} if self.centred else {}
        if self.adds and gradients[1] is not None:
            given |= {"grad_total": by_rows(gradients[1])}
        if dtotal is not None:
            given |= {"dtotal": by_rows(dtotal)}
        there = {name: tensor for name, tensor in given.items() if tensor is not None}
        written = tuple(name for name in ("dx", "sums", "dweight", "dbias", "dtotal") if name in there)
        launch(backward_plan, there, written=written, centred=self.centred, **walk)
        made: list[Tensor | None] = [dx]
        if self.adds:
            made.append(dx if dtotal is None else dtotal)
        made.append(dweight)
        if self.centred:
            made.append(dbias)
        return tuple(made)


RMS_NORM = Norm(centred=False, adds=False)
LAYER_NORM = Norm(centred=True, adds=False)
ADD_RMS_NORM = Norm(centred=False, adds=True)
ADD_LAYER_NORM = Norm(centred=True, adds=True)
