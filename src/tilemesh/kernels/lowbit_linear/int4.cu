// y (M, N) = x (M, K) W^T with weights of 4 bits in groups of 128 inputs or more, for a few tokens, on Hopper GPUs.
//
// A warp has 16 outputs, a block WARPS of them, and a cluster of SPLIT blocks shares the inputs. The order of inputs in
// a sum is free, so it is chosen such that codes are multiplied where they are loaded: of 128 inputs, the four lanes
// that share an output have 32 neighbours each, 16 bytes of codes that one load brings from memory into the registers
// that the tensor cores take them from. DEPTH such loads are on their way while one is multiplied. Activations come
// through shared memory, once for all warps, in the order in which lanes read them.
//
// A code is put behind a leading one (a bfloat16's 128, a float16's 1024), and the leading one and the zero point are
// subtracted, exactly. Sums of a group are multiplied by its scale in float32; at the end the blocks of a cluster add
// theirs up in the order of their inputs.
//
// Set before: WARPS, SPLIT, TILES (of 8 tokens), DEPTH, BLOCKS (per multiprocessor), HALF (x is float16), ZEROS.
#ifndef __cluster_dims__
#define __cluster_dims__(...) __attribute__((cluster_dims(__VA_ARGS__)))
#endif

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int CHUNK = 128;             // inputs that are multiplied between two loads of a lane
constexpr int TOKENS = 8 * TILES;
constexpr int LINE = 320;              // bytes of a token's chunk: 256, and 64 that put two tokens into other banks
constexpr int STAGE = DEPTH * TOKENS * LINE;
constexpr int OUTPUTS = 16 * WARPS;
constexpr int THREADS = 32 * WARPS;

__device__ __forceinline__ uint4 load_codes(const unsigned char* from) {
    uint4 made;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(made.x), "=r"(made.y), "=r"(made.z), "=r"(made.w) : "l"(from));
    return made;
}

__device__ __forceinline__ void copy_16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ uint4 read_16(u32 from) {
    uint4 made;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(made.x), "=r"(made.y), "=r"(made.z), "=r"(made.w) : "r"(from) : "memory");
    return made;
}

__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Pairs of codes (0, 4), (1, 5), (2, 6), (3, 7) of a word as numbers, less `offset` in both halves (negative).
__device__ __forceinline__ void unpack(u32 word, u32 offset, u32* made) {
#if HALF
    const u32 lead = 0x64006400u, one = 0x3C003C00u;
#else
    const u32 lead = 0x43004300u, one = 0x3F803F80u;
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 raw = ((word >> (4 * i)) & 0x000F000Fu) | lead;
#if HALF
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(made[i]) : "r"(raw), "r"(one), "r"(offset));
#else
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(made[i]) : "r"(raw), "r"(one), "r"(offset));
#endif
    }
}

