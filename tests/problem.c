/*
 * Random decode steps and the reference's answers to them, see problem.h.  It must not use anything of the library but the
 * public interface and the reference.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Problems: memory ------------------------------------------------------------------------------------------------- */

const char *layout_name(layout l) {
    static const char *const names[] = {"tokens-heads", "heads-tokens", "page-heads", "heads-page"};
    return names[l];
}

const char *content_name(content c) {
    static const char *const names[] = {"normal", "clustered", "peaked", "flat", "tied"};
    return names[c];
}

static bool has_table(const shape *s) {
    return s->layout == LAYOUT_PAGE_HEADS || s->layout == LAYOUT_HEADS_PAGE;
}

int64_t pages_of(const problem *p, int64_t tokens) {
    return (tokens + p->shape.page_size - 1) / p->shape.page_size;
}

int32_t problem_block(const problem *p, int32_t b, int64_t page) {
    const int64_t entry = b * p->step.block_table_stride + page;
    return has_table(&p->shape) ? ((const int32_t *)p->table.data)[entry] : (int32_t)entry;
}

static int64_t key_offset(const problem *p, int32_t b, int64_t token, int32_t head) {
    const int32_t size = p->shape.page_size;
    return problem_block(p, b, token / size) * p->kv.k_block_stride + token % size * p->kv.k_token_stride +
           head * p->kv.k_head_stride;
}

static int64_t value_offset(const problem *p, int32_t b, int64_t token, int32_t head) {
    const int32_t size = p->shape.page_size;
    return problem_block(p, b, token / size) * p->kv.v_block_stride + token % size * p->kv.v_token_stride +
           head * p->kv.v_head_stride;
}

void *problem_key(const problem *p, int32_t b, int64_t token, int32_t head) {
    return (char *)p->k.data + (size_t)key_offset(p, b, token, head) * dtype_size(p->shape.dtype);
}

void *problem_value(const problem *p, int32_t b, int64_t token, int32_t head) {
    return (char *)p->v.data + (size_t)value_offset(p, b, token, head) * dtype_size(p->shape.dtype);
}

static void set_strides(const shape *s, int64_t capacity, int64_t dim, int64_t pad, int64_t *block, int64_t *token,
                        int64_t *head) {
    const int64_t heads = s->kv_heads, page = s->page_size, row = dim + pad;
    switch (s->layout) {
    case LAYOUT_HEADS_TOKENS:
        *token = row, *block = page * row, *head = capacity * row + pad;
        break;
    case LAYOUT_HEADS_PAGE:
        *token = row, *head = page * row + pad, *block = heads * *head + pad;
        break;
    case LAYOUT_PAGE_HEADS:
        *head = row, *token = heads * row + pad, *block = page * *token + pad;
        break;
    default:
        *head = row, *token = heads * row + pad, *block = page * *token;
        break;
    }
}

static void make_table(problem *p, rng *r) {
    const shape *s = &p->shape;
    int64_t used = 0;
    for (int32_t b = 0; b < s->batch; b++) {
        used += pages_of(p, s->lengths[b]);
    }
    p->kv.blocks = used + (s->spare_blocks || used == 0 ? 3 : 0);
    p->step.block_table_stride = p->max_pages + 2;
    p->table = guard_alloc((size_t)(s->batch * p->step.block_table_stride) * sizeof(int32_t));
    int32_t *order = malloc((size_t)(p->kv.blocks + 1) * sizeof *order), *table = p->table.data;
    for (int32_t i = 0; i < p->kv.blocks; i++) {
        const int64_t j = rng_between(r, 0, i);
        order[i] = order[j];
        order[j] = i;
    }
    int64_t next = 0;
    for (int32_t b = 0; b < s->batch; b++) {
        for (int64_t page = 0; page < p->step.block_table_stride; page++) { /* unused entries: no block at all */
            *table++ = page < pages_of(p, s->lengths[b]) ? order[next++] : -77777;
        }
    }
    free(order);
    p->step.block_table = p->table.data;
}

/* Elements of k or v: the whole pool, or, without a block table, up to the last token that exists. */
static int64_t memory_end(const problem *p, bool values) {
    const shape *s = &p->shape;
    const int64_t dim = values ? s->v_dim : s->k_dim;
    int64_t end = 0;
    if (has_table(s) && p->kv.blocks > 0) {
        const int64_t block = values ? p->kv.v_block_stride : p->kv.k_block_stride;
        const int64_t token = values ? p->kv.v_token_stride : p->kv.k_token_stride;
        const int64_t head = values ? p->kv.v_head_stride : p->kv.k_head_stride;
        return (p->kv.blocks - 1) * block + (s->page_size - 1) * token + (s->kv_heads - 1) * head + dim;
    }
    for (int32_t b = 0; b < s->batch; b++) {
        if (s->lengths[b] > 0) {
            const int64_t last = values ? value_offset(p, b, s->lengths[b] - 1, s->kv_heads - 1)
                                        : key_offset(p, b, s->lengths[b] - 1, s->kv_heads - 1);
            end = last + dim > end ? last + dim : end;
        }
    }
    return end;
}

