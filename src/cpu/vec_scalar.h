/*
 * vec.h in plain C: the definition of every vector operation.  Used where no better instruction set is available, and as the model
 * for a new one.
 */
#ifndef EKV_VEC_SCALAR_H
#define EKV_VEC_SCALAR_H

typedef struct { float v[32]; } vf;
typedef struct { float v[8]; } vp;
typedef struct { double v[8]; } vd;

#define VEC_QUERIES 1 /* query rows that the score kernel keeps in registers at once */
#define VEC_SUMS 2    /* vectors of sums that the accumulate kernel keeps in registers */

/* IEEE half to float, exact: the exponent is moved by a multiplication, which also normalises subnormals. */
EKV_INLINE float f16_to_f32(uint16_t h) {
    union { uint32_t u; float f; } x = {(uint32_t)(h & 0x7fffu) << 13}, scale = {0x77800000u /* 2^112 */};
    x.f *= scale.f;
    if ((h & 0x7c00u) == 0x7c00u) x.u |= 0x7f800000u;
    x.u |= (uint32_t)(h & 0x8000u) << 16;
    return x.f;
}

/* Float to IEEE half, to nearest even; NaN stays a (quiet) NaN. */
EKV_INLINE uint16_t f32_to_f16(float f) {
    union { float f; uint32_t u; } x = {f}, magic = {.u = 0x3f000000u /* 0.5: the half's subnormal unit is 2^-24 */};
    const uint32_t sign = x.u & 0x80000000u;
    uint32_t bits;
    x.u ^= sign;
    if (x.u >= 0x47800000u) { /* 65536 and above, infinity, NaN */
        bits = x.u > 0x7f800000u ? 0x7e00u | ((x.u >> 13) & 0x1ffu) : 0x7c00u;
    } else if (x.u < 0x38800000u) { /* below the smallest normal half: let the adder round */
        x.f += magic.f;
        bits = x.u - magic.u;
    } else {
        const uint32_t odd = (x.u >> 13) & 1u;
        x.u += 0xc8000fffu + odd; /* exponent - 112, rounding increment */
        bits = x.u >> 13;
    }
    return (uint16_t)(bits | (sign >> 16));
}

EKV_INLINE float bf16_to_f32(uint16_t b) {
    union { uint32_t u; float f; } x = {(uint32_t)b << 16};
    return x.f;
}

