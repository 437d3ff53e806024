/*
 * Attention of one item: scores in one pass over the keys, the exact solution on what was kept, values of the support alone.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/step.h"

#include <math.h>
#include <string.h>

#define RESOLVE_EVERY 512 /* candidates that are added before tau's lower bound is raised again */

/* ---- scan ---- */

/* Up to EKV_TILE tokens, not necessarily adjacent, that the same rows read. */
typedef struct tile {
    int n;
    int32_t token[EKV_TILE];
    const void *keys[EKV_TILE], *values[EKV_TILE];
} tile;

/* One row in one span. */
typedef struct scan_row {
    ekv_row *row;
    ekv_part *part;
    float *list_z, *sum;
    int32_t *list_token;
    float threshold;   /* tokens with z <= threshold cannot be in the support */
    float tau;         /* lower bound relative to part->z_max */
    int32_t resolve_at;
} scan_row;

static void scan_begin(const ekv_step *step, const ekv_item *item, ekv_row *row, int32_t span, scan_row *s) {
    const int64_t index = (int64_t)(row - item->row) * item->spans + span;
    s->row = row;
    s->part = &item->part[index];
    *s->part = (ekv_part){.z_max = -INFINITY};
    s->sum = item->values + (size_t)index * ekv_padded(step->kv.v_dim);
    s->list_z = row->list_z ? row->list_z + (size_t)span * EKV_SPAN : NULL;
    s->list_token = row->list_token ? row->list_token + (size_t)span * EKV_SPAN : NULL;
    s->threshold = row->cut;
    s->tau = -1.0f;
    s->resolve_at = RESOLVE_EVERY;
    if (row->softmax) memset(s->sum, 0, (size_t)step->kv.v_dim * sizeof(float));
}

/* Raises the threshold: tau of what has been read is a lower bound of tau. */
static void raise_threshold(const ekv_step *step, scan_row *s) {
    ekv_tau_lower_args lower = {s->list_z, s->part->count, s->part->z_max, s->row->power, 4, s->tau};
    step->kernels->tau_lower(&lower);
    s->tau = lower.tau;
    s->threshold = ekv_threshold(s->part->z_max, (double)s->tau - EKV_MARGIN);
    ekv_keep_args keep = {s->list_z, s->list_token, s->part->count, s->threshold, s->list_z, s->list_token, 0};
    step->kernels->keep(&keep);
    s->part->count = keep.count;
    s->resolve_at = keep.count + (keep.count > RESOLVE_EVERY ? keep.count : RESOLVE_EVERY);
}

static void scan_entmax(const ekv_step *step, scan_row *s, const tile *t, int n, const float *z) {
    ekv_keep_args keep = {z, t->token, n, s->threshold, s->list_z, s->list_token, s->part->count};
    step->kernels->keep(&keep);
    float z_max = s->part->z_max;
    for (int32_t i = s->part->count; i < keep.count; i++) z_max = s->list_z[i] > z_max ? s->list_z[i] : z_max;
    s->part->count = keep.count;
    if (z_max > s->part->z_max) { /* the bound relative to the old maximum still holds in absolute terms */
        const double tau = (double)s->part->z_max + (double)s->tau - (double)z_max;
        s->tau = tau > -1.0 ? ekv_round_down(tau) : -1.0f;
        s->part->z_max = z_max;
        s->threshold = ekv_threshold(z_max, (double)s->tau - EKV_MARGIN);
    }
    if (s->part->count >= s->resolve_at) raise_threshold(step, s);
}

static float exp_of(const ekv_step *step, float x) { /* x <= 0 */
    float weight[1];
    ekv_softmax_args a = {&x, 1, 0.0f, weight, 0.0};
    step->kernels->softmax(&a);
    return weight[0];
}

/* Turns the scores z[0, n) of a tile into weights and brings the row's running sum to their scale.  False if nothing is to be added. */
static bool weigh_softmax(const ekv_step *step, scan_row *s, int n, float *z) {
    ekv_part *part = s->part;
    ekv_softmax_args exponentials = {z, n, part->z_max, z, 0.0};
    step->kernels->softmax(&exponentials);
    const float z_max = exponentials.z_max;
    if (z_max == -INFINITY) return false;
    if (!(z_max <= part->z_max) && part->used) {
        const float factor = exp_of(step, part->z_max - z_max);
        for (int32_t d = 0; d < step->kv.v_dim; d++) s->sum[d] *= factor;
        part->sum *= (double)factor;
    }
    part->z_max = z_max;
    part->used = true;
    part->sum += exponentials.sum;
    return true;
}

