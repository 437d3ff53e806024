/*
 * Page statistics: how they are built from a page's keys, and what they say about its scores.
 */
#ifndef EKV_PAGE_H
#define EKV_PAGE_H

/* The type in which the moments of a page are kept. */
EKV_INLINE ekv_dtype moments_dtype(ekv_dtype dtype) { return dtype == EKV_F16 ? EKV_F16 : EKV_F32; }

/* Whether an element is a NaN or an infinity: x - x is 0 for all others. */
EKV_INLINE uint32_t not_finite(vf x) { return ~vf_le(vf_abs(vf_sub(x, x)), vf_set1(0.0f)); }

EKV_INLINE void box(ekv_dtype dtype, ekv_box_args *a) {
    const size_t bytes = dtype == EKV_F32 ? 4 : 2;
    char *low_out = a->box, *high_out = low_out + bytes * (size_t)a->dim;
    uint32_t bad = 0;
    for (int d = 0; d < a->dim; d += VEC_LANES) {
        const int n = a->dim - d < VEC_LANES ? a->dim - d : VEC_LANES;
        vf low = vf_load_any_n(dtype, a->rows[0], d, n), high = low;
        for (int i = 0; i < a->n; i++) {
            const vf x = vf_load_any_n(dtype, a->rows[i], d, n);
            bad |= not_finite(x);
            low = vf_min(x, low);
            high = vf_max(x, high);
        }
        vf_store_any_n(dtype, low_out, d, low, n);
        vf_store_any_n(dtype, high_out, d, high, n);
    }
    if (!bad) return;
    for (int d = 0; d < a->dim; d += VEC_LANES) {
        const int n = a->dim - d < VEC_LANES ? a->dim - d : VEC_LANES;
        vf_store_any_n(dtype, low_out, d, vf_set1(NAN), n);
        vf_store_any_n(dtype, high_out, d, vf_set1(NAN), n);
    }
}

/* Whether a sum of squares has left the range in which float keeps its digits: overflow, underflow, NaN.  0 counts too. */
EKV_INLINE bool out_of_range(float squares) { return !(squares > 1e-30f && squares < INFINITY); }

/* Deviations of the lanes whose squares are out of float's range, in double. */
static void extreme_deviations(ekv_dtype dtype, const ekv_moments_args *a, int d, int n, const float *mean, const float *squares,
                               float *deviation) {
    double sum[VEC_LANES] = {0.0};
    float x[VEC_LANES];
    for (int i = 0; i < a->n; i++) {
        vf_store(x, vf_load_any_n(dtype, a->rows[i], d, n));
        for (int j = 0; j < n; j++) sum[j] += ((double)x[j] - (double)mean[j]) * ((double)x[j] - (double)mean[j]);
    }
    for (int j = 0; j < n; j++)
        if (out_of_range(squares[j])) deviation[j] = (float)sqrt(sum[j] / a->n);
}

EKV_INLINE void moments(ekv_dtype dtype, ekv_moments_args *a) {
    const ekv_dtype stored = moments_dtype(dtype);
    const size_t bytes = stored == EKV_F32 ? 4 : 2;
    char *mean_out = a->moments, *deviation_out = mean_out + bytes * (size_t)a->dim;
    const vf share = vf_set1(1.0f / (float)a->n);
    for (int d = 0; d < a->dim; d += VEC_LANES) {
        const int n = a->dim - d < VEC_LANES ? a->dim - d : VEC_LANES;
        vf mean = vf_set1(0.0f), squares = vf_set1(0.0f);
        float means[VEC_LANES], lanes[VEC_LANES], deviations[VEC_LANES];
        for (int i = 0; i < a->n; i++) mean = vf_add(mean, vf_mul(vf_load_any_n(dtype, a->rows[i], d, n), share));
        for (int i = 0; i < a->n; i++) {
            const vf c = vf_sub(vf_load_any_n(dtype, a->rows[i], d, n), mean);
            squares = vf_add(squares, vf_mul(vf_mul(c, c), share));
        }
        vf_store(means, mean);
        vf_store(lanes, squares);
        vf_store(deviations, vf_sqrt(squares));
        bool extreme = false;
        for (int j = 0; j < n; j++) extreme |= out_of_range(lanes[j]);
        if (extreme) extreme_deviations(dtype, a, d, n, means, lanes, deviations);
        vf_store_any_n(stored, mean_out, d, mean, n);
        vf_store_any_n(stored, deviation_out, d, vf_load(deviations), n);
    }
}

