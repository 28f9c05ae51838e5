"""The Triton kernels of cross-entropy, forward and backward, and the plans that launch them.

One program per row, which it reads in blocks: forward for the largest logit and the sum of exponentials, backward to
write softmax(row) - target. Rows of few classes are held in registers, of a handful many by one program.
`loss_and_gradient` does both in one launch, where what upstream multiplies by is known: the second read of a row mostly
comes from the L2 cache. Each program adds up the losses of its rows, and those sums are added up in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.lanes import (
    LOG2_E,
    NOTHING,
    NOTHING_WIDE,
    columns_of,
    group_of,
    is_inside,
    load_lanes,
    row_sums,
    store_lanes,
    tile_group,
)
from tilemesh.kernels.launch.call import Place, one_launch
from tilemesh.kernels.launch.steps import Argument, Buffer, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.rows import by_rows

_ADDED_AT_ONCE = 2048  # partial losses, by one program
_FEW_ROWS, _WIDEST_BLOCK = 264, 16384  # two for each multiprocessor; columns that 32 warps have at once
_ONE_PROGRAM = 8192  # elements of rows of few classes that one program has alone
_MANY_PROGRAMS = 8 * 132  # rows of few classes are dealt out to so many
MOST_IN_TILE = 1024  # classes of rows that are held in registers, several rows per program
UNSEEN = tl.constexpr(float("-inf"))


@triton.jit
def target_logit(logits, start, at, V, x_n, is_row, WIDE: tl.constexpr):
    """Of the rows that begin at `start`: NaN where the target is no class."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    is_class = (at >= 0) & (at < V)
    chosen = tl.load(logits + start + tl.where(is_class, at, 0) * x_n, mask=is_row & is_class, other=0.0).to(kind)
    return tl.where(is_class, chosen, float("nan"))


@triton.jit
def pivot_of(chosen):
    """What logits are taken relative to where they are added up: the target's, if that is a number."""
    return tl.where(chosen - chosen == 0.0, chosen, 0.0)


@triton.jit
def loss_of(top, total, chosen, pivot, plain, V, smoothing, z, SMOOTHS: tl.constexpr):
    """The loss of rows from their sums; NaN where the target is no class."""
    log_total = tl.log2(total) / LOG2_E
    loss = (top - chosen) + log_total
    if SMOOTHS:
        loss = (1.0 - smoothing) * loss + smoothing * ((top - pivot) - plain / V + log_total)
    log_total += top
    return loss + z * log_total * log_total


