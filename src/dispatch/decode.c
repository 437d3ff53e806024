/*
 * The decode step: cuts a validated call into items and runs their stages; and the public entry points of level 2.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/cuda.h"
#include "dispatch/step.h"

#include <math.h>

#define VALID(condition, ...) \
    if (!(condition)) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

/* ---- items ---- */

/* Rows of a sequence are numbered token by token, heads of the group within; an item takes whole tokens where the group is small. */
static int32_t whole_tokens(const ekv_step *step, int32_t rows) { return rows <= step->group ? rows : rows / step->group * step->group; }

static int64_t blocks_of(const ekv_step *step, int32_t b) {
    return ekv_ceil_div((ekv_q_begin(&step->p, b + 1) - ekv_q_begin(&step->p, b)) * step->group, step->item_rows);
}

/* Fills in where an item lies; its memory comes later. */
static void describe_item(const ekv_step *step, int32_t b, int32_t head, int64_t block, ekv_item *item) {
    const int64_t queries = ekv_q_begin(&step->p, b + 1) - ekv_q_begin(&step->p, b), length = ekv_length_of(step, b);
    *item = (ekv_item){.sequence = b, .head = head, .first_row = (int32_t)(block * step->item_rows)};
    item->rows = (int32_t)ekv_min64(step->item_rows, queries * step->group - item->first_row);
    const int64_t last_token = (item->first_row + item->rows - 1) / step->group;
    item->n = (int32_t)ekv_max64(0, length - (queries - 1 - last_token));
    if (length == 0) item->n = 0;
    item->pages = (int32_t)ekv_ceil_div(item->n, step->kv.page_size);
    item->spans = (int32_t)ekv_max64(1, ekv_ceil_div(item->n, EKV_SPAN));
    item->table = ekv_table_of(step, b);
    item->table_base = item->table ? 0 : b * step->p.block_table_stride;
}

/* Takes an item's memory from the arena; with an arena that only measures the pointers are NULL. */
static void place_item(const ekv_step *step, ekv_item *item, ekv_arena *arena) {
    const size_t rows = (size_t)item->rows, pages = (size_t)item->pages;
    const size_t list = step->lists ? (size_t)item->n : 0; /* at worst every token stays in its span's list */
    item->row = ekv_take(arena, rows, sizeof *item->row);
    item->part = ekv_take(arena, rows * (size_t)item->spans, sizeof *item->part);
    item->values = ekv_take(arena, rows * (size_t)item->spans * ekv_padded(step->kv.v_dim), sizeof(float));
    item->read = ekv_take(arena, step->certified ? (size_t)item->n / 64 + 1 : 0, sizeof(uint64_t));
    item->needed = ekv_take(arena, step->certified ? pages : 0, 1);
    if (!step->certified) item->needed = NULL;
    item->seen = ekv_take(arena, step->p.report ? (size_t)item->n / 64 + 1 : 0, sizeof(uint64_t));
    for (size_t r = 0; r < rows; r++) {
        ekv_row row = {0};
        row.q = ekv_take(arena, ekv_padded(step->kv.k_dim), sizeof(float));
        row.selected = ekv_take(arena, step->sparse ? pages : 0, 1);
        row.bound = ekv_take(arena, step->bounds || step->certified ? pages : 0, sizeof(float));
        row.order = ekv_take(arena, step->p.policy == EKV_POLICY_TOPK ? pages : 0, sizeof(uint32_t));
        const bool sketch = step->certified && step->index && step->index->codes;
        row.table = ekv_take(arena, sketch ? 1 : 0, sizeof *row.table);
        const size_t stretches = sketch ? (size_t)ekv_ceil_div(item->pages, step->index->stretch) : 0;
        row.center = ekv_take(arena, stretches, sizeof *row.center);
        row.start = ekv_take(arena, stretches, sizeof *row.start);
        row.mean = ekv_take(arena, step->moments ? pages : 0, sizeof(float));
        row.deviation = ekv_take(arena, step->moments ? pages : 0, sizeof(float));
        row.count = ekv_take(arena, step->moments ? 4 * pages : 0, sizeof(float));
        row.list_z = ekv_take(arena, list, sizeof(float));
        row.list_token = ekv_take(arena, list, sizeof(int32_t));
        row.weight = ekv_take(arena, list + (step->certified ? EKV_CERTIFY_SPARE : 0), sizeof(float));
        if (!arena->base) continue;
        if (!step->sparse) row.selected = NULL;
        if (!step->bounds && !step->certified) row.bound = NULL;
        row.sum = (uint16_t *)row.weight;
        if (!step->moments) row.mean = row.deviation = NULL;
        if (!list) row.list_z = row.weight = NULL, row.list_token = NULL;
        item->row[r] = row;
    }
}

