"""The Triton kernels of an embedding, forward and backward, and the plans that launch them.

Backward sorts the tokens, so that the gradients of one row of the table stand side by side: a program per row adds up
its own and writes the row, zeros where there is none. Nothing is atomic, and nothing is written twice. A token that is
in the batch more than STRETCH times would keep one program busy: its gradients are first added up by stretches of the
sorted order, of which each belongs to at most two such tokens.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.launch.call import Place, one_launch
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.launch.tensors import flat
from tilemesh.kernels.rows import by_rows

STRETCH = 64  # of the sorted tokens
_ELEMENTS, _WARPS = 4096, 4  # of a program: 32 per thread


@triton.jit
def forward_pass(
    tokens, weight, positions, y, N, V, D, T, start, w_m, w_n, p_m, p_n, y_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS tokens by COLUMNS features per program. Reads ND and writes as much."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < N) & (columns[None, :] < D)
    token = tl.load(tokens + rows, mask=rows < N, other=0).to(tl.int64)
    known = (token >= 0) & (token < V)
    value = tl.load(weight + token[:, None] * w_m + columns[None, :] * w_n, mask=inside & known[:, None], other=0.0).to(
        kind
    )
    value = tl.where(known[:, None], value, float("nan"))
    if positions is not None:
        at = (start + rows % T)[:, None] * p_m
        value += tl.load(positions + at + columns[None, :] * p_n, mask=inside, other=0.0).to(kind)
    tl.store(y + rows[:, None].to(tl.int64) * y_m + columns[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def add_rows(
    grad, order, begin, end, columns, D, g_m, g_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """The sum of the gradients that stand from `begin` to `end` in the sorted order, some columns of it."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.zeros((ROWS, COLUMNS), kind)
    for first in range(begin, end, ROWS):
        places = first + tl.arange(0, ROWS)
        rows = tl.load(order + places, mask=places < end, other=0)
        inside = (places[:, None] < end) & (columns[None, :] < D)
        total += tl.load(grad + rows[:, None] * g_m + columns[None, :] * g_n, mask=inside, other=0.0).to(kind)
    return tl.sum(total, 0)


