/*
 * ekv_decode on every backend against the reference: the conformance grid (layouts, types, dims, groups, lengths, alphas,
 * slopes, policies), many query tokens against one at a time, and what NaN may and may not reach.  Which pages the sparse
 * policies choose is test_select's matter: here the pages that the backend selected are handed to the reference.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t all_statistics = EKV_STATISTICS_BOX | EKV_STATISTICS_GAUSSIAN | EKV_STATISTICS_NORMS;

/* ---- The grid --------------------------------------------------------------------------------------------------------- */

enum { MAX_CHECKED = 64 };

/* The oracles of the rows that a case checks, kept while the backends select the same pages. */
typedef struct checked_rows {
    int count;
    int64_t rows[MAX_CHECKED];
    oracle oracles[MAX_CHECKED];
    uint8_t *masks[MAX_CHECKED];
} checked_rows;

/* All rows if they are cheap, else a random handful. */
static void choose_rows(checked_rows *c, const problem *p, rng *r) {
    double work = 3e6;
    memset(c, 0, sizeof *c);
    const int64_t first = p->rows > 0 ? rng_between(r, 0, p->rows - 1) : 0;
    for (int64_t i = 0; i < p->rows && c->count < MAX_CHECKED && (work > 0 || c->count < 2); i++) {
        const int64_t step = p->rows > MAX_CHECKED && p->rows % 7 ? 7 : 1; /* spreads over tokens and heads */
        c->rows[c->count] = (first + i * step) % p->rows;
        int32_t b;
        int64_t n;
        problem_locate(p, (int32_t)(c->rows[c->count++] / p->q_heads), &b, &n);
        work -= (double)n * (p->shape.k_dim * 4 + p->shape.v_dim * 2);
    }
}

static void refresh_oracle(checked_rows *c, int i, const problem *p, const uint8_t *mask) {
    const size_t size = (size_t)problem_stride(p);
    if (c->masks[i] != NULL && memcmp(c->masks[i], mask, size) == 0) {
        return;
    }
    if (c->masks[i] != NULL) {
        oracle_free(&c->oracles[i]);
    }
    free(c->masks[i]);
    c->masks[i] = malloc(size);
    memcpy(c->masks[i], mask, size);
    oracle_make(&c->oracles[i], p, (int32_t)(c->rows[i] / p->q_heads), (int32_t)(c->rows[i] % p->q_heads), mask);
}

static void free_rows(checked_rows *c) {
    for (int i = 0; i < c->count; i++) {
        if (c->masks[i] != NULL) {
            oracle_free(&c->oracles[i]);
            free(c->masks[i]);
        }
    }
}

/* Bytes of a sequence and KV head, summed over the entries that may carry them; and zeros in those that may not. */
typedef struct group_sums {
    int64_t group_pages, total_pages, statistics, keys, values, dense, support;
} group_sums;

static group_sums sum_group(const problem *p, int32_t b, int32_t kv_head) {
    const ekv_report *report = p->report.data;
    const int32_t *start = p->q_start.data;
    group_sums sum = {0, 0, 0, 0, 0, 0, 0};
    for (int64_t t = start[b]; t < start[b + 1]; t++) {
        for (int32_t g = 0; g < p->shape.group; g++) {
            const ekv_report *e = &report[t * p->q_heads + kv_head * p->shape.group + g];
            const bool zero = e->group_pages == 0 && e->total_pages == 0 && e->bytes_statistics == 0 && e->bytes_keys == 0 &&
                              e->bytes_values == 0 && e->bytes_dense == 0;
            EXPECT(g == 0 || zero, "entry of token %lld, head %d of the group carries what belongs to the first", (long long)t,
                   g);
            sum.group_pages += e->group_pages;
            sum.total_pages += e->total_pages;
            sum.statistics += e->bytes_statistics;
            sum.keys += e->bytes_keys;
            sum.values += e->bytes_values;
            sum.dense += e->bytes_dense;
            sum.support += e->support;
        }
    }
    return sum;
}