static void make_kv(problem *p, rng *r) {
    const shape *s = &p->shape;
    p->kv = ekv_kv_default();
    p->kv.dtype = s->dtype;
    p->kv.kv_heads = s->kv_heads;
    p->kv.k_dim = s->k_dim;
    p->kv.v_dim = s->v_dim;
    p->kv.page_size = s->page_size;
    if (has_table(s)) {
        make_table(p, r);
    } else {
        p->step.block_table_stride = p->max_pages;
        p->kv.blocks = (s->batch - 1) * p->max_pages + pages_of(p, s->lengths[s->batch - 1]);
        for (int32_t b = 0; b + 1 < s->batch; b++) { /* the last sequence may be empty */
            const int64_t end = b * p->max_pages + pages_of(p, s->lengths[b]);
            p->kv.blocks = end > p->kv.blocks ? end : p->kv.blocks;
        }
        p->kv.blocks = p->kv.blocks > 0 ? p->kv.blocks : 1;
    }
    const int64_t capacity = s->batch * p->max_pages * s->page_size;
    set_strides(s, capacity, s->k_dim, s->padded ? 3 : 0, &p->kv.k_block_stride, &p->kv.k_token_stride, &p->kv.k_head_stride);
    set_strides(s, capacity, s->v_dim, s->padded ? 5 : 0, &p->kv.v_block_stride, &p->kv.v_token_stride, &p->kv.v_head_stride);
    p->k_end = memory_end(p, false);
    p->v_end = memory_end(p, true);
    p->k = guard_alloc((size_t)p->k_end * dtype_size(s->dtype));
    p->v = guard_alloc((size_t)p->v_end * dtype_size(s->dtype));
    dtype_store_nan(s->dtype, p->k.data, p->k_end);
    dtype_store_nan(s->dtype, p->v.data, p->v_end);
    p->kv.k = p->k.data;
    p->kv.v = p->v.data;
}

/* ---- Problems: content ------------------------------------------------------------------------------------------------ */

static void fill_row(ekv_dtype dtype, void *row, int32_t dim, double size, rng *r) {
    for (int32_t d = 0; d < dim; d++) {
        dtype_store(dtype, row, d, (float)size * rng_rough_normal(r));
    }
}

static const void *query_row(const problem *p, int32_t q_token, int32_t head) {
    const int64_t head_stride = p->step.q_head_stride ? p->step.q_head_stride : p->shape.k_dim;
    const int64_t token_stride = p->step.q_token_stride ? p->step.q_token_stride : p->q_heads * (int64_t)p->shape.k_dim;
    return (const char *)p->q.data + (size_t)(q_token * token_stride + head * head_stride) * dtype_size(p->shape.q_dtype);
}

static void fill_key(const problem *p, void *key, int64_t token, const float *base, int32_t q_token, int32_t q_head, rng *r) {
    const shape *s = &p->shape;
    const bool along_query =
        p->q_tokens > 0 && s->content == CONTENT_PEAKED && (token == s->lengths[0] / 2 || rng_chance(r, 0.01));
    const int64_t tied = rng_between(r, 0, 2);
    for (int32_t d = 0; d < s->k_dim; d++) {
        float x = rng_rough_normal(r);
        switch (s->content) {
        case CONTENT_CLUSTERED:
            x = base[d] + 0.3f * x;
            break;
        case CONTENT_FLAT:
            x = base[d] + 0.001f * x;
            break;
        case CONTENT_TIED:
            x = base[d] * (float)(tied - 1);
            break;
        case CONTENT_PEAKED:
            x *= 0.5f;
            if (along_query) {
                x += (float)(2.0 / s->q_size * dtype_load(s->q_dtype, query_row(p, q_token, q_head), d));
            }
            break;
        default:
            break;
        }
        dtype_store(s->dtype, key, d, x);
    }
}

static void fill_sequence(const problem *p, int32_t b, int32_t last_q_token, rng *r) {
    const shape *s = &p->shape;
    float *base = malloc((size_t)s->k_dim * sizeof *base);
    for (int32_t h = 0; h < s->kv_heads; h++) {
        for (int64_t t = 0; t < s->lengths[b]; t++) {
            if (t == 0 || (s->content == CONTENT_CLUSTERED && t % s->page_size == 0)) {
                fill_row(EKV_F32, base, s->k_dim, 1.0, r);
            }
            const int32_t q_head = h * s->group + (int32_t)rng_between(r, 0, s->group - 1);
            fill_key(p, problem_key(p, b, t, h), t, base, last_q_token, q_head, r);
            fill_row(s->dtype, problem_value(p, b, t, h), s->v_dim, 1.0, r);
        }
    }
    free(base);
}

static void make_queries(problem *p, rng *r) {
    const shape *s = &p->shape;
    ekv_decode_params *step = &p->step;
    const int64_t pad = s->padded ? 7 : 0;
    step->q_head_stride = s->padded ? s->k_dim + pad : 0;
    step->q_token_stride = s->padded ? p->q_heads * (s->k_dim + pad) + pad : 0;
    step->out_head_stride = s->padded ? s->v_dim + pad : 0;
    step->out_token_stride = s->padded ? p->q_heads * (s->v_dim + pad) + pad : 0;
    const int64_t q_row = s->k_dim + pad, v_row = s->v_dim + pad;
    int64_t q_end = 0, out_end = 0;
    if (p->q_tokens > 0) {
        q_end = (p->q_tokens - 1) * (p->q_heads * q_row + pad) + (p->q_heads - 1) * q_row + s->k_dim;
        out_end = (p->q_tokens - 1) * (p->q_heads * v_row + pad) + (p->q_heads - 1) * v_row + s->v_dim;
    }
    p->q = guard_alloc((size_t)q_end * dtype_size(s->q_dtype));
    p->out = guard_alloc((size_t)out_end * dtype_size(s->out_dtype));
    dtype_store_nan(s->q_dtype, p->q.data, q_end);
    for (int32_t t = 0; t < p->q_tokens; t++) {
        for (int32_t h = 0; h < p->q_heads; h++) {
            fill_row(s->q_dtype, (void *)(uintptr_t)query_row(p, t, h), s->k_dim, s->q_size, r);
        }
    }
}

