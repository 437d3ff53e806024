/*
 * Conformance of the kernels that build and read page statistics: box, moments, norms, bound, gaussian, mass.
 *
 * u = 2^-24 is the largest relative error of one float operation; SECOND covers the orders of u above the first.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/conform.h"

#include <math.h>
#include <string.h>

#define SECOND        1.001
#define LARGEST_FLOAT 3.4028234663852886e38

static const int dims[] = {1, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 192, 256, 511, 1024};
static const int page_tokens[] = {1, 2, 3, 5, 8, 16, 17, 32, 100, 256};
static const char *const contents[] = {"normal", "equal keys", "zeros of both signs", "far from 0",
                                       "huge",   "subnormal",  "NaN in a key",        "infinity in a key"};

enum { NORMAL, EQUAL, ZEROS, FAR, HUGE_KEYS, SUBNORMAL, NANS, INFINITE };

/* The keys of one page. */
static const void **make_keys(ekv_check *c, ekv_dtype dtype, int n, int dim, int content) {
    const void **rows = ekv_rows(c, "key", n, dim, dtype);
    const int bad = ekv_below(c, n), at = ekv_below(c, dim);
    if (c->failed) return rows;
    for (int i = 0; i < n; i++)
        for (int d = 0; d < dim; d++) {
            double x = ekv_normal(c);
            if (content == EQUAL && i > 0) x = ekv_reference_load(dtype, rows[0], d);
            if (content == ZEROS) x = ekv_below(c, 2) ? 0.0 : -0.0;
            if (content == FAR) x = 300.0 + 0.5 * x;
            if (content == HUGE_KEYS) x *= dtype == EKV_F16 ? 9e3 : 5e37;
            if (content == SUBNORMAL) x *= dtype == EKV_F16 ? 0x1p-22 : 0x1p-135;
            if (i == bad && d == at && content == NANS) x = (double)NAN;
            if (i == bad && d == at && content == INFINITE) x = ekv_below(c, 2) ? (double)INFINITY : -(double)INFINITY;
            ekv_put(dtype, (void *)(uintptr_t)rows[i], d, x);
        }
    return rows;
}

static bool all_finite(ekv_dtype dtype, const void *const *rows, int n, int dim) {
    for (int i = 0; i < n; i++)
        for (int d = 0; d < dim; d++)
            if (!isfinite(ekv_reference_load(dtype, rows[i], d))) return false;
    return true;
}

/* ---- box: exact ---- */

static void check_box(ekv_check *c) {
    const ekv_dtype dtype = (ekv_dtype)c->value[0];
    const int dim = c->value[1], n = c->value[2];
    c->unsupported = !c->table->box[dtype];
    if (c->unsupported) return;
    const void **rows = make_keys(c, dtype, n, dim, c->value[3]);
    ekv_box_args a = {rows, n, dim, ekv_room_out(c, "box", 2 * (int64_t)dim, ekv_element_bytes(dtype))};
    if (c->failed) return;
    ekv_seal(c);
    c->table->box[dtype](&a);
    const bool finite = all_finite(dtype, rows, n, dim);
    for (int d = 0; d < dim; d++) {
        double low = (double)INFINITY, high = -(double)INFINITY;
        for (int i = 0; i < n; i++) {
            const double x = ekv_reference_load(dtype, rows[i], d);
            low = x < low ? x : low;
            high = x > high ? x : high;
        }
        ekv_expect(c, "box, minimum", d, ekv_reference_load(dtype, a.box, d), finite ? low : (double)NAN, 0.0);
        ekv_expect(c, "box, maximum", d, ekv_reference_load(dtype, a.box, dim + d), finite ? high : (double)NAN, 0.0);
    }
}

/* ---- moments ----
 *
 * Mean: 1/n carries u, each product u, and at most n - 1 additions (the first is exact) u each: (n + 1) u of mean |x|, and
 * 2^-150 for each product below 2^-126. Deviation: with a mean that is e off, sum (x - mean)^2 / n grows by e^2 exactly; a term
 * carries 2 u of its difference, u of its square, 2 u of its share and n - 1 additions: (n + 4) u of the variance; its root and
 * the storing round once more each. A variance above the largest float may come out as +infinity, which counts as unknown. */