// Minus (8 + zero + the leading one), in both halves.
__device__ __forceinline__ u32 offset_of(int zero) {
#if HALF
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"((float)(-1032 - zero)));
    const u32 bits = half;
#else
    const u32 bits = __float_as_uint((float)(-136 - zero)) >> 16;
#endif
    return bits | (bits << 16);
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

extern "C" __global__ void __cluster_dims__(1, SPLIT, 1) __launch_bounds__(THREADS, BLOCKS)
int4_tokens(const unsigned char* codes, const float* scales, const signed char* zeros, const u16* x, u16* y,
            int M, int N, int K, int G, int scale_step) {
    extern __shared__ __align__(16) unsigned char memory[];
    const u32 shared = (u32)__cvta_generic_to_shared(memory);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = lane >> 2, quarter = lane & 3;
    const int rank = blockIdx.y, chunks = K / CHUNK;
    const int first = chunks * rank / SPLIT, last = chunks * (rank + 1) / SPLIT;
    const int output = (blockIdx.x * WARPS + warp) * 16 + row;
    const int token0 = blockIdx.z * TOKENS;
    // What is outside reads the last row, and is not written.
    const int own[2] = {min(output, N - 1), min(output + 8, N - 1)};
    const int per_group = K / G / CHUNK;
    const unsigned char* lines[2];
    const float* factors[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        lines[half] = codes + (long long)own[half] * (K / 2) + quarter * 16;
        factors[half] = scales + (long long)own[half] * scale_step;
    }

    uint4 ring[DEPTH][2];
    float ring_scale[DEPTH][2];
    u32 ring_offset[DEPTH][2];
    float total[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[tile][i] = 0.0f;

#define FETCH(place, chunk)                                                                                       \
    _Pragma("unroll") for (int half = 0; half < 2; half++) {                                                      \
        ring[place][half] = load_codes(lines[half] + (long long)(chunk) * (CHUNK / 2));                           \
        ring_scale[place][half] = factors[half][(chunk) / per_group];                                             \
        ring_offset[place][half] = ZEROS ? offset_of(zeros[(long long)own[half] * scale_step + (chunk) / per_group]) \
                                         : offset_of(0);                                                          \
    }

    // A stage of activations: DEPTH chunks of all tokens, 16 bytes per copy. Unit 4 q + j of a token's chunk is read
    // by the lanes of quarter q with word j of their codes, side by side with those of the other quarters.
    auto bring = [&](int stage, int begin) {
        for (int unit = thread; unit < DEPTH * TOKENS * 16; unit += THREADS) {
            const int within = unit & 15, token = (unit >> 4) % TOKENS, place = (unit >> 4) / TOKENS;
            const int chunk = begin + place;
            const bool there = chunk < last && token0 + token < M;
            const u16* from = there ? x + (long long)(token0 + token) * K + chunk * CHUNK + within * 8 : x;
            const u32 to = shared + stage * STAGE + (place * TOKENS + token) * LINE + (within & 3) * 64 + (within >> 2) * 16;
            copy_16(to, from, there ? 16 : 0);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    bring(0, first);
#pragma unroll
    for (int place = 0; place < DEPTH; place++)
        if (first + place < last) { FETCH(place, first + place) }

    int stage = 0;
    for (int begin = first; begin < last; begin += DEPTH) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();  // this stage has arrived, and nobody reads the other one any more
        if (begin + DEPTH < last) bring(stage ^ 1, begin + DEPTH);
#pragma unroll
        for (int place = 0; place < DEPTH; place++) {
            if (begin + place >= last) break;
            const u32 low[4] = {ring[place][0].x, ring[place][0].y, ring[place][0].z, ring[place][0].w};
            const u32 high[4] = {ring[place][1].x, ring[place][1].y, ring[place][1].z, ring[place][1].w};
            const float scale[2] = {ring_scale[place][0], ring_scale[place][1]};
            const u32 offset[2] = {ring_offset[place][0], ring_offset[place][1]};
            if (begin + place + DEPTH < last) { FETCH(place, begin + place + DEPTH) }
            float part[TILES][4];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) part[tile][i] = 0.0f;
            const u32 line = shared + stage * STAGE + (place * TOKENS + row) * LINE + quarter * 16;
#pragma unroll
            for (int word = 0; word < 4; word++) {
                u32 a[4], b[4];
                unpack(low[word], offset[0], a);
                unpack(high[word], offset[1], b);
#if TILES == 1
                // Activations are put into the order of the codes ...
                const uint4 v = read_16(line + word * 64);
                multiply(part[0], a[0], b[0], a[1], b[1], __byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632));
                multiply(part[0], a[2], b[2], a[3], b[3], __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
#else
                // ... or, where there are more of them, codes into theirs: (0, 1), (2, 3), (4, 5), (6, 7).
                const u32 a01 = __byte_perm(a[0], a[1], 0x5410), a45 = __byte_perm(a[0], a[1], 0x7632);
                const u32 a23 = __byte_perm(a[2], a[3], 0x5410), a67 = __byte_perm(a[2], a[3], 0x7632);
                const u32 b01 = __byte_perm(b[0], b[1], 0x5410), b45 = __byte_perm(b[0], b[1], 0x7632);
                const u32 b23 = __byte_perm(b[2], b[3], 0x5410), b67 = __byte_perm(b[2], b[3], 0x7632);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const uint4 v = read_16(line + tile * (8 * LINE) + word * 64);
                    multiply(part[tile], a01, b01, a23, b23, v.x, v.y);
                    multiply(part[tile], a45, b45, a67, b67, v.z, v.w);
                }
#endif
            }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) total[tile][i] += scale[i >> 1] * part[tile][i];
        }
        stage ^= 1;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();

    // Sums of this block to shared memory, by token and output; then each block of the cluster adds up a part of them.
    float* sums = (float*)memory;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[(tile * 8 + quarter * 2 + (i & 1)) * OUTPUTS + warp * 16 + row + (i >> 1) * 8] = total[tile][i];
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    constexpr int MINE = TOKENS * OUTPUTS / SPLIT;
    for (int at = rank * MINE + thread; at < (rank + 1) * MINE; at += THREADS) {
        float made = 0.0f;
#pragma unroll
        for (int other = 0; other < SPLIT; other++) {
            u32 there;
            float value;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared + at * 4), "r"(other));
            asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
            made += value;
        }
        const int token = token0 + at / OUTPUTS, n = blockIdx.x * OUTPUTS + at % OUTPUTS;
        if (token < M && n < N) y[(long long)token * N + n] = rounded(made);
    }
    // Nobody leaves while others read its memory.
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