static bool reads(const ekv_row *row, int32_t token, int64_t page) {
    return token < row->n && (!row->selected || row->selected[page]);
}

/* Scores a tile for the rows that read it (which need not see all of it: a row sees a prefix).  `next` is prefetched meanwhile. */
static void scan_tile(const ekv_step *step, const ekv_item *item, scan_row *rows, const tile *t, const tile *next) {
    float z[EKV_ITEM_ROWS * EKV_TILE];
    const float *q[EKV_ITEM_ROWS];
    float slope[EKV_ITEM_ROWS];
    int32_t q_token[EKV_ITEM_ROWS];
    scan_row *active[EKV_ITEM_ROWS];
    int n = 0;
    for (int32_t r = 0; r < item->rows; r++) {
        ekv_row *row = &item->row[r];
        if (!reads(row, t->token[0], t->token[0] / step->kv.page_size)) continue;
        q[n] = row->q;
        slope[n] = row->slope;
        q_token[n] = row->q_token;
        active[n++] = &rows[r];
    }
    const size_t element = ekv_element_bytes(step->kv.dtype);
    const void *const *next_keys = next->n >= t->n ? next->keys : NULL;
    const bool softmax = t->values[0] != NULL;
    ekv_score_args score = {q, slope, q_token, n, t->keys, t->token, t->n, step->kv.k_dim, z, softmax ? t->values : next_keys,
                            (int)element * (softmax ? step->kv.v_dim : step->kv.k_dim)};
    step->kernels->score[step->kv.dtype](&score);
    const float *weight[EKV_ITEM_ROWS];
    float *sum[EKV_ITEM_ROWS];
    int adding = 0;
    for (int a = 0; a < n; a++) {
        int seen = t->n;
        while (t->token[seen - 1] >= active[a]->row->n) seen--;
        if (!active[a]->row->softmax) {
            scan_entmax(step, active[a], t, seen, z + a * EKV_TILE);
        } else if (weigh_softmax(step, active[a], seen, z + a * EKV_TILE)) {
            for (int i = seen; i < t->n; i++) z[a * EKV_TILE + i] = 0.0f;
            weight[adding] = z + a * EKV_TILE;
            sum[adding++] = active[a]->sum;
        }
    }
    if (adding == 0) return;
    ekv_accumulate_args add = {t->values, weight, adding, t->n, step->kv.v_dim, sum, next_keys, (int)element * step->kv.k_dim};
    step->kernels->accumulate[step->kv.dtype](&add);
}

/* Whether the same rows read both pages. */
static bool same_readers(const ekv_item *item, int64_t a, int64_t b) {
    if (item->needed) return true;
    for (int32_t r = 0; r < item->rows; r++) {
        const ekv_row *row = &item->row[r];
        if (row->selected && a < row->pages && b < row->pages && row->selected[a] != row->selected[b]) return false;
    }
    return true;
}

/* The first page from `page` on, before `end`, that the mask has; `end` if there is none.  Eight at a time: most are not in it. */
static int64_t next_in_mask(const uint8_t *mask, int64_t page, int64_t end) {
    for (uint64_t eight; page + 8 <= end; page += 8) {
        memcpy(&eight, mask + page, 8);
        if (eight != 0) break;
    }
    while (page < end && !mask[page]) page++;
    return page;
}

static bool anyone_reads(const ekv_item *item, int32_t token, int64_t page) {
    for (int32_t r = 0; r < item->rows; r++)
        if (reads(&item->row[r], token, page)) return true;
    return false;
}

/* Two tiles: one is filled while the other waits, so that its successor is known when it is scored. */
typedef struct tiles {
    tile tile[2];
    int filling;
    bool values; /* some row is softmax */
} tiles;

/* Scores the tile that waits, and lets the one that was filled wait. */
static void tiles_turn(const ekv_step *step, const ekv_item *item, scan_row *rows, tiles *t) {
    tile *waiting = &t->tile[1 - t->filling];
    if (waiting->n > 0) scan_tile(step, item, rows, waiting, &t->tile[t->filling]);
    waiting->n = 0;
    t->filling = 1 - t->filling;
}

