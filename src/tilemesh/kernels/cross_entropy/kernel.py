"""The Triton kernels of cross-entropy, forward and backward, and the plans that launch them.

One program per row, which it reads in blocks: forward for the largest logit and the sum of exponentials, backward to
write softmax(row) - target. `loss_and_gradient` does both in one launch, where what upstream multiplies by is known:
the second read of a row mostly comes from the L2 cache. Losses are added up by one program in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step
from tilemesh.kernels.rows import by_rows

_BLOCK_OF_ROWS = 4096  # losses that the adding program takes at a time
NOTHING = tl.constexpr(-3.4028234663852886e38)
NOTHING_WIDE = tl.constexpr(-1.7976931348623157e308)
"""Where a running maximum begins: the least number of float32 and float64, so that no difference is inf - inf."""


@triton.jit
def add_exponentials(
    logits, begin, end, V, x_n, pivot, largest, total, plain,
    SMOOTHS: tl.constexpr, MASKED: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Blocks of columns [begin, end): each lane's largest logit, its sum of exponentials and its sum above `pivot`.

    A lane has several columns side by side, which one thread loads at once: its sum is rescaled once for all of them,
    and not by one more exponential for each.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    log2_e: tl.constexpr = 1.4426950408889634
    each: tl.constexpr = COLUMNS // LANES
    within = tl.arange(0, LANES)[:, None] * each + tl.arange(0, each)[None, :]
    for first in tl.range(begin, end, COLUMNS, num_stages=1):
        columns = first + within
        if MASKED:
            value = tl.load(logits + columns * x_n, mask=columns < V, other=float("-inf")).to(kind)
        else:
            value = tl.load(logits + columns * x_n).to(kind)
        if SMOOTHS:
            plain += tl.sum(tl.where(columns < V, value - pivot, 0.0), 1)
        larger = tl.maximum(largest, tl.max(value, 1))
        powers = tl.sum(tl.exp2((value - larger[:, None]) * log2_e), 1)
        total = total * tl.exp2((largest - larger) * log2_e) + powers
        largest = larger
    return largest, total, plain


@triton.jit
def row_sums(logits, V, x_n, pivot, SMOOTHS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """The row's largest logit, sum(exp(row - largest)), and where labels are smoothed sum(row - pivot).

    The two are never added up: log(sum(exp(row))) has the rounding of what all logits share. `logits` is at the row.
    Whole blocks have no mask: where V is odd, masked loads are one element wide (compiled for an H200, where 32768 rows
    of 50257 classes then took 3.5 ms).
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    log2_e: tl.constexpr = 1.4426950408889634
    lanes: tl.constexpr = COLUMNS // 8 if COLUMNS >= 8 else 1
    largest = tl.full((lanes,), NOTHING_WIDE if WIDE else NOTHING, kind)
    total = tl.zeros((lanes,), kind)
    plain = tl.zeros((lanes,), kind)
    whole = V // COLUMNS * COLUMNS
    largest, total, plain = add_exponentials(
        logits, 0, whole, V, x_n, pivot, largest, total, plain, SMOOTHS, False, COLUMNS, lanes, WIDE
    )
    largest, total, plain = add_exponentials(
        logits, whole, V, V, x_n, pivot, largest, total, plain, SMOOTHS, True, COLUMNS, lanes, WIDE
    )
    top = tl.max(largest, 0)
    return top, tl.sum(total * tl.exp2((largest - top) * log2_e), 0), tl.sum(plain, 0)


@triton.jit
def target_logit(logits, at, V, x_n, WIDE: tl.constexpr):
    """NaN where the target is no class."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    is_class = (at >= 0) & (at < V)
    return tl.where(is_class, tl.load(logits + tl.where(is_class, at, 0) * x_n).to(kind), float("nan"))


@triton.jit
def row_loss(
    logits, at, V, x_n, smoothing, z, SMOOTHS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A row's loss, its largest logit and sum(exp(row - largest)); the loss is NaN where the target is no class."""
    log2_e: tl.constexpr = 1.4426950408889634
    chosen = target_logit(logits, at, V, x_n, WIDE)
    pivot = tl.where(chosen - chosen == 0.0, chosen, 0.0)
    top, total, plain = row_sums(logits, V, x_n, pivot, SMOOTHS, COLUMNS, WIDE)
    log_total = tl.log2(total) / log2_e
    loss = (top - chosen) + log_total
    if SMOOTHS:
        loss = (1.0 - smoothing) * loss + smoothing * ((top - pivot) - plain / V + log_total)
    log_total += top
    return loss + z * log_total * log_total, top, total