static void make_lists(problem *p) {
    const shape *s = &p->shape;
    p->lengths = guard_alloc((size_t)s->batch * sizeof(int32_t));
    memcpy(p->lengths.data, s->lengths, (size_t)s->batch * sizeof(int32_t));
    p->q_start = guard_alloc((size_t)(s->batch + 1) * sizeof(int32_t));
    int32_t *start = p->q_start.data;
    start[0] = 0;
    for (int32_t b = 0; b < s->batch; b++) {
        start[b + 1] = start[b] + s->queries[b];
    }
    p->q_tokens = start[s->batch];
    p->rows = (int64_t)p->q_tokens * p->q_heads;
    p->report = guard_alloc((size_t)p->rows * sizeof(ekv_report));
}

static void wire_step(problem *p) {
    ekv_decode_params *step = &p->step;
    step->batch = p->shape.batch;
    step->kv = &p->kv;
    step->lengths = p->lengths.data;
    step->q_heads = p->q_heads;
    step->q_start = p->shape.ragged ? p->q_start.data : NULL;
    step->q = p->q.data;
    step->q_dtype = p->shape.q_dtype;
    step->out = p->out.data;
    step->out_dtype = p->shape.out_dtype;
    step->report = p->report.data;
}

void problem_make(problem *p, const shape *s, rng *r) {
    memset(p, 0, sizeof *p);
    p->shape = *s;
    p->q_heads = s->kv_heads * s->group;
    p->step = ekv_decode_params_default();
    p->max_pages = 1;
    for (int32_t b = 0; b < s->batch; b++) {
        const int64_t pages = pages_of(p, s->lengths[b]);
        p->max_pages = pages > p->max_pages ? pages : p->max_pages;
    }
    make_lists(p);
    make_queries(p, r);
    make_kv(p, r);
    const int32_t *start = p->q_start.data;
    for (int32_t b = 0; b < s->batch; b++) {
        fill_sequence(p, b, start[b + 1] > 0 ? start[b + 1] - 1 : 0, r);
    }
    wire_step(p);
    problem_poison(p);
}

void problem_copy_content(problem *p, const problem *from) {
    const shape *s = &p->shape;
    const size_t q_bytes = (size_t)s->k_dim * dtype_size(s->q_dtype), e = dtype_size(s->dtype);
    for (int64_t row = 0; row < p->rows; row++) {
        const int32_t t = (int32_t)(row / p->q_heads), h = (int32_t)(row % p->q_heads);
        memcpy((void *)(uintptr_t)query_row(p, t, h), query_row(from, t, h), q_bytes);
    }
    for (int32_t b = 0; b < s->batch; b++) {
        for (int64_t t = 0; t < s->lengths[b]; t++) {
            for (int32_t h = 0; h < s->kv_heads; h++) {
                memcpy(problem_key(p, b, t, h), problem_key(from, b, t, h), (size_t)s->k_dim * e);
                memcpy(problem_value(p, b, t, h), problem_value(from, b, t, h), (size_t)s->v_dim * e);
            }
        }
    }
}

void problem_free(problem *p) {
    problem_drop_index(p);
    guard *const guards[] = {&p->k,       &p->v,          &p->q,          &p->out,    &p->table, &p->lengths,
                             &p->q_start, &p->head_alpha, &p->head_scale, &p->slopes, &p->mask,  &p->report};
    for (size_t i = 0; i < sizeof guards / sizeof *guards; i++) {
        guard_free(guards[i]);
    }
}

static const void *set_list(guard *g, const void *list, size_t size) {
    guard_free(g);
    if (list == NULL) {
        return NULL;
    }
    *g = guard_alloc(size);
    memcpy(g->data, list, size);
    return g->data;
}

void problem_set_heads(problem *p, const double *alpha, const float *scale, const float *slopes) {
    p->step.head_alpha = set_list(&p->head_alpha, alpha, (size_t)p->q_heads * sizeof *alpha);
    p->step.head_scale = set_list(&p->head_scale, scale, (size_t)p->q_heads * sizeof *scale);
    p->step.slopes = set_list(&p->slopes, slopes, (size_t)p->q_heads * sizeof *slopes);
}

void problem_index(problem *p, ekv_context *context, uint32_t statistics) {
    ekv_index_params params = ekv_index_params_default();
    params.dtype = p->shape.dtype;
    params.kv_heads = p->shape.kv_heads;
    params.k_dim = p->shape.k_dim;
    params.v_dim = p->shape.v_dim;
    params.page_size = p->shape.page_size;
    params.blocks = p->kv.blocks;
    params.statistics = statistics;
    problem_drop_index(p);
    const size_t bytes = ekv_index_bytes(&params);
    EXPECT(bytes > 0, "ekv_index_bytes is 0 for %lld blocks", (long long)params.blocks);
    p->index_memory = guard_alloc_aligned(bytes, 64);
    EXPECT_OK(context, ekv_index_create(context, &params, p->index_memory.data, bytes, &p->index));
    for (int32_t b = 0; b < p->shape.batch; b++) {
        const int64_t first = b * p->step.block_table_stride, length = p->shape.lengths[b];
        const int32_t *table = p->step.block_table ? p->step.block_table + first : NULL;
        int32_t *identity = NULL;
        if (table == NULL && b > 0) { /* without a table page p lies in block p: give later sequences one */
            identity = malloc((size_t)(pages_of(p, length) + 1) * sizeof *identity);
            for (int64_t page = 0; page < pages_of(p, length); page++) {
                identity[page] = (int32_t)(first + page);
            }
            table = identity;
        }
        EXPECT_OK(context, ekv_index_update(context, p->index, &p->kv, table, 0, length, length));
        free(identity);
    }
    p->step.index = p->index;
}

