/* Attention of sequences that decode, one new token each, over keys and values where they lie in pages, on a CPU.
 *
 * Every key and value is read once, for all query heads that share it, and nothing is copied: scores of all keys of a
 * sequence, their exponentials, then the weighted values, four keys at a time so that sums do not wait for one another.
 * What a token gets depends on its own sequence alone, and not on which thread computes which heads.
 *
 * Names as in reference.py: R sequences, H heads of queries, K of keys and values, E width, N tokens of a page, M pages
 * of a row of the table; G = H / K; `sinks`, unless 0, are scores of each query head that take no value. `scores` has room for H * most numbers of each sequence, `most` being four more than its keys.
 */
#include <omp.h>

#define KEYS (4 * LANES) /* that are scored at once */
#define QUERIES 32 /* tokens that a thread takes at once */

/* The keys of one page that are seen, from `s` to `end`, four at a time; behind the last of them stands it again. */
#define EACH_FOUR(pool, pointers)                                                                                      \
    for (long page = begin / N; page * N < end; page++)                                                                \
        for (long s = page * N < begin ? begin : page * N, last = (page + 1) * N < end ? (page + 1) * N : end;         \
             s < last && ((pointers)[0] = (pool) + (table[page] * N + s - page * N) * token,                           \
                          (pointers)[1] = (pointers)[0] + (s + 1 < last ? 1 : 0) * token,                              \
                          (pointers)[2] = (pointers)[0] + (s + 2 < last ? 2 : 0) * token,                              \
                          (pointers)[3] = (pointers)[0] + (s + 3 < last ? 3 : 0) * token, 1);                          \
             s += 4)

/* One of so many parts of the numbers that come next. */
static inline void fetch(const stored *next, long part, long parts, long count) {
    const long line = 64 / sizeof(stored);
    for (long at = part * line; at < count; at += parts * line) __builtin_prefetch(next + at, 0, 2);
}