void ekv_describe_row(const ekv_step *step, const ekv_item *item, int32_t r, ekv_row *row) {
    const ekv_decode_params *p = &step->p;
    const int32_t local = item->first_row + r, token = local / step->group;
    const int64_t begin = ekv_q_begin(p, item->sequence), queries = ekv_q_begin(p, item->sequence + 1) - begin;
    row->token = (int32_t)begin + token;
    row->head = item->head * step->group + local % step->group;
    row->n = (int32_t)(item->n == 0 ? 0 : ekv_length_of(step, item->sequence) - (queries - 1 - token));
    row->q_token = row->n - 1;
    row->pages = (int32_t)ekv_ceil_div(row->n, step->kv.page_size);
    row->alpha = ekv_alpha_of(p, row->head);
    row->softmax = row->alpha < EKV_SOFTMAX_BELOW;
    row->scale = (double)(p->head_scale ? p->head_scale[row->head] : p->scale);
    if (row->scale == 0.0) row->scale = 1.0 / sqrt((double)step->kv.k_dim);
    row->query = ekv_at(p->q, row->token * p->q_token_stride + row->head * p->q_head_stride, p->q_dtype);
}

static void prepare_row(const ekv_step *step, ekv_item *item, int32_t r) {
    ekv_row *row = &item->row[r];
    ekv_describe_row(step, item, r, row);
    const double factor = row->softmax ? 1.0 : row->alpha - 1.0, beta = 1.0 / factor;
    row->power = beta > 65.0 ? 65 : beta <= 1.0 ? 1 : (int32_t)ceil(beta - 1e-9);
    row->cut = -INFINITY;
    row->slope = step->p.slopes ? (float)(factor * (double)step->p.slopes[row->head]) : 0.0f;
    ekv_load_row_args load = {row->query, step->kv.k_dim, (float)(factor * row->scale), row->q};
    step->kernels->load_row[step->p.q_dtype](&load);
}

static void prepare(const ekv_step *step, ekv_item *item) {
    for (int32_t r = 0; r < item->rows; r++) prepare_row(step, item, r);
}

static bool has_statistics(const ekv_step *step) { return step->bounds || step->moments || step->certified; }

/* Everything that comes before keys, one after another. */
static void select_pages(const ekv_step *step, ekv_item *item) {
    for (int32_t span = 0; span < item->spans && has_statistics(step); span++) ekv_statistics(step, item, span);
    for (int32_t r = 0; r < item->rows; r++) ekv_select_row(step, item, &item->row[r]);
    ekv_select_item(step, item);
}

/* ---- scratch memory ---- */

/* What a step takes, measured before anything is touched. */
typedef struct plan {
    int64_t items, spans, rows;
    size_t item_bytes;  /* of the largest item */
    size_t all_bytes;   /* of all items together */
    size_t fixed_bytes; /* of the step's own arrays */
    size_t room;        /* for items, with the ceiling on scratch */
    bool whole;         /* items are the tasks, each thread using the memory of one item; else spans are */
} plan;

typedef struct run {
    ekv_step *step;
    plan plan;
    ekv_item *items;
    int64_t *first_span, *first_row; /* [items + 1] number of each item's first span and row */
    int64_t begin, end;              /* by stages: the items of this wave */
    char *arenas;                    /* the items' memory */
    ekv_on_item *on_item;            /* what the tasks of the present stage call */
    ekv_on_span *on_span;
    ekv_on_row *on_row;
} run;

/* The step's own arrays; with an arena that only measures, nothing is written. */
static void place_step(ekv_step *step, const plan *p, run *r, ekv_arena *arena) {
    step->zeta = ekv_take(arena, step->moments ? 1 : 0, sizeof(float));
    r->items = ekv_take(arena, (size_t)p->items, sizeof *r->items);
    r->first_span = ekv_take(arena, (size_t)p->items + 1, sizeof(int64_t));
    r->first_row = ekv_take(arena, (size_t)p->items + 1, sizeof(int64_t));
}

static size_t item_bytes(const ekv_step *step, ekv_item *item) {
    ekv_arena arena = {NULL, 0};
    place_item(step, item, &arena);
    return arena.used;
}