/* The largest norm, in double: squares of floats neither overflow nor vanish there.  The factor covers the rounding of the sum (at
 * most EKV_MAX_DIM terms of 2^-53), of the root, and to float. */
EKV_INLINE void norms(ekv_dtype dtype, ekv_norms_args *a) {
    double largest = 0.0;
    for (int i = 0; i < a->n; i++) {
        vd sum = vd_set1(0.0);
        for (int d = 0; d < a->dim; d += VEC_LANES) {
            const int n = a->dim - d < VEC_LANES ? a->dim - d : VEC_LANES;
            float lane[VEC_LANES];
            vf_store(lane, vf_load_any_n(dtype, a->rows[i], d, n));
            for (int j = 0; j < VEC_LANES; j += VEC_DOUBLES) {
                const vd x = vd_load_f32(lane + j);
                sum = vd_add(sum, vd_mul(x, x));
            }
        }
        const double squares = vd_sum(sum);
        if (squares != squares || squares > largest) largest = squares; /* a NaN is taken, and stays: nothing is > it */
    }
    const double norm = sqrt(largest) * (1.0 + 0x1p-22) + 0x1p-140;
    *a->norm = norm <= 3.4028234663852886e38 ? (float)norm : INFINITY;
}

/*
 * Slack of the box bound.  Write u = 2^-24, K = ceil(dim / 32) + 5 (additions on the way of one product through the lanes and the
 * tree) and A = sum_d max(|q_d min_d|, |q_d max_d|), which is at least sum_d |q_d k_d| for every key of the page.
 *   - the f32 dot product of a key is within gamma_{K+1} A of the exact q . k, gamma_m = m u / (1 - m u);
 *   - so is the f32 sum of the maxima of its own exact value, which is >= q . k;
 *   - q itself is query * scale * (alpha - 1) rounded twice: another 3 u A between q . k and the exact scaled score;
 *   - A is computed in f32: A <= fl(A) / (1 - gamma_{K+1}).
 * In sum 2 (K + 1) u A + 3 u A up to factors of 1 + 2 gamma; K <= 37, so (2 K + 8) u fl(A) covers it.  The ALiBi term is monotone in
 * the token, so that its best end bounds the others with the same rounding; its own factor carries 2 u, the last additions (here and
 * in `score`) 4 u of |dot| + |bias|.  Products below 2^-126 lose at most 2^-149 each: 2^-120 covers 1024 of them.
 */
EKV_INLINE float bound_slack(int dim, float a, float bias) {
    const float steps = (float)((dim + VEC_LANES - 1) / VEC_LANES + 5);
    return (2.0f * steps + 16.0f) * 0x1p-24f * a + 0x1p-20f * fabsf(bias) + 0x1p-120f;
}

EKV_INLINE void bound_terms(ekv_dtype dtype, const float *q, const char *low, const char *high, int d, int n, vf *sum, vf *size) {
    const vf x = vf_load(q + d);
    const vf p = vf_mul(x, n == VEC_LANES ? vf_load_any(dtype, low, d) : vf_load_any_n(dtype, low, d, n));
    const vf r = vf_mul(x, n == VEC_LANES ? vf_load_any(dtype, high, d) : vf_load_any_n(dtype, high, d, n));
    *sum = vf_add(*sum, vf_max(p, r));
    *size = vf_add(*size, vf_max(vf_abs(p), vf_abs(r)));
}

/* Pages whose pairs of sums are reduced at once: eight sums, see vp_sum8. */
#define PAGES_AT_ONCE 4
#define PAGES_AHEAD 8 /* statistics lie anywhere, so the hardware does not see them coming */