static void check_group(const problem *p, const uint8_t *selected, int32_t b, int32_t kv_head) {
    const shape *s = &p->shape;
    const int64_t n = s->lengths[b], pages = pages_of(p, n), e = (int64_t)dtype_size(s->dtype);
    const int64_t handled = s->queries[b]; /* at most so many times each byte */
    int64_t union_pages = 0, union_tokens = 0;
    for (int64_t page = 0; page < pages; page++) {
        if (problem_group_reads(p, selected, b, kv_head, page)) {
            union_pages++;
            union_tokens += page + 1 < pages ? s->page_size : n - page * s->page_size;
        }
    }
    const group_sums sum = sum_group(p, b, kv_head);
    const int64_t keys = union_tokens * s->k_dim * e, values = union_tokens * s->v_dim * e,
                  dense = n * (s->k_dim + s->v_dim) * e;
    const bool one = handled == 1;
    EXPECT(sum.group_pages >= union_pages && sum.group_pages <= union_pages * handled &&
               sum.total_pages >= (handled ? pages : 0) && sum.total_pages <= pages * handled,
           "sequence %d: %lld pages of %lld reported, the union has %lld of %lld", b, (long long)sum.group_pages,
           (long long)sum.total_pages, (long long)union_pages, (long long)pages);
    EXPECT(one ? sum.keys == keys : sum.keys <= keys * handled && (sum.keys > 0) == (keys > 0 && handled > 0),
           "sequence %d: %lld key bytes reported for %lld", b, (long long)sum.keys, (long long)keys);
    EXPECT(sum.values <= values * handled && (sum.values > 0) == (sum.support > 0),
           "sequence %d: %lld value bytes, at most %lld", b, (long long)sum.values, (long long)(values * handled));
    EXPECT(one ? sum.dense == dense : sum.dense <= dense * handled && (handled == 0 || sum.dense >= keys),
           "sequence %d: dense %lld, expected %lld", b, (long long)sum.dense, (long long)dense);
    const int64_t page_statistics = s->k_dim * (2 * e + 8) + 8; /* box, mean and deviation, norms */
    EXPECT(sum.statistics >= 0 && sum.statistics <= page_statistics * pages * handled, "sequence %d: %lld bytes of statistics",
           b, (long long)sum.statistics);
    const bool reads_boxes = p->step.policy == EKV_POLICY_TOPK || p->step.policy == EKV_POLICY_GAUSSIAN;
    EXPECT(!one || !reads_boxes || n == 0 || sum.statistics >= pages * s->k_dim * e, "only %lld bytes of statistics",
           (long long)sum.statistics);
    EXPECT(reads_boxes || p->step.report_mass || sum.statistics == 0, "%lld bytes of statistics that nobody needs",
           (long long)sum.statistics);
}

/* One query token: the values read are those of the union support of the group, no more and no less. */
static void check_value_bytes(const problem *p, const uint8_t *selected, int32_t b, int32_t kv_head) {
    const shape *s = &p->shape;
    const int32_t q_token = ((const int32_t *)p->q_start.data)[b];
    const int64_t n = s->lengths[b], row = (int64_t)q_token * p->q_heads + kv_head * s->group;
    uint8_t *in = calloc((size_t)n + 1, 1); /* 2: certainly in some support, 1: perhaps */
    for (int32_t g = 0; g < s->group; g++) {
        oracle o;
        oracle_make(&o, p, q_token, kv_head * s->group + g, selected + (row + g) * problem_stride(p));
        const double edge = 2 * oracle_score_error(&o) + 0x1p-30;
        for (int64_t i = 0; i < n; i++) {
            const double x = o.z[i] - o.result.tau;
            const int kind = !oracle_reads(&o, i) ? 0 : o.alpha == 1 ? (x > -80 ? 2 : 1) : x > edge ? 2 : x > -edge ? 1 : 0;
            in[i] = kind > in[i] ? (uint8_t)kind : in[i];
        }
        oracle_free(&o);
    }
    int64_t least = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        least += in[i] == 2;
        most += in[i] >= 1;
    }
    free(in);
    const int64_t unit = s->v_dim * (int64_t)dtype_size(s->dtype);
    const int64_t bytes = ((const ekv_report *)p->report.data)[row].bytes_values;
    EXPECT(bytes >= least * unit && bytes <= most * unit,
           "sequence %d KV head %d: values of %lld tokens read, the support has %lld to %lld", b, kv_head,
           (long long)(bytes / unit), (long long)least, (long long)most);
}

static void check_mass(const problem *p, const oracle *o, const ekv_report *e, const char *who) {
    if (e->tokens == o->n) {
        EXPECT(e->mass_bound == 0 && e->error_bound == 0 && e->certified == 1, "%s: everything read: E %g, error bound %g", who,
               e->mass_bound, e->error_bound);
        return;
    }
    if (!p->step.report_mass) { /* top-k has the bounds at hand and may prove that nothing is missing */
        const bool proven = e->certified == 1 && e->mass_bound == 0 && e->error_bound == 0;
        EXPECT(proven || (isnan(e->mass_bound) && isnan(e->error_bound)), "%s: E %g and error bound %g were not asked for", who,
               e->mass_bound, e->error_bound);
        return;
    }
    EXPECT(e->mass_bound >= o->result.delta * (1 - 1e-5) - 1e-9 && e->mass_bound <= 1, "%s: E %.9g, true delta %.9g", who,
           e->mass_bound, o->result.delta);
    EXPECT(e->error_bound >= 2 * e->mass_bound * o->result.value_norm * (1 - 1e-12), "%s: error bound %.9g, E %.9g, B %.9g",
           who, e->error_bound, e->mass_bound, o->result.value_norm);
}

/* Whether a group has softmax heads and others. */
static bool mixes_softmax(const problem *p, int32_t kv_head) {
    int32_t softmax = 0;
    for (int32_t g = 0; g < p->shape.group; g++) {
        softmax += problem_alpha(p, kv_head * p->shape.group + g) == 1;
    }
    return softmax > 0 && softmax < p->shape.group;
}

/* The groups' sums; those of the reference and, under sparse policies, of groups that mix softmax with others have tests of
 * their own below. */