/* With items of step->item_rows rows. */
static plan plan_rows(ekv_step *step) {
    plan p = {0};
    run r;
    ekv_arena arena = {NULL, 0};
    int64_t total = 0, longest = 0;
    for (int32_t b = 0; b < step->p.batch; b++)
        for (int64_t block = 0; block < blocks_of(step, b); block++) {
            ekv_item item;
            describe_item(step, b, 0, block, &item); /* the same for every head */
            const size_t bytes = item_bytes(step, &item);
            const int64_t heads = step->kv.kv_heads, work = (int64_t)item.n * item.rows;
            p.items += heads;
            p.spans += heads * item.spans;
            p.rows += heads * item.rows;
            p.all_bytes += (size_t)heads * bytes;
            p.item_bytes = bytes > p.item_bytes ? bytes : p.item_bytes;
            total += heads * work;
            longest = work > longest ? work : longest;
        }
    place_step(step, &p, &r, &arena);
    p.fixed_bytes = arena.used;
    p.room = step->context->max_scratch > p.fixed_bytes ? step->context->max_scratch - p.fixed_bytes : 0;
    const int64_t threads = step->context->threads;
    /* policy certified has many short stages, which cost more than some unevenness */
    const bool even = p.items >= (step->certified ? 2 : 4) * threads && longest * threads <= 2 * total;
    p.whole = !step->by_stages && (threads == 1 || even || p.spans == p.items) && p.item_bytes * (size_t)threads <= p.room;
    return p;
}

/* Items have fewer rows, and so read keys more than once, where one alone would pass the ceiling. */
static plan make_plan(ekv_step *step) {
    step->item_rows = whole_tokens(step, EKV_ITEM_ROWS);
    plan p = plan_rows(step);
    while (p.item_bytes > p.room && step->item_rows > 1) {
        step->item_rows = whole_tokens(step, step->item_rows / 2);
        p = plan_rows(step);
    }
    return p;
}

/* Scratch of the plan: by stages as many items as fit run side by side, at least one; the others follow in waves. */
static size_t plan_bytes(const ekv_step *step, const plan *p) {
    const size_t items = p->whole                      ? p->item_bytes * (size_t)step->context->threads
                         : p->all_bytes <= p->room     ? p->all_bytes
                         : p->item_bytes > p->room     ? p->item_bytes
                                                       : p->room;
    return p->fixed_bytes + items;
}

static ekv_status check_ceiling(ekv_context *context, const plan *p) {
    if (p->fixed_bytes + p->item_bytes <= context->max_scratch) return EKV_OK;
    return ekv_fail(context, EKV_ERROR_CAPACITY, "max_scratch is %zu, less than the %zu bytes that one row of the step needs",
                    context->max_scratch, p->fixed_bytes + p->item_bytes);
}

static void describe_items(const ekv_step *step, run *r) {
    int64_t i = 0, spans = 0, rows = 0;
    for (int32_t b = 0; b < step->p.batch; b++)
        for (int64_t block = 0; block < blocks_of(step, b); block++)
            for (int32_t head = 0; head < step->kv.kv_heads; head++, i++) {
                describe_item(step, b, head, block, &r->items[i]);
                r->first_span[i] = spans;
                r->first_row[i] = rows;
                spans += r->items[i].spans;
                rows += r->items[i].rows;
            }
    r->first_span[i] = spans;
    r->first_row[i] = rows;
}

/* ---- stages ---- */

/* The item that flat index i belongs to. */
static ekv_item *item_of(const run *r, const int64_t *start, int64_t i, int64_t *within) {
    int64_t low = 0, high = r->plan.items - 1;
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (start[middle] <= i)
            low = middle;
        else
            high = middle - 1;
    }
    *within = i - start[low];
    return &r->items[low];
}

/* Tasks of a stage: each calls one of the run's functions for an item, a span of one, or a row of one. */
static void each_item(void *arg, int64_t i) {
    const run *r = arg;
    r->on_item(r->step, &r->items[r->begin + i]);
}

static void each_span(void *arg, int64_t i) {
    const run *r = arg;
    int64_t span;
    ekv_item *item = item_of(r, r->first_span, i + r->first_span[r->begin], &span);
    r->on_span(r->step, item, (int32_t)span);
}

static void each_row(void *arg, int64_t i) {
    const run *r = arg;
    int64_t row;
    ekv_item *item = item_of(r, r->first_row, i + r->first_row[r->begin], &row);
    r->on_row(r->step, item, &item->row[row]);
}

