/*
 * CUDA's __half for a C++ compiler: conversions by plain arithmetic.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EMULATED_CUDA_FP16_H
#define EMULATED_CUDA_FP16_H

#include "cuda_runtime.h"

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};

static inline float __half2float(__half h) {
    const int exponent = h.bits >> 10 & 31, fraction = h.bits & 1023;
    const float sign = h.bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexpf((float)(fraction + 1024), exponent - 25) : ldexpf((float)fraction, -24));
}
static inline __half __float2half_rn(float x) {
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    int exponent;
    if (x != x) return {(uint16_t)(sign | 0x7fff)};
    if (fabsf(x) >= 65520.0f) return {(uint16_t)(sign | 0x7c00)};
    frexpf(x, &exponent);
    const int unit = exponent - 11 < -24 || x == 0.0f ? -24 : exponent - 11; /* of the last place */
    const int count = (int)rintf(ldexpf(fabsf(x), -unit)); /* 2^11 carries into the exponent */
    return {(uint16_t)(sign | (((unit + 24) << 10) + count))};
}
static inline __half __float2half_ru(float x) {
    const __half h = __float2half_rn(x);
    if (!(__half2float(h) < x)) return h;
    return {(uint16_t)(h.bits == 0x8000 ? 1 : h.bits & 0x8000 ? h.bits - 1 : h.bits + 1)};
}
static inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }

#endif
