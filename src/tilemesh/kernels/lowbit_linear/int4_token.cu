// y (1, N) = x (1, K) W^T with weights of 4 bits in groups of 128 inputs or more, for one token.
//
// A warp has 16 outputs, a strip, and WAYS warps share the inputs of a strip, 128 at a time in turns. The order of inputs
// in a sum is free, and is chosen such that codes are multiplied where they are loaded: of 128 inputs, the four lanes that
// share an output have 32 neighbours each, 16 bytes of codes that one load brings from memory into the registers that the
// tensor cores take them from. DEPTH such loads are on their way while one is multiplied, and nothing else is asked of
// memory meanwhile: activations that are fetched between codes make a product wait as if they came back behind them
// (docs/compress/LOG.md). Activations are put into shared memory first, in the order in which the tensor cores take them,
// with the sum of every 128 of them. All columns of a product are the one token.
//
// NORMED: activations are the RMSNorm of x + branch, times the norm's gains. Every block computes it, while its first codes
// are on their way; one of them writes x + branch. GATED: the first half of the rows are gates, and a result is
// silu(x G^T) * (x V^T): of a strip's 16 outputs 8 are gates, and 8 the values that belong to them.
//
// A code is put behind a leading one (a bfloat16's 128, a float16's 1024). What that and the zero point add to a sum of
// 128 products is the sum of the activations times it, and is what the sum begins with, negative. Sums are multiplied by
// their scale in float32; at the end the sums of the warps of a strip are added up in the order of the warps.
//
// N is at least what a block has: the last block has its outputs from the end, and some are computed twice, to the same.
//
// Set before: WARPS, WAYS, DEPTH, BLOCKS (per multiprocessor), PIECES (of 8 activations that a thread puts in order),
// PER_GROUP (how many times 128 inputs share a scale), HALF (x is float16), ZEROS, EARLY, NORMED, GATED.
constexpr int THREADS = 32 * WARPS;
constexpr int OUTPUTS = 16 * (WARPS / WAYS);
constexpr int RESULTS = GATED ? OUTPUTS / 2 : OUTPUTS;

// Two activations side by side, as numbers and back.
__device__ __forceinline__ float2 numbers(u32 pair) {
#if HALF
    float low, high;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(low), "=f"(high) : "r"(pair));
    return make_float2(low, high);
#else
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
#endif
}

__device__ __forceinline__ u32 pair_of(float low, float high) {
    return (u32)rounded(low) | ((u32)rounded(high) << 16);
}

__device__ __forceinline__ float sum_of_pair(u32 pair) {
    const float2 two = numbers(pair);
    return two.x + two.y;
}

// What a warp loads of its outputs for 128 inputs: a lane has a row of the first eight, and one of the second.
struct Codes {
    uint4 words[2];
    float scale[2];
#if ZEROS
    signed char zero[2];
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
int4_token(const unsigned char* codes, const float* scales, const signed char* zeros, const u16* x, const u16* branch,
           const u16* gains, u16* y, u16* total_row, int N, int K, int scale_step, double eps) {
    extern __shared__ __align__(16) unsigned char held[];
    const int chunks = K / CHUNK;
    uint4* const pairs = (uint4*)held;                // [chunks][4 words][4 lanes], 8 activations each
    float* const x_sums = (float*)(held + 2 * K);     // [chunks]
    float* const sums = x_sums + chunks;              // [WARPS][16]
    float* const squares = sums + 16 * WARPS;         // [WARPS]
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quarter = lane & 3;
    const int strip = warp / WAYS, way = warp % WAYS;
    const int first = min((int)blockIdx.x * RESULTS, (GATED ? N / 2 : N) - RESULTS);
    const int own = first + strip * (GATED ? 8 : 16) + row, apart = GATED ? N / 2 : 8;  // rows of the two eights
    const int turns = (chunks - way + WAYS - 1) / WAYS;
    // Where the loads of the first place of the ring go next: those of the others are a fixed distance behind.
    const unsigned char* lines[2];
    const float* factors[2];
    lines[0] = codes + (long long)own * (K / 2) + quarter * 16 + way * (CHUNK / 2);
    lines[1] = lines[0] + (long long)apart * (K / 2);
    factors[0] = scales + (long long)own * scale_step + (PER_GROUP == 1 ? way : 0);
    factors[1] = factors[0] + apart * scale_step;
#if ZEROS
    const signed char* const zero_at[2] = {zeros + (long long)own * scale_step, zeros + (long long)(own + apart) * scale_step};
#endif
    int first_turn = 0;  // of the ring's next loads

    auto fetch = [&](Codes& into, int place) {
        const int group = (way + (first_turn + place) * WAYS) / PER_GROUP;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            into.words[half] = load_codes(lines[half] + place * (WAYS * CHUNK / 2));
            into.scale[half] = load_scale(factors[half] + (PER_GROUP == 1 ? place * WAYS : group));
#if ZEROS
            into.zero[half] = __ldg(zero_at[half] + group);
#endif
        }
    };
    auto go_on = [&]() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            lines[half] += DEPTH * WAYS * CHUNK / 2;
            if (PER_GROUP == 1) factors[half] += DEPTH * WAYS;
        }
        first_turn += DEPTH;
    };

    // Activations are asked for first, and put in order while the first codes are on their way; unless there are codes to
    // be asked for before the activations are made.
    uint4 piece[PIECES];
    Codes ring[DEPTH];
