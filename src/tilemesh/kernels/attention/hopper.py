"""Attention's forward kernel for Hopper GPUs, in Gluon: one warp loads by TMA, two groups of four warps compute.

Each group owns 64 queries of a tile and keeps their sums in registers. Probabilities are taken from registers by the
product with the values, so that nothing goes through shared memory a second time. Products are asynchronous: the scores
of the next block of keys are asked for before the present block's values are added up, and the exponentials are
computed meanwhile. The groups take turns: while one computes exponentials, the tensor cores have the other's products.
`ready` barriers say that a tile has arrived, `free` ones that it may be overwritten, `order` ones whose turn it is.

Which keys a query sees is as in kernel.py; tiles that need no mask are in loops of their own. Heads are 64 or 128 wide,
16-bit. The backward kernels are in hopper_back.py. Compiled only: Triton's interpreter does not know Gluon.
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

from tilemesh.kernels.attention.kernel import keys_of, locate, spans
from tilemesh.kernels.warps import barriers, next_place

PAIR = gl.constexpr(2)  # groups of a program
ROWS = gl.constexpr(64)  # of a group: what one instruction multiplies
NOTHING = gl.constexpr(-1e30)
# Registers a thread: of the second group and the loading warp; the first group has what is left of the multiprocessor.
GROUP_REGISTERS = gl.constexpr(240)
LOADER_REGISTERS = gl.constexpr(24)


@gluon.jit
def load_forward(
    q_desc, k_desc, v_desc, q_part, k_ring, v_ring, q_ready, q_free, k_ready, k_free, v_ready, v_free, first, last,
    B, H, GROUP, T, S, window, section, tiles, BLOCK_N: gl.constexpr, HEAD: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The loading warp: each tile's queries, then keys and values as far ahead as the rings have room."""
    BLOCK_M: gl.constexpr = PAIR * ROWS
    place = 0
    lap = 0
    turn = 0  # Triton has no enumerate
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, head = locate(tile, (T + BLOCK_M - 1) // BLOCK_M, B * H, section)
        row0 = block * BLOCK_M
        low0, _high0 = keys_of(row0, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
        _low1, high1 = keys_of(row0 + BLOCK_M - 1, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
        batch = head // H
        own = head % H
        shared = own // GROUP
        for group in gl.static_range(PAIR):
            mbarrier.wait(q_free.index(group), (turn & 1) ^ 1)
            mbarrier.expect(q_ready.index(group), ROWS * HEAD * 2)
            tma.async_copy_global_to_shared(
                q_desc, [batch, own, row0 + group * ROWS, 0], q_ready.index(group), q_part.index(group)
            )
        begin = low0 // BLOCK_N * BLOCK_N
        for start in range(begin, gl.maximum(high1, begin + 1), BLOCK_N):  # one at least: the groups wait for it
            mbarrier.wait(k_free.index(place), (lap & 1) ^ 1)
            mbarrier.expect(k_ready.index(place), BLOCK_N * HEAD * 2)
            tma.async_copy_global_to_shared(
                k_desc, [batch, shared, start, 0], k_ready.index(place), k_ring.index(place)
            )
            mbarrier.wait(v_free.index(place), (lap & 1) ^ 1)
            mbarrier.expect(v_ready.index(place), BLOCK_N * HEAD * 2)
            tma.async_copy_global_to_shared(
                v_desc, [batch, shared, start, 0], v_ready.index(place), v_ring.index(place)
            )
            place, lap = next_place(place, lap, STAGES)
        turn += 1  # noqa: SIM113


@gluon.jit
def weights_of(scores, largest, low, high, start, factor, MASKED: gl.constexpr, scores_layout: gl.constexpr):
    """Probabilities but for their sum, the new maximum, and what sums so far must be multiplied by."""
    if MASKED:
        keys = gl.expand_dims(start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores_layout)), 0)
        counts = (keys >= gl.expand_dims(low, 1)) & (keys < gl.expand_dims(high, 1))
        scores = gl.where(counts, scores, NOTHING)
    larger = gl.maximum(largest, gl.max(scores, 1) * factor)
    weight = gl.exp2(scores * factor - gl.expand_dims(larger, 1))
    if MASKED:
        weight = gl.where(counts, weight, 0.0)
    return weight, larger, gl.exp2(largest - larger)


@gluon.jit
def attend_steps(
    group: gl.constexpr, q_tile, weight, total, sums, largest, place, lap, v_place, v_lap, turn, low, high, begin, end,
    factor, k_ring, v_ring, k_ready, k_free, v_ready, v_free, order, BLOCK_N: gl.constexpr, HEAD: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr, scores_layout: gl.constexpr, total_layout: gl.constexpr,
):  # fmt: skip
    """Blocks of keys [begin, end): scores of each, and meanwhile the values of the one before."""
    left: gl.constexpr = gl.DotOperandLayout(0, total_layout, 2)
    dtype: gl.constexpr = k_ring.dtype
    for start in range(begin, end, BLOCK_N):
        mbarrier.wait(k_ready.index(place), lap & 1)
        mbarrier.wait(order.index(group), (turn & 1) ^ (1 - group))
        key = k_ring.index(place).reshape([BLOCK_N, HEAD]).permute((1, 0))
        empty = gl.full((ROWS, BLOCK_N), 0.0, gl.float32, scores_layout)
        scores = warpgroup_mma(q_tile, key, empty, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(v_place), v_lap & 1)
        value = v_ring.index(v_place).reshape([BLOCK_N, HEAD])
        total = warpgroup_mma(weight, value, total, is_async=True)
        mbarrier.arrive(order.index(1 - group), count=1)
        turn += 1
        scores, total = warpgroup_mma_wait(1, deps=(scores, total))
        mbarrier.arrive(k_free.index(place), count=1)
        made, larger, shrink = weights_of(scores, largest, low, high, start, factor, MASKED, scores_layout)
        sums = sums * shrink + gl.sum(made, 1)
        largest = larger
        total, weight = warpgroup_mma_wait(0, deps=(total, weight))
        mbarrier.arrive(v_free.index(v_place), count=1)
        total = total * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, total_layout)), 1)
        weight = gl.convert_layout(made.to(dtype), left)
        place, lap = next_place(place, lap, STAGES)
        v_place, v_lap = next_place(v_place, v_lap, STAGES)
    return weight, total, sums, largest, place, lap, v_place, v_lap, turn