static void check_sums(const problem *p, const uint8_t *selected, const char *who) {
    for (int32_t b = 0; b < p->shape.batch; b++) {
        for (int32_t h = 0; h < p->shape.kv_heads && strcmp(who, "reference") != 0; h++) {
            check_group(p, selected, b, h);
            const double work = (double)p->shape.lengths[b] * (p->shape.k_dim + p->shape.v_dim) * p->shape.group;
            const bool plain = p->step.policy == EKV_POLICY_FULL || !mixes_softmax(p, h);
            if (p->shape.queries[b] == 1 && p->shape.lengths[b] > 0 && work < 5e5 && plain) {
                check_value_bytes(p, selected, b, h);
            }
        }
    }
}

static void check_case(problem *p, const uint8_t *selected, checked_rows *c, const char *who) {
    const ekv_report *report = p->report.data;
    for (int i = 0; i < c->count; i++) {
        const int64_t row = c->rows[i];
        refresh_oracle(c, i, p, selected + row * problem_stride(p));
        oracle_check_out(&c->oracles[i], p, row, who);
        oracle_check_report(&c->oracles[i], &report[row], who);
        if (c->oracles[i].n > 0) {
            check_mass(p, &c->oracles[i], &report[row], who);
        }
    }
    check_sums(p, selected, who);
}

static void check_backends(backend_set *backends, problem *p, rng *r) {
    checked_rows rows;
    choose_rows(&rows, p, r);
    FOR_BACKENDS(b, backends, p) {
        ekv_context *context = backends->contexts[b];
        case_note("%s: %s", backends->names[b], problem_describe(p));
        if (p->step.policy != EKV_POLICY_FULL || p->step.report_mass) {
            problem_index(p, context, all_statistics);
        }
        guard selected = problem_select(p, context);
        problem_decode(p, context);
        check_case(p, selected.data, &rows, backends->names[b]);
        guard_free(&selected);
        problem_drop_index(p);
    }
    free_rows(&rows);
}

static void run_grid(const char *name, int64_t cases, const ekv_policy *policies, int policy_count, int32_t max_length) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, cases) {
        rng r = case_begin(name, index);
        shape s = shape_random(&r, max_length);
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, policies[rng_between(&r, 0, policy_count - 1)]);
        p.step.report_mass = rng_chance(&r, 0.5);
        check_backends(&backends, &p, &r);
        problem_free(&p);
    }
    backends_close(&backends);
}

START_TEST(grid_full) {
    const ekv_policy policies[] = {EKV_POLICY_FULL};
    run_grid("grid_full", 500, policies, 1, INT32_MAX);
}
END_TEST

START_TEST(grid_sparse) {
    const ekv_policy policies[] = {EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN, EKV_POLICY_PAGES};
    run_grid("grid_sparse", 400, policies, 3, INT32_MAX);
}
END_TEST

START_TEST(grid_short) {
    const ekv_policy policies[] = {EKV_POLICY_FULL, EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN, EKV_POLICY_PAGES};
    run_grid("grid_short", 1600, policies, 4, 60);
}
END_TEST

/* ---- Sums over a group ------------------------------------------------------------------------------------------------ */