/* What rounding into the stored type may add to a value that is `error` off. */
static double stored(ekv_dtype dtype, double x, double error) { return error + ekv_half_ulp(dtype, fabs(x) + error); }

static void expect_moments(ekv_check *c, ekv_dtype dtype, const ekv_moments_args *a, int d) {
    const ekv_dtype kept = ekv_moments_dtype(dtype);
    const double n = (double)a->n, got_mean = ekv_reference_load(kept, a->moments, d),
                 got_deviation = ekv_reference_load(kept, a->moments, a->dim + d);
    double mean = 0.0, size = 0.0, variance = 0.0;
    for (int i = 0; i < a->n; i++) {
        mean += ekv_reference_load(dtype, a->rows[i], d) / n;
        size += fabs(ekv_reference_load(dtype, a->rows[i], d)) / n;
    }
    for (int i = 0; i < a->n; i++) {
        const double x = ekv_reference_load(dtype, a->rows[i], d) - mean;
        variance += x * x / n;
    }
    if (!isfinite(mean) || !isfinite(variance)) {
        ekv_expect_true(c, "mean of a key that is not finite is not finite", d, !isfinite(got_mean));
        ekv_expect(c, "deviation of a key that is not finite", d, got_deviation, (double)NAN, 0.0);
        return;
    }
    const double off = SECOND * (n + 1.0) * EKV_U * size + n * 0x1p-149, error = SECOND * (n + 5.0) * EKV_U;
    ekv_expect(c, "mean", d, got_mean, mean, stored(kept, mean, off));
    if ((variance + off * off) * (1.0 + error) * n > LARGEST_FLOAT && got_deviation == (double)INFINITY) return;
    const double deviation = sqrt(variance), lost = n * 0x1p-149;
    const double high = sqrt((variance + off * off) * (1.0 + error) + lost);
    const double low = sqrt(fmax(variance * (1.0 - error) - lost, 0.0));
    const double room = fmax(high - deviation, deviation - low) + EKV_U * high;
    ekv_expect(c, "deviation", d, got_deviation, deviation, stored(kept, deviation, room));
}

static void check_moments(ekv_check *c) {
    const ekv_dtype dtype = (ekv_dtype)c->value[0];
    const int dim = c->value[1], n = c->value[2];
    c->unsupported = !c->table->moments[dtype];
    if (c->unsupported) return;
    const void **rows = make_keys(c, dtype, n, dim, c->value[3]);
    ekv_moments_args a = {rows, n, dim,
                          ekv_room_out(c, "moments", 2 * (int64_t)dim, ekv_element_bytes(ekv_moments_dtype(dtype)))};
    if (c->failed) return;
    ekv_seal(c);
    c->table->moments[dtype](&a);
    for (int d = 0; d < dim; d++) expect_moments(c, dtype, &a, d);
}

/* ---- norms: never below, and above by at most 2^-20 (or the least float) ---- */

static void check_norms(ekv_check *c) {
    const ekv_dtype dtype = (ekv_dtype)c->value[0];
    const int dim = c->value[1], n = c->value[2];
    c->unsupported = !c->table->norms[dtype];
    if (c->unsupported) return;
    const void **rows = make_keys(c, dtype, n, dim, c->value[3]);
    ekv_norms_args a = {rows, n, dim, ekv_room_out(c, "norm", 1, sizeof(float))};
    if (c->failed) return;
    ekv_seal(c);
    c->table->norms[dtype](&a);
    double largest = 0.0;
    for (int i = 0; i < n; i++) {
        double squares = 0.0;
        for (int d = 0; d < dim; d++) squares += ekv_reference_load(dtype, rows[i], d) * ekv_reference_load(dtype, rows[i], d);
        largest = fmax(largest, sqrt(squares));
    }
    if (!all_finite(dtype, rows, n, dim) || largest > LARGEST_FLOAT) {
        ekv_expect(c, "norm", 0, (double)*a.norm, (double)INFINITY, 0.0);
        return;
    }
    /* 2^-42: what the sum of squares above may have rounded */
    const double high = largest * (1.0 + 0x1p-20) + 0x1p-130;
    ekv_expect_in(c, "norm", 0, (double)*a.norm, largest * (1.0 - 0x1p-42), high > LARGEST_FLOAT ? (double)INFINITY : high);
}

