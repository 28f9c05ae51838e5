"""The Triton kernels of softmax, forward and backward, and the plans that launch them.

A row that fits the registers of a block of threads is read once. Of longer ones, up to what one multiprocessor holds,
each program walks over several: the next row is on its way to shared memory while this one is computed. A row that
exceeds that is read twice: once for its largest element and its sum, then again from the end, so that what was read
last, which the L2 cache still holds, comes first. Nothing is atomic: results repeat bit for bit.
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
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.rows import LONG_BLOCK, LONGEST, by_rows, load_stages, rows_config

LOG2_E = tl.constexpr(1.4426950408889634)  # multiplied in after the difference: before it, great logits overflow
_HELD_BYTES = 65536  # of a row that one program holds
_HELD_WARPS = (
    32  # measured on an H200: 4096 rows of 32768 in 144 µs, by 16 warps in 148; with one stage of loads in 163
)
_PROGRAMS_INTERPRETED = 3  # where there is no GPU to fill
NOTHING = tl.constexpr(-3.4028234663852886e38)
NOTHING_WIDE = tl.constexpr(-1.7976931348623157e308)
"""Where a running maximum begins: the least number of float32 and float64, so that no difference is inf - inf."""


@triton.jit
def seen(rows, columns, N, T, CAUSAL: tl.constexpr):
    """Which elements count: columns inside and, of query `row % T`, keys up to its own."""
    inside = columns < N
    if CAUSAL:
        inside = inside & (columns <= rows % T + (N - T))
    return inside


@triton.jit
def scaled(value, counts, factor, UNSEEN: tl.constexpr):
    """value * factor, and -inf where nothing counts: what was loaded there becomes that, unless factor is 0."""
    value = value * factor
    if UNSEEN == 0.0:
        value = tl.where(counts, value, float("-inf"))
    return value


@triton.jit
def whole_rows(
    x, y, M, N, T, factor, x_m, x_n, y_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, UNSEEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program, each in registers: reads MN, writes MN."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    counts = seen(rows, columns, N, T, CAUSAL) & (rows < M)
    value = scaled(tl.load(x + rows * x_m + columns * x_n, mask=counts, other=UNSEEN).to(kind), counts, factor, UNSEEN)
    value = tl.exp2((value - tl.max(value, 1)[:, None]) * LOG2_E)
    value = value / tl.sum(value, 1)[:, None]
    tl.store(y + rows * y_m + columns, value.to(y.dtype.element_ty), mask=(rows < M) & (columns < N))


@triton.jit
def long_row(
    x, y, N, T, factor, x_m, x_n, y_m,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, UNSEEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row per program, in blocks: reads 2 N (about half of the second time from the L2 cache), writes N."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0)
    largest = tl.full((COLUMNS,), NOTHING_WIDE if WIDE else NOTHING, kind)
    total = tl.zeros((COLUMNS,), kind)
    count = (N + COLUMNS - 1) // COLUMNS
    for block in range(count):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        counts = seen(row, columns, N, T, CAUSAL)
        value = tl.load(x + row * x_m + columns * x_n, mask=counts, other=UNSEEN).to(kind)
        value = scaled(value, counts, factor, UNSEEN)
        larger = tl.maximum(largest, value)
        total = total * tl.exp2((largest - larger) * LOG2_E) + tl.exp2((value - larger) * LOG2_E)
        largest = larger
    top = tl.max(largest, 0)
    inverse = 1.0 / tl.sum(total * tl.exp2((largest - top) * LOG2_E), 0)
    for block in range(count):
        columns = (count - 1 - block) * COLUMNS + tl.arange(0, COLUMNS)
        counts = seen(row, columns, N, T, CAUSAL)
        at = x + row * x_m + columns * x_n
        value = tl.load(at, mask=counts, other=UNSEEN, eviction_policy="evict_first").to(kind)
        value = tl.exp2((scaled(value, counts, factor, UNSEEN) - top) * LOG2_E) * inverse
        tl.store(y + row * y_m + columns, value.to(y.dtype.element_ty), mask=columns < N)


@triton.jit
def held_rows(
    x, y, M, N, T, P, factor, x_m, x_n, y_m,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, UNSEEN: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p of P takes every P-th row, while the next ones are on their way: reads MN, writes MN."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    columns = tl.arange(0, COLUMNS)
    for row in tl.range(tl.program_id(0), M, P, num_stages=STAGES):
        counts = seen(row, columns, N, T, CAUSAL)
        value = tl.load(x + row * x_m + columns * x_n, mask=counts, other=UNSEEN).to(kind)
        value = scaled(value, counts, factor, UNSEEN)
        value = tl.exp2((value - tl.max(value, 0)) * LOG2_E)
        value = value * (1.0 / tl.sum(value, 0))
        tl.store(y + row * y_m + columns, value.to(y.dtype.element_ty), mask=columns < N)


@triton.jit
def whole_rows_back(
    grad, y, dx, M, N, T, scale, g_m, g_n, y_m, d_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dx = scale * y * (grad - sum(grad * y)), and 0 where nothing counts. Reads 2 MN, writes MN."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    counts = seen(rows, columns, N, T, CAUSAL) & (rows < M)
    value = tl.load(y + rows * y_m + columns, mask=counts, other=0.0).to(kind)
    slope = tl.load(grad + rows * g_m + columns * g_n, mask=counts, other=0.0).to(kind)
    slope = tl.where(value == 0.0, 0.0, slope)  # what was masked has no gradient, whatever arrives
    made = tl.where(counts, scale * value * (slope - tl.sum(slope * value, 1)[:, None]), 0.0)
    tl.store(dx + rows * d_m + columns, made.to(dx.dtype.element_ty), mask=(rows < M) & (columns < N))


@triton.jit
def long_row_back(
    grad, y, dx, N, T, scale, g_m, g_n, y_m, d_m, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same for one long row: reads 4 N (about half of the second time from the L2 cache), writes N."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0)
    total = tl.zeros((COLUMNS,), kind)
    count = (N + COLUMNS - 1) // COLUMNS
    for block in range(count):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        counts = seen(row, columns, N, T, CAUSAL)
        value = tl.load(y + row * y_m + columns, mask=counts, other=0.0).to(kind)
        slope = tl.load(grad + row * g_m + columns * g_n, mask=counts, other=0.0).to(kind)
        total += value * tl.where(value == 0.0, 0.0, slope)
    mean = tl.sum(total, 0)
    for block in range(count):
        columns = (count - 1 - block) * COLUMNS + tl.arange(0, COLUMNS)
        counts = seen(row, columns, N, T, CAUSAL)
        value = tl.load(y + row * y_m + columns, mask=counts, other=0.0, eviction_policy="evict_first").to(kind)
        slope = tl.load(grad + row * g_m + columns * g_n, mask=counts, other=0.0).to(kind)
        slope = tl.where(value == 0.0, 0.0, slope)
        made = tl.where(counts, scale * value * (slope - mean), 0.0)
        tl.store(dx + row * d_m + columns, made.to(dx.dtype.element_ty), mask=columns < N)


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
    if n <= LONGEST:
        rows, warps = rows_config(n)
        constants |= {"ROWS": rows, "COLUMNS": triton.next_power_of_2(n)}
        grid = (blocks(m, rows), 1)
        step = Step(f"{__name__}:whole_rows", grid, arguments | {"M": m}, constants, warps=warps, wide=wide)
        return LaunchPlan((step,))
    element_bytes, columns = short_dtype(x.dtype)[1], triton.next_power_of_2(n)
    if columns * element_bytes <= _HELD_BYTES:
        walking, stages = min(m, programs), load_stages(columns * element_bytes, shared_bytes)
        arguments |= {"M": m, "P": walking}
        constants |= {"COLUMNS": columns, "STAGES": stages}
        step = Step(f"{__name__}:held_rows", (walking, 1), arguments, constants, warps=_HELD_WARPS, wide=wide)
        return LaunchPlan((step,))
    constants |= {"COLUMNS": LONG_BLOCK}
    return LaunchPlan((Step(f"{__name__}:long_row", (m, 1), arguments, constants, warps=32, wide=wide),))


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
    if n > LONGEST:
        constants |= {"COLUMNS": LONG_BLOCK}
        return LaunchPlan((Step(f"{__name__}:long_row_back", (m, 1), arguments, constants, warps=32, wide=wide),))
    rows, warps = rows_config(n)
    constants |= {"ROWS": rows, "COLUMNS": triton.next_power_of_2(n)}
    grid = (blocks(m, rows), 1)
    step = Step(f"{__name__}:whole_rows_back", grid, arguments | {"M": m}, constants, warps=warps, wide=wide)
    return LaunchPlan((step,))


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
