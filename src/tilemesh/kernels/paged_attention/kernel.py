"""The Triton kernels of attention over pages: parts of each sequence at the same time, then added up in order.

A program has one tile (a few tokens of one sequence), one key head with all query heads that share it, and, where the
keys are split, every so many parts of them. Each part leaves its unscaled sum, its largest score and its sum of
weights; a second kernel adds the parts of a token up in the order of positions. Which program computed a part, and how
many there were, changes nothing: a token's bits follow from its own keys, the size of a tile and of a part. Even ones
do not follow from the size of a tile: all are multiplied as one of a fixed number of rows, and where tiles fill the GPU
a program adds up its parts by itself, by the same operations in the same order.

Keys and values of 8 bits are read as codes, which 16-bit numbers hold exactly. A key's scale is multiplied into its
scores and a value's into its weights, so that nothing of the size of a page is computed twice.

Names as in reference.py; `q_t` is the stride of q along its tokens, in elements.
"""

# mypy: disable-error-code="no-untyped-def"

import math
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
from tilemesh.kernels.paged_attention.reference import KEY_BLOCK, even_rows

_LOG2_E = 1.4426950408889634
_PROGRAMS = 2112  # sixteen for each of 132 multiprocessors: parts of sequences are shared out among about so many
_FULL = 528  # programs from which an even one has all parts of its tile
_LEAST_ROWS = 16  # of a product
_MANY_ROWS = 32  # from which it pays to ask about the keys of the last block alone
_PARTS, _ADDING_WARPS = 8, 2  # parts that are added up at a time
_VARYING = ("K", "M", "H", "T", "window", "turns")


@triton.jit
def decoded(codes, like, FLOAT8: tl.constexpr):
    """Codes of 8 bits as numbers of the dtype of `like`."""
    if FLOAT8:
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return codes.to(tl.float32).to(like.dtype)