/* Every backend's report counts each byte once for a group: in the entry of its first head, zeros in the others. */
START_TEST(a_group_counts_each_byte_once) {
    static const ekv_policy policies[] = {EKV_POLICY_FULL, EKV_POLICY_PAGES, EKV_POLICY_TOPK};
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 150) {
        rng r = case_begin("a_group_counts_each_byte_once", index);
        shape s = shape_random(&r, 100);
        s.group = (int32_t)rng_between(&r, 2, 3);
        problem p;
        problem_make(&p, &s, &r);
        problem_random_policy(&p, &r, policies[index % 3]);
        for (int i = 0; i < backends.count; i++) {
            case_note("%s: %s", backends.names[i], problem_describe(&p));
            problem_index(&p, backends.contexts[i], all_statistics);
            guard selected = problem_select(&p, backends.contexts[i]);
            problem_decode(&p, backends.contexts[i]);
            for (int32_t b = 0; b < s.batch; b++) {
                for (int32_t h = 0; h < s.kv_heads; h++) {
                    check_group(&p, selected.data, b, h);
                }
            }
            guard_free(&selected);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* A softmax head reads the values of its own pages; the other heads of its group read those of their support, in their pages.
 */
START_TEST(value_bytes_where_heads_differ) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 100) {
        rng r = case_begin("value_bytes_where_heads_differ", index);
        shape s = shape_random(&r, 100);
        s.group = 2;
        s.kv_heads = s.batch = 1;
        s.ragged = false;
        s.queries[0] = 1;
        s.lengths[0] = (int32_t)rng_between(&r, 1, 100);
        problem p;
        problem_make(&p, &s, &r);
        problem_set_heads(&p, (const double[]){1, 2}, NULL, NULL);
        problem_random_policy(&p, &r, index % 2 ? EKV_POLICY_PAGES : EKV_POLICY_FULL);
        for (int i = 0; i < backends.count; i++) {
            if (backend_is_reference(&backends, i)) {
                continue; /* shares no reads */
            }
            case_note("%s: %s", backends.names[i], problem_describe(&p));
            guard selected = problem_select(&p, backends.contexts[i]);
            problem_decode(&p, backends.contexts[i]);
            check_value_bytes(&p, selected.data, 0, 0);
            guard_free(&selected);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Long sequences --------------------------------------------------------------------------------------------------- */

static shape plain_shape(int32_t length, int32_t dim, ekv_dtype dtype) {
    shape s;
    memset(&s, 0, sizeof s);
    s.dtype = dtype;
    s.batch = s.kv_heads = 1;
    s.group = 2;
    s.k_dim = s.v_dim = dim;
    s.page_size = 16;
    s.lengths[0] = length;
    s.queries[0] = 1;
    s.q_size = 1;
    return s;
}

/* Scores that rise, fall, stay equal or turn all at once along the sequence: what a list of candidates likes least. */
static void shape_scores(problem *p, int kind, rng *r) {
    const int64_t n = p->shape.lengths[0];
    float *q = p->q.data;
    for (int64_t i = 0; i < p->q_heads * p->shape.k_dim; i++) {
        q[i] = i % p->shape.k_dim == 0 ? 1.0f : 0.0f;
    }
    for (int64_t t = 0; t < n; t++) {
        const double at = (double)t / (double)n, noise = 1e-4 * rng_uniform(r);
        const double score = kind == 0    ? at * 3
                             : kind == 1  ? -at * 3
                             : kind == 2  ? 0.5
                             : kind == 3  ? noise
                             : t == n - 1 ? 9
                                          : 0;
        dtype_store(p->shape.dtype, problem_key(p, 0, t, 0), 0, (float)score);
    }
    p->step.scale = 1;
}

START_TEST(long_sequences) {
    static const double some_alphas[] = {1, 1.1, 4.0 / 3, 1.5, 2, 3};
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 60) {
        rng r = case_begin("long_sequences", index);
        shape s = plain_shape((int32_t)rng_between(&r, 30000, 70000), 4, index % 2 ? EKV_F32 : EKV_F16);
        problem p;
        problem_make(&p, &s, &r);
        shape_scores(&p, (int)(index % 5), &r);
        p.step.alpha = some_alphas[index / 5 % 6];
        check_backends(&backends, &p, &r);
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Many query tokens ------------------------------------------------------------------------------------------------ */

/* Decodes query token t of the only sequence alone, its length cut to what that token sees. */
static void decode_alone(const problem *p, ekv_context *context, int32_t t, guard *out, ekv_report *report) {
    int32_t b;
    int64_t n;
    problem_locate(p, t, &b, &n);
    const int32_t length = (int32_t)n;
    ekv_decode_params step = p->step;
    step.lengths = &length;
    step.q_start = NULL;
    const int64_t q_stride = step.q_token_stride ? step.q_token_stride : (int64_t)p->q_heads * p->shape.k_dim;
    step.q = (const char *)p->q.data + (size_t)(t * q_stride) * dtype_size(p->shape.q_dtype);
    step.out = out->data;
    step.out_dtype = EKV_F32;
    step.out_token_stride = step.out_head_stride = 0;
    step.report = report;
    if (step.page_mask) {
        step.page_mask += t * p->q_heads * step.page_mask_stride;
    }
    EXPECT_OK(context, ekv_decode(context, &step));
}

static void compare_alone(const problem *p, int32_t t, const guard *out, const ekv_report *alone, const char *who) {
    const ekv_report *report = p->report.data;
    double *chunk = malloc((size_t)p->shape.v_dim * sizeof *chunk);
    for (int32_t h = 0; h < p->q_heads; h++) {
        const int64_t row = (int64_t)t * p->q_heads + h;
        oracle o;
        uint8_t *all = malloc((size_t)problem_stride(p));
        memset(all, 1, (size_t)problem_stride(p));
        oracle_make(&o, p, t, h, p->step.page_mask ? p->step.page_mask + row * p->step.page_mask_stride : all);
        problem_out_row(p, row, chunk);
        double square = 0;
        for (int32_t d = 0; d < p->shape.v_dim; d++) {
            const double difference = chunk[d] - ((const float *)out->data)[h * p->shape.v_dim + d];
            square += difference * difference;
        }
        EXPECT(sqrt(square) <= 2 * oracle_tolerance(&o), "%s: token %d head %d alone differs by %.3g, allowed %.3g", who, t, h,
               sqrt(square), 2 * oracle_tolerance(&o));
        oracle_check_report(&o, &report[row], who);
        oracle_check_report(&o, &alone[h], who);
        oracle_free(&o);
        free(all);
    }
    free(chunk);
}

START_TEST(chunk_equals_one_at_a_time) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 150) {
        rng r = case_begin("chunk_equals_one_at_a_time", index);
        shape s = shape_random(&r, 250);
        s.batch = 1;
        s.ragged = true;
        s.out_dtype = EKV_F32;
        s.lengths[0] = (int32_t)rng_between(&r, 1, 250);
        s.queries[0] = (int32_t)rng_between(&r, 1, s.lengths[0] < 70 ? s.lengths[0] : 70);
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, index % 3 ? EKV_POLICY_FULL : EKV_POLICY_PAGES);
        guard out = guard_alloc((size_t)(p.q_heads * s.v_dim) * sizeof(float));
        ekv_report *alone = calloc((size_t)p.q_heads, sizeof *alone);
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            problem_decode(&p, backends.contexts[b]);
            for (int32_t t = 0; t < p.q_tokens; t += 1 + (int32_t)rng_between(&r, 0, 9)) {
                decode_alone(&p, backends.contexts[b], t, &out, alone);
                compare_alone(&p, t, &out, alone, backends.names[b]);
            }
        }
        free(alone);
        guard_free(&out);
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* A batch gives every sequence the bits that it gets alone. */
START_TEST(batch_equals_sequences_alone) {
    backend_set backends;
    backends_open(&backends, 3);
    FOR_CASES(index, 200) {
        rng r = case_begin("batch_equals_sequences_alone", index);
        shape s = shape_random(&r, 400);
        s.batch = (int32_t)rng_between(&r, 2, MAX_BATCH);
        for (int32_t b = 0; b < s.batch; b++) {
            s.lengths[b] = (int32_t)rng_between(&r, 0, 400);
            s.queries[b] = s.ragged ? (int32_t)rng_between(&r, 0, s.lengths[b] < 9 ? s.lengths[b] : 9) : 1;
        }
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        FOR_BACKENDS(i, &backends, &p) {
            case_note("%s: %s", backends.names[i], problem_describe(&p));
            problem_decode(&p, backends.contexts[i]);
            size_t bytes;
            unsigned char *together = problem_copy_out(&p, &bytes);
            const int32_t *start = p.q_start.data;
            problem_poison(&p);
            for (int32_t b = 0; b < s.batch; b++) {
                const int32_t ends[] = {0, s.queries[b]};
                const size_t q_row =
                    dtype_size(s.q_dtype) * (size_t)(p.step.q_token_stride ? p.step.q_token_stride : p.q_heads * s.k_dim);
                const size_t out_row =
                    dtype_size(s.out_dtype) * (size_t)(p.step.out_token_stride ? p.step.out_token_stride : p.q_heads * s.v_dim);
                ekv_decode_params one = p.step;
                ekv_kv kv = p.kv;
                one.batch = 1;
                one.lengths = &s.lengths[b];
                one.q_start = s.ragged ? ends : NULL;
                one.q = (const char *)p.q.data + q_row * (size_t)start[b];
                one.out = (char *)p.out.data + out_row * (size_t)start[b];
                one.report = NULL;
                if (one.block_table) {
                    one.block_table += b * one.block_table_stride;
                } else { /* page p of the only sequence lies in block p */
                    kv.k = (const char *)kv.k + dtype_size(s.dtype) * (size_t)(b * one.block_table_stride * kv.k_block_stride);
                    kv.v = (const char *)kv.v + dtype_size(s.dtype) * (size_t)(b * one.block_table_stride * kv.v_block_stride);
                    kv.blocks -= b * one.block_table_stride;
                    kv.blocks = kv.blocks < 0 ? 0 : kv.blocks;
                    one.kv = &kv;
                }
                EXPECT_OK(backends.contexts[i], ekv_decode(backends.contexts[i], &one));
            }
            unsigned char *apart = problem_copy_out(&p, &bytes);
            EXPECT(memcmp(together, apart, bytes) == 0, "outputs of the batch and of its sequences alone differ");
            free(together);
            free(apart);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Output types ----------------------------------------------------------------------------------------------------- */

/* A 16-bit output is the f32 output rounded, give or take the last bit of the f32. */
START_TEST(narrow_outputs_are_rounded_once) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 300) {
        rng r = case_begin("narrow_outputs_are_rounded_once", index);
        shape s = shape_random(&r, 200);
        s.out_dtype = EKV_F32;
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        const ekv_dtype narrow = index % 2 ? EKV_F16 : EKV_BF16;
        guard out = guard_alloc((size_t)(p.rows * s.v_dim) * 2);
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s to %s", backends.names[b], ekv_dtype_name(narrow), problem_describe(&p));
            problem_decode(&p, backends.contexts[b]);
            ekv_decode_params step = p.step;
            step.out = out.data;
            step.out_dtype = narrow;
            step.out_token_stride = step.out_head_stride = 0;
            EXPECT_OK(backends.contexts[b], ekv_decode(backends.contexts[b], &step));
            double *wide = malloc((size_t)s.v_dim * sizeof *wide);
            for (int64_t row = 0; row < p.rows; row++) {
                problem_out_row(&p, row, wide);
                for (int32_t d = 0; d < s.v_dim; d++) {
                    const float x = (float)wide[d];
                    const uint16_t got = ((const uint16_t *)out.data)[row * s.v_dim + d];
                    uint16_t expected[3];
                    const float near[] = {x, nextafterf(x, INFINITY), nextafterf(x, -INFINITY)};
                    for (int i = 0; i < 3; i++) {
                        expected[i] = narrow == EKV_F16 ? f16_from_float(near[i]) : bf16_from_float(near[i]);
                    }
                    EXPECT(got == expected[0] || got == expected[1] || got == expected[2], "%s of %.9g is %04x, expected %04x",
                           ekv_dtype_name(narrow), x, got, expected[0]);
                }
            }
            free(wide);
        }
        guard_free(&out);
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- NaN -------------------------------------------------------------------------------------------------------------- */

/*
 * Pages that nobody reads may hold anything: the sparse policies give the same bits over NaN.  Not so the reference under top-k
 * and gaussian: it computes its statistics from the keys, when it needs them.
 */
START_TEST(unread_pages_are_never_read) {
    static const ekv_policy policies[] = {EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN, EKV_POLICY_PAGES};
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 300) {
        rng r = case_begin("unread_pages_are_never_read", index);
        shape s = shape_random(&r, 700);
        for (int b = 0; b < backends.count; b++) {
            if (backend_is_reference(&backends, b) && index % 3 < 2) {
                continue;
            }
            rng same = r; /* poisoning spoils the problem: a new one for each backend */
            problem p;
            problem_make(&p, &s, &same);
            problem_random_parameters(&p, &same);
            problem_random_policy(&p, &same, policies[index % 3]);
            p.step.budget = p.step.budget / 4 + 1;
            p.step.report_mass = rng_chance(&same, 0.5);
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            problem_index(&p, backends.contexts[b], all_statistics);
            guard selected = problem_select(&p, backends.contexts[b]);
            problem_decode(&p, backends.contexts[b]);
            size_t bytes;
            unsigned char *before = problem_copy_out(&p, &bytes);
            ekv_report *report = malloc(p.report.size + 1);
            memcpy(report, p.report.data, p.report.size);
            problem_poison_unread(&p, selected.data);
            problem_decode(&p, backends.contexts[b]);
            unsigned char *after = problem_copy_out(&p, &bytes);
            EXPECT(memcmp(before, after, bytes) == 0, "the output depends on pages that were not selected");
            for (int64_t row = 0; row < p.rows; row++) {
                const ekv_report *now = (const ekv_report *)p.report.data + row;
                EXPECT(report[row].tau == now->tau && report[row].support == now->support, "tau %.9g became %.9g",
                       report[row].tau, now->tau);
            }
            free(before);
            free(after);
            free(report);
            guard_free(&selected);
            problem_free(&p);
        }
    }
    backends_close(&backends);
}
END_TEST

/* Values of weight zero are skipped, not multiplied: NaN there is not seen.  NaN in a value of the support is, by that head. */
START_TEST(values_outside_the_support_are_never_read) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 600) {
        rng r = case_begin("values_outside_the_support_are_never_read", index);
        shape s = shape_random(&r, 700);
        s.batch = 1;
        s.ragged = false;
        s.queries[0] = 1;
        s.q_size = 4;
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, index % 2 ? EKV_POLICY_PAGES : EKV_POLICY_FULL);
        const int64_t n = s.lengths[0];
        unsigned char *before[MAX_BACKENDS];
        size_t bytes = 0;
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            problem_decode(&p, backends.contexts[b]);
            before[b] = problem_copy_out(&p, &bytes);
        }
        for (int32_t kv_head = 0; kv_head < s.kv_heads; kv_head++) {
            bool *used = calloc((size_t)n + 1, sizeof *used);
            for (int32_t g = 0; g < s.group; g++) {
                oracle o;
                oracle_make(&o, &p, 0, kv_head * s.group + g, NULL);
                const double edge = o.alpha == 1 ? INFINITY : 2 * oracle_score_error(&o) + 1e-8; /* softmax uses all it reads */
                for (int64_t i = 0; i < n; i++) {
                    used[i] = used[i] || (oracle_reads(&o, i) && o.z[i] > o.result.tau - edge);
                }
                oracle_free(&o);
            }
            for (int64_t i = 0; i < n; i++) {
                if (!used[i]) {
                    dtype_store_nan(s.dtype, problem_value(&p, 0, i, kv_head), s.v_dim);
                }
            }
            free(used);
        }
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            problem_decode(&p, backends.contexts[b]);
            unsigned char *after = problem_copy_out(&p, &bytes);
            EXPECT(memcmp(before[b], after, bytes) == 0, "the output depends on values of weight zero");
            free(after);
            free(before[b]);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* A NaN or infinite key spoils the rows that read it, in output and tau, and no others. */
static void check_spoiled(const problem *p, const unsigned char *before, const unsigned char *after, int32_t kv_head,
                          int64_t token, const uint8_t *mask) {
    const size_t row_bytes = (size_t)p->shape.v_dim * dtype_size(p->shape.out_dtype);
    double *out = malloc((size_t)p->shape.v_dim * sizeof *out);
    for (int64_t row = 0; row < p->rows; row++) {
        int32_t b;
        int64_t n;
        problem_locate(p, (int32_t)(row / p->q_heads), &b, &n);
        const bool reads = b == 0 && row % p->q_heads / p->shape.group == kv_head && token < n &&
                           (mask == NULL || mask[row * p->step.page_mask_stride + token / p->shape.page_size]);
        if (!reads) {
            EXPECT(memcmp(before + (size_t)row * row_bytes, after + (size_t)row * row_bytes, row_bytes) == 0,
                   "row %lld does not read the bad key and changed", (long long)row);
            continue;
        }
        EXPECT(isnan(((const ekv_report *)p->report.data)[row].tau), "tau of row %lld, which reads the bad key, is %g",
               (long long)row, ((const ekv_report *)p->report.data)[row].tau);
        problem_out_row(p, row, out);
        for (int32_t d = 0; d < p->shape.v_dim; d++) {
            EXPECT(isnan(out[d]), "element %d of row %lld, which reads the bad key, is %g", d, (long long)row, out[d]);
        }
    }
    free(out);
}

START_TEST(a_bad_key_spoils_its_readers_alone) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 500) {
        rng r = case_begin("a_bad_key_spoils_its_readers_alone", index);
        shape s = shape_random(&r, 600);
        s.lengths[0] = s.lengths[0] > 0 ? s.lengths[0] : 5;
        s.queries[0] = s.ragged && s.queries[0] > 0 ? s.queries[0] : 1;
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        const bool masked = index % 2;
        problem_random_policy(&p, &r, masked ? EKV_POLICY_PAGES : EKV_POLICY_FULL);
        const int64_t token = rng_between(&r, 0, s.lengths[0] - 1);
        const int32_t kv_head = (int32_t)rng_between(&r, 0, s.kv_heads - 1);
        unsigned char *before[MAX_BACKENDS];
        size_t bytes = 0;
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            problem_decode(&p, backends.contexts[b]);
            before[b] = problem_copy_out(&p, &bytes);
        }
        dtype_store(s.dtype, problem_key(&p, 0, token, kv_head), rng_between(&r, 0, s.k_dim - 1), NAN);
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: NaN in key %lld: %s", backends.names[b], (long long)token, problem_describe(&p));
            problem_decode(&p, backends.contexts[b]);
            unsigned char *after = problem_copy_out(&p, &bytes);
            check_spoiled(&p, before[b], after, kv_head, token, masked ? p.step.page_mask : NULL);
            free(after);
            free(before[b]);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* A score of +infinity makes the row NaN; -infinity is a weight of zero, as if the token were not there. */
