/*
 * Bounds read from sketches against exact arithmetic: millions of (token, query) pairs with keys and queries of every kind,
 * among them cancelling sums, huge and tiny magnitudes, subnormals, and bases that were found from other keys.
 *
 * A token must not be ruled out at any cut below its score.  "Its score" is the larger of the f32 score that the kernel returns
 * and the exact one: products of two floats are exact in double, and are summed in two doubles (an error below 2^-100 of the
 * terms).  The last test removes one part of the bound after the other and expects to see that.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch/step.h"
#include "harness.h"

enum { ROWS = 16, MAX_TOKENS = 2800 };

typedef enum kind {
    NORMAL,
    CANCELLING, /* a large vector with alternating signs, and little besides */
    CONSTANT,   /* all keys the same */
    CHANNELS,   /* a few channels fifty times larger, a few constant, a few zero */
    LOW_RANK,
    ONE_HOT,
    DRIFTING,
    HUGE_KEYS, /* up to where bases are found */
    TINY,      /* f16: subnormal; else 1e-30 */
    SUBNORMAL, /* of f32; f16 and bf16 take their own */
    EXTREMES,  /* the ends of the type's range now and then */
    MIXED,     /* magnitudes from 1e-6 to 1e4, token by token */
    KINDS
} kind;

static const char *const kind_names[KINDS] = {"normal",   "cancelling", "constant", "channels",  "low rank", "one-hot",
                                              "drifting", "huge",       "tiny",     "subnormal", "extremes", "mixed"};

/* One KV head of one sequence, and ROWS queries. */
typedef struct bed {
    ekv_dtype dtype;
    int32_t dim, n, page_size;
    guard keys, values;
    ekv_kv kv;
    ekv_index *index;
    ekv_step step;
    ekv_item item;
    ekv_row row[ROWS];
    float *q; /* [ROWS][padded] */
} bed;

static double largest_of(ekv_dtype dtype) { return dtype == EKV_F16 ? 65504.0 : dtype == EKV_BF16 ? 3.3e38 : 3.4e38; }

static void fill_keys(bed *b, kind keys, rng *r) {
    const double most = largest_of(b->dtype);
    double factor[4][EKV_MAX_DIM];
    for (int i = 0; i < 4; i++)
        for (int32_t d = 0; d < b->dim; d++) factor[i][d] = rng_normal(r);
    for (int32_t t = 0; t < b->n; t++) {
        const double size = pow(10.0, rng_range(r, -6.0, 4.0)), u = rng_normal(r), v = rng_normal(r);
        const int32_t hot = (int32_t)rng_between(r, 0, b->dim - 1);
        for (int32_t d = 0; d < b->dim; d++) {
            const double x = rng_normal(r);
            double y = x;
            if (keys == CANCELLING) y = (d % 2 ? -1000.0 : 1000.0) * fabs(factor[0][d]) + 1e-3 * x;
            if (keys == CONSTANT) y = 100.0 * factor[0][d];
            if (keys == CHANNELS) y = d % 13 == 3 ? 50.0 * x : d % 5 == 0 ? 7.25 : d % 7 == 1 ? 0.0 : x;
            if (keys == LOW_RANK) y = 3.0 * u * factor[0][d] + v * factor[1][d];
            if (keys == ONE_HOT) y = d == hot ? 10.0 * u : 0.0;
            if (keys == DRIFTING) y = x + 0.01 * t * factor[0][d];
            if (keys == HUGE_KEYS) y = x * (b->dtype == EKV_F16 ? 1e4 : 1e16);
            if (keys == TINY) y = x * (b->dtype == EKV_F16 ? 1e-6 : 1e-30);
            if (keys == SUBNORMAL) y = x * (b->dtype == EKV_F16 ? 2e-7 : 1e-40);
            if (keys == EXTREMES && (t + d) % 97 == 0) y = x < 0.0 ? -most : most;
            if (keys == MIXED) y = x * size;
            dtype_store(b->dtype, b->keys.data, (int64_t)t * b->dim + d, (float)fmax(-most, fmin(most, y)));
        }
    }
}

/* The queries: plain, large, small, along keys, along what is left of keys without their mean, along one channel, cancelling.
 */
