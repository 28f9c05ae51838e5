/* All layers of a step in which every sequence decodes one token, on a CPU: one call from what enters the
 * first layer to the norm after the last. Its parts are the functions of few_linear/cpu.c and paged_attention/cpu.c.
 */

struct layer { /* as `_FIELDS` in cpu.py; a bias that there is none of is 0 */
    const stored *attention_norm, *heads, *heads_bias, *out, *out_bias, *mlp_norm, *gated, *gated_bias, *last, *last_bias;
    stored *keys, *values;
    const float *cosines, *sines;
    struct { const stored *a, *b; } heads_low, out_low, gated_low, last_low; /* adapters; 0: there are none */
    const int64_t *tables, *places;
    long pages, window, every;
};

/* Adapters of a step: as `add_low_rank` has them. */
struct adapters {
    const int64_t *slots_of;
    long slots, rank;
};

#define ADAPT(low, x, y, inputs, parts, ...)                                                                           \
    if (low.a)                                                                                                         \
        add_low_rank(x, low.a, low.b, adapters->slots_of, y, R, inputs, parts, (int64_t[]){__VA_ARGS__},               \
                     adapters->slots, adapters->rank)

/* x, y: (R, D). F: width of the MLP; others as in paged_attention/cpu.c. `room`: R (2D + 2HE + (H + 2K)E + 3F) numbers and
 * the scores. */
void decode_layers(const struct layer *layers, long count, const float *x, const stored *last_norm,
                   const int64_t *positions, float *y, float *room, long R, long H, long K, long E, long D, long F,
                   long N, long most, float epsilon, float cap, const struct adapters *adapters) {
    float *sum = room, *branch = sum + R * D, *rows = branch + R * D, *q = rows + R * (H + 2 * K) * E,
          *seen = q + R * H * E, *hidden = seen + R * H * E, *both = hidden + R * F, *scores = both + 2 * R * F;
    for (const struct layer *at = layers; at < layers + count; at++) {
        norm_rows(x, at == layers ? 0 : branch, at->attention_norm, sum, y, R, D, epsilon);
        x = at == layers ? x : sum;
        few_product(y, at->heads, at->heads_bias, rows, R, (H + 2 * K) * E, D);
        ADAPT(at->heads_low, y, rows, D, 3, H * E, K * E, K * E);
        turn_and_store(rows, at->cosines, at->sines, at->places, q, at->keys, at->values, R, H, K, E, at->every);
        attend_decoding(q, at->keys, at->values, at->tables, positions, seen, scores, R, H, K, E, N, at->pages,
                        at->window, most, cap, 0);
        few_product(seen, at->out, at->out_bias, branch, R, D, H * E);
        ADAPT(at->out_low, seen, branch, H * E, 1, D);
        norm_rows(x, branch, at->mlp_norm, sum, y, R, D, epsilon);
        x = sum;
        if (at->gated_low.a) {
            few_product(y, at->gated, at->gated_bias, both, R, 2 * F, D);
            ADAPT(at->gated_low, y, both, D, 2, F, F);
            gate_rows(both, hidden, R, F);
        } else
            few_gated(y, at->gated, at->gated_bias, hidden, R, F, D);
        few_product(hidden, at->last, at->last_bias, branch, R, D, F);
        ADAPT(at->last_low, hidden, branch, F, 1, D);
    }
    norm_rows(x, branch, last_norm, sum, y, R, D, epsilon);
}
