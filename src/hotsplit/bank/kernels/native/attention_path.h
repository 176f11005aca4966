/* Attention of one path: included after path.h, with the same words and these:
 *
 *   totals(v)        the total of each of LANES vectors, in its lane; one tree, whichever vector it is
 *   larger(a, b)     lane by lane
 *
 * A query's scores and sums have one order of adding, by number of the key, whichever queries are computed beside it.
 */

#define INLINE static inline __attribute__((always_inline)) TARGET

enum { PATH(TOGETHER) = LANES / 4, PATH(PADDED) = BLOCK + LANES };

/* Scores of some queries and LANES / queries keys; keys beyond the last are the last once more, and are thrown away. */
INLINE void PATH(scores_of)(const int kind, const int queries, const struct attention *call, const char *keys,
                            int64_t first, int64_t num_keys, const float *numbers, int64_t apart, float *scores) {
    enum { MOST_KEYS = LANES };
    const int together = LANES / queries;
    const int64_t size = bytes_of(kind), width = call->key_dim;
    const char *from[MOST_KEYS];
    vector sums[LANES];
    float found[LANES];
    for (int k = 0; k < together; k++) {
        const int64_t key = first + k < num_keys ? first + k : num_keys - 1;
        from[k] = keys + key * call->key_apart[2] * size;
    }
    for (int i = 0; i < LANES; i++) sums[i] = zero();
    int64_t at = 0;
    for (; at + LANES <= width; at += LANES) {
        vector query[4];
        for (int q = 0; q < queries; q++) query[q] = get(numbers + q * apart + at);
        for (int k = 0; k < together; k++) {
            const vector key = PATH(load)(kind, from[k] + at * size);
            for (int q = 0; q < queries; q++)
                sums[q * together + k] = fused(key, query[q], sums[q * together + k]);
        }
    }
    if (at < width) {
        for (int k = 0; k < together; k++) {
            const vector key = PATH(load_some)(kind, from[k] + at * size, width - at);
            for (int q = 0; q < queries; q++)
                sums[q * together + k] = fused(key, get(numbers + q * apart + at), sums[q * together + k]);
        }
    }
    put(found, totals(sums));
    for (int q = 0; q < queries; q++)
        memcpy(scores + q * PATH(PADDED) + first, found + q * together, (size_t)together * 4);
}

