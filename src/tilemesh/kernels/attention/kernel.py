"""The Triton kernels of attention, forward and backward: flash attention over intervals of keys.

Every query sees the keys [low, high) (`keys_of`), and every key is seen by the queries [low, high) (`queries_of`). Both
ends grow with the position, so a block of queries needs the keys from its first query's low to its last one's high, and
those from its last one's low to its first one's high need no mask. Causal and windowed masks and packed sequences are
no more than other ends.

Forward keeps log2 of each query's sum. Backward computes the probabilities again from it, twice: once for a block of
keys (dk, dv) over all queries that see it, of all heads that share it, and once for a block of queries (dq). That is
seven products instead of five, but nothing is added up in memory: results repeat bit for bit.

Names as in reference.py; `q_h` is the stride of q along its heads, in elements.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)
"""Where a running maximum begins: below every score that matters, and finite, so that no difference is inf - inf."""


@triton.jit
def locate(pid, blocks, total, section):
    """(block, head over the batch): `section` heads at a time, whose keys stay in the L2, from the last block on.

    Neighbours are heads, which share keys; with a causal mask the last block is the one with the most work.
    """
    begin = pid // (section * blocks) * section
    inside = pid % (section * blocks)
    heads = tl.minimum(section, total - begin)
    return blocks - 1 - inside // heads, begin + inside % heads


@triton.jit
def keys_of(
    row, first, last, T, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The keys [low, high) that queries see; of one past the end, those of the last one."""
    row = tl.minimum(row, T - 1)
    at = row + (S - T)
    low = at * 0
    high = low + S
    if PACKED:
        low = tl.load(first + row)
        high = tl.load(last + row)
    if CAUSAL:
        high = tl.minimum(high, at + 1)
    if WINDOW:
        low = tl.maximum(low, at - window + 1)
        if not CAUSAL:
            high = tl.minimum(high, at + window)
    return low, high


