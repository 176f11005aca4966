/* Attention of a few query tokens over many keys: every key and value is read once, where it lies.
 *
 *   unit      one block of keys of one sequence and one head of keys, for all queries that share them
 *   parts     what the blocks give every query, put together in the order of the blocks by whoever finishes the last
 *
 * Results do not depend on who computes a unit, nor on how many do. Threads as in experts.c.
 *
 * Source: sums relative to a maximum, put together block by block, are those of Milakov and Gimelshein, "Online normalizer
 * calculation for softmax" (arXiv 1805.02867).
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "experts.h"
#include "scalars.h"

struct work {
    const struct attention *call;
    const char *queries, *keys, *values, *masks;
    char *out;              /* [B, T, H, V] */
    int64_t num_queries;    /* that share keys */
    int64_t num_blocks;
    int64_t apart;          /* floats of one part */
    float *parts;           /* [B, G, blocks, queries, apart]: largest, sum, then values from FIRST on */
    int64_t *num_done;      /* blocks, [B, G] */
    int64_t next;
};

enum { FIRST = 16 }; /* values of a part, aligned as its start is */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Address of an element: [B, H, T, ...] by its strides. */
static const char *place(const char *start, const int64_t apart[3], int64_t b, int64_t h, int64_t t, int64_t size) {
    return start + (b * apart[0] + h * apart[1] + t * apart[2]) * size;
}

static float *part_at(const struct work *work, int64_t pair, int64_t block, int64_t query) {
    return work->parts + ((pair * work->num_blocks + block) * work->num_queries + query) * work->apart;
}

static void attend_block(const struct work *work, int64_t pair, int64_t block) {
    const struct attention *call = work->call;
    const int64_t b = pair / call->key_heads, g = pair % call->key_heads, size = bytes_of(call->kind);
    const int64_t group = call->heads / call->key_heads, begin = block * BLOCK;
    const int64_t mask_size = call->mask_kind == BOOLEAN_MASK ? 1 : bytes_of(call->mask_kind);
    struct attention_piece piece;
    struct attention_part parts[MOST_QUERIES];
    piece.keys = place(work->keys, call->key_apart, b, g, begin, size);
    piece.values = place(work->values, call->value_apart, b, g, begin, size);
    piece.num_keys = smaller(BLOCK, call->keys - begin);
    for (int64_t first = 0; first < work->num_queries; first += MOST_QUERIES) {
        piece.num_queries = smaller(MOST_QUERIES, work->num_queries - first);
        for (int64_t q = 0; q < piece.num_queries; q++) {
            const int64_t h = g * group + (first + q) / call->tokens, t = (first + q) % call->tokens;
            const int64_t seen = call->is_causal ? t + 1 - begin : piece.num_keys;
            piece.queries[q] = place(work->queries, call->query_apart, b, h, t, size);
            piece.masks[q] = NULL;
            if (call->mask_kind != NO_MASK)
                piece.masks[q] = place(work->masks, call->mask_apart, b, h, t, mask_size) + begin * mask_size;
            piece.visible[q] = seen < 0 ? 0 : smaller(seen, piece.num_keys);
            parts[q].values = part_at(work, pair, block, first + q) + FIRST;
        }
        path_at(call->path)->attend(call, &piece, parts);
        for (int64_t q = 0; q < piece.num_queries; q++) {
            parts[q].values[-FIRST] = parts[q].largest;
            parts[q].values[1 - FIRST] = parts[q].sum;
        }
    }
}

static void put_rounded(const struct attention *call, const float *values, float total, char *to) {
    for (int64_t i = 0; i < call->value_dim; i++) {
        const float value = values[i] / total;
        uint16_t half;
        switch (call->kind) {
        case FLOAT32: memcpy(to + 4 * i, &value, 4); continue;
        case BFLOAT16: half = bfloat16_of_float(value); break;
        default: half = float16_of_float(value);
        }
        memcpy(to + 2 * i, &half, 2);
    }
}

/* One query's outputs, from all its parts. A query that sees nothing gives zeros, as torch's softmax has it. */
static void put_together(const struct work *work, int64_t pair, int64_t query) {
    const struct attention *call = work->call;
    const int64_t b = pair / call->key_heads, group = call->heads / call->key_heads;
    const int64_t h = pair % call->key_heads * group + query / call->tokens, t = query % call->tokens;
    float largest = -INFINITY, total = 0.0f, sums[MOST_DIM] = {0};
    for (int64_t block = 0; block < work->num_blocks; block++) {
        const float *part = part_at(work, pair, block, query);
        largest = part[0] > largest ? part[0] : largest;
    }
    for (int64_t block = 0; block < work->num_blocks; block++) {
        const float *part = part_at(work, pair, block, query);
        const float factor = part[0] == largest ? 1.0f : expf(part[0] - largest);
        total += factor * part[1];
        path_at(call->path)->add(sums, factor, part + FIRST, call->value_dim);
    }
    if (total == 0.0f) total = 1.0f;
    put_rounded(call, sums, total,
                work->out + ((b * call->tokens + t) * call->heads + h) * call->value_dim * bytes_of(call->kind));
}

static void take_units(void *data) {
    struct work *work = data;
    const int64_t total = work->call->batch * work->call->key_heads * work->num_blocks;
    for (;;) {
        const int64_t unit = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (unit >= total) return;
        const int64_t pair = unit / work->num_blocks;
        attend_block(work, pair, unit % work->num_blocks);
        if (__atomic_add_fetch(work->num_done + pair, 1, __ATOMIC_ACQ_REL) == work->num_blocks)
            for (int64_t query = 0; query < work->num_queries; query++) put_together(work, pair, query);
    }
}

/* ---- what fast_attention.py calls */

/* Outputs [B, T, H, V]; 0, or 1 where there is no memory for what the blocks give, and nothing was done. */
int64_t attention_compute(const struct attention *call, const void *queries, const void *keys, const void *values,
                          const void *masks, void *out, int64_t num_threads, parallel_function parallel) {
    struct work work = {call, queries, keys, values, masks, out, 0, 0, 0, NULL, NULL, 0};
    const int64_t pairs = call->batch * call->key_heads;
    work.num_queries = call->heads / call->key_heads * call->tokens;
    work.num_blocks = (call->keys + BLOCK - 1) / BLOCK;
    work.apart = FIRST + (call->value_dim + FIRST - 1) / FIRST * FIRST;
    work.parts = malloc((size_t)(pairs * work.num_blocks * work.num_queries * work.apart) * sizeof(float));
    work.num_done = calloc((size_t)pairs, sizeof(int64_t));
    const int is_ready = work.parts != NULL && work.num_done != NULL;
    const int is_alone = parallel == NULL || num_threads <= 1 || pairs * work.num_blocks == 1;
    if (is_ready && is_alone) take_units(&work);
    else if (is_ready) parallel(take_units, &work, (unsigned)num_threads, 0);
    free(work.parts);
    free(work.num_done);
    return !is_ready;
}
