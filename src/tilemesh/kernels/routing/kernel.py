"""The Triton kernels of routing: scores to experts and places, rows to their places and back; and their plans.

Routing is two launches. The first takes chunks of tokens: softmax, the likeliest experts one after the other, weights,
and how often the chunk's tokens picked each expert. The second adds up what the chunks before picked, and gives each
pair of its chunk the next place of its expert. Rows are moved by token: a program reads its tokens' rows once and
writes them to all of their places, or adds up what lies there.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.launch.call import Place, one_launch
from tilemesh.kernels.launch.steps import Argument, Buffer, LaunchPlan, Pointer, Step, blocks

_SCORES = 4096  # of a tile
_LEAST_CHUNK, _CHUNKS = 128, 128  # tokens of a chunk at least; chunks at most, or half as many
_ROW_ELEMENTS = 2048  # of a program that moves rows


@triton.jit
def probabilities(scores, rows, columns, N, X, s_n):
    """Softmax of rows of scores; 0 beyond the experts, and something finite beyond the rows."""
    inside = (rows < N)[:, None] & (columns < X)[None, :]
    value = tl.load(scores + rows.to(tl.int64)[:, None] * s_n + columns[None, :], mask=inside, other=0.0)
    value = tl.where((columns < X)[None, :], value, float("-inf"))
    raised = tl.exp(value - tl.max(value, 1)[:, None])
    return raised / tl.sum(raised, 1)[:, None]


@triton.jit
def pick_experts(
    scores, chosen, weights, experts, picks, N, X, C, CHUNK, s_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PICKED: tl.constexpr, RENORMALIZED: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """One chunk of tokens. Reads NX, writes 2 NC. CHOSEN: experts are not picked, but read."""
    first = tl.program_id(0) * CHUNK
    columns = tl.arange(0, COLUMNS)
    places = tl.arange(0, PICKED)[None, :]
    counted = tl.zeros((COLUMNS,), tl.int32)
    for begin in range(first, tl.minimum(first + CHUNK, N), ROWS):
        rows = begin + tl.arange(0, ROWS)
        left = probabilities(scores, rows, columns, N, X, s_n)
        left = tl.where((columns < X)[None, :], left, -1.0)  # below every probability, as what is taken
        weight = tl.zeros((ROWS, PICKED), tl.float32)
        expert = tl.zeros((ROWS, PICKED), tl.int32)
        for place in range(C):
            if CHOSEN:
                index = tl.load(chosen + rows.to(tl.int64) * C + place, mask=rows < N, other=0).to(tl.int32)
                value = tl.sum(tl.where(columns[None, :] == index[:, None], left, 0.0), 1)
            else:
                value, index = tl.max(left, 1, return_indices=True)
                index = tl.minimum(index, X - 1)  # whatever NaN compares to
            weight = tl.where(places == place, value[:, None], weight)
            expert = tl.where(places == place, index[:, None], expert)
            taken = columns[None, :] == index[:, None]
            if not CHOSEN:
                left = tl.where(taken, -1.0, left)
            counted += tl.sum((taken & (rows < N)[:, None]).to(tl.int32), 0)
        if RENORMALIZED:
            weight = weight / tl.sum(weight, 1)[:, None]
        inside = (rows < N)[:, None] & (places < C)
        to = rows.to(tl.int64)[:, None] * C + places
        tl.store(weights + to, weight, mask=inside)
        tl.store(experts + to, expert.to(tl.int64), mask=inside)
    tl.store(picks + tl.program_id(0) * X + columns, counted, mask=columns < X)


@triton.jit
def place_pairs(
    experts, picks, slots, counts, N, X, C, CHUNK, chunks,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """One chunk of tokens. Reads NC and what every chunk picked, writes NC."""
    chunk = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    known = (columns < X)[None, :]
    total = tl.zeros((COLUMNS,), tl.int32)
    before = tl.zeros((COLUMNS,), tl.int32)
    for begin in range(0, chunks, HELD):
        which = (begin + tl.arange(0, HELD))[:, None]
        counted = tl.load(picks + which * X + columns[None, :], mask=(which < chunks) & known, other=0)
        total += tl.sum(counted, 0)
        before += tl.sum(tl.where(which < chunk, counted, 0), 0)
    if chunk == 0:
        tl.store(counts + columns, total.to(tl.int64), mask=columns < X)
    after = tl.cumsum(total, 0) - total + before  # the next place of each expert
    stop = tl.minimum((chunk + 1) * CHUNK, N) * C
    for begin in range(chunk * CHUNK * C, stop, PAIRS):
        pairs = begin + tl.arange(0, PAIRS)
        expert = tl.load(experts + pairs, mask=pairs < stop, other=-1).to(tl.int32)
        mine = (expert[:, None] == columns[None, :]).to(tl.int32)
        slot = tl.sum(mine * (tl.cumsum(mine, 0) - 1 + after[None, :]), 1)
        tl.store(slots + pairs, slot.to(tl.int64), mask=pairs < stop)
        after += tl.sum(mine, 0)


@triton.jit
def scores_back(
    scores, experts, grad, dscores, N, X, C, s_n, g_n, g_c, d_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PICKED: tl.constexpr, RENORMALIZED: tl.constexpr,
):  # fmt: skip
    """Through weights and softmax. Reads NX and 2 NC, writes NX."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    p = probabilities(scores, rows, columns, N, X, s_n)
    above = tl.zeros((ROWS, COLUMNS), tl.float32)
    chosen = tl.zeros((ROWS, COLUMNS), tl.float32)
    for place in range(C):
        index = tl.load(experts + rows.to(tl.int64) * C + place, mask=rows < N, other=0).to(tl.int32)
        value = tl.load(grad + rows.to(tl.int64) * g_n + place * g_c, mask=rows < N, other=0.0)
        mine = columns[None, :] == index[:, None]
        above = tl.where(mine, value[:, None], above)
        chosen = tl.where(mine, 1.0, chosen)
    if RENORMALIZED:
        share = tl.sum(chosen * p, 1)
        mean = tl.sum(p * above, 1) / share
        above = chosen * (above - mean[:, None]) / share[:, None]
    slope = p * (above - tl.sum(p * above, 1)[:, None])
    to = dscores + rows.to(tl.int64)[:, None] * d_n + columns[None, :]
    tl.store(to, slope, mask=(rows < N)[:, None] & (columns < X)[None, :])


