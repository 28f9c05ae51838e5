// y (M, N) = x (M, K) W^T with weights of 4 bits in groups of 128 inputs or more, for a few tokens.
//
// A block has 16 STRIPS outputs at a time, and its eight warps share their inputs, 128 at a time in turns: so a block reads
// lines of 512 neighbouring bytes. The order of inputs in a sum is free, and is chosen such that codes are multiplied where
// they are loaded: of 128 inputs, the four lanes that share an output have 32 neighbours each, 16 bytes of codes. Every
// thread copies what it multiplies later into its own places of shared memory, DEPTH turns ahead and past the end of one
// set of outputs into the next one: nothing else reads them, so nobody waits for anybody, and codes on their way take no
// registers. Activations, which all blocks read, come from the caches.
//
// A code is put behind a leading one (a bfloat16's 128, a float16's 1024). What that and the zero point add is taken off the
// sums of a group: it is the sum of the group's activations times it. Sums of a group are multiplied by its scale in float32;
// at the end the warps' sums are added up in the order of the warps. N is at least what a block has.
//
// Codes and scales were there before the kernel ahead began: with EARLY they are on their way before that one has ended,
// and only then is it waited for. With GATED the first half of the rows are gates: silu(x G^T) * (x V^T).
//
// Set before: STRIPS, TILES (of 8 tokens), DEPTH, BLOCKS (per multiprocessor), PER_GROUP (how many times 128 inputs share
// a scale), HALF (x is float16), ZEROS, EARLY, GATED, READ_ONLY (all is read and nothing multiplied: how long that takes).
typedef unsigned int u32;
typedef unsigned short u16;

constexpr int CHUNK = 128;  // inputs that a warp multiplies in a turn
constexpr int WARPS = 8;
constexpr int TOKENS = 8 * TILES;
constexpr int OUTPUTS = 16 * STRIPS;
constexpr int RESULTS = GATED ? OUTPUTS / 2 : OUTPUTS;
constexpr int LINES = 2 * STRIPS;                    // eight outputs each
constexpr int PLACE = LINES * 32 * (16 + 4);         // bytes of a warp's turn: codes, then scales
constexpr int SUMS = WARPS * TOKENS * OUTPUTS * 4;   // bytes before the places
#if HALF
constexpr u32 LEAD = 0x64006400u, ONE = 0x3C003C00u;
constexpr float ADDS = 1032.0f;  // the leading one, and the 8 that codes are stored with
#else
constexpr u32 LEAD = 0x43004300u, ONE = 0x3F803F80u;
constexpr float ADDS = 136.0f;
#endif

__device__ __forceinline__ u32 shared_address(const void* of) { return (u32)__cvta_generic_to_shared(of); }

__device__ __forceinline__ void copy_codes(u32 to, const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_scale(u32 to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_asked_for() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Of the sets of copies that were asked for, all but the last DEPTH - 1 are there.
__device__ __forceinline__ void oldest_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 1) : "memory"); }

__device__ __forceinline__ uint4 codes_at(u32 from) {
    uint4 made;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(made.x), "=r"(made.y), "=r"(made.z), "=r"(made.w) : "r"(from) : "memory");
    return made;
}

__device__ __forceinline__ float scale_at(u32 from) {
    float made;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(made) : "r"(from) : "memory");
    return made;
}

// Not the read-only way: the kernel ahead may still write them when this one begins.
__device__ __forceinline__ uint4 load_tokens(const u16* from) {
    uint4 made;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(made.x), "=r"(made.y), "=r"(made.z), "=r"(made.w) : "l"(from) : "memory");
    return made;
}

__device__ __forceinline__ void take_turn() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
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

