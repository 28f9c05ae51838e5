"""D = act(A @ B + C) with warps of different trades: one loads, two groups of four multiply and finish tiles.

Written in Gluon, Triton's lower level, because Triton itself cannot say what this kernel is about. The two groups take
turns: while one multiplies its tile, the other adds C, activates and writes the tile before, so the tensor cores
hardly pause. C, too, is brought to shared memory by the loading warp, long before it is needed: its latency is never
waited for. With SLOPE C is not added: D = (A @ B) act'(C), a product of a backward pass. With PAIRED the groups share
one tile twice as tall instead, each its half of the rows: B is loaded once for both, but nothing is multiplied while
they finish.

Shared memory: a ring of STAGES (A, B) tiles in the order of the tiles, and for each group one tile that first holds C
and then D. `ready` barriers say that a tile has arrived, `free` ones that it may be overwritten, `order` ones whose
turn at the tensor cores it is. A barrier tells only odd phases from even: without `order`, a group could not tell its
own filling of a stage from the one two before.

Compiled only: Triton's interpreter does not know Gluon.
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

from tilemesh.kernels.activations.hopper import quick_activate, quick_through
from tilemesh.kernels.matmul.kernel import locate
from tilemesh.kernels.warps import barriers

GROUPS = gl.constexpr(2)
# Registers a thread: of the second group and the loading warp; the first group has what is left of the multiprocessor.
GROUP_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(40)


@gluon.jit
def load_tiles(
    a_desc, b_desc, c_desc, a_ring, b_ring, parts, ready, free, c_ready, c_free, M, N, K, tiles, c_at,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PAIRED: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, C_TMA: gl.constexpr,
):  # fmt: skip
    """The loading warp: every tile's steps in order, as far ahead as the ring has room; its part of C at step c_at."""
    size: gl.constexpr = a_desc.dtype.primitive_bitwidth // 8
    rows: gl.constexpr = BLOCK_M // 2 if PAIRED else BLOCK_M
    steps = (K + BLOCK_K - 1) // BLOCK_K
    place = 0
    lap = 0
    turn = 0  # Triton has no enumerate
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row0, col0 = locate(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        for step in range(steps):
            mbarrier.wait(free.index(place), (lap & 1) ^ 1)
            mbarrier.expect(ready.index(place), (BLOCK_M + BLOCK_N) * BLOCK_K * size)
            k0 = step * BLOCK_K
            if A_TURNED:
                tma.async_copy_global_to_shared(a_desc, [k0, row0], ready.index(place), a_ring.index(place))
            else:
                tma.async_copy_global_to_shared(a_desc, [row0, k0], ready.index(place), a_ring.index(place))
            if B_TURNED:
                tma.async_copy_global_to_shared(b_desc, [col0, k0], ready.index(place), b_ring.index(place))
            else:
                tma.async_copy_global_to_shared(b_desc, [k0, col0], ready.index(place), b_ring.index(place))
            place += 1
            if place == STAGES:
                place = 0
                lap += 1
            if C_TMA:  # noqa: SIM102  (decided when compiled; the inner one when run)
                if step == c_at:
                    if PAIRED:
                        for each in gl.static_range(GROUPS):
                            mbarrier.wait(c_free.index(each), (turn & 1) ^ 1)
                            mbarrier.expect(c_ready.index(each), rows * BLOCK_N * size)
                            tma.async_copy_global_to_shared(
                                c_desc, [row0 + each * rows, col0], c_ready.index(each), parts.index(each)
                            )
                    else:
                        group = turn % GROUPS
                        mbarrier.wait(c_free.index(group), ((turn // GROUPS) & 1) ^ 1)
                        mbarrier.expect(c_ready.index(group), rows * BLOCK_N * size)
                        tma.async_copy_global_to_shared(c_desc, [row0, col0], c_ready.index(group), parts.index(group))
        turn += 1  # noqa: SIM113


@gluon.jit
def compute_tiles(
    group: gl.constexpr, c, d_desc, z_desc, a_ring, b_ring, parts, ready, free, order, c_ready, c_free, M, N, K,
    c_m, c_n, tiles, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, PAIRED: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, C_TMA: gl.constexpr,
    C_KIND: gl.constexpr, ACTIVATION: gl.constexpr, KEEP: gl.constexpr, SLOPE: gl.constexpr,
):  # fmt: skip
    """One group of four warps: every other tile of this program, or its half of each, from product to store."""
    ROWS: gl.constexpr = BLOCK_M // 2 if PAIRED else BLOCK_M
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    steps = (K + BLOCK_K - 1) // BLOCK_K
    part = parts.index(group)
    turn = 0  # Triton has no enumerate
    used = 0  # steps of the ring that were loaded before this group's tile
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    if not PAIRED:
        used = group * steps
        first += group * stride
        stride *= GROUPS
    for tile in range(first, tiles, stride):
        row0, col0 = locate(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        if PAIRED:
            row0 += group * ROWS
        total = gl.full((ROWS, BLOCK_N), 0.0, gl.float32, layout)
        place = used % STAGES
        lap = used // STAGES
        if not PAIRED:
            mbarrier.wait(order.index(group), (turn & 1) ^ (1 - group))
        for step in range(steps):
            mbarrier.wait(ready.index(place), lap & 1)
            a_tile = a_ring.index(place)
            if A_TURNED:
                a_tile = a_tile.permute((1, 0))
            if PAIRED:
                a_tile = a_tile.slice(group * ROWS, ROWS, 0)
            b_tile = b_ring.index(place)
            if B_TURNED:
                b_tile = b_tile.permute((1, 0))
            total = warpgroup_mma(a_tile, b_tile, total, use_acc=step > 0, is_async=True)
            # One product stays in flight: the one before is done, so what it read may be overwritten.
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(free.index((place + STAGES - 1) % STAGES), count=1, pred=step > 0)
            place += 1
            if place == STAGES:
                place = 0
                lap += 1
        if not PAIRED:
            mbarrier.arrive(order.index(1 - group), count=1)
        value = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(free.index((used + steps - 1) % STAGES), count=1)
        used += steps if PAIRED else GROUPS * steps
        if C_TMA:
            mbarrier.wait(c_ready.index(group), turn & 1)
            beside = part.load(layout).to(gl.float32)
            if SLOPE:
                value = quick_through(value, beside, ACTIVATION)
            else:
                value += beside
        else:
            if C_KIND == "row":
                columns = col0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
                value += gl.expand_dims(gl.load(c + columns * c_n, mask=columns < N, other=0.0), 0).to(gl.float32)
            elif C_KIND == "column":
                rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
                value += gl.expand_dims(gl.load(c + rows * c_m, mask=rows < M, other=0.0), 1).to(gl.float32)
            tma.store_wait(0)  # the tile before has left `part`
        if KEEP:
            part.store(value.to(d_desc.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(z_desc, [row0, col0], part)
        if not SLOPE:
            value = quick_activate(value, ACTIVATION)
        if KEEP:
            tma.store_wait(0)  # only now: the sum leaves while it is activated
        part.store(value.to(d_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(d_desc, [row0, col0], part)
        if C_TMA:
            tma.store_wait(0)
            mbarrier.arrive(c_free.index(group), count=1)
        turn += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def pingpong_tiles(
    a_desc, b_desc, c_desc, d_desc, z_desc, c, M, N, K, c_m, c_n, tiles, c_at,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PAIRED: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, C_TMA: gl.constexpr, C_KIND: gl.constexpr,
    ACTIVATION: gl.constexpr, KEEP: gl.constexpr, SLOPE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Tiles 0..tiles over as many programs as multiprocessors. Descriptors bound every access: nothing is masked."""
    dtype: gl.constexpr = a_desc.dtype
    rows: gl.constexpr = BLOCK_M // 2 if PAIRED else BLOCK_M
    a_ring = gl.allocate_shared_memory(dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)  # noqa: RUF005
    b_ring = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)  # noqa: RUF005
    parts = gl.allocate_shared_memory(dtype, [GROUPS, rows, BLOCK_N], d_desc.layout)
    ready = barriers(STAGES, 1)
    free = barriers(STAGES, 2 if PAIRED else 1)
    order = barriers(GROUPS, 1)
    c_ready = barriers(GROUPS, 1)
    c_free = barriers(GROUPS, 1)
    fence_async_shared()
    if EARLY:  # as early.take_turn
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    gl.warp_specialize([
        (compute_tiles, (0, c, d_desc, z_desc, a_ring, b_ring, parts, ready, free, order, c_ready, c_free, M, N, K,
                         c_m, c_n, tiles, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, STAGES, PAIRED, A_TURNED, B_TURNED, C_TMA,
                         C_KIND, ACTIVATION, KEEP, SLOPE)),
        (compute_tiles, (1, c, d_desc, z_desc, a_ring, b_ring, parts, ready, free, order, c_ready, c_free, M, N, K,
                         c_m, c_n, tiles, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, STAGES, PAIRED, A_TURNED, B_TURNED, C_TMA,
                         C_KIND, ACTIVATION, KEEP, SLOPE)),
        (load_tiles, (a_desc, b_desc, c_desc, a_ring, b_ring, parts, ready, free, c_ready, c_free, M, N, K, tiles,
                      c_at, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, STAGES, PAIRED, A_TURNED, B_TURNED, C_TMA)),
    ], [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS])  # fmt: skip
