/* Products of a few rows of activations with a matrix of small whole numbers, on a CPU.
 *
 * Activations become 16-bit fixed point, split into two signed bytes: x = scale * (128 * high + low). So the inner loops
 * multiply signed bytes and add up in 32-bit integers, which compilers turn into the dot-product instructions that CPUs
 * have (sdot, vpdpbusd, vpmaddwd), and a weight is one byte, or half of one, of memory traffic. Four rows of weights at a
 * time: eight sums that do not wait for one another, and activations that are loaded once.
 *
 * A row of K weights has G groups of K / G, each under a scale of its own. |sum| < 2^31 needs K / G < 131,072.
 *
 * With weights of 16-bit fixed point (scales are powers of two) activations get a power of two as well, products of
 * 16-bit numbers are added up in 64 bits, and nothing is rounded between the first rounding and the result.
 */
#include <math.h>
#include <stdint.h>

#define ROWS 4
#define PIECE 128 /* codes of 4 bits that are unpacked at a time, from half as many bytes */

/* One row of activations to bytes; `apart`: even elements first, then odd ones, as the halves of a byte meet them.
 * `low` may be NULL: 8 bits under the scale that is given, by the very operations of codes.py (a division, ties to even),
 * so that a token has the same codes however many are beside it. `totals`: sums over each group. */
static void to_fixed(const float *restrict x, int8_t *restrict high, int8_t *restrict low, float *scale,
                     int32_t *restrict totals, long K, long G, int apart) {
    const float limit = low ? 127 * 128 : 127, least = low ? -127 * 128 : -128;
    if (low) {
        float most = 0;
        for (long k = 0; k < K; k++) most = fmaxf(most, fabsf(x[k]));
        *scale = fmaxf(most / limit, 1.17549435e-38f);
    }
    const float step = *scale;
    const long group = K / G;
    for (long g = 0; g < G; g++) {
        int32_t total = 0;
        for (long i = 0; i < group; i++) {
            const long k = g * group + i, to = apart ? k / 2 + (k & 1) * (K / 2) : k;
            const int32_t whole = (int32_t)fminf(fmaxf(rintf(x[k] / step), least), limit);
            total += whole;
            const int32_t upper = low ? (whole + 64) >> 7 : whole;
            high[to] = (int8_t)upper;
            if (low) low[to] = (int8_t)(whole - 128 * upper);
        }
        totals[g] = total;
    }
}

/* sums[row] += w[row] * b for ROWS rows that lie `stride` apart. */
static void dots(const int8_t *restrict w, long stride, const int8_t *restrict b, long count, int32_t *restrict sums) {
    const int8_t *w0 = w, *w1 = w + stride, *w2 = w + 2 * stride, *w3 = w + 3 * stride;
    int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (long i = 0; i < count; i++) {
        s0 += (int32_t)w0[i] * (int32_t)b[i];
        s1 += (int32_t)w1[i] * (int32_t)b[i];
        s2 += (int32_t)w2[i] * (int32_t)b[i];
        s3 += (int32_t)w3[i] * (int32_t)b[i];
    }
    sums[0] += s0, sums[1] += s1, sums[2] += s2, sums[3] += s3;
}

/* high and low bytes of the activations at once: a weight is loaded once for both. */
static void dots_both(const int8_t *restrict w, long stride, const int8_t *restrict high, const int8_t *restrict low,
                      long count, int32_t *restrict upper, int32_t *restrict lower) {
    const int8_t *w0 = w, *w1 = w + stride, *w2 = w + 2 * stride, *w3 = w + 3 * stride;
    int32_t u0 = 0, u1 = 0, u2 = 0, u3 = 0, l0 = 0, l1 = 0, l2 = 0, l3 = 0;
    for (long i = 0; i < count; i++) {
        u0 += (int32_t)w0[i] * (int32_t)high[i];
        l0 += (int32_t)w0[i] * (int32_t)low[i];
        u1 += (int32_t)w1[i] * (int32_t)high[i];
        l1 += (int32_t)w1[i] * (int32_t)low[i];
        u2 += (int32_t)w2[i] * (int32_t)high[i];
        l2 += (int32_t)w2[i] * (int32_t)low[i];
        u3 += (int32_t)w3[i] * (int32_t)high[i];
        l3 += (int32_t)w3[i] * (int32_t)low[i];
    }
    upper[0] += u0, upper[1] += u1, upper[2] += u2, upper[3] += u3;
    lower[0] += l0, lower[1] += l1, lower[2] += l2, lower[3] += l3;
}