#if NORMED
    uint4 to_add[PIECES], gain[PIECES];
#endif
    auto at_of = [&](int i) { return i * THREADS + (int)threadIdx.x; };
    auto is_there = [&](int i) { return at_of(i) < chunks * 16; };
    auto fetch_first = [&]() {
#pragma unroll
        for (int place = 0; place < DEPTH; place++)
            if (place < turns) fetch(ring[place], place);
        go_on();
    };
    auto fetch_gains = [&]() {
#if NORMED
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            if (is_there(i)) gain[i] = load_tokens(gains + 8 * at_of(i));
#endif
    };
    if (EARLY == 2) {
        fetch_gains();
        fetch_first();
    }
    take_turn(K < 0);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        if (!is_there(i)) continue;
        piece[i] = load_tokens(x + 8 * at_of(i));
#if NORMED
        to_add[i] = load_tokens(branch + 8 * at_of(i));
#endif
    }
    if (EARLY < 2) {
        fetch_gains();
        fetch_first();
    }
#if NORMED
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        if (!is_there(i)) continue;
        u32* const words = (u32*)&piece[i];
        const u32* const more = (const u32*)&to_add[i];
#pragma unroll
        for (int word = 0; word < 4; word++) {
            const float2 had = numbers(words[word]), come = numbers(more[word]);
            words[word] = pair_of(had.x + come.x, had.y + come.y);  // the norm is of the sum as it is stored
            const float2 sum = numbers(words[word]);
            square += sum.x * sum.x + sum.y * sum.y;
        }
        if (blockIdx.x == 0) *(uint4*)(total_row + 8 * at_of(i)) = piece[i];
    }
#pragma unroll
    for (int apart_by = 16; apart_by > 0; apart_by /= 2) square += __shfl_xor_sync(0xFFFFFFFFu, square, apart_by);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    float all_squares = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) all_squares += squares[other];
    const float inverse = 1.0f / sqrtf(all_squares / (float)K + (float)eps);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        if (!is_there(i)) continue;
        u32* const words = (u32*)&piece[i];
        const u32* const times = (const u32*)&gain[i];
#pragma unroll
        for (int word = 0; word < 4; word++) {
            const float2 sum = numbers(words[word]), by = numbers(times[word]);
            words[word] = pair_of(sum.x * inverse * by.x, sum.y * inverse * by.y);
        }
    }
#endif
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int at = at_of(i);  // 16 threads have 128 activations, four of them those of a lane
        const uint4 v = piece[i];
        float sum = 0.0f;
        if (is_there(i)) {
            pairs[at / 16 * 16 + at % 4 * 4 + at / 4 % 4] =
                make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                           __byte_perm(v.y, v.w, 0x7632));
            sum = sum_of_pair(v.x) + sum_of_pair(v.y) + sum_of_pair(v.z) + sum_of_pair(v.w);
        }
#pragma unroll
        for (int apart_by = 8; apart_by > 0; apart_by /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart_by);
        if (is_there(i) && at % 16 == 0) x_sums[at / 16] = sum;
    }
    __syncthreads();

    float total[2] = {0.0f, 0.0f};
    const uint4* pair = pairs + way * 16 + quarter;
    const float* x_sum_at = x_sums + way;
    for (int left = turns; left > 0; left -= DEPTH) {
#pragma unroll
        for (int place = 0; place < DEPTH; place++) {
            if (place >= left) break;
            Codes& now = ring[place];
            const float x_sum = x_sum_at[place * WAYS];
#if ZEROS
            const float from[2] = {-(ADDS + now.zero[0]) * x_sum, -(ADDS + now.zero[1]) * x_sum};
#else
            const float from[2] = {-ADDS * x_sum, -ADDS * x_sum};
#endif
            float part[4] = {from[0], from[0], from[1], from[1]};
            const u32 low[4] = {now.words[0].x, now.words[0].y, now.words[0].z, now.words[0].w};
            const u32 high[4] = {now.words[1].x, now.words[1].y, now.words[1].z, now.words[1].w};
#pragma unroll
            for (int word = 0; word < 4; word++) {
                u32 a[4], c[4];
                unpack(low[word], a);
                unpack(high[word], c);
                const uint4 b = pair[place * (WAYS * 16) + word * 4];
                multiply(part, a[0], c[0], a[1], c[1], b.x, b.y);
                multiply(part, a[2], c[2], a[3], c[3], b.z, b.w);
            }
            total[0] += now.scale[0] * part[0];
            total[1] += now.scale[1] * part[2];
            if (place + DEPTH < left) fetch(now, place);
        }
        go_on();
        pair += DEPTH * WAYS * 16;
        x_sum_at += DEPTH * WAYS;
    }

    if (quarter == 0) {
        sums[warp * 16 + row] = total[0];
        sums[warp * 16 + 8 + row] = total[1];
    }
    __syncthreads();
    for (int result = threadIdx.x; result < RESULTS; result += THREADS) {
        const int from = GATED ? result / 8 * WAYS * 16 + result % 8 : result / 16 * WAYS * 16 + result % 16;
        float made = 0.0f;
#pragma unroll
        for (int other = 0; other < WAYS; other++) made += sums[from + other * 16];
#if GATED
        float value = 0.0f;
#pragma unroll
        for (int other = 0; other < WAYS; other++) value += sums[from + other * 16 + 8];
        made = made / (1.0f + __expf(-made)) * value;
#endif
        y[first + result] = rounded(made);
    }
}
