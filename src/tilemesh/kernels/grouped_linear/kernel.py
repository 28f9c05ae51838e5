"""The Triton kernels of grouped products, forward and both gradients: of GPUs other than Hopper, and interpreted.

A program finds its group on the device: each group takes as many tiles of rows as it needs, so there are at most
rows / tile + groups of them, and the programs beyond have nothing to do. Tiles are copied by TMA; one at the end of a
group also brings rows of the next, which are not written, and in the gradient of weights count 0.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def turn(tiles_m, tiles_n, BAND: tl.constexpr):
    """Which tile of rows and which of columns a program has: neighbours share weights and rows."""
    number = tl.program_id(0)
    first = number // (BAND * tiles_n) * BAND
    height = tl.minimum(tiles_m - first, BAND)
    within = number % (BAND * tiles_n)
    return first + within % height, within // height


@triton.jit
def rows_of(ends, X, tile_m, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The group of a tile of rows, or X; its first row here, and where the group ends."""
    groups = tl.arange(0, GROUPS)
    known = groups < X
    stop = tl.load(ends + groups, mask=known, other=0)
    start = tl.load(ends + groups - 1, mask=known & (groups > 0), other=0)
    tiles = (stop - start + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, 0)
    group = tl.sum(((after <= tile_m) & known).to(tl.int32), 0)
    mine = groups == group
    before = tl.sum(tl.where(mine, after - tiles, 0), 0)
    first = tl.sum(tl.where(mine, start, 0), 0) + (tile_m - before) * BLOCK_M
    return group, first, tl.sum(tl.where(mine, stop, 0), 0)


@triton.jit
def rows_pass(
    x, w, ends, y, X, N, K, tiles_m, tiles_n, HIGH, y_m,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    TURNED: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of a group by BLOCK_N of the N results, over K columns. HIGH: rows of one group's matrix, which is
    (N, K), or TURNED (K, N). EVEN: BLOCK_K divides K."""
    tile_m, tile_n = turn(tiles_m, tiles_n, BAND)
    group, first, stop = rows_of(ends, X, tile_m, GROUPS, BLOCK_M)
    if group < X:
        column = tile_n * BLOCK_N
        made = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            rows = x.load([first, k])
            if TURNED:
                weight = w.load([group * HIGH + k, column])
                if not EVEN:  # below this group's matrix lies the next one's
                    inside = k + tl.arange(0, BLOCK_K) < K
                    weight = tl.where(inside[:, None], weight, 0.0)
            else:
                weight = w.load([group * HIGH + column, k]).T
            if UPCAST:
                rows, weight = rows.to(tl.float32), weight.to(tl.float32)
            made = tl.dot(rows, weight, made)
        row = first + tl.arange(0, BLOCK_M)
        at = column + tl.arange(0, BLOCK_N)
        inside = (row < stop)[:, None] & (at < N)[None, :]
        tl.store(y + row[:, None].to(tl.int64) * y_m + at[None, :], made.to(y.dtype.element_ty), mask=inside)


@triton.jit
def weights_pass(
    grad, x, ends, dw, N, K, tiles_k, d_g, d_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of one group's gradient: grad^T x over the group's rows, zeros where it has none."""
    group = tl.program_id(1)
    row0 = tl.program_id(0) // tiles_k * BLOCK_N
    column = tl.program_id(0) % tiles_k * BLOCK_K
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)
    made = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    whole = start + (stop - start) // BLOCK_M * BLOCK_M
    for row in range(start, whole, BLOCK_M):
        above, rows = grad.load([row, row0]), x.load([row, column])
        if UPCAST:
            above, rows = above.to(tl.float32), rows.to(tl.float32)
        made = tl.dot(above.T, rows, made)
    if whole < stop:  # the rows after them are another group's
        inside = whole + tl.arange(0, BLOCK_M) < stop
        above = tl.where(inside[:, None], grad.load([whole, row0]), 0.0)
        rows = tl.where(inside[:, None], x.load([whole, column]), 0.0)
        if UPCAST:
            above, rows = above.to(tl.float32), rows.to(tl.float32)
        made = tl.dot(above.T, rows, made)
    at_n, at_k = row0 + tl.arange(0, BLOCK_N), column + tl.arange(0, BLOCK_K)
    to = dw + group.to(tl.int64) * d_g + at_n[:, None].to(tl.int64) * d_n + at_k[None, :]
    tl.store(to, made.to(dw.dtype.element_ty), mask=(at_n < N)[:, None] & (at_k < K)[None, :])
