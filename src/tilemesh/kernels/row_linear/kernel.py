"""The Triton kernel of one row times a matrix: every weight is read once, and nothing else takes time.

A program has ROWS rows of the weight and steps over the columns. It keeps ROWS x COLUMNS sums and adds them up at the
end, so that the only exchange between threads is one per row. The order of the sums is fixed.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step, blocks

_MANY = 8192


@triton.jit
def dots(x, w, rows, first, N, K, w_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, kind: tl.constexpr):
    """Of x with these rows of w, counted from `first`."""
    columns = tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), kind)
    line = w + (first + rows)[:, None].to(tl.int64) * w_n
    for start in range(0, K, COLUMNS):
        at = start + columns
        inside = (rows < N)[:, None] & (at < K)[None, :]
        weight = tl.load(line + at[None, :], mask=inside, other=0.0, eviction_policy="evict_first").to(kind)
        value = tl.load(x + at, mask=at < K, other=0.0).to(kind)
        sums += weight * value[None, :]
    return tl.sum(sums, 1)


@triton.jit
def row_product(
    x, w, bias, y, N, K, w_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS of the N results. Reads K weights for each, and as many for its gate."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    made = dots(x, w, rows, 0, N, K, w_n, ROWS, COLUMNS, kind)
    if BIASED:
        made += tl.load(bias + rows, mask=rows < N, other=0.0).to(kind)
    if GATED:
        values = dots(x, w, rows, N, N, K, w_n, ROWS, COLUMNS, kind)
        if BIASED:
            values += tl.load(bias + N + rows, mask=rows < N, other=0.0).to(kind)
        made = made / (1.0 + tl.exp(-made)) * values
    tl.store(y + rows, made.to(y.dtype.element_ty), mask=rows < N)


def plan(places: Mapping[str, Place], *, gated: bool, rows: int = 0, columns: int = 0, warps: int = 4) -> LaunchPlan:
    x, w = places["x"], places["w"]
    outputs, inputs = places["y"].shape[1], x.shape[1]
    columns = columns or min(1024, max(16, triton.next_power_of_2(inputs)))
    # Enough programs for every multiprocessor to have a few, and bytes in flight for each to wait for memory once.
    rows = rows or (4 if gated or outputs < _MANY else 8)
    arguments: dict[str, Argument] = {name: Pointer(name) for name in places}
    arguments.setdefault("bias", None)
    arguments |= {"N": outputs, "K": inputs, "w_n": w.strides[0]}
    constants = {
        "ROWS": rows, "COLUMNS": columns, "GATED": gated, "BIASED": "bias" in places, "WIDE": x.dtype == "float64",
    }  # fmt: skip
    step = Step(f"{__name__}:row_product", (blocks(outputs, rows), 1), arguments, constants, warps=warps, wide=w.wide)
    return LaunchPlan((step,))


def forward(launch: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
    gated = gate != "none"
    y = torch.empty((1, weight.shape[0] // (2 if gated else 1)), dtype=x.dtype, device=x.device)
    given = {"x": x if x.stride(1) == 1 else x.contiguous()}
    given["w"] = weight if weight.stride(1) == 1 else weight.contiguous()
    if bias is not None:
        given["bias"] = bias if bias.stride(0) == 1 else bias.contiguous()
    given["y"] = y
    launch(plan, given, written=("y",), gated=gated)
    return y