EKV_INLINE uint16_t f32_to_bf16(float f) {
    union { float f; uint32_t u; } x = {f};
    if ((x.u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((x.u >> 16) | 0x40u);
    return (uint16_t)((x.u + 0x7fffu + ((x.u >> 16) & 1u)) >> 16);
}

#define VF_EACH(expression) \
    vf r;                   \
    for (int i = 0; i < 32; i++) r.v[i] = (expression); \
    return r
#define VD_EACH(expression) \
    vd r;                   \
    for (int i = 0; i < 8; i++) r.v[i] = (expression); \
    return r

EKV_INLINE vf vf_set1(float x) { VF_EACH(x); }
EKV_INLINE vf vf_load(const float *p) { VF_EACH(p[i]); }
EKV_INLINE vf vf_load_n(const float *p, int n) { VF_EACH(i < n ? p[i] : 0.0f); }
EKV_INLINE vf vf_load_f16(const uint16_t *p) { VF_EACH(f16_to_f32(p[i])); }
EKV_INLINE vf vf_load_f16_n(const uint16_t *p, int n) { VF_EACH(i < n ? f16_to_f32(p[i]) : 0.0f); }
EKV_INLINE vf vf_load_bf16(const uint16_t *p) { VF_EACH(bf16_to_f32(p[i])); }
EKV_INLINE vf vf_load_bf16_n(const uint16_t *p, int n) { VF_EACH(i < n ? bf16_to_f32(p[i]) : 0.0f); }
EKV_INLINE void vf_store(float *p, vf a) { memcpy(p, a.v, sizeof a.v); }
EKV_INLINE void vf_store_n(float *p, vf a, int n) { memcpy(p, a.v, (size_t)n * sizeof(float)); }
EKV_INLINE void vf_store_f16(uint16_t *p, vf a) { for (int i = 0; i < 32; i++) p[i] = f32_to_f16(a.v[i]); }
EKV_INLINE void vf_store_bf16(uint16_t *p, vf a) { for (int i = 0; i < 32; i++) p[i] = f32_to_bf16(a.v[i]); }
/* (float)(p[i] - minus) */
EKV_INLINE vf vf_from_i32(const int32_t *p, int32_t minus) { VF_EACH((float)(p[i] - minus)); }
EKV_INLINE vf vf_add(vf a, vf b) { VF_EACH(a.v[i] + b.v[i]); }
EKV_INLINE vf vf_sub(vf a, vf b) { VF_EACH(a.v[i] - b.v[i]); }
EKV_INLINE vf vf_mul(vf a, vf b) { VF_EACH(a.v[i] * b.v[i]); }
EKV_INLINE vf vf_max(vf a, vf b) { VF_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
EKV_INLINE vf vf_min(vf a, vf b) { VF_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
EKV_INLINE vf vf_abs(vf a) { VF_EACH(fabsf(a.v[i])); }
EKV_INLINE vf vf_sqrt(vf a) { VF_EACH(sqrtf(a.v[i])); }

/* Bit i: a[i] <= b[i]; 0 where either is NaN. */
EKV_INLINE uint32_t vf_le(vf a, vf b) {
    uint32_t mask = 0;
    for (int i = 0; i < 32; i++) mask |= (uint32_t)(a.v[i] <= b.v[i]) << i;
    return mask;
}

/* The first levels of the sum tree; how many, an instruction set chooses. */
EKV_INLINE vp vf_fold(vf a) {
    vp r;
    for (int i = 0; i < 8; i++) r.v[i] = (a.v[i] + a.v[i + 16]) + (a.v[i + 8] + a.v[i + 24]);
    return r;
}

/* The other levels, for eight sums at once. */
EKV_INLINE void vp_sum8(const vp a[8], float out[8]) {
    for (int k = 0; k < 8; k++) {
        const float *v = a[k].v;
        out[k] = ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
    }
}

EKV_INLINE vd vd_set1(double x) { VD_EACH(x); }
EKV_INLINE vd vd_load(const double *p) { VD_EACH(p[i]); }
EKV_INLINE vd vd_load_f32(const float *p) { VD_EACH((double)p[i]); }
EKV_INLINE void vd_store_f32(float *p, vd a) { for (int i = 0; i < 8; i++) p[i] = (float)a.v[i]; }
EKV_INLINE vd vd_add(vd a, vd b) { VD_EACH(a.v[i] + b.v[i]); }
EKV_INLINE vd vd_sub(vd a, vd b) { VD_EACH(a.v[i] - b.v[i]); }
EKV_INLINE vd vd_mul(vd a, vd b) { VD_EACH(a.v[i] * b.v[i]); }
EKV_INLINE vd vd_div(vd a, vd b) { VD_EACH(a.v[i] / b.v[i]); }
EKV_INLINE vd vd_max(vd a, vd b) { VD_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
EKV_INLINE vd vd_min(vd a, vd b) { VD_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
EKV_INLINE double vd_sum(vd a) {
    const double *v = a.v;
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

typedef struct { uint16_t v[32]; } vs;

/* The first 16 lanes and the last. */
EKV_INLINE vs vs_set(uint16_t first, uint16_t second) {
    vs r;
    for (int i = 0; i < 32; i++) r.v[i] = i < 16 ? first : second;
    return r;
}

/* Two tables of 16 entries, ready for look-ups. */
typedef struct { uint16_t entry[32]; } vs_table;
typedef struct { uint8_t pair[32]; } vs_numbers;

EKV_INLINE vs_table vs_table_of(const uint16_t *entries) {
    vs_table t;
    memcpy(t.entry, entries, sizeof t.entry);
    return t;
}

/* Two 4-bit numbers for each lane, the low and the high half of a byte: of `first` for lanes 0 to 15, of `second` for 16 to 31. */
EKV_INLINE vs_numbers vs_unpack(const uint8_t *first, const uint8_t *second) {
    vs_numbers n;
    memcpy(n.pair, first, 16);
    memcpy(n.pair + 16, second, 16);
    return n;
}

/* Adds, saturating at 65535, two table entries to each lane: of the low numbers from the first table, of the high ones from the second. */
EKV_INLINE vs vs_add_entries(vs a, vs_numbers n, const vs_table *t) {
    for (int i = 0; i < 32; i++) {
        uint32_t sum = a.v[i] + (uint32_t)t->entry[n.pair[i] & 15u];
        sum = sum > 65535u ? 65535u : sum;
        sum += t->entry[16u + (n.pair[i] >> 4)];
        a.v[i] = (uint16_t)(sum > 65535u ? 65535u : sum);
    }
    return a;
}

/* The first n lanes, n = 16 or 32. */
EKV_INLINE void vs_store(uint16_t *p, vs a, int n) { memcpy(p, a.v, (size_t)n * sizeof(uint16_t)); }

/* Bit i: p[i] > limit. */
EKV_INLINE uint32_t vs_above(const uint16_t *p, uint16_t limit) {
    uint32_t mask = 0;
    for (int i = 0; i < 32; i++) mask |= (uint32_t)(p[i] > limit) << i;
    return mask;
}

#if EKV_WITH_SLEEF
EKV_INLINE vf vf_exp(vf a) { VF_EACH(Sleef_cinz_expf1_u10purec(a.v[i])); }
EKV_INLINE vd vd_exp(vd a) { VD_EACH(Sleef_cinz_expd1_u10purec(a.v[i])); }
EKV_INLINE vd vd_erfc(vd a) { VD_EACH(Sleef_cinz_erfcd1_u15purec(a.v[i])); }
EKV_INLINE vd vd_pow(vd a, vd b) { VD_EACH(Sleef_cinz_powd1_u10purec(a.v[i], b.v[i])); }
#else
EKV_INLINE vf vf_exp(vf a) { VF_EACH(expf(a.v[i])); }
EKV_INLINE vd vd_exp(vd a) { VD_EACH(exp(a.v[i])); }
EKV_INLINE vd vd_erfc(vd a) { VD_EACH(erfc(a.v[i])); }
EKV_INLINE vd vd_pow(vd a, vd b) { VD_EACH(pow(a.v[i], b.v[i])); }
#endif

#endif