/* ---- bound ----
 *
 * At least the exact bound and every score of a key of the page.  Above the exact bound by at most the slack that page.h
 * derives, (2 K + 16) u A + 2^-20 |bias| + 2^-120 with K = ceil(dim / 32) + 5 and A = sum max(|q min|, |q max|), itself
 * computed in floats, and the rounding of the sum, K u A, of the position term, u |bias|, and of the last two additions. */

static const int page_counts[] = {1, 2, 3, 8, 17};
static const char *const slopes[] = {"none", "negative", "positive"};

typedef struct page_case {
    float *q;
    float slope;
    int32_t q_token, *first, *last;
} page_case;

static void make_pages(ekv_check *c, int pages, int dim, int slope, page_case *p) {
    const int padded = (dim + 31) / 32 * 32;
    p->q = ekv_room_in(c, "query", padded, sizeof *p->q);
    p->first = ekv_room_in(c, "first", pages, sizeof *p->first);
    p->last = ekv_room_in(c, "last", pages, sizeof *p->last);
    p->slope = slope == 0 ? 0.0f : (slope == 1 ? -1.0f : 1.0f) * (float)ekv_uniform(c, 0.001, 1.0);
    p->q_token = 100000;
    if (c->failed) return;
    for (int d = 0; d < padded; d++) p->q[d] = d < dim ? (float)ekv_normal(c) : 0.0f;
    for (int i = 0; i < pages; i++) {
        p->first[i] = ekv_below(c, 99000);
        p->last[i] = p->first[i] + ekv_below(c, 256);
    }
}

/* The exact bound of page i from its box; *size is A. */
static double exact_bound(ekv_dtype dtype, const ekv_bound_args *a, int i, double *bias, double *size) {
    double sum = 0.0;
    *size = 0.0;
    for (int d = 0; d < a->dim; d++) {
        const double x = (double)a->q[d] * ekv_reference_load(dtype, a->boxes[i], d);
        const double y = (double)a->q[d] * ekv_reference_load(dtype, a->boxes[i], a->dim + d);
        sum += isnan(x) || isnan(y) ? (double)NAN : fmax(x, y);
        *size += fmax(fabs(x), fabs(y));
    }
    const double token = (double)((a->slope > 0.0f ? a->last[i] : a->first[i]) - a->q_token);
    *bias = (double)a->slope * token;
    return sum + *bias;
}

/* No score of the kernel of the same table lies above the bound. */
static void expect_bound_holds(ekv_check *c, ekv_dtype dtype, const ekv_bound_args *a, int i, const void *const *keys, int n) {
    if (!c->table->score[dtype]) return;
    for (int k = 0; k < n && !c->failed; k++) {
        int32_t token[EKV_TILE] = {a->first[i] + ekv_below(c, a->last[i] - a->first[i] + 1)};
        float z[EKV_TILE];
        ekv_score_args s = {&a->q, &a->slope, &a->q_token, 1, keys + k, token, 1, a->dim, z, NULL, 0};
        c->table->score[dtype](&s);
        ekv_expect_true(c, "bound is at least the score of a key of the page", i, !((double)z[0] > (double)a->bound[i]));
    }
}

