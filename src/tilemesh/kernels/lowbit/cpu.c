/* Products of a few rows of activations with a matrix of small whole numbers, on a CPU.
 *
 * Activations become 16-bit fixed point, split into two signed bytes: x = scale * (128 * high + low). So the inner loops
 * multiply bytes and add up in 32-bit integers, for which CPUs have instructions (sdot, vpdpbusd), and a weight is one
 * byte, or half of one, of memory traffic. Four rows of weights at a time: eight sums that do not wait for one another,
 * and activations that are loaded once.
 *
 * A row of K weights has G groups of K / G, each under a scale of its own. Sums of a group stay in vectors and are scaled
 * there, so that small groups cost no sum over a vector's elements; above EXACT inputs they are added up as 64-bit integers.
 * Activations lie as the weights are unpacked: padded with zeros to whole vectors in each group.
 *
 * With weights of 16-bit fixed point (scales are powers of two) activations get a power of two as well, products of
 * 16-bit numbers are added up in 64 bits, and nothing is rounded between the first rounding and the result.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 4
#define EXACT 512 /* inputs of a group whose sums a float holds exactly, element by element of a vector */

/* What differs between CPUs. STEP codes are read at a time; `load8` and `load4` read `count` of them, at most STEP (the
 * rest are any numbers: activations are zero there); codes of 4 bits come as even ones, then odd ones. SHIFT: what load8
 * adds to a code. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define STEP 64
#define SHIFT 128 /* vpdpbusd's first bytes have no sign */
typedef int32_t sums_t __attribute__((vector_size(64)));
typedef float floats_t __attribute__((vector_size(64)));
typedef __m512i codes_t;

static inline codes_t load8(const uint8_t *w, long count) {
    const __m512i signs = _mm512_set1_epi8(-128);
    if (count >= 64) return _mm512_xor_si512(_mm512_loadu_si512(w), signs);
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8((1ull << count) - 1, w), signs);
}
static inline codes_t load4(const uint8_t *w, long count) {
    const __m256i pairs = count >= 64 ? _mm256_loadu_si256((const __m256i *)w)
                                      : _mm256_maskz_loadu_epi8((__mmask32)((1ull << (count / 2)) - 1), w);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(pairs), _mm256_srli_epi16(pairs, 4), 1);
    return _mm512_and_si512(both, _mm512_set1_epi8(15));
}
static inline sums_t add_products(sums_t sums, codes_t w, const int8_t *x) {
    return (sums_t)_mm512_dpbusd_epi32((__m512i)sums, w, _mm512_loadu_si512(x));
}
#else
#define STEP 32
#define SHIFT 0
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
typedef int32_t sums_t __attribute__((vector_size(16)));
typedef float floats_t __attribute__((vector_size(16)));
#else /* products of bytes fit 16 bits */
typedef int32_t sums_t __attribute__((vector_size(128)));
typedef float floats_t __attribute__((vector_size(128)));
#endif
typedef int8_t bytes_t __attribute__((vector_size(16)));
typedef struct {
    bytes_t first, second;
} codes_t;

static inline codes_t load8(const uint8_t *w, long count) {
    codes_t codes = {{0}, {0}};
    memcpy(&codes, w, count >= 32 ? 32 : (size_t)count);
    return codes;
}
static inline codes_t load4(const uint8_t *w, long count) {
    typedef uint8_t pairs_t __attribute__((vector_size(16)));
    pairs_t pairs = {0};
    if (count >= 32)
        memcpy(&pairs, w, 16);
    else
        memcpy(&pairs, w, (size_t)count / 2);
    return (codes_t){(bytes_t)(pairs & 15), (bytes_t)(pairs >> 4)};
}
static inline sums_t add_products(sums_t sums, codes_t w, const int8_t *x) {
#if defined(__ARM_FEATURE_DOTPROD)
    sums = (sums_t)vdotq_s32((int32x4_t)sums, (int8x16_t)w.first, vld1q_s8(x));
    return (sums_t)vdotq_s32((int32x4_t)sums, (int8x16_t)w.second, vld1q_s8(x + 16));
#else
    typedef int8_t codes8 __attribute__((vector_size(32)));
    typedef int16_t codes16 __attribute__((vector_size(64)));
    codes8 w8, x8;
    memcpy(&w8, &w, 32), memcpy(&x8, x, 32);
    return sums + __builtin_convertvector(__builtin_convertvector(w8, codes16) * __builtin_convertvector(x8, codes16), sums_t);
#endif
}
#endif
#define LANES ((long)(sizeof(sums_t) / sizeof(int32_t)))

