/* Attention of sequences that decode, one new token each, over keys and values where they lie in pages, on a CPU.
 *
 * Every key and value is read once, for all query heads that share it, and nothing is copied: scores of all keys of a
 * sequence, their exponentials, then the weighted values, four keys at a time so that sums do not wait for one another.
 * What a token gets depends on its own sequence alone, and not on which thread computes which heads.
 *
 * Names as in reference.py: R sequences, H heads of queries, K of keys and values, E width, N tokens of a page, M pages
 * of a row of the table; G = H / K. `scores` has room for H * most numbers of each sequence, `most` being four more than its keys.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>

/* e^x for x <= 0 to about two units in the last place, by operations that vectorise; below -87 it is 0. */
static inline float power(float x) {
    const float clipped = x < -87.0f ? -87.0f : x;
    const float n = rintf(clipped * 1.44269504f);
    const float r = (clipped - n * 0.693359375f) + n * 2.12194440e-4f;
    const float p = 1 + r * (1 + r * (0.5f + r * (0.166666657f + r * (4.16665795e-2f + r * (8.33345205e-3f +
                    r * 1.39819995e-3f)))));
    union { int32_t i; float f; } scale = {.i = ((int32_t)n + 127) << 23};
    return x < -87.0f ? 0 : p * scale.f;
}

/* The keys of one page that are seen, from `s` to `end`, four at a time; behind the last of them stands it again. */
#define EACH_FOUR(pool, pointers)                                                                                      \
    for (long page = begin / N; page * N < end; page++)                                                                \
        for (long s = page * N < begin ? begin : page * N, last = (page + 1) * N < end ? (page + 1) * N : end;         \
             s < last && ((pointers)[0] = (pool) + (table[page] * N + s - page * N) * token,                           \
                          (pointers)[1] = (pointers)[0] + (s + 1 < last ? 1 : 0) * token,                              \
                          (pointers)[2] = (pointers)[0] + (s + 2 < last ? 2 : 0) * token,                              \
                          (pointers)[3] = (pointers)[0] + (s + 3 < last ? 3 : 0) * token, 1);                          \
             s += 4)

static void attend_one(const float *q, const float *keys, const float *values, const int64_t *table, float *y,
                       float *scores, long begin, long end, long heads, long G, long K, long E, long N, long most,
                       float scale, float cap) {
    const long token = K * E, count = end - begin;
    const float *k[4], *v[4];
    EACH_FOUR(keys, k) {
        for (long g = 0; g < heads; g++) {
            const float *x = q + g * E;
            const long at = g / G * E;
            float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
            for (long e = 0; e < E; e++) {
                a += x[e] * k[0][at + e];
                b += x[e] * k[1][at + e];
                c += x[e] * k[2][at + e];
                d += x[e] * k[3][at + e];
            }
            float *to = scores + g * most + s - begin; /* what is written too far, the next page writes over */
            to[0] = a * scale, to[1] = b * scale, to[2] = c * scale, to[3] = d * scale;
        }
    }
    for (long g = 0; g < heads; g++) {
        float *row = scores + g * most, largest = -INFINITY, total = 0;
        if (cap > 0)
            for (long s = 0; s < count; s++) row[s] = cap * tanhf(row[s] / cap);
        for (long s = 0; s < count; s++) largest = row[s] > largest ? row[s] : largest;
#pragma omp simd reduction(+ : total)
        for (long s = 0; s < count; s++) {
            row[s] = power(row[s] - largest);
            total += row[s];
        }
        for (long s = 0; s < count; s++) row[s] /= total;
        for (long e = 0; e < E; e++) y[g * E + e] = 0;
    }
    EACH_FOUR(values, v) {
        for (long g = 0; g < heads; g++) {
            const long at = g / G * E;
            const float *w = scores + g * most + s - begin;
            const float a = w[0], b = s + 1 < last ? w[1] : 0, c = s + 2 < last ? w[2] : 0, d = s + 3 < last ? w[3] : 0;
            float *restrict to = y + g * E;
#pragma omp simd
            for (long e = 0; e < E; e++) to[e] += a * v[0][at + e] + b * v[1][at + e] + c * v[2][at + e] + d * v[3][at + e];
        }
    }
}

void attend_decoding(const float *q, const float *keys, const float *values, const int64_t *tables,
                     const int64_t *positions, float *y, float *scores, long R, long H, long K, long E, long N, long M,
                     long window, long most, float cap) {
    /* All heads of a sequence together where there are enough sequences: its tokens are then read as they lie. */
    const long G = H / K, parts = R < omp_get_max_threads() ? K : 1, heads = H / parts;
    const float scale = 1 / sqrtf((float)E);
#pragma omp parallel for schedule(dynamic) if (R * H * E * most > 262144)
    for (long at = 0; at < R * parts; at++) {
        const long r = at / parts, first = at % parts * heads, end = positions[r] + 1;
        const long begin = window && end > window ? end - window : 0, from = first / G * E, to = (r * H + first) * E;
        attend_one(q + to, keys + from, values + from, tables + r * M, y + to, scores + (r * H + first) * most, begin, end,
                   heads, G, K, E, N, most, scale, cap);
    }
}