static void fill_queries(bed *b, rng *r) {
    const size_t padded = ekv_padded(b->dim);
    double mean[EKV_MAX_DIM] = {0.0};
    for (int32_t t = 0; t < b->n; t++)
        for (int32_t d = 0; d < b->dim; d++) mean[d] += dtype_load(b->dtype, b->keys.data, (int64_t)t * b->dim + d) / b->n;
    memset(b->q, 0, ROWS * padded * sizeof *b->q);
    for (int i = 0; i < ROWS; i++) {
        float *q = b->q + (size_t)i * padded;
        const int32_t t = (int32_t)rng_between(r, 0, b->n - 1), hot = (int32_t)rng_between(r, 0, b->dim - 1);
        double most = 0.0, x[EKV_MAX_DIM];
        for (int32_t d = 0; d < b->dim; d++) {
            const double key = dtype_load(b->dtype, b->keys.data, (int64_t)t * b->dim + d);
            x[d] = i < 6     ? rng_normal(r)
                   : i < 8   ? key
                   : i < 12  ? key - mean[d]
                   : i == 12 ? (d == hot)
                   : i == 13 ? (d % 2 ? -1.0 : 1.0)
                             : rng_normal(r) * pow(10.0, rng_range(r, -4.0, 4.0));
            most = fmax(most, fabs(x[d]));
        }
        const double size = i == 1   ? 1e30
                            : i == 2 ? 1e-30
                            : i == 3 ? 1e-42
                            : i == 4 ? 1e18
                                     : pow(10.0, rng_range(r, -2.0, 2.0));
        for (int32_t d = 0; d < b->dim; d++) q[d] = (float)(most > 0.0 ? x[d] / most * size : 0.0);
        b->row[i].slope = i % 5 == 4 ? (float)rng_range(r, -0.1, 0.1) : 0.0f;
    }
}

static void bed_make(bed *b, ekv_context *context, ekv_dtype dtype, int32_t dim, int32_t n, int32_t page_size, kind keys,
                     rng *r) {
    memset(b, 0, sizeof *b);
    b->dtype = dtype;
    b->dim = dim;
    b->n = n;
    b->page_size = page_size;
    const int64_t pages = (n + page_size - 1) / page_size, slots = pages * page_size;
    b->keys = guard_alloc((size_t)(slots * dim) * dtype_size(dtype));
    b->values = guard_alloc((size_t)slots * dtype_size(dtype));
    dtype_store_nan(dtype, b->keys.data, slots * dim);
    dtype_store_nan(dtype, b->values.data, slots);
    fill_keys(b, keys, r);
    b->kv = ekv_kv_default();
    b->kv.dtype = dtype;
    b->kv.kv_heads = 1;
    b->kv.k_dim = dim;
    b->kv.v_dim = 1;
    b->kv.page_size = page_size;
    b->kv.blocks = pages;
    b->kv.k = b->keys.data;
    b->kv.v = b->values.data;
    b->kv.k_block_stride = (int64_t)page_size * dim;
    b->kv.k_token_stride = b->kv.k_head_stride = dim;
    b->kv.v_block_stride = page_size;
    b->kv.v_token_stride = b->kv.v_head_stride = 1;
    ekv_index_params params = ekv_index_params_default();
    params.dtype = dtype;
    params.kv_heads = params.v_dim = 1;
    params.k_dim = dim;
    params.page_size = page_size;
    params.blocks = pages;
    params.statistics = EKV_STATISTICS_SKETCH;
    EXPECT_OK(context, ekv_index_create(context, &params, NULL, 0, &b->index));

    const size_t padded = ekv_padded(dim), stretches = (size_t)ekv_index_stretches(b->index);
    b->q = aligned_alloc(64, ROWS * padded * sizeof *b->q);
    fill_queries(b, r);
    b->step = (ekv_step){.context = context, .kernels = context->kernels, .kv = b->kv, .index = b->index, .group = ROWS};
    b->item = (ekv_item){.rows = ROWS, .n = n, .pages = (int32_t)pages, .spans = 1, .row = b->row};
    for (int i = 0; i < ROWS; i++) {
        ekv_row *row = &b->row[i];
        row->n = n;
        row->q_token = n - 1;
        row->pages = (int32_t)pages;
        row->alpha = 1.5;
        row->q = b->q + (size_t)i * padded;
        row->cut = -INFINITY;
        row->bound = malloc((size_t)pages * sizeof(float));
        for (int64_t p = 0; p < pages; p++) row->bound[p] = INFINITY;
        row->table = calloc(1, sizeof *row->table);
        row->center = calloc(stretches, sizeof *row->center);
        row->start = calloc(stretches, sizeof *row->start);
        row->sum = calloc((size_t)slots, sizeof *row->sum);
    }
}

static void bed_free(bed *b) {
    for (int i = 0; i < ROWS; i++) {
        free(b->row[i].bound);
        free(b->row[i].table);
        free(b->row[i].center);
        free(b->row[i].start);
        free(b->row[i].sum);
    }
    free(b->q);
    ekv_index_destroy(b->index);
    guard_free(&b->keys);
    guard_free(&b->values);
}

static void bed_update(bed *b, ekv_context *context) {
    EXPECT_OK(context, ekv_index_update(context, b->index, &b->kv, NULL, 0, b->n, b->n));
}

