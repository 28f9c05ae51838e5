"""The Triton kernels of the likeliest token: pieces of rows at the same time, then the pieces of each row.

A piece whose logits are NaN or infinite says so by its place, -1, and by a logit above all others.
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
from tilemesh.kernels.launch.steps import Argument, Buffer, LaunchPlan, Pointer, Step, blocks

_PIECE = 4096


@triton.jit
def largest_of_pieces(x, largest, at, N, V, x_n, PIECE: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr):
    """PIECE logits of one row. Reads them once."""
    if EARLY:
        take_turn()
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    row, piece = tl.program_id(0), tl.program_id(1)
    columns = piece * PIECE + tl.arange(0, PIECE)
    value = tl.load(x + row.to(tl.int64) * x_n + columns, mask=columns < V, other=0.0).to(kind)
    # NaN and infinities give NaN, everything else 0.
    wrong = tl.sum((value - value != 0.0).to(tl.int32), 0) > 0
    value = tl.where(columns < V, value, float("-inf"))
    most, place = tl.max(value, 0, return_indices=True)
    to = row * tl.num_programs(1) + piece
    tl.store(largest + to, tl.where(wrong, float("inf"), most))
    tl.store(at + to, tl.where(wrong, -1, piece * PIECE + place))


@triton.jit
def largest_of_rows(largest, at, y, PIECES, HELD: tl.constexpr, EARLY: tl.constexpr):
    """One row: the first of its largest pieces."""
    if EARLY:
        take_turn()
    row = tl.program_id(0)
    pieces = tl.arange(0, HELD)
    value = tl.load(largest + row * PIECES + pieces, mask=pieces < PIECES, other=float("-inf"))
    _, piece = tl.max(value, 0, return_indices=True)
    tl.store(y + row, tl.load(at + row * PIECES + piece).to(tl.int64))


def plan(places: Mapping[str, Place], *, early: bool = False) -> LaunchPlan:
    x = places["x"]
    rows, columns = x.shape
    pieces, wide = blocks(columns, _PIECE), x.dtype == "float64"
    buffers = {
        "largest": Buffer(rows * pieces, "float64" if wide else "float32"),
        "at": Buffer(rows * pieces, "int32"),
    }
    arguments: dict[str, Argument] = {name: Pointer(name) for name in ("x", "largest", "at", "y")}
    arguments |= {"N": rows, "V": columns, "x_n": x.strides[0], "PIECES": pieces}
    first = Step(
        f"{__name__}:largest_of_pieces", (rows, pieces), arguments, {"PIECE": _PIECE, "WIDE": wide, "EARLY": early},
        warps=4, wide=x.wide, early=early,
    )  # fmt: skip
    held = {"HELD": max(16, triton.next_power_of_2(pieces)), "EARLY": early}
    second = Step(f"{__name__}:largest_of_rows", (rows, 1), arguments, held, warps=1, early=early)
    return LaunchPlan((first, second), buffers)


def forward(launch: Any, logits: Tensor) -> Tensor:
    y = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    given = {"x": logits if logits.stride(1) == 1 else logits.contiguous(), "y": y}
    launch(plan, given, written=("y",), early=launches_early(logits.device))
    return y
