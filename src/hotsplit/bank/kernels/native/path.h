/* One path. Included once per set of instructions, after these were defined for it:
 *
 *   PATH(name)       the name with the path's own suffix         TARGET        attribute that allows the instructions
 *   LANES            numbers of one vector                       vector        its type
 *   zero()           of a vector                                 ROWS          weight rows that are multiplied at once
 *   load_KIND(p)     LANES numbers from any address, widened     fused(a,b,c)  a * b + c
 *   spread(x)        one number in every lane                    get(p) put(p, v)  from and to floats
 *   total(v)         sum of the lanes, in an order of its own    narrow_float16(x), widen_float16(x)  one number
 *
 * Every output has one order of adding: lanes by input index, block after block where there are factors, then total().
 * It depends neither on the other rows nor on the other tokens that are computed beside it.
 */

#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE vector PATH(load)(const int kind, const char *from) {
    switch (kind) {
    case FLOAT32: return load_float32(from);
    case BFLOAT16: return load_bfloat16(from);
    case FLOAT16: return load_float16(from);
    default: return load_float8(from);
    }
}

/* The same of fewer than LANES numbers, zeros behind them; nothing past the last is read. */
INLINE vector PATH(load_some)(const int kind, const char *from, int64_t count) {
    char padded[LANES * 4] = {0};
    memcpy(padded, from, (size_t)(count * bytes_of(kind)));
    return PATH(load)(kind, padded);
}

/* rows x tokens dot products over inputs [begin, end), added to sums; the weight's rows lie apart_bytes apart. */
INLINE void PATH(dots)(const int kind, const int rows, const int tokens, const char *weight, int64_t apart_bytes,
                       const float *const *inputs, int64_t begin, int64_t end, vector sums[ROWS][4]) {
    const int64_t size = bytes_of(kind);
    int64_t at = begin;
    for (; at + LANES <= end; at += LANES) {
        vector numbers[4];
        for (int m = 0; m < tokens; m++) numbers[m] = get(inputs[m] + at);
        for (int r = 0; r < rows; r++) {
            const char *from = weight + r * apart_bytes + at * size;
            __builtin_prefetch(from + AHEAD);
            vector weights = PATH(load)(kind, from);
            for (int m = 0; m < tokens; m++) sums[r][m] = fused(weights, numbers[m], sums[r][m]);
        }
    }
    if (at < end) {
        for (int r = 0; r < rows; r++) {
            vector weights = PATH(load_some)(kind, weight + r * apart_bytes + at * size, end - at);
            for (int m = 0; m < tokens; m++) sums[r][m] = fused(weights, get(inputs[m] + at), sums[r][m]);
        }
    }
}