static void check_bound(ekv_check *c) {
    const ekv_dtype dtype = (ekv_dtype)c->value[0];
    const int dim = c->value[1], pages = c->value[2], content = c->value[3], n = 3;
    c->unsupported = !c->table->bound[dtype];
    if (c->unsupported) return;
    page_case p;
    make_pages(c, pages, dim, c->value[4], &p);
    const void **boxes = ekv_rows(c, "box", pages, 2 * dim, dtype), **keys[17];
    for (int i = 0; i < pages; i++) {
        keys[i] = make_keys(c, dtype, n, dim, i % 2 && content >= NANS ? NORMAL : content);
        if (c->failed) return;
        const bool finite = all_finite(dtype, keys[i], n, dim);
        for (int d = 0; d < dim; d++) {
            double low = (double)INFINITY, high = -(double)INFINITY;
            for (int k = 0; k < n; k++) {
                low = fmin(low, ekv_reference_load(dtype, keys[i][k], d));
                high = fmax(high, ekv_reference_load(dtype, keys[i][k], d));
            }
            ekv_put(dtype, (void *)(uintptr_t)boxes[i], d, finite ? low : (double)NAN);
            ekv_put(dtype, (void *)(uintptr_t)boxes[i], dim + d, finite ? high : (double)NAN);
        }
    }
    ekv_bound_args a = {
        p.q, p.slope, p.q_token, boxes, p.first, p.last, pages, dim, ekv_room_out(c, "bound", pages, sizeof(float))};
    if (c->failed) return;
    ekv_seal(c);
    c->table->bound[dtype](&a);
    for (int i = 0; i < pages; i++) {
        double bias, size;
        const double exact = exact_bound(dtype, &a, i, &bias, &size), steps = (double)((dim + 31) / 32 + 5);
        if (isnan(exact)) {
            ekv_expect(c, "bound of a box of NaN", i, (double)a.bound[i], (double)INFINITY, 0.0);
            continue;
        }
        const double slack =
            (2.0 * steps + 16.0 + steps + 4.0) * EKV_U * size + (0x1p-20 + 4.0 * EKV_U) * fabs(bias) + 0x1p-119;
        const double high = exact + SECOND * slack;
        ekv_expect_in(c, "bound", i, (double)a.bound[i], exact - 1e-13 * (size + fabs(bias)),
                      size > LARGEST_FLOAT / 4.0 ? (double)INFINITY : high);
        expect_bound_holds(c, dtype, &a, i, keys[i], n);
    }
}

/* ---- gaussian ----
 *
 * Mean: as a score, with a position that may be a half and is formed of two rounded halves: 3 u |bias|.  Deviation: a term
 * carries u of its product, twice, u of its square and the additions, (ceil(dim / 32) + 5 + 2) u; the root halves that and
 * rounds. */

static const ekv_dtype moment_types[] = {EKV_F32, EKV_F16};
static const char *const moment_names[] = {"f32", "f16"};
static const char *const moment_contents[] = {"normal", "deviation 0", "huge", "NaN"};