// Pairs of codes (0, 4), (1, 5), (2, 6), (3, 7) of a word, each behind the leading one. One instruction selects the bits
// and puts the leading ones: the compiler would take two.
__device__ __forceinline__ void unpack(u32 word, u32* made) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(made[i]) : "r"(word >> (4 * i)), "n"(0x000F000F), "r"(LEAD));
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

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
int4_stream(const unsigned char* codes, const float* scales, const signed char* zeros, const u16* x, u16* y,
            int M, int N, int K, int scale_step) {
    extern __shared__ __align__(128) unsigned char held[];
    float (&sums)[WARPS][TOKENS][OUTPUTS] = *reinterpret_cast<float (*)[WARPS][TOKENS][OUTPUTS]>(held);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quarter = lane & 3;
    const int turns = (K / CHUNK - warp + WARPS - 1) / WARPS, sets = (N + RESULTS - 1) / RESULTS;
    const int token0 = blockIdx.y * TOKENS;
    const int eight_lines = 4 * K, eight_factors = 8 * scale_step;
    const long long to_values = (long long)N * (K / 2), to_value_factors = (long long)N * scale_step;
    const u32 places = shared_address(held) + SUMS + warp * (DEPTH * PLACE) + lane * 16;
    const u32 scale_places = shared_address(held) + SUMS + warp * (DEPTH * PLACE) + LINES * 512 + lane * 4;
    const u16* tokens[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)  // a token that is not there reads the last one, and is not written
        tokens[tile] = x + (long long)min(token0 + tile * 8 + row, M - 1) * K + warp * CHUNK + quarter * 32;

    // What is copied next: a set of outputs, a turn of it, and where it goes. The last set has its outputs from the end:
    // some are computed twice, to the same.
    int next_set = blockIdx.x, next_turn = 0, next_place = 0;
    const unsigned char* line = codes;
    long long factor = 0;
    auto begin_set = [&]() {
        const int first = min(next_set * RESULTS, N - RESULTS);
        line = codes + (long long)(first + row) * (K / 2) + warp * (CHUNK / 2) + quarter * 16;
        factor = (long long)(first + row) * scale_step;
    };
    auto fetch = [&]() {
        if (next_set < sets && turns > 0) {
            const float* const own = scales + factor + (warp + next_turn * WARPS) / PER_GROUP;
#pragma unroll
            for (int at = 0; at < LINES; at++) {
                const int eights = GATED ? at / 4 * 2 + at % 2 : at, is_value = GATED ? at / 2 & 1 : 0;
                copy_codes(places + next_place * PLACE + at * 512, line + eights * (long long)eight_lines + is_value * to_values);
                copy_scale(scale_places + next_place * PLACE + at * 128, own + eights * eight_factors + is_value * to_value_factors);
            }
            line += WARPS * CHUNK / 2;
            if (++next_turn == turns) {
                next_turn = 0;
                next_set += gridDim.x;
                begin_set();
            }
            next_place = next_place + 1 == DEPTH ? 0 : next_place + 1;
        }
        copies_asked_for();
    };
    auto fetch_tokens = [&](uint4 (&into)[TILES][4], int turn) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int word = 0; word < 4; word++)
                into[tile][word] = load_tokens(tokens[tile] + turn * (WARPS * CHUNK) + word * 8);
    };

    begin_set();
#pragma unroll
    for (int ahead = 0; ahead < DEPTH; ahead++) fetch();
#if EARLY
    take_turn();