@triton.jit
def queries_of(
    key, first, last, T, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The queries [low, high) that see keys; of a key past the end, those of the last one. Perhaps none."""
    key = tl.minimum(key, S - 1)
    at = key - (S - T)
    low = at * 0
    high = low + T
    if PACKED:
        low = tl.load(first + key)
        high = tl.load(last + key)
    if CAUSAL:
        low = tl.maximum(low, at)
    if WINDOW:
        high = tl.minimum(high, tl.maximum(at + window, 0))
        if not CAUSAL:
            low = tl.maximum(low, at - window + 1)
    return low, high


@triton.jit
def spans(low0, high0, low1, high1, BLOCK: tl.constexpr):
    """Of what lies between the first element's low and the last one's high: begin, full, rest, end.

    Whole blocks; between `full` and `rest`, the second of these three parts, no element needs a mask. All lie between
    `begin` and `end`, whatever bounds are given: who loads these blocks does not count them twice.
    """
    begin = low0 // BLOCK * BLOCK
    full = tl.maximum(tl.minimum((low1 + BLOCK - 1) // BLOCK * BLOCK, high1), begin)
    rest = tl.maximum(tl.minimum(high0, high1) // BLOCK * BLOCK, full)
    return begin, full, rest, high1


@triton.jit
def load_rows(base, rows, count, width, x_t, x_e, HEAD: tl.constexpr, UPCAST: tl.constexpr):
    """Rows of one head, zeros past the last row and past the width."""
    columns = tl.arange(0, HEAD)
    inside = (rows[:, None] < count) & (columns[None, :] < width)
    value = tl.load(base + rows[:, None] * x_t + columns[None, :] * x_e, mask=inside, other=0.0)
    return value.to(tl.float32) if UPCAST else value


@triton.jit
def store_rows(base, value, rows, count, width, x_t, x_e, HEAD: tl.constexpr):
    columns = tl.arange(0, HEAD)
    inside = (rows[:, None] < count) & (columns[None, :] < width)
    tl.store(base + rows[:, None] * x_t + columns[None, :] * x_e, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def sequence_bounds(starts, first, last, N, T, steps, BLOCK: tl.constexpr):
    """Of each token, where its packed sequence begins and ends: a binary search in `starts`, N + 1 ascending numbers.

    Whatever `starts` holds, a token's interval holds the token and lies inside of the T tokens.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = token * 0
    high = low + N
    for _ in range(steps):  # the sequence is one of [low, high)
        middle = (low + high) // 2
        begun = tl.load(starts + middle) <= token
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    begin = tl.load(starts + low).to(tl.int32)
    end = tl.load(starts + low + 1).to(tl.int32)
    inside = token < T
    tl.store(first + token, tl.maximum(tl.minimum(begin, token), 0), mask=inside)
    tl.store(last + token, tl.minimum(tl.maximum(end, token + 1), T), mask=inside)


@triton.jit
def attend_blocks(
    query, total, sums, largest, low, high, k, v, begin, end, S, E, factor, k_s, k_e, v_s, v_e, BLOCK_N: tl.constexpr,
    HEAD: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries over the keys [begin, end): the running sum of values, of probabilities, and the maximum."""
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        key = load_rows(k, keys, S, E, k_s, k_e, HEAD, UPCAST)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION, out_dtype=total.dtype) * factor
        if MASKED:
            counts = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
            scores = tl.where(counts, scores, NOTHING)
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - larger)
        weight = tl.exp2(scores - larger[:, None])
        if MASKED:
            # A query that has seen no key yet has `larger` at NOTHING: its weights would be 1.
            weight = tl.where(counts, weight, 0.0)
        sums = sums * shrink + tl.sum(weight, 1)
        value = load_rows(v, keys, S, E, v_s, v_e, HEAD, UPCAST)
        total = total * shrink[:, None]
        total = tl.dot(weight.to(value.dtype), value, total, input_precision=PRECISION, out_dtype=total.dtype)
        largest = larger
    return total, sums, largest


@triton.jit
def attend(
    q, k, v, y, kept, sinks, first, last, B, H, GROUP, T, S, E, window, factor,
    q_b, q_h, q_t, q_e, k_b, k_h, k_t, k_e, v_b, v_h, v_t, v_e, y_b, y_h, y_t, y_e,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD: tl.constexpr, section, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y and log2 of the sums of BLOCK_M queries of one head. factor: scale * log2(e)."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    block, head = locate(tl.program_id(0), (T + BLOCK_M - 1) // BLOCK_M, B * H, section)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    batch, head_here = head // H, head % H
    low0, high0 = keys_of(block * BLOCK_M, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    low1, high1 = keys_of(block * BLOCK_M + BLOCK_M - 1, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    edges = spans(low0, high0, low1, high1, BLOCK_N)
    low, high = keys_of(rows, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    query = load_rows(q + batch * q_b + head_here * q_h, rows, T, E, q_t, q_e, HEAD, UPCAST)
    k += batch * k_b + head_here // GROUP * k_h
    v += batch * v_b + head_here // GROUP * v_h
    total = tl.zeros((BLOCK_M, HEAD), kind)
    sums = tl.zeros((BLOCK_M,), kind)
    largest = tl.full((BLOCK_M,), NOTHING, kind)
    for part in tl.static_range(0 if WINDOW or PACKED else 1, 3):
        total, sums, largest = attend_blocks(
            query, total, sums, largest, low, high, k, v, edges[part], edges[part + 1], S, E, factor, k_t, k_e, v_t,
            v_e, BLOCK_N, HEAD, part != 1, UPCAST, PRECISION,
        )  # fmt: skip
    if sinks is not None:
        sink = tl.load(sinks + head_here).to(kind) * 1.4426950408889634
        larger = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - larger)
        sums = sums * shrink + tl.exp2(sink - larger)
        total = total * shrink[:, None]
        largest = larger
    store_rows(y + batch * y_b + head_here * y_h, total / sums[:, None], rows, T, E, y_t, y_e, HEAD)
    tl.store(kept + head.to(tl.int64) * T + rows, largest + tl.log2(sums), mask=rows < T)


@triton.jit
def row_products(
    y, grad, delta, B, H, T, E, y_b, y_h, y_t, y_e, g_b, g_h, g_t, g_e,
    ROWS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta = sum(grad * y) of each query, which is the sum of its probabilities times their gradients."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    blocks = (T + ROWS - 1) // ROWS
    head = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    value = load_rows(y + head // H * y_b + head % H * y_h, rows, T, E, y_t, y_e, HEAD, False).to(kind)
    slope = load_rows(grad + head // H * g_b + head % H * g_h, rows, T, E, g_t, g_e, HEAD, False).to(kind)
    tl.store(delta + head.to(tl.int64) * T + rows, tl.sum(value * slope, 1), mask=rows < T)


@triton.jit
def sinks_back(kept, delta, sinks, dsinks, B, H, T, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Of one head's sink: less its probabilities times delta. A value of 0 has no other gradient."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    head = tl.program_id(0)
    sink = tl.load(sinks + head).to(kind) * 1.4426950408889634
    total = tl.zeros((BLOCK,), kind)
    for batch in range(B):
        at = (batch * H + head).to(tl.int64) * T
        for start in range(0, T, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            weight = tl.exp2(sink - tl.load(kept + at + rows, mask=rows < T, other=float("inf")))
            total += weight * tl.load(delta + at + rows, mask=rows < T, other=0.0)
    tl.store(dsinks + head, -tl.sum(total, 0))


@triton.jit
def keys_back_blocks(
    key, value, key_total, value_total, low, high, q, grad, kept, delta, begin, end, T, E, factor,
    q_t, q_e, g_t, g_e, BLOCK_M: tl.constexpr, HEAD: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys over the queries [begin, end) of one head; keys are rows here, queries columns."""
    for start in range(begin, end, BLOCK_M):
        start = tl.multiple_of(start, BLOCK_M)
        rows = start + tl.arange(0, BLOCK_M)
        query = load_rows(q, rows, T, E, q_t, q_e, HEAD, UPCAST)
        sums = tl.load(kept + rows, mask=rows < T, other=float("inf"))  # no query: its probabilities are 0
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION, out_dtype=key_total.dtype)
        weight = tl.exp2(scores * factor - sums[None, :])
        if MASKED:
            counts = (rows[None, :] >= low[:, None]) & (rows[None, :] < high[:, None])
            weight = tl.where(counts, weight, 0.0)
        slope = load_rows(grad, rows, T, E, g_t, g_e, HEAD, UPCAST)
        value_total = tl.dot(
            weight.to(slope.dtype), slope, value_total, input_precision=PRECISION, out_dtype=value_total.dtype
        )
        means = tl.load(delta + rows, mask=rows < T, other=0.0)
        inner = tl.dot(value, tl.trans(slope), input_precision=PRECISION, out_dtype=key_total.dtype)
        inner = weight * (inner - means[None, :])
        key_total = tl.dot(
            inner.to(query.dtype), query, key_total, input_precision=PRECISION, out_dtype=key_total.dtype
        )
    return key_total, value_total


@triton.jit
def keys_back(
    q, k, v, grad, kept, delta, first, last, dk, dv, B, K, GROUP, T, S, E, window, factor, scale,
    q_b, q_h, q_t, q_e, k_b, k_h, k_t, k_e, v_b, v_h, v_t, v_e, g_b, g_h, g_t, g_e, d_b, d_h, d_t, d_e,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD: tl.constexpr, section, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one head: the sum over the GROUP heads of queries that share it."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    blocks = (S + BLOCK_N - 1) // BLOCK_N
    block, head = locate(tl.program_id(0), blocks, B * K, section)
    if CAUSAL:
        block = blocks - 1 - block  # the first keys are seen most
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    batch, head_here = head // K, head % K
    low0, high0 = queries_of(block * BLOCK_N, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    low1, high1 = queries_of(block * BLOCK_N + BLOCK_N - 1, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    edges = spans(low0, high0, low1, high1, BLOCK_M)
    low, high = queries_of(keys, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    key = load_rows(k + batch * k_b + head_here * k_h, keys, S, E, k_t, k_e, HEAD, UPCAST)
    value = load_rows(v + batch * v_b + head_here * v_h, keys, S, E, v_t, v_e, HEAD, UPCAST)
    key_total = tl.zeros((BLOCK_N, HEAD), kind)
    value_total = tl.zeros((BLOCK_N, HEAD), kind)
    for member in range(GROUP):
        mate = head_here * GROUP + member
        at = (batch * K * GROUP + mate).to(tl.int64) * T
        queries, slopes = q + batch * q_b + mate * q_h, grad + batch * g_b + mate * g_h
        for part in tl.static_range(0 if CAUSAL or WINDOW or PACKED else 1, 3):
            key_total, value_total = keys_back_blocks(
                key, value, key_total, value_total, low, high, queries, slopes, kept + at, delta + at, edges[part],
                edges[part + 1], T, E, factor, q_t, q_e, g_t, g_e, BLOCK_M, HEAD, part != 1, UPCAST, PRECISION,
            )  # fmt: skip
    store_rows(dk + batch * d_b + head_here * d_h, key_total * scale, keys, S, E, d_t, d_e, HEAD)
    store_rows(dv + batch * d_b + head_here * d_h, value_total, keys, S, E, d_t, d_e, HEAD)


@triton.jit
def queries_back_blocks(
    query, slope, sums, means, total, low, high, k, v, begin, end, S, E, factor, k_t, k_e, v_t, v_e,
    BLOCK_N: tl.constexpr, HEAD: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries over the keys [begin, end)."""
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        key = load_rows(k, keys, S, E, k_t, k_e, HEAD, UPCAST)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION, out_dtype=total.dtype)
        weight = tl.exp2(scores * factor - sums[:, None])
        if MASKED:
            counts = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
            weight = tl.where(counts, weight, 0.0)
        value = load_rows(v, keys, S, E, v_t, v_e, HEAD, UPCAST)
        inner = tl.dot(slope, tl.trans(value), input_precision=PRECISION, out_dtype=total.dtype)
        inner = weight * (inner - means[:, None])
        total = tl.dot(inner.to(key.dtype), key, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total


@triton.jit
def queries_back(
    q, k, v, grad, kept, delta, first, last, dq, B, H, GROUP, T, S, E, window, factor, scale,
    q_b, q_h, q_t, q_e, k_b, k_h, k_t, k_e, v_b, v_h, v_t, v_e, g_b, g_h, g_t, g_e, d_b, d_h, d_t, d_e,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD: tl.constexpr, section, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    block, head = locate(tl.program_id(0), (T + BLOCK_M - 1) // BLOCK_M, B * H, section)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    batch, head_here = head // H, head % H
    low0, high0 = keys_of(block * BLOCK_M, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    low1, high1 = keys_of(block * BLOCK_M + BLOCK_M - 1, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    edges = spans(low0, high0, low1, high1, BLOCK_N)
    low, high = keys_of(rows, first, last, T, S, window, CAUSAL, WINDOW, PACKED)
    query = load_rows(q + batch * q_b + head_here * q_h, rows, T, E, q_t, q_e, HEAD, UPCAST)
    slope = load_rows(grad + batch * g_b + head_here * g_h, rows, T, E, g_t, g_e, HEAD, UPCAST)
    at = head.to(tl.int64) * T
    sums = tl.load(kept + at + rows, mask=rows < T, other=float("inf"))
    means = tl.load(delta + at + rows, mask=rows < T, other=0.0)
    k += batch * k_b + head_here // GROUP * k_h
    v += batch * v_b + head_here // GROUP * v_h
    total = tl.zeros((BLOCK_M, HEAD), kind)
    for part in tl.static_range(0 if WINDOW or PACKED else 1, 3):
        total = queries_back_blocks(
            query, slope, sums, means, total, low, high, k, v, edges[part], edges[part + 1], S, E, factor, k_t, k_e,
            v_t, v_e, BLOCK_N, HEAD, part != 1, UPCAST, PRECISION,
        )  # fmt: skip
    store_rows(dq + batch * d_b + head_here * d_h, total * scale, rows, T, E, d_t, d_e, HEAD)
