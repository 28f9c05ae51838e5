// y (M, N) = x (M, K) W^T with weights of 4 bits in groups of 128 inputs or more, for a few tokens.
//
// A block has 16 STRIPS outputs, and its eight warps share their inputs, 128 at a time in turns: so a block reads lines
// of 512 neighbouring bytes. The order of inputs in a sum is free, and is chosen such that codes are multiplied where
// they are loaded: of 128 inputs, the four lanes that share an output have 32 neighbours each, 16 bytes of codes that
// one load brings from memory into the registers that the tensor cores take them from. DEPTH such loads are on their way
// while one is multiplied. Activations, which all blocks read, come from the caches.
//
// A code is put behind a leading one (a bfloat16's 128, a float16's 1024). What that and the zero point add is the sum of
// the activations times it, and is taken off the sum of 128 products; tensor cores add up the activations too, by a product
// with ones. Sums of a group are multiplied by its scale in float32; at the end the warps' sums are added up in the order
// of the warps.
//
// Set before: STRIPS, TILES (of 8 tokens), DEPTH, BLOCKS (per multiprocessor), PER_GROUP (how many times 128 inputs share
// a scale), HALF (x is float16), ZEROS, EARLY.
constexpr int WARPS = 8;
constexpr int TOKENS = 8 * TILES;
constexpr int OUTPUTS = 16 * STRIPS;
#if HALF
constexpr u32 ONES = 0x3C003C00u;
#else
constexpr u32 ONES = 0x3F803F80u;
#endif

// What a warp loads of its outputs for 128 inputs.
struct Codes {
    uint4 words[STRIPS][2];
    float scale[STRIPS][2];
#if ZEROS
    signed char zero[STRIPS][2];
#endif
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
int4_tokens(const unsigned char* codes, const float* scales, const signed char* zeros, const u16* x, u16* y,
            int M, int N, int K, int scale_step) {
    __shared__ float sums[WARPS][TOKENS][OUTPUTS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quarter = lane & 3;
    const int turns = (K / CHUNK - warp + WARPS - 1) / WARPS;
    const int token0 = blockIdx.y * TOKENS;
    // Where the loads of the first place of the ring go next: those of the others are a fixed distance behind.
    const unsigned char* lines[STRIPS][2];
    const float* factors[STRIPS][2];
#if ZEROS
    const signed char* zero_at[STRIPS][2];
#endif
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // What is outside reads the last row, and is not written.
            const int own = min((int)blockIdx.x * OUTPUTS + strip * 16 + half * 8 + row, N - 1);
            lines[strip][half] = codes + (long long)own * (K / 2) + warp * (CHUNK / 2) + quarter * 16;
            factors[strip][half] = scales + (long long)own * scale_step + (PER_GROUP == 1 ? warp : 0);
#if ZEROS
            zero_at[strip][half] = zeros + (long long)own * scale_step;
#endif
        }
    int first_turn = 0;  // of the ring's next loads
    const u16* tokens[TILES];
    bool there[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int token = token0 + tile * 8 + row;
        there[tile] = token < M;
        tokens[tile] = x + (long long)(there[tile] ? token : 0) * K + warp * CHUNK + quarter * 32;
    }

    auto fetch = [&](Codes& into, int place) {
        const int group = (warp + (first_turn + place) * WARPS) / PER_GROUP;
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                into.words[strip][half] = load_codes(lines[strip][half] + place * (WARPS * CHUNK / 2));
                into.scale[strip][half] = load_scale(factors[strip][half] + (PER_GROUP == 1 ? place * WARPS : group));
#if ZEROS
                into.zero[strip][half] = __ldg(zero_at[strip][half] + group);
#endif
            }
    };
    auto go_on = [&]() {
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                lines[strip][half] += DEPTH * WARPS * CHUNK / 2;
                if (PER_GROUP == 1) factors[strip][half] += DEPTH * WARPS;
            }
        first_turn += DEPTH;
    };
    auto fetch_tokens = [&](uint4 (&into)[TILES][4], int ahead_by) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int word = 0; word < 4; word++)
                if (there[tile]) into[tile][word] = load_tokens(tokens[tile] + ahead_by * (WARPS * CHUNK) + word * 8);
    };

    Codes ring[DEPTH];
    uint4 ahead[TILES][4];
    float total[STRIPS][TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int word = 0; word < 4; word++) ahead[tile][word] = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[strip][tile][i] = 0.0f;
    }
    if (EARLY < 2) take_turn(K < 0);
#pragma unroll
    for (int place = 0; place < DEPTH; place++)
        if (place < turns) fetch(ring[place], place);
    go_on();
    if (EARLY == 2) take_turn(K < 0);
    if (turns > 0) fetch_tokens(ahead, 0);

    for (int left = turns; left > 0; left -= DEPTH) {
#pragma unroll
        for (int place = 0; place < DEPTH; place++) {
            if (place >= left) break;
            Codes& now = ring[place];
            // Pairs of activations in the order of the codes' pairs, and their sums.
            u32 b[TILES][4][4];
            float summed[TILES][4];
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
                    multiply(summed[tile], ONES, ONES, ONES, ONES, b[tile][word][0], b[tile][word][1]);
                    multiply(summed[tile], ONES, ONES, ONES, ONES, b[tile][word][2], b[tile][word][3]);
                }
            }
            if (place + 1 < left) fetch_tokens(ahead, place + 1);
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++) {
                float part[TILES][4];
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                    for (int i = 0; i < 4; i++) part[tile][i] = 0.0f;
                const u32 low[4] = {now.words[strip][0].x, now.words[strip][0].y, now.words[strip][0].z, now.words[strip][0].w};
                const u32 high[4] = {now.words[strip][1].x, now.words[strip][1].y, now.words[strip][1].z, now.words[strip][1].w};
#pragma unroll
                for (int word = 0; word < 4; word++) {
                    u32 a[4], c[4];
                    unpack(low[word], a);
                    unpack(high[word], c);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        multiply(part[tile], a[0], c[0], a[1], c[1], b[tile][word][0], b[tile][word][1]);
                        multiply(part[tile], a[2], c[2], a[3], c[3], b[tile][word][2], b[tile][word][3]);
                    }
                }
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
#if ZEROS
                        const float adds = ADDS + (float)now.zero[strip][i >> 1];
#else
                        const float adds = ADDS;
#endif
                        total[strip][tile][i] += now.scale[strip][i >> 1] * (part[tile][i] - adds * summed[tile][i]);
                    }
            }
            if (place + DEPTH < left) fetch(now, place);
        }
        go_on();
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) tokens[tile] += DEPTH * WARPS * CHUNK;
    }

#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[warp][tile * 8 + quarter * 2 + (i & 1)][strip * 16 + (i >> 1) * 8 + row] = total[strip][tile][i];
    __syncthreads();
    for (int at = threadIdx.x; at < TOKENS * OUTPUTS; at += 32 * WARPS) {
        const int token = at / OUTPUTS, output = at % OUTPUTS, n = blockIdx.x * OUTPUTS + output;
        if (token0 + token >= M || n >= N) continue;
        float made = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; other++) made += sums[other][token][output];
        y[(long long)(token0 + token) * N + n] = rounded(made);
    }
}