void problem_drop_index(problem *p) {
    ekv_index_destroy(p->index);
    p->index = NULL;
    p->step.index = NULL;
    guard_free(&p->index_memory);
}

void problem_locate(const problem *p, int32_t q_token, int32_t *sequence, int64_t *visible) {
    const int32_t *start = p->q_start.data;
    int32_t b = 0;
    while (start[b + 1] <= q_token) {
        b++;
    }
    *sequence = b;
    *visible = p->shape.lengths[b] == 0 ? 0 : p->shape.lengths[b] - (start[b + 1] - 1 - q_token);
}

double problem_alpha(const problem *p, int32_t head) {
    const double alpha = p->step.head_alpha ? p->step.head_alpha[head] : p->step.alpha;
    return alpha < 1 + 1e-7 ? 1 : alpha;
}

double problem_scale(const problem *p, int32_t head) {
    if (p->step.head_scale) {
        return p->step.head_scale[head];
    }
    return p->step.scale != 0 ? (double)p->step.scale : 1 / sqrt((double)p->shape.k_dim);
}

double problem_slope(const problem *p, int32_t head) {
    return p->step.slopes ? p->step.slopes[head] : 0;
}

/* ---- Problems: random parameters -------------------------------------------------------------------------------------- */

static const int32_t grid_dims[][2] = {{1, 1}, {7, 7}, {64, 64}, {80, 80}, {128, 128}, {192, 128}};
static const int32_t grid_groups[] = {1, 2, 3, 8};
static const int32_t grid_pages[] = {1, 16, 17, 256};
static const double grid_alphas[] = {1, 1.1, 4.0 / 3, 1.5, 1.75, 2, 3};
static const double grid_q_sizes[] = {0.1, 1, 1, 4, 16};

static int32_t random_length(rng *r, int32_t page, int32_t max_length) {
    const int32_t edges[] = {0, 1, page - 1, page, page + 1, 3 * page};
    int32_t length = RNG_PICK(r, edges);
    if (rng_chance(r, 0.4)) {
        length = (int32_t)rng_between(r, 2, 300);
    } else if (rng_chance(r, 0.2)) {
        length = (int32_t)rng_between(r, 2000, 5000);
    }
    return length < max_length ? length : max_length;
}

static int32_t random_queries(rng *r, int32_t length) {
    const int32_t some[] = {0, 1, 2, 5, 17, 40};
    const int32_t queries = RNG_PICK(r, some);
    if (length == 0) {
        return queries < 2 ? queries : 2;
    }
    return queries < length ? queries : length;
}

shape shape_random(rng *r, int32_t max_length) {
    shape s;
    memset(&s, 0, sizeof s);
    const int64_t dims = rng_between(r, 0, 5);
    s.layout = (layout)rng_between(r, 0, LAYOUT_COUNT - 1);
    s.content = (content)rng_between(r, 0, CONTENT_COUNT - 1);
    s.dtype = (ekv_dtype)rng_between(r, 0, 2);
    s.q_dtype = rng_chance(r, 0.5) ? EKV_F32 : (ekv_dtype)rng_between(r, 0, 2);
    s.out_dtype = rng_chance(r, 0.5) ? EKV_F32 : (ekv_dtype)rng_between(r, 0, 2);
    s.k_dim = grid_dims[dims][0];
    s.v_dim = grid_dims[dims][1];
    s.group = RNG_PICK(r, grid_groups);
    s.page_size = RNG_PICK(r, grid_pages);
    s.kv_heads = (int32_t)rng_between(r, 1, 3);
    s.batch = rng_chance(r, 0.6) ? 1 : (int32_t)rng_between(r, 2, MAX_BATCH);
    s.ragged = rng_chance(r, 0.4);
    for (int32_t b = 0; b < s.batch; b++) {
        s.lengths[b] = random_length(r, s.page_size, max_length);
        s.queries[b] = s.ragged ? random_queries(r, s.lengths[b]) : 1;
    }
    s.padded = rng_chance(r, 0.3);
    s.spare_blocks = rng_chance(r, 0.5);
    s.q_size = RNG_PICK(r, grid_q_sizes);
    return s;
}

static double random_slope(rng *r) {
    const double size = ldexp(1, -(int)rng_between(r, 0, 7));
    return rng_chance(r, 0.5) ? size : -size;
}

static void random_heads(problem *p, rng *r) {
    double *alpha = malloc((size_t)p->q_heads * sizeof *alpha);
    float *scale = malloc((size_t)p->q_heads * sizeof *scale), *slopes = malloc((size_t)p->q_heads * sizeof *slopes);
    const int kind = (int)rng_between(r, 0, 3); /* no slopes, all up, all down, mixed */
    for (int32_t h = 0; h < p->q_heads; h++) {
        alpha[h] = RNG_PICK(r, grid_alphas);
        scale[h] = (float)rng_range(r, 0.02, 0.3);
        const double slope = random_slope(r);
        slopes[h] = (float)(kind == 1 ? fabs(slope) : kind == 2 ? -fabs(slope) : rng_chance(r, 0.3) ? 0 : slope);
    }
    problem_set_heads(p, rng_chance(r, 0.25) ? alpha : NULL, rng_chance(r, 0.25) ? scale : NULL, kind ? slopes : NULL);
    free(alpha);
    free(scale);
    free(slopes);
}

