/*
 * vec.h for Armv8.0 Advanced SIMD: a vf is eight registers, a vd four.  Half-precision conversion is part of the baseline.  Minimum and
 * maximum are written with compare and select, since the instructions treat NaN differently from vec.h.
 */
#ifndef EKV_VEC_NEON_H
#define EKV_VEC_NEON_H

#if !defined(__aarch64__)
#error "this file is for AArch64"
#endif
#include <arm_neon.h>

typedef struct { float32x4_t v[8]; } vf;
typedef struct { float32x4_t v[2]; } vp;
typedef struct { float64x2_t v[4]; } vd;

#define VEC_QUERIES 2 /* query rows that the score kernel keeps in registers at once: 16 sums and 8 parts of a key in 32 registers */
#define VEC_SUMS 2    /* vectors of sums that the accumulate kernel keeps in registers */

#define VF_EACH(expression) \
    vf r;                   \
    for (int i = 0; i < 8; i++) r.v[i] = (expression); \
    return r
#define VD_EACH(expression) \
    vd r;                   \
    for (int i = 0; i < 4; i++) r.v[i] = (expression); \
    return r

EKV_INLINE float32x4_t f32_from_f16x4(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
EKV_INLINE float32x4_t f32_from_bf16x4(uint16x4_t b) { return vreinterpretq_f32_u32(vshll_n_u16(b, 16)); }

/* Four elements of which n are there; n may be <= 0 or >= 4. */
EKV_INLINE uint16x4_t load_u16x4_n(const uint16_t *p, int n) {
    if (n >= 4) return vld1_u16(p);
    uint16_t lane[4] = {0};
    for (int i = 0; i < n; i++) lane[i] = p[i];
    return vld1_u16(lane);
}
EKV_INLINE float32x4_t load_f32x4_n(const float *p, int n) {
    if (n >= 4) return vld1q_f32(p);
    float lane[4] = {0};
    for (int i = 0; i < n; i++) lane[i] = p[i];
    return vld1q_f32(lane);
}

EKV_INLINE vf vf_set1(float x) { VF_EACH(vdupq_n_f32(x)); }
EKV_INLINE vf vf_load(const float *p) { VF_EACH(vld1q_f32(p + 4 * i)); }
EKV_INLINE vf vf_load_n(const float *p, int n) { VF_EACH(load_f32x4_n(p + 4 * i, n - 4 * i)); }
EKV_INLINE vf vf_load_f16(const uint16_t *p) { VF_EACH(f32_from_f16x4(vld1_u16(p + 4 * i))); }
EKV_INLINE vf vf_load_f16_n(const uint16_t *p, int n) { VF_EACH(f32_from_f16x4(load_u16x4_n(p + 4 * i, n - 4 * i))); }
EKV_INLINE vf vf_load_bf16(const uint16_t *p) { VF_EACH(f32_from_bf16x4(vld1_u16(p + 4 * i))); }
EKV_INLINE vf vf_load_bf16_n(const uint16_t *p, int n) { VF_EACH(f32_from_bf16x4(load_u16x4_n(p + 4 * i, n - 4 * i))); }
EKV_INLINE void vf_store(float *p, vf a) { for (int i = 0; i < 8; i++) vst1q_f32(p + 4 * i, a.v[i]); }
EKV_INLINE void vf_store_n(float *p, vf a, int n) {
    float lane[32];
    vf_store(lane, a);
    memcpy(p, lane, (size_t)n * sizeof(float));
}
EKV_INLINE void vf_store_f16(uint16_t *p, vf a) {
    for (int i = 0; i < 8; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
EKV_INLINE void vf_store_bf16(uint16_t *p, vf a) {
    for (int i = 0; i < 8; i++) {
        const uint32x4_t x = vreinterpretq_u32_f32(a.v[i]);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(x, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint32x4_t quiet = vorrq_u32(x, vdupq_n_u32(0x400000));
        vst1_u16(p + 4 * i, vshrn_n_u32(vbslq_u32(vceqq_f32(a.v[i], a.v[i]), rounded, quiet), 16));
    }
}
EKV_INLINE vf vf_from_i32(const int32_t *p, int32_t minus) {
    VF_EACH(vcvtq_f32_s32(vsubq_s32(vld1q_s32(p + 4 * i), vdupq_n_s32(minus))));
}
EKV_INLINE vf vf_add(vf a, vf b) { VF_EACH(vaddq_f32(a.v[i], b.v[i])); }
EKV_INLINE vf vf_sub(vf a, vf b) { VF_EACH(vsubq_f32(a.v[i], b.v[i])); }
EKV_INLINE vf vf_mul(vf a, vf b) { VF_EACH(vmulq_f32(a.v[i], b.v[i])); }
EKV_INLINE vf vf_max(vf a, vf b) { VF_EACH(vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
EKV_INLINE vf vf_min(vf a, vf b) { VF_EACH(vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
EKV_INLINE vf vf_abs(vf a) { VF_EACH(vabsq_f32(a.v[i])); }
EKV_INLINE vf vf_sqrt(vf a) { VF_EACH(vsqrtq_f32(a.v[i])); }

EKV_INLINE uint32_t vf_le(vf a, vf b) {
    static const uint32_t bits[4] = {1, 2, 4, 8};
    const uint32x4_t bit = vld1q_u32(bits);
    uint32_t mask = 0;
    for (int i = 0; i < 8; i++) mask |= vaddvq_u32(vandq_u32(vcleq_f32(a.v[i], b.v[i]), bit)) << (4 * i);
    return mask;
}

EKV_INLINE vp vf_fold(vf a) {
    vp r;
    for (int i = 0; i < 2; i++) r.v[i] = vaddq_f32(vaddq_f32(a.v[i], a.v[i + 4]), vaddq_f32(a.v[i + 2], a.v[i + 6]));
    return r;
}

EKV_INLINE void vp_sum8(const vp a[8], float out[8]) {
    for (int k = 0; k < 8; k++) {
        const float32x4_t x = vaddq_f32(a[k].v[0], a[k].v[1]);                        /* j and j + 4 */
        const float32x2_t y = vadd_f32(vget_low_f32(x), vget_high_f32(x));            /* j and j + 2 */
        out[k] = vget_lane_f32(y, 0) + vget_lane_f32(y, 1);
    }
}

EKV_INLINE vd vd_set1(double x) { VD_EACH(vdupq_n_f64(x)); }
EKV_INLINE vd vd_load(const double *p) { VD_EACH(vld1q_f64(p + 2 * i)); }
EKV_INLINE vd vd_load_f32(const float *p) { VD_EACH(vcvt_f64_f32(vld1_f32(p + 2 * i))); }
EKV_INLINE void vd_store_f32(float *p, vd a) { for (int i = 0; i < 4; i++) vst1_f32(p + 2 * i, vcvt_f32_f64(a.v[i])); }
EKV_INLINE vd vd_add(vd a, vd b) { VD_EACH(vaddq_f64(a.v[i], b.v[i])); }
EKV_INLINE vd vd_sub(vd a, vd b) { VD_EACH(vsubq_f64(a.v[i], b.v[i])); }
EKV_INLINE vd vd_mul(vd a, vd b) { VD_EACH(vmulq_f64(a.v[i], b.v[i])); }
EKV_INLINE vd vd_div(vd a, vd b) { VD_EACH(vdivq_f64(a.v[i], b.v[i])); }
EKV_INLINE vd vd_max(vd a, vd b) { VD_EACH(vbslq_f64(vcgtq_f64(a.v[i], b.v[i]), a.v[i], b.v[i])); }
EKV_INLINE vd vd_min(vd a, vd b) { VD_EACH(vbslq_f64(vcltq_f64(a.v[i], b.v[i]), a.v[i], b.v[i])); }
EKV_INLINE double vd_sum(vd a) {
    const float64x2_t x = vaddq_f64(a.v[0], a.v[2]), y = vaddq_f64(a.v[1], a.v[3]); /* i and i + 4 */
    const float64x2_t z = vaddq_f64(x, y);                                          /* i and i + 2 */
    return vgetq_lane_f64(z, 0) + vgetq_lane_f64(z, 1);
}

typedef struct { uint16x8_t v[4]; } vs; /* tokens in order */

/* The first 16 lanes and the last. */
EKV_INLINE vs vs_set(uint16_t first, uint16_t second) {
    vs r = {{vdupq_n_u16(first), vdupq_n_u16(first), vdupq_n_u16(second), vdupq_n_u16(second)}};
    return r;
}

/* Two tables of 16 entries, the low and the high bytes of each apart. */
typedef struct { uint8x16x2_t bytes[2]; } vs_table;
typedef struct { uint8x16_t low[2], high[2]; } vs_numbers;

EKV_INLINE vs_table vs_table_of(const uint16_t *entries) {
    vs_table t;
    for (int i = 0; i < 2; i++) {
        const uint16x8_t a = vld1q_u16(entries + 16 * i), b = vld1q_u16(entries + 16 * i + 8);
        t.bytes[i].val[0] = vcombine_u8(vmovn_u16(a), vmovn_u16(b));
        t.bytes[i].val[1] = vcombine_u8(vshrn_n_u16(a, 8), vshrn_n_u16(b, 8));
    }
    return t;
}

/* The 16 tokens whose sums are a[0] and a[1]. */
EKV_INLINE void vs_add_table(uint16x8_t *a, uint8x16_t index, uint8x16x2_t table) {
    const uint8x16_t l = vqtbl1q_u8(table.val[0], index), h = vqtbl1q_u8(table.val[1], index);
    a[0] = vqaddq_u16(a[0], vreinterpretq_u16_u8(vzip1q_u8(l, h)));
    a[1] = vqaddq_u16(a[1], vreinterpretq_u16_u8(vzip2q_u8(l, h)));
}

EKV_INLINE vs_numbers vs_unpack(const uint8_t *first, const uint8_t *second) {
    const uint8x16_t a = vld1q_u8(first), b = vld1q_u8(second), mask = vdupq_n_u8(15);
    const vs_numbers n = {{vandq_u8(a, mask), vandq_u8(b, mask)}, {vshrq_n_u8(a, 4), vshrq_n_u8(b, 4)}};
    return n;
}

EKV_INLINE vs vs_add_entries(vs a, vs_numbers n, const vs_table *t) {
    for (int half = 0; half < 2; half++) {
        vs_add_table(a.v + 2 * half, n.low[half], t->bytes[0]);
        vs_add_table(a.v + 2 * half, n.high[half], t->bytes[1]);
    }
    return a;
}

EKV_INLINE void vs_store(uint16_t *p, vs a, int n) {
    for (int i = 0; i < n / 8; i++) vst1q_u16(p + 8 * i, a.v[i]);
}

/* Bit i: p[i] > limit. */
EKV_INLINE uint32_t vs_above(const uint16_t *p, uint16_t limit) {
    static const uint8_t bit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint16x8_t l = vdupq_n_u16(limit);
    uint32_t mask = 0;
    for (int half = 0; half < 2; half++) {
        const uint16x8_t a = vcgtq_u16(vld1q_u16(p + 16 * half), l), b = vcgtq_u16(vld1q_u16(p + 16 * half + 8), l);
        const uint8x16_t bits = vandq_u8(vcombine_u8(vmovn_u16(a), vmovn_u16(b)), vld1q_u8(bit));
        mask |= ((uint32_t)vaddv_u8(vget_low_u8(bits)) | (uint32_t)vaddv_u8(vget_high_u8(bits)) << 8) << (16 * half);
    }
    return mask;
}

#if EKV_WITH_SLEEF
EKV_INLINE vf vf_exp(vf a) { VF_EACH(Sleef_cinz_expf4_u10advsimdnofma(a.v[i])); }
EKV_INLINE vd vd_exp(vd a) { VD_EACH(Sleef_cinz_expd2_u10advsimdnofma(a.v[i])); }
EKV_INLINE vd vd_erfc(vd a) { VD_EACH(Sleef_cinz_erfcd2_u15advsimdnofma(a.v[i])); }
EKV_INLINE vd vd_pow(vd a, vd b) { VD_EACH(Sleef_cinz_powd2_u10advsimdnofma(a.v[i], b.v[i])); }
#else
#include "cpu/vec_libm.h"
#endif

#endif