static void sums_of(const int8_t *w, long stride, const int8_t *high, const int8_t *low, long count, int32_t *upper,
                    int32_t *lower) {
    if (low)
        dots_both(w, stride, high, low, count, upper, lower);
    else
        dots(w, stride, high, count, upper);
}

/* y (M, N) = x (M, K) W^T + bias, W of `bits` 8 (signed bytes) or 4 (two codes per byte, the first in the low half, with
 * an offset of 8). `scale` and `zero` are (scale_rows, G), scale_rows 1 or N; `zero`, `bias` and `low` may be NULL.
 * `high`, `low`: M * K bytes each; `x_scale`: M, given where `low` is NULL; `totals`: M * G. */
void product(const uint8_t *w, const float *scale, const int8_t *zero, const float *x, const float *bias, float *y,
             int8_t *high, int8_t *low, float *x_scale, int32_t *totals, long M, long N, long K, long G, long scale_rows,
             long bits) {
    const long group = K / G, offset = bits == 4 ? 8 : 0, bytes = K * bits / 8;
    for (long m = 0; m < M; m++)
        to_fixed(x + m * K, high + m * K, low ? low + m * K : 0, x_scale + m, totals + m * G, K, G, bits == 4);
    const long blocks = (N + ROWS - 1) / ROWS;
/* A small product is done before other threads have woken. */
#pragma omp parallel for schedule(static) if (M * N * K > 262144)
    for (long block = 0; block < blocks; block++) {
        /* The last block may reach back into the one before, so that all have four rows. */
        const long n = block * ROWS + ROWS <= N ? block * ROWS : (N >= ROWS ? N - ROWS : 0);
        const long rows = N < ROWS ? N : ROWS;
        const long stride = rows == ROWS ? bytes : 0;
        int8_t first[ROWS * PIECE / 2], second[ROWS * PIECE / 2];
        for (long m = 0; m < M; m++) {
            const int8_t *up = high + m * K, *down = low ? low + m * K : 0;
            float sum[ROWS] = {0};
            for (long g = 0; g < G; g++) {
                int32_t upper[ROWS] = {0}, lower[ROWS] = {0};
                for (long one = 0; one < (rows == ROWS ? 1 : rows); one++) {
                    const uint8_t *row = w + (n + one) * bytes + g * (group * bits / 8);
                    int32_t *u = upper + one, *l = lower + one, spare_u[ROWS] = {0}, spare_l[ROWS] = {0};
                    int32_t *into_u = rows == ROWS ? u : spare_u, *into_l = rows == ROWS ? l : spare_l;
                    if (bits == 8) {
                        const long at = g * group;
                        sums_of((const int8_t *)row, stride, up + at, down ? down + at : 0, group, into_u, into_l);
                    } else {
                        for (long begin = 0; begin < group / 2; begin += PIECE / 2) {
                            const long count = group / 2 - begin < PIECE / 2 ? group / 2 - begin : PIECE / 2;
                            for (long r = 0; r < ROWS; r++) {
                                const uint8_t *from = row + r * stride + begin;
                                int8_t *a = first + r * (PIECE / 2), *b = second + r * (PIECE / 2);
                                for (long i = 0; i < count; i++) {
                                    a[i] = (int8_t)(from[i] & 15);
                                    b[i] = (int8_t)(from[i] >> 4);
                                }
                            }
                            const long even = g * group / 2 + begin, odd = even + K / 2;
                            sums_of(first, PIECE / 2, up + even, down ? down + even : 0, count, into_u, into_l);
                            sums_of(second, PIECE / 2, up + odd, down ? down + odd : 0, count, into_u, into_l);
                        }
                    }
                    if (rows != ROWS) *u += spare_u[0], *l += spare_l[0];
                }
                for (long r = 0; r < rows; r++) {
                    const long at = scale_rows == 1 ? g : (n + r) * G + g;
                    int64_t whole = down ? 128 * (int64_t)upper[r] + lower[r] : upper[r];
                    whole -= (int64_t)(offset + (zero ? zero[at] : 0)) * totals[m * G + g];
                    sum[r] += scale[at] * (float)whole;
                }
            }
            for (long r = 0; r < rows; r++) y[m * N + n + r] = sum[r] * x_scale[m] + (bias ? bias[n + r] : 0);
        }
    }
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
        float most = 0;
        for (long k = 0; k < K; k++) most = fmaxf(most, fabsf(x[m * K + k]));
        x_scale[m] = exp2f(ceilf(log2f(fmaxf(most / 32767, 1.17549435e-38f))));
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
