/*
 * The backend `reference`: gives every row of a step to cpu/reference.c and writes what comes back.  Slow, serial, allocates; nothing
 * of the fast pipeline is used beyond the description of the rows.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cpu/reference.h"

#include "dispatch/step.h"

#include <math.h>
#include <string.h>

/* Memory for one row, sized for the longest. */
typedef struct oracle {
    const void **keys, **values;
    double *q, *out, *p, *bound, *mean, *deviation;
    uint8_t *pages;
    uint8_t *item_pages, *item_values; /* what some row of the item reads */
} oracle;

static void lay_out(const ekv_step *step, int64_t n, int64_t pages, ekv_arena *arena, oracle *o) {
    o->keys = ekv_take(arena, (size_t)n, sizeof *o->keys);
    o->values = ekv_take(arena, (size_t)n, sizeof *o->values);
    o->q = ekv_take(arena, (size_t)step->kv.k_dim, sizeof *o->q);
    o->out = ekv_take(arena, (size_t)step->kv.v_dim, sizeof *o->out);
    o->bound = ekv_take(arena, (size_t)pages, sizeof *o->bound);
    o->mean = ekv_take(arena, (size_t)pages, sizeof *o->mean);
    o->deviation = ekv_take(arena, (size_t)pages, sizeof *o->deviation);
    o->pages = ekv_take(arena, (size_t)pages, 1);
    o->p = ekv_take(arena, (size_t)n, sizeof *o->p);
    o->item_pages = ekv_take(arena, (size_t)pages, 1);
    o->item_values = ekv_take(arena, (size_t)n, 1);
}

/* Solves one row of an item. */
static ekv_status solve_row(const ekv_step *step, const ekv_item *item, const ekv_row *row, oracle *o, ekv_reference_result *result) {
    const ekv_decode_params *p = &step->p;
    for (int32_t t = 0; t < row->n; t++) {
        const int64_t block = ekv_block(item, t / step->kv.page_size);
        o->keys[t] = ekv_key(&step->kv, block, t % step->kv.page_size, item->head);
        o->values[t] = ekv_value(&step->kv, block, t % step->kv.page_size, item->head);
    }
    for (int32_t d = 0; d < step->kv.k_dim; d++) o->q[d] = ekv_reference_load(p->q_dtype, row->query, d);
    const ekv_reference_problem problem = {
        .n = row->n, .page_size = step->kv.page_size, .k_dim = step->kv.k_dim, .v_dim = step->kv.v_dim, .dtype = step->kv.dtype,
        .keys = o->keys, .values = o->values, .q = o->q, .alpha = row->alpha, .scale = row->scale,
        .slope = p->slopes ? (double)p->slopes[row->head] : 0.0,
        .policy = p->policy == EKV_POLICY_CERTIFIED ? EKV_POLICY_FULL : p->policy, .budget = p->budget,
        .first_pages = p->first_pages, .recent_tokens = p->recent_tokens, .gaussian_model = p->gaussian_model, .quantile = p->quantile,
        .margin_sigma = p->margin_sigma, .margin_fraction = p->margin_fraction,
        .page_mask = p->page_mask ? p->page_mask + ((int64_t)row->token * p->q_heads + row->head) * p->page_mask_stride : NULL};
    *result = (ekv_reference_result){.out = o->out, .p = o->p, .pages = o->pages, .page_bound = o->bound, .page_mean = o->mean,
                                     .page_deviation = o->deviation};
    if (ekv_reference_row(&problem, result) != 0)
        return ekv_fail(step->context, EKV_ERROR_OUT_OF_MEMORY, "out of memory in the reference");
    return EKV_OK;
}

static void write_out(const ekv_step *step, const ekv_row *row, const oracle *o) {
    const int64_t at = row->token * step->p.out_token_stride + row->head * step->p.out_head_stride;
    ekv_backend_entry best;
    float x[EKV_MAX_DIM];
    for (int32_t d = 0; d < step->kv.v_dim; d++) x[d] = (float)o->out[d];
    ekv_store_row_args store = {x, step->kv.v_dim, (void *)ekv_at(step->p.out, at, step->p.out_dtype)};
    if (ekv_find_backend("scalar", &best)) best.kernels->store_row[step->p.out_dtype](&store);
}

static void write_report(const ekv_step *step, const ekv_row *row, const oracle *o, const ekv_reference_result *result) {
    const double mass = result->mass_bound > 1.0 ? 1.0 : result->mass_bound; /* a share, but for its last rounding */
    ekv_report r = {.tau = result->tau, .mass_bound = mass, .error_bound = 2.0 * result->value_norm * mass, .support = result->support};
    for (int32_t p = 0; p < row->pages; p++) {
        if (!o->pages[p]) continue;
        r.pages++;
        r.tokens += ekv_page_tokens(step, row->n, p);
    }
    const bool norms = step->index && step->index->norms;
    r.certified = r.tokens == row->n || (!row->softmax && !isnan(r.tau));
    for (int32_t p = 0; p < row->pages && r.certified; p++)
        r.certified = o->pages[p] || (row->alpha - 1.0) * o->bound[p] <= r.tau;
    if (r.certified)
        r.mass_bound = r.error_bound = 0.0;
    else if (!step->p.report_mass)
        r.mass_bound = r.error_bound = NAN;
    else if (!norms)
        r.error_bound = NAN;
    step->p.report[(int64_t)row->token * step->p.q_heads + row->head] = r;
}

static void add_reads(const ekv_row *row, const oracle *o) {
    for (int32_t p = 0; p < row->pages; p++) o->item_pages[p] |= o->pages[p];
    for (int32_t t = 0; t < row->n; t++) o->item_values[t] |= !(o->p[t] == 0.0); /* NaN too */
}