static void attend_one(const float *q, const stored *keys, const stored *values, const int64_t *table, float *y,
                       float *scores, long begin, long end, long heads, long G, long K, long E, long N, long most,
                       float scale, float cap, const float *sinks) {
    const long token = K * E, count = end - begin;
    const stored *k[4], *v[4];
    EACH_FOUR(keys, k) {
        for (long g = 0; g < heads; g++) {
            const float *x = q + g * E;
            const long at = g / G * E;
            fetch(k[3] + token, g, heads, 4 * token);
            float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
            for (long e = 0; e < E; e++) {
                a += x[e] * wide(k[0][at + e]);
                b += x[e] * wide(k[1][at + e]);
                c += x[e] * wide(k[2][at + e]);
                d += x[e] * wide(k[3][at + e]);
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
        if (sinks && sinks[g] > largest) largest = sinks[g];
#pragma omp simd reduction(+ : total)
        for (long s = 0; s < count; s++) {
            row[s] = power(row[s] - largest);
            total += row[s];
        }
        if (sinks) total += power(sinks[g] - largest);
        for (long s = 0; s < count; s++) row[s] /= total;
        for (long e = 0; e < E; e++) y[g * E + e] = 0;
    }
    EACH_FOUR(values, v) {
        for (long g = 0; g < heads; g++) {
            const long at = g / G * E;
            const float *w = scores + g * most + s - begin;
            const float a = w[0], b = s + 1 < last ? w[1] : 0, c = s + 2 < last ? w[2] : 0, d = s + 3 < last ? w[3] : 0;
            float *restrict to = y + g * E;
            fetch(v[3] + token, g, heads, 4 * token);
#pragma omp simd
            for (long e = 0; e < E; e++)
                to[e] += a * wide(v[0][at + e]) + b * wide(v[1][at + e]) + c * wide(v[2][at + e]) + d * wide(v[3][at + e]);
        }
    }
}

void attend_decoding(const float *q, const stored *keys, const stored *values, const int64_t *tables,
                     const int64_t *positions, float *y, float *scores, long R, long H, long K, long E, long N, long M,
                     long window, long most, float cap, const float *sinks) {
    /* All heads of a sequence together where there are enough sequences: its tokens are then read as they lie. */
    const long G = H / K, parts = R < omp_get_max_threads() ? K : 1, heads = H / parts;
    const float scale = 1 / sqrtf((float)E);
#pragma omp parallel for schedule(dynamic) if (R * H * E * most > 262144)
    for (long at = 0; at < R * parts; at++) {
        const long r = at / parts, first = at % parts * heads, end = positions[r] + 1;
        const long begin = window && end > window ? end - window : 0, from = first / G * E, to = (r * H + first) * E;
        attend_one(q + to, keys + from, values + from, tables + r * M, y + to, scores + (r * H + first) * most, begin, end,
                   heads, G, K, E, N, most, scale, cap, sinks ? sinks + first : 0);
    }
}

/* The scores of two queries and a block of keys, of which the e-th numbers stand in row e. */
static inline void score_two(const float *a, const float *b, const float *block, float *to, long E) {
    lanes s[2][4];
    for (int i = 0; i < 8; i++) s[i / 4][i % 4] = (lanes){0};
    for (long e = 0; e < E; e++) {
        const float *row = block + e * KEYS;
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const lanes k = *(const lanes *)(row + j * LANES);
            s[0][j] += a[e] * k, s[1][j] += b[e] * k;
        }
    }
    for (int i = 0; i < 8; i++) *(lanes *)(to + i * LANES) = s[i / 4][i % 4];
}

/* Attention of R sequences with T new tokens each, over keys and values where they lie, up to each token's own position:
 * KEYS keys after the other, with the softmax made anew for each of them. q, y: (R, T, H, E); positions: (R, T);
 * sinks: (H), or 0. */
void attend_chunks(const float *q, const stored *keys, const stored *values, const int64_t *tables,
                   const int64_t *positions, float *y, long R, long T, long H, long K, long E, long N, long M, long window,
                   float cap, const float *sinks) {
    const long G = H / K, parts = (T + QUERIES - 1) / QUERIES, token = K * E;
    const float scale = 1 / sqrtf((float)E);
#pragma omp parallel for collapse(3) schedule(dynamic) if (R * T * H * E > 8192)
    for (long r = 0; r < R; r++)
        for (long k = 0; k < K; k++)
            for (long part = 0; part < parts; part++) {
                const long first = part * QUERIES, queries = (T - first < QUERIES ? T - first : QUERIES) * G;
                const int64_t *at = positions + r * T + first, *table = tables + r * M;
                const long end = at[queries / G - 1] + 1, low = window && at[0] >= window ? at[0] - window + 1 : 0;
                const long begin = ((r * T + first) * H + k * G) * E; /* of the first query */
                float largest[queries], total[queries], block[E * KEYS], scores[2 * KEYS];
                for (long i = 0; i < queries; i++) largest[i] = -INFINITY, total[i] = 0;
                for (long from = low / KEYS * KEYS; from < end; from += KEYS) {
                    const stored *held[KEYS];
                    for (long s = 0; s < KEYS; s++) {
                        const long known = from + s < end ? from + s : end - 1;
                        const long place = (table[known / N] * N + known % N) * token + k * E;
                        held[s] = values + place;
                        for (long e = 0; e < E; e++) block[e * KEYS + s] = wide(keys[place + e]);
                    }
                    for (long i = 0; i < queries; i++) {
                        const long query = begin + (i / G * H + i % G) * E, last = at[i / G] - from + 1;
                        const long skipped = window && at[i / G] - window + 1 > from ? at[i / G] - window + 1 - from : 0;
                        float *row = scores + i % 2 * KEYS, *restrict to = y + query, most = largest[i], sum = 0;
                        if (i % 2 == 0) {
                            const long next = i + 1 < queries ? i + 1 : i;
                            score_two(q + query, q + begin + (next / G * H + next % G) * E, block, scores, E);
                        }
                        const long count = last < KEYS ? last : KEYS;
                        if (count <= skipped) continue;
                        for (long s = 0; s < KEYS; s++) {
                            row[s] = cap > 0 ? cap * tanhf(row[s] * scale / cap) : row[s] * scale;
                            row[s] = s < skipped || s >= count ? -INFINITY : row[s];
                            most = row[s] > most ? row[s] : most;
                        }
                        const float kept = largest[i] == -INFINITY ? 0 : power(largest[i] - most);
#pragma omp simd reduction(+ : sum)
                        for (long s = 0; s < KEYS; s++) {
                            row[s] = power(row[s] - most);
                            sum += row[s];
                        }
                        for (long e = 0; e < E; e++) to[e] = largest[i] == -INFINITY ? 0 : to[e] * kept;
                        largest[i] = most, total[i] = total[i] * kept + sum;
                        for (long s = skipped / 4 * 4; s < count; s += 4) {
                            const stored *v0 = held[s], *v1 = held[s + 1], *v2 = held[s + 2], *v3 = held[s + 3];
#pragma omp simd
                            for (long e = 0; e < E; e++)
                                to[e] += row[s] * wide(v0[e]) + row[s + 1] * wide(v1[e]) + row[s + 2] * wide(v2[e]) +
                                         row[s + 3] * wide(v3[e]);
                        }
                    }
                }
                for (long i = 0; i < queries; i++) {
                    const float sink = sinks ? sinks[k * G + i % G] : -INFINITY;
                    const float most = sink > largest[i] ? sink : largest[i], kept = sinks ? power(largest[i] - most) : 1;
                    const float over = kept / (total[i] * kept + (sinks ? power(sink - most) : 0));
                    for (long e = 0; e < E; e++) y[begin + (i / G * H + i % G) * E + e] *= over;
                }
            }
}

/* From rows of queries, keys and values (R, (H + 2K) E) to queries turned by their tokens' angles, (R, H, E), and turned
 * keys and values at their places in the pages; a pair is (i, i + E / 2). `cosines`, `sines`: (R, E / 2); 0: nothing is
 * turned. A place below 0 is counted from the end of all `places`. */
void turn_and_store(const float *rows, const float *cosines, const float *sines, const int64_t *at, float *q, stored *keys,
                    stored *values, long R, long H, long K, long E, long places) {
    const long half = E / 2, turned = cosines ? 2 * half : 0;
#pragma omp parallel for if (R * (H + 2 * K) * E > 65536)
    for (long r = 0; r < R; r++) {
        const long place = (at[r] < 0 ? at[r] + places : at[r]) * K * E;
        const float *from = rows + r * (H + 2 * K) * E, *c = cosines + r * half, *s = sines + r * half;
        for (long h = 0; h < H + K; h++, from += E) {
            float key[E], *restrict to = h < H ? q + (r * H + h) * E : key;
#pragma omp simd
            for (long e = 0; e < turned / 2; e++) {
                to[e] = from[e] * c[e] - from[e + half] * s[e];
                to[e + half] = from[e + half] * c[e] + from[e] * s[e];
            }
            for (long e = turned; e < E; e++) to[e] = from[e];
            for (long e = 0; h >= H && e < E; e++) keys[place + (h - H) * E + e] = narrow(key[e]);
        }
        for (long e = 0; e < K * E; e++) values[place + e] = narrow(from[e]);
    }
}
