"""The passes around the tile kernels: reduce partial tiles, epilogue over a product, activation gradient, aligned copy.

All are bound by memory: each says what it reads and writes. Like kernel.py, this file is loaded twice.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tilemesh.kernels.activations.kernel import activate, through
from tilemesh.kernels.early import take_turn
from tilemesh.kernels.matmul.kernel import load_c, locate, store_tile


@triton.jit
def reduce_tiles(
    work, c, d, z, M, N, c_m, c_n, d_m, d_n, tile0,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    C_KIND: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum SPLIT partial tiles in order, finish, write D. Reads SPLIT float32 tiles. Grid: (tiles, BLOCK_M / ROWS)."""
    tile = tl.program_id(0)
    row0, col0 = locate(tile0 + tile, M, N, BLOCK_M, BLOCK_N, GROUP)
    down = tl.program_id(1) * ROWS
    offsets = (down + tl.arange(0, ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if EARLY:
        take_turn()
    base = work + (tile * SPLIT).to(tl.int64) * (BLOCK_M * BLOCK_N)
    total = tl.load(base + offsets)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(base + part * (BLOCK_M * BLOCK_N) + offsets)
    if C_KIND != "none":
        total += load_c(c, row0 + down, col0, M, N, c_m, c_n, ROWS, BLOCK_N, C_KIND).to(tl.float32)
    if KEEP:
        store_tile(z, total, row0 + down, col0, M, N, d_m, d_n, ROWS, BLOCK_N)
    store_tile(d, activate(total, ACTIVATION), row0 + down, col0, M, N, d_m, d_n, ROWS, BLOCK_N)


@triton.jit
def epilogue_pass(
    product, c, d, z, M, N, p_m, p_n, c_m, c_n, d_m, d_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, C_KIND: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """D = act(product + C); `product` may be D itself. Reads 2 MN, writes MN. Grid: blocks."""
    row0, col0 = locate(tl.program_id(0), M, N, ROWS, COLUMNS, 1)
    total = load_c(product, row0, col0, M, N, p_m, p_n, ROWS, COLUMNS, "full").to(tl.float32)
    if C_KIND != "none":
        total += load_c(c, row0, col0, M, N, c_m, c_n, ROWS, COLUMNS, C_KIND).to(tl.float32)
    if KEEP:
        store_tile(z, total, row0, col0, M, N, d_m, d_n, ROWS, COLUMNS)
    store_tile(d, activate(total, ACTIVATION), row0, col0, M, N, d_m, d_n, ROWS, COLUMNS)


@triton.jit
def gradient_pass(
    grad, saved, out, sums, M, N, g_m, g_n, s_m, s_n, o_m, o_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, C_KIND: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out = grad * act'(saved), and C's gradient summed on the way. Reads 2 MN, writes MN. Grid: blocks.

    A row C leaves one float32 row a row block in `sums` (row blocks, N), a column C one column a column block in
    (column blocks, M): the caller adds the few that are left, in order, so the result does not depend on timing.
    """
    row0, col0 = locate(tl.program_id(0), M, N, ROWS, COLUMNS, 1)
    value = load_c(grad, row0, col0, M, N, g_m, g_n, ROWS, COLUMNS, "full").to(tl.float32)
    if ACTIVATION != "none":
        kept = load_c(saved, row0, col0, M, N, s_m, s_n, ROWS, COLUMNS, "full").to(tl.float32)
        value = through(value, kept, ACTIVATION)
    store_tile(out, value, row0, col0, M, N, o_m, o_n, ROWS, COLUMNS)
    if C_KIND == "row":
        columns = col0 + tl.arange(0, COLUMNS)
        tl.store(sums + row0 // ROWS * N + columns, tl.sum(value, 0), mask=columns < N)
    elif C_KIND == "column":
        rows = row0 + tl.arange(0, ROWS)
        tl.store(sums + col0 // COLUMNS * M + rows, tl.sum(value, 1), mask=rows < M)


@triton.jit
def copy_words(
    block, source, target, M, N, P, Q, s_m, t_m, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """A block of an aligned copy by 64-bit words, each put together from the two source words that it straddles.

    A word is loaded only if an element of its row lies in it, so what is read beyond a matrix shares an aligned word
    with an element of it: no allocation ends there. The first of a row holds elements of the row before, shifted out.
    """
    LANES: tl.constexpr = 64 // BITS
    row0, col0 = locate(block, P, Q, ROWS, COLUMNS, 1)
    rows = row0 + tl.arange(0, ROWS)[:, None]
    words = col0 // LANES + tl.arange(0, COLUMNS // LANES)[None, :]
    columns = words * LANES
    begin = rows * s_m
    ahead = begin % LANES
    where = source.to(tl.pointer_type(tl.uint64), bitcast=True) + begin // LANES + words
    inside = (rows < M) & (columns < N)
    low = tl.load(where, mask=inside, other=0)
    high = tl.load(where + 1, mask=inside & (ahead > 0) & (columns + LANES - ahead < N), other=0)
    bits = (ahead * BITS).to(tl.uint64)
    value = (low >> bits) | ((high << (63 - bits)) << 1)  # two shifts: one of 64 would be undefined
    beyond = ((LANES - tl.minimum(tl.maximum(N - columns, 1), LANES)) * BITS).to(tl.uint64)
    value = (value << beyond) >> beyond
    there = target.to(tl.pointer_type(tl.uint64), bitcast=True) + rows * (t_m // LANES) + words
    tl.store(there, value, mask=(rows < P) & (columns < Q))


@triton.jit
def copy_block(
    block, source, target, M, N, P, Q, s_m, s_n, t_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One block of target (P, Q), into which source (M, N) is copied; zeros beyond it."""
    if WORDS:
        copy_words(block, source, target, M, N, P, Q, s_m, t_m, ROWS, COLUMNS, BITS)
    else:
        row0, col0 = locate(block, P, Q, ROWS, COLUMNS, 1)
        value = load_c(source, row0, col0, M, N, s_m, s_n, ROWS, COLUMNS, "full")
        store_tile(target, value, row0, col0, P, Q, t_m, 1, ROWS, COLUMNS)


@triton.jit
def copy_pass(
    source, target, M, N, P, Q, s_m, s_n, t_m, source_2, target_2, M_2, N_2, P_2, Q_2, u_m, u_n, v_m, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr, WORDS_2: tl.constexpr,
    BOTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One matrix, or two in one launch, into rows that start aligned. Reads MN, writes PQ. Grid: blocks of all."""
    if EARLY:
        take_turn()
    block = tl.program_id(0)
    if BOTH:
        if block < blocks:
            copy_block(block, source, target, M, N, P, Q, s_m, s_n, t_m, ROWS, COLUMNS, BITS, WORDS)
        else:
            copy_block(block - blocks, source_2, target_2, M_2, N_2, P_2, Q_2, u_m, u_n, v_m,
                       ROWS, COLUMNS, BITS, WORDS_2)  # fmt: skip
    else:
        copy_block(block, source, target, M, N, P, Q, s_m, s_n, t_m, ROWS, COLUMNS, BITS, WORDS)
