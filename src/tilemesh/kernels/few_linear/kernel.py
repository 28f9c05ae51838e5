"""The Triton kernels of a few rows times a matrix, and of the norm that adds the parts of such products up.

A program has 64 rows of the weight (with a gate, 64 of each half) and a part of the columns; both operands are copied
by TMA, several tiles ahead. The weight stands on the side of the product that tensor cores want to be 64 high, the
tokens on the side that may be short. The order of all sums is fixed.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.early import take_turn
from tilemesh.kernels.few_linear.cost import parts_of
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import launches_early
from tilemesh.kernels.launch.steps import Argument, Descriptor, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.launch.tensors import for_tma

_TILE = 64  # rows of the weight


@triton.jit
def few_product(
    x, w, y, M, N, SHARE,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """TILE of the N results of all M rows over SHARE columns. Reads TILE x SHARE weights, twice that with a gate."""
    if EARLY:
        take_turn()
    row0 = tl.program_id(0) * TILE
    first = tl.program_id(1) * SHARE
    made = tl.zeros((TILE, BLOCK_M), tl.float32)
    values = tl.zeros((TILE, BLOCK_M), tl.float32)
    for at in range(first, first + SHARE, BLOCK_K):
        tokens, weight = x.load([0, at]), w.load([row0, at])
        if UPCAST:
            tokens, weight = tokens.to(tl.float32), weight.to(tl.float32)
        made = tl.dot(weight, tokens.T, made)
        if GATED:
            weight = w.load([N + row0, at])
            if UPCAST:
                weight = weight.to(tl.float32)
            values = tl.dot(weight, tokens.T, values)
    if GATED:
        made = made / (1.0 + tl.exp(-made)) * values
    rows = row0 + tl.arange(0, TILE)
    token = tl.arange(0, BLOCK_M)
    to = y + tl.program_id(1).to(tl.int64) * M * N + token[None, :] * N + rows[:, None]
    tl.store(to, made.to(y.dtype.element_ty), mask=(token < M)[None, :])


@triton.jit
def norm_parts(
    parts, x, scale, y, total, M, N, eps,
    SPLIT: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row. Reads it and its SPLIT parts, writes its sum and the norm of that."""
    if EARLY:
        take_turn()
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row = tl.program_id(0)
    at = tl.arange(0, COLUMNS)
    inside = at < N
    added = tl.zeros((COLUMNS,), kind)
    for part in tl.static_range(SPLIT):
        added += tl.load(parts + (part * M + row) * N + at, mask=inside, other=0.0).to(kind)
    value = tl.load(x + row * N + at, mask=inside, other=0.0).to(kind) + added
    stored = value.to(total.dtype.element_ty)
    tl.store(total + row * N + at, stored, mask=inside)
    value = stored.to(kind)
    factor = tl.load(scale + at, mask=inside, other=0.0).to(kind)
    value = value / tl.sqrt(tl.sum(value * value, 0) / N + eps) * factor
    tl.store(y + row * N + at, value.to(y.dtype.element_ty), mask=inside)


def plan(places: Mapping[str, Place], *, gated: bool, early: bool = False, interpreted: bool = False) -> LaunchPlan:
    x, w, y = places["x"], places["w"], places["y"]
    parts, rows, outputs = y.shape
    share = x.shape[1] // parts
    high = max(16, triton.next_power_of_2(rows))
    programs = (blocks(outputs, _TILE), parts)
    # As many tiles ahead as fit beside a second program where there are two of them, else all that fit.
    columns, stages = (64, 6) if gated else (128, 3 if programs[0] * parts > 132 else 5)
    arguments: dict[str, Argument] = {
        "x": Descriptor("x", x.shape, x.strides, (high, columns)),
        "w": Descriptor("w", w.shape, w.strides, (_TILE, columns)),
        "y": Pointer("y"), "M": rows, "N": outputs, "SHARE": share,
    }  # fmt: skip
    constants = {
        "BLOCK_M": high, "TILE": _TILE, "BLOCK_K": columns, "GATED": gated, "UPCAST": interpreted, "EARLY": early,
    }  # fmt: skip
    step = Step(f"{__name__}:few_product", programs, arguments, constants, stages=stages, wide=w.wide, early=early)
    return LaunchPlan((step,))


def interpreted_plan(places: Mapping[str, Place], *, gated: bool) -> LaunchPlan:
    """In the interpreter, products of 16-bit numbers are taken in float32."""
    return plan(places, gated=gated, interpreted=True)


def norm_plan(places: Mapping[str, Place], *, eps: float, early: bool = False) -> LaunchPlan:
    rows, columns = places["x"].shape
    names = ("parts", "x", "scale", "y", "total")
    arguments: dict[str, Argument] = {name: Pointer(name) for name in names}
    arguments |= {"M": rows, "N": columns, "eps": eps}
    wide = triton.next_power_of_2(columns)
    constants = {
        "SPLIT": places["parts"].shape[0], "COLUMNS": wide, "WIDE": places["x"].dtype == "float64", "EARLY": early,
    }  # fmt: skip
    step = Step(
        f"{__name__}:norm_parts", (rows, 1), arguments, constants, warps=min(16, max(4, wide // 512)), early=early
    )
    return LaunchPlan((step,))


def forward(launch: Any, x: Tensor, weight: Tensor, gate: str) -> Tensor:
    gated = gate != "none"
    outputs = weight.shape[0] // (2 if gated else 1)
    parts = parts_of(outputs, weight.shape[1], gate)
    dtype = x.dtype if parts == 1 else torch.float32
    y = torch.empty((parts, x.shape[0], outputs), dtype=dtype, device=x.device)
    given = {"x": for_tma(x), "w": for_tma(weight), "y": y}
    if x.device.type == "cpu":
        launch(interpreted_plan, given, written=("y",), gated=gated)
    else:
        launch(plan, given, written=("y",), gated=gated, early=launches_early(x.device))
    return y


class PartsNorm:
    """The kernel of `parts_rms_norm`."""

    @staticmethod
    def forward(launch: Any, parts: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        given = {"parts": parts.contiguous(), "x": x.contiguous(), "scale": scale.contiguous(), "y": y, "total": total}
        launch(norm_plan, given, written=("y", "total"), eps=float(eps), early=launches_early(x.device))
        return y, total


PARTS_NORM = PartsNorm()