/* rows x tokens outputs of a matrix [outputs, inputs]: `row` and those that lie apart, apart * 2 and so on behind it. */
INLINE void PATH(tile)(const int kind, const int rows, const int tokens, const struct matrix *matrix,
                       const char *weight, const void *scale, int64_t row, int64_t apart, const float *const *inputs,
                       float *out, int64_t stride) {
    const int64_t row_bytes = matrix->inputs * bytes_of(kind), block = matrix->scale_inputs;
    vector sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) sums[r][m] = zero();
    weight += row * row_bytes;
    if (kind != FLOAT8) {
        PATH(dots)(kind, rows, tokens, weight, apart * row_bytes, inputs, 0, matrix->inputs, sums);
    } else {
        const int64_t blocks = (matrix->inputs + block - 1) / block;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t begin = b * block, end = begin + block < matrix->inputs ? begin + block : matrix->inputs;
            vector parts[ROWS][4];
            for (int r = 0; r < rows; r++)
                for (int m = 0; m < tokens; m++) parts[r][m] = zero();
            PATH(dots)(kind, rows, tokens, weight, apart * row_bytes, inputs, begin, end, parts);
            for (int r = 0; r < rows; r++) {
                const int64_t at = (row + r * apart) / matrix->scale_outputs * blocks + b;
                const vector factor = spread(number_at(matrix->scale_kind, scale, at));
                for (int m = 0; m < tokens; m++) sums[r][m] = fused(parts[r][m], factor, sums[r][m]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) out[m * stride + r * apart] = total(sums[r][m]);
}

/* ROWS runs of rows at once, far enough apart that each is a stream of its own to the memory; then what is left. */
INLINE void PATH(rows)(const int kind, const struct matrix *matrix, const char *weight, const void *scale,
                       int64_t first, int64_t count, const float *const *inputs, int64_t num_inputs, float *out,
                       int64_t stride) {
    const int64_t apart = count / ROWS;
    for (int64_t at = 0; at < count; at = at + 1 == apart ? apart * ROWS : at + 1) {
        const int rows = at < apart ? ROWS : 1;
        for (int64_t m = 0; m < num_inputs;) {
            const int tokens = num_inputs - m >= 4 ? 4 : num_inputs - m >= 2 ? 2 : 1;
            float *to = out + m * stride + at;
#define TILE(R, M) PATH(tile)(kind, R, M, matrix, weight, scale, first + at, apart, inputs + m, to, stride)
            if (rows == ROWS && tokens == 4) TILE(ROWS, 4);
            else if (rows == ROWS && tokens == 2) TILE(ROWS, 2);
            else if (rows == ROWS) TILE(ROWS, 1);
            else if (tokens == 4) TILE(1, 4);
            else if (tokens == 2) TILE(1, 2);
            else TILE(1, 1);
#undef TILE
            m += tokens;
        }
    }
}

enum { PATH(DEEP) = 8 };

/* `deep` inputs' worth of a matrix [inputs, outputs], added to out: each output in the order of the inputs. */
INLINE void PATH(columns_of)(const int kind, const int deep, const int tokens, const char *weight, int64_t row_bytes,
                             int64_t count, const float *const *inputs, int64_t at, float *out, int64_t stride) {
    const int64_t size = bytes_of(kind);
    for (int64_t column = 0; column < count; column += LANES) {
        const int64_t left = count - column;
        float *to = out + column;
        vector sums[4];
        for (int m = 0; m < tokens; m++) sums[m] = get(to + m * stride);
        for (int k = 0; k < deep; k++) {
            const char *from = weight + (at + k) * row_bytes + column * size;
            vector weights = left >= LANES ? PATH(load)(kind, from) : PATH(load_some)(kind, from, left);
            for (int m = 0; m < tokens; m++) sums[m] = fused(weights, spread(inputs[m][at + k]), sums[m]);
        }
        for (int m = 0; m < tokens; m++) put(to + m * stride, sums[m]);
    }
}

/* A matrix [inputs, outputs]. NOTE: out has room for whole vectors behind the last output. */
INLINE void PATH(columns)(const int kind, const struct matrix *matrix, const char *weight, int64_t first,
                          int64_t count, const float *const *inputs, int64_t num_inputs, float *out, int64_t stride) {
    const int64_t row_bytes = matrix->outputs * bytes_of(kind);
    weight += first * bytes_of(kind);
    for (int64_t m = 0; m < num_inputs; m++) memset(out + m * stride, 0, (size_t)((count + LANES) * 4));
    for (int64_t at = 0; at < matrix->inputs;) {
        const int deep = matrix->inputs - at >= PATH(DEEP) ? PATH(DEEP) : 1;
        for (int64_t m = 0; m < num_inputs;) {
            const int tokens = num_inputs - m >= 4 ? 4 : num_inputs - m >= 2 ? 2 : 1;
#define COLUMNS(K, M) PATH(columns_of)(kind, K, M, weight, row_bytes, count, inputs + m, at, out + m * stride, stride)
            if (deep == 1 && tokens == 4) COLUMNS(1, 4);
            else if (deep == 1 && tokens == 2) COLUMNS(1, 2);
            else if (deep == 1) COLUMNS(1, 1);
            else if (tokens == 4) COLUMNS(PATH(DEEP), 4);
            else if (tokens == 2) COLUMNS(PATH(DEEP), 2);
            else COLUMNS(PATH(DEEP), 1);
#undef COLUMNS
            m += tokens;
        }
        at += deep;
    }
}

TARGET static void PATH(product)(const struct matrix *matrix, const void *weight, const void *scale, int64_t first,
                                 int64_t count, const void *const *inputs, int64_t num_inputs, float *out,
                                 int64_t stride) {
    const float *const *numbers = (const float *const *)inputs;
#define BY_KIND(K)                                                                                             \
    if (matrix->is_transposed) PATH(columns)(K, matrix, weight, first, count, numbers, num_inputs, out, stride); \
    else PATH(rows)(K, matrix, weight, scale, first, count, numbers, num_inputs, out, stride)
    switch (matrix->kind) {
    case FLOAT32: BY_KIND(FLOAT32); break;
    case BFLOAT16: BY_KIND(BFLOAT16); break;
    case FLOAT16: BY_KIND(FLOAT16); break;
    default: PATH(rows)(FLOAT8, matrix, weight, scale, first, count, numbers, num_inputs, out, stride);
    }
#undef BY_KIND
}

/* e^x. Infinite from 88 on, where 1 + e^x has no other use; NaN stays NaN.
 * Source: the Taylor series to the seventh power on half a binary order on both sides of 0, where its remainder is
 * below 2^-25; the constant whose first bits are exact is as Cody and Waite split it. */
INLINE float PATH(exponential)(float x) {
    const float low = x < -87.0f ? -87.0f : x, clamped = low > 88.0f ? 88.0f : low;
    const float shifted = clamped * 1.44269504088896341f + 12582912.0f, whole = shifted - 12582912.0f;
    const float rest = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float sum = 1.9841270e-4f;
    sum = sum * rest + 1.3888889e-3f;
    sum = sum * rest + 8.3333333e-3f;
    sum = sum * rest + 4.1666667e-2f;
    sum = sum * rest + 1.6666667e-1f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    const float power = float_of_bits((bits_of_float(shifted) + 127u) << 23);
    return x > 88.0f ? INFINITY : sum * power;
}

INLINE float PATH(activated)(const int activation, float x, float slope) {
    switch (activation) {
    case SILU: return x / (1.0f + PATH(exponential)(-slope * x));
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case GELU_TANH: return x / (1.0f + PATH(exponential)(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    case RELU: return x < 0.0f ? 0.0f : x;
    default: return x < 0.0f ? 0.0f : x * x;
    }
}

INLINE void PATH(inner)(const int activation, const struct form *form, const float *restrict gate,
                        const float *restrict other, float *restrict inner, int64_t count) {
    const float limit = form->has_limit ? (float)form->limit : INFINITY;
    const float slope = (float)form->slope, shift = (float)form->shift;
    if (!form->has_gate) {
        for (int64_t i = 0; i < count; i++) inner[i] = PATH(activated)(activation, gate[i], 1.0f);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        const float g = gate[i] > limit ? limit : gate[i], above = other[i] > limit ? limit : other[i];
        const float o = above < -limit ? -limit : above;
        inner[i] = PATH(activated)(activation, g, slope) * (o + shift);
    }
}

TARGET static void PATH(activate)(const struct form *form, const float *gate, const float *other, float *inner,
                                  int64_t count) {
    switch (form->activation) {
    case SILU: PATH(inner)(SILU, form, gate, other, inner, count); break;
    case GELU: PATH(inner)(GELU, form, gate, other, inner, count); break;
    case GELU_TANH: PATH(inner)(GELU_TANH, form, gate, other, inner, count); break;
    case RELU: PATH(inner)(RELU, form, gate, other, inner, count); break;
    default: PATH(inner)(RELU2, form, gate, other, inner, count);
    }
}

TARGET static void PATH(add)(float *out, float factor, const float *values, int64_t count) {
    const vector factors = spread(factor);
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) put(out + at, fused(factors, get(values + at), get(out + at)));
    if (at < count) {
        float sums[LANES] = {0};
        memcpy(sums, out + at, (size_t)(count - at) * 4);
        put(sums, fused(factors, PATH(load_some)(FLOAT32, (const char *)(values + at), count - at), get(sums)));
        memcpy(out + at, sums, (size_t)(count - at) * 4);
    }
}

TARGET static void PATH(to_float16)(const float *from, uint16_t *to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = narrow_float16(from[i]);
}

TARGET static void PATH(from_float16)(const uint16_t *from, float *to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = widen_float16(from[i]);
}

#undef INLINE