@triton.jit
def row_loss(
    logits, start, at, V, x_n, smoothing, z,
    SMOOTHS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A row's loss, its largest logit and sum(exp(row - largest)); the loss is NaN where the target is no class."""
    chosen = target_logit(logits, start, at, V, x_n, V > 0, WIDE)
    pivot = pivot_of(chosen)
    top, total, plain = row_sums(logits, start, V, x_n, 1.0, pivot, UNSEEN, SMOOTHS, COLUMNS, GROUP, WIDE)
    return loss_of(top, total, chosen, pivot, plain, V, smoothing, z, SMOOTHS), top, total


@triton.jit
def gradient_of(value, columns, at, V, top, total, upstream, smoothing, z):
    """upstream * (softmax(row) * (1 + 2 z log(sum(exp(row)))) - smoothed target)."""
    factor = upstream * (1.0 + 2.0 * z * (top + tl.log2(total) / LOG2_E)) / total
    made = tl.exp2((value - top) * LOG2_E) * factor - upstream * smoothing / V
    return made - tl.where(columns == at, upstream * (1.0 - smoothing), 0.0)


@triton.jit
def write_block(
    logits, dx, start, to, first, at, V, x_n, top, total, upstream, smoothing, z,
    ENDS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of columns from `first` on."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    lane = first + tl.arange(0, COLUMNS)
    value = load_lanes(logits, start, lane, V, x_n, V > 0, 0.0, GROUP, ENDS, True).to(kind)
    made = gradient_of(value, columns_of(start, lane, GROUP), at, V, top, total, upstream, smoothing, z)
    store_lanes(dx, to, lane, V, V > 0, made, GROUP, ENDS)


@triton.jit
def write_gradient(
    logits, dx, start, to, at, V, x_n, top, total, upstream, smoothing, z,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of the row that begins at `start` to the one at `to`, from its end."""
    whole = V // COLUMNS * COLUMNS
    for first in tl.range(tl.maximum(whole, COLUMNS), V + GROUP - 1, COLUMNS, num_stages=1):
        write_block(
            logits, dx, start, to, first, at, V, x_n, top, total, upstream, smoothing, z, True, COLUMNS, GROUP, WIDE
        )
    for first in tl.range(COLUMNS, whole, COLUMNS, num_stages=1):
        write_block(
            logits, dx, start, to, whole - first, at, V, x_n, top, total, upstream, smoothing, z, False, COLUMNS,
            GROUP, WIDE,
        )  # fmt: skip
    write_block(logits, dx, start, to, 0, at, V, x_n, top, total, upstream, smoothing, z, True, COLUMNS, GROUP, WIDE)


@triton.jit
def write_zeros(dx, to, V, COLUMNS: tl.constexpr):
    """The gradient of an ignored row."""
    for begin in range(0, V, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        tl.store(dx + to + columns, tl.zeros((COLUMNS,), tl.float32).to(dx.dtype.element_ty), mask=columns < V)


@triton.jit
def loss_tile(
    logits, target, losses, counts, tops, totals, result, counted, M, V, ignore, smoothing, z, x_m, x_n, t_m,
    SMOOTHS: tl.constexpr, MEAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of few classes: reads them, writes two numbers of each, and its loss or the sum of all losses; who has
    all rows, the result."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = rows[:, None] * x_m
    lane = tl.arange(0, COLUMNS)[None, :]
    value = load_lanes(logits, start, lane, V, x_n, rows[:, None] < M, UNSEEN, GROUP, True, False).to(kind)
    at = tl.load(target + rows * t_m, mask=rows < M, other=ignore)
    is_counted = at != ignore
    chosen = target_logit(logits, rows * x_m, at, V, x_n, rows < M, WIDE)
    top = tl.maximum(tl.max(value, 1), NOTHING_WIDE if WIDE else NOTHING)
    total = tl.sum(tl.exp2((value - top[:, None]) * LOG2_E), 1)
    pivot = pivot_of(chosen)
    plain = tl.zeros((ROWS,), kind)
    if SMOOTHS:
        plain += tl.sum(tl.where(is_inside(start, lane, V, GROUP), value - pivot[:, None], 0.0), 1)
    loss = tl.where(is_counted, loss_of(top, total, chosen, pivot, plain, V, smoothing, z, SMOOTHS), 0.0)
    tl.store(tops + rows, tl.where(is_counted, top, 0.0), mask=rows < M)
    tl.store(totals + rows, tl.where(is_counted, total, 0.0), mask=rows < M)
    number = tl.sum(is_counted.to(tl.int32), 0)
    if result is not None:  # one program has all rows
        total_loss = tl.sum(loss, 0)
        tl.store(counted, number.to(kind))
        tl.store(result, total_loss / number.to(kind) if MEAN else total_loss)
    elif counts is None:
        tl.store(losses + rows, loss, mask=rows < M)
    else:
        tl.store(losses + tl.program_id(0), tl.sum(loss, 0))
        tl.store(counts + tl.program_id(0), number)


@triton.jit
def gradient_tile(
    logits, target, tops, totals, grad, counted, dx, M, V, first, ignore, smoothing, z, x_m, x_n, t_m, g_m, d_m,
    MEAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`gradient_pass` of ROWS rows of few classes."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, COLUMNS)[None, :]
    at = tl.load(target + rows * t_m, mask=rows < M, other=ignore)
    value = load_lanes(logits, rows * x_m, lane, V, x_n, rows < M, 0.0, GROUP, True, False).to(kind)
    top = tl.load(tops + rows, mask=rows < M, other=0.0)
    total = tl.load(totals + rows, mask=rows < M, other=1.0)
    upstream = tl.load(grad + rows * g_m, mask=rows < M, other=0.0).to(kind)
    if MEAN:
        upstream = upstream / tl.load(counted)
    columns = columns_of(rows * x_m, lane, GROUP)
    made = gradient_of(value, columns, at - first, V, top, total, upstream, smoothing, z)
    store_lanes(dx, rows * d_m, lane, V, rows < M, tl.where(at == ignore, 0.0, made), GROUP, True)


@triton.jit
def loss_pass(
    logits, target, losses, counts, tops, totals, V, ignore, smoothing, z, x_m, x_n, t_m,
    SMOOTHS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Reads a row, writes three numbers, and whether it counts."""
    row = tl.program_id(0)
    at = tl.load(target + row * t_m)
    if at == ignore:
        tl.store(losses + row, 0.0)
        tl.store(tops + row, 0.0)
        tl.store(totals + row, 0.0)
    else:
        loss, top, total = row_loss(logits, row * x_m, at, V, x_n, smoothing, z, SMOOTHS, COLUMNS, GROUP, WIDE)
        tl.store(losses + row, loss)
        tl.store(tops + row, top)
        tl.store(totals + row, total)
    if counts is not None:
        tl.store(counts + row, (at != ignore).to(tl.int32))


@triton.jit
def part_pass(
    logits, target, tops, totals, chosen, V, first, classes, ignore, x_m, x_n, t_m,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A row of some of the classes, from `first` on: reads it, writes its largest logit, its sum of exponentials below
    that, and its target's logit."""
    row = tl.program_id(0)
    wanted = tl.load(target + row * t_m)
    if wanted == ignore:
        tl.store(tops + row, 0.0)
        tl.store(totals + row, 0.0)
        tl.store(chosen + row, 0.0)
    else:
        start = row * x_m
        top, total, _ = row_sums(logits, start, V, x_n, 1.0, 0.0, UNSEEN, False, COLUMNS, GROUP, WIDE)
        tl.store(tops + row, top)
        tl.store(totals + row, total)
        at = wanted - first
        is_here = (at >= 0) & (at < V)
        value = tl.where(is_here, target_logit(logits, start, at, V, x_n, V > 0, WIDE), 0.0)
        is_class = (wanted >= 0) & (wanted < classes)
        tl.store(chosen + row, tl.where(is_class | (first > 0), value, float("nan")))


@triton.jit
def gradient_pass(
    logits, target, tops, totals, grad, counted, dx, V, first, ignore, smoothing, z, x_m, x_n, t_m, g_m, d_m,
    MEAN: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Reads a row, writes a row; `dx` may be `logits`. An ignored row has a gradient of zeros.

    first: of the classes that these are; a target that is not among them has no column.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0)
    at = tl.load(target + row * t_m)
    if at == ignore:
        write_zeros(dx, row * d_m, V, COLUMNS)
    else:
        upstream = tl.load(grad + row * g_m).to(kind)
        if MEAN:
            upstream = upstream / tl.load(counted)
        write_gradient(
            logits, dx, row * x_m, row * d_m, at - first, V, x_n, tl.load(tops + row), tl.load(totals + row), upstream,
            smoothing, z, COLUMNS, GROUP, WIDE,
        )  # fmt: skip


@triton.jit
def loss_and_gradient(
    logits, target, losses, dx, upstream, V, ignore, smoothing, z, x_m, x_n, t_m, d_m,
    SMOOTHS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Both at once: reads a row twice (partly from the L2 cache then), writes it once; `dx` may be `logits`."""
    row = tl.program_id(0)
    at = tl.load(target + row * t_m)
    start, to = row * x_m, row * d_m
    if at == ignore:
        tl.store(losses + row, 0.0)
        write_zeros(dx, to, V, COLUMNS)
    else:
        loss, top, total = row_loss(logits, start, at, V, x_n, smoothing, z, SMOOTHS, COLUMNS, GROUP, WIDE)
        tl.store(losses + row, loss)
        tl.debug_barrier()  # the target's logit has been read before anything is written over it
        factor = tl.load(upstream)
        write_gradient(
            logits, dx, start, to, at, V, x_n, top, total, factor, smoothing, z, COLUMNS, GROUP, WIDE
        )  # fmt: skip


@triton.jit
def fold(losses, counts, sums, numbers, P, BLOCK: tl.constexpr):
    """Sums of every BLOCK of P partial losses, and how many targets count."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(losses + at, mask=at < P, other=0.0), 0))
    tl.store(numbers + tl.program_id(0), tl.sum(tl.load(counts + at, mask=at < P, other=0), 0))


@triton.jit
def add_up(losses, counts, result, counted, P, MEAN: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The sum of P partial losses, or their mean over the targets that count, and how many those are; one program."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.zeros((BLOCK,), kind)
    count = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, P, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(losses + at, mask=at < P, other=0.0)
        count += tl.load(counts + at, mask=at < P, other=0)
    loss = tl.sum(total, 0)
    number = tl.sum(count, 0).to(kind)
    if MEAN:
        loss = loss / number
    tl.store(result, loss)
    tl.store(counted, number)


def columns_config(rows: int, classes: int) -> tuple[int, int, int]:
    """Columns of a block, and its warps forward and backward (measured on an H200, both passes: 32768 rows of 3001
    classes in 190 µs, with 4096 columns in 339; 20000 of 6001 in 213 and 350; 6000 of 50257 in 514 with 2048, 501).
    Where rows are few, a block is as wide as its program can be: nobody else hides the wait for it."""
    if rows <= _FEW_ROWS:
        columns = min(_WIDEST_BLOCK, triton.next_power_of_2(classes))
        return columns, max(1, columns // 512), max(1, columns // 512)
    if classes > 16384 or (classes > 4096 and rows <= _MANY_PROGRAMS):
        return 4096, 8, 16
    columns = min(1024, triton.next_power_of_2(classes))
    each = 1024 if classes <= 4096 else 512
    return columns, max(1, columns // each), max(1, 2 * columns // each)


def tile_config(rows: int, classes: int) -> tuple[int, int]:
    """Rows of a tile, and its warps: of narrow rows the numbers that each has, and not its classes, fill registers. A
    sum over wide ones crosses no warps (131072 rows of 1000 classes in 78 µs, by two warps in 95)."""
    wide = triton.next_power_of_2(classes)
    alone = max(2, triton.next_power_of_2(rows))
    if alone * max(4, wide) <= _ONE_PROGRAM:
        return alone, max(1, min(8, alone * wide // 128))
    tall, least = max(2, 1024 // max(4, wide)), max(2, 512 // max(4, wide))
    tall = min(tall, max(least, triton.next_power_of_2(blocks(rows, _MANY_PROGRAMS))))
    if rows <= _FEW_ROWS:
        return tall, max(1, tall * wide // 512)
    return tall, 1 if wide >= 128 else max(1, tall * max(8, wide) // 512)


def _common(
    places: Mapping[str, Place], ignore: int, smoothing: float, z: float, *rows: Place
) -> tuple[dict[str, Any], dict[str, Any]]:
    logits = places["logits"]
    arguments = {name: Pointer(name) for name in places} | {
        "V": logits.shape[1], "ignore": ignore, "smoothing": float(smoothing), "z": float(z),
        "x_m": logits.strides[0], "x_n": logits.strides[1], "t_m": places["target"].strides[0],
    }  # fmt: skip
    group = tile_group(*rows) if logits.shape[1] <= MOST_IN_TILE else group_of(*rows)
    constants = {"COLUMNS": columns_config(*logits.shape)[0], "GROUP": group, "WIDE": logits.dtype == "float64"}
    return arguments, constants


def programs_of(rows: int, classes: int) -> int:
    """Of a pass, each of which adds up the losses of its rows."""
    return blocks(rows, tile_config(rows, classes)[0]) if classes <= MOST_IN_TILE else rows


def is_alone(rows: int, classes: int) -> bool:
    """Whether one program has all rows: its losses are the result."""
    return classes <= MOST_IN_TILE and programs_of(rows, classes) == 1


def _pass(
    name: str, arguments: dict[str, Any], constants: dict[str, Any], logits: Place, warps: int, wide: bool
) -> Step:
    """`name`_pass, or `name`_tile where rows have few classes."""
    rows, classes = logits.shape
    kind = "pass"
    if classes <= MOST_IN_TILE:
        kind, (constants["ROWS"], warps) = "tile", tile_config(rows, classes)
        arguments["M"] = rows
    kernel, grid = f"{__name__}:{name}_{kind}", (programs_of(rows, classes), 1)
    return Step(kernel, grid, arguments, constants, warps=warps, wide=wide)


def forward_plan(places: Mapping[str, Place], *, ignore: int, smoothing: float, z: float, reduction: str) -> LaunchPlan:
    logits = places["logits"]
    arguments, constants = _common(places, ignore, smoothing, z, logits)
    arguments["counts"] = arguments.get("counts")
    constants["SMOOTHS"] = smoothing > 0
    alone = reduction != "none" and is_alone(*logits.shape)
    arguments |= {name: arguments.get(name) if alone else None for name in ("result", "counted")}
    arguments["losses"] = arguments.get("losses")
    constants["MEAN"] = reduction == "mean"
    each = _pass("loss", arguments, constants, logits, columns_config(*logits.shape)[1], logits.wide)
    if alone or reduction == "none":
        return LaunchPlan((each,))
    steps, buffers, number = [each], {}, each.grid[0]
    own: dict[str, Argument] = {name: Pointer(name) for name in ("losses", "counts", "result", "counted")}
    if number > _ADDED_AT_ONCE:  # one program alone would wait for them longer than for a row
        folded: dict[str, Argument] = {name: Pointer(name) for name in ("losses", "counts", "sums", "numbers")}
        grid = (blocks(number, _ADDED_AT_ONCE), 1)
        tile: dict[str, object] = {"BLOCK": _ADDED_AT_ONCE}
        steps.append(Step(f"{__name__}:fold", grid, folded | {"P": number}, tile, warps=8))
        number = grid[0]
        buffers = {"sums": Buffer(number, places["losses"].dtype), "numbers": Buffer(number, "int32")}
        own |= {"losses": Pointer("sums"), "counts": Pointer("numbers")}
    tile = {"MEAN": reduction == "mean", "BLOCK": _ADDED_AT_ONCE, "WIDE": constants["WIDE"]}
    steps.append(Step(f"{__name__}:add_up", (1, 1), own | {"P": number}, tile, warps=8))
    return LaunchPlan(tuple(steps), buffers)


def part_plan(places: Mapping[str, Place], *, first: int, classes: int, ignore: int) -> LaunchPlan:
    logits = places["logits"]
    rows, width = logits.shape
    columns, warps, _ = columns_config(rows, width)
    numbers = {
        "V": width, "first": first, "classes": classes, "ignore": ignore, "x_m": logits.strides[0],
        "x_n": logits.strides[1], "t_m": places["target"].strides[0],
    }  # fmt: skip
    constants = {"COLUMNS": columns, "GROUP": group_of(logits), "WIDE": logits.dtype == "float64"}
    return one_launch(f"{__name__}:part_pass", (rows, 1), places, numbers, constants, warps=warps)


def backward_plan(
    places: Mapping[str, Place], *, ignore: int, smoothing: float, z: float, mean: bool, first: int = 0
) -> LaunchPlan:
    logits, written = places["logits"], places.get("dx", places["logits"])
    arguments, constants = _common(places, ignore, smoothing, z, logits, written)
    arguments |= {"first": first, "counted": arguments.get("counted")}
    arguments |= {"dx": arguments.get("dx", Pointer("logits")), "d_m": written.strides[0]}
    arguments["g_m"] = places["grad"].strides[0] if places["grad"].shape else 0
    constants["MEAN"] = mean
    warps, wide = columns_config(*logits.shape)[2], logits.wide or written.wide
    return LaunchPlan((_pass("gradient", arguments, constants, logits, warps, wide),))


def forward(
    launch: Any, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str, overwrite: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    kind, device = accumulator(logits.dtype), logits.device
    rows = by_rows(logits)
    tops, totals = (torch.empty(target.shape, dtype=kind, device=device) for _ in range(2))
    counted = torch.empty((), dtype=kind, device=device)
    given = {"logits": rows, "target": target.reshape(-1), "tops": tops.view(-1), "totals": totals.view(-1)}
    if reduction == "none":
        result = torch.empty(target.shape, dtype=kind, device=device)
        given |= {"losses": result.view(-1)}
    else:
        result = torch.empty((), dtype=kind, device=device)
        programs = programs_of(*rows.shape)
        given |= {"result": result, "counted": counted}
        if not is_alone(*rows.shape):
            given["losses"] = torch.empty(programs, dtype=kind, device=device)
            given["counts"] = torch.empty(programs, dtype=torch.int32, device=device)
    launch(
        forward_plan, given, written=tuple(given)[2:], ignore=ignore_index, smoothing=float(label_smoothing),
        z=float(z_loss), reduction=reduction,
    )  # fmt: skip
    return result, tops, totals, counted


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor, None]:
    logits, target, ignore_index, label_smoothing, z_loss, reduction, overwrite = arguments
    tops, totals, counted = kept
    given = {
        "logits": by_rows(logits), "target": target.reshape(-1), "tops": tops.view(-1), "totals": totals.view(-1),
        "grad": gradients[0].reshape(-1) if reduction == "none" else gradients[0], "counted": counted,
    }  # fmt: skip
    over = overwrite and logits.is_contiguous()
    dx = logits.detach() if over else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if over:
        torch.autograd.graph.increment_version(logits)  # a second backward pass must fail, not read a gradient
    else:
        given["dx"] = by_rows(dx)
    launch(
        backward_plan, given, written=("logits",) if over else ("dx",), ignore=ignore_index,
        smoothing=float(label_smoothing), z=float(z_loss), mean=reduction == "mean",
    )  # fmt: skip
    return dx, None
