/*
 * Conformance of the kernels that work on rows: load_row, store_row, score, accumulate.
 *
 * u = 2^-24 is the largest relative error of one float operation.  Bounds of first order in u are multiplied by SECOND, which
 * covers the higher orders of at most a few thousand operations.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/conform.h"

#include <math.h>
#include <string.h>

#define SECOND 1.001

static const int dims[] = {1,  2,  3,  7,  8,   9,   15,  16,  17,  24,  31,  32,  33,  40,  63,   64,  65,
                           80, 95, 96, 97, 127, 128, 129, 160, 192, 255, 256, 257, 512, 576, 1000, 1024};

/* ---- load_row: a conversion and one product, both exact until the one rounding of the product ---- */

static const char *const load_contents[] = {"normal", "every exponent", "infinity and NaN"};
static const char *const load_factors[] = {"1", "0.09", "-3e-20", "2^100"};

/* An element of any size; the content decides how wild. */
static double wild(ekv_check *c, int content, ekv_dtype dtype) {
    const double x = ekv_normal(c);
    if (content == 0) return x;
    if (content == 2 && ekv_below(c, 4) == 0) return ekv_below(c, 2) ? (double)NAN : copysign((double)INFINITY, x);
    const int low = dtype == EKV_F16 ? -26 : -150, high = dtype == EKV_F16 ? 16 : 128;
    return ldexp(x, low + ekv_below(c, high - low));
}

static void check_load_row(ekv_check *c) {
    static const float factors[] = {1.0f, 0.09f, -3e-20f, 0x1p100f};
    const ekv_dtype dtype = (ekv_dtype)c->value[0];
    const int dim = c->value[1], padded = (dim + 31) / 32 * 32;
    c->unsupported = !c->table->load_row[dtype];
    if (c->unsupported) return;
    void *row = ekv_room_in(c, "row", dim, ekv_element_bytes(dtype));
    ekv_load_row_args a = {row, dim, factors[c->value[3]], ekv_room_out(c, "out", padded, sizeof(float))};
    if (c->failed) return;
    for (int d = 0; d < dim; d++) ekv_put(dtype, row, d, wild(c, c->value[2], dtype));
    ekv_seal(c);
    c->table->load_row[dtype](&a);
    for (int d = 0; d < dim; d++) /* the product of two floats is exact in double: one rounding, as in the kernel */
        ekv_expect(c, "out", d, (double)a.out[d], (double)(float)(ekv_reference_load(dtype, row, d) * (double)a.factor), 0.0);
    for (int d = dim; d < padded; d++) ekv_expect(c, "out, padding", d, (double)a.out[d], 0.0, 0.0);
}

/* ---- store_row: to nearest even, exactly ---- */

static const char *const store_contents[] = {"normal", "every exponent", "infinity and NaN", "half way between neighbours",
                                             "around the largest number"};

static float to_store(ekv_check *c, int content, ekv_dtype dtype) {
    const double largest = dtype == EKV_F16 ? 65504.0 : 3.4028234663852886e38;
    if (content < 3) return (float)wild(c, content, dtype);
    if (content == 3) {
        unsigned char stored[4];
        ekv_put(dtype, stored, 0, wild(c, ekv_below(c, 2), dtype));
        const double x = ekv_reference_load(dtype, stored, 0);
        const float middle = (float)(x + copysign(ekv_half_ulp(dtype, x), x));
        const int side = ekv_below(c, 3); /* the middle itself, or the float next to it */
        return side == 0 ? middle : nextafterf(middle, side == 1 ? INFINITY : -INFINITY);
    }
    return (float)(largest * (1.0 + 0x1p-12 * (double)(ekv_below(c, 17) - 8)));
}