EKV_INLINE void prefetch_pages(const void *const *statistics, int page, int n, size_t bytes) {
    for (int i = page + PAGES_AHEAD; i < n && i < page + PAGES_AHEAD + PAGES_AT_ONCE; i++) prefetch(statistics[i], (int)bytes);
}

EKV_INLINE void bound(ekv_dtype dtype, ekv_bound_args *a) {
    const size_t bytes = dtype == EKV_F32 ? 4 : 2;
    for (int p = 0; p < a->n; p += PAGES_AT_ONCE) {
        vp fold[2 * PAGES_AT_ONCE];
        float sums[2 * PAGES_AT_ONCE];
        prefetch_pages(a->boxes, p, a->n, 2 * bytes * (size_t)a->dim);
        EKV_UNROLL
        for (int i = 0; i < PAGES_AT_ONCE; i++) { /* behind the last page it is bounded again */
            const char *low = a->boxes[p + i < a->n ? p + i : a->n - 1], *high = low + bytes * (size_t)a->dim;
            vf sum = vf_set1(0.0f), size = sum;
            int d = 0;
            for (; d + VEC_LANES <= a->dim; d += VEC_LANES) bound_terms(dtype, a->q, low, high, d, VEC_LANES, &sum, &size);
            if (d < a->dim) bound_terms(dtype, a->q, low, high, d, a->dim - d, &sum, &size);
            fold[i] = vf_fold(sum);
            fold[PAGES_AT_ONCE + i] = vf_fold(size);
        }
        vp_sum8(fold, sums);
        for (int i = 0; i < PAGES_AT_ONCE && p + i < a->n; i++) {
            float bias = 0.0f;
            if (a->slope != 0.0f) bias = a->slope * (float)((a->slope > 0.0f ? a->last[p + i] : a->first[p + i]) - a->q_token);
            const float bound = (sums[i] + bias) + bound_slack(a->dim, sums[PAGES_AT_ONCE + i], bias);
            a->bound[p + i] = bound <= INFINITY ? bound : INFINITY; /* NaN: the page must be read */
        }
    }
}

EKV_INLINE void gaussian_terms(ekv_dtype dtype, const float *q, const char *mean, const char *deviation, int d, int n, vf *sum,
                               vf *squares) {
    const vf x = vf_load(q + d);
    const vf m = vf_mul(x, n == VEC_LANES ? vf_load_any(dtype, mean, d) : vf_load_any_n(dtype, mean, d, n));
    const vf s = vf_mul(x, n == VEC_LANES ? vf_load_any(dtype, deviation, d) : vf_load_any_n(dtype, deviation, d, n));
    *sum = vf_add(*sum, m);
    *squares = vf_add(*squares, vf_mul(s, s));
}

/* The deviation of a page's scores where its square is out of float's range. */
static float extreme_deviation(ekv_dtype dtype, const ekv_gaussian_args *a, const char *deviation) {
    double sum = 0.0;
    for (int d = 0; d < a->dim; d += VEC_LANES) {
        const int n = a->dim - d < VEC_LANES ? a->dim - d : VEC_LANES;
        float s[VEC_LANES];
        vf_store(s, vf_load_any_n(dtype, deviation, d, n));
        for (int j = 0; j < n; j++) sum += (double)a->q[d + j] * (double)s[j] * ((double)a->q[d + j] * (double)s[j]);
    }
    return (float)sqrt(sum);
}

