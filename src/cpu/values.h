/*
 * The weighted sum of value rows.
 *
 * The sum of one call starts from zero and is added to the running sum at its end, so that long sums are made of short ones and the
 * rounding error grows with the square root of their number.  VEC_SUMS (at least 2) vectors of sums stay in registers: of one row if
 * there is one, else each value is loaded once for two.
 */
#ifndef EKV_VALUES_H
#define EKV_VALUES_H

/* `blocks` times 32 dimensions from d on of `rows` sums, both constants; of the last block n dimensions, 32 being passed as a constant. */
EKV_INLINE void accumulate_block(ekv_dtype dtype, const ekv_accumulate_args *a, int row, int rows, int d, int blocks, int n) {
    vf sum[VEC_SUMS];
    for (int k = 0; k < rows * blocks; k++) sum[k] = vf_set1(0.0f);
    for (int i = 0; i < a->n; i++) {
        vf v[VEC_SUMS];
        if (row == 0 && d == 0 && a->ahead) prefetch(a->ahead[i], a->ahead_bytes);
        for (int b = 0; b < blocks; b++)
            v[b] = n == VEC_LANES ? vf_load_any(dtype, a->values[i], d + b * VEC_LANES)
                                  : vf_load_any_n(dtype, a->values[i], d + b * VEC_LANES, n);
        for (int r = 0; r < rows; r++) {
            const float weight = a->weight[row + r][i];
            if (weight == 0.0f) continue;
            for (int b = 0; b < blocks; b++) sum[r * blocks + b] = vf_add(sum[r * blocks + b], vf_mul(vf_set1(weight), v[b]));
        }
    }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) {
            float *to = a->sum[row + r] + d + b * VEC_LANES;
            vf_store_n(to, vf_add(vf_load_n(to, n), sum[r * blocks + b]), n);
        }
}

/* All dimensions of `rows` sums. */
EKV_INLINE void accumulate_rows(ekv_dtype dtype, const ekv_accumulate_args *a, int row, int rows) {
    const int blocks = VEC_SUMS / rows;
    int d = 0;
    for (; d + blocks * VEC_LANES <= a->dim; d += blocks * VEC_LANES) accumulate_block(dtype, a, row, rows, d, blocks, VEC_LANES);
    for (; blocks > 2 && d + 2 * VEC_LANES <= a->dim; d += 2 * VEC_LANES)
        accumulate_block(dtype, a, row, rows, d, blocks > 2 ? 2 : 1, VEC_LANES);
    for (; d + VEC_LANES <= a->dim; d += VEC_LANES) accumulate_block(dtype, a, row, rows, d, 1, VEC_LANES);
    if (d < a->dim) accumulate_block(dtype, a, row, rows, d, 1, a->dim - d);
}

EKV_INLINE void accumulate_all(ekv_dtype dtype, const ekv_accumulate_args *a) {
    int r = 0;
    for (; r + 2 <= a->rows; r += 2) accumulate_rows(dtype, a, r, 2);
    for (; r < a->rows; r++) accumulate_rows(dtype, a, r, 1);
}

/* Some dimensions at a time, as floats, for many rows; see score_flat. */
EKV_INLINE void accumulate_flat(ekv_dtype dtype, const ekv_accumulate_args *a) {
    enum { DIMS = FLAT_FLOATS / EKV_TILE };
    float flat[FLAT_FLOATS], *sum[FLAT_ROWS];
    const void *values[EKV_TILE];
    for (int d = 0; d < a->dim; d += DIMS) {
        const int dim = a->dim - d < DIMS ? a->dim - d : DIMS;
        for (int i = 0; i < a->n; i++) {
            values[i] = flat + i * DIMS;
            for (int e = 0; e < dim; e += VEC_LANES)
                vf_store(flat + i * DIMS + e, dim - e >= VEC_LANES ? vf_load_any(dtype, a->values[i], d + e)
                                                                   : vf_load_any_n(dtype, a->values[i], d + e, dim - e));
        }
        for (int row = 0; row < a->rows; row += FLAT_ROWS) {
            ekv_accumulate_args part = *a;
            part.values = values;
            part.weight = a->weight + row;
            part.rows = a->rows - row < FLAT_ROWS ? a->rows - row : FLAT_ROWS;
            part.dim = dim;
            part.sum = sum;
            part.ahead = d == 0 && row == 0 ? a->ahead : NULL;
            for (int r = 0; r < part.rows; r++) sum[r] = a->sum[row + r] + d;
            accumulate_all(EKV_F32, &part);
        }
    }
}

EKV_INLINE void accumulate(ekv_dtype dtype, ekv_accumulate_args *a) {
    if (dtype != EKV_F32 && a->rows >= FLAT_ROWS && a->n <= EKV_TILE)
        accumulate_flat(dtype, a);
    else
        accumulate_all(dtype, a);
}

#endif
