/*
 * Sketches of keys: encoding, and the table look-ups that turn a sketch into an upper bound of a score.
 *
 * Four-bit numbers and 16-entry tables, so that one byte shuffle looks up 16 or more tokens at once (the idea of product quantisation's
 * fast scan); entries are 16 bits wide, since the bounds are compared with a threshold that must not be blurred.
 */
#ifndef EKV_SKETCH_H
#define EKV_SKETCH_H

/* y = P x. */
static void rotate(const ekv_basis *basis, const float *x, float *y) {
    const size_t stride = ((size_t)basis->dim + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
    const void *rows[EKV_TILE];
    int32_t token[EKV_TILE] = {0};
    const float slope = 0.0f;
    const int32_t q_token = 0;
    for (int32_t a = 0; a < basis->axes; a++) rows[a] = basis->project + (size_t)a * stride;
    ekv_score_args s = {&x, &slope, &q_token, 1, rows, token, basis->axes, basis->dim, y, NULL, 0};
    score(EKV_F32, &s);
}

/* The number of the nearest centroid to the residual along the code's axes; takes it off. */
static int nearest(const ekv_basis *basis, int32_t code, float *residual) {
    const int8_t *axis = basis->axis[code];
    float r[4], least = INFINITY;
    int best = 0;
    for (int j = 0; j < 4; j++) r[j] = axis[j] >= 0 ? residual[axis[j]] : 0.0f;
    for (int v = 0; v < 16; v++) {
        const float *c = basis->centroid[code][v];
        float distance = 0.0f;
        for (int j = 0; j < 4; j++) distance += (r[j] - c[j]) * (r[j] - c[j]);
        if (distance < least) {
            least = distance;
            best = v;
        }
    }
    for (int j = 0; j < 4; j++)
        if (axis[j] >= 0) residual[axis[j]] -= basis->centroid[code][best][j];
    return best;
}

/* A norm from its squares' sum: rounded up to float. */
static float norm_of(double squares) {
    const double norm = sqrt(squares) * (1.0 + 0x1p-22) + 0x1p-140;
    return norm <= 3.4028234663852886e38 ? (float)norm : INFINITY; /* also for NaN */
}

static double squares_of(const float *x, int32_t begin, int32_t end) {
    double sum = 0.0;
    for (int32_t i = begin; i < end; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

/* The smallest level not below the norm; the last if there is none. */
static int level_of(const float *level, float norm) {
    int v = 0;
    while (v < 15 && !(norm <= level[v])) v++;
    return v;
}

static void put_code(uint8_t *group, int slot, int code, int number) {
    uint8_t *byte = group + (size_t)(code / 2) * EKV_SKETCH_GROUP + slot;
    *byte = (uint8_t)(code % 2 ? (*byte & 0x0f) | number << 4 : (*byte & 0xf0) | number);
}

/* One key. */
static void encode_key(ekv_dtype dtype, ekv_encode_args *a, const void *key, uint8_t *group, int slot) {
    const ekv_basis *basis = a->basis;
    const int dim = basis->dim, padded = (dim + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
    float x[EKV_MAX_DIM], y[EKV_TILE] = {0}, residual[EKV_TILE], norms[EKV_SKETCH_NORMS];
    ekv_load_row_args load = {key, dim, 1.0f, x};
    load_row(dtype, &load);
    for (int d = 0; d < padded; d += VEC_LANES) vf_store(x + d, vf_sub(vf_load(x + d), vf_load(a->center + d)));
    const float length = norm_of(squares_of(x, 0, dim));
    rotate(basis, x, y);
    memcpy(residual, y, sizeof y);
    for (int32_t c = 0; c < basis->codes; c++) put_code(group, slot, c, nearest(basis, c, residual));
    for (int32_t i = 0; i < basis->axes; i++) { /* x - Q^T y: what no axis sees */
        const float *row = basis->restore + (size_t)i * (size_t)padded;
        const vf y_i = vf_set1(y[i]);
        for (int d = 0; d < padded; d += VEC_LANES) vf_store(x + d, vf_sub(vf_load(x + d), vf_mul(y_i, vf_load(row + d))));
    }
    for (int b = 0; b < EKV_SKETCH_NORMS - 1; b++)
        norms[b] = norm_of(squares_of(residual, b ? basis->block_end[b - 1] : 0, basis->block_end[b]));
    norms[EKV_SKETCH_NORMS - 1] = norm_of(squares_of(x, 0, dim));
    if (length < INFINITY) {
        a->total += (double)length * (double)length;
        for (int b = 0; b < EKV_SKETCH_NORMS; b++) a->left += (double)norms[b] * (double)norms[b];
    }
    for (int b = 0; b < EKV_SKETCH_NORMS; b++) {
        if (!(length < INFINITY)) norms[b] = INFINITY;
        put_code(group, slot, basis->codes + b, level_of(basis->level[b], norms[b]));
        a->norms[b] = norms[b] > a->norms[b] ? norms[b] : a->norms[b];
    }
    a->length = length > a->length ? length : a->length;
}

EKV_INLINE void encode(ekv_dtype dtype, ekv_encode_args *a) {
    const size_t group_bytes = (size_t)(a->basis->codes + EKV_SKETCH_NORMS) / 2 * EKV_SKETCH_GROUP;
    for (int i = 0; i < a->n; i++) {
        const int slot = a->slot + i;
        encode_key(dtype, a, a->keys[i], a->page + (size_t)(slot / EKV_SKETCH_GROUP) * group_bytes, slot % EKV_SKETCH_GROUP);
    }
}

#define LOOKUP_SUMS 4 /* sums of 32 tokens that are in registers at once */

/* `rows` rows from `row` on, 1 or 2: they share the unpacking. */
EKV_INLINE void lookup_rows(const ekv_lookup_args *a, int row, const int rows) {
    const int sums = LOOKUP_SUMS / rows;
    vs_table table[2][(EKV_SKETCH_CODES + EKV_SKETCH_NORMS) / 2];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < a->codes / 2; c++) table[r][c] = vs_table_of(a->table[row + r] + 32 * c);
    for (int g = 0; g < a->groups; g += 2 * sums) {
        const uint8_t *group[2 * LOOKUP_SUMS];
        vs sum[2][LOOKUP_SUMS];
        for (int i = 0; i < sums; i++) { /* behind the last group it is looked up again */
            const int first = g + 2 * i < a->groups ? g + 2 * i : a->groups - 1, second = first + 1 < a->groups ? first + 1 : first;
            group[2 * i] = a->group[first];
            group[2 * i + 1] = a->group[second];
            for (int r = 0; r < rows; r++) sum[r][i] = vs_set(a->start[row + r][first], a->start[row + r][second]);
        }
        for (int c = 0; c < a->codes / 2; c++)
            for (int i = 0; i < sums; i++) {
                const vs_numbers numbers = vs_unpack(group[2 * i] + c * EKV_SKETCH_GROUP, group[2 * i + 1] + c * EKV_SKETCH_GROUP);
                for (int r = 0; r < rows; r++) sum[r][i] = vs_add_entries(sum[r][i], numbers, &table[r][c]);
            }
        for (int i = 0; i < sums && g + 2 * i < a->groups; i++)
            for (int r = 0; r < rows; r++)
                vs_store(a->sum[row + r] + (size_t)(g + 2 * i) * EKV_SKETCH_GROUP, sum[r][i], g + 2 * i + 1 < a->groups ? 32 : 16);
    }
}

static void lookup(ekv_lookup_args *a) {
    int row = 0;
    for (; row + 2 <= a->rows; row += 2) lookup_rows(a, row, 2);
    if (row < a->rows) lookup_rows(a, row, 1);
}

static void above(ekv_above_args *a) {
    int t = 0;
    for (; t + 64 <= a->n; t += 64)
        a->bits[t / 64] |= vs_above(a->sum + t, a->limit) | (uint64_t)vs_above(a->sum + t + 32, a->limit) << 32;
    for (; t < a->n; t++) a->bits[t / 64] |= (uint64_t)(a->sum[t] > a->limit) << t % 64;
}

#endif
