/*
 * Conformance of whole decode steps: every policy through ekv_decode against cpu/reference.c.
 *
 * A case is two sequences over one shuffled pool of blocks.  What the policy reads is asked of the backend (ekv_select_pages)
 * and checked by the policy's own criterion; the reference then computes the row over exactly those pages.  After that, and
 * before the step runs, every page that no row of a group reads is overwritten with NaN.
 *
 * Tolerances.  A score is off by at most 8 units in the last place of the largest |z| that matters (e below), as is tau.
 * Outputs, by relative L2 norm: 3e-6 max(1, max |z|) for alpha <= 2, and for others what e does to each weight.  Where scores
 * are huge they are equal or far apart by construction, so that weights are exact and max |z| counts as 1.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/conform.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NORMAL, CLUSTERED, PEAKED, TIES, HUGE_SCORES, LOW, NANS };
static const char *const contents[] = {"normal",      "clustered pages",  "peaked",      "ties",
                                       "huge scores", "-infinity scores", "NaN in a key"};
static const char *const alpha_names[] = {"1", "1.25", "4/3", "1.5", "2", "3"};
static const double alphas[] = {1.0, 1.25, 4.0 / 3.0, 1.5, 2.0, 3.0};
static const char *const shapes[] = {"group 1 page 1", "group 1 page 16", "group 2 page 64", "group 3 page 5",
                                     "group 8 page 16"};
static const int groups[] = {1, 1, 2, 3, 8}, page_sizes[] = {1, 16, 64, 5, 16};
static const int dims[] = {1, 33, 64, 128}, lengths[] = {1, 17, 130, 700, 4200};
/* Backend cuda: page sizes that it takes, groups past its 8 rows, a dimension for each of its kernels. */
static const char *const device_shapes[] = {"group 1 page 8",  "group 1 page 16", "group 2 page 64",
                                            "group 3 page 32", "group 8 page 16", "group 12 page 256"};
static const int device_groups[] = {1, 1, 2, 3, 8, 12}, device_page_sizes[] = {8, 16, 64, 32, 16, 256};
static const int device_dims[] = {1, 33, 64, 128, 192, 320};
static const char *const biases[] = {"no slopes and 1 query", "slopes and 3 queries"};

enum { AXIS_DTYPE, AXIS_DIM, AXIS_SHAPE, AXIS_LENGTH, AXIS_ALPHA, AXIS_CONTENT, AXIS_BIAS };

#define BATCH        2
#define KV_HEADS     2
#define CHECKED_ROWS 6

/* A step and its memory. */
typedef struct problem {
    ekv_kv kv;
    ekv_decode_params step;
    ekv_index *index;
    int32_t group, q_heads, queries[BATCH], lengths[BATCH], pages[BATCH], q_start[BATCH + 1];
    int32_t pad; /* elements between rows that belong to nobody */
    int32_t *table, *given_lengths, *given_starts; /* the arrays that the backend gets */
    int64_t table_stride, rows;
    unsigned char *k, *v, *q, *out, *full; /* full: what policy full returns */
    uint8_t *mask, *selected;              /* [rows][table_stride] */
    ekv_report *report;
    float *bounds, *mean, *deviation; /* [rows][table_stride] */
    bool last[64];                    /* per query token: it sees all of its sequence */
} problem;

/* One row as the reference sees it. */
typedef struct row {
    int32_t sequence, head, n, pages;
    int64_t number;
    ekv_reference_problem problem;
    ekv_reference_result result;
    double *value_norm; /* [n] */
    double error;       /* e */
    double z_size;      /* max |z| that matters */
} row;

/* ---- building ---- */

static void *key_of(const problem *p, int32_t b, int64_t token, int head) {
    const int64_t block = p->table[b * p->table_stride + token / p->kv.page_size];
    return (void *)(uintptr_t)ekv_key(&p->kv, block, token % p->kv.page_size, head);
}
static void *value_of(const problem *p, int32_t b, int64_t token, int head) {
    const int64_t block = p->table[b * p->table_stride + token / p->kv.page_size];
    return (void *)(uintptr_t)ekv_value(&p->kv, block, token % p->kv.page_size, head);
}

static void make_key(ekv_check *c, problem *p, int32_t b, int32_t token, int head) {
    const ekv_dtype dtype = p->kv.dtype;
    const int content = c->value[AXIS_CONTENT], dim = p->kv.k_dim;
    void *key = key_of(p, b, token, head);
    const int which = ekv_below(c, 3);
    for (int d = 0; d < dim; d++) {
        double x = ekv_normal(c);
        if (content == CLUSTERED) x = 0.3 * x + 2.0 * sin((double)(token / p->kv.page_size * 37 + d * 11 + head));
        if (content == PEAKED && token % 53 == 11) x += 1.5;
        if (content == TIES) x = ekv_reference_load(dtype, key_of(p, b, token % 5 < token ? token % 5 : 0, head), d);
        if (content == TIES && token < 5) x = ekv_normal(c);
        if (content == HUGE_SCORES) x = (double)(which - 1) * (dtype == EKV_F16 ? 6e4 : 1e30);
        ekv_put(dtype, key, d, x);
    }
    if (content == LOW && token % 4 == 2) ekv_put(dtype, key, 0, -(double)INFINITY);
    if (content == NANS && b == 0 && head == 0 && token == p->lengths[0] / 2) ekv_put(dtype, key, dim / 2, (double)NAN);
}

static void make_query(ekv_check *c, problem *p, int64_t token, int head) {
    const int content = c->value[AXIS_CONTENT];
    for (int d = 0; d < p->kv.k_dim; d++) {
        double x = 1.5 * ekv_normal(c);
        if (content == PEAKED) x = 1.0 + 0.2 * x;
        if (content == LOW && d == 0) x = fabs(x) + 0.1;
        if (content == HUGE_SCORES) x = 30.0;
        ekv_put(p->step.q_dtype, p->q, token * p->step.q_token_stride + head * p->step.q_head_stride + d, x);
    }
}

