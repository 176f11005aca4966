/* The same code for every set of instructions, and which of them this processor has.
 *
 * Nothing here is chosen when it is compiled: every function says itself which instructions it may use, and
 * experts_path() asks the processor. NOTE: compiled with -ffp-contract=off: where a product and a sum become one rounding
 * is said by fused() alone, so that it is the same in every copy that the compiler makes of a function.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "experts.h"
#include "scalars.h"

#define JOINED(a, b) a##_##b
#define JOIN(a, b) JOINED(a, b)
#define PATH(name) JOIN(name, SUFFIX)

enum { AHEAD = 512 }; /* bytes of a weight that are asked of the memory before their turn */

/* ---- any machine: eight lanes, as vectors that GCC and clang make what they can of */

typedef float eight __attribute__((vector_size(32)));

static inline eight plain_zero(void) { return (eight){0}; }
static inline eight plain_spread(float x) { return (eight){x, x, x, x, x, x, x, x}; }
static inline eight plain_get(const float *p) {
    eight v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void plain_put(float *p, eight v) { memcpy(p, &v, sizeof v); }
static inline eight plain_fused(eight a, eight b, eight c) {
    return a * b + c;
}
static inline float plain_total(eight v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
static inline eight plain_bfloat16(const char *p) {
    uint16_t halves[8];
    uint32_t bits[8];
    eight v;
    memcpy(halves, p, sizeof halves);
    for (int i = 0; i < 8; i++) bits[i] = (uint32_t)halves[i] << 16;
    memcpy(&v, bits, sizeof v);
    return v;
}
#define PLAIN_LOAD(name, kind)                                       \
    static inline eight plain_##name(const char *p) {                \
        eight v;                                                     \
        for (int i = 0; i < 8; i++) v[i] = number_at(kind, p, i); \
        return v;                                                    \
    }
static inline eight plain_totals(const eight *v) {
    eight sums;
    for (int i = 0; i < 8; i++) sums[i] = plain_total(v[i]);
    return sums;
}
static inline eight plain_larger(eight a, eight b) {
    for (int i = 0; i < 8; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
PLAIN_LOAD(float32, FLOAT32)
PLAIN_LOAD(float16, FLOAT16)
PLAIN_LOAD(float8, FLOAT8)

#define SUFFIX portable
#define TARGET
#define LANES 8
#define ROWS 2
#define vector eight
#define zero plain_zero
#define spread plain_spread
#define get plain_get
#define put plain_put
#define fused plain_fused
#define total plain_total
#define totals plain_totals
#define larger plain_larger
#define load_float32 plain_float32
#define load_bfloat16 plain_bfloat16
#define load_float16 plain_float16
#define load_float8 plain_float8
#define narrow_float16 float16_of_float
#define widen_float16 float_of_float16
#include "path.h"
#include "attention_path.h"
#include "unset.h"

static const struct path portable = {
    "portable", 0, product_portable, activate_portable, to_float16_portable, from_float16_portable, add_portable, attend_portable,
};

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

/* ---- AVX2, FMA and F16C: eight lanes */

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define FAST static inline __attribute__((always_inline)) TARGET

FAST __m256 avx2_float32(const char *p) { return _mm256_loadu_ps((const float *)p); }
FAST __m256 avx2_bfloat16(const char *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
FAST __m256 avx2_float16(const char *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
/* Exponent and fraction of E4M3 in a binary16 are its value / 256; NaN is put in by hand. */
FAST __m256 avx2_float8(const char *p) {
    const __m128i bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    const __m128i size = _mm_and_si128(bytes, _mm_set1_epi16(0x7f));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(bytes, _mm_set1_epi16(0x80)), 8);
    const __m128i is_nan = _mm_and_si128(_mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00));
    const __m128i half = _mm_or_si128(_mm_or_si128(sign, _mm_slli_epi16(size, 7)), is_nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}
FAST float avx2_total(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
/* Halves of the lanes are added until one is left, those of two vectors in one step. */
FAST __m256 avx2_totals(const __m256 *v) {
    __m256 two[4], four[2];
    for (int i = 0; i < 4; i++)
        two[i] = _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20), _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    for (int i = 0; i < 4; i += 2)
        four[i / 2] = _mm256_add_ps(_mm256_shuffle_ps(two[i], two[i + 1], 0x44),
                                    _mm256_shuffle_ps(two[i], two[i + 1], 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(four[0], four[1], 0x88), _mm256_shuffle_ps(four[0], four[1], 0xdd));
}
FAST uint16_t avx2_narrow(float x) { return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
FAST float avx2_widen(uint16_t half) { return _cvtsh_ss(half); }

#define SUFFIX avx2
#define LANES 8
#define ROWS 4
#define vector __m256
#define zero _mm256_setzero_ps
#define spread _mm256_set1_ps
#define get _mm256_loadu_ps
#define put _mm256_storeu_ps
#define fused _mm256_fmadd_ps
#define total avx2_total
#define totals avx2_totals
#define larger _mm256_max_ps
#define load_float32 avx2_float32
#define load_bfloat16 avx2_bfloat16
#define load_float16 avx2_float16
#define load_float8 avx2_float8
#define narrow_float16 avx2_narrow
#define widen_float16 avx2_widen
#include "path.h"
#include "attention_path.h"
#include "unset.h"
#undef FAST

static const struct path avx2 = {
    "avx2", 0, product_avx2, activate_avx2, to_float16_avx2, from_float16_avx2, add_avx2, attend_avx2,
};

/* ---- AVX-512: sixteen lanes */

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define FAST static inline __attribute__((always_inline)) TARGET

FAST __m512 avx512_float32(const char *p) { return _mm512_loadu_ps(p); }
FAST __m512 avx512_bfloat16(const char *p) {
    const __m256i halves = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
FAST __m512 avx512_float16(const char *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
FAST __m512 avx512_float8(const char *p) {
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    const __m256i size = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0x80)), 8);
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x7f));
    const __m256i half = _mm256_mask_mov_epi16(_mm256_slli_epi16(size, 7), is_nan, _mm256_set1_epi16(0x7e00));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, half)), _mm512_set1_ps(256.0f));
}
FAST float avx512_total(__m512 v) { return _mm512_reduce_add_ps(v); }
FAST __m512 avx512_totals(const __m512 *v) {
    __m512 two[8], four[4], eight[2];
    for (int i = 0; i < 8; i++) {
        const __m512 *pair = v + i + (i & 4);
        two[i] = _mm512_add_ps(_mm512_shuffle_f32x4(pair[0], pair[4], 0x44),
                               _mm512_shuffle_f32x4(pair[0], pair[4], 0xee));
    }
    for (int i = 0; i < 4; i++)
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(two[i], two[i + 4], 0x88),
                                _mm512_shuffle_f32x4(two[i], two[i + 4], 0xdd));
    for (int i = 0; i < 4; i += 2)
        eight[i / 2] = _mm512_add_ps(_mm512_shuffle_ps(four[i], four[i + 1], 0x44),
                                     _mm512_shuffle_ps(four[i], four[i + 1], 0xee));
    return _mm512_add_ps(_mm512_shuffle_ps(eight[0], eight[1], 0x88), _mm512_shuffle_ps(eight[0], eight[1], 0xdd));
}
FAST uint16_t avx512_narrow(float x) { return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
FAST float avx512_widen(uint16_t half) { return _cvtsh_ss(half); }

#define SUFFIX avx512
#define LANES 16
#define ROWS 4
#define vector __m512
#define zero _mm512_setzero_ps
#define spread _mm512_set1_ps
#define get _mm512_loadu_ps
#define put _mm512_storeu_ps
#define fused _mm512_fmadd_ps
#define total avx512_total
#define totals avx512_totals
#define larger _mm512_max_ps
#define load_float32 avx512_float32
#define load_bfloat16 avx512_bfloat16
#define load_float16 avx512_float16
#define load_float8 avx512_float8
#define narrow_float16 avx512_narrow
#define widen_float16 avx512_widen
#include "path.h"
#include "attention_path.h"
#include "unset.h"
#undef FAST

static const struct path avx512 = {
    "avx512", 0, product_avx512, activate_avx512, to_float16_avx512, from_float16_avx512, add_avx512, attend_avx512,
};

/* ---- AVX512-BF16: pairs of bfloat16 products, where weights and tokens are bfloat16; all else as AVX-512 */

#if defined(__clang__) || __GNUC__ >= 11
#define HAS_AVX512_BF16 1
#define TARGET __attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define FAST static inline __attribute__((always_inline)) TARGET

FAST __m512bh halves_at(const void *p) { return (__m512bh)_mm512_loadu_si512(p); }

FAST void tile_halves(const int rows, const int tokens, const struct matrix *matrix, const char *weight,
                      int64_t apart, const uint16_t *const *inputs, float *out, int64_t stride) {
    const int64_t width = matrix->inputs, apart_bytes = 2 * width * apart;
    __m512 sums[4][4];
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) sums[r][m] = _mm512_setzero_ps();
    int64_t at = 0;
    for (; at + 32 <= width; at += 32) {
        __m512bh numbers[4];
        for (int m = 0; m < tokens; m++) numbers[m] = halves_at(inputs[m] + at);
        for (int r = 0; r < rows; r++) {
            const char *from = weight + r * apart_bytes + at * 2;
            __builtin_prefetch(from + AHEAD);
            const __m512bh weights = halves_at(from);
            for (int m = 0; m < tokens; m++) sums[r][m] = _mm512_dpbf16_ps(sums[r][m], weights, numbers[m]);
        }
    }
    if (at < width) {
        const __mmask32 left = (__mmask32)((1u << (width - at)) - 1u);
        for (int r = 0; r < rows; r++) {
            const __m512bh weights = (__m512bh)_mm512_maskz_loadu_epi16(left, weight + r * apart_bytes + at * 2);
            for (int m = 0; m < tokens; m++)
                sums[r][m] = _mm512_dpbf16_ps(sums[r][m], weights, halves_at(inputs[m] + at));
        }
    }
    for (int r = 0; r < rows; r++)
        for (int m = 0; m < tokens; m++) out[m * stride + r * apart] = _mm512_reduce_add_ps(sums[r][m]);
}