@triton.jit
def attend_block(
    query, at, counts, keys, values, key_scales, value_scales, table, page, start, end, window, factor, cap, largest,
    sums, total, k_p, k_n, v_p, v_n, K, E, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIKE: tl.constexpr, PADDED: tl.constexpr, UPCAST: tl.constexpr,
    FLOAT8: tl.constexpr, ALL: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """One tile over the BLOCK_N keys from `start` on, which lie in `page`; and the pages of the next block. ALL: every
    query sees all of them, and none lies behind the end."""
    columns = tl.arange(0, HEAD)
    key_at = start + tl.arange(0, BLOCK_N)
    within = page * k_p + key_at % PAGE * k_n
    from_keys = keys + within[:, None] + columns[None, :]
    # Keys behind the end are some of page 0: their scores are not looked at. Values count as nothing only if zero.
    inside = (key_at < end)[:, None]
    if PADDED:
        inside = inside & (columns < E)[None, :]
        key = tl.load(from_keys, mask=inside, other=0)
    else:
        key = tl.load(from_keys)
    if not ALIKE:
        within = page * v_p + key_at % PAGE * v_n
    from_values = values + within[:, None] + columns[None, :]
    if ALL and not PADDED:
        value = tl.load(from_values)
    else:
        value = tl.load(from_values, mask=inside, other=0)
    if key_scales is not None:
        key, value = decoded(key, query, FLOAT8), decoded(value, query, FLOAT8)
    elif UPCAST:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=kind) * factor
    if key_scales is not None:
        scale_at = (page * PAGE + key_at % PAGE) * K
        scores *= tl.load(key_scales + scale_at, mask=key_at < end, other=0.0)[None, :]
    if CAPPED:  # tanh(u) is 2 sigmoid(2u) - 1
        scores = cap * (2 * tl.sigmoid(scores) - 1)
    if not ALL:
        seen = counts[:, None] & (key_at[None, :] <= at[:, None])
        if WINDOW:
            seen = seen & (key_at[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    base = larger
    if not ALL:  # A row that has seen no key yet is left at zero: -inf less -inf would be NaN.
        base = tl.where(larger == float("-inf"), 0.0, larger)
    weight = tl.exp2(scores - base[:, None])
    before = tl.exp2(largest - base)
    sums = sums * before + tl.sum(weight, 1)
    if value_scales is not None:
        weight *= tl.load(value_scales + scale_at, mask=key_at < end, other=0.0)[None, :]
    total = total * before[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee", out_dtype=kind)
    page = tl.load(table + (key_at + BLOCK_N) // PAGE, mask=key_at + BLOCK_N < end, other=0)
    return larger, sums, total, page


@triton.jit
def pages_of(table, begin, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of the BLOCK_N keys from `begin` on."""
    key_at = begin + tl.arange(0, BLOCK_N)
    return tl.load(table + key_at // PAGE, mask=key_at < end, other=0)


@triton.jit
def attend_part(
    query, at, counts, keys, values, key_scales, value_scales, table, page, begin, whole, end, window, factor, cap,
    k_p, k_n, v_p, v_n, K, E, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIKE: tl.constexpr, PADDED: tl.constexpr, UPCAST: tl.constexpr,
    FLOAT8: tl.constexpr, WHOLE: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """One tile over the keys [begin, end), of which the first block lies in `page`: largest score, sum of weights,
    weighted values. Blocks begin at multiples of BLOCK_N. WHOLE: every query sees the keys before `whole`, and nothing
    is asked about them."""
    largest = tl.full((ROWS,), float("-inf"), kind)
    sums = tl.zeros((ROWS,), kind)
    total = tl.zeros((ROWS, HEAD), kind)
    # A block's pages are looked up one block ahead: were keys to wait for them, no two blocks would be on their way.
    if WHOLE:
        for start in range(begin, whole, BLOCK_N):
            largest, sums, total, page = attend_block(
                query, at, counts, keys, values, key_scales, value_scales, table, page, start, end, window, factor,
                cap, largest, sums, total, k_p, k_n, v_p, v_n, K, E, PAGE, BLOCK_N, HEAD, WINDOW, CAPPED, ALIKE,
                PADDED, UPCAST, FLOAT8, True, kind,
            )  # fmt: skip
        begin = whole
    for start in range(begin, end, BLOCK_N):
        largest, sums, total, page = attend_block(
            query, at, counts, keys, values, key_scales, value_scales, table, page, start, end, window, factor,
            cap, largest, sums, total, k_p, k_n, v_p, v_n, K, E, PAGE, BLOCK_N, HEAD, WINDOW, CAPPED, ALIKE, PADDED,
            UPCAST, FLOAT8, False, kind,
        )  # fmt: skip
    return largest, sums, total


@triton.jit
def attend_pages(
    q, keys, values, key_scales, value_scales, sinks, tables, tiles, y, parts, extremes, weights, K, M, H, T, E, window,
    factor, cap, turns, q_t, q_h, k_p, k_n, k_h, v_p, v_n, v_h, y_t, y_h,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    HEAD: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, ALIKE: tl.constexpr, PADDED: tl.constexpr,
    UPCAST: tl.constexpr, FLOAT8: tl.constexpr, WHOLE: tl.constexpr, ALONE: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Reads the keys and values of its parts once. Without SPLIT or with all parts ALONE it writes y, else what
    `add_parts` reads."""
    if EARLY == 1:
        take_turn()
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    tile = tl.program_id(0) // K
    head = tl.program_id(0) % K
    row = tl.load(tiles + 4 * tile)
    first = tl.load(tiles + 4 * tile + 1)
    count = tl.load(tiles + 4 * tile + 2)
    position = tl.load(tiles + 4 * tile + 3)
    table = tables + row * M
    end = tl.where(count > 0, position + count, 0)
    begin = end * 0
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    part0 = 0
    low = begin
    if SPLIT:
        part0 = begin // SPLIT + tl.program_id(1)
        low = tl.maximum(begin, part0 * SPLIT)
    page = pages_of(table, low, end, PAGE, BLOCK_N)
    if EARLY == 2:  # where the keys lie was read before the kernel ahead had ended
        take_turn()
    lanes = tl.arange(0, ROWS)
    token, member = lanes // GROUP, lanes % GROUP
    counts = token < count
    at = position + token
    columns = tl.arange(0, HEAD)
    from_queries = q + ((first + token) * q_t + (head * GROUP + member) * q_h)[:, None] + columns[None, :]
    held = counts[:, None] & (columns < E)[None, :]
    query = tl.load(from_queries, mask=held, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    keys += head * k_h
    values += head * v_h
    if key_scales is not None:
        key_scales += head
        value_scales += head
    if SPLIT == 0:
        whole = tl.minimum(position, end) // BLOCK_N * BLOCK_N
        largest, sums, total = attend_part(
            query, at, counts, keys, values, key_scales, value_scales, table, page, begin, whole, end, window, factor,
            cap, k_p, k_n, v_p, v_n, K, E, PAGE, BLOCK_N, HEAD, ROWS, WINDOW, CAPPED, ALIKE, PADDED, UPCAST, FLOAT8,
            WHOLE, kind,
        )  # fmt: skip
        if sinks is not None:
            sink = tl.load(sinks + head * GROUP + member).to(kind) * 1.4426950408889634
            sums, total = with_sink(sink, largest, sums, total, kind)
        made = total / tl.where(counts, sums, 1.0)[:, None]  # each sees a key: no sum is 0 but of scores -inf
        to_y = y + ((first + token) * y_t + (head * GROUP + member) * y_h)[:, None] + columns[None, :]
        tl.store(to_y, made.to(y.dtype.element_ty), mask=held)
    else:
        largest = tl.full((ROWS,), float("-inf"), kind)
        sums = tl.zeros((ROWS,), kind)
        total = tl.zeros((ROWS, HEAD), kind)
        for part in range(part0, (end + SPLIT - 1) // SPLIT, turns):
            low = tl.maximum(begin, part * SPLIT)
            high = tl.minimum(end, part * SPLIT + SPLIT)
            own, weight, made = attend_part(
                query, at, counts, keys, values, key_scales, value_scales, table, page, low, low, high, window,
                factor, cap, k_p, k_n, v_p, v_n, K, E, PAGE, BLOCK_N, HEAD, ROWS, WINDOW, CAPPED, ALIKE, PADDED,
                UPCAST, FLOAT8, False, kind,
            )  # fmt: skip
            if ALONE:
                largest, before, now = common_base(largest, own, own)
                sums = tl.fma(sums, before, weight * now)
                total = tl.fma(total, before[:, None] + tl.zeros_like(total), made * now[:, None])
            else:
                place = (part * T + first + token).to(tl.int64) * H + head * GROUP + member
                tl.store(extremes + place, own, mask=counts)
                tl.store(weights + place, weight, mask=counts)
                tl.store(parts + place[:, None] * HEAD + columns[None, :], made, mask=counts[:, None])
            page = pages_of(table, (part + turns) * SPLIT, end, PAGE, BLOCK_N)
        if ALONE:
            if sinks is not None:
                sink = tl.load(sinks + head * GROUP + member).to(kind) * 1.4426950408889634
                sums, total = with_sink(sink, largest, sums, total, kind)
            mean = total / tl.where(counts, sums, 1.0)[:, None]
            to_y = y + ((first + token) * y_t + (head * GROUP + member) * y_h)[:, None] + columns[None, :]
            tl.store(to_y, mean.to(y.dtype.element_ty), mask=held)


@triton.jit
def common_base(largest, own, most):
    """Of sums so far and of more parts, whose largest scores are `own` and together `most`: the largest, and what each
    is multiplied by. Nothing that has seen no key is NaN."""
    larger = tl.maximum(largest, most)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, tl.exp2(largest - base), tl.exp2(own - base)


@triton.jit
def with_sink(sink, largest, sums, total, kind: tl.constexpr):
    """Sums and weighted values with a score more that takes no value; in powers of two, as all are here."""
    larger = tl.maximum(largest, sink)
    before = tl.exp2(largest - larger)
    return sums * before + tl.exp2(sink - larger), total * before[:, None]


@triton.jit
def add_parts(
    parts, extremes, weights, sinks, tiles, y, H, T, E, window, y_t, y_h,
    TILE: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, HEAD: tl.constexpr,
    WINDOW: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token and one query head of a tile: its parts in the order of positions, PARTS at a time."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    tile = tl.program_id(0) // TILE
    token = tl.program_id(0) % TILE
    head = tl.program_id(1)
    first = tl.load(tiles + 4 * tile + 1) + token
    count = tl.load(tiles + 4 * tile + 2)
    position = tl.load(tiles + 4 * tile + 3)
    if EARLY:  # the kernel ahead is `attend_pages`, which reads the tiles too
        take_turn()
    columns = tl.arange(0, HEAD)
    end = tl.where(token < count, position + count, 0)
    begin = end * 0
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    largest = tl.full((1,), float("-inf"), kind)
    sums = tl.zeros((1,), kind)
    total = tl.zeros((HEAD,), kind)
    for start in range(begin // SPLIT, (end + SPLIT - 1) // SPLIT, PARTS):
        part = start + tl.arange(0, PARTS)
        there = part * SPLIT < end
        place = (part * T + first).to(tl.int64) * H + head
        own = tl.load(extremes + place, mask=there, other=float("-inf"))
        weight = tl.load(weights + place, mask=there, other=0.0)
        made = tl.load(parts + place[:, None] * HEAD + columns[None, :], mask=there[:, None], other=0.0)
        largest, before, now = common_base(largest, own, tl.max(own, 0))
        sums = tl.fma(sums, before, tl.sum(weight * now, 0) + tl.zeros_like(sums))
        total = tl.fma(total, before + tl.zeros_like(total), tl.sum(made * now[:, None], 0))
    if sinks is not None:
        sink = tl.load(sinks + head + tl.zeros((1,), tl.int32)).to(kind) * 1.4426950408889634
        sums, rows = with_sink(sink, largest, sums, total[None, :], kind)
        total = tl.sum(rows, 0)
    mean = total / tl.where(token < count, sums, 1.0)  # as in `attend_pages`
    there = (columns < E) & (token < count)
    tl.store(y + first * y_t + head * y_h + columns, mean.to(y.dtype.element_ty), mask=there)


def plan(
    places: Mapping[str, Place], *, tile: int, split: int, longest: int, window: int, cap: float = 0.0,
    even: bool = False, early: bool = False, settled: bool = False, interpreted: bool = False,
) -> LaunchPlan:  # fmt: skip
    q, keys, values, y = (places[name] for name in ("q", "keys", "values", "y"))
    (tokens, heads, width), (_, page, kv_heads, _) = q.shape, keys.shape
    count, group = places["tiles"].shape[0], heads // kv_heads
    least = even_rows(group, 8 if q.dtype == "float64" else 4 if q.dtype == "float32" else 2) if even else _LEAST_ROWS
    rows = max(least, triton.next_power_of_2(tile * group))
    head = max(16, triton.next_power_of_2(width))
    parts = blocks(longest, split) if split else 1
    alone = even and (parts == 1 or count * kv_heads >= _FULL)
    turns = 1 if alone else min(parts, max(4, blocks(_PROGRAMS, count * kv_heads)))
    divides = split > 0 and not alone
    wide = q.dtype == "float64"
    kind = "float64" if wide else "float32"
    buffers = {
        "parts": Buffer(parts * tokens * heads * head if divides else 1, kind),
        "extremes": Buffer(parts * tokens * heads if divides else 1, kind),
        "weights": Buffer(parts * tokens * heads if divides else 1, kind),
    }
    arguments: dict[str, Argument] = dict.fromkeys(("key_scales", "value_scales", "sinks"))
    arguments |= {name: Pointer(name) for name in (*places, *buffers)}
    arguments |= {
        "K": kv_heads, "M": places["tables"].strides[0], "H": heads, "T": tokens, "E": width, "window": window,
        "factor": (2 / cap if cap else _LOG2_E) / math.sqrt(width), "cap": _LOG2_E * cap, "turns": turns,
        "q_t": q.strides[0], "q_h": q.strides[1],
        "k_p": keys.strides[0], "k_n": keys.strides[1], "k_h": keys.strides[2], "v_p": values.strides[0],
        "v_n": values.strides[1], "v_h": values.strides[2], "y_t": y.strides[0], "y_h": y.strides[1],
    }  # fmt: skip
    shared = {"BLOCK_N": KEY_BLOCK, "SPLIT": split, "HEAD": head, "WINDOW": bool(window), "WIDE": wide}
    upcast = interpreted and q.dtype in ("float16", "bfloat16")
    constants = {
        **shared, "EARLY": (2 if settled else 1) if early else 0, "GROUP": group, "ROWS": rows, "PAGE": page,
        "CAPPED": bool(cap), "ALIKE": keys.strides == values.strides, "PADDED": head != width, "UPCAST": upcast,
        "FLOAT8": keys.dtype == "uint8", "WHOLE": rows >= _MANY_ROWS and not split and not window,
        "ALONE": alone,
    }  # fmt: skip
    large = any(place.wide for place in places.values())
    warps, stages = _effort(rows, head, q.dtype)
    attending = Step(
        f"{__name__}:attend_pages", (count * kv_heads, turns), arguments, constants, warps=warps, stages=stages,
        wide=large, varying=_VARYING, early=early,
    )  # fmt: skip
    if not divides:
        return LaunchPlan((attending,), buffers)
    names = ("parts", "extremes", "weights", "sinks", "tiles", "y", "H", "T", "E", "window", "y_t", "y_h")
    adding = Step(
        f"{__name__}:add_parts", (count * tile, heads), {name: arguments[name] for name in names},
        {**shared, "EARLY": early, "TILE": tile, "PARTS": 1 if even else _PARTS}, warps=_ADDING_WARPS, stages=1,
        wide=large, varying=_VARYING, early=early,
    )  # fmt: skip
    return LaunchPlan((attending, adding), buffers)


def interpreted_plan(places: Mapping[str, Place], **constants: Any) -> LaunchPlan:
    """In the interpreter, products of 16-bit numbers are taken in float32."""
    return plan(places, **constants, interpreted=True)


def _effort(rows: int, head: int, dtype: str) -> tuple[int, int]:
    """Warps, and stages of loads in flight. Those of few rows were measured on an H200 (docs/serve/LOG.md)."""
    if dtype in ("float32", "float64"):
        return 4, 1
    if rows <= _LEAST_ROWS:
        return 4, (4 if head <= 64 else 2)
    return (8 if rows > 64 else 4), (3 if head <= 128 else 2)


def forward(
    launch: Any, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, key_scales: Tensor | None,
    value_scales: Tensor | None, sinks: Tensor | None, tile: int, split: int, longest: int, window: int, cap: float,
    even: bool, settled: bool,
) -> Tensor:  # fmt: skip
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, keys, values = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, keys, values))
    tables = tables if tables.stride(-1) == 1 else tables.contiguous()
    given = {"q": q, "keys": keys, "values": values, "tables": tables, "tiles": tiles.contiguous(), "y": y}
    if key_scales is not None and value_scales is not None:
        given |= {"key_scales": key_scales.contiguous(), "value_scales": value_scales.contiguous()}
    if sinks is not None:
        given["sinks"] = sinks.contiguous()
    planned = interpreted_plan if q.device.type == "cpu" else plan
    options = {"tile": tile, "split": split, "longest": longest, "window": window, "cap": cap}
    options |= {"even": even, "settled": settled}
    launch(planned, given, written=("y",), **options, early=launches_early(q.device))
    return y