/* Sequences that draw their blocks from one shuffled pool, with a few left over. */
static void make_tables(ekv_check *c, problem *p) {
    int32_t pool[2 * (4200 + 64) + 8], next = 0;
    const int32_t blocks = (int32_t)p->kv.blocks;
    for (int32_t i = 0; i < blocks; i++) pool[i] = i;
    for (int32_t i = blocks - 1; i > 0; i--) {
        const int j = ekv_below(c, i + 1);
        const int32_t swap = pool[i];
        pool[i] = pool[j];
        pool[j] = swap;
    }
    for (int b = 0; b < BATCH; b++)
        for (int32_t page = 0; page < p->pages[b]; page++) p->table[b * p->table_stride + page] = pool[next++];
}

static void make_sizes(ekv_check *c, problem *p) {
    const int length = c->value[AXIS_LENGTH], queries = c->value[AXIS_BIAS] ? 3 : 1;
    p->kv = ekv_kv_default();
    p->kv.dtype = (ekv_dtype)c->value[AXIS_DTYPE];
    p->kv.kv_heads = KV_HEADS;
    p->kv.k_dim = c->value[AXIS_DIM];
    p->kv.v_dim = ekv_below(c, 2) ? p->kv.k_dim : p->kv.k_dim / 2 + 1;
    p->kv.page_size = (c->on_device ? device_page_sizes : page_sizes)[c->value[AXIS_SHAPE]];
    p->group = (c->on_device ? device_groups : groups)[c->value[AXIS_SHAPE]];
    p->pad = c->on_device && c->number / 2 % 2 ? 8 : 3; /* 8: rows stay aligned to 16 bytes, for vector loads */
    p->q_heads = KV_HEADS * p->group;
    p->lengths[0] = length;
    p->lengths[1] = length / 3; /* 0 for a length of 1 */
    p->q_start[0] = 0;
    for (int b = 0; b < BATCH; b++) {
        p->queries[b] = p->lengths[b] < queries ? p->lengths[b] : queries;
        if (p->lengths[b] == 0) p->queries[b] = 1; /* an empty sequence gives zeros */
        p->q_start[b + 1] = p->q_start[b] + p->queries[b];
        p->pages[b] = (int32_t)ekv_ceil_div(p->lengths[b], p->kv.page_size);
        p->last[p->q_start[b + 1] - 1] = true;
    }
    p->kv.blocks = p->pages[0] + p->pages[1] + 3;
    p->table_stride = p->pages[0] + 1;
    p->rows = (int64_t)p->q_start[BATCH] * p->q_heads;
}

static bool make_memory(ekv_check *c, problem *p) {
    const size_t e = ekv_element_bytes(p->kv.dtype);
    ekv_decode_params *s = &p->step;
    const int64_t tokens = p->q_start[BATCH];
    p->kv.k_head_stride = p->kv.k_dim + p->pad;
    p->kv.k_token_stride = p->kv.k_head_stride * KV_HEADS;
    p->kv.k_block_stride = p->kv.k_token_stride * p->kv.page_size;
    p->kv.v_token_stride = p->kv.v_dim + p->pad;
    p->kv.v_head_stride = p->kv.v_token_stride * p->kv.page_size;
    p->kv.v_block_stride = p->kv.v_head_stride * KV_HEADS;
    s->q_dtype = (ekv_dtype)ekv_below(c, 3);
    s->out_dtype = (ekv_dtype)(ekv_below(c, 2) ? 0 : ekv_below(c, 3));
    s->q_head_stride = p->kv.k_dim + p->pad;
    s->q_token_stride = s->q_head_stride * p->q_heads;
    s->out_head_stride = p->kv.v_dim + p->pad;
    s->out_token_stride = s->out_head_stride * p->q_heads;
    p->table = ekv_room_in(c, "block_table", BATCH * p->table_stride, sizeof *p->table);
    p->given_lengths = ekv_room_in(c, "lengths", BATCH, sizeof *p->given_lengths);
    p->given_starts = ekv_room_in(c, "q_start", BATCH + 1, sizeof *p->given_starts);
    p->k = ekv_room_in(c, "k", p->kv.blocks * p->kv.k_block_stride - p->pad, e);
    p->v = ekv_room_in(c, "v", p->kv.blocks * p->kv.v_block_stride - p->pad, e);
    p->q = ekv_room_in(c, "q", tokens * s->q_token_stride - p->pad, ekv_element_bytes(s->q_dtype));
    p->mask = ekv_room_in(c, "page_mask", p->rows * p->table_stride, 1);
    p->out = ekv_room_out(c, "out", tokens * s->out_token_stride - p->pad, ekv_element_bytes(s->out_dtype));
    p->full = ekv_room_out(c, "out of policy full", tokens * s->out_token_stride - p->pad, ekv_element_bytes(s->out_dtype));
    p->report = ekv_room_out(c, "report", p->rows, sizeof *p->report);
    p->selected = ekv_room_out(c, "selected", p->rows * p->table_stride, 1);
    p->bounds = ekv_room_out(c, "page bounds", p->rows * p->table_stride, sizeof *p->bounds);
    p->mean = ekv_room_out(c, "page means", p->rows * p->table_stride, sizeof *p->mean);
    p->deviation = ekv_room_out(c, "page deviations", p->rows * p->table_stride, sizeof *p->deviation);
    return !c->failed;
}

