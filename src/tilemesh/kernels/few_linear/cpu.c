/* What a step of a layer computes beside attention, on a CPU: a few rows times a matrix, the norm before it, and
 * a gate.
 *
 * The weight is read as it is stored, (N, K), once for all rows: four of its rows with four of x at a time, sixteen sums
 * in registers, each over as many lanes as a vector has. What comes next is fetched meanwhile, so that a decode step
 * takes as long as reading does. A result's bits depend on its own row alone, and not on how many others there are nor
 * on which thread computes it.
 *
 * R: rows; N: outputs; K: inputs; D, F: columns.
 */
#define TOGETHER 8 /* outputs whose weights stay in the first cache while all rows pass by */
#define BLOCK 64 /* outputs that a thread takes at once */
#define MOST_ROWS 64
#define WORTH 65536 /* numbers from which threads pay */

#if LANES == 16
typedef int places __attribute__((vector_size(64)));
#ifdef __clang__
#define CHOOSE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CHOOSE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif
/* Halves of each lane's neighbours added up, of two vectors into one: after four of these every lane is a whole sum. */
#define FOLD8(a, b) (CHOOSE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
                     CHOOSE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD4(a, b) (CHOOSE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) + \
                     CHOOSE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define FOLD2(a, b) (CHOOSE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) + \
                     CHOOSE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
#define FOLD1(a, b) (CHOOSE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) + \
                     CHOOSE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#endif

static inline float silu(float x) {
    const float small = power(-fabsf(x));
    return x * (x < 0 ? small : 1) / (1 + small);
}

/* Four rows of x times four of w: y[i * step + j], for the first m rows and n outputs. */
static inline __attribute__((always_inline)) void tile(const float *x, const float *w, const stored *next,
                                                       float *y, long K, long step, long m, long n) {
    const float *a[4], *b[4];
    lanes s[4][4];
    for (int i = 0; i < 4; i++) {
        a[i] = x + (i < m ? i : m - 1) * K;
        b[i] = w + (i < n ? i : n - 1) * K;
        for (int j = 0; j < 4; j++) s[i][j] = (lanes){0};
    }
    const long end = K / LANES * LANES;
    for (long k = 0; k < end; k += LANES) {
        lanes v[4];
        __builtin_prefetch(next + k, 0, 2);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) v[j] = *(const lanes *)(b[j] + k);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const lanes u = *(const lanes *)(a[i] + k);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) s[i][j] += u * v[j];
        }
    }
    float sums[16];
#if LANES == 16
    lanes rows[4];
    for (int i = 0; i < 4; i++) rows[i] = FOLD4(FOLD8(s[i][0], s[i][1]), FOLD8(s[i][2], s[i][3]));
    const lanes all = FOLD1(FOLD2(rows[0], rows[1]), FOLD2(rows[2], rows[3]));
    __builtin_memcpy(sums, &all, sizeof sums);
#else
    for (int i = 0; i < 16; i++) {
        sums[i] = 0;
        for (int l = 0; l < LANES; l++) sums[i] += s[i / 4][i % 4][l];
    }
#endif
    for (int i = 0; i < m && i < 4; i++)
        for (int j = 0; j < n && j < 4; j++) {
            float sum = sums[i * 4 + j];
            for (long k = end; k < K; k++) sum += a[i][k] * b[j][k];
            y[i * step + j] = sum;
        }
}

/* Outputs n to `end` of all rows, into y with rows `step` apart. What is stored in 16 bits is widened once for all rows. */
static void block(const float *x, const stored *w, const stored *bias, float *y, long R, long K, long n, long end,
                  long step) {
#ifdef STORED_BFLOAT16
    float rows[TOGETHER * K];
#else
    const float *rows;
#endif
    for (long group = n; group < end; group += TOGETHER) {
        const long last = group + TOGETHER < end ? group + TOGETHER : end;
#ifdef STORED_BFLOAT16
        for (long i = 0; i < (last - group) * K; i++) rows[i] = wide(w[group * K + i]);
#else
        rows = w + group * K;
#endif
        for (long r = 0, tiles = 0; r < R; r += 4)
            for (long j = group; j < last; j += 4, tiles++)
                tile(x + r * K, rows + (j - group) * K, w + (group + TOGETHER + tiles % TOGETHER) * K,
                     y + r * step + j - n, K, step, R - r, end - j);
    }
    if (bias)
        for (long r = 0; r < R; r++)
            for (long j = n; j < end; j++) y[r * step + j - n] += wide(bias[j]);
}

void few_product(const float *x, const stored *w, const stored *bias, float *y, long R, long N, long K) {
#pragma omp parallel for schedule(dynamic) if (N * K > WORTH)
    for (long n = 0; n < N; n += BLOCK) block(x, w, bias, y + n, R, K, n, n + BLOCK < N ? n + BLOCK : N, N);
}