static void check_store_row(ekv_check *c) {
    const ekv_dtype dtype = (ekv_dtype)c->value[0];
    const int dim = c->value[1];
    c->unsupported = !c->table->store_row[dtype];
    if (c->unsupported) return;
    float *x = ekv_room_in(c, "x", dim, sizeof *x);
    ekv_store_row_args a = {x, dim, ekv_room_out(c, "row", dim, ekv_element_bytes(dtype))};
    if (c->failed) return;
    for (int d = 0; d < dim; d++) x[d] = to_store(c, c->value[2], dtype);
    ekv_seal(c);
    c->table->store_row[dtype](&a);
    for (int d = 0; d < dim; d++) {
        unsigned char expected[4];
        ekv_put(dtype, expected, 0, (double)x[d]);
        const double got = ekv_reference_load(dtype, a.row, d), right = ekv_reference_load(dtype, expected, 0);
        ekv_expect(c, "row", d, got, right, 0.0);
        ekv_expect_true(c, "row: the sign of zero", d, isnan(right) || !signbit(got) == !signbit(right));
    }
}

/* ---- score ----
 *
 * Each product carries u, and passes ceil(dim / 32) - 1 additions in its lane (the first is to zero, exact) and 5 in the tree:
 * in sum (ceil(dim / 32) + 5) u of A = sum |q_d k_d|.  The position term is a whole number below 2^24 times the slope: u, and
 * the addition another u of the result.  Products below 2^-126 lose up to 2^-150 each. */

static const char *const score_contents[] = {"normal",        "equal keys",   "cancelling", "1e15 times the rest",
                                             "infinite keys", "NaN in a key", "subnormal"};
static const char *const slopes[] = {"none", "negative", "positive", "some"};
static const int score_rows[] = {1, 2, 3, 4, 5, 7, 8, 9, 16, 32};
static const int score_keys[] = {1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 57, 63, 64};

enum { SCORE_NORMAL, SCORE_EQUAL, SCORE_CANCEL, SCORE_HUGE, SCORE_INFINITE, SCORE_NAN, SCORE_SUBNORMAL };

static void fill_key(ekv_check *c, ekv_dtype dtype, void *key, const void *first, int dim, int content, int i) {
    const double unit = dtype == EKV_F16 ? 0x1p-22 : 0x1p-135;
    for (int d = 0; d < dim; d++) {
        double x = ekv_normal(c);
        if (content == SCORE_EQUAL && i % 3 != 1 && first) x = ekv_reference_load(dtype, first, d);
        if (content == SCORE_CANCEL) x = (d % 2 ? -1.0 : 1.0) * (100.0 + 0.01 * x);
        if (content == SCORE_HUGE && d % 5 == 0) x *= dtype == EKV_F16 ? 1e4 : 1e15;
        if (content == SCORE_SUBNORMAL) x *= unit;
        ekv_put(dtype, key, d, x);
    }
    if (content == SCORE_INFINITE && i % 2 == 0)
        ekv_put(dtype, key, ekv_below(c, dim), i % 4 ? (double)INFINITY : -(double)INFINITY);
    if (content == SCORE_NAN && i % 4 == 1) ekv_put(dtype, key, ekv_below(c, dim), (double)NAN);
}

/* Fills the arguments of a call but z. */
static void make_score(ekv_check *c, ekv_dtype dtype, ekv_score_args *a) {
    const int dim = c->value[1], rows = c->value[2], n = c->value[3], content = c->value[4], padded = (dim + 31) / 32 * 32;
    const float **q = ekv_room_in(c, "query pointers", rows, sizeof *q);
    float *slope = ekv_room_in(c, "slope", rows, sizeof *slope);
    int32_t *q_token = ekv_room_in(c, "q_token", rows, sizeof *q_token),
            *token = ekv_room_in(c, "token", EKV_TILE, sizeof *token);
    const void **keys = ekv_rows(c, "key", n, dim, dtype);
    for (int r = 0; !c->failed && r < rows; r++) {
        float *row = ekv_room_in(c, "query", padded, sizeof *row);
        if (!row) return;
        for (int d = 0; d < padded; d++) row[d] = d < dim ? (float)ekv_normal(c) : 0.0f;
        if (content == SCORE_CANCEL)
            for (int d = 0; d < dim; d++) row[d] = 1.0f + 0.001f * row[d];
        q[r] = row;
        const bool sloped = c->value[5] == 1 || c->value[5] == 2 || (c->value[5] == 3 && r % 2);
        slope[r] = !sloped ? 0.0f : (c->value[5] == 1 ? -1.0f : 1.0f) * (float)ekv_uniform(c, 0.001, 1.0);
        q_token[r] = 100000 + ekv_below(c, 1000);
    }
    if (c->failed) return;
    for (int i = 0; i < EKV_TILE; i++) token[i] = i < n ? ekv_below(c, 100000) : (int32_t)0x7fffffff;
    for (int i = 0; i < n; i++) fill_key(c, dtype, (void *)(uintptr_t)keys[i], i ? keys[0] : NULL, dim, content, i);
    a->q = q;
    a->slope = slope;
    a->q_token = q_token;
    a->rows = rows;
    a->keys = keys;
    a->token = token;
    a->n = n;
    a->dim = dim;
    a->ahead = keys;
    a->ahead_bytes = dim * (int)ekv_element_bytes(dtype);
}