void problem_random_parameters(problem *p, rng *r) {
    p->step.alpha = RNG_PICK(r, grid_alphas);
    p->step.scale = rng_chance(r, 0.3) ? (float)rng_range(r, 0.02, 0.3) : 0;
    random_heads(p, r);
}

void problem_random_mask(problem *p, rng *r, double density) {
    guard_free(&p->mask);
    const int64_t stride = p->max_pages + 1;
    p->mask = guard_alloc((size_t)(p->rows * stride));
    uint8_t *mask = p->mask.data;
    for (int64_t row = 0; row < p->rows; row++) {
        int32_t b;
        int64_t n;
        problem_locate(p, (int32_t)(row / p->q_heads), &b, &n);
        for (int64_t page = 0; page < stride; page++) {
            mask[row * stride + page] = rng_chance(r, density) ? (uint8_t)rng_between(r, 1, 255) : 0;
        }
        if (n > 0) {
            mask[row * stride + rng_between(r, 0, pages_of(p, n) - 1)] = 1;
        }
    }
    p->step.page_mask = mask;
    p->step.page_mask_stride = stride;
}

void problem_random_policy(problem *p, rng *r, ekv_policy policy) {
    static const double quantiles[] = {0.995, 0.9, 0.5, 0.9999};
    ekv_decode_params *step = &p->step;
    step->policy = policy;
    step->budget = rng_chance(r, 0.1) ? rng_between(r, 0, 1) : rng_between(r, 1, p->max_pages * p->shape.page_size * 5 / 4);
    step->first_pages = rng_chance(r, 0.4) ? (int32_t)rng_between(r, 0, 3) : 0;
    step->recent_tokens = rng_chance(r, 0.4) ? (int32_t)rng_between(r, 0, 3 * p->shape.page_size) : 0;
    step->gaussian_model = (ekv_gaussian_model)rng_between(r, 0, 2);
    step->quantile = RNG_PICK(r, quantiles);
    step->margin_sigma = rng_chance(r, 0.3) ? rng_range(r, 0, 0.5) : 0;
    step->margin_fraction = rng_chance(r, 0.7) ? 0.1 : rng_range(r, 0, 0.5);
    if (policy == EKV_POLICY_PAGES) {
        problem_random_mask(p, r, rng_uniform(r));
    }
    if (policy == EKV_POLICY_GAUSSIAN) { /* alpha > 1 */
        double *alpha = p->head_alpha.data;
        step->alpha = step->alpha > 1 ? step->alpha : 1.5;
        for (int32_t h = 0; step->head_alpha && h < p->q_heads; h++) {
            alpha[h] = alpha[h] > 1 ? alpha[h] : 1.25;
        }
    }
}

const char *problem_describe(const problem *p) {
    static char text[400];
    const shape *s = &p->shape;
    const ekv_decode_params *step = &p->step;
    snprintf(
        text, sizeof text,
        "%s %s kv %s q %s out %s batch %d length %d%s queries %d%s kv heads %d group %d dims %d/%d page %d%s q size %g | alpha "
        "%.10g%s scale %g%s slopes %s | %s budget %lld first %d recent %d model %d quantile %g margins %.3g %.3g",
        layout_name(s->layout), content_name(s->content), ekv_dtype_name(s->dtype), ekv_dtype_name(s->q_dtype),
        ekv_dtype_name(s->out_dtype), s->batch, s->lengths[0], s->batch > 1 ? ".." : "", s->queries[0],
        s->ragged ? " ragged" : "", s->kv_heads, s->group, s->k_dim, s->v_dim, s->page_size, s->padded ? " padded" : "",
        s->q_size, step->alpha, step->head_alpha ? " per head" : "", step->scale, step->head_scale ? " per head" : "",
        step->slopes ? "yes" : "no", ekv_policy_name(step->policy), (long long)step->budget, step->first_pages,
        step->recent_tokens, (int)step->gaussian_model, step->quantile, step->margin_sigma, step->margin_fraction);
    return text;
}

bool problem_too_slow_for(const problem *p, const backend_set *backends, int backend) {
    double work = 0;
    for (int32_t b = 0; b < p->shape.batch; b++) {
        work += (double)p->shape.lengths[b] * p->shape.queries[b] * p->q_heads * (p->shape.k_dim * 2 + p->shape.v_dim + 40);
    }
    return work > 3e5 && backend_is_reference(backends, backend);
}

/* ---- Problems: output ------------------------------------------------------------------------------------------------- */

void problem_poison(problem *p) {
    memset(p->out.data, POISON, p->out.size);
    memset(p->report.data, POISON, p->report.size);
}

void problem_check_untouched(const problem *p) {
    EXPECT(is_poison(p->out.data, p->out.size), "out was written");
    EXPECT(is_poison(p->report.data, p->report.size), "report was written");
}

static size_t out_offset(const problem *p, int64_t row) {
    const int64_t head_stride = p->step.out_head_stride ? p->step.out_head_stride : p->shape.v_dim;
    const int64_t token_stride = p->step.out_token_stride ? p->step.out_token_stride : p->q_heads * (int64_t)p->shape.v_dim;
    return (size_t)(row / p->q_heads * token_stride + row % p->q_heads * head_stride) * dtype_size(p->shape.out_dtype);
}

void problem_check_padding(const problem *p) {
    const size_t row_bytes = (size_t)p->shape.v_dim * dtype_size(p->shape.out_dtype);
    size_t end = 0;
    for (int64_t row = 0; row < p->rows; row++) {
        const size_t start = out_offset(p, row);
        EXPECT(is_poison((const char *)p->out.data + end, start - end), "padding of out before row %lld was written",
               (long long)row);
        end = start + row_bytes;
    }
}

