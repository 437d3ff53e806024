/*
 * vec.h for AVX-512 (F, BW, DQ, VL): a vf is two registers, a vd one.
 */
#ifndef EKV_VEC_AVX512_H
#define EKV_VEC_AVX512_H

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif
#include <immintrin.h>

typedef struct { __m512 v[2]; } vf;
typedef __m512 vp;
typedef __m512d vd;

#define VEC_QUERIES 4 /* query rows that the score kernel keeps in registers at once: 8 sums and 2 parts of a key in 32 registers */
#define VEC_SUMS 8    /* vectors of sums that the accumulate kernel keeps in registers */

#define VF_EACH(expression) \
    vf r;                   \
    for (int i = 0; i < 2; i++) r.v[i] = (expression); \
    return r

/* The first n of 16 lanes; n may be <= 0 or >= 16. */
EKV_INLINE __mmask16 first_lanes(int n) { return n >= 16 ? (__mmask16)0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1u); }

EKV_INLINE __m512 f32_from_bf16x16(__m256i b) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)); }

EKV_INLINE vf vf_set1(float x) { VF_EACH(_mm512_set1_ps(x)); }
EKV_INLINE vf vf_load(const float *p) { VF_EACH(_mm512_loadu_ps(p + 16 * i)); }
EKV_INLINE vf vf_load_n(const float *p, int n) { VF_EACH(_mm512_maskz_loadu_ps(first_lanes(n - 16 * i), p + 16 * i)); }
EKV_INLINE vf vf_load_f16(const uint16_t *p) { VF_EACH(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + 16 * i)))); }
EKV_INLINE vf vf_load_f16_n(const uint16_t *p, int n) {
    VF_EACH(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n - 16 * i), p + 16 * i)));
}
EKV_INLINE vf vf_load_bf16(const uint16_t *p) { VF_EACH(f32_from_bf16x16(_mm256_loadu_si256((const __m256i *)(p + 16 * i)))); }
EKV_INLINE vf vf_load_bf16_n(const uint16_t *p, int n) {
    VF_EACH(f32_from_bf16x16(_mm256_maskz_loadu_epi16(first_lanes(n - 16 * i), p + 16 * i)));
}
EKV_INLINE void vf_store(float *p, vf a) { for (int i = 0; i < 2; i++) _mm512_storeu_ps(p + 16 * i, a.v[i]); }
EKV_INLINE void vf_store_n(float *p, vf a, int n) {
    for (int i = 0; i < 2; i++) _mm512_mask_storeu_ps(p + 16 * i, first_lanes(n - 16 * i), a.v[i]);
}
EKV_INLINE void vf_store_f16(uint16_t *p, vf a) {
    for (int i = 0; i < 2; i++)
        _mm256_storeu_si256((__m256i *)(p + 16 * i), _mm512_cvtps_ph(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
EKV_INLINE void vf_store_bf16(uint16_t *p, vf a) {
    for (int i = 0; i < 2; i++) {
        const __m512i x = _mm512_castps_si512(a.v[i]);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v[i], a.v[i], _CMP_UNORD_Q);
        const __m512i bits = _mm512_mask_or_epi32(rounded, is_nan, x, _mm512_set1_epi32(0x400000));
        _mm256_storeu_si256((__m256i *)(p + 16 * i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
}
EKV_INLINE vf vf_from_i32(const int32_t *p, int32_t minus) {
    VF_EACH(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(p + 16 * i), _mm512_set1_epi32(minus))));
}
EKV_INLINE vf vf_add(vf a, vf b) { VF_EACH(_mm512_add_ps(a.v[i], b.v[i])); }
EKV_INLINE vf vf_sub(vf a, vf b) { VF_EACH(_mm512_sub_ps(a.v[i], b.v[i])); }
EKV_INLINE vf vf_mul(vf a, vf b) { VF_EACH(_mm512_mul_ps(a.v[i], b.v[i])); }
EKV_INLINE vf vf_max(vf a, vf b) { VF_EACH(_mm512_max_ps(a.v[i], b.v[i])); }
EKV_INLINE vf vf_min(vf a, vf b) { VF_EACH(_mm512_min_ps(a.v[i], b.v[i])); }
EKV_INLINE vf vf_abs(vf a) { VF_EACH(_mm512_abs_ps(a.v[i])); }
EKV_INLINE vf vf_sqrt(vf a) { VF_EACH(_mm512_sqrt_ps(a.v[i])); }

EKV_INLINE uint32_t vf_le(vf a, vf b) {
    return (uint32_t)_mm512_cmp_ps_mask(a.v[0], b.v[0], _CMP_LE_OQ) | (uint32_t)_mm512_cmp_ps_mask(a.v[1], b.v[1], _CMP_LE_OQ) << 16;
}

/* See vec.h. */
#define VEC_HAS_PACK
EKV_INLINE int vec_pack(float *to_z, int32_t *to_token, const float *z, const int32_t *token, uint32_t mask) {
    int count = 0;
    for (int i = 0; i < 32; i += 16) {
        const __mmask16 chosen = (__mmask16)(mask >> i);
        const int n = __builtin_popcount(chosen);
        const __m512 x = _mm512_maskz_compress_ps(chosen, _mm512_maskz_loadu_ps(chosen, z + i));
        const __m512i t = _mm512_maskz_compress_epi32(chosen, _mm512_maskz_loadu_epi32(chosen, token + i));
        _mm512_mask_storeu_ps(to_z + count, first_lanes(n), x);
        _mm512_mask_storeu_epi32(to_token + count, first_lanes(n), t);
        count += n;
    }
    return count;
}

EKV_INLINE vp vf_fold(vf a) { return _mm512_add_ps(a.v[0], a.v[1]); } /* i and i + 16 */

/* Adds by transposing: each level adds the halves of two sums at once, and the next has half as many registers. */
EKV_INLINE void vp_sum8(const vp a[8], float out[8]) {
    __m512 b[4], c[2], d;
    for (int i = 0; i < 4; i++) /* lanes j and j + 8; sum i in the low half, sum i + 4 in the high half */
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xee));
    for (int i = 0; i < 2; i++) /* j and j + 4; quarters: sums i, i + 4, i + 2, i + 6 */
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[i], b[i + 2], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 2], 0xdd));
    /* j and j + 2; then the last two lanes of each sum stand together: 0 1, 4 5, 2 3, 6 7 */
    d = _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x44), _mm512_shuffle_ps(c[0], c[1], 0xee));
    d = _mm512_add_ps(_mm512_shuffle_ps(d, d, 0x88), _mm512_shuffle_ps(d, d, 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 1, 8, 9, 4, 5, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, d)));
}