static void expect_score(ekv_check *c, ekv_dtype dtype, const ekv_score_args *a, int r, int i) {
    double dot = 0.0, size = 0.0;
    for (int d = 0; d < a->dim; d++) {
        const double term = (double)a->q[r][d] * ekv_reference_load(dtype, a->keys[i], d);
        dot += term;
        size += fabs(term);
    }
    const double bias = a->slope[r] == 0.0f ? 0.0 : (double)a->slope[r] * (double)(a->token[i] - a->q_token[r]);
    const double steps = (double)((a->dim + 31) / 32 + 5);
    const double tolerance = SECOND * (steps * EKV_U * size + (bias == 0.0 ? 0.0 : EKV_U * (fabs(bias) + fabs(dot + bias)))) +
                             (double)a->dim * 0x1p-149;
    ekv_expect(c, "z", (int64_t)r * EKV_TILE + i, (double)a->z[(size_t)r * EKV_TILE + i], dot + bias, tolerance);
}

static void check_score(ekv_check *c) {
    const ekv_dtype dtype = (ekv_dtype)c->value[0];
    ekv_score_args a;
    c->unsupported = !c->table->score[dtype];
    if (c->unsupported) return;
    make_score(c, dtype, &a);
    a.z = ekv_room_out(c, "z", (int64_t)c->value[2] * EKV_TILE, sizeof(float));
    float *alone = ekv_room_out(c, "z of one row and key", EKV_TILE, sizeof(float));
    if (c->failed) return;
    ekv_seal(c);
    c->table->score[dtype](&a);
    for (int r = 0; r < a.rows; r++)
        for (int i = 0; i < a.n; i++) expect_score(c, dtype, &a, r, i);
    /* A score has the same bits whatever else is in the tile. */
    for (int trial = 0; trial < 4 && !c->failed; trial++) {
        const int r = ekv_below(c, a.rows), i = ekv_below(c, a.n);
        const float together = a.z[(size_t)r * EKV_TILE + i];
        int32_t token[EKV_TILE] = {a.token[i]};
        ekv_score_args one = {a.q + r, a.slope + r, a.q_token + r, 1, a.keys + i, token, 1, a.dim, alone, NULL, 0};
        c->table->score[dtype](&one);
        ekv_expect(c, "z of one row and one key alone", (int64_t)r * EKV_TILE + i, (double)alone[0], (double)together, 0.0);
    }
}

/* ---- accumulate ----
 *
 * Of m weights that are not zero, a term carries u of its product and of at most m - 1 additions (the first is exact); adding
 * the sum to the running one costs u of the result. */

static const char *const value_contents[] = {"normal", "NaN where the weight is 0", "NaN in a value", "large", "all weights 0"};
static const int value_rows[] = {1, 2, 3, 7, 8, 31, 64, 127, 128};

enum { VALUES_NORMAL, VALUES_SKIPPED, VALUES_NAN, VALUES_LARGE, VALUES_NONE };

static const int weight_rows[] = {1, 2, 3, 5, 8, 17};

