// y (M, N) = x (M, K) W^T with weights of 4 bits in groups of 128 inputs or more, for a few tokens, on Hopper GPUs.
//
// A block has 16 STRIPS N_WARPS outputs. One warp of it does nothing but ask for codes and activations, K_WARPS times 128
// inputs at a time, by bulk copies into a ring of STAGES places in shared memory: so many bytes are on their way that the
// memory never waits, and no register holds them. The other warps multiply: K_WARPS of them share a place's inputs, 128
// each, and N_WARPS its outputs. The order of inputs in a sum is free, and is chosen such that codes are multiplied where
// a load leaves them: of 128 inputs, the four lanes that share an output have 16 neighbours each, twice.
//
// CLUSTER blocks share the same outputs, each with every so many of the inputs, and add up their sums through each other's
// shared memory: so a block can have more outputs, and activations are read less often, while all multiprocessors work.
//
// A code is put behind a leading one (a bfloat16's 128, a float16's 1024). FOLD: what that and the zero point add is taken
// off the sums of a group, with the sum of its activations; else it is subtracted from every code, exactly. Sums of a
// group are multiplied by its scale in float32; at the end the warps' and blocks' sums are added up in their order.
//
// Set before: STRIPS, TILES (of 8 tokens), K_WARPS, N_WARPS, STAGES, BLOCKS (per multiprocessor), CLUSTER, FOLD,
// PER_GROUP (how many times 128 inputs share a scale), HALF (x is float16), ZEROS.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int CHUNK = 128;  // inputs that a warp multiplies of one place
constexpr int WARPS = K_WARPS * N_WARPS;
constexpr int TOKENS = 8 * TILES;
constexpr int OUTPUTS = 16 * STRIPS * N_WARPS;
// Bytes from one row to the next: lanes that load at the same time find all banks different.
constexpr int CODE_LINE = K_WARPS * CHUNK / 2 + 32;
constexpr int TOKEN_LINE = K_WARPS * CHUNK * 2 + 16;
constexpr int PLACE = OUTPUTS * CODE_LINE + TOKENS * TOKEN_LINE;

#if HALF
constexpr u32 LEAD = 0x64006400u, ONE = 0x3C003C00u;
constexpr float ADDS = 1032.0f;
#else
constexpr u32 LEAD = 0x43004300u, ONE = 0x3F803F80u;
constexpr float ADDS = 136.0f;
#endif