EKV_INLINE vd vd_set1(double x) { return _mm512_set1_pd(x); }
EKV_INLINE vd vd_load(const double *p) { return _mm512_loadu_pd(p); }
EKV_INLINE vd vd_load_f32(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
EKV_INLINE void vd_store_f32(float *p, vd a) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(a)); }
EKV_INLINE vd vd_add(vd a, vd b) { return _mm512_add_pd(a, b); }
EKV_INLINE vd vd_sub(vd a, vd b) { return _mm512_sub_pd(a, b); }
EKV_INLINE vd vd_mul(vd a, vd b) { return _mm512_mul_pd(a, b); }
EKV_INLINE vd vd_div(vd a, vd b) { return _mm512_div_pd(a, b); }
EKV_INLINE vd vd_max(vd a, vd b) { return _mm512_max_pd(a, b); }
EKV_INLINE vd vd_min(vd a, vd b) { return _mm512_min_pd(a, b); }
EKV_INLINE double vd_sum(vd a) {
    const __m256d x = _mm256_add_pd(_mm512_castpd512_pd256(a), _mm512_extractf64x4_pd(a, 1)); /* i and i + 4 */
    const __m128d y = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));      /* i and i + 2 */
    return _mm_cvtsd_f64(_mm_add_sd(y, _mm_unpackhi_pd(y, y)));
}

typedef __m512i vs;

/* The first 16 lanes and the last. */
EKV_INLINE vs vs_set(uint16_t first, uint16_t second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set1_epi16((short)first)), _mm256_set1_epi16((short)second), 1);
}

/* Two tables of 16 entries, the second first: the table of one permutation, which looks at the lowest five bits of an index. */
typedef __m512i vs_table;
typedef struct { __m512i low, high; } vs_numbers;

EKV_INLINE vs_table vs_table_of(const uint16_t *entries) {
    const __m512i t = _mm512_loadu_si512(entries);
    return _mm512_shuffle_i64x2(t, t, 0x4e);
}

EKV_INLINE vs_numbers vs_unpack(const uint8_t *first, const uint8_t *second) {
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)first)),
                                                  _mm_loadu_si128((const __m128i *)second), 1);
    const __m512i x = _mm512_cvtepu8_epi16(bytes);
    const vs_numbers n = {_mm512_ternarylogic_epi32(x, _mm512_set1_epi16(15), _mm512_set1_epi16(16), 0xea), /* x & 15 | 16 */
                          _mm512_srli_epi16(x, 4)};
    return n;
}

EKV_INLINE vs vs_add_entries(vs a, vs_numbers n, const vs_table *t) {
    return _mm512_adds_epu16(_mm512_adds_epu16(a, _mm512_permutexvar_epi16(n.low, *t)), _mm512_permutexvar_epi16(n.high, *t));
}

EKV_INLINE void vs_store(uint16_t *p, vs a, int n) {
    if (n <= 16)
        _mm256_storeu_si256((__m256i *)p, _mm512_castsi512_si256(a));
    else
        _mm512_storeu_si512(p, a);
}

/* Bit i: p[i] > limit. */
EKV_INLINE uint32_t vs_above(const uint16_t *p, uint16_t limit) {
    return _mm512_cmpgt_epu16_mask(_mm512_loadu_si512(p), _mm512_set1_epi16((short)limit));
}

#if EKV_WITH_SLEEF
EKV_INLINE vf vf_exp(vf a) { VF_EACH(Sleef_cinz_expf16_u10avx512fnofma(a.v[i])); }
EKV_INLINE vd vd_exp(vd a) { return Sleef_cinz_expd8_u10avx512fnofma(a); }
EKV_INLINE vd vd_erfc(vd a) { return Sleef_cinz_erfcd8_u15avx512fnofma(a); }
EKV_INLINE vd vd_pow(vd a, vd b) { return Sleef_cinz_powd8_u10avx512fnofma(a, b); }
#else
#include "cpu/vec_libm.h"
#endif

#endif
