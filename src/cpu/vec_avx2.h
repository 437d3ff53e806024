/*
 * vec.h for AVX2 with F16C: a vf is four registers, a vd two.  FMA is required by the flags (every such processor has it) but
 * never used: fused sums would differ from the other instruction sets.
 */
#ifndef EKV_VEC_AVX2_H
#define EKV_VEC_AVX2_H

#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mfma -mf16c"
#endif
#include <immintrin.h>

typedef struct { __m256 v[4]; } vf;
typedef __m256 vp;
typedef struct { __m256d v[2]; } vd;

#define VEC_QUERIES 2 /* query rows that the score kernel keeps in registers at once: 8 sums and 4 parts of a key in 16 registers */
#define VEC_SUMS 2    /* vectors of sums that the accumulate kernel keeps in registers */

#define VF_EACH(expression) \
    vf r;                   \
    for (int i = 0; i < 4; i++) r.v[i] = (expression); \
    return r
#define VD_EACH(expression) \
    vd r;                   \
    for (int i = 0; i < 2; i++) r.v[i] = (expression); \
    return r

EKV_INLINE __m256 f32_from_bf16x8(__m128i b) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16));
}

/* Eight 16-bit elements of which n are there; n may be <= 0 or >= 8. */
EKV_INLINE __m128i load_u16x8_n(const uint16_t *p, int n) {
    if (n >= 8) return _mm_loadu_si128((const __m128i *)p);
    uint16_t lane[8] = {0};
    for (int i = 0; i < n; i++) lane[i] = p[i];
    return _mm_loadu_si128((const __m128i *)lane);
}

/* All ones in the first n of eight lanes. */
EKV_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

EKV_INLINE vf vf_set1(float x) { VF_EACH(_mm256_set1_ps(x)); }
EKV_INLINE vf vf_load(const float *p) { VF_EACH(_mm256_loadu_ps(p + 8 * i)); }
EKV_INLINE vf vf_load_n(const float *p, int n) { VF_EACH(_mm256_maskload_ps(p + 8 * i, first_lanes(n - 8 * i))); }
EKV_INLINE vf vf_load_f16(const uint16_t *p) { VF_EACH(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8 * i)))); }
EKV_INLINE vf vf_load_f16_n(const uint16_t *p, int n) { VF_EACH(_mm256_cvtph_ps(load_u16x8_n(p + 8 * i, n - 8 * i))); }
EKV_INLINE vf vf_load_bf16(const uint16_t *p) { VF_EACH(f32_from_bf16x8(_mm_loadu_si128((const __m128i *)(p + 8 * i)))); }
EKV_INLINE vf vf_load_bf16_n(const uint16_t *p, int n) { VF_EACH(f32_from_bf16x8(load_u16x8_n(p + 8 * i, n - 8 * i))); }
EKV_INLINE void vf_store(float *p, vf a) { for (int i = 0; i < 4; i++) _mm256_storeu_ps(p + 8 * i, a.v[i]); }
EKV_INLINE void vf_store_n(float *p, vf a, int n) {
    for (int i = 0; i < 4; i++) _mm256_maskstore_ps(p + 8 * i, first_lanes(n - 8 * i), a.v[i]);
}
EKV_INLINE void vf_store_f16(uint16_t *p, vf a) {
    for (int i = 0; i < 4; i++)
        _mm_storeu_si128((__m128i *)(p + 8 * i), _mm256_cvtps_ph(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
EKV_INLINE void vf_store_bf16(uint16_t *p, vf a) {
    for (int i = 0; i < 4; i++) {
        const __m256i x = _mm256_castps_si256(a.v[i]);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x400000));
        const __m256 is_nan = _mm256_cmp_ps(a.v[i], a.v[i], _CMP_UNORD_Q);
        const __m256i bits = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan)), 16);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x88);
        _mm_storeu_si128((__m128i *)(p + 8 * i), _mm256_castsi256_si128(packed));
    }
}
EKV_INLINE vf vf_from_i32(const int32_t *p, int32_t minus) {
    VF_EACH(_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_loadu_si256((const __m256i *)(p + 8 * i)), _mm256_set1_epi32(minus))));
}
EKV_INLINE vf vf_add(vf a, vf b) { VF_EACH(_mm256_add_ps(a.v[i], b.v[i])); }
EKV_INLINE vf vf_sub(vf a, vf b) { VF_EACH(_mm256_sub_ps(a.v[i], b.v[i])); }
EKV_INLINE vf vf_mul(vf a, vf b) { VF_EACH(_mm256_mul_ps(a.v[i], b.v[i])); }
EKV_INLINE vf vf_max(vf a, vf b) { VF_EACH(_mm256_max_ps(a.v[i], b.v[i])); }
EKV_INLINE vf vf_min(vf a, vf b) { VF_EACH(_mm256_min_ps(a.v[i], b.v[i])); }
EKV_INLINE vf vf_abs(vf a) { VF_EACH(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v[i])); }
EKV_INLINE vf vf_sqrt(vf a) { VF_EACH(_mm256_sqrt_ps(a.v[i])); }