START_TEST(infinite_scores) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 200) {
        rng r = case_begin("infinite_scores", index);
        shape s = shape_random(&r, 300);
        s.batch = s.group = s.page_size = 1;
        s.ragged = false;
        s.q_dtype = EKV_F32;
        s.lengths[0] = (int32_t)rng_between(&r, 2, 300);
        s.queries[0] = 1;
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, EKV_POLICY_PAGES);
        uint8_t *mask = p.mask.data;
        memset(mask, 1, p.mask.size);
        const int64_t token = rng_between(&r, 0, s.lengths[0] - 1), d = rng_between(&r, 0, s.k_dim - 1);
        const int32_t head = (int32_t)rng_between(&r, 0, p.q_heads - 1);
        const int64_t head_stride = p.step.q_head_stride ? p.step.q_head_stride : s.k_dim;
        float *q = (float *)p.q.data + head * head_stride + d;
        *q = index % 2 ? 0.5f : -0.5f;
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: key %lld of head %d: %s", backends.names[b], (long long)token, head, problem_describe(&p));
            dtype_store(s.dtype, problem_key(&p, 0, token, head), d, *q > 0 ? INFINITY : -INFINITY);
            problem_decode(&p, backends.contexts[b]);
            double *out = malloc((size_t)s.v_dim * sizeof *out);
            problem_out_row(&p, head, out);
            EXPECT(isnan(out[0]) && isnan(out[s.v_dim - 1]), "a score of +infinity gave %g", out[0]);
            dtype_store(s.dtype, problem_key(&p, 0, token, head), d, *q > 0 ? -INFINITY : INFINITY);
            problem_decode(&p, backends.contexts[b]);
            uint8_t *without = malloc((size_t)problem_stride(&p));
            memset(without, 1, (size_t)problem_stride(&p));
            without[token] = 0;
            oracle o;
            oracle_make(&o, &p, 0, head, without);
            oracle_check_out(&o, &p, head, backends.names[b]);
            oracle_free(&o);
            free(without);
            free(out);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Edges ------------------------------------------------------------------------------------------------------------ */