#ifndef EMULATED
__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void barrier_init(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barriers_are_set() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void expect(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "AGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra READY;\nbra AGAIN;\nREADY:\n}" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void copy(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float peer_value(const float* at, int rank) {
    u32 there;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
}

__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 add_pairs(u32 raw, u32 offset) {
    u32 made;
#if HALF
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(made) : "r"(raw), "r"(ONE), "r"(offset));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(made) : "r"(raw), "r"(ONE), "r"(offset));
#endif
    return made;
}

__device__ __forceinline__ u16 rounded(float value) {
    u16 bits;
#if HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}
#endif

// Pairs of codes (0, 4), (1, 5), (2, 6), (3, 7) of a word as numbers.
__device__ __forceinline__ void unpack(u32 word, u32 offset, u32* made) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 raw = ((word >> (4 * i)) & 0x000F000Fu) | LEAD;
        made[i] = FOLD ? raw : add_pairs(raw, offset);
    }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(32 * (WARPS + 1), BLOCKS)
int4_ring(const unsigned char* codes, const float* scales, const signed char* zeros, const u16* x, u16* y,
          int M, int N, int K, int scale_step) {
    extern __shared__ __align__(128) unsigned char held[];
    __shared__ __align__(8) u64 full[STAGES];
    __shared__ __align__(8) u64 empty[STAGES];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quarter = lane & 3;
    const int rank = blockIdx.x % CLUSTER, first_output = blockIdx.x / CLUSTER * OUTPUTS, token0 = blockIdx.y * TOKENS;
    const int chunks = K / CHUNK;
    const int turns = ((chunks + K_WARPS - 1) / K_WARPS - rank + CLUSTER - 1) / CLUSTER;
    if (threadIdx.x == 0) {
        for (int place = 0; place < STAGES; place++) {
            barrier_init(&full[place], 1);
            barrier_init(&empty[place], WARPS);
        }
        barriers_are_set();
    }
    __syncthreads();

    float total[STRIPS][TILES][4];
    const int k_warp = warp % K_WARPS, n_warp = warp / K_WARPS;
    if (warp == WARPS) {
        const int outputs = min(OUTPUTS, N - first_output), tokens = min(TOKENS, M - token0);
        int place = 0;
        for (int turn = 0; turn < turns; turn++) {
            if (turn >= STAGES) wait(&empty[place], (turn / STAGES - 1) & 1);
            const int chunk0 = (turn * CLUSTER + rank) * K_WARPS, count = min(K_WARPS, chunks - chunk0);
            unsigned char* const to = held + place * PLACE;
            if (lane == 0) expect(&full[place], count * (outputs * (CHUNK / 2) + tokens * (CHUNK * 2)));
            __syncwarp();
            for (int own = lane; own < outputs; own += 32)
                copy(to + own * CODE_LINE, codes + (long long)(first_output + own) * (K / 2) + chunk0 * (CHUNK / 2),
                     count * (CHUNK / 2), &full[place]);
            for (int own = lane; own < tokens; own += 32)
                copy(to + OUTPUTS * CODE_LINE + own * TOKEN_LINE, x + (long long)(token0 + own) * K + chunk0 * CHUNK,
                     count * (CHUNK * 2), &full[place]);
            place = place + 1 == STAGES ? 0 : place + 1;
        }
    } else {
        u32 factors[STRIPS][2];
        float next_scale[STRIPS][2];
        int next_zero[STRIPS][2];
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // What is outside reads the last row's scales, and is not written.
                const int own = min(first_output + (n_warp * STRIPS + strip) * 16 + half * 8 + row, N - 1);
                factors[strip][half] = (u32)own * (u32)scale_step;
            }
        auto fetch_scales = [&](int turn) {
            const int group = min((turn * CLUSTER + rank) * K_WARPS + k_warp, chunks - 1) / PER_GROUP;
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    next_scale[strip][half] = __ldg(scales + factors[strip][half] + group);
                    next_zero[strip][half] = ZEROS ? __ldg(zeros + factors[strip][half] + group) : 0;
                }
        };
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) total[strip][tile][i] = 0.0f;
        fetch_scales(0);
        int place = 0;
        for (int turn = 0; turn < turns; turn++) {
            float scale[STRIPS][2], offset[STRIPS][2];
            u32 pairs[STRIPS][2];
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    scale[strip][half] = next_scale[strip][half];
                    offset[strip][half] = ADDS + (float)next_zero[strip][half];
                    const u32 bits = rounded(-offset[strip][half]);
                    pairs[strip][half] = bits | (bits << 16);
                }
            if (turn + 1 < turns) fetch_scales(turn + 1);
            wait(&full[place], (turn / STAGES) & 1);
            if ((turn * CLUSTER + rank) * K_WARPS + k_warp < chunks) {
                const unsigned char* const from = held + place * PLACE;
                const unsigned char* const own_codes =
                    from + (n_warp * STRIPS * 16 + row) * CODE_LINE + k_warp * (CHUNK / 2) + quarter * 8;
                const unsigned char* const own_tokens =
                    from + OUTPUTS * CODE_LINE + row * TOKEN_LINE + k_warp * (CHUNK * 2) + quarter * 32;
                float part[STRIPS][TILES][4], summed[TILES][4];
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        summed[tile][i] = 0.0f;
#pragma unroll
                        for (int strip = 0; strip < STRIPS; strip++) part[strip][tile][i] = 0.0f;
                    }