EKV_INLINE uint32_t vf_le(vf a, vf b) {
    uint32_t mask = 0;
    for (int i = 0; i < 4; i++) mask |= (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.v[i], b.v[i], _CMP_LE_OQ)) << (8 * i);
    return mask;
}

EKV_INLINE vp vf_fold(vf a) { return _mm256_add_ps(_mm256_add_ps(a.v[0], a.v[2]), _mm256_add_ps(a.v[1], a.v[3])); }

/* Adds by transposing: each level halves the number of registers and adds the halves of two sums at once. */
EKV_INLINE void vp_sum8(const vp a[8], float out[8]) {
    __m256 b[4], c[2];
    for (int i = 0; i < 4; i++) /* lanes j and j + 4; sum i in the low half, sum i + 4 in the high half */
        b[i] = _mm256_add_ps(_mm256_permute2f128_ps(a[i], a[i + 4], 0x20), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    for (int i = 0; i < 2; i++) /* lanes j and j + 2 */
        c[i] = _mm256_add_ps(_mm256_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44), _mm256_shuffle_ps(b[2 * i], b[2 * i + 1], 0xee));
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_shuffle_ps(c[0], c[1], 0x88), _mm256_shuffle_ps(c[0], c[1], 0xdd)));
}

EKV_INLINE vd vd_set1(double x) { VD_EACH(_mm256_set1_pd(x)); }
EKV_INLINE vd vd_load(const double *p) { VD_EACH(_mm256_loadu_pd(p + 4 * i)); }
EKV_INLINE vd vd_load_f32(const float *p) { VD_EACH(_mm256_cvtps_pd(_mm_loadu_ps(p + 4 * i))); }
EKV_INLINE void vd_store_f32(float *p, vd a) { for (int i = 0; i < 2; i++) _mm_storeu_ps(p + 4 * i, _mm256_cvtpd_ps(a.v[i])); }
EKV_INLINE vd vd_add(vd a, vd b) { VD_EACH(_mm256_add_pd(a.v[i], b.v[i])); }
EKV_INLINE vd vd_sub(vd a, vd b) { VD_EACH(_mm256_sub_pd(a.v[i], b.v[i])); }
EKV_INLINE vd vd_mul(vd a, vd b) { VD_EACH(_mm256_mul_pd(a.v[i], b.v[i])); }
EKV_INLINE vd vd_div(vd a, vd b) { VD_EACH(_mm256_div_pd(a.v[i], b.v[i])); }
EKV_INLINE vd vd_max(vd a, vd b) { VD_EACH(_mm256_max_pd(a.v[i], b.v[i])); }
EKV_INLINE vd vd_min(vd a, vd b) { VD_EACH(_mm256_min_pd(a.v[i], b.v[i])); }
EKV_INLINE double vd_sum(vd a) {
    const __m256d x = _mm256_add_pd(a.v[0], a.v[1]);                                        /* i and i + 4 */
    const __m128d y = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));   /* i and i + 2 */
    return _mm_cvtsd_f64(_mm_add_sd(y, _mm_unpackhi_pd(y, y)));
}