static void over_items(ekv_context *context, run *r, ekv_on_item *call) {
    r->on_item = call;
    ekv_parallel(context, r->end - r->begin, each_item, r);
}

static void over_spans(ekv_context *context, run *r, ekv_on_span *call) {
    r->on_span = call;
    ekv_parallel(context, r->first_span[r->end] - r->first_span[r->begin], each_span, r);
}

static void over_rows(ekv_context *context, run *r, ekv_on_row *call) {
    r->on_row = call;
    ekv_parallel(context, r->first_row[r->end] - r->first_row[r->begin], each_row, r);
}

static void last_round(const ekv_step *step, ekv_item *item, int32_t span) {
    if (item->use_sketch)
        ekv_certify_round(step, item, span);
    else
        ekv_scan(step, item, span);
}

/* The stages that only policy certified has, one after another. */
static void certify_item(const ekv_step *step, ekv_item *item) {
    for (int32_t span = 0; span < item->spans; span++) ekv_certify_boxes(step, item, span);
    ekv_certify_settle(step, item);
    for (int32_t span = 0; span < item->spans; span++) ekv_certify_sketch(step, item, span);
    for (int32_t round = 0; round < EKV_CERTIFY_ROUNDS && item->use_sketch; round++) {
        for (int32_t row = 0; row < item->rows; row++) ekv_certify_raise(step, item, &item->row[row]);
        for (int32_t span = 0; span < item->spans; span++) ekv_certify_round(step, item, span);
        item->round++;
    }
}

/* The same for all items of a wave; stages that no item has are left out, since each costs a barrier. */
static void certify_wave(ekv_context *context, run *r) {
    bool boxes = false, sketch = false;
    for (int64_t i = r->begin; i < r->end; i++) boxes |= r->items[i].use_boxes;
    if (boxes) over_spans(context, r, ekv_certify_boxes);
    if (boxes) over_items(context, r, ekv_certify_settle);
    for (int64_t i = r->begin; i < r->end; i++) sketch |= r->items[i].use_sketch;
    if (sketch) over_spans(context, r, ekv_certify_sketch);
    for (int32_t round = 0; round < EKV_CERTIFY_ROUNDS && sketch; round++) {
        over_rows(context, r, ekv_certify_raise);
        over_spans(context, r, round < EKV_CERTIFY_ROUNDS - 1 ? ekv_certify_round : last_round);
        for (int64_t i = r->begin; i < r->end; i++) r->items[i].round++;
    }
    if (!sketch) over_spans(context, r, ekv_scan);
}

/* All stages of one item, in the memory of this task's slot. */
static void whole_item(void *arg, int64_t i) {
    const run *r = arg;
    const int slot = ekv_claim_slot(r->step->context);
    ekv_arena arena = {r->arenas + (size_t)slot * r->plan.item_bytes, 0};
    ekv_item item = r->items[i];
    place_item(r->step, &item, &arena);
    prepare(r->step, &item);
    select_pages(r->step, &item);
    if (r->step->certified) certify_item(r->step, &item);
    for (int32_t span = 0; span < item.spans && !item.use_sketch; span++) ekv_scan(r->step, &item, span);
    for (int32_t row = 0; row < item.rows; row++) ekv_finish(r->step, &item, &item.row[row]);
    if (r->step->lists)
        for (int32_t span = 0; span < item.spans; span++) ekv_values(r->step, &item, span);
    ekv_output(r->step, &item);
    ekv_release_slot(r->step->context, slot);
}

/* A task, like all floating-point work: it must not depend on the caller's floating-point modes. */
static void fill_zeta(void *arg, int64_t i) {
    ekv_step *step = arg;
    (void)i;
    *step->zeta = (float)ekv_normal_quantile(ekv_pow(step->p.quantile, 1.0 / step->kv.page_size));
}

/* Everything up to the first stage: scratch and descriptions. */
static ekv_status begin(ekv_context *context, ekv_step *step, run *r) {
    const plan p = make_plan(step);
    const size_t bytes = plan_bytes(step, &p);
    ekv_status status = check_ceiling(context, &p);
    if (status != EKV_OK) return status;
    if (bytes > context->scratch_bytes && context->fixed_scratch)
        return ekv_fail(context, EKV_ERROR_CAPACITY, "the step needs %zu bytes of scratch; %zu are reserved and fixed_scratch is set",
                        bytes, context->scratch_bytes);
    status = ekv_need_scratch(context, bytes);
    if (status != EKV_OK) return status;
    ekv_arena arena = {context->scratch, 0};
    *r = (run){.step = step, .plan = p};
    place_step(step, &p, r, &arena);
    describe_items(step, r);
    if (step->moments) ekv_parallel(context, 1, fill_zeta, step);
    r->arenas = arena.base + arena.used;
    return EKV_OK;
}