/* A basis that was found from normal keys of that size. */
static void load_other_basis(bed *b, ekv_context *context, rng *r) {
    bed other;
    bed_make(&other, context, EKV_F32, b->dim, 2048, 16, NORMAL, r);
    bed_update(&other, context);
    const size_t bytes = ekv_index_basis_bytes(other.index);
    guard data = guard_alloc(bytes);
    EXPECT_OK(context, ekv_index_save_basis(context, other.index, data.data, bytes));
    EXPECT_OK(context, ekv_index_load_basis(context, b->index, data.data, bytes));
    guard_free(&data);
    bed_free(&other);
}

/* high + low += x, exactly. */
static void add(double *high, double *low, double x) {
    const double sum = *high + x, part = sum - *high;
    *low += (*high - (sum - part)) + (x - part);
    *high = sum;
}

/* The largest double below the exact score and below the f32 one. */
static double cut_below(const bed *b, const ekv_row *row, int32_t token, float score) {
    double high = 0.0, low = 0.0;
    for (int32_t d = 0; d < b->dim; d++)
        add(&high, &low, (double)row->q[d] * dtype_load(b->dtype, b->keys.data, (int64_t)token * b->dim + d));
    add(&high, &low, (double)row->slope * (token - row->q_token));
    const double exact = high + low, rest = (high - exact) + low;
    const double below = rest > 0.0 ? exact : nextafter(exact, -(double)INFINITY);
    if (!isfinite(score)) return FLT_MAX; /* full attention would see it: it must be read at any cut */
    return fmax(below, nextafter((double)score, -(double)INFINITY));
}

static void scores_of(const bed *b, int32_t token, float z[ROWS]) {
    float tile[ROWS * EKV_TILE], slope[ROWS];
    const float *q[ROWS];
    int32_t q_token[ROWS], tokens[EKV_TILE] = {token};
    const void *key = (const char *)b->keys.data + (size_t)token * (size_t)b->dim * dtype_size(b->dtype);
    for (int i = 0; i < ROWS; i++) {
        q[i] = b->row[i].q;
        slope[i] = b->row[i].slope;
        q_token[i] = b->row[i].q_token;
    }
    ekv_score_args a = {q, slope, q_token, ROWS, &key, tokens, 1, b->dim, tile, NULL, 0};
    b->step.kernels->score[b->dtype](&a);
    for (int i = 0; i < ROWS; i++) z[i] = tile[i * EKV_TILE];
}

typedef struct tally {
    int64_t pairs, unsound;
    int64_t close;      /* ruled out at a cut of a quarter of |q| |k| above the score: bounds that say something */
    int32_t row, token; /* of the first unsound one */
    double cut;
} tally;

/* Every sketched token and every query, by the sums that stand in the rows. */
static void count(const bed *b, tally *t) {
    for (int32_t token = 0; token < b->n; token++) {
        if (b->index->sketched[token / b->page_size] <= token % b->page_size) continue;
        float z[ROWS];
        double key = 0.0;
        scores_of(b, token, z);
        for (int32_t d = 0; d < b->dim; d++) {
            const double x = dtype_load(b->dtype, b->keys.data, (int64_t)token * b->dim + d);
            key += x * x;
        }
        for (int i = 0; i < ROWS; i++) {
            const ekv_row *row = &b->row[i];
            const double cut = cut_below(b, row, token, z[i]);
            double query = 0.0;
            for (int32_t d = 0; d < b->dim; d++) query += (double)row->q[d] * (double)row->q[d];
            t->pairs++;
            t->close += ekv_certify_rules_out(row, token, cut + 0.25 * sqrt(query) * sqrt(key));
            if (!ekv_certify_rules_out(row, token, cut)) continue;
            if (t->unsound++ == 0) {
                t->row = i;
                t->token = token;
                t->cut = cut;
            }
        }
    }
}

static const int32_t dims[] = {64, 128, 64, 33, 64, 256, 8, 96, 64, 1}, page_sizes[] = {16, 64, 48, 256};

