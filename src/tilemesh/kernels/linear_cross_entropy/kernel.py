"""Loss and gradients of the output projection, some rows at a time: the logits of a chunk are all that exists of them.

For each chunk of rows: logits = x W^T (a library product), then one launch that turns them into their own gradient in
place and leaves the rows' losses (cross_entropy/kernel.py), then dx = dlogits W and dW += dlogits^T x, added up in
float32. The upstream gradient is not known yet: backward scales both, by a launch that does nothing where it is 1.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.lanes import group_of
from tilemesh.kernels.launch.call import Place, one_launch
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, blocks
from tilemesh.kernels.linear_cross_entropy.cost import chunk_rows
from tilemesh.kernels.linear_cross_entropy.reference import held_dtype
from tilemesh.kernels.rows import by_rows

_BLOCK = 4096
_ALIGNED = 64  # classes: whole 128-byte lines of 16-bit logits


@triton.jit
def scale_pass(value, factor, N, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """value *= factor in place; nothing is read or written where the factor is 1."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    by = tl.load(factor).to(kind)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        held = tl.load(value + at, mask=at < N, other=0.0).to(kind)
        tl.store(value + at, (held * by).to(value.dtype.element_ty), mask=at < N)


def scale_plan(places: Mapping[str, Place]) -> LaunchPlan:
    (elements,) = places["value"].shape
    constants, grid = {"BLOCK": _BLOCK, "WIDE": places["value"].dtype == "float64"}, (blocks(elements, _BLOCK), 1)
    return one_launch(f"{__name__}:scale_pass", grid, places, {"N": elements}, constants, warps=8, wide=False)


def chunk_plan(places: Mapping[str, Place], *, ignore: int, smoothing: float, z: float) -> LaunchPlan:
    """Losses of a chunk's rows; its logits become their gradient."""
    logits = places["logits"]
    rows, classes = logits.shape
    numbers: dict[str, Argument] = {
        "dx": Pointer("logits"), "V": classes, "ignore": ignore, "smoothing": smoothing, "z": z,
        "x_m": logits.strides[0], "x_n": 1, "t_m": places["target"].strides[0], "d_m": logits.strides[0],
    }  # fmt: skip
    # Fewer and larger programs than the loss alone has: the rows in work fit into the L2, for their second read.
    columns = min(4096, triton.next_power_of_2(classes))
    warps = max(1, columns // 256)
    constants = {"SMOOTHS": smoothing > 0, "COLUMNS": columns, "GROUP": group_of(logits)}
    constants |= {"WIDE": logits.dtype == "float64"}
    kernel = "tilemesh.kernels.cross_entropy.kernel:loss_and_gradient"
    return one_launch(kernel, (rows, 1), places, numbers, constants, warps=warps)


def forward(
    launch: Any, x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str, overwrite: bool, differentiated: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, targets = by_rows(x), target.reshape(-1)
    classes, table = len(weight), _aligned(weight)
    kind = accumulator(x.dtype)
    losses = torch.empty(targets.shape, dtype=kind, device=x.device)
    upstream = torch.ones((), dtype=kind, device=x.device)
    if reduction == "mean":
        upstream = upstream / (targets != ignore_index).sum()
    dx = torch.empty(x.shape if differentiated else (0,), dtype=x.dtype, device=x.device)
    held = held_dtype(weight.dtype)
    dweight = torch.empty(weight.shape if differentiated else (0,), dtype=held, device=x.device)
    total = dweight
    if differentiated:
        is_summed_there = kind == held and table is weight
        total = dweight if is_summed_there else torch.empty(table.shape, dtype=kind, device=x.device)
        if not rows.shape[0]:
            total.zero_()
    options = {"ignore": ignore_index, "smoothing": float(label_smoothing), "z": float(z_loss)}
    size = chunk_rows(rows.shape[0], len(table), x.element_size())
    for begin in range(0, rows.shape[0], size):
        part, wanted = rows[begin : begin + size], targets[begin : begin + size]
        logits = part @ table.t()
        given = {
            "logits": logits[:, :classes],
            "target": wanted,
            "losses": losses[begin : begin + size],
            "upstream": upstream,
        }
        launch(chunk_plan, given, written=("logits", "losses"), **options)
        if differentiated:
            torch.mm(logits, table, out=by_rows(dx)[begin : begin + size])
            _add_product(total, logits, part, is_first=begin == 0)
        del logits, given  # or they would still be there while the next chunk's are made
    if total is not dweight:
        dweight.copy_(total[:classes])
    loss = losses.sum()
    return loss * upstream if reduction == "mean" else loss, dx, dweight


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, None]:
    weight, overwrite = arguments[1], arguments[-2]
    made = []
    for gradient in kept:
        if overwrite:
            torch.autograd.graph.increment_version(gradient)  # a second backward pass must fail, not scale twice
            gradient = gradient.detach()
        else:
            gradient = gradient.clone()
        launch(scale_plan, {"value": gradient.view(-1), "factor": gradients[0]}, written=("value",))
        made.append(gradient)
    return made[0], made[1].to(weight.dtype), None


def _aligned(weight: Tensor) -> Tensor:
    """The weight with rows of zeros below it where rows of logits would not begin at multiples of 16 bytes.

    The three products would then run at a sixth of their speed. Logits of the added rows are 0, no kernel looks at
    them, and as gradients they add nothing.
    """
    classes = len(weight)
    if classes * weight.element_size() % 16 == 0:
        return weight
    table = weight.new_zeros(blocks(classes, _ALIGNED) * _ALIGNED, weight.shape[1])
    table[:classes].copy_(weight)
    return table


def _add_product(total: Tensor, logits: Tensor, part: Tensor, *, is_first: bool) -> None:
    """total += logits^T part, in total's precision; the first product is written over what is there."""
    across, beta = logits.t(), 0 if is_first else 1
    if total.is_cuda and total.dtype != logits.dtype:
        if is_first:
            torch.mm(across, part, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, across, part, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(across.to(total.dtype), part.to(total.dtype), beta=beta)