/* The next wave: items after the last one that fit side by side, and their memory.  False if there are none. */
static bool next_wave(run *r) {
    ekv_arena arena = {r->arenas, 0};
    r->begin = r->end;
    for (; r->end < r->plan.items; r->end++) {
        ekv_item *item = &r->items[r->end];
        if (arena.used + item_bytes(r->step, item) > r->plan.room) break;
        place_item(r->step, item, &arena);
    }
    return r->end > r->begin;
}

static void run_stages(ekv_context *context, run *r) {
    over_items(context, r, prepare);
    if (has_statistics(r->step)) over_spans(context, r, ekv_statistics);
    if (r->step->sparse) over_rows(context, r, ekv_select_row);
    over_items(context, r, ekv_select_item);
    if (r->step->certified)
        certify_wave(context, r);
    else
        over_spans(context, r, ekv_scan);
    over_rows(context, r, ekv_finish);
    if (r->step->lists) over_spans(context, r, ekv_values);
    over_items(context, r, ekv_output);
}

/* ---- public ---- */

static ekv_status need_data(ekv_context *context, const ekv_step *step, bool out) {
    VALID(step->p.q || step->tokens == 0, "q is NULL");
    VALID(!out || step->p.out || step->tokens == 0, "out is NULL");
    return EKV_OK;
}

ekv_status ekv_decode(ekv_context *context, const ekv_decode_params *params) {
    ekv_step step;
    run r;
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    ekv_status status = ekv_validate(context, params, &step);
    if (status == EKV_OK) status = need_data(context, &step, true);
    if (status == EKV_OK && context->cuda) return ekv_cuda_decode(context, &step);
    if (status == EKV_OK) status = begin(context, &step, &r);
    if (status != EKV_OK) return status;
    if (!step.kernels) return ekv_reference_decode(&step, r.items, r.plan.items);
    if (r.plan.whole)
        ekv_parallel(context, r.plan.items, whole_item, &r);
    else
        while (next_wave(&r)) run_stages(context, &r);
    return EKV_OK;
}

ekv_status ekv_scratch_bytes(ekv_context *context, const ekv_decode_params *params, size_t *bytes) {
    ekv_step step;
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(bytes, "bytes is NULL");
    const ekv_status status = ekv_validate(context, params, &step);
    if (status != EKV_OK) return status;
    if (context->cuda) return ekv_cuda_scratch(context, &step, bytes);
    const plan p = make_plan(&step);
    *bytes = plan_bytes(&step, &p);
    return check_ceiling(context, &p);
}

ekv_status ekv_reserve(ekv_context *context, const ekv_decode_params *params) {
    ekv_step step;
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    const ekv_status status = ekv_validate(context, params, &step);
    if (status != EKV_OK) return status;
    if (context->cuda) return ekv_cuda_reserve(context, &step);
    const plan decode = make_plan(&step);
    const size_t bytes = plan_bytes(&step, &decode);
    const ekv_status fits = check_ceiling(context, &decode);
    if (fits != EKV_OK) return fits;
    step.by_stages = step.bounds = step.moments = true; /* the stages on their own */
    step.lists = false;
    const plan query = make_plan(&step);
    const size_t more = plan_bytes(&step, &query);
    return ekv_need_scratch(context, bytes > more ? bytes : more);
}

/* ---- the stages on their own ---- */

/* One of ekv_page_bounds, ekv_page_moments, ekv_select_pages: those pointers that are not NULL are filled. */
typedef struct query {
    run run;
    float *bounds, *mean, *deviation;
    uint8_t *selected;
    int64_t stride;
} query;