/* Adds tokens [begin, end) of a page. */
static void tiles_add(const ekv_step *step, const ekv_item *item, scan_row *rows, tiles *t, int64_t page, int32_t begin, int32_t end) {
    const ekv_kv *kv = &step->kv;
    const int64_t block = ekv_block(item, page), k_step = kv->k_token_stride * (int64_t)ekv_element_bytes(kv->dtype),
                  v_step = kv->v_token_stride * (int64_t)ekv_element_bytes(kv->dtype);
    const char *key = ekv_key(kv, block, begin % kv->page_size, item->head);
    const char *value = ekv_value(kv, block, begin % kv->page_size, item->head);
    while (begin < end) {
        tile *to = &t->tile[t->filling];
        const int n = end - begin < EKV_TILE - to->n ? end - begin : EKV_TILE - to->n;
        for (int i = 0; i < n; i++) {
            to->token[to->n + i] = begin + i;
            to->keys[to->n + i] = key + i * k_step;
        }
        for (int i = 0; i < n && t->values; i++) to->values[to->n + i] = value + i * v_step;
        key += n * k_step;
        value += n * v_step;
        begin += n;
        to->n += n;
        if (to->n == EKV_TILE) tiles_turn(step, item, rows, t);
    }
}

void ekv_scan(const ekv_step *step, ekv_item *item, int32_t span) {
    scan_row rows[EKV_ITEM_ROWS];
    tiles t = {.filling = 0};
    for (int32_t r = 0; r < item->rows; r++) {
        scan_begin(step, item, &item->row[r], span, &rows[r]);
        t.values |= item->row[r].softmax;
    }
    const bool selective = item->rows > 0 && item->row[0].selected;
    const int32_t page_size = step->kv.page_size, begin = span * EKV_SPAN;
    const int32_t end = (int32_t)ekv_min64(item->n, (int64_t)begin + EKV_SPAN);
    int64_t before = -1; /* the page that was added last */
    for (int32_t token = begin; token < end;) {
        int64_t page = token / page_size;
        if (item->needed && !item->needed[page]) { /* certified: one mask for all rows */
            page = next_in_mask(item->needed, page, ekv_ceil_div(end, page_size));
            token = (int32_t)page * page_size;
            if (token >= end) break;
        }
        const int32_t page_end = (int32_t)ekv_min64(end, (page + 1) * page_size);
        if (!selective || item->needed || anyone_reads(item, token, page)) {
            if (selective && before >= 0 && t.tile[t.filling].n > 0 && !same_readers(item, before, page)) tiles_turn(step, item, rows, &t);
            tiles_add(step, item, rows, &t, page, token, page_end);
            before = page;
        }
        token = page_end;
    }
    tiles_turn(step, item, rows, &t);
    tiles_turn(step, item, rows, &t);
}

/* ---- finish ---- */

static int64_t count_ones(uint64_t x) { /* by halves, quarters and so on: the baseline has no instruction for it */
    x -= x >> 1 & UINT64_C(0x5555555555555555);
    x = (x & UINT64_C(0x3333333333333333)) + (x >> 2 & UINT64_C(0x3333333333333333));
    return (int64_t)(((x + (x >> 4)) & UINT64_C(0x0f0f0f0f0f0f0f0f)) * UINT64_C(0x0101010101010101) >> 56);
}

/* Bits that are set among the first n. */
static int64_t count_bits(const uint64_t *bits, int64_t n) {
    int64_t count = 0, w = 0;
    for (; (w + 1) * 64 <= n; w++) count += count_ones(bits[w]);
    return n % 64 ? count + count_ones(bits[w] & ((UINT64_C(1) << n % 64) - 1)) : count;
}

/* Moves the spans' lists together, leaving out what the best lower bound of all spans rules out. */
static void merge_lists(const ekv_step *step, const ekv_item *item, ekv_row *row) {
    const ekv_part *part = &item->part[(int64_t)(row - item->row) * item->spans];
    float z_max = -INFINITY;
    for (int32_t s = 0; s < item->spans; s++) z_max = part[s].z_max > z_max ? part[s].z_max : z_max;
    const float unit = z_max > -INFINITY ? ekv_threshold(z_max, -1.0 - EKV_MARGIN) : -INFINITY;
    const float threshold = unit > row->cut ? unit : row->cut;
    int64_t count = 0;
    for (int32_t s = 0; s < item->spans; s++) {
        const size_t from = (size_t)s * EKV_SPAN;
        ekv_keep_args keep = {row->list_z + from, row->list_token + from, part[s].count, threshold, row->list_z + count,
                              row->list_token + count, 0};
        step->kernels->keep(&keep);
        count += keep.count;
    }
    row->list_count = count;
}

