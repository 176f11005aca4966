/* RMSNorms over the last dimension: values times 1 / sqrt(mean of squares + epsilon), times a weight.
 *
 * Written for the compiler to make vectors of, once per set of instructions. A row's squares are added in sixteen lanes by
 * index and the lanes in a fixed tree, a product is never joined with a sum, and every other step is one number's own:
 * the bits are the same on every path, for any number of threads, and beside any other rows.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "experts.h"
#include "scalars.h"

/* Where a value is rounded to the tokens' kind, and what it is multiplied with. As in fast_norm.py. */
enum variant {
    ROUNDED_FIRST = 0, /* round(weight * round(value)) */
    ROUNDED_LAST = 1,  /* round(weight * value) */
    CENTERED = 2,      /* round((1 + weight) * value) */
};

struct norm {
    int64_t width;
    int64_t token_kind, weight_kind;
    int64_t variant;
    int64_t path;
    double epsilon;
};

enum { SUMS = 16, CHUNK = 512, UNIT = 4096 }; /* numbers: of a sum's lanes, widened at once, and a thread's at least */

struct norm_call {
    const struct norm *norm;
    const char *weight, *tokens;
    char *out;
    int64_t num_rows, rows_at_once;
    int64_t next;
};

#define INLINE static inline __attribute__((always_inline))

INLINE void widen(const struct path *path, int64_t kind, const char *from, float *restrict to, int64_t count) {
    switch (kind) {
    case FLOAT32: memcpy(to, from, (size_t)count * 4); break;
    case FLOAT16: path->from_float16((const uint16_t *)from, to, count); break;
    default:
        for (int64_t i = 0; i < count; i++) {
            uint16_t half;
            memcpy(&half, from + 2 * i, 2);
            to[i] = float_of_bfloat16(half);
        }
    }
}

INLINE void narrow(const struct path *path, int64_t kind, const float *restrict from, char *to, int64_t count) {
    switch (kind) {
    case FLOAT32: memcpy(to, from, (size_t)count * 4); break;
    case FLOAT16: path->to_float16(from, (uint16_t *)to, count); break;
    default:
        for (int64_t i = 0; i < count; i++) {
            const uint16_t half = bfloat16_of_float(from[i]);
            memcpy(to + 2 * i, &half, 2);
        }
    }
}

INLINE void round_to(const struct path *path, int64_t kind, float *values, int64_t count) {
    char rounded[CHUNK * 4];
    if (kind == FLOAT32) return;
    narrow(path, kind, values, rounded, count);
    widen(path, kind, rounded, values, count);
}

INLINE float factor_of(const struct norm *norm, const struct path *path, const char *row) {
    const int64_t size = bytes_of(norm->token_kind);
    float sums[SUMS] = {0}, values[CHUNK];
    for (int64_t at = 0; at < norm->width; at += CHUNK) {
        const int64_t count = norm->width - at < CHUNK ? norm->width - at : CHUNK;
        const int64_t whole = (count + SUMS - 1) / SUMS * SUMS;
        widen(path, norm->token_kind, row + at * size, values, count);
        for (int64_t i = count; i < whole; i++) values[i] = 0.0f;
        for (int64_t i = 0; i < whole; i += SUMS)
            for (int lane = 0; lane < SUMS; lane++) sums[lane] += values[i + lane] * values[i + lane];
    }
    for (int half = SUMS / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return 1.0f / sqrtf(sums[0] / (float)norm->width + (float)norm->epsilon);
}

INLINE void norm_row(const struct norm *norm, const struct path *path, const char *weight, const char *row, char *out) {
    const int64_t kind = norm->token_kind, size = bytes_of(kind), weight_size = bytes_of(norm->weight_kind);
    const float factor = factor_of(norm, path, row);
    float values[CHUNK], weights[CHUNK];
    for (int64_t at = 0; at < norm->width; at += CHUNK) {
        const int64_t count = norm->width - at < CHUNK ? norm->width - at : CHUNK;
        widen(path, kind, row + at * size, values, count);
        for (int64_t i = 0; i < count; i++) values[i] *= factor;
        if (norm->variant == ROUNDED_FIRST) round_to(path, kind, values, count);
        widen(path, norm->weight_kind, weight + at * weight_size, weights, count);
        if (norm->variant == CENTERED)
            for (int64_t i = 0; i < count; i++) weights[i] += 1.0f;
        for (int64_t i = 0; i < count; i++) values[i] *= weights[i];
        narrow(path, kind, values, out + at * size, count);
    }
}

INLINE void norm_rows(const struct norm_call *call, int64_t first, int64_t count) {
    const int64_t bytes = call->norm->width * bytes_of(call->norm->token_kind);
    const struct path *path = path_at(call->norm->path);
    for (int64_t row = first; row < first + count; row++)
        norm_row(call->norm, path, call->weight, call->tokens + row * bytes, call->out + row * bytes);
}

typedef void (*rows_function)(const struct norm_call *call, int64_t first, int64_t count);

static void rows_portable(const struct norm_call *call, int64_t first, int64_t count) { norm_rows(call, first, count); }

#if defined(__x86_64__)
__attribute__((target("avx2,fma,f16c"))) static void rows_avx2(const struct norm_call *call, int64_t first,
                                                              int64_t count) {
    norm_rows(call, first, count);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))) static void
rows_avx512(const struct norm_call *call, int64_t first, int64_t count) {
    norm_rows(call, first, count);
}

/* By index of a path, see paths.c: each has what those before it have. */
static const rows_function by_path[] = {rows_portable, rows_avx2, rows_avx512, rows_avx512};
#else
static const rows_function by_path[] = {rows_portable};
#endif

static void take_rows(void *data) {
    struct norm_call *call = data;
    for (;;) {
        const int64_t first = call->rows_at_once * __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
        if (first >= call->num_rows) return;
        const int64_t left = call->num_rows - first;
        by_path[call->norm->path](call, first, left < call->rows_at_once ? left : call->rows_at_once);
    }
}

/* ---- what fast_norm.py calls */

/* Rows of tokens one behind the other, [num_rows, width], to out. */
void experts_norm(const struct norm *norm, const void *weight, const void *tokens, int64_t num_rows, void *out,
                  int64_t num_threads, parallel_function parallel) {
    struct norm_call call = {norm, weight, tokens, out, num_rows, 1 + (UNIT - 1) / norm->width, 0};
    const int is_alone = parallel == NULL || num_threads <= 1 || num_rows <= call.rows_at_once;
    if (is_alone) take_rows(&call);
    else parallel(take_rows, &call, (unsigned)num_threads, 0);
}
