/* Single numbers of every kind, in plain C: right on any machine, and fast enough for what is not a weight.
 *
 * Source: the formats are those of IEEE 754 (binary16, binary32), of bfloat16 as the upper half of a binary32, and of
 * "FP8 Formats for Deep Learning" (arXiv 2209.05433) for E4M3 without infinities.
 */
#ifndef HOTSPLIT_SCALARS_H
#define HOTSPLIT_SCALARS_H

#include <stdint.h>
#include <string.h>

#include "experts.h"

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of_bfloat16(uint16_t half) { return float_of_bits((uint32_t)half << 16); }

/* To nearest, ties to even; NaN stays NaN. */
static inline uint16_t bfloat16_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value != value ? (bits >> 16) | 0x40u : rounded);
}

/* Exponent and fraction moved into place, and 2^112 puts the exponent right, of subnormal numbers too. */
static inline float float_of_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = (uint32_t)(half & 0x7fffu) << 13;
    float value = float_of_bits(rest) * 0x1p112f;
    uint32_t bits = (half & 0x7c00u) == 0x7c00u ? rest | 0x7f800000u : bits_of_float(value);
    return float_of_bits(sign | bits);
}

/* To nearest, ties to even. A subnormal result is rounded by adding a number whose last place is its own. */
static inline uint16_t float16_of_float(float value) {
    uint32_t bits = bits_of_float(value), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (size >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (size < 0x38800000u) return (uint16_t)(sign | (bits_of_float(float_of_bits(size) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13));
}

static inline float float_of_float8(uint8_t byte) {
    uint16_t half = (uint16_t)((byte & 0x80u) << 8 | (uint32_t)(byte & 0x7fu) << 7);
    return (byte & 0x7fu) == 0x7fu ? float_of_bits(0x7fc00000u) : float_of_float16(half) * 256.0f;
}

static inline int64_t bytes_of(int64_t kind) { return kind == FLOAT32 ? 4 : kind == FLOAT8 ? 1 : 2; }

/* Element `at`, at any address. */
static inline float number_at(int64_t kind, const void *values, int64_t at) {
    const char *place = (const char *)values + at * bytes_of(kind);
    uint16_t half;
    float value;
    switch (kind) {
    case FLOAT32: memcpy(&value, place, sizeof value); return value;
    case BFLOAT16: memcpy(&half, place, sizeof half); return float_of_bfloat16(half);
    case FLOAT16: memcpy(&half, place, sizeof half); return float_of_float16(half);
    default: return float_of_float8((uint8_t)*place);
    }
}

#endif