static void check_accumulate(ekv_check *c) {
    const ekv_dtype dtype = (ekv_dtype)c->value[0];
    const int dim = c->value[1], n = c->value[2], content = c->value[3], rows = c->value[4];
    c->unsupported = !c->table->accumulate[dtype];
    if (c->unsupported) return;
    const void **values = ekv_rows(c, "value", n, dim, dtype);
    const float **weights = ekv_room_in(c, "weight pointers", rows, sizeof *weights);
    float **sums = ekv_room_in(c, "sum pointers", rows, sizeof *sums), *weight[17] = {0};
    double *before = ekv_scratch(c, (size_t)rows * EKV_MAX_DIM * sizeof *before);
    for (int r = 0; r < rows && !c->failed; r++) {
        weights[r] = weight[r] = ekv_room_in(c, "weight", n, sizeof **weight);
        sums[r] = ekv_room_inout(c, "sum", dim, sizeof **sums);
    }
    if (c->failed || !before) return;
    for (int i = 0; i < n; i++) {
        bool used = false;
        for (int r = 0; r < rows; r++) {
            const bool skipped = content == VALUES_NONE || (content == VALUES_SKIPPED && ekv_below(c, 2));
            weight[r][i] = skipped ? 0.0f : (float)ekv_uniform(c, 1e-6, 1.0);
            used |= !skipped;
        }
        for (int d = 0; d < dim; d++) {
            double x = !used ? (double)NAN : ekv_normal(c);
            if (content == VALUES_LARGE) x *= dtype == EKV_F16 ? 1e4 : 1e30;
            if (content == VALUES_NAN && i == n / 2 && d == dim / 2) x = (double)NAN;
            ekv_put(dtype, (void *)(uintptr_t)values[i], d, x);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d++) before[r * EKV_MAX_DIM + d] = (double)(sums[r][d] = (float)ekv_normal(c));
    ekv_seal(c);
    ekv_accumulate_args a = {values, weights, rows, n, dim, sums, values, dim * (int)ekv_element_bytes(dtype)};
    c->table->accumulate[dtype](&a);
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d++) {
            double total = 0.0, size = 0.0, used = 0.0;
            for (int i = 0; i < n; i++) {
                if (weight[r][i] == 0.0f) continue;
                const double term = (double)weight[r][i] * ekv_reference_load(dtype, values[i], d);
                total += term;
                size += fabs(term);
                used++;
            }
            const double first = before[r * EKV_MAX_DIM + d];
            ekv_expect(c, "sum", (int64_t)r * dim + d, (double)sums[r][d], first + total,
                       SECOND * EKV_U * (used * size + fabs(first + total)));
        }
}

const ekv_family ekv_row_families[] = {
    {"load_row",
     600,
     check_load_row,
     {EKV_NAMES("dtype", ekv_dtypes), EKV_NUMBERS("dim", dims), EKV_NAMES("content", load_contents),
      EKV_NAMES("factor", load_factors), EKV_NAMES("memory", ekv_placements)}},
    {"store_row",
     600,
     check_store_row,
     {EKV_NAMES("dtype", ekv_dtypes), EKV_NUMBERS("dim", dims), EKV_NAMES("content", store_contents),
      EKV_NAMES("memory", ekv_placements)}},
    {"score",
     1500,
     check_score,
     {EKV_NAMES("dtype", ekv_dtypes), EKV_NUMBERS("dim", dims), EKV_NUMBERS("rows", score_rows),
      EKV_NUMBERS("keys", score_keys), EKV_NAMES("content", score_contents), EKV_NAMES("slope", slopes),
      EKV_NAMES("memory", ekv_placements)}},
    {"accumulate",
     800,
     check_accumulate,
     {EKV_NAMES("dtype", ekv_dtypes), EKV_NUMBERS("dim", dims), EKV_NUMBERS("values", value_rows),
      EKV_NAMES("content", value_contents), EKV_NUMBERS("rows", weight_rows), EKV_NAMES("memory", ekv_placements)}},
    {0}};