EKV_INLINE void gaussian(ekv_dtype dtype, ekv_gaussian_args *a) {
    const size_t bytes = dtype == EKV_F32 ? 4 : 2;
    for (int p = 0; p < a->n; p += PAGES_AT_ONCE) {
        vp fold[2 * PAGES_AT_ONCE];
        float sums[2 * PAGES_AT_ONCE];
        prefetch_pages(a->moments, p, a->n, 2 * bytes * (size_t)a->dim);
        EKV_UNROLL
        for (int i = 0; i < PAGES_AT_ONCE; i++) {
            const char *mean = a->moments[p + i < a->n ? p + i : a->n - 1], *deviation = mean + bytes * (size_t)a->dim;
            vf sum = vf_set1(0.0f), squares = sum;
            int d = 0;
            for (; d + VEC_LANES <= a->dim; d += VEC_LANES)
                gaussian_terms(dtype, a->q, mean, deviation, d, VEC_LANES, &sum, &squares);
            if (d < a->dim) gaussian_terms(dtype, a->q, mean, deviation, d, a->dim - d, &sum, &squares);
            fold[i] = vf_fold(sum);
            fold[PAGES_AT_ONCE + i] = vf_fold(squares);
        }
        vp_sum8(fold, sums);
        for (int i = 0; i < PAGES_AT_ONCE && p + i < a->n; i++) {
            float bias = 0.0f;
            if (a->slope != 0.0f)
                bias = a->slope * (0.5f * (float)(a->first[p + i] - a->q_token) + 0.5f * (float)(a->last[p + i] - a->q_token));
            const float square = sums[PAGES_AT_ONCE + i];
            a->mean[p + i] = sums[i] + bias;
            a->deviation[p + i] = out_of_range(square)
                                      ? extreme_deviation(dtype, a, (const char *)a->moments[p + i] + bytes * (size_t)a->dim)
                                      : sqrtf(square);
        }
    }
}

/*
 * E[max(x - tau, 0)^b] for x normal with mean m and deviation s is s^b G_b(t), t = (tau - m) / s, with phi and Q the density and the
 * upper tail of the standard normal:
 *      G_0 = Q,  G_1 = phi - t Q,  G_2 = (1 + t^2) Q - t phi,  G_3 = (2 + t^2) phi - t (3 + t^2) Q
 * and the derivative of the b-th with respect to tau is -b s^(b-1) G_(b-1).
 */
EKV_INLINE void truncated_moments(vd t, vd g[4]) {
    const vd t2 = vd_mul(t, t);
    const vd phi = vd_mul(vd_exp(vd_mul(t2, vd_set1(-0.5))), vd_set1(0.3989422804014327));
    const vd tail = vd_mul(vd_erfc(vd_mul(t, vd_set1(0.7071067811865476))), vd_set1(0.5));
    const vd zero = vd_set1(0.0);
    g[0] = tail;
    g[1] = vd_max(vd_sub(phi, vd_mul(t, tail)), zero);
    g[2] = vd_max(vd_sub(vd_mul(vd_add(vd_set1(1.0), t2), tail), vd_mul(t, phi)), zero);
    g[3] = vd_max(vd_sub(vd_mul(vd_add(vd_set1(2.0), t2), phi), vd_mul(vd_mul(t, vd_add(vd_set1(3.0), t2)), tail)), zero);
}

/* Eight pages of which n are there.  A deviation of 0 becomes 1e-9, which changes the mass by less than that. */
EKV_INLINE void mass_block(const ekv_mass_args *a, int64_t p, int n, vd *value, vd *slope) {
    const vd mean = vd_load_f32_n(a->mean + p, n, 0.0f), count = vd_load_f32_n(a->count + p, n, 0.0f);
    const vd s = vd_max(vd_load_f32_n(a->deviation + p, n, 1.0f), vd_set1(1e-9));
    vd g[4], power = vd_set1(1.0);
    truncated_moments(vd_div(vd_sub(vd_set1(a->tau), mean), s), g);
    for (int b = 1; b < a->beta; b++) power = vd_mul(power, s);
    *value = vd_add(*value, vd_mul(count, vd_mul(vd_mul(power, s), g[a->beta])));
    *slope = vd_add(*slope, vd_mul(count, vd_mul(vd_mul(power, vd_set1((double)a->beta)), g[a->beta - 1])));
}

static void mass(ekv_mass_args *a) {
    vd value = vd_set1(0.0), slope = vd_set1(0.0);
    for (int64_t p = 0; p < a->n; p += VEC_DOUBLES)
        mass_block(a, p, a->n - p < VEC_DOUBLES ? (int)(a->n - p) : VEC_DOUBLES, &value, &slope);
    a->value = vd_sum(value);
    a->slope = vd_sum(slope);
}

#endif