@triton.jit
def spread_rows(
    x, slots, y, N, C, D, x_n, y_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of some tokens to all of their places. Reads ND, writes NCD."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for begin in range(0, D, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        inside = (rows < N)[:, None] & (columns < D)[None, :]
        value = tl.load(x + rows.to(tl.int64)[:, None] * x_n + columns[None, :], mask=inside, other=0.0)
        for place in range(C):
            slot = tl.load(slots + rows.to(tl.int64) * C + place, mask=rows < N, other=0)
            tl.store(y + slot[:, None] * y_n + columns[None, :], value, mask=inside)


@triton.jit
def gather_rows(
    x, weights, slots, y, N, C, D, x_n, y_n, w_n, w_c,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sum of what lies at the places of some tokens, each times its weight. Reads NCD, writes ND."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for begin in range(0, D, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        inside = (rows < N)[:, None] & (columns < D)[None, :]
        total = tl.zeros((ROWS, COLUMNS), kind)
        for place in range(C):
            slot = tl.load(slots + rows.to(tl.int64) * C + place, mask=rows < N, other=0)
            value = tl.load(x + slot[:, None] * x_n + columns[None, :], mask=inside, other=0.0).to(kind)
            if WEIGHTED:
                weight = tl.load(weights + rows.to(tl.int64) * w_n + place * w_c, mask=rows < N, other=0.0)
                value *= weight.to(kind)[:, None]
            total += value
        tl.store(y + rows.to(tl.int64)[:, None] * y_n + columns[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def unpermute_back(
    grad, x, weights, slots, dx, dweights, N, C, D, g_n, g_d, x_n, w_n, w_c,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """To the places of some tokens their gradient times the weight; of the weights, grad . x. Reads ND and NCD, writes
    NCD."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for place in range(C):
        slot = tl.load(slots + rows.to(tl.int64) * C + place, mask=rows < N, other=0)
        weight = tl.load(weights + rows.to(tl.int64) * w_n + place * w_c, mask=rows < N, other=0.0).to(kind)
        product = tl.zeros((ROWS,), kind)
        for begin in range(0, D, COLUMNS):
            columns = begin + tl.arange(0, COLUMNS)
            inside = (rows < N)[:, None] & (columns < D)[None, :]
            at = grad + rows.to(tl.int64)[:, None] * g_n + columns[None, :] * g_d
            above = tl.load(at, mask=inside, other=0.0).to(kind)
            value = tl.load(x + slot[:, None] * x_n + columns[None, :], mask=inside, other=0.0).to(kind)
            made = above * weight[:, None]
            tl.store(dx + slot[:, None] * D + columns[None, :], made.to(dx.dtype.element_ty), mask=inside)
            product += tl.sum(above * value, 1)
        to = dweights + rows.to(tl.int64) * C + place
        tl.store(to, product.to(dweights.dtype.element_ty), mask=rows < N)


# ---- plans -------------------------------------------------------------------------------------------------------


def route_plan(places: Mapping[str, Place], *, renormalized: bool) -> LaunchPlan:
    (tokens, experts), picked = places["scores"].shape, places["weights"].shape[1]
    columns = max(16, triton.next_power_of_2(experts))
    chunk = max(_LEAST_CHUNK, triton.next_power_of_2(blocks(tokens, _CHUNKS)))
    chunks = blocks(tokens, chunk)
    arguments: dict[str, Argument] = {"chosen": None, **{name: Pointer(name) for name in (*places, "picks")}}
    arguments |= {"N": tokens, "X": experts, "C": picked, "CHUNK": chunk, "chunks": chunks}
    arguments["s_n"] = places["scores"].strides[0]
    rows = max(1, min(_SCORES // columns, chunk))
    constants: dict[str, object] = {"ROWS": rows, "COLUMNS": columns, "PICKED": triton.next_power_of_2(picked)}
    constants |= {"RENORMALIZED": renormalized, "CHOSEN": "chosen" in places}
    pairs: dict[str, object] = {
        "PAIRS": max(16, _SCORES // columns),
        "COLUMNS": columns,
        "HELD": max(1, min(_CHUNKS, _SCORES // columns)),
    }
    return LaunchPlan(
        (
            Step(f"{__name__}:pick_experts", (chunks, 1), arguments, constants, varying=("N", "CHUNK")),
            Step(f"{__name__}:place_pairs", (chunks, 1), arguments, pairs, varying=("N", "CHUNK", "chunks")),
        ),
        {"picks": Buffer(chunks * experts, "int32")},
    )


def scores_back_plan(places: Mapping[str, Place], *, renormalized: bool) -> LaunchPlan:
    (tokens, experts), picked = places["scores"].shape, places["experts"].shape[1]
    columns = max(16, triton.next_power_of_2(experts))
    rows = max(1, _SCORES // columns)
    numbers: dict[str, Argument] = {
        "N": tokens, "X": experts, "C": picked, "s_n": places["scores"].strides[0], "g_n": places["grad"].strides[0],
        "g_c": places["grad"].strides[1], "d_n": places["dscores"].strides[0],
    }  # fmt: skip
    constants = {
        "ROWS": rows,
        "COLUMNS": columns,
        "PICKED": triton.next_power_of_2(picked),
        "RENORMALIZED": renormalized,
    }
    return one_launch(f"{__name__}:scores_back", (blocks(tokens, rows), 1), places, numbers, constants, varying=("N",))


def _rows_step(kernel: str, places: Mapping[str, Place], strides: Mapping[str, Argument], **more: object) -> LaunchPlan:
    """A program takes some tokens' rows."""
    (tokens, picked), width = places["slots"].shape, places["x"].shape[1]
    columns = min(1024, max(16, triton.next_power_of_2(width)))
    rows = max(1, _ROW_ELEMENTS // columns)
    numbers = {"N": tokens, "C": picked, "D": width, **strides}
    constants, grid = {"ROWS": rows, "COLUMNS": columns, **more}, (blocks(tokens, rows), 1)
    return one_launch(f"{__name__}:{kernel}", grid, places, numbers, constants, wide=True, varying=("N",))


def spread_plan(places: Mapping[str, Place]) -> LaunchPlan:
    return _rows_step("spread_rows", places, {"x_n": places["x"].strides[0], "y_n": places["y"].strides[0]})


def gather_plan(places: Mapping[str, Place]) -> LaunchPlan:
    x, weights = places["x"], places.get("weights")
    strides: dict[str, Argument] = {"x_n": x.strides[0], "y_n": places["y"].strides[0]}
    w_n, w_c = (None, None) if weights is None else weights.strides
    strides |= {"w_n": w_n, "w_c": w_c} | ({"weights": None} if weights is None else {})
    return _rows_step("gather_rows", places, strides, WEIGHTED=weights is not None, WIDE=x.dtype == "float64")


def unpermute_back_plan(places: Mapping[str, Place]) -> LaunchPlan:
    grad, x, weights = (places[name] for name in ("grad", "x", "weights"))
    strides: dict[str, Argument] = {
        "g_n": grad.strides[0], "g_d": grad.strides[1], "x_n": x.strides[0], "w_n": weights.strides[0],
        "w_c": weights.strides[1],
    }  # fmt: skip
    return _rows_step("unpermute_back", places, strides, WIDE=x.dtype == "float64")


# ---- operators ---------------------------------------------------------------------------------------------------


def _beside(tensor: Tensor) -> Tensor:
    """Whose rows have their elements side by side: itself, or a copy."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def route_forward(
    launch: Any, scores: Tensor, chosen: Tensor | None, picked: int, renormalized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, groups = scores.shape
    weights, whole = _empty(scores, tokens, picked), torch.int64
    experts, slots = _empty(scores, tokens, picked, dtype=whole), _empty(scores, tokens, picked, dtype=whole)
    counts = _empty(scores, groups, dtype=whole)
    given = {"scores": _beside(scores), "weights": weights, "experts": experts, "slots": slots, "counts": counts}
    given |= {} if chosen is None else {"chosen": chosen.contiguous()}
    launch(route_plan, given, written=("weights", "experts", "slots", "counts"), renormalized=renormalized)
    return weights, experts, slots, counts


def route_backward(
    launch: Any, gradients: tuple[Tensor | None, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor | None, None]:
    (grad, *_), (scores, _, _, renormalized), (experts,) = gradients, arguments, kept
    if grad is None:
        return None, None
    dscores = _empty(scores, *scores.shape)
    given = {"scores": _beside(scores), "experts": experts, "grad": grad, "dscores": dscores}
    launch(scores_back_plan, given, written=("dscores",), renormalized=renormalized)
    return dscores, None


def permute_forward(launch: Any, x: Tensor, slots: Tensor) -> Tensor:
    y = _empty(x, slots.numel(), x.shape[1])
    launch(spread_plan, {"x": _beside(x), "slots": slots.contiguous(), "y": y}, written=("y",))
    return y


def permute_backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor, None]:
    (grad,), (x, slots) = gradients, arguments
    dx = _empty(x, *x.shape)
    launch(gather_plan, {"x": _beside(grad), "slots": slots.contiguous(), "y": dx}, written=("y",))
    return dx, None


def unpermute_forward(launch: Any, results: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    y = _empty(results, len(slots), results.shape[1])
    given = {"x": _beside(results), "weights": weights, "slots": slots.contiguous(), "y": y}
    launch(gather_plan, given, written=("y",))
    return y


def unpermute_backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, None]:
    (grad,), (results, weights, slots) = gradients, arguments
    dx, dweights = _empty(results, *results.shape), _empty(weights, *weights.shape)
    given = {
        "grad": grad, "x": _beside(results), "weights": weights, "slots": slots.contiguous(), "dx": dx,
        "dweights": dweights,
    }  # fmt: skip
    launch(unpermute_back_plan, given, written=("dx", "dweights"))
    return dx, dweights, None


ROUTE = SimpleNamespace(forward=route_forward, backward=route_backward)
PERMUTE = SimpleNamespace(forward=permute_forward, backward=permute_backward)
UNPERMUTE = SimpleNamespace(forward=unpermute_forward, backward=unpermute_backward)