@triton.jit
def stretch_pass(
    grad, order, sorted_tokens, bounds, partial, N, V, D, g_m, g_n,
    STRETCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums of one stretch that belong to frequent tokens: the one it begins with, and another that it ends with."""
    stretch = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = stretch * STRETCH
    end = tl.minimum(begin + STRETCH, N)
    left, right = tl.load(sorted_tokens + begin), tl.load(sorted_tokens + end - 1)
    made = partial + stretch.to(tl.int64) * 2 * D + columns
    if (left >= 0) & (left < V):
        first, last = tl.load(bounds + left).to(tl.int32), tl.load(bounds + left + 1).to(tl.int32)
        if last - first > STRETCH:
            total = add_rows(grad, order, begin, tl.minimum(last, end), columns, D, g_m, g_n, ROWS, COLUMNS, WIDE)
            tl.store(made, total, mask=columns < D)
    if (right != left) & (right >= 0) & (right < V):
        first, last = tl.load(bounds + right).to(tl.int32), tl.load(bounds + right + 1).to(tl.int32)
        if last - first > STRETCH:
            total = add_rows(grad, order, first, end, columns, D, g_m, g_n, ROWS, COLUMNS, WIDE)
            tl.store(made + D, total, mask=columns < D)


@triton.jit
def row_pass(
    grad, order, bounds, partial, dweight, D, g_m, g_n, d_m,
    STRETCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row of the table's gradient, some columns of it."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    token = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = tl.load(bounds + token).to(tl.int32), tl.load(bounds + token + 1).to(tl.int32)
    made = dweight + token.to(tl.int64) * d_m + columns
    if end - begin <= STRETCH:
        total = add_rows(grad, order, begin, end, columns, D, g_m, g_n, ROWS, COLUMNS, WIDE)
        tl.store(made, total.to(dweight.dtype.element_ty), mask=columns < D)
    else:
        sums = tl.zeros((ROWS, COLUMNS), kind)
        after = (end + STRETCH - 1) // STRETCH
        for first in range(begin // STRETCH, after, ROWS):
            stretches = first + tl.arange(0, ROWS)
            # In the stretch that it begins inside of, the token is the one that the stretch ends with.
            slots = stretches.to(tl.int64) * 2 + (stretches * STRETCH < begin).to(tl.int64)
            inside = (stretches[:, None] < after) & (columns[None, :] < D)
            sums += tl.load(partial + slots[:, None] * D + columns[None, :], mask=inside, other=0.0)
        tl.store(made, tl.sum(sums, 0).to(dweight.dtype.element_ty), mask=columns < D)


def _block(width: int) -> tuple[int, int]:
    """Rows and columns of a program."""
    columns = min(1024, triton.next_power_of_2(width))
    return max(1, _ELEMENTS // columns), columns


def forward_plan(places: Mapping[str, Place], *, context: int, start: int) -> LaunchPlan:
    weight, y = places["weight"], places["y"]
    (count,), (vocabulary, width) = places["tokens"].shape, weight.shape
    p_m, p_n = places["positions"].strides if "positions" in places else (0, 0)
    rows, columns = _block(width)
    numbers: dict[str, Argument] = {} if "positions" in places else {"positions": None}
    numbers |= {
        "N": count, "V": vocabulary, "D": width, "T": context, "start": start, "w_m": weight.strides[0],
        "w_n": weight.strides[1], "p_m": p_m, "p_n": p_n, "y_m": y.strides[0],
    }  # fmt: skip
    constants = {"ROWS": rows, "COLUMNS": columns, "WIDE": weight.dtype == "float64"}
    grid = (blocks(count, rows), blocks(width, columns))
    return one_launch(f"{__name__}:forward_pass", grid, places, numbers, constants, warps=_WARPS, varying=("start",))


def backward_plan(places: Mapping[str, Place]) -> LaunchPlan:
    grad, dweight = places["grad"], places["dweight"]
    (count, width), (vocabulary, _) = grad.shape, dweight.shape
    rows, columns = _block(width)
    shared: dict[str, Argument] = {name: Pointer(name) for name in ("grad", "order", "bounds", "partial")}
    shared |= {"D": width, "g_m": grad.strides[0], "g_n": grad.strides[1]}
    constants = {"STRETCH": STRETCH, "ROWS": rows, "COLUMNS": columns, "WIDE": grad.dtype == "float64"}
    across, wide = blocks(width, columns), grad.wide or dweight.wide
    of_stretches = Step(
        f"{__name__}:stretch_pass", (blocks(count, STRETCH), across),
        {**shared, "sorted_tokens": Pointer("sorted_tokens"), "N": count, "V": vocabulary}, constants,
        warps=_WARPS, wide=wide,
    )  # fmt: skip
    of_rows = Step(
        f"{__name__}:row_pass", (vocabulary, across),
        {**shared, "dweight": Pointer("dweight"), "d_m": dweight.strides[0]}, constants, warps=_WARPS, wide=wide,
    )  # fmt: skip
    return LaunchPlan((of_stretches, of_rows))


def forward(launch: Any, tokens: Tensor, weight: Tensor, positions: Tensor | None, start: int) -> Tensor:
    width = weight.shape[1]
    y = torch.empty((*tokens.shape, width), dtype=weight.dtype, device=weight.device)
    given = {"tokens": flat(tokens), "weight": weight, "y": by_rows(y)}
    given |= {} if positions is None else {"positions": positions}
    launch(forward_plan, given, written=("y",), context=tokens.shape[-1], start=int(start))
    return y


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[None, Tensor, Tensor | None]:
    tokens, weight, positions, start = arguments
    (grad,) = gradients
    vocabulary, width = weight.shape
    sorted_tokens, order = torch.sort(flat(tokens), stable=True)
    steps = torch.arange(vocabulary + 1, dtype=tokens.dtype, device=tokens.device)
    bounds = torch.searchsorted(sorted_tokens, steps)
    dweight = torch.empty((vocabulary, width), dtype=weight.dtype, device=weight.device)
    stretches = blocks(tokens.numel(), STRETCH)
    partial = torch.empty((stretches, 2, width), dtype=accumulator(weight.dtype), device=weight.device)
    given = {
        "grad": by_rows(grad), "order": order, "sorted_tokens": sorted_tokens, "bounds": bounds, "partial": partial,
        "dweight": dweight,
    }  # fmt: skip
    launch(backward_plan, given, written=("partial", "dweight"))
    return None, dweight, None if positions is None else _of_positions(grad, positions, start)


def _of_positions(grad: Tensor, positions: Tensor, start: int) -> Tensor:
    """Sums over all sequences, by torch: each position's are added in one order."""
    context, width = grad.shape[-2:]
    summed = grad.reshape(-1, context, width).sum(0)
    if positions.shape[0] == context:
        return summed
    made = torch.zeros(positions.shape, dtype=positions.dtype, device=positions.device)
    made[start : start + context] = summed
    return made