void problem_out_row(const problem *p, int64_t row, double *out) {
    const void *data = (const char *)p->out.data + out_offset(p, row);
    for (int32_t d = 0; d < p->shape.v_dim; d++) {
        out[d] = dtype_load(p->shape.out_dtype, data, d);
    }
}

unsigned char *problem_copy_out(const problem *p, size_t *bytes) {
    const size_t row_bytes = (size_t)p->shape.v_dim * dtype_size(p->shape.out_dtype);
    *bytes = row_bytes * (size_t)p->rows;
    unsigned char *copy = malloc(*bytes + 1);
    for (int64_t row = 0; row < p->rows; row++) {
        memcpy(copy + (size_t)row * row_bytes, (const char *)p->out.data + out_offset(p, row), row_bytes);
    }
    return copy;
}

int64_t problem_stride(const problem *p) {
    return p->max_pages + 1;
}

static void protect_inputs(const problem *p, bool read_only) {
    const guard *const inputs[] = {&p->k,          &p->v,          &p->q,      &p->table, &p->lengths,     &p->q_start,
                                   &p->head_alpha, &p->head_scale, &p->slopes, &p->mask,  &p->index_memory};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
        if (inputs[i]->base != NULL) {
            guard_read_only(inputs[i], read_only);
        }
    }
}

void problem_decode(problem *p, ekv_context *context) {
    problem_poison(p);
    protect_inputs(p, true);
    const ekv_status status = ekv_decode(context, &p->step);
    protect_inputs(p, false);
    EXPECT(status == EKV_OK, "ekv_decode: %s: %s", ekv_strerror(status), ekv_last_error(context));
    problem_check_padding(p);
}

guard problem_select(problem *p, ekv_context *context) {
    const int64_t stride = problem_stride(p);
    guard selected = guard_alloc((size_t)(p->rows * stride));
    memset(selected.data, POISON, selected.size);
    protect_inputs(p, true);
    const ekv_status status = ekv_select_pages(context, &p->step, selected.data, stride);
    protect_inputs(p, false);
    EXPECT(status == EKV_OK, "ekv_select_pages: %s: %s", ekv_strerror(status), ekv_last_error(context));
    const uint8_t *entry = selected.data;
    for (int64_t row = 0; row < p->rows; row++) {
        int32_t b;
        int64_t n;
        problem_locate(p, (int32_t)(row / p->q_heads), &b, &n);
        for (int64_t page = 0; page < stride; page++, entry++) {
            EXPECT(page < pages_of(p, n) ? *entry <= 1 : *entry == POISON, "row %lld of %lld pages: entry %lld is %d",
                   (long long)row, (long long)pages_of(p, n), (long long)page, *entry);
        }
    }
    return selected;
}

bool problem_group_reads(const problem *p, const uint8_t *selected, int32_t b, int32_t kv_head, int64_t page) {
    const int32_t *start = p->q_start.data;
    for (int32_t t = start[b]; t < start[b + 1]; t++) {
        int32_t sequence;
        int64_t n;
        problem_locate(p, t, &sequence, &n);
        for (int32_t g = 0; g < p->shape.group && page < pages_of(p, n); g++) {
            if (selected[((int64_t)t * p->q_heads + kv_head * p->shape.group + g) * problem_stride(p) + page]) {
                return true;
            }
        }
    }
    return false;
}

static void poison_page(problem *p, int32_t b, int32_t kv_head, int64_t page) {
    const shape *s = &p->shape;
    const int64_t end = (page + 1) * s->page_size < s->lengths[b] ? (page + 1) * s->page_size : s->lengths[b];
    for (int64_t t = page * s->page_size; t < end; t++) {
        dtype_store_nan(s->dtype, problem_key(p, b, t, kv_head), s->k_dim);
        dtype_store_nan(s->dtype, problem_value(p, b, t, kv_head), s->v_dim);
    }
}

void problem_poison_unread(problem *p, const uint8_t *selected) {
    for (int32_t b = 0; b < p->shape.batch; b++) {
        for (int32_t h = 0; h < p->shape.kv_heads; h++) {
            for (int64_t page = 0; page < pages_of(p, p->shape.lengths[b]); page++) {
                if (!problem_group_reads(p, selected, b, h, page)) {
                    poison_page(p, b, h, page);
                }
            }
        }
    }
}

/* ---- Oracle ----------------------------------------------------------------------------------------------------------- */

static void *get(int64_t count, size_t size) {
    void *memory = calloc((size_t)count + 1, size);
    if (memory == NULL) {
        case_fail(__FILE__, __LINE__, "calloc", "no memory for the oracle");
    }
    return memory;
}

/* The size of what is added up to a score in z units: where the sum cancels, its rounding does not shrink with it. */
static double score_size(const oracle *o, const ekv_reference_problem *row, int64_t i) {
    double square = 0;
    for (int32_t d = 0; d < row->k_dim; d++) {
        const double product = row->scale * row->q[d] * dtype_load(row->dtype, row->keys[i], d);
        square += product * product;
    }
    const double factor = row->alpha == 1 ? 1 : row->alpha - 1;
    return fmax(fabs(o->z[i]), factor * (sqrt(square) + fabs(row->slope) * (double)(o->n - 1 - i)));
}

