"""Grouped products with warps of different trades, in Gluon: `matmul/pingpong.py` over the tiles of all groups.

One warp loads, two groups of four warps take turns: while one multiplies its tile, the other writes the tile before.
What differs from one product is where tiles are. Those of rows follow the groups, whose sizes are read on the device:
a program walks them in order and goes on from group to group as it passes their ends (`seek`), so tiles that share
weights run at the same time. Gradients of weights have the same tiles in every group, and a number of steps that
differs. What a tile at a group's end brings of the next one is not written, and counts 0 in a sum over rows.

Shared memory and barriers are those of `matmul/pingpong.py`. Compiled only: Triton's interpreter does not know Gluon.
"""

# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilemesh.kernels.matmul.kernel import locate
from tilemesh.kernels.warps import barriers, next_place

CREWS = gl.constexpr(2)  # groups of warps that multiply
# Registers a thread: of the second crew and the loading warp; the first has what is left of the multiprocessor.
CREW_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(40)


@gluon.jit
def seek(ends, X, tile, group, before, begin, stop, tiles_n, BLOCK_M: gl.constexpr):
    """The group that has this tile (X: none), how many tiles are before it, and the rows from `begin` to `stop`."""
    here = (stop - begin + BLOCK_M - 1) // BLOCK_M * tiles_n
    while (group < X) & (tile >= before + here):
        group = group + 1
        before = before + here
        begin = stop
        stop = gl.load(ends + group, mask=group < X, other=0)
        here = (stop - begin + BLOCK_M - 1) // BLOCK_M * tiles_n
    return group, before, begin, stop


@gluon.jit
def rows_of_group(ends, X, group):
    """Where a group begins and ends; nothing of one that is not there."""
    begin = gl.load(ends + (group - 1), mask=(group > 0) & (group < X), other=0)
    return begin, gl.load(ends + group, mask=group < X, other=0)


@gluon.jit
def load_step(a_desc, b_desc, a_ring, b_ring, ready, free, place, lap, a_row, a_col, b_row, b_col, BYTES: gl.constexpr):
    mbarrier.wait(free.index(place), (lap & 1) ^ 1)
    mbarrier.expect(ready.index(place), BYTES)
    tma.async_copy_global_to_shared(a_desc, [a_row, a_col], ready.index(place), a_ring.index(place))
    tma.async_copy_global_to_shared(b_desc, [b_row, b_col], ready.index(place), b_ring.index(place))


@gluon.jit
def multiply_steps(
    total, a_ring, b_ring, ready, free, steps, place, lap,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Adds so many steps of the ring from `place` on; the last one may still be in flight."""
    for step in range(steps):
        mbarrier.wait(ready.index(place), lap & 1)
        a_tile = a_ring.index(place)
        if A_TURNED:
            a_tile = a_tile.permute((1, 0))
        b_tile = b_ring.index(place)
        if B_TURNED:
            b_tile = b_tile.permute((1, 0))
        total = warpgroup_mma(a_tile, b_tile, total, use_acc=step > 0, is_async=True)
        # One product stays in flight: the one before is done, so what it read may be overwritten.
        total = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(free.index((place + STAGES - 1) % STAGES), count=1, pred=step > 0)
        place, lap = next_place(place, lap, STAGES)
    return total


@gluon.jit
def finish_tile(
    value, y, y_desc, part, row0, col0, stop, N, y_m, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Write a tile whose rows end before `stop`: at once where all of them do."""
    tma.store_wait(0)  # the tile before has left `part`
    part.store(value.to(y_desc.dtype))
    if row0 + BLOCK_M <= stop:
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [row0, col0], part)
    else:
        flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BLOCK_N, BLOCK_N // 8], [4, 1], [1, 0])
        rows = gl.expand_dims(row0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, flat)), 1)
        columns = gl.expand_dims(col0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, flat)), 0)
        gl.store(y + rows * y_m + columns, part.load(flat), mask=(rows < stop) & (columns < N))