#pragma unroll
                for (int pair = 0; pair < 2; pair++) {
                    uint2 words[STRIPS][2];
#pragma unroll
                    for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
                        for (int half = 0; half < 2; half++)
                            words[strip][half] = *(const uint2*)(own_codes + (strip * 16 + half * 8) * CODE_LINE + pair * 32);
#pragma unroll
                    for (int word = 0; word < 2; word++) {
                        // Pairs of activations in the order of the codes' pairs.
                        u32 b[TILES][4];
#pragma unroll
                        for (int tile = 0; tile < TILES; tile++) {
                            const uint4 v =
                                *(const uint4*)(own_tokens + tile * 8 * TOKEN_LINE + pair * 128 + word * 16);
                            b[tile][0] = __byte_perm(v.x, v.z, 0x5410);
                            b[tile][1] = __byte_perm(v.x, v.z, 0x7632);
                            b[tile][2] = __byte_perm(v.y, v.w, 0x5410);
                            b[tile][3] = __byte_perm(v.y, v.w, 0x7632);
                            if (FOLD) {
                                multiply(summed[tile], ONE, ONE, ONE, ONE, b[tile][0], b[tile][1]);
                                multiply(summed[tile], ONE, ONE, ONE, ONE, b[tile][2], b[tile][3]);
                            }
                        }
#pragma unroll
                        for (int strip = 0; strip < STRIPS; strip++) {
                            u32 a[4], c[4];
                            unpack(word ? words[strip][0].y : words[strip][0].x, pairs[strip][0], a);
                            unpack(word ? words[strip][1].y : words[strip][1].x, pairs[strip][1], c);
#pragma unroll
                            for (int tile = 0; tile < TILES; tile++) {
                                multiply(part[strip][tile], a[0], c[0], a[1], c[1], b[tile][0], b[tile][1]);
                                multiply(part[strip][tile], a[2], c[2], a[3], c[3], b[tile][2], b[tile][3]);
                            }
                        }
                    }
                }
#pragma unroll
                for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            float made = part[strip][tile][i];
                            if (FOLD) made -= offset[strip][i >> 1] * summed[tile][i];
                            total[strip][tile][i] += scale[strip][i >> 1] * made;
                        }
            }
            __syncwarp();
            if (lane == 0) arrive(&empty[place]);
            place = place + 1 == STAGES ? 0 : place + 1;
        }
    }

    // Every copy has been waited for and read: the ring's memory takes the sums.
    float* const sums = (float*)held;
    __syncthreads();
    if (warp < WARPS) {
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = tile * 8 + quarter * 2 + (i & 1);
                    const int output = (n_warp * STRIPS + strip) * 16 + (i >> 1) * 8 + row;
                    sums[(k_warp * TOKENS + token) * OUTPUTS + output] = total[strip][tile][i];
                }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < TOKENS * OUTPUTS; at += 32 * (WARPS + 1)) {
        float made = 0.0f;
#pragma unroll
        for (int other = 0; other < K_WARPS; other++) made += sums[other * TOKENS * OUTPUTS + at];
        if (CLUSTER > 1) {
            sums[at] = made;
        } else {
            const int token = token0 + at / OUTPUTS, n = first_output + at % OUTPUTS;
            if (token < M && n < N) y[(long long)token * N + n] = rounded(made);
        }
    }
#if CLUSTER > 1
    cluster_barrier();
    for (int at = rank * 32 * (WARPS + 1) + threadIdx.x; at < TOKENS * OUTPUTS; at += CLUSTER * 32 * (WARPS + 1)) {
        float made = 0.0f;
#pragma unroll
        for (int other = 0; other < CLUSTER; other++) made += peer_value(sums + at, other);
        const int token = token0 + at / OUTPUTS, n = first_output + at % OUTPUTS;
        if (token < M && n < N) y[(long long)token * N + n] = rounded(made);
    }
    cluster_barrier();  // no block ends while another reads its sums
#endif
}