/* The values of a block, weighted, of some queries: `vectors` of them from number `at` on. */
INLINE void PATH(values_of)(const int kind, const int queries, const int vectors, const struct attention *call,
                            const struct attention_piece *piece, int64_t at, const float *weights,
                            const struct attention_part *parts) {
    const int64_t size = bytes_of(kind), apart = call->value_apart[2] * size, left = call->value_dim - at;
    const char *from = piece->values + at * size;
    vector sums[4][4];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = zero();
    for (int64_t key = 0; key < piece->num_keys; key++, from += apart) {
        vector numbers[4];
        if (vectors == 1 && left < LANES) numbers[0] = PATH(load_some)(kind, from, left);
        else
            for (int v = 0; v < vectors; v++) numbers[v] = PATH(load)(kind, from + v * LANES * size);
        for (int q = 0; q < queries; q++) {
            const vector weight = spread(weights[q * PATH(PADDED) + key]);
            for (int v = 0; v < vectors; v++) sums[q][v] = fused(weight, numbers[v], sums[q][v]);
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) put(parts[q].values + at + v * LANES, sums[q][v]);
}

/* Scores, scaled and masked, to exponentials relative to the largest; hidden keys and those behind the last are 0. */
INLINE void PATH(weigh)(const struct attention *call, const struct attention_piece *piece, int64_t query, float *scores,
                        struct attention_part *part) {
    const float scale = (float)call->scale;
    const char *mask = piece->masks[query];
    const int64_t visible = piece->visible[query], padded = (piece->num_keys + LANES - 1) / LANES * LANES;
    for (int64_t i = 0; i < visible; i++) scores[i] *= scale;
    for (int64_t i = visible; i < padded; i++) scores[i] = -INFINITY;
    if (call->mask_kind == BOOLEAN_MASK) {
        for (int64_t i = 0; i < visible; i++) scores[i] = mask[i] ? scores[i] : -INFINITY;
    } else if (call->mask_kind != NO_MASK) {
        int64_t i = 0;
        for (; i + LANES <= visible; i += LANES) {
            const vector added = PATH(load)((int)call->mask_kind, mask + i * bytes_of(call->mask_kind));
            put(scores + i, get(scores + i) + added);
        }
        for (; i < visible; i++) scores[i] += number_at(call->mask_kind, mask, i);
    }
    vector most = spread(-INFINITY), sums = zero();
    float lanes[LANES], largest = -INFINITY;
    for (int64_t i = 0; i < padded; i += LANES) most = larger(most, get(scores + i));
    put(lanes, most);
    for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    part->largest = largest;
    if (largest == -INFINITY) largest = 0.0f; /* all are hidden, or none is a number */
    for (int64_t i = 0; i < padded; i++) {
        const float below = scores[i] - largest;
        scores[i] = below < -87.0f ? 0.0f : PATH(exponential)(below);
    }
    for (int64_t i = 0; i < padded; i += LANES) sums = sums + get(scores + i);
    part->sum = total(sums);
}

INLINE void PATH(attend_kind)(const int kind, const struct attention *call, const struct attention_piece *piece,
                              struct attention_part *parts) {
    enum { NUMBERS = MOST_DIM + LANES };
    const int64_t num_queries = piece->num_queries, num_keys = piece->num_keys, width = call->value_dim;
    const int64_t apart = (call->key_dim + LANES - 1) / LANES * LANES;
    float numbers[MOST_QUERIES * NUMBERS], scores[MOST_QUERIES * PATH(PADDED)];
    for (int64_t q = 0; q < num_queries; q++) {
        int64_t at = 0;
        for (; at + LANES <= call->key_dim; at += LANES)
            put(numbers + q * apart + at, PATH(load)(kind, piece->queries[q] + at * bytes_of(kind)));
        if (at < call->key_dim)
            put(numbers + q * apart + at,
                PATH(load_some)(kind, piece->queries[q] + at * bytes_of(kind), call->key_dim - at));
    }
#define QUERIES(left) ((left) >= PATH(TOGETHER) ? PATH(TOGETHER) : (left) >= 2 ? 2 : 1)
    for (int64_t q = 0; q < num_queries;) {
        const int queries = QUERIES(num_queries - q);
        const float *of = numbers + q * apart;
        float *to = scores + q * PATH(PADDED);
#define SCORES(Q)                                                      \
    for (int64_t key = 0; key < num_keys; key += LANES / (Q))          \
    PATH(scores_of)(kind, Q, call, piece->keys, key, num_keys, of, apart, to)
        if (queries == PATH(TOGETHER)) SCORES(PATH(TOGETHER));
        else if (queries == 2) SCORES(2);
        else SCORES(1);
#undef SCORES
        q += queries;
    }
    for (int64_t q = 0; q < num_queries; q++) PATH(weigh)(call, piece, q, scores + q * PATH(PADDED), parts + q);
    for (int64_t at = 0; at < width;) {
        const int vectors = width - at >= 4 * LANES ? 4 : 1;
        for (int64_t q = 0; q < num_queries;) {
            const int queries = QUERIES(num_queries - q);
            const float *of = scores + q * PATH(PADDED);
#define VALUES(Q)                                                                     \
    if (vectors == 4) PATH(values_of)(kind, Q, 4, call, piece, at, of, parts + q);    \
    else PATH(values_of)(kind, Q, 1, call, piece, at, of, parts + q)
            if (queries == PATH(TOGETHER)) { VALUES(PATH(TOGETHER)); }
            else if (queries == 2) { VALUES(2); }
            else { VALUES(1); }
#undef VALUES
            q += queries;
        }
        at += vectors * LANES;
    }
#undef QUERIES
}

TARGET static void PATH(attend)(const struct attention *call, const struct attention_piece *piece,
                                struct attention_part *parts) {
    switch (call->kind) {
    case FLOAT32: PATH(attend_kind)(FLOAT32, call, piece, parts); break;
    case BFLOAT16: PATH(attend_kind)(BFLOAT16, call, piece, parts); break;
    default: PATH(attend_kind)(FLOAT16, call, piece, parts);
    }
}

#undef INLINE