@gluon.jit
def load_rows(
    x_desc, w_desc, ends, x_ring, w_ring, ready, free, X, N, K, tiles_n, HIGH,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    TURNED: gl.constexpr,
):  # fmt: skip
    size: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * (x_desc.dtype.primitive_bitwidth // 8)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    place = 0
    lap = 0
    tile = gl.program_id(0)
    none = tile * 0  # a number that Triton lets a loop change, which it does not the constant
    group, before, begin, stop = seek(ends, X, tile, none, none, none, gl.load(ends), tiles_n, BLOCK_M)
    while group < X:
        row0, col0 = locate(tile - before, stop - begin, N, BLOCK_M, BLOCK_N, BAND)
        for step in range(steps):
            k0 = step * BLOCK_K
            if TURNED:
                load_step(x_desc, w_desc, x_ring, w_ring, ready, free, place, lap, begin + row0, k0,
                          group * HIGH + k0, col0, size)  # fmt: skip
            else:
                load_step(x_desc, w_desc, x_ring, w_ring, ready, free, place, lap, begin + row0, k0,
                          group * HIGH + col0, k0, size)  # fmt: skip
            place, lap = next_place(place, lap, STAGES)
        tile += gl.num_programs(0)
        group, before, begin, stop = seek(ends, X, tile, group, before, begin, stop, tiles_n, BLOCK_M)


@gluon.jit
def compute_rows(
    crew: gl.constexpr, y, y_desc, ends, x_ring, w_ring, parts, ready, free, order, X, N, K, tiles_n, y_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    TURNED: gl.constexpr,
):  # fmt: skip
    """One crew: every other tile of this program, from product to store."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    steps = (K + BLOCK_K - 1) // BLOCK_K
    turn = 0
    used = crew * steps  # steps of the ring that were loaded before this crew's tile
    tile = gl.program_id(0) + crew * gl.num_programs(0)
    none = tile * 0
    group, before, begin, stop = seek(ends, X, tile, none, none, none, gl.load(ends), tiles_n, BLOCK_M)
    while group < X:
        row0, col0 = locate(tile - before, stop - begin, N, BLOCK_M, BLOCK_N, BAND)
        total = gl.full((BLOCK_M, BLOCK_N), 0.0, gl.float32, layout)
        mbarrier.wait(order.index(crew), (turn & 1) ^ (1 - crew))
        total = multiply_steps(total, x_ring, w_ring, ready, free, steps, used % STAGES, used // STAGES,
                               False, not TURNED, STAGES)  # fmt: skip
        mbarrier.arrive(order.index(1 - crew), count=1)
        value = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(free.index((used + steps - 1) % STAGES), count=1)
        finish_tile(value, y, y_desc, parts.index(crew), begin + row0, col0, stop, N, y_m, BLOCK_M, BLOCK_N)
        used += CREWS * steps
        turn += 1
        tile += CREWS * gl.num_programs(0)
        group, before, begin, stop = seek(ends, X, tile, group, before, begin, stop, tiles_n, BLOCK_M)
    tma.store_wait(0)


@gluon.jit
def grouped_rows(
    x_desc, w_desc, y_desc, y, ends, X, N, K, tiles_n, HIGH, y_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    TURNED: gl.constexpr,
):  # fmt: skip
    """Rows of each group times its matrix, over as many programs as multiprocessors. HIGH: rows of one group's matrix,
    which is (N, K), or TURNED (K, N), and then BLOCK_K divides K: below it lies the next one's."""
    dtype: gl.constexpr = x_desc.dtype
    x_ring = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    w_ring = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)  # noqa: RUF005
    parts = gl.allocate_shared_memory(dtype, [CREWS, BLOCK_M, BLOCK_N], y_desc.layout)
    ready = barriers(STAGES, 1)
    free = barriers(STAGES, 1)
    order = barriers(CREWS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (compute_rows, (0, y, y_desc, ends, x_ring, w_ring, parts, ready, free, order, X, N, K, tiles_n, y_m,
                        BLOCK_M, BLOCK_N, BLOCK_K, BAND, STAGES, TURNED)),
        (compute_rows, (1, y, y_desc, ends, x_ring, w_ring, parts, ready, free, order, X, N, K, tiles_n, y_m,
                        BLOCK_M, BLOCK_N, BLOCK_K, BAND, STAGES, TURNED)),
        (load_rows, (x_desc, w_desc, ends, x_ring, w_ring, ready, free, X, N, K, tiles_n, HIGH,
                     BLOCK_M, BLOCK_N, BLOCK_K, BAND, STAGES, TURNED)),
    ], [4, 1], [CREW_REGISTERS, LOADER_REGISTERS])  # fmt: skip


# ---- gradients of weights ----------------------------------------------------------------------------------------


