"""Attention of one new token in each of many sequences, out of the product of queries, keys and values, in one kernel.

The one idea: the program that attends to a sequence's keys is the only one that needs its new key, so it may as well
turn and store it: a decoding layer then has a kernel less between the product and attention. All keys but the new one
have been there since earlier steps; the new one is what the softmax begins with.

Names as in reference.py and store.py.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.early import take_turn
from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import launches_early
from tilemesh.kernels.launch.implementation import implementation_of
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step
from tilemesh.kernels.paged_attention.kernel import LEAST_ROWS, LOG2_E, attend_block, effort, pages_of
from tilemesh.kernels.paged_attention.reference import KEY_BLOCK, paged_attention
from tilemesh.kernels.paged_attention.store import store_pages

_VARYING = ("M", "window")


@triton.jit
def turned(at, partner, columns, x_s, c, s, mask, PARTS: tl.constexpr, ROTARY: tl.constexpr, kind: tl.constexpr):
    """Heads of which `at` is the first number: their parts added up, and turned."""
    value = tl.load(at + columns, mask=mask, other=0.0).to(kind)
    for part in tl.static_range(1, PARTS):
        value += tl.load(at + part * x_s + columns, mask=mask, other=0.0).to(kind)
    if ROTARY:
        other = tl.load(at + partner, mask=mask, other=0.0).to(kind)
        for part in tl.static_range(1, PARTS):
            other += tl.load(at + part * x_s + partner, mask=mask, other=0.0).to(kind)
        value = value * c + other * s
    return value


@triton.jit
def attend_fresh(
    x, cos, sin, places, keys, values, tables, tiles, y, K, M, H, window, factor, x_s, x_t, c_t, s_t, k_p, k_n, k_h,
    y_t, y_h,
    PARTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD: tl.constexpr, ROTARY: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One sequence and one key head. Reads its keys and values once, and GROUP + 2 heads of the product."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    HALF: tl.constexpr = HEAD // 2
    tile = tl.program_id(0) // K
    head = tl.program_id(0) % K
    row = tl.load(tiles + 4 * tile)
    token = tl.load(tiles + 4 * tile + 1)
    count = tl.load(tiles + 4 * tile + 2)
    position = tl.load(tiles + 4 * tile + 3)
    table = tables + row * M
    end = tl.where(count > 0, position, 0)
    begin = end * 0
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    page = pages_of(table, begin, end, PAGE, BLOCK_N)
    place = tl.load(places + token)
    columns = tl.arange(0, HEAD)[None, :]
    partner = (columns + HALF) % HEAD
    c = tl.full((1, HEAD), 1.0, kind)
    s = tl.full((1, HEAD), 0.0, kind)
    if ROTARY:
        c = tl.load(cos + token * c_t + columns % HALF).to(kind)
        s = tl.load(sin + token * s_t + columns % HALF).to(kind)
        s = tl.where(columns < HALF, -s, s)
    if EARLY:  # where the keys lie and how far to turn were read before the product had ended
        take_turn()
    lanes = tl.arange(0, ROWS)
    counts = (lanes < GROUP) & (count > 0)
    source = x + token.to(tl.int64) * x_t
    heads = (head * GROUP + lanes)[:, None]
    query = turned(source + heads * HEAD, partner, columns, x_s, c, s, counts[:, None], PARTS, ROTARY, kind)
    only = count > 0
    key = turned(source + (H + head) * HEAD, partner, columns, x_s, c, s, only, PARTS, ROTARY, kind)
    value = turned(source + (H + K + head) * HEAD, partner, columns, x_s, c, s, only, PARTS, False, kind)
    # As they are stored, and as attention would have read them.
    query = query.to(y.dtype.element_ty)
    key, value = key.to(keys.dtype.element_ty), value.to(keys.dtype.element_ty)
    stored = place * k_n + head * k_h + columns
    held = only & (place >= 0)
    tl.store(keys + stored, key, mask=held)
    tl.store(values + stored, value, mask=held)
    largest = tl.sum(query.to(kind) * key.to(kind), 1) * factor
    sums = tl.full((ROWS,), 1.0, kind)
    total = tl.zeros((ROWS, HEAD), kind) + value.to(kind)
    if UPCAST:
        query = query.to(tl.float32)
    keys += head * k_h
    values += head * k_h
    at = position - 1 + lanes * 0  # the last key before the new one, of which the window has one less
    for start in range(begin, end, BLOCK_N):
        largest, sums, total, page = attend_block(
            query, at, counts, keys, values, None, None, table, page, start, end, window - 1, factor, largest, sums,
            total, k_p, k_n, k_p, k_n, K, HEAD, PAGE, BLOCK_N, HEAD, WINDOW, True, False, UPCAST, False, False, kind,
        )  # fmt: skip
    to_y = y + token * y_t + heads * y_h + columns
    tl.store(to_y, (total / sums[:, None]).to(y.dtype.element_ty), mask=counts[:, None])


def plan(
    places: Mapping[str, Place], *, window: int, rotary: bool, early: bool = False, interpreted: bool = False
) -> LaunchPlan:
    x, keys, y = places["x"], places["keys"], places["y"]
    (_, heads, width), (_, page, kv_heads, _) = y.shape, keys.shape
    rows = max(LEAST_ROWS, triton.next_power_of_2(heads // kv_heads))
    arguments: dict[str, Argument] = {name: Pointer(name) for name in places}
    arguments |= {
        "K": kv_heads, "M": places["tables"].strides[0], "H": heads, "window": window,
        "factor": LOG2_E / math.sqrt(width), "x_s": x.strides[0], "x_t": x.strides[1],
        "c_t": places["cos"].strides[0], "s_t": places["sin"].strides[0], "k_p": keys.strides[0],
        "k_n": keys.strides[1], "k_h": keys.strides[2], "y_t": y.strides[0], "y_h": y.strides[1],
    }  # fmt: skip
    constants = {
        "PARTS": x.shape[0], "GROUP": heads // kv_heads, "ROWS": rows, "PAGE": page, "BLOCK_N": KEY_BLOCK,
        "HEAD": width, "ROTARY": rotary, "WINDOW": bool(window), "WIDE": y.dtype == "float64", "EARLY": early,
        "UPCAST": interpreted and y.dtype in ("float16", "bfloat16"),
    }  # fmt: skip
    warps, stages = effort(rows, width, y.dtype)
    step = Step(
        f"{__name__}:attend_fresh", (places["tiles"].shape[0] * kv_heads, 1), arguments, constants, warps=warps,
        stages=stages, wide=any(place.wide for place in places.values()), varying=_VARYING, early=early,
    )  # fmt: skip
    return LaunchPlan((step,))


def interpreted_plan(places: Mapping[str, Place], *, window: int, rotary: bool, early: bool = False) -> LaunchPlan:
    """In the interpreter, products of 16-bit numbers are taken in float32."""
    return plan(places, window=window, rotary=rotary, interpreted=True)


def serves(width: int) -> bool:
    """Whether the kernel knows heads of this width."""
    return width >= 16 and width & (width - 1) == 0


def attend_fresh_tokens(
    qkv_STF: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    places_T: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    *,
    heads: int,
    longest: int,
    window: int = 0,
    implementation: str = "auto",
) -> Tensor:
    """`store_pages`, then `paged_attention` in tiles of one token and in one part: (T, H, E), in the pool's dtype.

    tables, tiles, places and angles are no results of the kernel launched just before: they are read before that one
    has ended.
    """
    kv_heads, width = keys.shape[2:]
    if qkv_STF.dim() != 3 or qkv_STF.shape[2] != (heads + 2 * kv_heads) * width or not serves(width):
        raise UsageError(
            f"qkv has shape {tuple(qkv_STF.shape)} and keys {tuple(keys.shape)}: expected (S, T, (H + 2K) E) for "
            f"{heads} query heads, and heads as wide as a power of two, at least 16"
        )
    if keys.shape != values.shape or not (keys.is_contiguous() and values.is_contiguous()):
        raise UsageError("keys and values: expected contiguous pools of pages, one like the other")
    how = implementation_of(implementation, (qkv_STF,))
    if how == "torch":
        q_THE = store_pages(qkv_STF, rotary, places_T, keys, values, heads=heads, implementation="torch")
        options = {"tile": 1, "longest": longest, "window": window, "implementation": "torch"}
        found: Tensor = paged_attention(q_THE, keys, values, tables, tiles, **options)
        return found
    y_THE = torch.empty((qkv_STF.shape[1], heads, width), dtype=keys.dtype, device=keys.device)
    if qkv_STF.stride(2) != 1:
        qkv_STF = qkv_STF.contiguous()
    cos, sin = (qkv_STF[0], qkv_STF[0]) if rotary is None else rotary
    given = {"x": qkv_STF, "cos": cos, "sin": sin, "places": places_T, "keys": keys, "values": values}
    given |= {"tables": tables, "tiles": tiles, "y": y_THE}
    options = {"window": window, "rotary": rotary is not None, "early": launches_early(qkv_STF.device)}
    if how == "interpret":
        call.interpreted(interpreted_plan, given, written=("keys", "values", "y"), **options)
    else:
        call.compiled(plan, given, written=("keys", "values", "y"), **options)
    return y_THE