static void fill_memory(ekv_check *c, problem *p) {
    memcpy(p->given_lengths, p->lengths, sizeof p->lengths);
    memcpy(p->given_starts, p->q_start, sizeof p->q_start);
    for (int b = 0; b < BATCH; b++)
        for (int32_t t = 0; t < p->lengths[b]; t++)
            for (int h = 0; h < KV_HEADS; h++) {
                make_key(c, p, b, t, h);
                for (int d = 0; d < p->kv.v_dim; d++) ekv_put(p->kv.dtype, value_of(p, b, t, h), d, ekv_normal(c));
            }
    for (int64_t t = 0; t < p->q_start[BATCH]; t++)
        for (int h = 0; h < p->q_heads; h++) make_query(c, p, t, h);
    for (int64_t i = 0; i < p->rows * p->table_stride; i++)
        p->mask[i] = ekv_below(c, 5) < 2 ? (uint8_t)(1 + ekv_below(c, 255)) : 0;
}

static void set_step(ekv_check *c, problem *p, ekv_policy policy, float *slopes) {
    ekv_decode_params *s = &p->step;
    s->batch = BATCH;
    s->kv = &p->kv;
    s->index = p->index;
    s->block_table = p->table;
    s->block_table_stride = p->table_stride;
    s->lengths = p->given_lengths;
    s->q_heads = p->q_heads;
    s->q_start = p->given_starts;
    s->q = p->q;
    s->out = p->out;
    s->alpha =
        alphas[c->value[AXIS_ALPHA] + (policy == EKV_POLICY_GAUSSIAN || policy == EKV_POLICY_CERTIFIED)]; /* no softmax there */
    s->scale = ekv_below(c, 2) ? 0.0f : 0.11f;
    for (int h = 0; h < p->q_heads; h++) slopes[h] = ekv_below(c, 3) ? (float)ekv_uniform(c, -0.02, 0.5) : 0.0f;
    s->slopes = c->value[AXIS_BIAS] && c->value[AXIS_CONTENT] != HUGE_SCORES ? slopes : NULL;
    s->policy = policy;
    s->budget = 1 + ekv_below(c, p->lengths[0] + 1);
    s->first_pages = ekv_below(c, 3);
    s->recent_tokens = ekv_below(c, 2) ? 0 : ekv_below(c, 40);
    s->gaussian_model = (ekv_gaussian_model)ekv_below(c, 3);
    s->quantile = ekv_below(c, 2) ? 0.995 : 0.6;
    s->margin_sigma = ekv_below(c, 2) ? 0.0 : 0.2;
    s->margin_fraction = ekv_below(c, 2) ? 0.1 : 0.0;
    s->page_mask = p->mask;
    s->page_mask_stride = p->table_stride;
    s->report = p->report;
    s->report_mass = 1;
    for (int b = 0; b < BATCH; b++) s->max_queries = p->queries[b] > s->max_queries ? p->queries[b] : s->max_queries;
    s->max_length = c->number % 2 ? p->lengths[0] : 0;
}

/* A call of the library that must succeed. */
static bool succeeded(ekv_check *c, ekv_status status) {
    char what[160];
    snprintf(what, sizeof what, "status of the call: %s", ekv_last_error(c->context));
    return ekv_expect(c, what, -1, status, EKV_OK, 0.0);
}

/* ---- calling the backend ---- */

/* The step as the backend takes it: with device memory the same arrays there. */
typedef struct placed {
    ekv_decode_params step;
    ekv_kv kv;
} placed;

static void *at(ekv_check *c, const void *memory) {
    return c->on_device && memory ? ekv_device_of(c, memory) : (void *)(uintptr_t)memory;
}

static bool place(ekv_check *c, const problem *p, const ekv_decode_params *step, placed *to) {
    if (c->on_device && !ekv_rooms_to_device(c)) return false;
    to->step = *step;
    to->kv = p->kv;
    to->kv.k = at(c, p->kv.k);
    to->kv.v = at(c, p->kv.v);
    to->step.kv = &to->kv;
    to->step.block_table = at(c, step->block_table);
    to->step.lengths = at(c, step->lengths);
    to->step.q_start = at(c, step->q_start);
    to->step.q = at(c, step->q);
    to->step.out = at(c, step->out);
    to->step.page_mask = at(c, step->page_mask);
    to->step.report = at(c, step->report);
    return true;
}

/* A call must succeed; then what it wrote is in the rooms. */
static bool done(ekv_check *c, ekv_status status) {
    return succeeded(c, status) && (!c->on_device || ekv_rooms_from_device(c));
}

static bool run_decode(ekv_check *c, const problem *p, const ekv_decode_params *step) {
    placed d;
    return place(c, p, step, &d) && done(c, ekv_decode(c->context, &d.step));
}

static bool run_bounds(ekv_check *c, problem *p) {
    placed d;
    return place(c, p, &p->step, &d) && done(c, ekv_page_bounds(c->context, &d.step, at(c, p->bounds), p->table_stride));
}

static bool run_moments(ekv_check *c, problem *p) {
    placed d;
    return place(c, p, &p->step, &d) &&
           done(c, ekv_page_moments(c->context, &d.step, at(c, p->mean), at(c, p->deviation), p->table_stride));
}

static bool run_select(ekv_check *c, problem *p) {
    placed d;
    return place(c, p, &p->step, &d) && done(c, ekv_select_pages(c->context, &d.step, at(c, p->selected), p->table_stride));
}

static bool run_update(ekv_check *c, problem *p, int first) {
    placed d;
    if (!place(c, p, &p->step, &d)) return false;
    for (int b = first; b < BATCH; b++)
        if (p->lengths[b] > 0 &&
            !succeeded(c, ekv_index_update(c->context, p->index, &d.kv, (int32_t *)at(c, p->table) + b * p->table_stride, 0,
                                           p->lengths[b], p->lengths[b])))
            return false;
    return done(c, EKV_OK);
}