/* silu(x G^T) * (x V^T) of at most MOST_ROWS rows, G being the first N rows of w and V the others. */
void few_gated(const float *x, const stored *w, const stored *bias, float *y, long R, long N, long K) {
#pragma omp parallel for schedule(dynamic) if (N * K > WORTH)
    for (long n = 0; n < N; n += BLOCK) {
        const long end = n + BLOCK < N ? n + BLOCK : N;
        float gates[MOST_ROWS * BLOCK], values[MOST_ROWS * BLOCK];
        block(x, w, bias, gates, R, K, n, end, BLOCK);
        block(x, w + N * K, bias ? bias + N : 0, values, R, K, n, end, BLOCK);
        for (long r = 0; r < R; r++)
#pragma omp simd
            for (long j = n; j < end; j++) y[r * N + j] = silu(gates[r * BLOCK + j - n]) * values[r * BLOCK + j - n];
    }
}

#if LANES == 16
/* Eight numbers of one and eight of another. */
static inline lanes halves(const stored *one, const stored *other) {
    lanes v;
    for (int e = 0; e < 8; e++) v[e] = wide(one[e]), v[e + 8] = wide(other[e]);
    return v;
}

/* Sixteen results of B, whose rows are `apart`: `low` has each eight of `rank` numbers twice. */
static inline lanes expand(const lanes *low, const stored *b, long apart, long rank) {
    lanes v[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const stored *at = b + 2 * i * apart;
        v[i] = low[0] * halves(at, at + apart);
        for (long q = 8; q < rank; q += 8) v[i] += low[q / 8] * halves(at + q, at + apart + q);
    }
    return FOLD1(FOLD2(FOLD4(v[0], v[1]), FOLD4(v[2], v[3])), FOLD2(FOLD4(v[4], v[5]), FOLD4(v[6], v[7])));
}
#endif

/* y += B (A x) of rows with adapters, of several that lie side by side: a is (parts, slots, rank, K), b (N, slots, rank),
 * and `slots_of` says whose a row's are, -1: nobody's. The outputs are `parts` pieces, of `widths` each. */
void add_low_rank(const float *x, const stored *a, const stored *b, const int64_t *slots_of, float *y, long R, long K,
                  long parts, const int64_t *widths, long slots, long rank) {
    long N = 0;
    for (long p = 0; p < parts; p++) N += widths[p];
#pragma omp parallel for schedule(dynamic) if (R * K > 4096)
    for (long r = 0; r < R; r++) {
        if (slots_of[r] < 0) continue;
        for (long p = 0, n = 0; p < parts; p++) {
            float low[rank + 4];
            const stored *own = a + (p * slots + slots_of[r]) * rank * K;
            for (long q = 0; q < rank; q += 4) { /* four at a time, so that sums do not wait for one another */
                const stored *A[4];
                for (int i = 0; i < 4; i++) A[i] = own + (q + i < rank ? q + i : rank - 1) * K;
                float s = 0, t = 0, u = 0, v = 0;
#pragma omp simd reduction(+ : s, t, u, v)
                for (long k = 0; k < K; k++) {
                    s += x[r * K + k] * wide(A[0][k]), t += x[r * K + k] * wide(A[1][k]);
                    u += x[r * K + k] * wide(A[2][k]), v += x[r * K + k] * wide(A[3][k]);
                }
                low[q] = s, low[q + 1] = t, low[q + 2] = u, low[q + 3] = v;
            }
            const long end = n + widths[p], apart = slots * rank;
            const stored *high = b + n * apart + slots_of[r] * rank;
#if LANES == 16
            lanes twice[rank / 8 + 1];
            for (long q = 0; q + 8 <= rank; q += 8)
                for (int e = 0; e < 16; e++) twice[q / 8][e] = low[q + e % 8];
            if (rank % 8 == 0)
                for (; n + 16 <= end; n += 16, high += 16 * apart)
                    *(lanes *)(y + r * N + n) += expand(twice, high, apart, rank);
#endif
            for (; n < end; n++, high += apart) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (long q = 0; q < rank; q++) sum += low[q] * wide(high[q]);
                y[r * N + n] += sum;
            }
        }
    }
}

/* The same gate of products that are there, (R, 2F). */
void gate_rows(const float *h, float *y, long R, long F) {
#pragma omp parallel for if (R * F > WORTH)
    for (long r = 0; r < R; r++)
#pragma omp simd
        for (long j = 0; j < F; j++) y[r * F + j] = silu(h[2 * r * F + j]) * h[(2 * r + 1) * F + j];
}

/* total = x + branch (0: nothing is added, and total is not written), y = total / rms(total) * scale. */
void norm_rows(const float *x, const float *branch, const stored *scale, float *total, float *y, long R, long D,
               float epsilon) {
#pragma omp parallel for if (R * D > WORTH)
    for (long r = 0; r < R; r++) {
        const float *from = x + r * D;
        float squares = 0;
        if (branch) {
            float *to = total + r * D; /* x itself, perhaps */
#pragma omp simd
            for (long d = 0; d < D; d++) to[d] = from[d] + branch[r * D + d];
            from = to;
        }
#pragma omp simd reduction(+ : squares)
        for (long d = 0; d < D; d++) squares += from[d] * from[d];
        const float factor = 1 / sqrtf(squares / D + epsilon);
#pragma omp simd
        for (long d = 0; d < D; d++) y[r * D + d] = from[d] * factor * wide(scale[d]);
    }
}