@triton.jit
def write_gradient(
    logits, dx, at, V, x_n, top, total, upstream, smoothing, z,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """upstream * (softmax(row) * (1 + 2 z log(sum(exp(row)))) - smoothed target), over the row, from its end."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    log2_e: tl.constexpr = 1.4426950408889634
    factor = upstream * (1.0 + 2.0 * z * (top + tl.log2(total) / log2_e)) / total
    less = upstream * smoothing / V
    hit = upstream * (1.0 - smoothing)
    whole = V // COLUMNS
    for _ in range(whole * COLUMNS, V, COLUMNS):  # what is left at the end, if anything
        columns = whole * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < V
        value = tl.load(logits + columns * x_n, mask=inside, other=0.0, eviction_policy="evict_first").to(kind)
        made = tl.exp2((value - top) * log2_e) * factor - less
        made -= tl.where(columns == at, hit, 0.0)
        tl.store(dx + columns, made.to(dx.dtype.element_ty), mask=inside)
    for block in tl.range(0, whole, num_stages=1):
        columns = (whole - 1 - block) * COLUMNS + tl.arange(0, COLUMNS)
        value = tl.load(logits + columns * x_n, eviction_policy="evict_first").to(kind)
        made = tl.exp2((value - top) * log2_e) * factor - less
        made -= tl.where(columns == at, hit, 0.0)
        tl.store(dx + columns, made.to(dx.dtype.element_ty))


@triton.jit
def loss_pass(
    logits, target, losses, tops, totals, V, ignore, smoothing, z, x_m, x_n, t_m,
    SMOOTHS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Reads a row, writes three numbers."""
    row = tl.program_id(0)
    at = tl.load(target + row * t_m)
    if at == ignore:
        tl.store(losses + row, 0.0)
        tl.store(tops + row, 0.0)
        tl.store(totals + row, 0.0)
    else:
        loss, top, total = row_loss(logits + row * x_m, at, V, x_n, smoothing, z, SMOOTHS, COLUMNS, WIDE)
        tl.store(losses + row, loss)
        tl.store(tops + row, top)
        tl.store(totals + row, total)


@triton.jit
def part_pass(
    logits, target, tops, totals, chosen, V, first, classes, ignore, x_m, x_n, t_m,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr,
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
        start = logits + row * x_m
        top, total, _ = row_sums(start, V, x_n, 0.0, False, COLUMNS, WIDE)
        tl.store(tops + row, top)
        tl.store(totals + row, total)
        at = wanted - first
        is_here = (at >= 0) & (at < V)
        value = tl.where(is_here, target_logit(start, at, V, x_n, WIDE), 0.0)
        is_class = (wanted >= 0) & (wanted < classes)
        tl.store(chosen + row, tl.where(is_class | (first > 0), value, float("nan")))


@triton.jit
def gradient_pass(
    logits, target, tops, totals, grad, counted, dx, V, first, ignore, smoothing, z, x_m, x_n, t_m, g_m, d_m,
    MEAN: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Reads a row, writes a row; `dx` may be `logits`. An ignored row has a gradient of zeros.

    first: of the classes that these are; a target that is not among them has no column.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0)
    at = tl.load(target + row * t_m)
    made = dx + row * d_m
    if at == ignore:
        for begin in range(0, V, COLUMNS):
            columns = begin + tl.arange(0, COLUMNS)
            tl.store(made + columns, tl.zeros((COLUMNS,), kind).to(dx.dtype.element_ty), mask=columns < V)
    else:
        upstream = tl.load(grad + row * g_m).to(kind)
        if MEAN:
            upstream = upstream / tl.load(counted)
        write_gradient(
            logits + row * x_m, made, at - first, V, x_n, tl.load(tops + row), tl.load(totals + row), upstream,
            smoothing, z, COLUMNS, WIDE,
        )  # fmt: skip


@triton.jit
def loss_and_gradient(
    logits, target, losses, dx, upstream, V, ignore, smoothing, z, x_m, x_n, t_m, d_m,
    SMOOTHS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Both at once: reads a row twice (partly from the L2 cache then), writes it once; `dx` may be `logits`."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0)
    at = tl.load(target + row * t_m)
    start, made = logits + row * x_m, dx + row * d_m
    if at == ignore:
        tl.store(losses + row, 0.0)
        for begin in range(0, V, COLUMNS):
            columns = begin + tl.arange(0, COLUMNS)
            tl.store(made + columns, tl.zeros((COLUMNS,), kind).to(dx.dtype.element_ty), mask=columns < V)
    else:
        loss, top, total = row_loss(start, at, V, x_n, smoothing, z, SMOOTHS, COLUMNS, WIDE)
        tl.store(losses + row, loss)
        tl.debug_barrier()  # the target's logit has been read before anything is written over it
        write_gradient(start, made, at, V, x_n, top, total, tl.load(upstream), smoothing, z, COLUMNS, WIDE)


@triton.jit
def add_up(
    losses, target, result, counted, M, ignore, t_m, MEAN: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sum of all losses, or their mean over the targets that count, and how many those are; one program."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.zeros((ROWS,), kind)
    count = tl.zeros((ROWS,), tl.int32)
    for begin in range(0, M, ROWS):
        rows = begin + tl.arange(0, ROWS)
        total += tl.load(losses + rows, mask=rows < M, other=0.0)
        at = tl.load(target + rows * t_m, mask=rows < M, other=ignore)
        count += ((rows < M) & (at != ignore)).to(tl.int32)
    loss = tl.sum(total, 0)
    number = tl.sum(count, 0).to(kind)
    if MEAN:
        loss = loss / number
    tl.store(result, loss)
    tl.store(counted, number)


def columns_config(classes: int) -> tuple[int, int, int]:
    """Columns of a block, and its warps forward and backward (measured on an H200, 8192 rows of 50304 classes: 192 and
    418 µs with 4096, 8 and 16; 199 and 428 with 2048, 8 and 8)."""
    columns = min(4096, triton.next_power_of_2(classes))
    return columns, max(1, columns // 512), max(1, columns // 256)


def _common(
    places: Mapping[str, Place], ignore: int, smoothing: float, z: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    logits = places["logits"]
    arguments = {name: Pointer(name) for name in places} | {
        "V": logits.shape[1], "ignore": ignore, "smoothing": float(smoothing), "z": float(z),
        "x_m": logits.strides[0], "x_n": logits.strides[1], "t_m": places["target"].strides[0],
    }  # fmt: skip
    constants = {"COLUMNS": columns_config(logits.shape[1])[0], "WIDE": logits.dtype == "float64"}
    return arguments, constants


def forward_plan(places: Mapping[str, Place], *, ignore: int, smoothing: float, z: float, reduction: str) -> LaunchPlan:
    arguments, constants = _common(places, ignore, smoothing, z)
    rows, classes = places["logits"].shape
    wide = places["logits"].wide
    grid, warps = (rows, 1), columns_config(classes)[1]
    constants["SMOOTHS"] = smoothing > 0
    each = Step(f"{__name__}:loss_pass", grid, arguments, constants, warps=warps, wide=wide)
    last = Step(
        f"{__name__}:add_up", (1, 1),
        {name: Pointer(name) for name in ("losses", "target", "result", "counted")}
        | {"M": rows, "ignore": ignore, "t_m": places["target"].strides[0]},
        {"MEAN": reduction == "mean", "ROWS": _BLOCK_OF_ROWS, "WIDE": constants["WIDE"]}, warps=16,
    )  # fmt: skip
    return LaunchPlan((each, last) if reduction != "none" else (each,))


def part_plan(places: Mapping[str, Place], *, first: int, classes: int, ignore: int) -> LaunchPlan:
    logits = places["logits"]
    rows, width = logits.shape
    columns, warps, _ = columns_config(width)
    arguments: dict[str, Argument] = {name: Pointer(name) for name in places}
    arguments |= {
        "V": width, "first": first, "classes": classes, "ignore": ignore, "x_m": logits.strides[0],
        "x_n": logits.strides[1], "t_m": places["target"].strides[0],
    }  # fmt: skip
    constants = {"COLUMNS": columns, "WIDE": logits.dtype == "float64"}
    return LaunchPlan((Step(f"{__name__}:part_pass", (rows, 1), arguments, constants, warps=warps, wide=logits.wide),))


def backward_plan(
    places: Mapping[str, Place], *, ignore: int, smoothing: float, z: float, mean: bool, first: int = 0
) -> LaunchPlan:
    arguments, constants = _common(places, ignore, smoothing, z)
    arguments |= {"first": first, "counted": arguments.get("counted")}
    rows, classes = places["logits"].shape
    written = places.get("dx", places["logits"])
    arguments |= {"dx": arguments.get("dx", Pointer("logits")), "d_m": written.strides[0]}
    arguments["g_m"] = places["grad"].strides[0] if places["grad"].shape else 0
    constants["MEAN"] = mean
    wide = places["logits"].wide or written.wide
    step = Step(
        f"{__name__}:gradient_pass", (rows, 1), arguments, constants, warps=columns_config(classes)[2], wide=wide
    )
    return LaunchPlan((step,))


def forward(
    launch: Any, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str, overwrite: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    kind, device = accumulator(logits.dtype), logits.device
    losses, tops, totals = (torch.empty(target.shape, dtype=kind, device=device) for _ in range(3))
    result, counted = (torch.empty((), dtype=kind, device=device) for _ in range(2))
    given = {
        "logits": by_rows(logits), "target": target.reshape(-1), "losses": losses.view(-1), "tops": tops.view(-1),
        "totals": totals.view(-1), "result": result, "counted": counted,
    }  # fmt: skip
    written = ("losses", "tops", "totals", "result", "counted")
    launch(
        forward_plan, given, written=written, ignore=ignore_index, smoothing=float(label_smoothing), z=float(z_loss),
        reduction=reduction,
    )  # fmt: skip
    return losses if reduction == "none" else result, tops, totals, counted


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