/* On the device a sketch needs a basis that somebody asks for.  From the case's own keys where those are finite, otherwise one of random
 * keys that is loaded before the update, as an application would do it. */
static bool load_basis(ekv_check *c, problem *p) {
    enum { TOKENS = EKV_SKETCH_TRAINING };
    ekv_index_params params = ekv_index_params_default();
    ekv_kv kv = ekv_kv_default();
    ekv_index *host = NULL;
    kv.dtype = params.dtype = EKV_F32;
    kv.kv_heads = params.kv_heads = KV_HEADS;
    kv.k_dim = kv.v_dim = params.k_dim = params.v_dim = p->kv.k_dim;
    params.statistics = EKV_STATISTICS_SKETCH;
    kv.blocks = params.blocks = TOKENS / kv.page_size;
    kv.k_head_stride = kv.k_dim;
    kv.k_token_stride = kv.k_head_stride * KV_HEADS;
    kv.k_block_stride = kv.k_token_stride * kv.page_size;
    const size_t elements = (size_t)TOKENS * (size_t)kv.k_token_stride, bytes = ekv_index_basis_bytes(p->index);
    float *keys = ekv_scratch(c, elements * sizeof *keys + bytes);
    if (!keys) return false;
    for (size_t i = 0; i < elements; i++) keys[i] = (float)(ekv_normal(c) * (i % (size_t)kv.k_dim < 4 ? 3.0 : 0.3));
    kv.k = kv.v = keys;
    ekv_status status = ekv_index_create_on_host(c->context, &params, NULL, &host);
    if (status == EKV_OK) status = ekv_sketch_find(c->context, host, ekv_statistics_kernels(c->context), &kv, NULL, TOKENS);
    if (status == EKV_OK) status = ekv_index_save_basis(c->context, host, keys + elements, bytes);
    if (status == EKV_OK) status = ekv_index_load_basis(c->context, p->index, keys + elements, bytes);
    ekv_index_destroy(host);
    return succeeded(c, status);
}

static bool find_basis(ekv_check *c, problem *p) {
    placed d;
    return place(c, p, &p->step, &d) &&
           done(c, ekv_index_find_basis(c->context, p->index, &d.kv, at(c, p->table), p->lengths[0]));
}

static bool make_index(ekv_check *c, problem *p) {
    ekv_index_params params = ekv_index_params_default();
    params.dtype = p->kv.dtype;
    params.kv_heads = p->kv.kv_heads;
    params.k_dim = p->kv.k_dim;
    params.v_dim = p->kv.v_dim;
    params.page_size = p->kv.page_size;
    params.blocks = p->kv.blocks;
    const bool sketch = p->kv.page_size % EKV_SKETCH_GROUP == 0, finite = c->value[AXIS_CONTENT] < HUGE_SCORES;
    if (sketch) params.statistics |= EKV_STATISTICS_SKETCH;
    /* The library wants 64-byte alignment: at an end of its pages of memory the index has it. */
    const size_t bytes = (ekv_index_bytes(&params) + 63) / 64 * 64;
    const int placement = c->placement;
    c->placement = placement == 2 ? 0 : placement;
    char *memory = ekv_room_inout(c, "index", (int64_t)bytes, 1);
    c->placement = placement;
    const bool basis = sketch && c->on_device && p->step.policy == EKV_POLICY_CERTIFIED && p->lengths[0] >= EKV_SKETCH_TRAINING;
    placed d;
    if (!memory || !place(c, p, &p->step, &d) || !done(c, ekv_index_create(c->context, &params, at(c, memory), bytes, &p->index)))
        return false;
    if (basis && !finite && (!place(c, p, &p->step, &d) || !load_basis(c, p) || !done(c, EKV_OK))) return false;
    /* Finding one sketches the first sequence, and forgets what was sketched of others. */
    return run_update(c, p, 0) && (!basis || !finite || (find_basis(c, p) && run_update(c, p, 1)));
}

/* ---- the reference's view of a row ---- */

static void describe_row(const problem *p, int64_t number, row *r) {
    const int64_t token = number / p->q_heads;
    r->number = number;
    r->head = (int32_t)(number % p->q_heads);
    r->sequence = token >= p->q_start[1];
    r->n = p->lengths[r->sequence] == 0 ? 0 : p->lengths[r->sequence] - (int32_t)(p->q_start[r->sequence + 1] - 1 - token);
    r->pages = (int32_t)ekv_ceil_div(r->n, p->kv.page_size);
}

static void measure_row(const problem *p, const double *z, const double *weight, row *r) {
    r->z_size = 0.0;
    for (int32_t t = 0; t < r->n; t++)
        if (weight[t] >= 1e-9) r->z_size = fmax(r->z_size, fabs(z[t]));
    r->error = 8.0 * 2.0 * EKV_U * fmax(r->z_size, 1.0);
    for (int32_t t = 0; t < r->n; t++) {
        double squares = 0.0;
        for (int d = 0; d < p->kv.v_dim; d++) {
            const double x = ekv_reference_load(p->kv.dtype, r->problem.values[t], d);
            squares += x * x;
        }
        r->value_norm[t] = sqrt(squares);
    }
}

