/*
 * The vector types that every kernel is written over, and nothing else:
 *
 *   vf   32 floats,  vd   8 doubles,  vs   32 unsigned 16-bit sums
 *
 * The widths are the same for every instruction set, so that a kernel adds in the same order everywhere and its result has the
 * same bits on all of them; an instruction set with narrower registers uses several for one vf.  Rules that keep it so:
 *   - multiply and add are separate operations, never fused (the files are compiled with -ffp-contract=off);
 *   - a sum over the lanes of a vf is the tree i+16, i+8, i+4, i+2, i+1 and of a vd the tree i+4, i+2, i+1;
 *   - vf_max(a, b) is a > b ? a : b and vf_min(a, b) is a < b ? a : b, lane by lane (b if either is NaN);
 *   - a tail (n < 32 elements) is loaded as if followed by zeros, and memory past it is never touched;
 *   - exp, erfc and pow are SLEEF's `cinz` functions, which agree on all instruction sets, or libm in a build without SLEEF.
 *
 * Each vec_<isa>.h defines:
 *   vf   vf_set1 vf_load vf_load_n vf_load_f16 vf_load_f16_n vf_load_bf16 vf_load_bf16_n vf_store vf_store_n
 *        vf_store_f16 vf_store_bf16 vf_from_i32 vf_add vf_sub vf_mul vf_max vf_min vf_abs vf_sqrt vf_le vf_exp
 *   vp   (a vf on its way down the tree of sums)  vf_fold vp_sum8
 *   vd   vd_set1 vd_load vd_load_f32 vd_store_f32 vd_add vd_sub vd_mul vd_div vd_max vd_min vd_sum vd_exp vd_erfc vd_pow
 *   vs   vs_set vs_table_of vs_unpack vs_add_entries vs_store vs_above
 * To add an instruction set, copy vec_scalar.h, which is the definition of what each operation returns.
 *
 * Everything here and in the kernel headers is static: these files are compiled several times with different flags, and a shared
 * symbol would let one instruction set's code be linked into another's.
 */
#ifndef EKV_VEC_H
#define EKV_VEC_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if EKV_WITH_SLEEF
#include <sleef.h>
#endif

#include "entmaxkv/entmaxkv.h"

#define VEC_LANES 32
#define VEC_DOUBLES 8

/* A function of a kernel that must be inlined, so that its constant arguments (dtype, block size) are folded; a loop whose arrays of
 * vectors become registers. */
#if defined(__GNUC__)
#define EKV_INLINE static inline __attribute__((always_inline, unused))
#if defined(__clang__)
#define EKV_UNROLL _Pragma("unroll")
#else
#define EKV_UNROLL _Pragma("GCC unroll 8")
#endif
#else
#define EKV_INLINE static inline
#define EKV_UNROLL
#endif

#if defined(EKV_ISA_SCALAR)
#include "cpu/vec_scalar.h"
#elif defined(EKV_ISA_AVX2)
#include "cpu/vec_avx2.h"
#elif defined(EKV_ISA_AVX512)
#include "cpu/vec_avx512.h"
#elif defined(EKV_ISA_NEON)
#include "cpu/vec_neon.h"
#else
#error "kernels.c is compiled once per instruction set, with EKV_ISA_<NAME> defined"
#endif

/* What the instruction sets share, written over the operations above. */

/* Asks for the lines of [p, p + bytes). */
EKV_INLINE void prefetch(const void *p, int bytes) {
#if defined(__GNUC__)
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)p + at);
#else
    (void)p, (void)bytes;
#endif
}

/* 32 elements of a stored row as floats; dtype is a constant wherever this is called. */
EKV_INLINE vf vf_load_any(ekv_dtype dtype, const void *row, ptrdiff_t at) {
    if (dtype == EKV_F16) return vf_load_f16((const uint16_t *)row + at);
    if (dtype == EKV_BF16) return vf_load_bf16((const uint16_t *)row + at);
    return vf_load((const float *)row + at);
}

EKV_INLINE vf vf_load_any_n(ekv_dtype dtype, const void *row, ptrdiff_t at, int n) {
    if (dtype == EKV_F16) return vf_load_f16_n((const uint16_t *)row + at, n);
    if (dtype == EKV_BF16) return vf_load_bf16_n((const uint16_t *)row + at, n);
    return vf_load_n((const float *)row + at, n);
}

/* Stores n elements (n <= 32) in a stored type, rounded to nearest even. */
EKV_INLINE void vf_store_any_n(ekv_dtype dtype, void *row, ptrdiff_t at, vf x, int n) {
    if (dtype == EKV_F32) {
        vf_store_n((float *)row + at, x, n);
        return;
    }
    uint16_t half[VEC_LANES];
    if (dtype == EKV_F16)
        vf_store_f16(half, x);
    else
        vf_store_bf16(half, x);
    memcpy((uint16_t *)row + at, half, (size_t)n * sizeof(uint16_t));
}

/* The sum of the lanes, by the tree. */
EKV_INLINE float vf_sum(vf x) {
    vp fold[VEC_DOUBLES];
    float sums[8];
    for (int i = 0; i < 8; i++) fold[i] = vf_fold(x);
    vp_sum8(fold, sums);
    return sums[0];
}

/* The largest lane by the same tree; lanes are taken in the order of vf_max. */
EKV_INLINE float vf_max_lane(vf x) {
    float lane[VEC_LANES];
    vf_store(lane, x);
    for (int half = VEC_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

#if defined(__GNUC__)
EKV_INLINE int lowest_bit(uint32_t mask) { return __builtin_ctz(mask); }
#else
EKV_INLINE int lowest_bit(uint32_t mask) {
    int i = 0;
    while (!(mask >> i & 1u)) i++;
    return i;
}
#endif

/* Copies the floats and numbers that are marked to where they may overlap from below; returns how many. */
#if !defined(VEC_HAS_PACK)
EKV_INLINE int vec_pack(float *to_z, int32_t *to_token, const float *z, const int32_t *token, uint32_t mask) {
    int count = 0;
    for (; mask; mask &= mask - 1) {
        const int i = lowest_bit(mask);
        to_z[count] = z[i];
        to_token[count++] = token[i];
    }
    return count;
}
#endif

/* n floats (n <= 8) as doubles, the rest `fill`. */
EKV_INLINE vd vd_load_f32_n(const float *p, int n, float fill) {
    if (n >= VEC_DOUBLES) return vd_load_f32(p);
    float lane[VEC_DOUBLES];
    for (int i = 0; i < VEC_DOUBLES; i++) lane[i] = i < n ? p[i] : fill;
    return vd_load_f32(lane);
}

#endif
