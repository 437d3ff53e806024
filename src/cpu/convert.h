/*
 * Rows between storage types and float.  Every value of f16 and bf16 is a float, so loading is exact before the factor; storing
 * rounds to nearest even.
 */
#ifndef EKV_CONVERT_H
#define EKV_CONVERT_H

EKV_INLINE void load_row(ekv_dtype dtype, ekv_load_row_args *a) {
    const vf factor = vf_set1(a->factor);
    int d = 0;
    for (; d + VEC_LANES <= a->dim; d += VEC_LANES) vf_store(a->out + d, vf_mul(vf_load_any(dtype, a->row, d), factor));
    if (d < a->dim) { /* the tail's zeros stay zeros whatever the factor: 0 * infinity is not stored */
        const vf tail = vf_mul(vf_load_any_n(dtype, a->row, d, a->dim - d), factor);
        vf_store(a->out + d, vf_set1(0.0f));
        vf_store_n(a->out + d, tail, a->dim - d);
    }
}

EKV_INLINE void store_row(ekv_dtype dtype, ekv_store_row_args *a) {
    for (int d = 0; d < a->dim; d += VEC_LANES) {
        const int n = a->dim - d < VEC_LANES ? a->dim - d : VEC_LANES;
        vf_store_any_n(dtype, a->row, d, vf_load_n(a->x + d, n), n);
    }
}

#endif