static void check_gaussian(ekv_check *c) {
    const ekv_dtype dtype = moment_types[c->value[0]];
    const int dim = c->value[1], pages = c->value[2], content = c->value[3];
    c->unsupported = !c->table->gaussian[dtype];
    if (c->unsupported) return;
    page_case p;
    make_pages(c, pages, dim, c->value[4], &p);
    const void **moments = ekv_rows(c, "moments", pages, 2 * dim, dtype);
    ekv_gaussian_args a = {p.q,
                           p.slope,
                           p.q_token,
                           moments,
                           p.first,
                           p.last,
                           pages,
                           dim,
                           ekv_room_out(c, "mean", pages, sizeof(float)),
                           ekv_room_out(c, "deviation", pages, sizeof(float))};
    if (c->failed) return;
    const double scale = content != 2 ? 1.0 : dtype == EKV_F16 ? 1e4 : 1e15;
    for (int i = 0; i < pages; i++)
        for (int d = 0; d < dim; d++) {
            ekv_put(dtype, (void *)(uintptr_t)moments[i], d, scale * ekv_normal(c));
            ekv_put(dtype, (void *)(uintptr_t)moments[i], dim + d, content == 1 ? 0.0 : scale * fabs(ekv_normal(c)));
            if (content == 3 && i == 0 && d == dim / 2) {
                ekv_put(dtype, (void *)(uintptr_t)moments[i], d, (double)NAN);
                ekv_put(dtype, (void *)(uintptr_t)moments[i], dim + d, (double)NAN);
            }
        }
    ekv_seal(c);
    c->table->gaussian[dtype](&a);
    for (int i = 0; i < pages; i++) {
        double mean = 0.0, size = 0.0, squares = 0.0;
        for (int d = 0; d < dim; d++) {
            const double term = (double)p.q[d] * ekv_reference_load(dtype, moments[i], d);
            const double spread = (double)p.q[d] * ekv_reference_load(dtype, moments[i], dim + d);
            mean += term;
            size += fabs(term);
            squares += spread * spread;
        }
        const double bias = (double)p.slope * (0.5 * ((double)p.first[i] + (double)p.last[i]) - (double)p.q_token);
        const double steps = (double)((dim + 31) / 32 + 5), lost = (double)dim * 0x1p-149;
        ekv_expect(c, "mean", i, (double)a.mean[i], mean + bias,
                   SECOND * EKV_U * (steps * size + 3.0 * fabs(bias) + (bias == 0.0 ? 0.0 : fabs(mean + bias))) + lost);
        ekv_expect(c, "deviation", i, (double)a.deviation[i], sqrt(squares),
                   SECOND * EKV_U * (0.5 * (steps + 2.0) + 1.0) * sqrt(squares) + sqrt(lost));
    }
}

/* ---- mass ----
 *
 * The oracle integrates; the kernel has closed forms, whose terms cancel where tau lies far above the mean.  In units of 2^-53
 * their error is a dozen operations' worth of the sizes of their terms, and 2.5 t^2 where phi(t) and its tail magnify the
 * rounding of t and of its square (3/2 and 1 units). */

static const int betas[] = {1, 2, 3};
static const int mass_counts[] = {1, 2, 7, 8, 9, 100, 257};
static const char *const mass_contents[] = {"normal", "tau far above", "tau far below", "deviation 0", "narrow and wide"};

/* The integral over u > 0 of u^power phi(t + u), by Gauss's rule of eight points on panels so narrow that it has all digits. */
static double tail_integral(double t, int power) {
    static const double node[4] = {0.1834346424956498, 0.5255324099163290, 0.7966664774136267, 0.9602898564975363};
    static const double weight[4] = {0.3626837833783620, 0.3137066458778873, 0.2223810344533745, 0.1012285362903763};
    const double h = t > 0.0 ? 1.0 / (1.0 + t) : 1.0, end = t > 0.0 ? fmin(12.0, 40.0 * h) : 12.0 - t;
    double sum = 0.0;
    for (double start = 0.0; start < end; start += h)
        for (int i = 0; i < 8; i++) {
            const double u = start + 0.5 * h * (1.0 + (i % 2 ? node[i / 2] : -node[i / 2]));
            sum += 0.5 * h * weight[i / 2] * pow(u, power) * exp(-0.5 * (t + u) * (t + u));
        }
    return sum * 0.3989422804014327;
}

/* E[max(x - tau, 0)^power]; *size is that of the terms of its closed form. */
static double truncated(double mean, double deviation, double tau, int power, double *size) {
    const double t = (tau - mean) / deviation, a = fabs(t), scale = pow(deviation, power);
    const double phi = 0.3989422804014327 * exp(-0.5 * t * t), tail = 0.5 * erfc(t * 0.7071067811865476);
    *size = scale * (power == 0   ? tail
                     : power == 1 ? phi + a * tail
                     : power == 2 ? (1.0 + a * a) * tail + a * phi
                                  : (2.0 + a * a) * phi + a * (3.0 + a * a) * tail);
    if (t < -30.0) { /* all of the mass lies above tau: plain moments */
        const double d = mean - tau, v = deviation * deviation;
        return power == 0 ? 1.0 : power == 1 ? d : power == 2 ? d * d + v : d * d * d + 3.0 * d * v;
    }
    return scale * tail_integral(t, power);
}