START_TEST(empty_batch_and_empty_sequences) {
    backend_set backends;
    backends_open(&backends, 2);
    for (int i = 0; i < backends.count; i++) {
        for (int policy = EKV_POLICY_FULL; policy <= EKV_POLICY_PAGES; policy++) {
            rng r = case_begin("empty_batch_and_empty_sequences", policy);
            case_note("%s %s", backends.names[i], ekv_policy_name((ekv_policy)policy));
            shape s = plain_shape(0, 16, EKV_F16);
            s.batch = 3;
            s.lengths[1] = 40;
            s.queries[0] = s.queries[1] = s.queries[2] = 1;
            problem p;
            problem_make(&p, &s, &r);
            problem_random_policy(&p, &r, (ekv_policy)policy);
            problem_index(&p, backends.contexts[i], all_statistics);
            problem_decode(&p, backends.contexts[i]);
            double out[16];
            for (int64_t row = 0; row < p.rows; row++) {
                const ekv_report *e = (const ekv_report *)p.report.data + row;
                problem_out_row(&p, row, out);
                double norm = 0;
                for (int d = 0; d < 16; d++) {
                    norm += fabs(out[d]);
                }
                const bool empty = row / p.q_heads != 1;
                EXPECT(empty ? norm == 0 : norm > 0, "row %lld: the output's elements sum to %g", (long long)row, norm);
                EXPECT((e->tau == -INFINITY) == empty && (e->support == 0) == empty, "row %lld: tau %g support %lld",
                       (long long)row, e->tau, (long long)e->support);
            }
            p.step.batch = 0;
            problem_poison(&p);
            EXPECT_OK(backends.contexts[i], ekv_decode(backends.contexts[i], &p.step));
            problem_check_untouched(&p);
            problem_free(&p);
        }
    }
    backends_close(&backends);
}
END_TEST