/* Softmax: the sum over the spans, whose shares are exp(z_max - top) / total.  tau is its log, which huge scores swallow: no weight is
 * made from it. */
static void finish_softmax(const ekv_item *item, ekv_row *row) {
    const ekv_part *part = &item->part[(int64_t)(row - item->row) * item->spans];
    float top = -INFINITY;
    double total = 0.0;
    for (int32_t s = 0; s < item->spans; s++) top = part[s].z_max > top || part[s].z_max != part[s].z_max ? part[s].z_max : top;
    for (int32_t s = 0; s < item->spans; s++)
        if (part[s].used) total += part[s].sum * ekv_exp((double)part[s].z_max - (double)top);
    row->top = (double)top;
    row->total = total;
    row->tau = top == -INFINITY ? -INFINITY : (double)top + ekv_log(total);
    row->support = top == -INFINITY ? 0 : row->read_tokens;
}

void ekv_finish(const ekv_step *step, ekv_item *item, ekv_row *row) {
    double skipped = 0.0;
    row->support = 0;
    row->list_count = 0;
    row->tau = -INFINITY;
    row->mass = row->error = NAN;
    row->certified = false;
    if (step->certified) {
        row->read_tokens = count_bits(item->read, row->n);
        for (int32_t s = 0; s < item->spans; s++) skipped += item->part[(int64_t)(row - item->row) * item->spans + s].sum;
    }
    if (row->read_tokens > 0) {
        if (row->softmax) {
            finish_softmax(item, row);
        } else {
            merge_lists(step, item, row);
            ekv_solve_args solve = {row->list_z, row->list_token, row->list_count, row->alpha, row->weight, 0, 0.0};
            step->kernels->solve(&solve);
            row->list_count = row->support = solve.support;
            row->tau = solve.tau;
        }
    }
    if (step->p.report) ekv_bound_mass(step, item, row, skipped);
}

/* ---- values ---- */