static void check_mass(ekv_check *c) {
    const int beta = c->value[0], n = c->value[1], content = c->value[2];
    c->unsupported = !c->table->mass;
    if (c->unsupported) return;
    float *mean = ekv_room_in(c, "mean", n, sizeof *mean), *deviation = ekv_room_in(c, "deviation", n, sizeof *deviation),
          *count = ekv_room_in(c, "count", n, sizeof *count);
    if (c->failed) return;
    const double tau = content == 1 ? 6.0 : content == 2 ? -50.0 : ekv_uniform(c, -1.0, 2.0);
    for (int i = 0; i < n; i++) {
        mean[i] = (float)ekv_normal(c);
        deviation[i] = content == 3 ? 0.0f : (float)(content == 4 ? exp(3.0 * ekv_normal(c)) : ekv_uniform(c, 0.3, 1.5));
        count[i] = (float)(1 + ekv_below(c, 256));
    }
    ekv_seal(c);
    ekv_mass_args a = {mean, deviation, count, n, beta, tau, 0.0, 0.0};
    c->table->mass(&a);
    double value = 0.0, slope = 0.0, value_room = 0.0, slope_room = 0.0;
    for (int i = 0; i < n; i++) {
        double size;
        const double m = (double)mean[i], s = fmax((double)deviation[i], 1e-9), t = (tau - m) / s;
        const double unit = 0x1p-53 * (12.0 + (t > -9.0 ? 2.5 * t * t : 0.0));
        value += (double)count[i] * truncated(m, s, tau, beta, &size);
        value_room += (double)count[i] * size * unit;
        slope += (double)count[i] * (double)beta * truncated(m, s, tau, beta - 1, &size);
        slope_room += (double)count[i] * (double)beta * size * unit;
    }
    /* 1e-13: the oracle itself, and the sum.  A deviation of 0 stands for 1e-9, as in the kernel. */
    ekv_expect(c, "value", 0, a.value, value, value_room + 1e-13 * value);
    ekv_expect(c, "slope", 0, a.slope, slope, slope_room + 1e-13 * slope);
}

const ekv_family ekv_page_families[] = {
    {"box",
     600,
     check_box,
     {EKV_NAMES("dtype", ekv_dtypes), EKV_NUMBERS("dim", dims), EKV_NUMBERS("keys", page_tokens),
      EKV_NAMES("content", contents), EKV_NAMES("memory", ekv_placements)}},
    {"moments",
     600,
     check_moments,
     {EKV_NAMES("dtype", ekv_dtypes), EKV_NUMBERS("dim", dims), EKV_NUMBERS("keys", page_tokens),
      EKV_NAMES("content", contents), EKV_NAMES("memory", ekv_placements)}},
    {"norms",
     600,
     check_norms,
     {EKV_NAMES("dtype", ekv_dtypes), EKV_NUMBERS("dim", dims), EKV_NUMBERS("keys", page_tokens),
      EKV_NAMES("content", contents), EKV_NAMES("memory", ekv_placements)}},
    {"bound",
     800,
     check_bound,
     {EKV_NAMES("dtype", ekv_dtypes), EKV_NUMBERS("dim", dims), EKV_NUMBERS("pages", page_counts),
      EKV_NAMES("content", contents), EKV_NAMES("slope", slopes), EKV_NAMES("memory", ekv_placements)}},
    {"gaussian",
     800,
     check_gaussian,
     {EKV_NAMES("dtype", moment_names), EKV_NUMBERS("dim", dims), EKV_NUMBERS("pages", page_counts),
      EKV_NAMES("content", moment_contents), EKV_NAMES("slope", slopes), EKV_NAMES("memory", ekv_placements)}},
    {"mass",
     300,
     check_mass,
     {EKV_NUMBERS("beta", betas), EKV_NUMBERS("pages", mass_counts), EKV_NAMES("content", mass_contents),
      EKV_NAMES("memory", ekv_placements)}},
    {0}};