static void oracle_measure(oracle *o, const ekv_reference_problem *row) {
    double square = 0, out_square = 0;
    for (int64_t i = 0; i < o->n; i++) {
        square += o->p[i] * o->p[i] * o->value_norms[i] * o->value_norms[i];
        if (o->p[i] >= 1e-9) {
            o->z_size = fmax(o->z_size, score_size(o, row, i));
        }
    }
    for (int32_t d = 0; d < o->v_dim; d++) {
        out_square += o->out[d] * o->out[d];
    }
    o->out_size = sqrt(square > out_square ? square : out_square);
}

static void oracle_slack(oracle *o, const problem *p, const ekv_reference_problem *row) {
    for (int64_t page = 0; page < o->pages; page++) {
        const int64_t begin = page * row->page_size, end = begin + row->page_size < o->n ? begin + row->page_size : o->n;
        double sum = 0;
        for (int32_t d = 0; d < row->k_dim; d++) {
            double most = 0;
            for (int64_t t = begin; t < end; t++) {
                most = fmax(most, fabs(dtype_load(p->shape.dtype, row->keys[t], d)));
            }
            sum += fabs(row->scale * row->q[d]) * most;
        }
        o->page_size_of_sum[page] = sum + fabs(row->slope) * (double)(o->n - 1 - begin);
    }
}

static void oracle_allocate(oracle *o) {
    o->out = get(o->v_dim, sizeof(double));
    o->z = get(o->n, sizeof(double));
    o->p = get(o->n, sizeof(double));
    o->value_norms = get(o->n, sizeof(double));
    o->page_bound = get(o->pages, sizeof(double));
    o->page_mean = get(o->pages, sizeof(double));
    o->page_deviation = get(o->pages, sizeof(double));
    o->page_size_of_sum = get(o->pages, sizeof(double));
    o->pages_read = get(o->pages, 1);
    o->result.out = o->out;
    o->result.z = o->z;
    o->result.p = o->p;
    o->result.pages = o->pages_read;
    o->result.page_bound = o->page_bound;
    o->result.page_mean = o->page_mean;
    o->result.page_deviation = o->page_deviation;
}

static ekv_reference_problem oracle_problem(const problem *p, int32_t q_token, int32_t head, const uint8_t *mask) {
    const ekv_decode_params *step = &p->step;
    ekv_reference_problem row;
    memset(&row, 0, sizeof row);
    row.page_size = p->shape.page_size;
    row.k_dim = p->shape.k_dim;
    row.v_dim = p->shape.v_dim;
    row.dtype = p->shape.dtype;
    row.alpha = problem_alpha(p, head);
    row.scale = problem_scale(p, head);
    row.slope = problem_slope(p, head);
    row.policy = mask ? EKV_POLICY_PAGES : step->policy;
    row.budget = step->budget;
    row.first_pages = step->first_pages;
    row.recent_tokens = step->recent_tokens;
    row.gaussian_model = step->gaussian_model;
    row.quantile = step->quantile;
    row.margin_sigma = step->margin_sigma;
    row.margin_fraction = step->margin_fraction;
    row.page_mask = mask;
    if (!mask && step->policy == EKV_POLICY_PAGES) {
        row.page_mask = step->page_mask + (q_token * p->q_heads + head) * step->page_mask_stride;
    }
    return row;
}

void oracle_make(oracle *o, const problem *p, int32_t q_token, int32_t head, const uint8_t *mask) {
    memset(o, 0, sizeof *o);
    int32_t b;
    problem_locate(p, q_token, &b, &o->n);
    o->pages = pages_of(p, o->n);
    o->v_dim = p->shape.v_dim;
    o->page_size = p->shape.page_size;
    o->alpha = problem_alpha(p, head);
    oracle_allocate(o);
    o->result.tau = o->result.tau_full = -INFINITY;
    if (o->n == 0) {
        return; /* zeros, and tau = -infinity */
    }
    ekv_reference_problem row = oracle_problem(p, q_token, head, mask);
    const void **keys = get(o->n, sizeof *keys), **values = get(o->n, sizeof *values);
    double *q = get(p->shape.k_dim, sizeof *q);
    for (int64_t t = 0; t < o->n; t++) {
        keys[t] = problem_key(p, b, t, head / p->shape.group);
        values[t] = problem_value(p, b, t, head / p->shape.group);
        double square = 0;
        for (int32_t d = 0; d < p->shape.v_dim; d++) {
            const double v = dtype_load(p->shape.dtype, values[t], d);
            square += v * v;
        }
        o->value_norms[t] = sqrt(square);
    }
    for (int32_t d = 0; d < p->shape.k_dim; d++) {
        q[d] = dtype_load(p->shape.q_dtype, query_row(p, q_token, head), d);
    }
    row.n = o->n;
    row.keys = keys;
    row.values = values;
    row.q = q;
    EXPECT(ekv_reference_row(&row, &o->result) == 0, "the reference found no memory");
    oracle_measure(o, &row);
    oracle_slack(o, p, &row);
    free(keys);
    free(values);
    free(q);
}

void oracle_free(oracle *o) {
    free(o->out);
    free(o->z);
    free(o->p);
    free(o->value_norms);
    free(o->page_bound);
    free(o->page_mean);
    free(o->page_deviation);
    free(o->page_size_of_sum);
    free(o->pages_read);
}

bool oracle_reads(const oracle *o, int64_t token) {
    return o->pages_read[token / o->page_size] != 0;
}

int64_t oracle_count_above(const oracle *o, double threshold) {
    int64_t count = 0;
    for (int64_t i = 0; i < o->n; i++) {
        count += oracle_reads(o, i) && o->z[i] > threshold;
    }
    return count;
}

