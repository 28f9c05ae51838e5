"""Attention of new tokens over keys and values that lie in pages, in plain torch.

The one idea: the new tokens of all sequences stand in one row, and a *tile* names a few neighbours of one sequence:
which row of the page tables is theirs, where they stand in the row of tokens, how many they are, and the position of
the first. A decoding sequence is a tile of one token, a chunk of a prompt is several tiles; a tile of no token is
padding. So one operator serves both, and the same tokens in other tiles attend to the same keys.

Names: T tokens, H heads of queries, K heads of keys and values, E width of a head, P pages, N tokens of a page,
R sequences, M pages of the longest sequence, B tiles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import CONFIDENCE, accumulator, rounding_error, unit
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.paged_attention.codes import CODES, take_pages
from tilemesh.kernels.paged_attention.cost import FORM, PAGE_TOKENS
from tilemesh.kernels.problems import SizedProblem

WIDEST_HEAD = 256
MOST_ROWS = 128
"""Of a tile: tokens times the query heads that share a key head."""
KEY_BLOCK = 64
"""Keys are reduced in blocks of so many positions, the first at position 0."""
EVEN_SPLIT = 1024
"""Keys of a part where a token's bits must not follow from how many others there are (`even`): enough that few parts
are written and added up for a prompt, and few enough that several programs share a long sequence that decodes."""
_TILE_ROWS = {2: 64, 4: 32, 8: 16}
"""Tokens times query heads of a tile of a prompt, by the bytes of an element."""
_NARROW = 64
"""Heads up to this width have twice as many: a key is then read for twice as many queries, and there is room."""
_LEAST_ROWS = 16


def prompt_tile(group: int, width: int, itemsize: int, even: bool = False) -> int:
    """Tokens of a tile of a prompt, where `group` query heads share a key head. `even`: see `paged_attention`."""
    if even:
        return max(1, even_rows(group, itemsize) // group)
    rows = _TILE_ROWS[itemsize] * (2 if width <= _NARROW and itemsize == 2 else 1)
    return max(1, _LEAST_ROWS // group, rows // group)


def even_rows(group: int, itemsize: int) -> int:
    """Tokens times query heads that an `even` program multiplies, however many of them are there."""
    return max(_TILE_ROWS[itemsize], 1 << (group - 1).bit_length())


def check(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, key_scales: Tensor | None,
    value_scales: Tensor | None, sinks: Tensor | None, tile: int, split: int, longest: int, window: int, cap: float,
    even: bool, settled: bool,
) -> None:  # fmt: skip
    shapes = f"q {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
    if q.dim() != 3 or keys.dim() != 4 or keys.shape != values.shape or q.shape[2] != keys.shape[3]:
        raise UsageError(f"{shapes}: expected q (T, H, E), and keys and values (P, N, K, E)")
    if not 1 <= q.shape[2] <= WIDEST_HEAD:
        raise UsageError(f"{shapes}: expected heads from 1 to {WIDEST_HEAD} wide")
    if keys.shape[2] == 0 or q.shape[1] % keys.shape[2]:
        raise UsageError(f"{shapes}: expected the query heads to be a multiple of the key heads")
    for name, indices, last in (("tables", tables, None), ("tiles", tiles, 4)):
        if indices.dim() != 2 or indices.dtype != torch.int32 or (last and indices.shape[1] != last):
            raise UsageError(
                f"{name} is {indices.dtype} of shape {tuple(indices.shape)}: expected int32 tables (R, M) and tiles "
                "(B, 4)"
            )
    _check_codes(q, keys, values, key_scales, value_scales)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise UsageError(f"sinks {tuple(sinks.shape)}: expected one of each of {q.shape[1]} query heads")
    group = q.shape[1] // keys.shape[2]
    if tile < 1 or tile * group > max(MOST_ROWS, group):
        raise UsageError(f"tile is {tile} and {group} query heads share a key head: expected at most {MOST_ROWS} rows")
    if even and (not split or tile > prompt_tile(group, q.shape[2], q.element_size(), even)):
        raise UsageError(
            f"even, and tile is {tile}, split {split}: expected parts, and tiles of at most "
            f"{prompt_tile(group, q.shape[2], q.element_size(), even)} tokens"
        )
    if split < 0 or split % KEY_BLOCK or longest < 1 or window < 0 or not 0 <= cap < math.inf:
        raise UsageError(
            f"split is {split}, longest {longest}, window {window}, cap {cap}: expected a multiple of {KEY_BLOCK} or 0 "
            "for one part, at least one key, a number of keys or 0 for all, and a number above 0 or 0 for none"
        )


def _check_codes(
    q: Tensor, keys: Tensor, values: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> None:
    if key_scales is None and value_scales is None:
        if not q.dtype == keys.dtype == values.dtype:
            raise UsageError(f"q {q.dtype}, keys {keys.dtype}, values {values.dtype}: expected one dtype for all")
        return
    shapes = [None if scales is None else tuple(scales.shape) for scales in (key_scales, value_scales)]
    if shapes != [tuple(keys.shape[:3])] * 2 or keys.dtype not in CODES.values() or values.dtype != keys.dtype:
        raise UsageError(
            f"keys {keys.dtype}, values {values.dtype}, scales of shapes {shapes}: expected int8 or uint8 (fp8) codes, "
            f"and scales {tuple(keys.shape[:3])} for both"
        )


def served(q: Tensor, *_: object) -> bool:
    """On a GPU float64 is torch's; in the interpreter, whose tensors are on a CPU, it is ours too."""
    return q.dtype is not torch.float64 or q.device.type == "cpu"


