/*
 * The weighted sum of value rows.
 *
 * The sum of one call starts from zero and is added to the running sum at its end, so that long sums are made of short ones and the
 * rounding error grows with the square root of their number.
 */
#ifndef EKV_VALUES_H
#define EKV_VALUES_H

/* Dimensions [d, d + n) of the sum, n <= 32; n = 32 is passed as a constant. */
EKV_INLINE void accumulate_block(ekv_dtype dtype, ekv_accumulate_args *a, int d, int n) {
    vf sum = vf_set1(0.0f);
    for (int i = 0; i < a->n; i++) {
        if (a->weight[i] == 0.0f) continue;
        const vf v = n == VEC_LANES ? vf_load_any(dtype, a->values[i], d) : vf_load_any_n(dtype, a->values[i], d, n);
        sum = vf_add(sum, vf_mul(vf_set1(a->weight[i]), v));
    }
    vf_store_n(a->sum + d, vf_add(vf_load_n(a->sum + d, n), sum), n);
}

EKV_INLINE void accumulate(ekv_dtype dtype, ekv_accumulate_args *a) {
    int d = 0;
    for (; d + VEC_LANES <= a->dim; d += VEC_LANES) accumulate_block(dtype, a, d, VEC_LANES);
    if (d < a->dim) accumulate_block(dtype, a, d, a->dim - d);
}

#endif
