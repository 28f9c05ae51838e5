"""The Triton kernel of one row times a matrix: every weight is read once, and nothing else takes time.

A program has ROWS rows of the weight and steps over the columns, the next tile of weights being on its way while one is
multiplied. Eight neighbouring products, which one thread has anyway, are added up at once; the sums of threads only at
the end. With a norm before the product the row is x + branch, and its root mean square is summed up beside the
products and divided by at the end. The order of all sums is fixed.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.early import take_turn
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import launches_early
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step, blocks

_NEIGHBOURS = 8  # columns that one thread loads at once: 16 bytes of 16-bit weights


@triton.jit
def weights_at(line, start: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of weights: the rows of `line`, the columns from `start`."""
    at = start + tl.arange(0, COLUMNS)
    if start + COLUMNS <= K:
        return tl.load(line + at[None, :], eviction_policy="evict_first")
    return tl.load(line + at[None, :], mask=(at < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def by_neighbours(product, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr):
    return tl.sum(tl.reshape(product, (ROWS, COLUMNS // NEIGHBOURS, NEIGHBOURS)), 2)


@triton.jit
def row_product(
    x, branch, scale, w, bias, y, total, N, w_n, eps,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, GATED: tl.constexpr,
    WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS of the N results. Reads K weights for each, and as many for its gate."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.minimum(rows, N - 1)[:, None]  # what is outside reads the last row, and is not written
    line = w + own.to(tl.int64) * w_n
    gated_line = line + N.to(tl.int64) * w_n
    sums = tl.zeros((ROWS, COLUMNS // NEIGHBOURS), kind)
    gated_sums = tl.zeros((ROWS, COLUMNS // NEIGHBOURS), kind)
    squares = tl.zeros((1, COLUMNS // NEIGHBOURS), kind)
    if EARLY == 1:
        take_turn()
    weight = weights_at(line, 0, K, COLUMNS)
    gated_weight = weight
    if GATED:
        gated_weight = weights_at(gated_line, 0, K, COLUMNS)
    if EARLY == 2:  # the weights were on their way before the kernel ahead had ended
        take_turn()
    for start in tl.static_range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        now, gated_now = weight.to(kind), gated_weight.to(kind)
        if start + COLUMNS < K:
            weight = weights_at(line, start + COLUMNS, K, COLUMNS)
            if GATED:
                gated_weight = weights_at(gated_line, start + COLUMNS, K, COLUMNS)
        inside = at < K
        value = tl.load(x + at, mask=inside, other=0.0).to(kind)
        if scale is not None:
            # The norm is of the sum as it is stored, which is what the next norm reads.
            stored = (value + tl.load(branch + at, mask=inside, other=0.0).to(kind)).to(total.dtype.element_ty)
            tl.store(total + at, stored, mask=inside & (tl.program_id(0) == 0))
            value = stored.to(kind)
            squares += by_neighbours((value * value)[None, :], 1, COLUMNS, NEIGHBOURS)
            value = value * tl.load(scale + at, mask=inside, other=0.0).to(kind)
        sums += by_neighbours(now * value[None, :], ROWS, COLUMNS, NEIGHBOURS)
        if GATED:
            gated_sums += by_neighbours(gated_now * value[None, :], ROWS, COLUMNS, NEIGHBOURS)
    made, values = tl.sum(sums, 1), tl.sum(gated_sums, 1)
    if scale is not None:
        inverse = 1.0 / tl.sqrt(tl.sum(squares, 1) / K + eps)
        made, values = made * inverse, values * inverse
    if bias is not None:
        made += tl.load(bias + rows, mask=rows < N, other=0.0).to(kind)
        if GATED:
            values += tl.load(bias + N + rows, mask=rows < N, other=0.0).to(kind)
    if GATED:
        made = made / (1.0 + tl.exp(-made)) * values
    tl.store(y + rows, made.to(y.dtype.element_ty), mask=rows < N)


def plan(
    places: Mapping[str, Place], *, gated: bool, eps: float = 0.0, early: bool = False, settled: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> LaunchPlan:  # fmt: skip
    """`tile`: rows, columns and warps of a program."""
    x, w = places["x"], places["w"]
    outputs, inputs = places["y"].shape[1], x.shape[1]
    rows, columns, warps = tile or _tile(outputs, inputs, gated)
    names = ("x", "branch", "scale", "w", "bias", "y", "total")
    arguments: dict[str, Argument] = {name: Pointer(name) if name in places else None for name in names}
    arguments |= {"N": outputs, "w_n": w.strides[0], "eps": eps}
    constants = {
        "K": inputs, "ROWS": rows, "COLUMNS": columns, "NEIGHBOURS": _NEIGHBOURS, "GATED": gated,
        "WIDE": x.dtype == "float64", "EARLY": (2 if settled else 1) if early else 0,
    }  # fmt: skip
    step = Step(
        f"{__name__}:row_product", (blocks(outputs, rows), 1), arguments, constants, warps=warps, wide=w.wide,
        early=early,
    )  # fmt: skip
    return LaunchPlan((step,))


def _tile(outputs: int, inputs: int, gated: bool) -> tuple[int, int, int]:
    """Rows, columns and warps of a program: the best of eight on an H200 for two models' products (docs/serve/LOG.md).

    64 to 128 bytes of weights are on their way for each thread; where rows are few, more programs share them.
    """
    if inputs <= 2048:
        columns = max(16, triton.next_power_of_2(inputs))
        if gated:
            return 2, columns, 4
        return 4, columns if outputs > 8192 else min(columns, 1024), 4
    if inputs <= 4096:
        return (2, 4096, 8) if gated or outputs > 4096 else (2, 1024, 2)
    return 2, 2048, 4


def forward(launch: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str, settled: bool) -> Tensor:
    y = _result(x, weight, gate)
    given = {"x": _dense(x), "w": _dense(weight), "y": y}
    if bias is not None:
        given["bias"] = _dense(bias)
    options = {"gated": gate != "none", "early": launches_early(x.device), "settled": settled}
    launch(plan, given, written=("y",), **options)
    return y


class Normed:
    """The kernel of `norm_row_linear`."""

    @staticmethod
    def forward(
        launch: Any, x: Tensor, branch: Tensor, scale: Tensor, weight: Tensor, eps: float, gate: str, settled: bool
    ) -> tuple[Tensor, Tensor]:
        y, total = _result(x, weight, gate), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        given = {"x": _dense(x), "branch": _dense(branch), "scale": _dense(scale), "w": _dense(weight)}
        given |= {"y": y, "total": total}
        options = {"gated": gate != "none", "eps": float(eps), "early": launches_early(x.device), "settled": settled}
        launch(plan, given, written=("y", "total"), **options)
        return y, total


NORMED = Normed()


def _result(x: Tensor, weight: Tensor, gate: str) -> Tensor:
    return torch.empty((1, weight.shape[0] // (1 if gate == "none" else 2)), dtype=x.dtype, device=x.device)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