TARGET static void product_halves(const struct matrix *matrix, const void *weight, const void *scale, int64_t first,
                                  int64_t count, const void *const *inputs, int64_t num_inputs, float *out,
                                  int64_t stride) {
    const uint16_t *const *halves = (const uint16_t *const *)inputs;
    (void)scale;
    const int64_t apart = count / 4;
    for (int64_t at = 0; at < count; at = at + 1 == apart ? apart * 4 : at + 1) {
        const int rows = at < apart ? 4 : 1;
        const char *from = (const char *)weight + (first + at) * matrix->inputs * 2;
        for (int64_t m = 0; m < num_inputs;) {
            const int tokens = num_inputs - m >= 4 ? 4 : num_inputs - m >= 2 ? 2 : 1;
            float *to = out + m * stride + at;
#define TILE(R, M) tile_halves(R, M, matrix, from, apart, halves + m, to, stride)
            if (rows == 4 && tokens == 4) TILE(4, 4);
            else if (rows == 4 && tokens == 2) TILE(4, 2);
            else if (rows == 4) TILE(4, 1);
            else if (tokens == 4) TILE(1, 4);
            else if (tokens == 2) TILE(1, 2);
            else TILE(1, 1);
#undef TILE
            m += tokens;
        }
    }
}
#undef TARGET
#undef FAST