START_TEST(no_bound_is_below_a_score) {
    backend_set backends;
    backends_open(&backends, 1);
    tally all = {0};
    int64_t without = 0, cases = 0;
    FOR_CASES(index, 96) {
        rng r = case_begin("no_bound_is_below_a_score", index);
        const kind keys = (kind)(index % KINDS);
        ekv_context *context = backends.contexts[index / KINDS % (backends.count - 1)];
        if (backend_is_reference(&backends, (int)(index / KINDS % (backends.count - 1))))
            context = backends.contexts[backends.count - 1];
        const ekv_dtype dtype = (ekv_dtype)rng_between(&r, 0, 2);
        const int32_t n = (int32_t)rng_between(&r, 2048, MAX_TOKENS), page_size = RNG_PICK(&r, page_sizes),
                      dim = RNG_PICK(&r, dims);
        const bool other = rng_chance(&r, 0.3) || (keys == EXTREMES && dtype != EKV_F16);
        case_note("%s, %s, dim %d, %d keys, %s, page size %d, %s basis", ekv_context_backend(context), ekv_dtype_name(dtype),
                  (int)dim, (int)n, kind_names[keys], (int)page_size, other ? "another's" : "its own");
        bed b;
        tally t = {0};
        bed_make(&b, context, dtype, dim, n, page_size, keys, &r);
        if (other) load_other_basis(&b, context, &r);
        bed_update(&b, context);
        cases++;
        without += !b.index->bases[0].codes;
        if (b.index->bases[0].codes) {
            ekv_certify_tables(&b.step, &b.item);
            ekv_certify_sums(&b.step, &b.item);
            count(&b, &t);
            EXPECT(t.unsound == 0,
                   "%lld of %lld bounds are too low, first for query %d, token %d: ruled out at %.17g, below its score",
                   (long long)t.unsound, (long long)t.pairs, (int)t.row, (int)t.token, t.cut);
        }
        all.pairs += t.pairs;
        all.close += t.close;
        bed_free(&b);
    }
    printf("%lld bounds in %lld cases, %lld without a basis, %.3f of them within |q| |k| / 4 of the score\n",
           (long long)all.pairs, (long long)cases, (long long)without, all.pairs ? (double)all.close / (double)all.pairs : 0.0);
    EXPECT(without * 10 <= cases || cases < 20, "%lld of %lld cases had no basis", (long long)without, (long long)cases);
    EXPECT((double)all.close >= 0.3 * (double)all.pairs || cases < 20, "bounds that say nothing would pass this test, too");
    backends_close(&backends);
}
END_TEST

/* A bound with one part missing or wrong is found out. */
START_TEST(wrong_bounds_are_noticed) {
    static const char *const parts[] = {"a tenth of the norms", "centroids of the other sign",
                                        "the part of q outside of the axes", "no slack for rounding",
                                        "a center that is off by 1e-5"};
    static const kind kinds[] = {NORMAL, NORMAL, NORMAL, CANCELLING, CANCELLING};
    backend_set backends;
    backends_open(&backends, 1);
    ekv_context *context = backends.contexts[0];
    for (int part = 0; part < 5; part++) {
        rng r = case_begin("wrong_bounds_are_noticed", part);
        case_note("%s", parts[part]);
        bed b;
        tally before = {0}, after = {0};
        bed_make(&b, context, EKV_F32, part == 2 ? 128 : 64, 2300, 16, kinds[part], &r);
        for (int32_t t = 0; part >= 3 && t < b.n; t++) /* nothing but rounding is left */
            memcpy((float *)b.keys.data + (size_t)t * 64, b.keys.data, 64 * sizeof(float));
        bed_update(&b, context);
        ekv_basis *basis = &b.index->bases[0];
        ekv_certify_tables(&b.step, &b.item);
        ekv_certify_sums(&b.step, &b.item);
        count(&b, &before);
        EXPECT(before.pairs == (int64_t)ROWS * b.n && before.unsound == 0, "%lld of %lld unsound", (long long)before.unsound,
               (long long)before.pairs);
        if (part == 0)
            for (int i = 0; i < EKV_SKETCH_NORMS * 16; i++) basis->level[i / 16][i % 16] *= 0.1f;
        for (int c = 0; part == 1 && c < basis->codes; c++) basis->unit[c] = -basis->unit[c];
        if (part == 2) basis->skew = -1.0f;
        ekv_certify_tables(&b.step, &b.item);
        for (int i = 0; part >= 3 && i < ROWS; i++)
            for (int64_t s = 0; s * b.index->stretch < b.item.pages; s++) {
                const float *center = ekv_index_center(b.index, 0, s);
                double dot = 0.0, size = 0.0;
                for (int32_t d = 0; d < b.dim; d++) {
                    dot += (double)b.row[i].q[d] * (double)center[d];
                    size += fabs((double)b.row[i].q[d] * (double)center[d]);
                }
                b.row[i].center[s] = part == 3 ? dot : b.row[i].center[s] - 1e-5 * size;
                b.row[i].table->origin =
                    b.row[i].table->base + b.row[i].center[s]; /* nothing counts as lying below it; centers are equal */
            }
        ekv_certify_sums(&b.step, &b.item);
        count(&b, &after);
        printf("%s: %lld of %lld bounds are too low\n", parts[part], (long long)after.unsound, (long long)after.pairs);
        EXPECT(after.unsound > 0, "nothing was noticed");
        bed_free(&b);
    }
    backends_close(&backends);
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {TEST_ENTRY(no_bound_is_below_a_score), TEST_ENTRY(wrong_bounds_are_noticed)};
    return HARNESS_MAIN(argv[0], tests);
}