/* Solves a row over the pages that the backend selected. */
static bool solve_row(ekv_check *c, const problem *p, int64_t number, row *r) {
    const ekv_decode_params *s = &p->step;
    describe_row(p, number, r);
    const size_t n = (size_t)r->n, pages = (size_t)r->pages;
    char *memory =
        ekv_scratch(c, (2 * sizeof(void *) + 3 * sizeof(double)) * n + sizeof(double) * (3 * pages + 2 * EKV_MAX_DIM));
    if (!memory) return false;
    const void **keys = (const void **)(void *)memory, **values = keys + n;
    double *z = (double *)(void *)(values + n), *weight = z + n, *q = weight + n, *out = q + EKV_MAX_DIM;
    r->value_norm = out + EKV_MAX_DIM;
    double *bound = r->value_norm + n, *mean = bound + pages, *deviation = mean + pages;
    for (int32_t t = 0; t < r->n; t++) {
        keys[t] = key_of(p, r->sequence, t, r->head / p->group);
        values[t] = value_of(p, r->sequence, t, r->head / p->group);
    }
    for (int d = 0; d < p->kv.k_dim; d++)
        q[d] = ekv_reference_load(s->q_dtype, p->q, number / p->q_heads * s->q_token_stride + r->head * s->q_head_stride + d);
    r->problem = (ekv_reference_problem){.n = r->n,
                                         .page_size = p->kv.page_size,
                                         .k_dim = p->kv.k_dim,
                                         .v_dim = p->kv.v_dim,
                                         .dtype = p->kv.dtype,
                                         .keys = keys,
                                         .values = values,
                                         .q = q,
                                         .alpha = s->alpha,
                                         .scale = s->scale == 0.0f ? 1.0 / sqrt((double)p->kv.k_dim) : (double)s->scale,
                                         .slope = s->slopes ? (double)s->slopes[r->head] : 0.0,
                                         .policy = EKV_POLICY_PAGES,
                                         .budget = s->budget,
                                         .first_pages = s->first_pages,
                                         .recent_tokens = s->recent_tokens,
                                         .gaussian_model = s->gaussian_model,
                                         .quantile = s->quantile,
                                         .margin_sigma = s->margin_sigma,
                                         .margin_fraction = s->margin_fraction,
                                         .page_mask = p->selected + number * p->table_stride};
    r->result = (ekv_reference_result){
        .out = out, .z = z, .p = weight, .page_bound = bound, .page_mean = mean, .page_deviation = deviation};
    if (!ekv_expect_true(c, "memory for the reference", -1, ekv_reference_row(&r->problem, &r->result) == 0)) return false;
    measure_row(p, z, weight, r);
    return true;
}

/* ---- what was selected ---- */

static bool is_forced(const problem *p, const row *r, int32_t page) {
    const ekv_decode_params *s = &p->step;
    return page == r->pages - 1 || page < s->first_pages ||
           (s->recent_tokens > 0 && (int64_t)(page + 1) * p->kv.page_size > r->n - s->recent_tokens);
}

/* The sum over dimensions of |scale q| times the largest |key element|, and of |scale q|. */
static double score_size(const problem *p, const row *r, int32_t page, double *q_size) {
    double size = 0.0;
    *q_size = 0.0;
    for (int d = 0; d < p->kv.k_dim; d++) {
        double largest = 0.0;
        const int32_t end = (page + 1) * p->kv.page_size < r->n ? (page + 1) * p->kv.page_size : r->n;
        for (int32_t t = page * p->kv.page_size; t < end; t++)
            largest = fmax(largest, fabs(ekv_reference_load(p->kv.dtype, r->problem.keys[t], d)));
        size += fabs(r->problem.scale * r->problem.q[d]) * largest;
        *q_size += fabs(r->problem.scale * r->problem.q[d]);
    }
    return size;
}

/* Page statistics of a row that sees all that they cover, against the exact ones.  Bound: page.h's slack, as in
 * conform_pages.c, and the conversions to and from z units (4 u).  Moments: the storing type's rounding, the sums over the page
 * and over dimensions. */
static void check_statistics(ekv_check *c, const problem *p, const row *r) {
    const double host = (double)((p->kv.k_dim + 31) / 32 + 5), device = p->kv.k_dim % 8 ? 37.0 : p->kv.k_dim <= 256 ? 13.0 : 29.0;
    const double steps = c->on_device ? device : host, stored = p->kv.dtype == EKV_F16 ? 0x1p-11 : EKV_U;
    for (int32_t page = 0; page < r->pages && !c->failed; page++) {
        const int64_t at = r->number * p->table_stride + page;
        const double exact = r->result.page_bound[page], bias = r->problem.slope * (double)(r->n - page * p->kv.page_size);
        double q_size;
        const double size = score_size(p, r, page, &q_size), mean = r->result.page_mean[page];
        if (!isfinite(exact)) {
            ekv_expect(c, "page bound", page, (double)p->bounds[at], (double)INFINITY, 0.0);
            continue;
        }
        const double slack = (3.0 * steps + 30.0) * EKV_U * size + (0x1p-20 + 8.0 * EKV_U) * fabs(bias) + 0x1p-100;
        ekv_expect_in(c, "page bound", page, (double)p->bounds[at], exact - 1e-13 * (size + fabs(bias)), exact + 1.01 * slack);
        if (c->value[AXIS_CONTENT] == HUGE_SCORES) continue; /* squares overflow: checked at the kernel */
        const double room = (stored + (steps + p->kv.page_size + 8.0) * EKV_U) * size +
                            (p->kv.dtype == EKV_F16 ? 0x1p-25 * q_size : 0.0) + 8.0 * EKV_U * fabs(bias);
        ekv_expect(c, "page mean", page, (double)p->mean[at], mean, room);
        const double n = (double)p->kv.page_size, deviation = r->result.page_deviation[page];
        ekv_expect(c, "page deviation", page, (double)p->deviation[at], deviation,
                   (1.01 * stored + (steps + n + 8.0) * EKV_U) * deviation + (n + 2.0) * EKV_U * size +
                       (p->kv.dtype == EKV_F16 ? 0x1p-24 * q_size : 0.0));
    }
}