@gluon.jit
def attend_group(
    group: gl.constexpr, y_desc, kept, sinks, q_part, y_part, k_ring, v_ring, q_ready, q_free, k_ready, k_free, v_ready,
    v_free, order, first, last, B, H, GROUP, T, S, window, factor, section, tiles,
    BLOCK_N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """One group of four warps: 64 queries of each tile, from scores to result."""
    BLOCK_M: gl.constexpr = PAIR * ROWS
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, total_layout, 2)
    dtype: gl.constexpr = k_ring.dtype
    q_tile = q_part.index(group).reshape([ROWS, HEAD])
    place = 0
    lap = 0
    v_place = 0
    v_lap = 0
    turn = 0  # at the tensor cores
    done = 0  # Triton has no enumerate
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, head = locate(tile, (T + BLOCK_M - 1) // BLOCK_M, B * H, section)
        row0 = block * BLOCK_M
        low0, high0 = keys_of(row0, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
        low1, high1 = keys_of(row0 + BLOCK_M - 1, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
        edges = spans(low0, high0, low1, high1, BLOCK_N)
        rows = row0 + group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        low, high = keys_of(rows, first, last, T, S, window, CAUSAL, WINDOW, PACKED)

        # The first block: there are no values to add up yet.
        mbarrier.wait(q_ready.index(group), done & 1)
        mbarrier.wait(k_ready.index(place), lap & 1)
        key = k_ring.index(place).reshape([BLOCK_N, HEAD]).permute((1, 0))
        empty = gl.full((ROWS, BLOCK_N), 0.0, gl.float32, scores_layout)
        scores = warpgroup_mma(q_tile, key, empty, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_free.index(place), count=1)
        place, lap = next_place(place, lap, STAGES)
        largest = gl.full((ROWS,), NOTHING, gl.float32, gl.SliceLayout(1, scores_layout))
        made, largest, _shrink = weights_of(scores, largest, low, high, edges[0], factor, True, scores_layout)
        sums = gl.sum(made, 1)
        weight = gl.convert_layout(made.to(dtype), left)
        total = gl.full((ROWS, HEAD), 0.0, gl.float32, total_layout)
        begin = edges[0] + BLOCK_N
        for part in gl.static_range(0 if WINDOW or PACKED else 1, 3):
            weight, total, sums, largest, place, lap, v_place, v_lap, turn = attend_steps(
                group, q_tile, weight, total, sums, largest, place, lap, v_place, v_lap, turn, low, high,
                begin if part == 0 else gl.maximum(begin, edges[part]), edges[part + 1], factor, k_ring, v_ring,
                k_ready, k_free, v_ready, v_free, order, BLOCK_N, HEAD, STAGES, part != 1, scores_layout, total_layout,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(group), count=1)

        mbarrier.wait(v_ready.index(v_place), v_lap & 1)
        total = warpgroup_mma(weight, v_ring.index(v_place).reshape([BLOCK_N, HEAD]), total, is_async=True)
        if sinks is not None:
            sink = gl.load(sinks + head % H).to(gl.float32) * 1.4426950408889634
            larger = gl.maximum(largest, sink)
            shrink = gl.exp2(largest - larger)
            sums = sums * shrink + gl.exp2(sink - larger)
            largest = larger
            inverse = shrink / sums
        else:
            inverse = 1.0 / sums
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, total_layout))
        gl.store(kept + head.to(gl.int64) * T + rows, largest + gl.log2(sums), mask=rows < T)
        total, weight = warpgroup_mma_wait(0, deps=(total, weight))
        mbarrier.arrive(v_free.index(v_place), count=1)
        v_place, v_lap = next_place(v_place, v_lap, STAGES)
        total = total * gl.expand_dims(inverse, 1)
        tma.store_wait(0)  # the tile before has left `y_part`
        y_part.index(group).reshape([ROWS, HEAD]).store(total.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [head // H, head % H, row0 + group * ROWS, 0], y_part.index(group))
        done += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def attend_hopper(
    q_desc, k_desc, v_desc, y_desc, kept, sinks, first, last, B, H, GROUP, T, S, window, factor, section, tiles,
    BLOCK_N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As kernel.attend; tiles of 64 queries per group, over as many programs as multiprocessors.

    factor, scale * log2(e), is above 0. While a tile's result is written, the next one's queries and keys are loaded.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_part = gl.allocate_shared_memory(dtype, [PAIR, 1, 1, ROWS, HEAD], q_desc.layout)
    y_part = gl.allocate_shared_memory(dtype, [PAIR, 1, 1, ROWS, HEAD], y_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD], v_desc.layout)
    q_ready = barriers(PAIR, 1)
    q_free = barriers(PAIR, 1)
    order = barriers(PAIR, 1)
    k_ready = barriers(STAGES, 1)
    k_free = barriers(STAGES, PAIR)
    v_ready = barriers(STAGES, 1)
    v_free = barriers(STAGES, PAIR)
    fence_async_shared()
    gl.warp_specialize([
        (attend_group, (0, y_desc, kept, sinks, q_part, y_part, k_ring, v_ring, q_ready, q_free, k_ready, k_free,
                        v_ready, v_free, order, first, last, B, H, GROUP, T, S, window, factor, section, tiles,
                        BLOCK_N, HEAD, STAGES, CAUSAL, WINDOW, PACKED)),
        (attend_group, (1, y_desc, kept, sinks, q_part, y_part, k_ring, v_ring, q_ready, q_free, k_ready, k_free,
                        v_ready, v_free, order, first, last, B, H, GROUP, T, S, window, factor, section, tiles,
                        BLOCK_N, HEAD, STAGES, CAUSAL, WINDOW, PACKED)),
        (load_forward, (q_desc, k_desc, v_desc, q_part, k_ring, v_ring, q_ready, q_free, k_ready, k_free, v_ready,
                        v_free, first, last, B, H, GROUP, T, S, window, section, tiles, BLOCK_N, HEAD,
                        STAGES, CAUSAL, WINDOW, PACKED)),
    ], [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS])  # fmt: skip