double oracle_score_error(const oracle *o) {
    return 8 * 0x1p-23 * fmax(1, o->z_size);
}

/* Rounding of one f32 score: four half ulps of what was added up. */
static double score_rounding(const oracle *o) {
    return 4 * 0x1p-24 * o->z_size;
}

/*
 * alpha <= 2: design section 6, 3e-6 * max(1, max |z|) relative, the maximum taken over the tokens that carry weight, and what
 * rounding of the scores makes of itself where attention is diffuse: p = x^beta with x = z - tau small, about n^(1-alpha),
 * turns an error e of z into beta x^(beta-1) e, so that with f32 scores no kernel reaches 3e-6 on flat rows of thousands of
 * tokens. These errors are independent: they add up as the root of the sum of squares.
 *
 * alpha > 2: tau is monotone in every z and shifts with them, so an error of at most e = 8 ulp per score moves tau by at most
 * e, and every p_i = (z_i - tau)^beta stays between its values at z_i - tau -+ 2e.  The larger of the two differences, times
 * |v_i|, summed, bounds the error of the output; near the threshold, where beta < 1 makes the slope infinite, this is
 * (2e)^beta. 1e-6 of the output's size is left for adding up values in f32.
 */
double oracle_tolerance(const oracle *o) {
    const double beta = o->alpha == 1 ? 0 : 1 / (o->alpha - 1), small = score_rounding(o), large = 2 * oracle_score_error(o);
    double square = 0, sum = 0;
    for (int64_t i = 0; i < o->n; i++) {
        if (!oracle_reads(o, i)) {
            continue;
        }
        const double x = o->z[i] - o->result.tau, norm = o->value_norms[i];
        if (o->alpha <= 2) {
            const double change = o->alpha == 1 ? o->p[i] * small : x + small > 0 ? beta * pow(x + small, beta - 1) * small : 0;
            square += change * change * norm * norm;
        } else {
            const double here = pow(fmax(x, 0), beta), low = pow(fmax(x - large, 0), beta),
                         high = pow(fmax(x + large, 0), beta);
            sum += fmax(high - here, here - low) * norm;
        }
    }
    return o->alpha <= 2 ? 3e-6 * fmax(1, o->z_size) * o->out_size + sqrt(square) : sum + 1e-6 * o->out_size;
}

static void check_out_f32(const oracle *o, const double *out, double tolerance, int64_t row, const char *who) {
    double square = 0, reference = 0;
    for (int32_t d = 0; d < o->v_dim; d++) {
        square += (out[d] - o->out[d]) * (out[d] - o->out[d]);
        reference += o->out[d] * o->out[d];
    }
    EXPECT(sqrt(square) <= tolerance + 1e-38,
           "%s, row %lld (%lld tokens): out is off by %.3g, allowed %.3g; |out| %.3g, |z| %.3g, tau %.9g, support %lld", who,
           (long long)row, (long long)o->n, sqrt(square), tolerance, sqrt(reference), o->z_size, o->result.tau,
           (long long)o->result.support);
}

void oracle_check_out(const oracle *o, const problem *p, int64_t row, const char *who) {
    const ekv_dtype dtype = p->shape.out_dtype;
    double *out = get(o->v_dim, sizeof *out);
    problem_out_row(p, row, out);
    const double tolerance = oracle_tolerance(o);
    if (dtype == EKV_F32) {
        check_out_f32(o, out, tolerance, row, who);
    } else {
        for (int32_t d = 0; d < o->v_dim; d++) { /* 2^-25: half the smallest f16 */
            const double allowed = tolerance + dtype_half_ulp(dtype) * (fabs(o->out[d]) + tolerance) + 0x1p-25;
            EXPECT(fabs(out[d] - o->out[d]) <= allowed, "%s, row %lld: element %d, %s, is %.9g, reference %.9g, allowed %.3g",
                   who, (long long)row, d, ekv_dtype_name(dtype), out[d], o->out[d], allowed);
        }
    }
    free(out);
}

void oracle_check_report(const oracle *o, const ekv_report *report, const char *who) {
    const double error = oracle_score_error(o);
    if (o->n == 0) {
        EXPECT(report->tau == -INFINITY && report->support == 0 && report->tokens == 0 && report->pages == 0,
               "%s: empty sequence: tau %g support %lld tokens %lld pages %lld", who, report->tau, (long long)report->support,
               (long long)report->tokens, (long long)report->pages);
        return;
    }
    EXPECT(fabs(report->tau - o->result.tau) <= error, "%s: tau %.9g, reference %.9g, allowed %.3g", who, report->tau,
           o->result.tau, error);
    int64_t pages = 0, tokens = 0;
    for (int64_t i = 0; i < o->n; i++) {
        pages += i % o->page_size == 0 && oracle_reads(o, i);
        tokens += oracle_reads(o, i);
    }
    EXPECT(report->pages == pages && report->tokens == tokens,
           "%s: %lld pages and %lld tokens reported, %lld and %lld selected", who, (long long)report->pages,
           (long long)report->tokens, (long long)pages, (long long)tokens);
    /* alpha = 1: every weight is positive, but one below exp(-80) may be rounded to nothing. */
    const double edge = o->alpha == 1 ? 80 : -2 * error;
    const int64_t least = oracle_count_above(o, o->result.tau - edge);
    const int64_t most = o->alpha == 1 ? tokens : oracle_count_above(o, o->result.tau - 2 * error);
    EXPECT(report->support >= least && report->support <= most, "%s: support %lld, expected %lld to %lld", who,
           (long long)report->support, (long long)least, (long long)most);
}
