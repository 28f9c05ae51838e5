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
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.rows import by_rows, load_stages

_PROGRAMS_INTERPRETED = 3  # of the backward pass, where there is no GPU to fill
LONGEST_FORWARD, LONGEST_ALONE, LONGEST_SUMMED = 32768, 16384, 8192
"""Columns of the longest rows that registers hold: forward, backward, and backward with both vectors' gradients; of
float64 half as many."""
_LONG_BLOCK = 2048  # columns of a longer row at once
_SUMMED_COLUMNS, _SUMMED_ROWS = 256, 64  # of a program that sums the vectors' gradients, at the least
_SUMS_SHARE = 8  # such programs of a multiprocessor
_MANY_PROGRAMS = 132  # enough for any GPU: rows are dealt out to as many, if there are so many


@triton.jit
def forward_pass(
    x, residual, weight, bias, y, total, root, mean, M, N, eps,
    x_m, x_n, r_m, r_n, w_n, b_n, y_m, t_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program. Reads MN (2 MN with a residual) and writes as much."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    value = tl.load(x + rows[:, None] * x_m + columns[None, :] * x_n, mask=inside, other=0.0).to(kind)
    if residual is not None:
        more = tl.load(residual + rows[:, None] * r_m + columns[None, :] * r_n, mask=inside, other=0.0)
        # The norm is of the sum as it is stored, which is what backward reads.
        stored = (more.to(kind) + value).to(total.dtype.element_ty)
        tl.store(total + rows[:, None] * t_m + columns[None, :], stored, mask=inside)
        value = stored.to(kind)
    if CENTRED:
        middle = tl.sum(value, 1) / N
        if mean is not None:
            tl.store(mean + rows, middle, mask=rows < M)
        value = tl.where(inside, value - middle[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / N + eps)
    if root is not None:
        tl.store(root + rows, inverse, mask=rows < M)
    value = value * inverse[:, None]
    if weight is not None:
        value = value * tl.load(weight + columns * w_n, mask=columns < N, other=0.0).to(kind)[None, :]
    if bias is not None:
        value = value + tl.load(bias + columns * b_n, mask=columns < N, other=0.0).to(kind)[None, :]
    tl.store(y + rows[:, None] * y_m + columns[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def long_forward(
    x, residual, weight, bias, y, total, root, mean, M, N, eps,
    x_m, x_n, r_m, r_n, w_n, b_n, y_m, t_m,
    COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row per program, in blocks. Each lane keeps the mean and the squares of its elements (Welford): a sum of
    squares less a squared sum would lose the digits that the elements share."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0)
    middle = tl.zeros((COLUMNS,), kind)
    squares = tl.zeros((COLUMNS,), kind)
    count = (N + COLUMNS - 1) // COLUMNS
    for block in range(count):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < N
        value = tl.load(x + row * x_m + columns * x_n, mask=inside, other=0.0).to(kind)
        if residual is not None:
            more = tl.load(residual + row * r_m + columns * r_n, mask=inside, other=0.0)
            stored = (more.to(kind) + value).to(total.dtype.element_ty)
            tl.store(total + row * t_m + columns, stored, mask=inside)
            value = stored.to(kind)
        if CENTRED:
            change = tl.where(inside, value - middle, 0.0)
            middle += change / (block + 1)
            value = tl.where(inside, value - middle, 0.0)
            squares += change * value
        else:
            squares += value * value
    if CENTRED:
        is_short = (count - 1) * COLUMNS + tl.arange(0, COLUMNS) >= N
        number = tl.where(is_short, count - 1, count).to(kind)
        centre = tl.sum(middle * number, 0) / N
        squares += number * (middle - centre) * (middle - centre)
        if mean is not None:
            tl.store(mean + row, centre)
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / N + eps)
    if root is not None:
        tl.store(root + row, inverse)
    if residual is not None:
        tl.debug_barrier()  # the sum is read by other threads than wrote it
    for block in range(count):
        columns = (count - 1 - block) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < N
        if residual is not None:
            value = tl.load(total + row * t_m + columns, mask=inside, other=0.0).to(kind)
        else:
            value = tl.load(x + row * x_m + columns * x_n, mask=inside, other=0.0).to(kind)
        if CENTRED:
            value = value - centre
        value = value * inverse
        if weight is not None:
            value = value * tl.load(weight + columns * w_n, mask=inside, other=0.0).to(kind)
        if bias is not None:
            value = value + tl.load(bias + columns * b_n, mask=inside, other=0.0).to(kind)
        tl.store(y + row * y_m + columns, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_pass(
    grad, grad_total, x, weight, root, mean, dx, dtotal, sums, M, N, P,
    g_m, g_n, h_m, h_n, x_m, x_n, w_n, d_m, e_m, s_v,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program p of P takes every P-th group of ROWS rows. x is the normalised tensor: with a residual, the sum.

    The last groups come first: the gradient was written by the operation before, and its end is still in the L2 cache.
    Reads 2 MN (3 MN with the sum's own gradient), writes MN, and P rows of partial sums per vector, where these are
    wanted.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    columns = tl.arange(0, COLUMNS)
    if weight is not None:
        factor = tl.load(weight + columns * w_n, mask=columns < N, other=0.0).to(kind)
    if sums is not None:
        of_weight = tl.zeros((ROWS, COLUMNS), kind)
        of_bias = tl.zeros((ROWS, COLUMNS), kind)
    groups = (M + ROWS - 1) // ROWS
    for group in tl.range(tl.program_id(0), groups, P, num_stages=STAGES):
        rows = (groups - 1 - group) * ROWS + tl.arange(0, ROWS)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        value = tl.load(x + rows[:, None] * x_m + columns[None, :] * x_n, mask=inside, other=0.0).to(kind)
        slope = tl.load(grad + rows[:, None] * g_m + columns[None, :] * g_n, mask=inside, other=0.0).to(kind)
        inverse = tl.load(root + rows, mask=rows < M, other=0.0)[:, None]
        if CENTRED:
            value = tl.where(inside, value - tl.load(mean + rows, mask=rows < M, other=0.0)[:, None], 0.0)
        value = value * inverse
        if sums is not None:
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
            more = tl.load(grad_total + rows[:, None] * h_m + columns[None, :] * h_n, mask=inside, other=0.0)
            made += more.to(kind)
        if dtotal is not None:
            tl.store(dtotal + rows[:, None] * e_m + columns[None, :], made.to(dtotal.dtype.element_ty), mask=inside)
        tl.store(dx + rows[:, None] * d_m + columns[None, :], made.to(dx.dtype.element_ty), mask=inside)
    if sums is not None:
        at = sums + tl.program_id(0) * N + columns
        tl.store(at, tl.sum(of_weight, 0), mask=columns < N)
        if CENTRED:
            tl.store(at + s_v, tl.sum(of_bias, 0), mask=columns < N)


@triton.jit
def long_backward(
    grad, grad_total, x, weight, root, mean, dx, dtotal, N,
    g_m, g_n, h_m, h_n, x_m, x_n, w_n, d_m, e_m, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """x's gradient alone, of one row per program, in blocks: once for the row's two sums, then again from the end."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0)
    inverse = tl.load(root + row)
    middle = 0.0
    if CENTRED:
        middle = tl.load(mean + row)
    products = tl.zeros((COLUMNS,), kind)
    slopes = tl.zeros((COLUMNS,), kind)
    count = (N + COLUMNS - 1) // COLUMNS
    for block in range(count):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        value = tl.load(x + row * x_m + columns * x_n, mask=columns < N, other=0.0).to(kind)
        slope = tl.load(grad + row * g_m + columns * g_n, mask=columns < N, other=0.0).to(kind)
        if weight is not None:
            slope = slope * tl.load(weight + columns * w_n, mask=columns < N, other=0.0).to(kind)
        products += slope * ((value - middle) * inverse)
        slopes += slope
    product, mean_slope = tl.sum(products, 0) / N, tl.sum(slopes, 0) / N
    for block in range(count):
        columns = (count - 1 - block) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < N
        value = tl.load(x + row * x_m + columns * x_n, mask=inside, other=0.0).to(kind)
        slope = tl.load(grad + row * g_m + columns * g_n, mask=inside, other=0.0).to(kind)
        if weight is not None:
            slope = slope * tl.load(weight + columns * w_n, mask=inside, other=0.0).to(kind)
        made = slope - (value - middle) * inverse * product
        if CENTRED:
            made -= mean_slope
        made = made * inverse
        if grad_total is not None:
            made += tl.load(grad_total + row * h_m + columns * h_n, mask=inside, other=0.0).to(kind)
        if dtotal is not None:
            tl.store(dtotal + row * e_m + columns, made.to(dtotal.dtype.element_ty), mask=inside)
        tl.store(dx + row * d_m + columns, made.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def column_sums(
    grad, x, root, mean, sums, M, N, P, g_m, g_n, x_m, x_n, s_v,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Partial sums of the vectors' gradients: of a block of columns, over the second axis' share of the rows."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    each = (M + P - 1) // P
    begin = tl.program_id(1) * each
    of_weight = tl.zeros((ROWS, COLUMNS), kind)
    of_bias = tl.zeros((ROWS, COLUMNS), kind)
    end = tl.minimum(M, begin + each)
    for first in range(begin, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows[:, None] < end) & (columns[None, :] < N)
        value = tl.load(x + rows[:, None] * x_m + columns[None, :] * x_n, mask=inside, other=0.0).to(kind)
        slope = tl.load(grad + rows[:, None] * g_m + columns[None, :] * g_n, mask=inside, other=0.0).to(kind)
        if CENTRED:
            value = value - tl.load(mean + rows, mask=rows < end, other=0.0)[:, None]
            of_bias += slope
        of_weight += slope * (value * tl.load(root + rows, mask=rows < end, other=0.0)[:, None])
    at = sums + tl.program_id(1) * N + columns
    tl.store(at, tl.sum(of_weight, 0), mask=columns < N)
    if CENTRED:
        tl.store(at + s_v, tl.sum(of_bias, 0), mask=columns < N)


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
    rows, warps = _forward_config(n)
    arguments = _pointers(places, ("x", "residual", "weight", "bias", "y", "total", "root", "mean"))
    arguments |= {"M": m, "N": n, "eps": eps, "w_n": 0, "b_n": 0}
    arguments |= _strides(places, x="x", r="residual", y="y", t="total")
    arguments |= _strides({name: places[name] for name in ("weight", "bias") if name in places}, w="weight", b="bias")
    constants: dict[str, object] = {"CENTRED": centred, "WIDE": places["x"].dtype == "float64"}
    wide = any(place.wide for place in places.values())
    if n > LONGEST_FORWARD:
        constants |= {"COLUMNS": _LONG_BLOCK}
        step = Step(f"{__name__}:long_forward", (m, 1), arguments, constants, warps=_long_warps(n), wide=wide)
        return LaunchPlan((step,))
    constants |= {"ROWS": rows, "COLUMNS": triton.next_power_of_2(n)}
    step = Step(f"{__name__}:forward_pass", (blocks(m, rows), 1), arguments, constants, warps=warps, wide=wide)
    return LaunchPlan((step,))


def backward_plan(
    places: Mapping[str, Place], *, centred: bool, programs: int, splits: int, shared_bytes: int = 0
) -> LaunchPlan:
    """programs: that walk over rows; splits: of the rows, for partial sums of the vectors' gradients."""
    m, n = places["x"].shape
    is_double = places["x"].dtype == "float64"
    shape = backward_config(m, n, is_double)
    arguments = _pointers(places, ("grad", "grad_total", "x", "weight", "root", "mean", "dx", "dtotal", "sums"))
    arguments |= {"M": m, "N": n, "s_v": splits * n, "w_n": 0}
    arguments |= _strides(places, g="grad", h="grad_total", x="x", d="dx", e="dtotal")
    arguments |= _strides({"weight": places["weight"]} if "weight" in places else {}, w="weight")
    constants: dict[str, object] = {"CENTRED": centred, "WIDE": is_double}
    wide = any(place.wide for place in places.values())
    if n > LONGEST_ALONE // (1 + is_double):
        own = {name: value for name, value in arguments.items() if name not in ("sums", "M", "s_v")}
        tile = constants | {"COLUMNS": _LONG_BLOCK}
        step = Step(f"{__name__}:long_backward", (m, 1), own, tile, warps=_long_warps(n), wide=wide)
    else:
        loaded = sum(short_dtype(places[name].dtype)[1] for name in ("grad", "grad_total", "x") if name in places)
        stages = load_stages(shape.rows * shape.columns * loaded, shared_bytes)
        tile = constants | {"ROWS": shape.rows, "COLUMNS": shape.columns, "STAGES": stages}
        own = arguments | {"P": programs} | ({} if shape.sums else {"sums": None})
        step = Step(f"{__name__}:backward_pass", (programs, 1), own, tile, warps=shape.warps, wide=wide)
    if "sums" not in places:
        return LaunchPlan((step,))
    steps = [step]
    if not shape.sums:
        own = {name: arguments[name] for name in ("grad", "x", "root", "mean", "sums", "M", "N", "s_v")}
        own |= {name: arguments[name] for name in ("g_m", "g_n", "x_m", "x_n")} | {"P": splits}
        tile = constants | {"ROWS": 8, "COLUMNS": _SUMMED_COLUMNS}
        steps += [Step(f"{__name__}:column_sums", (blocks(n, _SUMMED_COLUMNS), splits), own, tile, wide=wide)]
    own = _pointers(places, ("sums", "dweight", "dbias")) | {"P": splits, "N": n, "s_v": splits * n}
    tile = {"ROWS": 64, "COLUMNS": 32, "WIDE": is_double}
    return LaunchPlan((*steps, Step(f"{__name__}:add_up", (blocks(n, 32), 1 + centred), own, tile)))


def _forward_config(columns: int) -> tuple[int, int]:
    """Rows and warps of a program: 32 elements per thread (measured on an H200). They never follow from the number of
    rows: a row's bits are those of its own elements, whatever is computed beside it."""
    wide = triton.next_power_of_2(columns)
    rows = max(1, (8192 if wide > 1024 else 4096) // wide)
    return rows, max(1, rows * wide // 1024)


def _long_warps(columns: int) -> int:
    """Of a program that reads a row in blocks: where nothing aligns its rows, each thread loads element by element."""
    return 8 if columns % 8 == 0 else 16


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
    programs = min(multiprocessors * share, blocks(rows, shape.rows))
    most = max(1, multiprocessors * _SUMS_SHARE // blocks(columns, _SUMMED_COLUMNS))
    splits = programs if shape.sums else min(most, blocks(rows, _SUMMED_ROWS))
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
        kind = accumulator(x.dtype)
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
        if dweight is not None or dbias is not None:
            sums = torch.empty(1 + self.centred, walk["splits"], columns, dtype=accumulator(x.dtype), device=device)
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