static const struct path avx512_bf16 = {
    "avx512_bf16", 1, product_halves, activate_avx512, to_float16_avx512, from_float16_avx512, add_avx512, attend_avx512,
};
#endif
#endif

enum { MOST_PATHS = 4 };

#if defined(__x86_64__)
/* Asked of the processor itself: to the builtin of an older clang (15, say) "f16c" is an error, and the whole library would
 * stay unbuilt. Asked once, since a virtual machine takes its time to answer. That the system keeps the registers "avx2"
 * says. Source: llvm/llvm-project pull request 78384. */
static int has_f16c(void) {
    enum { UNKNOWN, NO, YES };
    static int answer; /* any thread that finds out finds the same */
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (known == UNKNOWN) {
        unsigned a, b, c, d;
        known = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) ? YES : NO;
        __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    }
    return known == YES;
}
#endif

/* The paths that this processor can take, worst first. */
static int64_t paths_of_processor(const struct path *found[MOST_PATHS]) {
    int64_t count = 0;
    found[count++] = &portable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
        found[count++] = &avx2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
            found[count++] = &avx512;
#ifdef HAS_AVX512_BF16
            if (__builtin_cpu_supports("avx512bf16")) found[count++] = &avx512_bf16;
#endif
        }
    }
#endif
    return count;
}

const struct path *path_at(int64_t index) {
    const struct path *found[MOST_PATHS];
    const int64_t count = paths_of_processor(found);
    return index >= 0 && index < count ? found[index] : NULL;
}

const struct path *path_without_halves(const struct path *path) {
#ifdef HAS_AVX512_BF16
    if (path == &avx512_bf16) return &avx512;
#endif
    return path;
}