static void check_topk(ekv_check *c, const problem *p, const row *r) {
    const uint8_t *selected = p->selected + r->number * p->table_stride;
    const float *bound = p->bounds + r->number * p->table_stride;
    int64_t forced = 0, count = 0, worst = -1, best = -1;
    for (int32_t page = 0; page < r->pages; page++) {
        const bool forced_page = is_forced(p, r, page) || bound[page] == INFINITY; /* a key that is not finite is always read */
        forced += forced_page;
        count += selected[page];
        if (forced_page) {
            ekv_expect(c, "selected, a page with a key that is not finite", page, selected[page], 1.0, 0.0);
            continue;
        }
        if (selected[page] && (worst < 0 || bound[page] <= bound[worst])) worst = page; /* the last of the lowest */
        if (!selected[page] && (best < 0 || bound[page] > bound[best])) best = page;    /* the first of the highest */
    }
    const int64_t wanted = ekv_min64(ekv_max64(1, ekv_ceil_div(p->step.budget, p->kv.page_size)), r->pages);
    ekv_expect(c, "pages selected", r->number, (double)count, (double)ekv_max64(forced, wanted), 0.0);
    if (worst >= 0 && best >= 0)
        ekv_expect_true(c, "pages with the largest bounds, ties to the lower index", best,
                        bound[worst] > bound[best] || (bound[worst] == bound[best] && worst < best));
}

static void check_gaussian(ekv_check *c, const problem *p, const row *r) {
    const uint8_t *selected = p->selected + r->number * p->table_stride;
    const double a = p->step.alpha - 1.0;
    double *lead = ekv_scratch(c, 3 * (size_t)r->pages * sizeof *lead), *mean = lead + r->pages, *deviation = mean + r->pages;
    double size = 1.0;
    bool finite = true;
    if (!lead) return;
    for (int32_t page = 0; page < r->pages; page++) {
        mean[page] = (double)p->mean[r->number * p->table_stride + page];
        deviation[page] = (double)p->deviation[r->number * p->table_stride + page];
        finite = finite && isfinite(mean[page]) && isfinite(deviation[page]);
        size = fmax(size, a * (fabs(mean[page]) + 4.0 * deviation[page]));
    }
    if (finite && ekv_reference_leads(&r->problem, mean, deviation, lead) != 0) return;
    for (int32_t page = 0; page < r->pages; page++) { /* moments are asked for in s, rounded from z: a few u of their size */
        if (!finite || lead[page] > 32.0 * EKV_U * size)
            ekv_expect(c, "selected: a page whose quantile exceeds tau", page, selected[page], 1.0, 0.0);
        else if (lead[page] < -32.0 * EKV_U * size && !is_forced(p, r, page))
            ekv_expect(c, "selected: a page whose quantile lies below tau", page, selected[page], 0.0, 0.0);
    }
}

static void check_selection(ekv_check *c, const problem *p, const row *r) {
    const uint8_t *selected = p->selected + r->number * p->table_stride, *mask = p->mask + r->number * p->table_stride;
    const ekv_policy policy = p->step.policy;
    for (int32_t page = 0; page < r->pages && !c->failed; page++) {
        ekv_expect_in(c, "selected", page, selected[page], 0.0, 1.0);
        if (policy == EKV_POLICY_FULL) ekv_expect(c, "selected, policy full", page, selected[page], 1.0, 0.0);
        if (policy == EKV_POLICY_PAGES) ekv_expect(c, "selected, policy pages", page, selected[page], mask[page] != 0, 0.0);
        if ((policy == EKV_POLICY_TOPK || policy == EKV_POLICY_GAUSSIAN) && is_forced(p, r, page))
            ekv_expect(c, "selected, a forced page", page, selected[page], 1.0, 0.0);
    }
    if (r->pages == 0 || c->failed) return;
    const bool last = p->last[r->number / p->q_heads];
    if (last) check_statistics(c, p, r);
    if (policy == EKV_POLICY_TOPK) check_topk(c, p, r);
    if (policy == EKV_POLICY_GAUSSIAN) check_gaussian(c, p, r);
}

/* ---- what came out ---- */

/* Absolute L2 tolerance of a row's output. */
static double output_tolerance(const ekv_check *c, const problem *p, const row *r) {
    const double beta = 1.0 / (p->step.alpha - 1.0);
    double out = 0.0, parts = 0.0, sum;
    for (int d = 0; d < p->kv.v_dim; d++) out += r->result.out[d] * r->result.out[d];
    for (int32_t t = 0; t < r->n; t++)
        if (r->result.p[t] > 0.0) parts += r->result.p[t] * r->result.p[t] * r->value_norm[t] * r->value_norm[t];
    const double size = sqrt(fmax(out, parts)); /* where values cancel, what was added counts */
    if (c->value[AXIS_CONTENT] == HUGE_SCORES) return 3e-6 * size;
    if (p->step.alpha <= 2.0) return 3e-6 * fmax(1.0, r->z_size) * size;
    sum = 1e-6 * size;
    for (int32_t t = 0; t < r->n; t++) {
        if (!r->problem.page_mask[t / p->kv.page_size]) continue;
        const double x = r->result.z[t] - r->result.tau, here = pow(fmax(x, 0.0), beta);
        const double high = pow(fmax(x + 2.0 * r->error, 0.0), beta), low = pow(fmax(x - 2.0 * r->error, 0.0), beta);
        sum += fmax(high - here, here - low) * r->value_norm[t];
    }
    return sum;
}

