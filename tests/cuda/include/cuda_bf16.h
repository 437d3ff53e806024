/*
 * CUDA's __nv_bfloat16 for a C++ compiler.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EMULATED_CUDA_BF16_H
#define EMULATED_CUDA_BF16_H

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
static inline float __bfloat162float(__nv_bfloat16 b) { return __uint_as_float((uint32_t)b.bits << 16); }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (x != x) return {0x7fff};
    return {(uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

#endif