/* A matrix of codes, and activations as bytes: M x (G * padded), `low` NULL where they have 8 bits. */
typedef struct {
    const uint8_t *w;
    const float *scale, *bias, *x_scale;
    const int8_t *zero, *high, *low;
    const int32_t *high_sums, *low_sums; /* of each token's groups, as LANES parts */
    float *y;
    long N, K, G, scale_rows, padded;
} product_t;

/* The largest magnitude of a row; NaN where one of its numbers is NaN or infinite. Magnitudes are ordered as their bits
 * are, and whole numbers are compared as they stand where a compiler may take every float for finite. */
static float largest(const float *x, long K) {
    uint32_t most = 0;
    for (long k = 0; k < K; k++) {
        uint32_t bits;
        memcpy(&bits, x + k, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    if (most >= 0x7f800000) most = 0x7fc00000;
    float magnitude;
    memcpy(&magnitude, &most, sizeof magnitude);
    return magnitude;
}

/* What a row of this largest magnitude is measured in: `limit` steps, or NaN, so that what was NaN stays NaN. */
static float step_of(float most, float limit) {
    uint32_t bits;
    memcpy(&bits, &most, sizeof bits);
    return bits >= 0x7f800000 ? most : fmaxf(most / limit, 1.17549435e-38f);
}

/* One row of activations to bytes, by the very operations of codes.py (a division, ties to even), so that a token has the
 * same codes however many are beside it. Without `low`, 8 bits under the scale that is given. */
static void to_bytes(const float *restrict x, int8_t *restrict high, int8_t *restrict low, float *scale,
                     int32_t *restrict high_sums, int32_t *restrict low_sums, long K, long G, long padded, int bits) {
    const float limit = low ? 127 * 128 : 127, least = low ? -127 * 128 : -128;
    if (low) *scale = step_of(largest(x, K), limit);
    const float step = *scale;
    const long group = K / G;
    const uint8_t pairs[STEP / 2] = {[0 ... STEP / 2 - 1] = 0x11};
    const codes_t ones = load4(pairs, STEP);
    memset(high, 0, (size_t)(G * padded));
    if (low) memset(low, 0, (size_t)(G * padded));
    for (long g = 0; g < G; g++) {
        sums_t upper_sums = {0}, lower_sums = {0};
        for (long begin = 0; begin < group; begin += STEP) {
            const long count = group - begin < STEP ? group - begin : STEP, at = g * padded + begin;
            int16_t fixed[STEP], upper[STEP];
            for (long i = 0; i < count; i++)
                fixed[i] = (int16_t)(int32_t)fminf(fmaxf(rintf(x[g * group + begin + i] / step), least), limit);
            for (long i = 0; i < count; i++) upper[i] = low ? (int16_t)((fixed[i] + 64) >> 7) : fixed[i];
            const long pair = bits == 4 ? 2 : 1; /* even ones, then odd ones */
            for (long odd = 0; odd < pair; odd++)
                for (long i = 0; i < count / pair; i++) {
                    high[at + odd * (STEP / 2) + i] = (int8_t)upper[pair * i + odd];
                    if (low) low[at + odd * (STEP / 2) + i] = (int8_t)(fixed[pair * i + odd] - 128 * upper[pair * i + odd]);
                }
            upper_sums = add_products(upper_sums, ones, high + at);
            if (low) lower_sums = add_products(lower_sums, ones, low + at);
        }
        memcpy(high_sums + g * LANES, &upper_sums, sizeof(sums_t));
        memcpy(low_sums + g * LANES, &lower_sums, sizeof(sums_t));
    }
}

static inline int64_t sum_of(sums_t sums) {
    int64_t sum = 0;
    for (long i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

/* Rows n to n + ROWS of the matrix times one of activations. `bits` and `halves` (bytes per activation) are constants where
 * this is called, so that each case is a function of its own. Two rows of activations at a time spilled registers. */
static inline __attribute__((always_inline)) void block(const product_t *p, long n, long m, const int bits, const int halves) {
    const long group = p->K / p->G, row_bytes = p->K * bits / 8, offset = bits == 4 ? 8 : SHIFT;
    long row[ROWS]; /* a matrix of fewer rows has its last one more than once */
    for (int r = 0; r < ROWS; r++) row[r] = n + r < p->N ? n + r : p->N - 1;
    floats_t total[ROWS] = {0};
    for (long g = 0; g < p->G; g++) {
        const int8_t *high = p->high + (m * p->G + g) * p->padded, *low = p->low + (halves == 2 ? (m * p->G + g) * p->padded : 0);
        sums_t upper[ROWS], lower[ROWS], high_sums, low_sums;
        float scales[ROWS];
        memcpy(&high_sums, p->high_sums + (m * p->G + g) * LANES, sizeof(sums_t));
        memcpy(&low_sums, p->low_sums + (m * p->G + g) * LANES, sizeof(sums_t));
        for (int r = 0; r < ROWS; r++) {
            const long at = p->scale_rows == 1 ? g : row[r] * p->G + g;
            const int32_t without = (int32_t)offset + (p->zero ? p->zero[at] : 0);
            scales[r] = p->scale[at];
            upper[r] = -without * high_sums, lower[r] = -without * low_sums;
        }
        for (long begin = 0; begin < group; begin += STEP)
            for (int r = 0; r < ROWS; r++) {
                const uint8_t *w = p->w + row[r] * row_bytes + (g * group + begin) * bits / 8;
                const codes_t codes = bits == 4 ? load4(w, group - begin) : load8(w, group - begin);
                upper[r] = add_products(upper[r], codes, high + begin);
                if (halves == 2) lower[r] = add_products(lower[r], codes, low + begin);
            }
        for (int r = 0; r < ROWS; r++) {
            floats_t sum = {0};
            if (group > EXACT)
                sum[0] = (float)(halves == 2 ? 128 * sum_of(upper[r]) + sum_of(lower[r]) : sum_of(upper[r]));
            else
                sum = __builtin_convertvector(upper[r], floats_t);
            if (group <= EXACT && halves == 2) sum = 128 * sum + __builtin_convertvector(lower[r], floats_t);
            total[r] += scales[r] * sum;
        }
    }
    for (int r = 0; r < ROWS && n + r < p->N; r++) {
        float sum = 0;
        for (long i = 0; i < LANES; i++) sum += total[r][i];
        p->y[m * p->N + n + r] = sum * p->x_scale[m] + (p->bias ? p->bias[n + r] : 0);
    }
}

/* y (M, N) = x (M, K) W^T + bias, W of `bits` 8 (signed bytes) or 4 (two codes per byte, the first in the low half, with
 * an offset of 8). `scale` and `zero` are (scale_rows, G), scale_rows 1 or N; `zero`, `bias` may be NULL. `x_scale`: one
 * per row of x where activations are to have 8 bits, else NULL. Returns whether there was memory. */
int product(const uint8_t *w, const float *scale, const int8_t *zero, const float *x, const float *bias, float *y,
            const float *x_scale, long M, long N, long K, long G, long scale_rows, long bits) {
    const long group = K / G, padded = (group + STEP - 1) / STEP * STEP, bytes = M * G * padded, halves = x_scale ? 1 : 2;
    const long parts = G * LANES;
    int32_t *sums = malloc((size_t)(2 * M * parts) * sizeof(int32_t) + (size_t)M * sizeof(float) + (size_t)(halves * bytes));
    if (!sums) return 0;
    float *scales = (float *)(sums + 2 * M * parts);
    int8_t *high = (int8_t *)(scales + M), *low = x_scale ? 0 : high + bytes;
    for (long m = 0; m < M; m++) {
        if (x_scale) scales[m] = x_scale[m];
        to_bytes(x + m * K, high + m * G * padded, low ? low + m * G * padded : 0, scales + m, sums + m * parts,
                 sums + (M + m) * parts, K, G, padded, (int)bits);
    }
    const product_t p = {w, scale, bias, scales, zero, high, low, sums, sums + M * parts, y, N, K, G, scale_rows, padded};
/* A small product is done before other threads have woken. */
#pragma omp parallel for schedule(static) if (M * N * K > 262144)
    for (long n = 0; n < N; n += ROWS)
        for (long m = 0; m < M; m++) {
            if (bits == 4 && low) block(&p, n, m, 4, 2);
            else if (bits == 4) block(&p, n, m, 4, 1);
            else if (low) block(&p, n, m, 8, 2);
            else block(&p, n, m, 8, 1);
        }
    free(sums);
    return 1;
}

/* sums[row] = w[row] * x for ROWS rows that lie `stride` apart. */
static void wide_dots(const int16_t *restrict w, long stride, const int16_t *restrict x, long count, int64_t *restrict sums) {
    const int16_t *w0 = w, *w1 = w + stride, *w2 = w + 2 * stride, *w3 = w + 3 * stride;
    int64_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (long i = 0; i < count; i++) {
        s0 += (int32_t)w0[i] * (int32_t)x[i];
        s1 += (int32_t)w1[i] * (int32_t)x[i];
        s2 += (int32_t)w2[i] * (int32_t)x[i];
        s3 += (int32_t)w3[i] * (int32_t)x[i];
    }
    sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}

/* y (M, N) = x (M, K) W^T + bias, W and x as 16-bit fixed point. `scale`: (scale_rows, G), powers of two; `whole`: room for
 * M * K activations; `x_scale`: M. */
void fixed_product(const int16_t *w, const float *scale, const float *x, const float *bias, float *y, int16_t *whole,
                   float *x_scale, long M, long N, long K, long G, long scale_rows) {
    const long group = K / G;
    for (long m = 0; m < M; m++) {
        x_scale[m] = exp2f(ceilf(log2f(step_of(largest(x + m * K, K), 32767))));
        const float factor = 1 / x_scale[m];
        for (long k = 0; k < K; k++) whole[m * K + k] = (int16_t)rintf(x[m * K + k] * factor);
    }
    const long blocks = (N + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static) if (M * N * K > 262144)
    for (long block = 0; block < blocks; block++) {
        const long n = block * ROWS + ROWS <= N ? block * ROWS : (N >= ROWS ? N - ROWS : 0);
        const long rows = N < ROWS ? N : ROWS;
        for (long m = 0; m < M; m++) {
            float sum[ROWS] = {0};
            for (long g = 0; g < G; g++) {
                int64_t sums[ROWS];
                const long at = n * K + g * group;
                wide_dots(w + at, rows == ROWS ? K : 0, whole + m * K + g * group, group, sums);
                for (long r = 0; r < rows; r++) {
                    if (rows != ROWS) { /* fewer rows than a block has: one at a time */
                        wide_dots(w + at + r * K, 0, whole + m * K + g * group, group, sums);
                        sums[r] = sums[0];
                    }
                    sum[r] += scale[scale_rows == 1 ? g : (n + r) * G + g] * (float)sums[r];
                }
            }
            for (long r = 0; r < rows; r++) y[m * N + n + r] = sum[r] * x_scale[m] + (bias ? bias[n + r] : 0);
        }
    }
}