/* Sums of the 16-bit lanes in the order that unpacking leaves: v[0] holds tokens 0-7 and 16-23, v[1] 8-15 and 24-31. */
typedef struct { __m256i v[2]; } vs;

/* The first 16 lanes and the last. */
EKV_INLINE vs vs_set(uint16_t first, uint16_t second) {
    const __m256i x = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_set1_epi16((short)first)), _mm_set1_epi16((short)second), 1);
    vs r = {{x, x}};
    return r;
}

/* Two tables of 16 entries, the low and the high bytes of each apart. */
typedef struct { __m128i low[2], high[2]; } vs_table;
typedef struct { __m256i low, high; } vs_numbers;

EKV_INLINE vs_table vs_table_of(const uint16_t *entries) {
    const __m128i mask = _mm_set1_epi16(255);
    vs_table t;
    for (int i = 0; i < 2; i++) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(entries + 16 * i));
        const __m128i b = _mm_loadu_si128((const __m128i *)(entries + 16 * i + 8));
        t.low[i] = _mm_packus_epi16(_mm_and_si128(a, mask), _mm_and_si128(b, mask));
        t.high[i] = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
    }
    return t;
}

EKV_INLINE vs vs_add_table(vs a, __m256i index, __m128i low, __m128i high) {
    const __m256i l = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(low), index);
    const __m256i h = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(high), index);
    a.v[0] = _mm256_adds_epu16(a.v[0], _mm256_unpacklo_epi8(l, h));
    a.v[1] = _mm256_adds_epu16(a.v[1], _mm256_unpackhi_epi8(l, h));
    return a;
}

EKV_INLINE vs_numbers vs_unpack(const uint8_t *first, const uint8_t *second) {
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)first)),
                                                  _mm_loadu_si128((const __m128i *)second), 1);
    const __m256i mask = _mm256_set1_epi8(15);
    const vs_numbers n = {_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask)};
    return n;
}

EKV_INLINE vs vs_add_entries(vs a, vs_numbers n, const vs_table *t) {
    return vs_add_table(vs_add_table(a, n.low, t->low[0], t->high[0]), n.high, t->low[1], t->high[1]);
}

EKV_INLINE void vs_store(uint16_t *p, vs a, int n) {
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(a.v[0]));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_castsi256_si128(a.v[1]));
    if (n <= 16) return;
    _mm_storeu_si128((__m128i *)(p + 16), _mm256_extracti128_si256(a.v[0], 1));
    _mm_storeu_si128((__m128i *)(p + 24), _mm256_extracti128_si256(a.v[1], 1));
}

/* Bit i: p[i] > limit. */
EKV_INLINE uint32_t vs_above(const uint16_t *p, uint16_t limit) {
    const __m256i zero = _mm256_setzero_si256(), l = _mm256_set1_epi16((short)limit);
    const __m256i a = _mm256_cmpeq_epi16(_mm256_subs_epu16(_mm256_loadu_si256((const __m256i *)p), l), zero);
    const __m256i b = _mm256_cmpeq_epi16(_mm256_subs_epu16(_mm256_loadu_si256((const __m256i *)(p + 16)), l), zero);
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8));
}

#if EKV_WITH_SLEEF
EKV_INLINE vf vf_exp(vf a) { VF_EACH(Sleef_cinz_expf8_u10avx(a.v[i])); }
EKV_INLINE vd vd_exp(vd a) { VD_EACH(Sleef_cinz_expd4_u10avx(a.v[i])); }
EKV_INLINE vd vd_erfc(vd a) { VD_EACH(Sleef_cinz_erfcd4_u15avx(a.v[i])); }
EKV_INLINE vd vd_pow(vd a, vd b) { VD_EACH(Sleef_cinz_powd4_u10avx(a.v[i], b.v[i])); }
#else
#include "cpu/vec_libm.h"
#endif

#endif