/* The fields that stand for the whole item, in the entry of its first row.  For statistics: what the other backends would read. */
static void write_item(const ekv_step *step, const ekv_item *item, const oracle *o) {
    const int64_t element = (int64_t)ekv_element_bytes(step->kv.dtype);
    ekv_row first = {0};
    ekv_describe_row(step, item, 0, &first);
    ekv_report *r = &step->p.report[(int64_t)first.token * step->p.q_heads + first.head];
    for (int32_t p = 0; p < item->pages; p++) {
        r->group_pages += o->item_pages[p];
        if (o->item_pages[p]) r->bytes_keys += ekv_page_tokens(step, item->n, p) * step->kv.k_dim * element;
    }
    for (int32_t t = 0; t < item->n; t++) r->bytes_values += o->item_values[t] * step->kv.v_dim * element;
    const int64_t boxes = !step->bounds ? 0 : step->p.policy == EKV_POLICY_TOPK ? item->pages : item->pages - r->group_pages;
    const bool norms = step->p.report_mass && step->index && step->index->norms && boxes > 0;
    r->bytes_statistics = boxes * (int64_t)(step->index ? step->index->box_bytes : 0) +
                          (step->moments ? item->pages * (int64_t)step->index->moments_bytes : 0) +
                          (norms ? item->pages * (int64_t)sizeof(float) : 0);
    r->total_pages = item->pages;
    r->bytes_dense = (int64_t)item->n * (step->kv.k_dim + step->kv.v_dim) * element;
}

typedef struct outputs {
    float *bounds, *mean, *deviation;
    uint8_t *selected;
    int64_t stride;
} outputs;

static void write_query(const ekv_step *step, const ekv_row *row, const oracle *o, const outputs *to) {
    const int64_t at = ((int64_t)row->token * step->p.q_heads + row->head) * to->stride;
    for (int32_t p = 0; p < row->pages; p++) {
        if (to->bounds) to->bounds[at + p] = isnan(o->bound[p]) ? INFINITY : nextafterf((float)o->bound[p], INFINITY);
        if (to->mean) to->mean[at + p] = (float)o->mean[p];
        if (to->deviation) to->deviation[at + p] = (float)o->deviation[p];
        if (to->selected) to->selected[at + p] = o->pages[p];
    }
}

/* All rows of all items; to is NULL for a decode step. */
static ekv_status each_row(const ekv_step *step, const ekv_item *items, int64_t n, const outputs *to) {
    int64_t longest = 0, pages = 0;
    for (int64_t i = 0; i < n; i++) {
        longest = ekv_max64(longest, items[i].n);
        pages = ekv_max64(pages, items[i].pages);
    }
    oracle o;
    ekv_arena arena = {NULL, 0};
    lay_out(step, longest, pages, &arena, &o);
    const size_t bytes = arena.used;
    void *memory = ekv_allocate(&step->context->allocator, bytes);
    if (!memory) return ekv_fail(step->context, EKV_ERROR_OUT_OF_MEMORY, "out of memory: %zu bytes for the reference", bytes);
    arena = (ekv_arena){memory, 0};
    lay_out(step, longest, pages, &arena, &o);
    ekv_status status = EKV_OK;
    for (int64_t i = 0; i < n && status == EKV_OK; i++) {
        memset(o.item_pages, 0, (size_t)items[i].pages);
        memset(o.item_values, 0, (size_t)items[i].n);
        for (int32_t r = 0; r < items[i].rows && status == EKV_OK; r++) {
            ekv_row row = {0};
            ekv_reference_result result;
            ekv_describe_row(step, &items[i], r, &row);
            status = solve_row(step, &items[i], &row, &o, &result);
            if (status != EKV_OK) break;
            if (to)
                write_query(step, &row, &o, to);
            else
                write_out(step, &row, &o);
            if (!to && step->p.report) write_report(step, &row, &o, &result);
            add_reads(&row, &o);
        }
        if (!to && step->p.report && status == EKV_OK) write_item(step, &items[i], &o);
    }
    ekv_release(&step->context->allocator, memory, bytes);
    return status;
}

ekv_status ekv_reference_decode(const ekv_step *step, const ekv_item *items, int64_t n) { return each_row(step, items, n, NULL); }

ekv_status ekv_reference_query(const ekv_step *step, const ekv_item *items, int64_t n, float *bounds, float *mean, float *deviation,
                               uint8_t *selected, int64_t stride) {
    const outputs to = {bounds, mean, deviation, selected, stride};
    return each_row(step, items, n, &to);
}

ekv_status ekv_reference_transform(ekv_context *context, double alpha, const float *scores, int64_t n, float *weights, double *tau,
                                   int64_t *support) {
    const size_t bytes = 2 * (size_t)n * sizeof(double);
    double *z = ekv_allocate(&context->allocator, bytes), *p = z + n;
    if (!z) return ekv_fail(context, EKV_ERROR_OUT_OF_MEMORY, "out of memory: %zu bytes for the reference", bytes);
    const double factor = alpha < EKV_SOFTMAX_BELOW ? 1.0 : alpha - 1.0;
    for (int64_t i = 0; i < n; i++) z[i] = factor * (double)scores[i];
    *tau = ekv_reference_entmax(alpha, z, NULL, n, p);
    *support = 0;
    for (int64_t i = 0; i < n; i++) {
        weights[i] = (float)p[i];
        *support += p[i] > 0.0;
    }
    ekv_release(&context->allocator, z, bytes);
    return EKV_OK;
}
