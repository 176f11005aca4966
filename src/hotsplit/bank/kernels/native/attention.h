/* What fast_attention.py and the native code tell each other. The struct has the same fields, in the same order, as its
 * ctypes twin there.
 *
 * Shapes: B batch, H heads, G heads of keys and values, T query tokens, S keys, K and V numbers of a key and of a value.
 */
#ifndef HOTSPLIT_ATTENTION_H
#define HOTSPLIT_ATTENTION_H

#include <stdint.h>

/* Keys of one unit of work: where sums are cut does not depend on how many keys there are. */
enum { BLOCK = 256, MOST_QUERIES = 8, MOST_DIM = 1024 };
/* Of a mask; from FLOAT32 on it is added. */
enum mask_kind { NO_MASK = -2, BOOLEAN_MASK = -1 };

/* One call. Numbers of one query, key or value lie side by side, and so do a query's in the mask. */
struct attention {
    int64_t batch, heads, key_heads, tokens, keys, key_dim, value_dim;
    int64_t kind; /* of queries, keys, values and outputs */
    int64_t path;
    int64_t mask_kind;
    int64_t is_causal; /* token t sees the keys 0 to t */
    int64_t query_apart[3], key_apart[3], value_apart[3], mask_apart[3]; /* batch, head, token; in elements */
    double scale;
};

/* Some queries that share keys, and one block of those. */
struct attention_piece {
    const char *queries[MOST_QUERIES];
    const char *masks[MOST_QUERIES]; /* of the block's first key */
    int64_t visible[MOST_QUERIES];   /* keys of the block that causality leaves */
    int64_t num_queries;
    const char *keys, *values; /* the block's first */
    int64_t num_keys;
};

/* What a block gives one query: the largest score, and relative to its exponential the sum of all and of the values. */
struct attention_part {
    float largest, sum;
    float *values; /* with room for whole vectors */
};

#endif
