/* All layers of a step in which every sequence decodes one token, on a CPU, in float32: one call from what enters the
 * first layer to the norm after the last. Its parts are the functions of few_linear/cpu.c and paged_attention/cpu.c.
 */

struct layer { /* as `_FIELDS` in cpu.py; a bias that there is none of is 0 */
    const float *attention_norm, *heads, *heads_bias, *out, *out_bias, *mlp_norm, *gated, *gated_bias, *last, *last_bias;
    float *keys, *values;
    const float *cosines, *sines;
    const int64_t *tables, *places;
    long pages, window, every;
};

/* x, y: (R, D). F: width of the MLP; others as in paged_attention/cpu.c. `room`: R (2D + 2HE + (H + 2K)E + F) numbers and
 * the scores. */
void decode_layers(const struct layer *layers, long count, const float *x, const float *last_norm,
                   const int64_t *positions, float *y, float *room, long R, long H, long K, long E, long D, long F,
                   long N, long most, float epsilon, float cap) {
    float *sum = room, *branch = sum + R * D, *rows = branch + R * D, *q = rows + R * (H + 2 * K) * E,
          *seen = q + R * H * E, *hidden = seen + R * H * E, *scores = hidden + R * F;
    for (const struct layer *at = layers; at < layers + count; at++) {
        norm_rows(x, at == layers ? 0 : branch, at->attention_norm, sum, y, R, D, epsilon);
        x = at == layers ? x : sum;
        few_product(y, at->heads, at->heads_bias, rows, R, (H + 2 * K) * E, D);
        turn_and_store(rows, at->cosines, at->sines, at->places, q, at->keys, at->values, R, H, K, E, at->every);
        attend_decoding(q, at->keys, at->values, at->tables, positions, seen, scores, R, H, K, E, N, at->pages,
                        at->window, most, cap);
        few_product(seen, at->out, at->out_bias, branch, R, D, H * E);
        norm_rows(x, branch, at->mlp_norm, sum, y, R, D, epsilon);
        x = sum;
        few_gated(y, at->gated, at->gated_bias, hidden, R, F, D);
        few_product(hidden, at->last, at->last_bias, branch, R, D, F);
    }
    norm_rows(x, branch, last_norm, sum, y, R, D, epsilon);
}