#endif
    uint4 ahead[TILES][4];
    if (!READ_ONLY && turns > 0) fetch_tokens(ahead, 0);
    int place = 0;

    for (int set = blockIdx.x; set < sets; set += gridDim.x) {
        const int first = min(set * RESULTS, N - RESULTS);
        float total[STRIPS][TILES][4];
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) total[strip][tile][i] = 0.0f;

        for (int turn = 0; turn < turns; turn++) {
            // Pairs of activations in the order of the codes' pairs, and their sums.
            u32 b[TILES][4][4];
            float summed[TILES][4];
            if (!READ_ONLY) {
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) summed[tile][i] = 0.0f;
#pragma unroll
                    for (int word = 0; word < 4; word++) {
                        const uint4 v = ahead[tile][word];
                        b[tile][word][0] = __byte_perm(v.x, v.z, 0x5410);
                        b[tile][word][1] = __byte_perm(v.x, v.z, 0x7632);
                        b[tile][word][2] = __byte_perm(v.y, v.w, 0x5410);
                        b[tile][word][3] = __byte_perm(v.y, v.w, 0x7632);
                        multiply(summed[tile], ONE, ONE, ONE, ONE, b[tile][word][0], b[tile][word][1]);
                        multiply(summed[tile], ONE, ONE, ONE, ONE, b[tile][word][2], b[tile][word][3]);
                    }
                }
                fetch_tokens(ahead, turn + 1 < turns ? turn + 1 : 0);
            }
            oldest_copies();
            uint4 words[LINES];
            float scale[LINES];
#pragma unroll
            for (int at = 0; at < LINES; at++) {
                words[at] = codes_at(places + place * PLACE + at * 512);
                scale[at] = scale_at(scale_places + place * PLACE + at * 128);
            }
            place = place + 1 == DEPTH ? 0 : place + 1;
            fetch();  // into the place that was just read, by this thread alone
#if READ_ONLY
#pragma unroll
            for (int at = 0; at < LINES; at++) {
                const u32 read = words[at].x ^ words[at].y ^ words[at].z ^ words[at].w;
                total[at / 2][0][at % 2] += __uint_as_float(read & 0x3FFFFFFFu) * scale[at];
            }
#else
#if ZEROS
            const signed char* const own_zeros = zeros + (long long)(first + row) * scale_step + (warp + turn * WARPS) / PER_GROUP;
#endif
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++) {
                float part[TILES][4];
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                    for (int i = 0; i < 4; i++) part[tile][i] = 0.0f;
                const uint4 low = words[2 * strip], high = words[2 * strip + 1];
                const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
                for (int word = 0; word < 4; word++) {
                    u32 a[4], c[4];
                    unpack(lows[word], a);
                    unpack(highs[word], c);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        multiply(part[tile], a[0], c[0], a[1], c[1], b[tile][word][0], b[tile][word][1]);
                        multiply(part[tile], a[2], c[2], a[3], c[3], b[tile][word][2], b[tile][word][3]);
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
#if ZEROS
                    const int at = 2 * strip + half, eights = GATED ? at / 4 * 2 + at % 2 : at, is_value = GATED ? at / 2 & 1 : 0;
                    const float adds = ADDS + (float)__ldg(own_zeros + eights * eight_factors + is_value * to_value_factors);
#else
                    const float adds = ADDS;
#endif
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                        for (int i = 2 * half; i < 2 * half + 2; i++)
                            total[strip][tile][i] += scale[2 * strip + half] * (part[tile][i] - adds * summed[tile][i]);
                }
            }
#endif
        }

#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[warp][tile * 8 + quarter * 2 + (i & 1)][strip * 16 + (i >> 1) * 8 + row] = total[strip][tile][i];
        __syncthreads();
        for (int at = threadIdx.x; at < TOKENS * RESULTS; at += 32 * WARPS) {
            const int token = at / RESULTS, result = at % RESULTS, n = first + result;
            if (token0 + token >= M) continue;
            const int output = GATED ? result / 16 * 32 + result % 16 : result;
            float made = 0.0f;
#pragma unroll
            for (int other = 0; other < WARPS; other++) made += sums[other][token][output];
#if GATED
            float value = 0.0f;
#pragma unroll
            for (int other = 0; other < WARPS; other++) value += sums[other][token][output + 16];
            made = made / (1.0f + __expf(-made)) * value;
#endif
            y[(long long)(token0 + token) * N + n] = rounded(made);
        }
        if (set + gridDim.x < sets) __syncthreads();
    }
}