static void check_output(ekv_check *c, const problem *p, const row *r) {
    const ekv_decode_params *s = &p->step;
    const int64_t at = r->number / p->q_heads * s->out_token_stride + r->head * s->out_head_stride;
    double square = 0.0, furthest = -1.0;
    int worst = 0;
    const double tolerance = output_tolerance(c, p, r) + 1e-38;
    for (int d = 0; d < p->kv.v_dim; d++) {
        const double got = ekv_reference_load(s->out_dtype, p->out, at + d), right = r->result.out[d];
        if (isnan(right)) {
            ekv_expect(c, "out of a row that reads a NaN", at + d, got, right, 0.0);
            continue;
        }
        const double rounding = s->out_dtype == EKV_F32 ? 0.0 : ekv_half_ulp(s->out_dtype, fabs(right) + tolerance);
        ekv_expect(c, "out", at + d, got, right, tolerance + rounding);
        const double beyond = fmax(fabs(got - right) - rounding, 0.0);
        square += beyond * beyond;
        if (beyond > furthest) {
            furthest = beyond;
            worst = d;
        }
    }
    if (!c->failed && !isnan(square) && !(sqrt(square) <= tolerance)) {
        ekv_expect(c, "out, L2 norm of a row's error, at its worst element", at + worst, sqrt(square), 0.0, tolerance);
        return;
    }
    if (r->number + 1 < p->rows) { /* padding */
        const size_t e = ekv_element_bytes(s->out_dtype);
        ekv_expect_true(c, "padding of out is untouched", at + p->kv.v_dim,
                        ekv_poisoned(p->out + (size_t)(at + p->kv.v_dim) * e, (size_t)p->pad * e));
    }
}

/* The mass of the unread under the full-cache weights, but for tokens so near tau that rounding may have placed them there. */
static double mass_lost(const problem *p, const row *r, double *z) {
    const double beta = 1.0 / (p->step.alpha - 1.0);
    double lost = 0.0;
    for (int32_t t = 0; t < r->n; t++) {
        if (r->problem.page_mask[t / p->kv.page_size]) continue;
        const double x = z[t] - r->result.tau_full;
        if (p->step.alpha == 1.0)
            lost += exp(x);
        else if (x > 4.0 * r->error)
            lost += pow(x, beta);
    }
    return lost;
}

static void check_report(ekv_check *c, const problem *p, const row *r) {
    const ekv_report *report = &p->report[r->number];
    int64_t tokens = 0, pages = 0, least = 0, most = 0;
    double top = 0.0;
    for (int32_t t = 0; t < r->n; t++) {
        if (!r->problem.page_mask[t / p->kv.page_size]) continue;
        tokens++;
        pages += t % p->kv.page_size == 0;
        if (isfinite(r->result.z[t])) top = fmax(top, fabs(r->result.z[t]));
    }
    const double error = c->value[AXIS_CONTENT] == HUGE_SCORES ? 16.0 * EKV_U * fmax(top, 1.0) : r->error;
    if (p->step.policy == EKV_POLICY_CERTIFIED) {
        ekv_expect_in(c, "report: tokens", r->number, (double)report->tokens, r->n > 0, (double)tokens);
        ekv_expect_in(c, "report: pages", r->number, (double)report->pages, r->n > 0, (double)pages);
        ekv_expect_true(c, "report: certified", r->number, report->certified || isnan(r->result.tau));
    } else {
        ekv_expect(c, "report: tokens", r->number, (double)report->tokens, (double)tokens, 0.0);
        ekv_expect(c, "report: pages", r->number, (double)report->pages, (double)pages, 0.0);
    }
    ekv_expect(c, "report: tau", r->number, report->tau, r->result.tau, error);
    if (!isfinite(r->result.tau)) return;
    for (int32_t t = 0; t < r->n; t++) {
        if (!r->problem.page_mask[t / p->kv.page_size]) continue;
        least += p->step.alpha == 1.0 ? r->result.z[t] - r->result.tau > -80.0 : r->result.z[t] - r->result.tau > 2.0 * error;
        most += p->step.alpha == 1.0 ? 1 : r->result.z[t] - r->result.tau > -2.0 * error;
    }
    ekv_expect_in(c, "report: support", r->number, (double)report->support, (double)least, (double)most);
    if (isnan(r->result.tau_full) || c->value[AXIS_CONTENT] == HUGE_SCORES) return;
    const double lost = mass_lost(p, r, r->result.z), slack = 1e-9 + (p->step.alpha == 1.0 ? 4.0 * r->error * lost : 0.0);
    ekv_expect_in(c, "report: E is at least the mass that was lost", r->number, report->mass_bound, lost * (1.0 - 1e-6) - slack,
                  1.0 + 1e-12);
    if (report->certified) ekv_expect(c, "report: mass lost by a certified row", r->number, lost, 0.0, slack);
}

/* ---- a case ---- */

/* NaN over the pages of a KV head that no row of its group reads. */
static void poison_unread(const problem *p) {
    const size_t e = ekv_element_bytes(p->kv.dtype);
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < KV_HEADS; h++)
            for (int32_t page = 0; page < p->pages[b]; page++) {
                bool read = false;
                for (int64_t token = p->q_start[b]; token < p->q_start[b + 1]; token++)
                    for (int g = 0; g < p->group && !read; g++) {
                        row r;
                        describe_row(p, token * p->q_heads + h * p->group + g, &r);
                        read = page < r.pages && p->selected[r.number * p->table_stride + page];
                    }
                for (int32_t t = page * p->kv.page_size; !read && t < (page + 1) * p->kv.page_size && t < p->lengths[b]; t++) {
                    memset(key_of(p, b, t, h), 0xFF, (size_t)p->kv.k_dim * e);
                    memset(value_of(p, b, t, h), 0xFF, (size_t)p->kv.v_dim * e);
                }
            }
}