@operator(
    kernel="tilemesh.kernels.paged_attention.kernel",
    check=check,
    served=served,
    own_dtype=("keys", "values", "key_scales", "value_scales", "sinks"),
)
def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    tile: int = 1,
    split: int = 0,
    longest: int = 1,
    window: int = 0,
    cap: float = 0.0,
    even: bool = False,
    settled: bool = False,
) -> Tensor:
    """softmax(q k / sqrt(E)) v of each new token over the keys of its own sequence up to its own position: (T, H, E).

    q: (T, H, E). keys, values: (P, N, K, E), any strides but 1 along E; H is a multiple of K. tables: (R, M) int32,
    the pages of each sequence. tiles: (B, 4) int32, each a row of the tables, the first token, how many tokens, and the
    first one's position; every token is in one tile, and tokens in none have no result.
    key_scales, value_scales: (P, N, K) float32, where keys and values are codes of 8 bits (int8, or fp8 as uint8).
    tile: the most tokens of a tile. split: keys are attended to in parts of so many, which run at the same time and are
    added up in order; 0: in one. longest: keys of the longest sequence, at least. window: a token sees the last so many
    keys, its own included; 0: all. cap: scores s are cap tanh(s / cap); 0: as they are. sinks: (H,), of each query
    head a score more, in the softmax alone: it takes no value. A token's result depends on its own sequence, the tile's
    size and `split` alone; `even`: on its own sequence and `split`, whatever the tiles are. Kernels compute in float32
    (float64 for float64) and round probabilities to q's dtype.
    settled: tables and tiles are no results of the kernel launched just before, and may be read before it has ended.
    """
    keys, values = decoded_pages(keys, values, key_scales, value_scales, accumulator(q.dtype))
    y_THE = torch.zeros_like(q)
    for row, first, count, position in tiles.tolist():
        if count:
            rows = slice(first, first + count)
            weight_KGTS, v_KSE = _weights(
                q[rows], keys, values, tables[row], position, window, cap, sinks, accumulator(q.dtype)
            )
            y_KGTE = weight_KGTS @ v_KSE[:, None]
            y_THE[rows] = y_KGTE.flatten(0, 1).transpose(0, 1).to(q.dtype)
    return y_THE