/* alpha below 1 + 1e-7 is 1; per-head values override the common ones and equal them when they are the same. */
START_TEST(parameters_per_head_equal_common_ones) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 200) {
        rng r = case_begin("parameters_per_head_equal_common_ones", index);
        shape s = shape_random(&r, 200);
        problem p;
        problem_make(&p, &s, &r);
        const double alpha = RNG_PICK(&r, ((const double[]){1, 1.1, 4.0 / 3, 1.5, 2, 3}));
        const float scale = (float)rng_range(&r, 0.05, 0.4);
        double *alphas = malloc((size_t)p.q_heads * sizeof *alphas);
        float *scales = malloc((size_t)p.q_heads * sizeof *scales), *zeros = calloc((size_t)p.q_heads, sizeof *zeros);
        for (int32_t h = 0; h < p.q_heads; h++) {
            alphas[h] = alpha == 1 ? 1 + 0.9e-7 : alpha;
            scales[h] = scale;
        }
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            problem_set_heads(&p, NULL, NULL, NULL);
            p.step.alpha = alpha;
            p.step.scale = scale;
            problem_decode(&p, backends.contexts[b]);
            size_t bytes;
            unsigned char *common = problem_copy_out(&p, &bytes);
            problem_set_heads(&p, alphas, scales, zeros);
            p.step.alpha = 1.25;
            p.step.scale = 77;
            problem_decode(&p, backends.contexts[b]);
            unsigned char *each = problem_copy_out(&p, &bytes);
            EXPECT(memcmp(common, each, bytes) == 0, "outputs differ");
            free(common);
            free(each);
        }
        free(alphas);
        free(scales);
        free(zeros);
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- The tests' own conversions --------------------------------------------------------------------------------------- */