/* The rows that are checked: spread over tokens and heads; fewer where the reference takes long. */
static int64_t row_step(const problem *p) {
    const int64_t rows = p->lengths[0] > 1000 ? 2 : CHECKED_ROWS;
    return p->rows <= rows ? 1 : p->rows / rows | 1;
}

/* What the policy reads, asked of the backend; all pages for policy certified. */
static bool select_pages(ekv_check *c, problem *p) {
    if (p->step.policy != EKV_POLICY_CERTIFIED)
        return run_select(c, p);
    ekv_expect(c, "status of ekv_select_pages for policy certified", -1,
               ekv_select_pages(c->context, &p->step, p->selected, p->table_stride), EKV_ERROR_UNSUPPORTED, 0.0);
    for (int64_t number = 0; number < p->rows; number++) {
        row r;
        describe_row(p, number, &r);
        memset(p->selected + number * p->table_stride, 1, (size_t)r.pages);
    }
    return true;
}

/* The same step by policy full gives the same bits. */
static void check_against_full(ekv_check *c, problem *p) {
    const size_t e = ekv_element_bytes(p->step.out_dtype),
                 bytes = (size_t)(p->q_start[BATCH] * p->step.out_token_stride - p->pad) * e;
    ekv_decode_params full = p->step;
    full.policy = EKV_POLICY_FULL;
    full.out = p->full;
    full.report = NULL;
    if (!run_decode(c, p, &full)) return;
    for (size_t i = 0; i < bytes; i += e)
        if (memcmp(p->out + i, p->full + i, e) != 0)
            ekv_expect(c, "out of policy certified, against that of policy full", (int64_t)(i / e),
                       ekv_reference_load(p->step.out_dtype, p->out + i, 0),
                       ekv_reference_load(p->step.out_dtype, p->full + i, 0), 0.0);
}

static void check_step(ekv_check *c, problem *p) {
    row rows[CHECKED_ROWS * 2];
    int n = 0;
    ekv_decode_params *s = &p->step;
    if (!select_pages(c, p) || !run_bounds(c, p) || !run_moments(c, p)) return;
    for (int64_t number = ekv_below(c, (int)row_step(p)); number < p->rows && n < CHECKED_ROWS * 2;
         number += row_step(p), n++) {
        if (!solve_row(c, p, number, &rows[n])) return;
        check_selection(c, p, &rows[n]);
    }
    if (c->failed) return;
    if (c->table || c->on_device) poison_unread(p); /* `reference` keeps no statistics: it reads all keys */
    ekv_seal(c);
    if (!run_decode(c, p, s)) return;
    for (int i = 0; i < n && !c->failed; i++) {
        check_output(c, p, &rows[i]);
        check_report(c, p, &rows[i]);
    }
    if (s->policy == EKV_POLICY_CERTIFIED && !c->failed) check_against_full(c, p);
}

static void check_policy(ekv_check *c, ekv_policy policy) {
    problem *p = ekv_scratch(c, sizeof *p);
    float slopes[64];
    c->unsupported = c->table && !c->complete;
    if (!p || c->unsupported) return;
    memset(p, 0, sizeof *p);
    p->step = ekv_decode_params_default();
    make_sizes(c, p);
    if (!make_memory(c, p)) return;
    p->kv.k = p->k;
    p->kv.v = p->v;
    make_tables(c, p);
    fill_memory(c, p);
    p->step.policy = policy;
    if (make_index(c, p)) {
        set_step(c, p, policy, slopes);
        check_step(c, p);
    }
    ekv_index_destroy(p->index);
}

static void check_full(ekv_check *c) { check_policy(c, EKV_POLICY_FULL); }
static void check_topk_policy(ekv_check *c) { check_policy(c, EKV_POLICY_TOPK); }
static void check_gaussian_policy(ekv_check *c) { check_policy(c, EKV_POLICY_GAUSSIAN); }
static void check_pages(ekv_check *c) { check_policy(c, EKV_POLICY_PAGES); }
static void check_certified(ekv_check *c) { check_policy(c, EKV_POLICY_CERTIFIED); }

#define POLICY_AXES(dim_values, shape_names, alpha_axis)                                                                       \
  {                                                                                                                            \
    EKV_NAMES("dtype", ekv_dtypes), EKV_NUMBERS("dim", dim_values), EKV_NAMES("shape", shape_names),                           \
        EKV_NUMBERS("length", lengths), alpha_axis, EKV_NAMES("content", contents), EKV_NAMES("bias", biases),                 \
        EKV_NAMES("memory", ekv_placements)                                                                                    \
  }
#define ALL_ALPHAS                                                                                                             \
  { "alpha", 6, alpha_names, NULL }
#define ENTMAX_ALPHAS                                                                                                          \
  { "alpha", 5, alpha_names + 1, NULL }

#define POLICY_FAMILIES(dims, shapes)                                                                                          \
  {{"policy-full", 90, check_full, POLICY_AXES(dims, shapes, ALL_ALPHAS)},                                                     \
   {"policy-topk", 90, check_topk_policy, POLICY_AXES(dims, shapes, ALL_ALPHAS)},                                              \
   {"policy-gaussian", 90, check_gaussian_policy, POLICY_AXES(dims, shapes, ENTMAX_ALPHAS)},                                   \
   {"policy-pages", 90, check_pages, POLICY_AXES(dims, shapes, ALL_ALPHAS)},                                                   \
   {"policy-certified", 90, check_certified, POLICY_AXES(dims, shapes, ENTMAX_ALPHAS)},                                        \
   {0}}

const ekv_family ekv_policy_families[] = POLICY_FAMILIES(dims, shapes);
const ekv_family ekv_device_families[] = POLICY_FAMILIES(device_dims, device_shapes);