@gluon.jit
def load_weights(
    grad_desc, x_desc, ends, grad_ring, x_ring, ready, free, X, N, K, each, tiles,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    size: gl.constexpr = BLOCK_M * (BLOCK_N + BLOCK_K) * (x_desc.dtype.primitive_bitwidth // 8)
    place = 0
    lap = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row0, col0 = locate(tile % each, N, K, BLOCK_N, BLOCK_K, BAND)
        begin, stop = rows_of_group(ends, X, tile // each)
        for row in range(begin, stop, BLOCK_M):
            load_step(grad_desc, x_desc, grad_ring, x_ring, ready, free, place, lap, row, row0, row, col0, size)
            place, lap = next_place(place, lap, STAGES)


@gluon.jit
def keep_rows(memory, rows, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros after the first `rows` rows of a tile in shared memory."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    inside = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, flat)), 1) < rows
    value = memory.load(flat)
    memory.store(gl.where(inside, value, gl.full((ROWS, COLUMNS), 0.0, value.dtype, flat)))


@gluon.jit
def compute_weights(
    crew: gl.constexpr, dw, dw_desc, ends, grad_ring, x_ring, parts, ready, free, order, X, N, K, each, tiles, d_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One crew: every other tile of this program, over the rows of its group; zeros where that has none."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    programs = gl.num_programs(0)
    turn = 0
    used = 0
    if crew:
        begin, stop = rows_of_group(ends, X, gl.program_id(0) // each)
        used += (stop - begin + BLOCK_M - 1) // BLOCK_M
    for tile in range(gl.program_id(0) + crew * programs, tiles, CREWS * programs):
        row0, col0 = locate(tile % each, N, K, BLOCK_N, BLOCK_K, BAND)
        begin, stop = rows_of_group(ends, X, tile // each)
        full = (stop - begin) // BLOCK_M
        rest = (stop - begin) % BLOCK_M
        total = gl.full((BLOCK_N, BLOCK_K), 0.0, gl.float32, layout)
        mbarrier.wait(order.index(crew), (turn & 1) ^ (1 - crew))
        total = multiply_steps(total, grad_ring, x_ring, ready, free, full, used % STAGES, used // STAGES,
                               True, False, STAGES)  # fmt: skip
        value = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(free.index((used + full + STAGES - 1) % STAGES), count=1, pred=full > 0)
        used += full
        if rest > 0:  # the rows after them are another group's
            place = used % STAGES
            mbarrier.wait(ready.index(place), (used // STAGES) & 1)
            keep_rows(grad_ring.index(place), rest, BLOCK_M, BLOCK_N)
            keep_rows(x_ring.index(place), rest, BLOCK_M, BLOCK_K)
            fence_async_shared()
            last = warpgroup_mma(grad_ring.index(place).permute((1, 0)), x_ring.index(place), value, is_async=True)
            value = warpgroup_mma_wait(0, deps=(last,))
            mbarrier.arrive(free.index(place), count=1)
            used += 1
        mbarrier.arrive(order.index(1 - crew), count=1)
        group = tile // each
        finish_tile(value, dw, dw_desc, parts.index(crew), group * N + row0, col0, group * N + N, K, d_n,
                    BLOCK_N, BLOCK_K)  # fmt: skip
        begin, stop = rows_of_group(ends, X, (tile + programs) // each)  # the other crew's tile
        used += (stop - begin + BLOCK_M - 1) // BLOCK_M
        turn += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def grouped_weights(
    grad_desc, x_desc, dw_desc, dw, ends, X, N, K, each, tiles, d_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of each group, grad^T x over its rows: (N, K), one under the other. each: tiles of one group; tiles: of all."""
    dtype: gl.constexpr = x_desc.dtype
    grad_ring = gl.allocate_shared_memory(dtype, [STAGES] + grad_desc.block_type.shape, grad_desc.layout)  # noqa: RUF005
    x_ring = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    parts = gl.allocate_shared_memory(dtype, [CREWS, BLOCK_N, BLOCK_K], dw_desc.layout)
    ready = barriers(STAGES, 1)
    free = barriers(STAGES, 1)
    order = barriers(CREWS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (compute_weights, (0, dw, dw_desc, ends, grad_ring, x_ring, parts, ready, free, order, X, N, K, each, tiles,
                           d_n, BLOCK_M, BLOCK_N, BLOCK_K, BAND, STAGES)),
        (compute_weights, (1, dw, dw_desc, ends, grad_ring, x_ring, parts, ready, free, order, X, N, K, each, tiles,
                           d_n, BLOCK_M, BLOCK_N, BLOCK_K, BAND, STAGES)),
        (load_weights, (grad_desc, x_desc, ends, grad_ring, x_ring, ready, free, X, N, K, each, tiles,
                        BLOCK_M, BLOCK_N, BLOCK_K, BAND, STAGES)),
    ], [4, 1], [CREW_REGISTERS, LOADER_REGISTERS])  # fmt: skip