START_TEST(conversions_agree_with_the_reference) {
    for (uint32_t h = 0; h < 65536; h++) {
        const uint16_t bits = (uint16_t)h;
        const float half = f16_to_float(bits), brain = bf16_to_float(bits);
        EXPECT(isnan(half) ? isnan(ekv_reference_load(EKV_F16, &bits, 0))
                           : (double)half == ekv_reference_load(EKV_F16, &bits, 0),
               "f16 %04x is %.9g", h, half);
        EXPECT(isnan(brain) ? isnan(ekv_reference_load(EKV_BF16, &bits, 0))
                            : (double)brain == ekv_reference_load(EKV_BF16, &bits, 0),
               "bf16 %04x is %.9g", h, brain);
        EXPECT(isnan(half) || f16_from_float(half) == bits, "f16 %04x does not return", h);
        EXPECT(isnan(brain) || bf16_from_float(brain) == bits, "bf16 %04x does not return", h);
    }
    /* ties go to even, the rest to the nearest */
    EXPECT(f16_from_float(1 + 0x1p-11f) == 0x3C00 && f16_from_float(1 + 0x3p-11f) == 0x3C02, "f16 ties");
    EXPECT(f16_from_float(65519.0f) == 0x7BFF && f16_from_float(65520.0f) == 0x7C00, "f16 overflow");
    EXPECT(f16_from_float(0x1p-25f) == 0 && f16_from_float(0x1.8p-25f) == 1 && f16_from_float(0x3p-25f) == 2, "f16 subnormals");
    EXPECT(bf16_from_float(1 + 0x1p-8f) == 0x3F80 && bf16_from_float(1 + 0x3p-8f) == 0x3F82, "bf16 ties");
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {TEST_ENTRY(conversions_agree_with_the_reference),
                                TEST_ENTRY(grid_short),
                                TEST_ENTRY(grid_full),
                                TEST_ENTRY(grid_sparse),
                                TEST_ENTRY(a_group_counts_each_byte_once),
                                TEST_ENTRY(value_bytes_where_heads_differ),
                                TEST_ENTRY(long_sequences),
                                TEST_ENTRY(chunk_equals_one_at_a_time),
                                TEST_ENTRY(batch_equals_sequences_alone),
                                TEST_ENTRY(narrow_outputs_are_rounded_once),
                                TEST_ENTRY(unread_pages_are_never_read),
                                TEST_ENTRY(values_outside_the_support_are_never_read),
                                TEST_ENTRY(a_bad_key_spoils_its_readers_alone),
                                TEST_ENTRY(infinite_scores),
                                TEST_ENTRY(empty_batch_and_empty_sequences),
                                TEST_ENTRY(parameters_per_head_equal_common_ones)};
    return HARNESS_MAIN(argv[0], tests);
}
