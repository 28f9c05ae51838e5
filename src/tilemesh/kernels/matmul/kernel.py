"""The tile kernels of D = act(A @ B + C): masked pointers, TMA, persistent TMA.

Each program owns one BLOCK_M x BLOCK_N tile of D, walks K in steps of BLOCK_K with the sum in float32 registers,
then adds C, applies the activation and writes once. With SPLIT > 1 a program owns a share of K instead and leaves its
float32 sum in `work`, one contiguous tile after another; `passes.reduce_tiles` finishes them in a fixed order.

With EARLY a kernel of one call lets the next be launched while it still runs; that one waits inside (`take_turn`),
which hides its launch.

This file is loaded twice, once compiled and once interpreted (kernels/launch/interpret.py).

Names: a program's tile starts at (row0, col0); `x_m`, `x_n`, `x_k` are the strides of X along M, N, K in elements.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tilemesh.kernels.activations.kernel import activate
from tilemesh.kernels.early import take_turn


@triton.jit
def locate(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Where tile number `tile` starts. Tiles go down GROUP rows, then one column on: neighbours share A and B in L2."""
    tile_rows = (M + BLOCK_M - 1) // BLOCK_M
    tile_columns = (N + BLOCK_N - 1) // BLOCK_N
    band = tile // (GROUP * tile_columns)
    inside = tile % (GROUP * tile_columns)
    height = tl.minimum(tile_rows - band * GROUP, GROUP)
    return (band * GROUP + inside % height) * BLOCK_M, (inside // height) * BLOCK_N


@triton.jit
def load_c(c, row0, col0, M, N, c_m, c_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, C_KIND: tl.constexpr):
    """The part of C that a ROWS x COLUMNS tile needs, in C's dtype; a vector is read once, not once an element."""
    rows = row0 + tl.arange(0, ROWS)
    columns = col0 + tl.arange(0, COLUMNS)
    if C_KIND == "row":
        value = tl.load(c + columns * c_n, mask=columns < N, other=0.0)[None, :]
    elif C_KIND == "column":
        value = tl.load(c + rows * c_m, mask=rows < M, other=0.0)[:, None]
    else:
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        where = c + rows[:, None] * c_m + columns[None, :] * c_n
        value = tl.load(where, mask=inside, other=0.0)
    return value


@triton.jit
def prefetch_c(c, row0, col0, M, N, c_m, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask for C's tile to be in the L2 when the epilogue reads it: one address a 128-byte line of 16-bit elements."""
    rows = tl.minimum(row0 + tl.arange(0, ROWS), M - 1)
    columns = tl.minimum(col0 + tl.arange(0, COLUMNS // 64) * 64, N - 1)
    where = (c + rows[:, None] * c_m + columns[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_tile(out, value, row0, col0, M, N, o_m, o_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = row0 + tl.arange(0, ROWS)
    columns = col0 + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    where = out + rows[:, None] * o_m + columns[None, :] * o_n
    tl.store(where, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    total, c, d, z, c_desc, d_desc, row0, col0, M, N, c_m, c_n, d_m, d_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, C_KIND: tl.constexpr, ACTIVATION: tl.constexpr,
    KEEP: tl.constexpr, C_TMA: tl.constexpr, D_TMA: tl.constexpr,
):  # fmt: skip
    """The fused epilogue of one (sub)tile: add C, keep the sum if asked, activate, write D."""
    if C_TMA:
        total += c_desc.load([row0, col0]).to(tl.float32)
    elif C_KIND != "none":
        total += load_c(c, row0, col0, M, N, c_m, c_n, ROWS, COLUMNS, C_KIND).to(tl.float32)
    if KEEP:
        store_tile(z, total, row0, col0, M, N, d_m, d_n, ROWS, COLUMNS)
    value = activate(total, ACTIVATION)
    if D_TMA:
        d_desc.store([row0, col0], value.to(d.dtype.element_ty))
    else:
        store_tile(d, value, row0, col0, M, N, d_m, d_n, ROWS, COLUMNS)


@triton.jit
def halves(total, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def finish_in_parts(
    total, c, d, z, c_desc, d_desc, row0, col0, M, N, c_m, c_n, d_m, d_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, C_KIND: tl.constexpr, ACTIVATION: tl.constexpr,
    KEEP: tl.constexpr, C_TMA: tl.constexpr, D_TMA: tl.constexpr,
):  # fmt: skip
    """`finish` over PARTS (1, 2 or 4) column slices: each needs a PARTS-th of the staging memory."""
    if PARTS == 1:
        finish(total, c, d, z, c_desc, d_desc, row0, col0, M, N, c_m, c_n, d_m, d_n,
               ROWS, COLUMNS, C_KIND, ACTIVATION, KEEP, C_TMA, D_TMA)  # fmt: skip
    else:
        left, right = halves(total, ROWS, COLUMNS)
        finish_in_parts(left, c, d, z, c_desc, d_desc, row0, col0, M, N, c_m, c_n, d_m, d_n,
                        ROWS, COLUMNS // 2, PARTS // 2, C_KIND, ACTIVATION, KEEP, C_TMA, D_TMA)  # fmt: skip
        finish_in_parts(right, c, d, z, c_desc, d_desc, row0, col0 + COLUMNS // 2, M, N, c_m, c_n, d_m, d_n,
                        ROWS, COLUMNS // 2, PARTS // 2, C_KIND, ACTIVATION, KEEP, C_TMA, D_TMA)  # fmt: skip


@triton.jit
def start(c, row0, col0, M, N, c_m, c_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, C_KIND: tl.constexpr):
    """The accumulator's first value: zero, or C when it is loaded first (C_KIND other than none)."""
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    if C_KIND != "none":
        total += load_c(c, row0, col0, M, N, c_m, c_n, ROWS, COLUMNS, C_KIND).to(tl.float32)
    return total


@triton.jit
def store_partial(work, total, slot, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One whole tile, contiguous and unmasked: the second pass masks when it writes D."""
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(work + slot.to(tl.int64) * (ROWS * COLUMNS) + offsets, total)


@triton.jit
def share_of_k(K, part, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """First and past-the-last K step of one of SPLIT programs; later shares may be shorter or empty."""
    steps = (K + BLOCK_K - 1) // BLOCK_K
    if SPLIT == 1:
        return 0, steps
    share = (steps + SPLIT - 1) // SPLIT
    return part * share, tl.minimum(part * share + share, steps)


@triton.jit
def nearest_tf32(x):
    """float32 rounded to tf32's 10 bits, as vendor libraries round; the tensor core itself would cut the rest off."""
    rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, rounded)


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    # The interpreter's bfloat16 product is wrong (it multiplies the raw 16-bit integers): UPCAST avoids it there.
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    if PRECISION == "tf32" and a.dtype == tl.float32:
        a = nearest_tf32(a)
        b = nearest_tf32(b)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def pointer_tiles(
    a, b, c, d, z, work, M, N, K, a_m, a_k, b_k, b_n, c_m, c_n, d_m, d_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, C_KIND: tl.constexpr, C_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Masked pointer tiles: any strides, any alignment. Grid: (tiles, SPLIT)."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    if EARLY:
        take_turn()
    row0, col0 = locate(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
    first, last = share_of_k(K, part, BLOCK_K, SPLIT)
    rows = row0 + tl.arange(0, BLOCK_M)
    columns = col0 + tl.arange(0, BLOCK_N)
    steps = first * BLOCK_K + tl.arange(0, BLOCK_K)
    a_rows = rows[:, None] < M
    b_columns = columns[None, :] < N
    a_at = a + rows[:, None] * a_m + steps[None, :] * a_k
    b_at = b + steps[:, None] * b_k + columns[None, :] * b_n
    total = start(c, row0, col0, M, N, c_m, c_n, BLOCK_M, BLOCK_N, C_KIND if C_FIRST else "none")
    for step in tl.range(first, last):
        if EVEN_K:
            a_tile = tl.load(a_at, mask=a_rows, other=0.0)
            b_tile = tl.load(b_at, mask=b_columns, other=0.0)
        else:
            # Both operands are masked along K: zero times a stray infinity would be NaN.
            left = K - step * BLOCK_K
            inside = tl.arange(0, BLOCK_K) < left
            a_tile = tl.load(a_at, mask=a_rows & inside[None, :], other=0.0)
            b_tile = tl.load(b_at, mask=b_columns & inside[:, None], other=0.0)
        total = multiply(a_tile, b_tile, total, PRECISION, UPCAST)
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    if SPLIT > 1:
        store_partial(work, total, tile * SPLIT + part, BLOCK_M, BLOCK_N)
    else:
        finish_in_parts(total, c, d, z, None, None, row0, col0, M, N, c_m, c_n, d_m, d_n, BLOCK_M, BLOCK_N, PARTS,
                        "none" if C_FIRST else C_KIND, ACTIVATION, KEEP, False, False)  # fmt: skip


@triton.jit
def tma_sum(
    a_desc, b_desc, total, row0, col0, first, last, c, M, N, c_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Sum over K steps first..last. Descriptors fill what lies outside the matrix with zeros, so nothing is masked."""
    for step in tl.range(first, last):
        k0 = step * BLOCK_K
        if A_TURNED:
            a_tile = a_desc.load([k0, row0]).T
        else:
            a_tile = a_desc.load([row0, k0])
        if B_TURNED:
            b_tile = b_desc.load([col0, k0]).T
        else:
            b_tile = b_desc.load([k0, col0])
        total = multiply(a_tile, b_tile, total, PRECISION, UPCAST)
        if PREFETCH:  # noqa: SIM102  (decided when compiled; the inner one when run)
            if step == (first + last) // 2:
                prefetch_c(c, row0, col0, M, N, c_m, BLOCK_M, BLOCK_N)
    return total


@triton.jit
def tma_tiles(
    a_desc, b_desc, c_desc, d_desc, c, d, z, work, M, N, K, c_m, c_n, d_m, d_n, tile0,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, C_TMA: tl.constexpr, D_TMA: tl.constexpr,
    C_KIND: tl.constexpr, C_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, PREFETCH: tl.constexpr, C_EARLY: tl.constexpr, EARLY: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """TMA tiles, one a program, starting from tile number `tile0`. Grid: (tiles, SPLIT)."""
    part = tl.program_id(1)
    if FOLLOWS:
        tl.extra.cuda.gdc_launch_dependents()
    elif EARLY:
        take_turn()
    row0, col0 = locate(tile0 + tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    first, last = share_of_k(K, part, BLOCK_K, SPLIT)
    if C_EARLY:
        # A load is not waited for until its value is used, after the loop: registers buy back all of its latency.
        held = load_c(c, row0, col0, M, N, c_m, c_n, BLOCK_M, BLOCK_N, C_KIND)
    total = start(c, row0, col0, M, N, c_m, c_n, BLOCK_M, BLOCK_N, C_KIND if C_FIRST else "none")
    total = tma_sum(a_desc, b_desc, total, row0, col0, first, last, c, M, N, c_m,
                    BLOCK_M, BLOCK_N, BLOCK_K, A_TURNED, B_TURNED, PRECISION, UPCAST, PREFETCH)  # fmt: skip
    if SPLIT > 1:
        store_partial(work, total, tl.program_id(0) * SPLIT + part, BLOCK_M, BLOCK_N)
        if FOLLOWS:
            tl.extra.cuda.gdc_wait()  # only now: nothing above reads what the kernel before writes
    else:
        if C_EARLY:
            total += held.to(tl.float32)
        finish_in_parts(total, c, d, z, c_desc, d_desc, row0, col0, M, N, c_m, c_n, d_m, d_n, BLOCK_M, BLOCK_N, PARTS,
                        "none" if C_FIRST or C_EARLY else C_KIND, ACTIVATION, KEEP, C_TMA, D_TMA)  # fmt: skip


@triton.jit
def persistent_tiles(
    a_desc, b_desc, c_desc, d_desc, c, d, z, M, N, K, c_m, c_n, d_m, d_n, tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, C_TMA: tl.constexpr, D_TMA: tl.constexpr,
    C_KIND: tl.constexpr, C_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr, FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Persistent TMA tiles 0..tiles: as many programs as fit; the next tile's loads overlap this one's epilogue."""
    steps = (K + BLOCK_K - 1) // BLOCK_K
    if EARLY:
        take_turn()
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE):
        row0, col0 = locate(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        total = start(c, row0, col0, M, N, c_m, c_n, BLOCK_M, BLOCK_N, C_KIND if C_FIRST else "none")
        total = tma_sum(a_desc, b_desc, total, row0, col0, 0, steps, c, M, N, c_m,
                        BLOCK_M, BLOCK_N, BLOCK_K, A_TURNED, B_TURNED, PRECISION, UPCAST, PREFETCH)  # fmt: skip
        finish_in_parts(total, c, d, z, c_desc, d_desc, row0, col0, M, N, c_m, c_n, d_m, d_n, BLOCK_M, BLOCK_N, PARTS,
                        "none" if C_FIRST else C_KIND, ACTIVATION, KEEP, C_TMA, D_TMA)  # fmt: skip