static void query_row(const query *q, ekv_item *item, ekv_row *row) {
    const ekv_step *step = q->run.step;
    const int64_t at = ((int64_t)row->token * step->p.q_heads + row->head) * q->stride;
    const double unit = row->softmax ? 1.0 : 1.0 / (row->alpha - 1.0); /* z units to scores */
    if (q->bounds) {
        ekv_page_bounds_of(step, item, row, 0, row->pages);
        for (int32_t p = 0; p < row->pages; p++) { /* the slack of `bound` leaves room for this rounding */
            const double bound = (double)row->bound[p] * unit;
            q->bounds[at + p] = nextafterf((float)bound, INFINITY);
        }
    }
    if (q->mean) {
        ekv_page_moments_of(step, item, row, 0, row->pages);
        for (int32_t p = 0; p < row->pages; p++) q->mean[at + p] = (float)((double)row->mean[p] * unit);
        for (int32_t p = 0; p < row->pages; p++) q->deviation[at + p] = (float)((double)row->deviation[p] * unit);
    }
    for (int32_t p = 0; q->selected && p < row->pages; p++) q->selected[at + p] = row->selected ? row->selected[p] : 1;
}

static void query_item(void *arg, int64_t i) {
    const query *q = arg;
    ekv_item *item = &q->run.items[q->run.begin + i];
    for (int32_t r = 0; r < item->rows; r++) prepare_row(q->run.step, item, r);
    if (q->selected) select_pages(q->run.step, item);
    for (int32_t r = 0; r < item->rows; r++) query_row(q, item, &item->row[r]);
}

static ekv_status query_device(ekv_context *context, ekv_step *step, const query *q) {
    step->bounds |= q->bounds != NULL;
    step->moments |= q->mean != NULL;
    if (q->bounds) return ekv_cuda_query(context, step, EKV_CUDA_BOUNDS, q->bounds, NULL, q->stride);
    if (q->mean) return ekv_cuda_query(context, step, EKV_CUDA_MOMENTS, q->mean, q->deviation, q->stride);
    return ekv_cuda_query(context, step, EKV_CUDA_SELECTION, q->selected, NULL, q->stride);
}

static ekv_status run_query(ekv_context *context, const ekv_decode_params *params, query *q) {
    ekv_step step;
    ekv_decode_params p = ekv_decode_params_default();
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(params, "params is NULL");
    VALID(ekv_copy_params(&p, sizeof p, params, sizeof(size_t)), "params->size is %zu, not that of an ekv_decode_params", params->size);
    p.report = NULL;
    if (q->selected && p.policy == EKV_POLICY_CERTIFIED)
        return ekv_fail(context, EKV_ERROR_UNSUPPORTED, "policy certified selects no pages: it decides while it reads");
    if (!q->selected) p.policy = EKV_POLICY_FULL;
    ekv_status status = ekv_validate(context, &p, &step);
    if (status == EKV_OK) status = need_data(context, &step, false);
    if (status != EKV_OK) return status;
    const uint32_t have = step.index ? step.index->shape.statistics : 0;
    VALID(!q->bounds || have & EKV_STATISTICS_BOX, "index has no BOX statistics");
    VALID(!q->mean || have & EKV_STATISTICS_GAUSSIAN, "index has no GAUSSIAN statistics");
    if (context->cuda) return query_device(context, &step, q);
    for (int32_t b = 0; b < step.p.batch; b++)
        VALID(ekv_ceil_div(ekv_length_of(&step, b), step.kv.page_size) <= q->stride,
              "stride is %lld, less than the pages of sequence %d", (long long)q->stride, (int)b);
    step.bounds |= q->bounds != NULL;
    step.moments |= q->mean != NULL;
    step.lists = false;
    step.by_stages = true;
    status = begin(context, &step, &q->run);
    if (status != EKV_OK) return status;
    if (!step.kernels)
        return ekv_reference_query(&step, q->run.items, q->run.plan.items, q->bounds, q->mean, q->deviation, q->selected, q->stride);
    while (next_wave(&q->run)) ekv_parallel(context, q->run.end - q->run.begin, query_item, q);
    return EKV_OK;
}

ekv_status ekv_page_bounds(ekv_context *context, const ekv_decode_params *params, float *bounds, int64_t stride) {
    query q = {.bounds = bounds, .stride = stride};
    if (!bounds) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "bounds is NULL");
    return run_query(context, params, &q);
}

ekv_status ekv_page_moments(ekv_context *context, const ekv_decode_params *params, float *mean, float *deviation, int64_t stride) {
    query q = {.mean = mean, .deviation = deviation, .stride = stride};
    if (!mean || !deviation)
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", mean ? "deviation" : "mean");
    return run_query(context, params, &q);
}

ekv_status ekv_select_pages(ekv_context *context, const ekv_decode_params *params, uint8_t *selected, int64_t stride) {
    query q = {.selected = selected, .stride = stride};
    if (!selected) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "selected is NULL");
    return run_query(context, params, &q);
}
