/* What fast.py and the native code tell each other. The structs have the same fields, in the same order, as their
 * ctypes twins there; experts_abi() changes whenever they do.
 *
 * Shapes: T tokens, N pairs (token, expert), D model dim, F expert hidden dim, M tokens of one expert, K top-k, E experts.
 */
#ifndef HOTSPLIT_EXPERTS_H
#define HOTSPLIT_EXPERTS_H

#include <stddef.h>
#include <stdint.h>

enum { MOST_TOKENS = 16 };
enum kind { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8 = 3 };
enum activation { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4 };

/* One projection as it is stored. */
struct matrix {
    int64_t outputs, inputs;
    int64_t kind;          /* of the weights */
    int64_t is_transposed; /* [inputs, outputs] instead of [outputs, inputs] */
    int64_t bias_kind;
    int64_t scale_kind;
    int64_t scale_outputs, scale_inputs; /* that share a factor; 0 without factors */
};

/* The experts of one layer. */
struct form {
    struct matrix up, down;
    int64_t token_kind; /* inner values are rounded to it */
    int64_t path;       /* index of a path, see paths.c */
    int64_t activation;
    int64_t has_gate;
    int64_t is_interleaved; /* gate and other outputs alternate */
    int64_t has_limit;
    double limit, slope, shift;
};

/* One expert of a call: its addresses come first, in the order of layer.addresses. */
enum { NUM_ADDRESSES = 6 };
struct expert {
    const void *up, *up_scale, *up_bias, *down, *down_scale, *down_bias;
    int64_t first, count; /* its pairs */
};

typedef void (*parallel_function)(void (*work)(void *), void *data, unsigned num_threads, unsigned flags);

/* One layer's call: a run is an expert with its pairs. */
struct layer {
    const struct form *form;
    const int64_t *ids, *rows;   /* [T, K], of experts and where they lie */
    const void *hidden;          /* [T, D], of the tokens' kind */
    const void *weights;         /* [T, K] */
    int64_t weight_kind;
    int64_t num_tokens, top_k, num_experts;
    int64_t first_cold;          /* rows below it are hot */
    const void *(*addresses)[NUM_ADDRESSES]; /* of hot rows; 0 where nobody has asked yet */
    char *scratch;               /* as long as experts_scratch() says */
    void *out;                   /* [T, D], of the tokens' kind */
    int64_t num_threads;
    parallel_function parallel;
    /* what experts_begin() finds */
    int64_t num_pairs, num_hot, num_cold, num_unknown;
};

struct attention;
struct attention_piece;
struct attention_part;

/* One path: the same functions for one set of instructions. */
struct path {
    const char *name;
    int64_t takes_bfloat16; /* inputs of bfloat16 weights stay bfloat16 where the tokens are */
    /* out[m * stride + i] = weight row (first + i) times inputs[m], for count rows */
    void (*product)(const struct matrix *matrix, const void *weight, const void *scale, int64_t first, int64_t count,
                    const void *const *inputs, int64_t num_inputs, float *out, int64_t stride);
    /* inner values of count gate and other products */
    void (*activate)(const struct form *form, const float *gate, const float *other, float *inner, int64_t count);
    void (*to_float16)(const float *from, uint16_t *to, int64_t count);
    void (*from_float16)(const uint16_t *from, float *to, int64_t count);
    /* out += factor * values */
    void (*add)(float *out, float factor, const float *values, int64_t count);
    /* attention of some queries over one block of keys, see attention.h */
    void (*attend)(const struct attention *call, const struct attention_piece *piece, struct attention_part *parts);
};

/* paths.c: worst first, NULL behind the last that this processor can take; and the one that multiplies plain numbers. */
extern const struct path *path_at(int64_t index);
extern const struct path *path_without_halves(const struct path *path);

#endif
