/*
 * Scores of a tile of keys.
 *
 * Each key is converted to float once for up to VEC_QUERIES rows, whose sums stay in registers; a tile is small enough that its keys
 * come from the first-level cache for the rows after those.  Eight sums are reduced at once.  The sum of a lane starts with its first
 * product and goes on in the order of the dimensions.
 */
#ifndef EKV_SCORE_H
#define EKV_SCORE_H

/* Dot products of one key with `rows` queries (a constant, at least 1; so is dim where it pays), on their way down the tree. */
EKV_INLINE void dot_fold(ekv_dtype dtype, const float *const *q, int rows, const void *key, int dim, vp *fold) {
    vf sum[VEC_QUERIES];
    const vf first = dim >= VEC_LANES ? vf_load_any(dtype, key, 0) : vf_load_any_n(dtype, key, 0, dim);
    for (int r = 0; r < rows; r++) sum[r] = vf_mul(vf_load(q[r]), first);
    int d = VEC_LANES;
    for (; d + VEC_LANES <= dim; d += VEC_LANES) {
        const vf k = vf_load_any(dtype, key, d);
        for (int r = 0; r < rows; r++) sum[r] = vf_add(sum[r], vf_mul(vf_load(q[r] + d), k));
    }
    if (d < dim) {
        const vf k = vf_load_any_n(dtype, key, d, dim - d);
        for (int r = 0; r < rows; r++) sum[r] = vf_add(sum[r], vf_mul(vf_load(q[r] + d), k));
    }
    for (int r = 0; r < rows; r++) fold[8 * r] = vf_fold(sum[r]);
}

/* All keys of the tile for `rows` queries (a constant).  The last group of eight repeats the last key. */
EKV_INLINE void score_rows(ekv_dtype dtype, const ekv_score_args *a, int dim, int first_row, int rows) {
    const float *const *q = a->q + first_row;
    for (int i = 0; i < a->n; i += 8) {
        vp fold[8 * VEC_QUERIES];
        for (int j = i; first_row == 0 && a->ahead && j < a->n && j < i + 8; j++) prefetch(a->ahead[j], a->ahead_bytes);
        EKV_UNROLL
        for (int j = 0; j < 8; j++) dot_fold(dtype, q, rows, a->keys[i + j < a->n ? i + j : a->n - 1], dim, fold + j);
        for (int r = 0; r < rows; r++) vp_sum8(fold + 8 * r, a->z + (size_t)(first_row + r) * EKV_TILE + i);
    }
}

/* Adds slope * distance to one row. */
EKV_INLINE void add_bias(const ekv_score_args *a, int row) {
    float *z = a->z + (size_t)row * EKV_TILE;
    const vf slope = vf_set1(a->slope[row]);
    for (int i = 0; i < a->n; i += VEC_LANES)
        vf_store(z + i, vf_add(vf_load(z + i), vf_mul(slope, vf_from_i32(a->token + i, a->q_token[row]))));
}

EKV_INLINE void score_dim(ekv_dtype dtype, const ekv_score_args *a, int dim) {
    int r = 0;
    if (dim != 128) /* unrolled that far, four queries leave no registers for their sums */
        for (; r + VEC_QUERIES <= a->rows; r += VEC_QUERIES) score_rows(dtype, a, dim, r, VEC_QUERIES);
    for (; VEC_QUERIES >= 2 && r + 2 <= a->rows; r += 2) score_rows(dtype, a, dim, r, VEC_QUERIES >= 2 ? 2 : 1);
    for (; r < a->rows; r++) score_rows(dtype, a, dim, r, 1);
}

EKV_INLINE void score_tile(ekv_dtype dtype, const ekv_score_args *a) {
    if (a->dim == 64)
        score_dim(dtype, a, 64);
    else if (a->dim == 128)
        score_dim(dtype, a, 128);
    else
        score_dim(dtype, a, a->dim);
}

#define FLAT_ROWS 8        /* so many rows and more have keys and values converted once, to a block of floats */
#define FLAT_FLOATS 4096   /* of this size, which stays in the first-level cache */

/* A few keys at a time, as floats, for many rows.  The same bits: it is the same sum of the same numbers. */
EKV_INLINE void score_flat(ekv_dtype dtype, const ekv_score_args *a, int keys) {
    float flat[FLAT_FLOATS];
    const void *rows[EKV_TILE];
    const int stride = (a->dim + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
    for (int first = 0; first < a->n; first += keys) {
        ekv_score_args part = *a;
        part.n = a->n - first < keys ? a->n - first : keys;
        for (int i = 0; i < part.n; i++) {
            float *to = flat + i * stride;
            int d = 0;
            for (; d + VEC_LANES <= a->dim; d += VEC_LANES) vf_store(to + d, vf_load_any(dtype, a->keys[first + i], d));
            if (d < a->dim) vf_store(to + d, vf_load_any_n(dtype, a->keys[first + i], d, a->dim - d));
            rows[i] = to;
        }
        part.keys = rows;
        part.z = a->z + first;
        part.ahead = a->ahead ? a->ahead + first : NULL;
        score_tile(EKV_F32, &part);
    }
}

EKV_INLINE void score(ekv_dtype dtype, ekv_score_args *a) {
    const int keys = FLAT_FLOATS / ((a->dim + VEC_LANES - 1) / VEC_LANES * VEC_LANES) / 8 * 8;
    if (dtype != EKV_F32 && a->rows >= FLAT_ROWS && keys > 0)
        score_flat(dtype, a, keys < EKV_TILE ? keys : EKV_TILE);
    else
        score_tile(dtype, a);
    for (int r = 0; r < a->rows; r++)
        if (a->slope[r] != 0.0f) add_bias(a, r);
}

#endif
