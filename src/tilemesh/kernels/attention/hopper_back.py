"""Attention's backward kernels for Hopper GPUs, in Gluon: dk and dv by blocks of keys, dq by blocks of queries.

As in hopper.py, one warp loads by TMA and two groups of four warps compute, each with 64 rows of its own, whose sums
stay in registers. Keys are the rows of the first kernel, so that probabilities and the scores' gradients are left
operands from registers in both. A product with such an operand is done within its iteration: ptxas serialises all
products of a kernel where one is still running at a loop's end.
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

from tilemesh.kernels.attention.hopper import GROUP_REGISTERS, LOADER_REGISTERS, PAIR, ROWS
from tilemesh.kernels.attention.kernel import keys_of, locate, queries_of, spans
from tilemesh.kernels.warps import barriers, next_place, thread_barrier

# ---- keys and values ---------------------------------------------------------------------------------------


@gluon.jit
def load_keys_back(
    q_desc, k_desc, v_desc, g_desc, kept, delta, k_part, v_part, q_ring, g_ring, vectors, part_ready, ready, free,
    first, last, B, K, GROUP,
    T, S, window, BLOCK_M: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr, section,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The loading warp: the block's keys and values, then queries and gradients of every head that shares them."""
    lanes: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    BLOCK_N: gl.constexpr = PAIR * ROWS
    blocks = (S + BLOCK_N - 1) // BLOCK_N
    block, head = locate(gl.program_id(0), blocks, B * K, section)
    if CAUSAL:
        block = blocks - 1 - block
    key0 = block * BLOCK_N
    low0, _high0 = queries_of(key0, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    _low1, high1 = queries_of(key0 + BLOCK_N - 1, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    batch = head // K
    own = head % K
    for group in gl.static_range(PAIR):
        at = key0 + group * ROWS
        mbarrier.expect(part_ready.index(group), 2 * ROWS * HEAD * 2)
        tma.async_copy_global_to_shared(k_desc, [batch, own, at, 0], part_ready.index(group), k_part.index(group))
        tma.async_copy_global_to_shared(v_desc, [batch, own, at, 0], part_ready.index(group), v_part.index(group))
    place = 0
    lap = 0
    for member in range(GROUP):
        mate = own * GROUP + member
        offset = (head * GROUP + member).to(gl.int64) * T
        for start in range(low0 // BLOCK_M * BLOCK_M, high1, BLOCK_M):
            mbarrier.wait(free.index(place), (lap & 1) ^ 1)
            mbarrier.expect(ready.index(place), 2 * BLOCK_M * HEAD * 2)
            tma.async_copy_global_to_shared(q_desc, [batch, mate, start, 0], ready.index(place), q_ring.index(place))
            tma.async_copy_global_to_shared(g_desc, [batch, mate, start, 0], ready.index(place), g_ring.index(place))
            rows = start + gl.arange(0, BLOCK_M, lanes)
            # Where there is no query, its probabilities are 0.
            vectors.index(2 * place).store(gl.load(kept + offset + rows, mask=rows < T, other=float("inf")))
            vectors.index(2 * place + 1).store(gl.load(delta + offset + rows, mask=rows < T, other=0.0))
            thread_barrier()
            mbarrier.arrive(ready.index(place), count=1)
            place, lap = next_place(place, lap, STAGES)


@gluon.jit
def keys_back_steps(
    k_tile, v_tile, key_total, value_total, place, lap, low, high, begin, end, factor, q_ring, g_ring, vectors, ready,
    free, BLOCK_M: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    scores_layout: gl.constexpr, total_layout: gl.constexpr,
):  # fmt: skip
    """Blocks of queries [begin, end) of one head; keys are rows here, queries columns."""
    left: gl.constexpr = gl.DotOperandLayout(0, total_layout, 2)
    dtype: gl.constexpr = q_ring.dtype
    for start in range(begin, end, BLOCK_M):
        mbarrier.wait(ready.index(place), lap & 1)
        query = q_ring.index(place).reshape([BLOCK_M, HEAD])
        slope = g_ring.index(place).reshape([BLOCK_M, HEAD])
        empty = gl.full((ROWS, BLOCK_M), 0.0, gl.float32, scores_layout)
        scores = warpgroup_mma(k_tile, query.permute((1, 0)), empty, use_acc=False, is_async=True)
        inner = warpgroup_mma(v_tile, slope.permute((1, 0)), empty, use_acc=False, is_async=True)
        scores, inner = warpgroup_mma_wait(1, deps=(scores, inner))
        sums = vectors.index(2 * place).load(gl.SliceLayout(0, scores_layout))
        weight = gl.exp2(scores * factor - gl.expand_dims(sums, 0))
        if MASKED:
            rows = start + gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores_layout))
            counts = (gl.expand_dims(rows, 0) >= gl.expand_dims(low, 1)) & (
                gl.expand_dims(rows, 0) < gl.expand_dims(high, 1)
            )
            weight = gl.where(counts, weight, 0.0)
        value_total = warpgroup_mma(gl.convert_layout(weight.to(dtype), left), slope, value_total, is_async=True)
        inner, value_total = warpgroup_mma_wait(1, deps=(inner, value_total))
        means = vectors.index(2 * place + 1).load(gl.SliceLayout(0, scores_layout))
        inner = weight * (inner - gl.expand_dims(means, 0))
        key_total = warpgroup_mma(gl.convert_layout(inner.to(dtype), left), query, key_total, is_async=True)
        key_total, value_total = warpgroup_mma_wait(0, deps=(key_total, value_total))
        mbarrier.arrive(free.index(place), count=1)
        place, lap = next_place(place, lap, STAGES)
    return key_total, value_total, place, lap


@gluon.jit
def keys_back_group(
    group: gl.constexpr, dk_desc, dv_desc, k_part, v_part, q_ring, g_ring, vectors, part_ready, ready, free, first,
    last, B, K, GROUP, T, S, window, factor, scale, BLOCK_M: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr,
    section, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """One group of four warps: dk and dv of 64 keys."""
    BLOCK_N: gl.constexpr = PAIR * ROWS
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    dtype: gl.constexpr = q_ring.dtype
    blocks = (S + BLOCK_N - 1) // BLOCK_N
    block, head = locate(gl.program_id(0), blocks, B * K, section)
    if CAUSAL:
        block = blocks - 1 - block  # the first keys are seen most
    key0 = block * BLOCK_N
    low0, high0 = queries_of(key0, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    low1, high1 = queries_of(key0 + BLOCK_N - 1, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    edges = spans(low0, high0, low1, high1, BLOCK_M)
    keys = key0 + group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
    low, high = queries_of(keys, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    k_tile = k_part.index(group).reshape([ROWS, HEAD])
    v_tile = v_part.index(group).reshape([ROWS, HEAD])
    key_total = gl.full((ROWS, HEAD), 0.0, gl.float32, total_layout)
    value_total = gl.full((ROWS, HEAD), 0.0, gl.float32, total_layout)
    place = 0
    lap = 0
    mbarrier.wait(part_ready.index(group), 0)
    for _ in range(GROUP):
        for part in gl.static_range(0 if CAUSAL or WINDOW or PACKED else 1, 3):
            key_total, value_total, place, lap = keys_back_steps(
                k_tile, v_tile, key_total, value_total, place, lap, low, high, edges[part], edges[part + 1], factor,
                q_ring, g_ring, vectors, ready, free, BLOCK_M, HEAD, STAGES, part != 1, scores_layout, total_layout,
            )  # fmt: skip
    key_total, value_total = warpgroup_mma_wait(0, deps=(key_total, value_total))
    k_tile.store((key_total * scale).to(dtype))  # the keys are not needed any more
    v_tile.store(value_total.to(dtype))
    fence_async_shared()
    at_key = key0 + group * ROWS
    tma.async_copy_shared_to_global(dk_desc, [head // K, head % K, at_key, 0], k_part.index(group))
    tma.async_copy_shared_to_global(dv_desc, [head // K, head % K, at_key, 0], v_part.index(group))
    tma.store_wait(0)


@gluon.jit
def keys_back_hopper(
    q_desc, k_desc, v_desc, g_desc, dk_desc, dv_desc, kept, delta, first, last, B, K, GROUP, T, S, window, factor,
    scale, BLOCK_M: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr, section,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As kernel.keys_back, 128 keys per program."""
    dtype: gl.constexpr = q_desc.dtype
    k_part = gl.allocate_shared_memory(dtype, [PAIR, 1, 1, ROWS, HEAD], k_desc.layout)
    v_part = gl.allocate_shared_memory(dtype, [PAIR, 1, 1, ROWS, HEAD], v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD], q_desc.layout)
    g_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD], g_desc.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    part_ready = barriers(PAIR, 1)
    ready = barriers(STAGES, 2)  # tiles and vectors
    free = barriers(STAGES, PAIR)
    fence_async_shared()
    gl.warp_specialize([
        (keys_back_group, (0, dk_desc, dv_desc, k_part, v_part, q_ring, g_ring, vectors, part_ready, ready, free,
                           first, last, B, K, GROUP, T, S, window, factor, scale, BLOCK_M, HEAD, STAGES, section,
                           CAUSAL, WINDOW, PACKED)),
        (keys_back_group, (1, dk_desc, dv_desc, k_part, v_part, q_ring, g_ring, vectors, part_ready, ready, free,
                           first, last, B, K, GROUP, T, S, window, factor, scale, BLOCK_M, HEAD, STAGES, section,
                           CAUSAL, WINDOW, PACKED)),
        (load_keys_back, (q_desc, k_desc, v_desc, g_desc, kept, delta, k_part, v_part, q_ring, g_ring, vectors,
                          part_ready, ready, free,
                          first, last, B, K, GROUP, T, S, window, BLOCK_M, HEAD, STAGES, section, CAUSAL, WINDOW,
                          PACKED)),
    ], [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS])  # fmt: skip


# ---- queries -----------------------------------------------------------------------------------------------


@gluon.jit
def load_queries_back(
    q_desc, k_desc, v_desc, g_desc, q_part, g_part, k_ring, v_ring, part_ready, k_ready, k_free, v_ready, v_free, first,
    last, B, H, GROUP, T, S, window, BLOCK_N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr,
    section, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The loading warp: the block's queries and gradients, then keys and values."""
    BLOCK_M: gl.constexpr = PAIR * ROWS
    block, head = locate(gl.program_id(0), (T + BLOCK_M - 1) // BLOCK_M, B * H, section)
    row0 = block * BLOCK_M
    low0, _high0 = keys_of(row0, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    _low1, high1 = keys_of(row0 + BLOCK_M - 1, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    batch = head // H
    own = head % H
    shared = own // GROUP
    for group in gl.static_range(PAIR):
        at = row0 + group * ROWS
        mbarrier.expect(part_ready.index(group), 2 * ROWS * HEAD * 2)
        tma.async_copy_global_to_shared(q_desc, [batch, own, at, 0], part_ready.index(group), q_part.index(group))
        tma.async_copy_global_to_shared(g_desc, [batch, own, at, 0], part_ready.index(group), g_part.index(group))
    place = 0
    lap = 0
    begin = low0 // BLOCK_N * BLOCK_N
    for start in range(begin, gl.maximum(high1, begin + 1), BLOCK_N):  # one at least: the groups wait for it
        mbarrier.wait(k_free.index(place), (lap & 1) ^ 1)
        mbarrier.expect(k_ready.index(place), BLOCK_N * HEAD * 2)
        tma.async_copy_global_to_shared(k_desc, [batch, shared, start, 0], k_ready.index(place), k_ring.index(place))
        mbarrier.wait(v_free.index(place), (lap & 1) ^ 1)
        mbarrier.expect(v_ready.index(place), BLOCK_N * HEAD * 2)
        tma.async_copy_global_to_shared(v_desc, [batch, shared, start, 0], v_ready.index(place), v_ring.index(place))
        place, lap = next_place(place, lap, STAGES)


@gluon.jit
def scores_and_slopes(
    q_tile, g_tile, k_ring, v_ring, v_ready, place, lap, BLOCK_N: gl.constexpr, HEAD: gl.constexpr,
    scores_layout: gl.constexpr,
):  # fmt: skip
    """q k^T and grad v^T of one block of keys, asked for."""
    empty = gl.full((ROWS, BLOCK_N), 0.0, gl.float32, scores_layout)
    key = k_ring.index(place).reshape([BLOCK_N, HEAD]).permute((1, 0))
    scores = warpgroup_mma(q_tile, key, empty, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(place), lap & 1)
    value = v_ring.index(place).reshape([BLOCK_N, HEAD]).permute((1, 0))
    slopes = warpgroup_mma(g_tile, value, empty, use_acc=False, is_async=True)
    return scores, slopes


@gluon.jit
def queries_back_steps(
    q_tile, g_tile, inner, total, place, lap, low, high, sums, means, begin, end, factor, k_ring, v_ring, k_ready,
    k_free, v_ready, v_free, BLOCK_N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    scores_layout: gl.constexpr, total_layout: gl.constexpr,
):  # fmt: skip
    """Blocks of keys [begin, end): the scores' gradients of each, and meanwhile the product of those before."""
    left: gl.constexpr = gl.DotOperandLayout(0, total_layout, 2)
    dtype: gl.constexpr = k_ring.dtype
    for start in range(begin, end, BLOCK_N):
        before = (place + STAGES - 1) % STAGES
        mbarrier.wait(k_ready.index(place), lap & 1)
        scores, slopes = scores_and_slopes(
            q_tile, g_tile, k_ring, v_ring, v_ready, place, lap, BLOCK_N, HEAD, scores_layout
        )
        total = warpgroup_mma(inner, k_ring.index(before).reshape([BLOCK_N, HEAD]), total, is_async=True)
        scores, slopes, total = warpgroup_mma_wait(2, deps=(scores, slopes, total))
        weight = gl.exp2(scores * factor - gl.expand_dims(sums, 1))
        if MASKED:
            keys = gl.expand_dims(start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout)), 0)
            counts = (keys >= gl.expand_dims(low, 1)) & (keys < gl.expand_dims(high, 1))
            weight = gl.where(counts, weight, 0.0)
        slopes, total = warpgroup_mma_wait(1, deps=(slopes, total))
        mbarrier.arrive(v_free.index(place), count=1)
        made = weight * (slopes - gl.expand_dims(means, 1))
        total, inner = warpgroup_mma_wait(0, deps=(total, inner))
        mbarrier.arrive(k_free.index(before), count=1)
        inner = gl.convert_layout(made.to(dtype), left)
        place, lap = next_place(place, lap, STAGES)
    return inner, total, place, lap


@gluon.jit
def queries_back_group(
    group: gl.constexpr, dq_desc, kept, delta, q_part, g_part, k_ring, v_ring, part_ready, k_ready, k_free, v_ready,
    v_free, first, last, B, H, GROUP, T, S, window, factor, scale, BLOCK_N: gl.constexpr, HEAD: gl.constexpr,
    STAGES: gl.constexpr, section, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """One group of four warps: dq of 64 queries."""
    BLOCK_M: gl.constexpr = PAIR * ROWS
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, total_layout, 2)
    dtype: gl.constexpr = k_ring.dtype
    block, head = locate(gl.program_id(0), (T + BLOCK_M - 1) // BLOCK_M, B * H, section)
    row0 = block * BLOCK_M
    low0, high0 = keys_of(row0, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    low1, high1 = keys_of(row0 + BLOCK_M - 1, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    edges = spans(low0, high0, low1, high1, BLOCK_N)
    rows = row0 + group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
    low, high = keys_of(rows, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    offset = head.to(gl.int64) * T
    sums = gl.load(kept + offset + rows, mask=rows < T, other=float("inf"))
    means = gl.load(delta + offset + rows, mask=rows < T, other=0.0)
    q_tile = q_part.index(group).reshape([ROWS, HEAD])
    g_tile = g_part.index(group).reshape([ROWS, HEAD])
    total = gl.full((ROWS, HEAD), 0.0, gl.float32, total_layout)

    # The first block: there is no product to add yet.
    mbarrier.wait(part_ready.index(group), 0)
    mbarrier.wait(k_ready.index(0), 0)
    scores, slopes = scores_and_slopes(q_tile, g_tile, k_ring, v_ring, v_ready, 0, 0, BLOCK_N, HEAD, scores_layout)
    scores, slopes = warpgroup_mma_wait(0, deps=(scores, slopes))
    mbarrier.arrive(v_free.index(0), count=1)
    keys = gl.expand_dims(edges[0] + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout)), 0)
    counts = (keys >= gl.expand_dims(low, 1)) & (keys < gl.expand_dims(high, 1))
    weight = gl.where(counts, gl.exp2(scores * factor - gl.expand_dims(sums, 1)), 0.0)
    inner = gl.convert_layout((weight * (slopes - gl.expand_dims(means, 1))).to(dtype), left)
    place, lap = next_place(0, 0, STAGES)
    begin = edges[0] + BLOCK_N
    for part in gl.static_range(0 if WINDOW or PACKED else 1, 3):
        inner, total, place, lap = queries_back_steps(
            q_tile, g_tile, inner, total, place, lap, low, high, sums, means,
            begin if part == 0 else gl.maximum(begin, edges[part]), edges[part + 1], factor, k_ring, v_ring, k_ready,
            k_free, v_ready, v_free, BLOCK_N, HEAD, STAGES, part != 1, scores_layout, total_layout,
        )  # fmt: skip
    before = (place + STAGES - 1) % STAGES
    total = warpgroup_mma(inner, k_ring.index(before).reshape([BLOCK_N, HEAD]), total, is_async=True)
    total, inner = warpgroup_mma_wait(0, deps=(total, inner))
    q_tile.store((total * scale).to(dtype))  # the queries are not needed any more
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_desc, [head // H, head % H, row0 + group * ROWS, 0], q_part.index(group))
    tma.store_wait(0)


@gluon.jit
def queries_back_hopper(
    q_desc, k_desc, v_desc, g_desc, dq_desc, kept, delta, first, last, B, H, GROUP, T, S, window, factor, scale,
    BLOCK_N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr, section, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As kernel.queries_back, 128 queries per program."""
    dtype: gl.constexpr = q_desc.dtype
    q_part = gl.allocate_shared_memory(dtype, [PAIR, 1, 1, ROWS, HEAD], q_desc.layout)
    g_part = gl.allocate_shared_memory(dtype, [PAIR, 1, 1, ROWS, HEAD], g_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD], v_desc.layout)
    part_ready = barriers(PAIR, 1)
    k_ready = barriers(STAGES, 1)
    k_free = barriers(STAGES, PAIR)
    v_ready = barriers(STAGES, 1)
    v_free = barriers(STAGES, PAIR)
    fence_async_shared()
    gl.warp_specialize([
        (queries_back_group, (0, dq_desc, kept, delta, q_part, g_part, k_ring, v_ring, part_ready, k_ready, k_free,
                              v_ready, v_free, first, last, B, H, GROUP, T, S, window, factor, scale, BLOCK_N, HEAD,
                              STAGES, section, CAUSAL, WINDOW, PACKED)),
        (queries_back_group, (1, dq_desc, kept, delta, q_part, g_part, k_ring, v_ring, part_ready, k_ready, k_free,
                              v_ready, v_free, first, last, B, H, GROUP, T, S, window, factor, scale, BLOCK_N, HEAD,
                              STAGES, section, CAUSAL, WINDOW, PACKED)),
        (load_queries_back, (q_desc, k_desc, v_desc, g_desc, q_part, g_part, k_ring, v_ring, part_ready, k_ready,
                             k_free, v_ready, v_free, first, last, B, H, GROUP, T, S, window, BLOCK_N, HEAD, STAGES,
                             section, CAUSAL, WINDOW, PACKED)),
    ], [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS])  # fmt: skip