/* First list entry whose token is >= token. */
static int64_t list_find(const ekv_row *row, int64_t token) {
    int64_t low = 0, high = row->list_count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (row->list_token[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void ekv_values(const ekv_step *step, ekv_item *item, int32_t span) {
    const size_t stride = ekv_padded(step->kv.v_dim);
    const int32_t page_size = step->kv.page_size;
    const int64_t value_step = step->kv.v_token_stride * (int64_t)ekv_element_bytes(step->kv.dtype);
    for (int32_t r = 0; r < item->rows; r++) {
        const ekv_row *row = &item->row[r];
        int32_t page_begin = 0, page_end = 0; /* tokens of the page whose first value `page` is */
        const char *page = NULL;
        if (row->softmax) continue;
        const int64_t index = (int64_t)r * item->spans + span;
        float *sum = item->values + (size_t)index * stride;
        int64_t i = list_find(row, (int64_t)span * EKV_SPAN);
        const int64_t end = list_find(row, ((int64_t)span + 1) * EKV_SPAN);
        item->part[index].used = i < end;
        if (i < end) memset(sum, 0, (size_t)step->kv.v_dim * sizeof(float));
        while (i < end) { /* chunks by token index */
            const void *values[EKV_VALUE_CHUNK];
            const int32_t chunk = row->list_token[i] / EKV_VALUE_CHUNK;
            int n = 0;
            for (; i + n < end && row->list_token[i + n] / EKV_VALUE_CHUNK == chunk; n++) {
                const int32_t token = row->list_token[i + n];
                if (token >= page_end) {
                    page_begin = token / page_size * page_size;
                    page_end = page_begin + page_size;
                    page = ekv_value(&step->kv, ekv_block(item, token / page_size), 0, item->head);
                }
                values[n] = page + (token - page_begin) * value_step;
                ekv_prefetch(values[n], (size_t)step->kv.v_dim * ekv_element_bytes(step->kv.dtype));
            }
            const float *weight = row->weight + i;
            ekv_accumulate_args add = {values, &weight, 1, n, step->kv.v_dim, &sum, NULL, 0};
            step->kernels->accumulate[step->kv.dtype](&add);
            i += n;
        }
    }
}

/* ---- output ---- */

/* Adds the spans in double, in order. */
static void add_spans(const ekv_step *step, const ekv_item *item, const ekv_row *row, float *out) {
    const int64_t first = (int64_t)(row - item->row) * item->spans;
    const size_t stride = ekv_padded(step->kv.v_dim);
    const int32_t dim = step->kv.v_dim;
    double sum[EKV_MAX_DIM];
    for (int32_t d = 0; d < dim; d++) sum[d] = 0.0;
    for (int32_t s = 0; s < item->spans; s++) {
        const ekv_part *part = &item->part[first + s];
        if (!part->used) continue;
        const float *values = item->values + (size_t)(first + s) * stride;
        const double factor = row->softmax ? ekv_exp((double)part->z_max - row->top) / row->total : 1.0;
        for (int32_t d = 0; d < dim; d++) sum[d] += factor * (double)values[d];
    }
    for (int32_t d = 0; d < dim; d++) out[d] = isnan(row->tau) ? NAN : (float)sum[d];
}

/* Marks the tokens of the pages that a row reads. */
static void mark_pages(const ekv_step *step, const ekv_item *item, const ekv_row *row) {
    for (int32_t p = 0; p < row->pages; p++) {
        if (row->selected && !row->selected[p]) continue;
        const int32_t first = p * step->kv.page_size, end = first + ekv_page_tokens(step, row->n, p);
        for (int32_t t = first; t < end; t++) item->seen[t / 64] |= UINT64_C(1) << t % 64;
    }
}

/* Tokens of which some row reads the value: its support, or for softmax all that it reads. */
static int64_t union_support(const ekv_step *step, const ekv_item *item) {
    memset(item->seen, 0, ((size_t)item->n / 64 + 1) * sizeof *item->seen);
    for (int32_t r = 0; r < item->rows; r++) {
        const ekv_row *row = &item->row[r];
        if (row->softmax) mark_pages(step, item, row);
        for (int64_t i = 0; i < row->list_count; i++) item->seen[row->list_token[i] / 64] |= UINT64_C(1) << row->list_token[i] % 64;
    }
    return count_bits(item->seen, item->n);
}

/* Policy certified learns what it read only while it reads. */
static void count_certified(const ekv_step *step, ekv_item *item) {
    for (int32_t s = 0; s < item->spans && item->use_sketch; s++)
        item->bytes_sketch += item->part[s].looked * ((int64_t)step->index->sketch_bytes * EKV_SKETCH_GROUP / step->kv.page_size);
    for (int32_t p = 0; p < item->pages; p++) {
        int32_t any[EKV_ITEM_ROWS] = {0}, tokens = 0;
        for (int32_t i = 0; i < ekv_page_tokens(step, item->n, p); i++) {
            const int32_t token = p * step->kv.page_size + i;
            if (!(item->read[token / 64] >> token % 64 & 1)) continue;
            tokens++;
            for (int32_t r = 0; r < item->rows; r++) any[r] |= token < item->row[r].n;
        }
        item->read_tokens += tokens;
        item->read_pages += tokens > 0;
        for (int32_t r = 0; r < item->rows; r++) item->row[r].read_pages += any[r];
    }
}

static void write_report(const ekv_step *step, ekv_item *item) {
    if (step->certified) count_certified(step, item);
    const int64_t element = (int64_t)ekv_element_bytes(step->kv.dtype);
    for (int32_t r = 0; r < item->rows; r++) {
        const ekv_row *row = &item->row[r];
        ekv_report *report = &step->p.report[(int64_t)row->token * step->p.q_heads + row->head];
        *report = (ekv_report){.tau = row->tau, .mass_bound = row->mass, .error_bound = row->error, .support = row->support,
                               .tokens = row->read_tokens, .pages = row->read_pages,
                               .certified = row->certified};
        if (r > 0) continue;
        report->group_pages = item->read_pages;
        report->total_pages = item->pages;
        report->bytes_statistics = item->bytes_statistics;
        report->bytes_sketch = item->bytes_sketch;
        report->bytes_keys = item->read_tokens * step->kv.k_dim * element;
        report->bytes_values = union_support(step, item) * step->kv.v_dim * element;
        report->bytes_dense = (int64_t)item->n * (step->kv.k_dim + step->kv.v_dim) * element;
    }
}

void ekv_output(const ekv_step *step, ekv_item *item) {
    float out[EKV_MAX_DIM];
    for (int32_t r = 0; r < item->rows; r++) {
        const ekv_row *row = &item->row[r];
        add_spans(step, item, row, out);
        const int64_t at = row->token * step->p.out_token_stride + row->head * step->p.out_head_stride;
        ekv_store_row_args store = {out, step->kv.v_dim, (void *)ekv_at(step->p.out, at, step->p.out_dtype)};
        step->kernels->store_row[step->p.out_dtype](&store);
    }
    if (step->p.report) write_report(step, item);
}