def decoded_pages(
    keys: Tensor, values: Tensor, key_scales: Tensor | None, value_scales: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What codes mean; keys and values without scales as they are."""
    if key_scales is None or value_scales is None:
        return keys, values
    every = torch.arange(len(keys), device=keys.device)
    return take_pages(keys, key_scales, every, dtype), take_pages(values, value_scales, every, dtype)


def _weights(
    q_THE: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    position: int,
    window: int,
    cap: float,
    sinks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Probabilities (K, G, T, S) and values (K, S, E) of one tile."""
    count, heads, width = q_THE.shape
    page_tokens, kv_heads = keys.shape[1:3]
    seen = position + count
    pages = table[: -(-seen // page_tokens)].long()
    k_KSE, v_KSE = (stored[pages].flatten(0, 1)[:seen].transpose(0, 1).to(dtype) for stored in (keys, values))
    q_KGTE = q_THE.to(dtype).transpose(0, 1).reshape(kv_heads, heads // kv_heads, count, width)
    scores = q_KGTE @ k_KSE[:, None].mT / math.sqrt(width)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    key_S, at_T1 = torch.arange(seen, device=q_THE.device), torch.arange(position, seen, device=q_THE.device)[:, None]
    hidden_TS = key_S > at_T1
    if window:
        hidden_TS = hidden_TS | (key_S <= at_T1 - window)
    scores = scores.masked_fill(hidden_TS, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, -1), v_KSE
    sink_KGT1 = sinks.to(dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat((scores, sink_KGT1), -1), -1)[..., :-1], v_KSE


def exact(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, key_scales: Tensor | None = None,
    value_scales: Tensor | None = None, sinks: Tensor | None = None, *, tile: int = 1, split: int = 0,
    longest: int = 1, window: int = 0, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """The float64 result, for errors to be measured against."""
    keys, values = decoded_pages(keys, values, key_scales, value_scales, torch.float64)
    return _each_tile(q, keys, values, tables, tiles, window, cap, sinks, lambda weight, value: weight @ value)


def error_bound(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, key_scales: Tensor | None = None,
    value_scales: Tensor | None = None, sinks: Tensor | None = None, *, tile: int = 1, split: int = 0,
    longest: int = 1, window: int = 0, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """How far each element of a correct result may be from `exact`: as in `attention.reference.error_bound`."""
    keys, values = decoded_pages(keys, values, key_scales, value_scales, torch.float64)
    own, wide = unit(q.dtype), unit(accumulator(q.dtype))
    largest = q.double().norm(dim=-1).amax() * keys.double().norm(dim=-1).amax() / math.sqrt(q.shape[-1])
    relative = wide * (CONFIDENCE * q.shape[-1] ** 0.5 * largest + CONFIDENCE * longest**0.5 + 16 + 4 * cap)

    def bound(weight: Tensor, value: Tensor) -> Tensor:
        rounded = CONFIDENCE * own * (weight.square() @ value.square()).sqrt()
        return rounded + 2 * relative * (weight @ value.abs()) + rounding_error(weight @ value, q.dtype)

    return 1.01 * _each_tile(q, keys, values, tables, tiles, window, cap, sinks, bound)


def _each_tile(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, window: int, cap: float,
    sinks: Tensor | None, compute: object,
) -> Tensor:  # fmt: skip
    made = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, first, count, position in tiles.tolist():
        if count:
            weight, value = _weights(
                q[first : first + count], keys, values, tables[row], position, window, cap, sinks, torch.float64
            )
            part = compute(weight, value[:, None])  # type: ignore[operator]
            made[first : first + count] = part.flatten(0, 1).transpose(0, 1)
    return made


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Random ones of a problem, for benchmarks and tests: one new token in each sequence, pages in random order."""
    sequences, longest, kv_heads, group, width = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    each = -(-longest // PAGE_TOKENS)
    pool = (sequences * each, PAGE_TOKENS, kv_heads, width)
    q = torch.randn(sequences, kv_heads * group, width, generator=generator, device=device).to(dtype)
    keys, values = (torch.randn(pool, generator=generator, device=device).to(dtype) for _ in range(2))
    tables = torch.randperm(sequences * each, generator=generator, device=device).view(sequences, each)
    number = torch.arange(sequences, device=device)
    tiles = torch.stack((number, number, torch.ones_like(number), torch.full_like(number, longest - 1)), 1)
    return q, keys, values, tables.to(torch.int32), tiles.to(torch.int32)


class PagedBench(FunctionBench):
    """`longest` is the problem's own: parts of longer sequences would have no room."""

    def _options(self, problem: SizedProblem) -> dict[str, int]:
        return {"split": BENCH_SPLIT, "longest": problem.sizes[1]}


BENCH_SPLIT = 256
BENCH = PagedBench(paged_attention, FORM, arguments, exact=exact, bound=error_bound)
