/*
 * The managed cache: append, truncate, free and their statistics against a fresh build and against the caller's own memory, to
 * the bit; capacity errors that change nothing; and the soundness of the statistics on keys of every size.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Rows to append --------------------------------------------------------------------------------------------------- */

typedef struct sizes {
    ekv_dtype dtype; /* of the cache */
    int32_t layers, kv_heads, group, k_dim, v_dim, page_size, max_sequences;
    int64_t blocks;
} sizes;

static sizes random_sizes(rng *r) {
    static const int32_t pages[] = {1, 3, 16, 17}, dims[][2] = {{1, 2}, {7, 5}, {32, 32}, {48, 16}};
    const int64_t d = rng_between(r, 0, 3);
    sizes s;
    s.dtype = (ekv_dtype)rng_between(r, 0, 2);
    s.layers = (int32_t)rng_between(r, 1, 3);
    s.kv_heads = (int32_t)rng_between(r, 1, 3);
    s.group = (int32_t)rng_between(r, 1, 3);
    s.k_dim = dims[d][0];
    s.v_dim = dims[d][1];
    s.page_size = RNG_PICK(r, pages);
    s.max_sequences = 4;
    s.blocks = rng_between(r, 4, 300 / s.page_size + 4);
    return s;
}

static ekv_cache *cache_open(ekv_context *context, const sizes *s) {
    ekv_cache_params params = ekv_cache_params_default();
    params.dtype = s->dtype;
    params.layers = s->layers;
    params.kv_heads = s->kv_heads;
    params.k_dim = s->k_dim;
    params.v_dim = s->v_dim;
    params.page_size = s->page_size;
    params.blocks = s->blocks;
    params.max_sequences = s->max_sequences;
    ekv_cache *cache = NULL;
    EXPECT_OK(context, ekv_cache_create(context, &params, &cache));
    return cache;
}

/* Token `id` of a layer always has the same keys and values: a page of tokens shares a mean, channel 0 is constant. */
static float element(int64_t id, int32_t layer, int64_t i, bool value) {
    uint64_t x = (uint64_t)(id + 1) * 0x9E3779B97F4A7C15u ^ (uint64_t)(i + 1 + (int64_t)layer * 7919) * 0xC2B2AE3D27D4EB4Fu ^
                 (value ? 77 : 0);
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
    x ^= x >> 32;
    if (i == 0 && !value) {
        return 0.75f;
    }
    return (float)(int32_t)(uint32_t)x * 0x1p-31f + (float)(id / 20 % 5) * 0.25f;
}

/* Appends tokens ids[0..count) as f32 rows with padding between heads and tokens. */
static ekv_status append_ids(ekv_context *context, ekv_cache *cache, const sizes *s, int32_t sequence, int32_t layer,
                             const int64_t *ids, int64_t count) {
    const int64_t k_head = s->k_dim + 2, v_head = s->v_dim + 1, k_token = s->kv_heads * k_head + 3,
                  v_token = s->kv_heads * v_head + 5;
    guard k = guard_alloc((size_t)(count * k_token) * sizeof(float)),
          v = guard_alloc((size_t)(count * v_token) * sizeof(float));
    dtype_store_nan(EKV_F32, k.data, count * k_token);
    dtype_store_nan(EKV_F32, v.data, count * v_token);
    for (int64_t t = 0; t < count; t++) {
        for (int32_t h = 0; h < s->kv_heads; h++) {
            for (int32_t d = 0; d < s->k_dim; d++) {
                ((float *)k.data)[t * k_token + h * k_head + d] = element(ids[t], layer, h * 1000 + d, false);
            }
            for (int32_t d = 0; d < s->v_dim; d++) {
                ((float *)v.data)[t * v_token + h * v_head + d] = element(ids[t], layer, h * 1000 + d, true);
            }
        }
    }
    ekv_append_params rows = ekv_append_params_default();
    rows.count = count;
    rows.k = k.data;
    rows.v = v.data;
    rows.k_token_stride = k_token;
    rows.k_head_stride = k_head;
    rows.v_token_stride = v_token;
    rows.v_head_stride = v_head;
    const ekv_status status = ekv_cache_append(context, cache, sequence, layer, &rows);
    guard_free(&k);
    guard_free(&v);
    return status;
}

/* ---- What one layer of a sequence looks like from outside ------------------------------------------------------------- */

typedef struct view {
    int64_t pages, rows;
    float *bounds, *mean, *deviation, *out;
    uint8_t *topk, *gaussian;
    int64_t v_dim;
} view;

static ekv_decode_params cache_step(const ekv_cache *cache, const sizes *s, const int32_t *sequence, int32_t layer,
                                    const float *q, const float *slopes) {
    ekv_decode_params step = ekv_decode_params_default();
    step.cache = cache;
    step.layer = layer;
    step.sequences = sequence;
    step.q_heads = s->kv_heads * s->group;
    step.q = q;
    step.slopes = slopes;
    step.budget = 2 * s->page_size;
    return step;
}

static void view_step(ekv_context *context, ekv_decode_params step, int64_t length, const sizes *s, view *w) {
    w->pages = (length + s->page_size - 1) / s->page_size;
    w->rows = step.q_heads;
    w->v_dim = s->v_dim;
    const size_t entries = (size_t)(w->rows * (w->pages + 1));
    w->bounds = calloc(entries, sizeof(float));
    w->mean = calloc(entries, sizeof(float));
    w->deviation = calloc(entries, sizeof(float));
    w->topk = calloc(entries, 1);
    w->gaussian = calloc(entries, 1);
    w->out = calloc((size_t)(3 * w->rows * s->v_dim), sizeof(float));
    EXPECT_OK(context, ekv_page_bounds(context, &step, w->bounds, w->pages + 1));
    EXPECT_OK(context, ekv_page_moments(context, &step, w->mean, w->deviation, w->pages + 1));
    const ekv_policy policies[] = {EKV_POLICY_FULL, EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN};
    for (int i = 0; i < 3; i++) {
        step.policy = policies[i];
        step.out = w->out + i * w->rows * s->v_dim;
        if (i > 0) {
            EXPECT_OK(context, ekv_select_pages(context, &step, i == 1 ? w->topk : w->gaussian, w->pages + 1));
        }
        EXPECT_OK(context, ekv_decode(context, &step));
    }
}

static void view_free(view *w) {
    free(w->bounds);
    free(w->mean);
    free(w->deviation);
    free(w->out);
    free(w->topk);
    free(w->gaussian);
}

static void views_equal(const view *a, const view *b, const char *what) {
    const size_t entries = (size_t)(a->rows * (a->pages + 1));
    EXPECT(a->pages == b->pages && a->rows == b->rows, "%s: %lld and %lld pages", what, (long long)a->pages,
           (long long)b->pages);
    for (size_t i = 0; i < entries; i++) {
        EXPECT(memcmp(&a->bounds[i], &b->bounds[i], 4) == 0, "%s: bound %zu is %.9g and %.9g", what, i, a->bounds[i],
               b->bounds[i]);
        EXPECT(memcmp(&a->mean[i], &b->mean[i], 4) == 0, "%s: mean %zu is %.9g and %.9g", what, i, a->mean[i], b->mean[i]);
        EXPECT(memcmp(&a->deviation[i], &b->deviation[i], 4) == 0, "%s: deviation %zu is %.9g and %.9g", what, i,
               a->deviation[i], b->deviation[i]);
    }
    EXPECT(memcmp(a->topk, b->topk, entries) == 0 && memcmp(a->gaussian, b->gaussian, entries) == 0, "%s: selections differ",
           what);
    EXPECT(memcmp(a->out, b->out, (size_t)(3 * a->rows * a->v_dim) * sizeof(float)) == 0, "%s: outputs differ", what);
}

static void random_query(float *q, float *slopes, const sizes *s, rng *r) {
    for (int32_t i = 0; i < s->kv_heads * s->group * s->k_dim; i++) {
        q[i] = 3 * rng_rough_normal(r);
    }
    for (int32_t h = 0; h < s->kv_heads * s->group; h++) {
        slopes[h] = h % 3 == 0 ? 0 : h % 3 == 1 ? 0.125f : -0.03125f;
    }
}

/* ---- Any history equals a fresh build --------------------------------------------------------------------------------- */

enum { MAX_LENGTH = 400, MAX_LAYERS = 3, MAX_SEQUENCES = 4 };

/* What the cache should hold. */
typedef struct model {
    sizes s;
    bool alive[MAX_SEQUENCES];
    int32_t handle[MAX_SEQUENCES];
    int64_t length[MAX_SEQUENCES][MAX_LAYERS], ids[MAX_SEQUENCES][MAX_LAYERS][MAX_LENGTH];
    int64_t next_id;
} model;

static int64_t longest(const model *m, int sequence) {
    int64_t most = 0;
    for (int32_t l = 0; l < m->s.layers; l++) {
        most = m->length[sequence][l] > most ? m->length[sequence][l] : most;
    }
    return most;
}

static int64_t blocks_of(const model *m, int sequence) {
    return m->alive[sequence] ? (longest(m, sequence) + m->s.page_size - 1) / m->s.page_size : 0;
}

static int64_t blocks_free(const model *m) {
    int64_t used = 0;
    for (int i = 0; i < MAX_SEQUENCES; i++) {
        used += blocks_of(m, i);
    }
    return m->s.blocks - used;
}

static void check_sizes(const model *m, const ekv_cache *cache) {
    EXPECT(ekv_cache_free_blocks(cache) == blocks_free(m), "%lld free blocks, expected %lld",
           (long long)ekv_cache_free_blocks(cache), (long long)blocks_free(m));
    for (int i = 0; i < MAX_SEQUENCES; i++) {
        for (int32_t l = 0; m->alive[i] && l < m->s.layers; l++) {
            EXPECT(ekv_sequence_length(cache, m->handle[i], l) == m->length[i][l],
                   "layer %d of sequence %d has %lld tokens, not %lld", l, i,
                   (long long)ekv_sequence_length(cache, m->handle[i], l), (long long)m->length[i][l]);
        }
    }
}

/* The same tokens in a new cache, appended at once. */
static void check_fresh(const model *m, ekv_context *context, const ekv_cache *cache, int sequence, int32_t layer, rng *r) {
    const sizes *s = &m->s;
    float *q = malloc((size_t)(s->kv_heads * s->group * s->k_dim) * sizeof *q);
    float *slopes = malloc((size_t)(s->kv_heads * s->group) * sizeof *slopes);
    random_query(q, slopes, s, r);
    ekv_cache *fresh = cache_open(context, s);
    int32_t handle;
    view old, new;
    EXPECT_OK(context, ekv_sequence_create(context, fresh, &handle));
    EXPECT_OK(context, append_ids(context, fresh, s, handle, layer, m->ids[sequence][layer], m->length[sequence][layer]));
    view_step(context, cache_step(cache, s, &m->handle[sequence], layer, q, slopes), m->length[sequence][layer], s, &old);
    view_step(context, cache_step(fresh, s, &handle, layer, q, slopes), m->length[sequence][layer], s, &new);
    views_equal(&old, &new, "a long history and a fresh build");
    view_free(&old);
    view_free(&new);
    ekv_cache_destroy(fresh);
    free(q);
    free(slopes);
}

static void do_append(model *m, ekv_context *context, ekv_cache *cache, int i, rng *r) {
    const int32_t layer = (int32_t)rng_between(r, 0, m->s.layers - 1);
    int64_t *ids = m->ids[i][layer], *length = &m->length[i][layer];
    const int64_t count = rng_chance(r, 0.5) ? 1 : rng_between(r, 0, 45);
    if (*length + count > MAX_LENGTH) {
        return;
    }
    for (int64_t t = 0; t < count; t++) {
        ids[*length + t] = m->next_id++;
    }
    const int64_t most = *length + count > longest(m, i) ? *length + count : longest(m, i);
    const bool fits = (most + m->s.page_size - 1) / m->s.page_size - blocks_of(m, i) <= blocks_free(m);
    EXPECT_STATUS(context, fits ? EKV_OK : EKV_ERROR_CAPACITY,
                  append_ids(context, cache, &m->s, m->handle[i], layer, ids + *length, count));
    *length += fits ? count : 0;
}

static void do_truncate(model *m, ekv_context *context, ekv_cache *cache, int i, rng *r) {
    const int64_t to = rng_between(r, 0, longest(m, i) + 2);
    EXPECT_OK(context, ekv_cache_truncate(context, cache, m->handle[i], to));
    for (int32_t l = 0; l < m->s.layers; l++) {
        m->length[i][l] = m->length[i][l] < to ? m->length[i][l] : to;
    }
}

static void do_create(model *m, ekv_context *context, ekv_cache *cache, int i) {
    EXPECT_OK(context, ekv_sequence_create(context, cache, &m->handle[i]));
    m->alive[i] = true;
    memset(m->length[i], 0, sizeof m->length[i]);
    for (int other = 0; other < MAX_SEQUENCES; other++) {
        EXPECT(other == i || !m->alive[other] || m->handle[other] != m->handle[i], "two sequences have the handle %d",
               m->handle[i]);
    }
}

static void do_free(model *m, ekv_context *context, ekv_cache *cache, int i) {
    EXPECT_OK(context, ekv_sequence_free(context, cache, m->handle[i]));
    EXPECT(ekv_sequence_length(cache, m->handle[i], 0) == -1, "a freed sequence has length %lld",
           (long long)ekv_sequence_length(cache, m->handle[i], 0));
    EXPECT(ekv_cache_block_table(cache, m->handle[i]) == NULL, "a freed sequence has a block table");
    m->alive[i] = false;
}

static void random_history(ekv_context *context, rng *r, int steps) {
    model *m = calloc(1, sizeof *m);
    m->s = random_sizes(r);
    ekv_cache *cache = cache_open(context, &m->s);
    for (int step = 0; step < steps; step++) {
        const int i = (int)rng_between(r, 0, MAX_SEQUENCES - 1);
        const double what = rng_uniform(r);
        if (!m->alive[i]) {
            do_create(m, context, cache, i);
        } else if (what < 0.8) {
            do_append(m, context, cache, i, r);
        } else if (what < 0.95) {
            do_truncate(m, context, cache, i, r);
        } else {
            do_free(m, context, cache, i);
        }
        check_sizes(m, cache);
        if (m->alive[i] && rng_chance(r, 0.15)) {
            check_fresh(m, context, cache, i, (int32_t)rng_between(r, 0, m->s.layers - 1), r);
        }
    }
    for (int i = 0; i < MAX_SEQUENCES; i++) {
        for (int32_t l = 0; m->alive[i] && l < m->s.layers; l++) {
            check_fresh(m, context, cache, i, l, r);
        }
    }
    ekv_cache_destroy(cache);
    free(m);
}

START_TEST(any_history_equals_a_fresh_build) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 60) {
        for (int b = 0; b < backends.count; b++) {
            rng r = case_begin("any_history_equals_a_fresh_build", index);
            case_note("%s, history %lld", backends.names[b], (long long)index);
            random_history(backends.contexts[b], &r, 60);
        }
    }
    backends_close(&backends);
}
END_TEST

/* ---- The caller's memory gives the same bits -------------------------------------------------------------------------- */

/* The caller's [tokens][heads][dim] with an index of its own, updated in random pieces. */
static void check_own_memory(ekv_context *context, const sizes *s, const int64_t *ids, int64_t length,
                             const ekv_decode_params *managed, const view *expected, rng *r) {
    const size_t e = dtype_size(s->dtype);
    guard k = guard_alloc((size_t)(length * s->kv_heads * s->k_dim) * e),
          v = guard_alloc((size_t)(length * s->kv_heads * s->v_dim) * e);
    for (int64_t t = 0; t < length; t++) {
        for (int32_t h = 0; h < s->kv_heads; h++) {
            for (int32_t d = 0; d < s->k_dim; d++) {
                dtype_store(s->dtype, k.data, (t * s->kv_heads + h) * s->k_dim + d,
                            element(ids[t], managed->layer, h * 1000 + d, false));
            }
            for (int32_t d = 0; d < s->v_dim; d++) {
                dtype_store(s->dtype, v.data, (t * s->kv_heads + h) * s->v_dim + d,
                            element(ids[t], managed->layer, h * 1000 + d, true));
            }
        }
    }
    ekv_kv kv = ekv_kv_default();
    kv.dtype = s->dtype;
    kv.kv_heads = s->kv_heads;
    kv.k_dim = s->k_dim;
    kv.v_dim = s->v_dim;
    kv.page_size = s->page_size;
    kv.blocks = (length + s->page_size - 1) / s->page_size;
    kv.k = k.data;
    kv.v = v.data;
    kv.k_head_stride = s->k_dim, kv.k_token_stride = s->kv_heads * s->k_dim,
    kv.k_block_stride = s->page_size * kv.k_token_stride;
    kv.v_head_stride = s->v_dim, kv.v_token_stride = s->kv_heads * s->v_dim,
    kv.v_block_stride = s->page_size * kv.v_token_stride;
    ekv_index_params params = ekv_index_params_default();
    params.dtype = s->dtype;
    params.kv_heads = s->kv_heads;
    params.k_dim = s->k_dim;
    params.v_dim = s->v_dim;
    params.page_size = s->page_size;
    params.blocks = kv.blocks;
    ekv_index *index = NULL;
    EXPECT_OK(context, ekv_index_create(context, &params, NULL, 0, &index));
    for (int64_t done = 0; done < length;) { /* as tokens come in */
        const int64_t count = rng_between(r, 1, length - done);
        EXPECT_OK(context, ekv_index_update(context, index, &kv, NULL, done, count, done + count));
        done += count;
    }
    const int32_t length32 = (int32_t)length;
    ekv_decode_params step = *managed;
    step.cache = NULL;
    step.sequences = NULL;
    step.kv = &kv;
    step.index = index;
    step.block_table_stride = kv.blocks;
    step.lengths = &length32;
    view own;
    view_step(context, step, length, s, &own);
    views_equal(expected, &own, "the cache and the caller's memory");
    view_free(&own);
    ekv_index_destroy(index);
    guard_free(&k);
    guard_free(&v);
}

/* The cache's own memory, index and table, as level 2 sees them. */
static void check_level_two(ekv_context *context, const ekv_cache *cache, const sizes *s, int32_t sequence, int64_t length,
                            const ekv_decode_params *managed, const view *expected) {
    ekv_kv kv = ekv_kv_default();
    const ekv_index *index = NULL;
    EXPECT_OK(context, ekv_cache_layer(cache, managed->layer, &kv, &index));
    EXPECT(index != NULL && kv.dtype == s->dtype && kv.kv_heads == s->kv_heads && kv.k_dim == s->k_dim &&
               kv.v_dim == s->v_dim && kv.page_size == s->page_size && kv.blocks == s->blocks,
           "ekv_cache_layer describes another cache");
    const int32_t length32 = (int32_t)length;
    ekv_decode_params step = *managed;
    step.cache = NULL;
    step.sequences = NULL;
    step.kv = &kv;
    step.index = index;
    step.block_table = ekv_cache_block_table(cache, sequence);
    step.block_table_stride = (length + s->page_size - 1) / s->page_size;
    step.lengths = &length32;
    view level_two;
    view_step(context, step, length, s, &level_two);
    views_equal(expected, &level_two, "the cache and its level 2 view");
    view_free(&level_two);
}

START_TEST(cache_equals_own_memory) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 120) {
        for (int b = 0; b < backends.count; b++) {
            rng r = case_begin("cache_equals_own_memory", index);
            case_note("%s", backends.names[b]);
            ekv_context *context = backends.contexts[b];
            sizes s = random_sizes(&r);
            const int64_t length =
                rng_between(&r, 1, s.blocks * s.page_size < MAX_LENGTH ? s.blocks * s.page_size : MAX_LENGTH);
            const int32_t layer = s.layers - 1;
            int64_t ids[MAX_LENGTH];
            ekv_cache *cache = cache_open(context, &s);
            int32_t sequence;
            EXPECT_OK(context, ekv_sequence_create(context, cache, &sequence));
            for (int64_t t = 0; t < length; t++) {
                ids[t] = rng_between(&r, 0, 1000);
            }
            for (int64_t done = 0; done < length;) {
                const int64_t count = rng_chance(&r, 0.5) ? 1 : rng_between(&r, 1, length - done);
                EXPECT_OK(context, append_ids(context, cache, &s, sequence, layer, ids + done, count));
                done += count;
            }
            float *q = malloc((size_t)(s.kv_heads * s.group * s.k_dim) * sizeof *q), slopes[9];
            random_query(q, slopes, &s, &r);
            const ekv_decode_params step = cache_step(cache, &s, &sequence, layer, q, slopes);
            view managed;
            view_step(context, step, length, &s, &managed);
            check_level_two(context, cache, &s, sequence, length, &step, &managed);
            check_own_memory(context, &s, ids, length, &step, &managed, &r);
            view_free(&managed);
            ekv_cache_destroy(cache);
            free(q);
        }
    }
    backends_close(&backends);
}
END_TEST

/* ---- Storage ---------------------------------------------------------------------------------------------------------- */

/* Every source type into every cache type, rounded to nearest even; f16 overflow becomes infinity, NaN stays NaN. */
START_TEST(append_rounds_to_nearest_even) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 9 * 20) {
        rng r = case_begin("append_rounds_to_nearest_even", index);
        const ekv_dtype from = (ekv_dtype)(index % 3), to = (ekv_dtype)(index / 3 % 3);
        sizes s = {to, 1, 2, 1, 37, 19, 5, 1, 8};
        const int64_t count = rng_between(&r, 1, 40);
        guard k = guard_alloc((size_t)(count * 2 * 37) * dtype_size(from)),
              v = guard_alloc((size_t)(count * 2 * 19) * dtype_size(from));
        for (int64_t i = 0; i < count * 2 * 37; i++) { /* random bit patterns of moderate and of any size */
            const uint32_t bits = (uint32_t)rng_u64(&r);
            float x;
            memcpy(&x, &bits, sizeof x);
            x = rng_chance(&r, 0.3) ? x
                                    : (float)ldexp(1 + (double)(bits & 0xFFFF) * 0x1p-12 * 0x1p-4, (int)(bits >> 16 & 31) - 18);
            dtype_store(from, k.data, i, x);
            if (i < count * 2 * 19) {
                dtype_store(from, v.data, i, -x);
            }
        }
        ekv_append_params rows = ekv_append_params_default();
        rows.count = count;
        rows.k = k.data;
        rows.v = v.data;
        rows.dtype = from;
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: %s to %s", backends.names[b], ekv_dtype_name(from), ekv_dtype_name(to));
            ekv_context *context = backends.contexts[b];
            ekv_cache *cache = cache_open(context, &s);
            int32_t sequence;
            EXPECT_OK(context, ekv_sequence_create(context, cache, &sequence));
            EXPECT_OK(context, ekv_cache_append(context, cache, sequence, 0, &rows));
            ekv_kv kv = ekv_kv_default();
            EXPECT_OK(context, ekv_cache_layer(cache, 0, &kv, NULL));
            const int32_t *table = ekv_cache_block_table(cache, sequence);
            for (int64_t i = 0; i < count * 2 * (37 + 19); i++) {
                const bool value = i >= count * 2 * 37;
                const int64_t dim = value ? 19 : 37, at = value ? i - count * 2 * 37 : i, t = at / (2 * dim), h = at / dim % 2,
                              d = at % dim;
                const int64_t offset =
                    value ? table[t / 5] * kv.v_block_stride + t % 5 * kv.v_token_stride + h * kv.v_head_stride
                          : table[t / 5] * kv.k_block_stride + t % 5 * kv.k_token_stride + h * kv.k_head_stride;
                const float x = (float)dtype_load(from, value ? v.data : k.data, at);
                float one;
                dtype_store(to, &one, 0, x);
                const double expected = dtype_load(to, &one, 0), got = dtype_load(to, value ? kv.v : kv.k, offset + d);
                EXPECT(isnan(expected) ? isnan(got) : got == expected, "%.9g was stored as %.9g, expected %.9g", x, got,
                       expected);
            }
            ekv_cache_destroy(cache);
        }
        guard_free(&k);
        guard_free(&v);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Capacity --------------------------------------------------------------------------------------------------------- */

static void check_unchanged(ekv_context *context, const ekv_cache *cache, const sizes *s, int32_t sequence, const view *before,
                            int64_t length, int64_t free_blocks, const float *q, const float *slopes) {
    view after;
    EXPECT(ekv_cache_free_blocks(cache) == free_blocks, "%lld blocks free, before %lld",
           (long long)ekv_cache_free_blocks(cache), (long long)free_blocks);
    EXPECT(ekv_sequence_length(cache, sequence, 0) == length, "length %lld",
           (long long)ekv_sequence_length(cache, sequence, 0));
    view_step(context, cache_step(cache, s, &sequence, 0, q, slopes), length, s, &after);
    views_equal(before, &after, "before and after a failed append");
    view_free(&after);
}

START_TEST(capacity_errors_change_nothing) {
    backend_set backends;
    backends_open(&backends, 1);
    for (int b = 0; b < backends.count; b++) {
        rng r = case_begin("capacity_errors_change_nothing", b);
        case_note("%s", backends.names[b]);
        ekv_context *context = backends.contexts[b];
        sizes s = {EKV_F16, 2, 2, 2, 8, 8, 16, 2, 6};
        ekv_cache_params params = ekv_cache_params_default();
        params.layers = 2, params.kv_heads = 2, params.k_dim = 8, params.v_dim = 8, params.blocks = 6;
        params.max_sequences = 2;
        params.max_length = 70;
        ekv_cache *cache = NULL;
        EXPECT_OK(context, ekv_cache_create(context, &params, &cache));
        int32_t one, two, three = -5;
        int64_t ids[200];
        for (int i = 0; i < 200; i++) {
            ids[i] = i;
        }
        EXPECT_OK(context, ekv_sequence_create(context, cache, &one));
        EXPECT_OK(context, ekv_sequence_create(context, cache, &two));
        EXPECT_STATUS(context, EKV_ERROR_CAPACITY, ekv_sequence_create(context, cache, &three));
        EXPECT(three == -5, "a failed call wrote its output");
        EXPECT_OK(context, append_ids(context, cache, &s, one, 0, ids, 50)); /* 4 blocks */
        EXPECT_OK(context, append_ids(context, cache, &s, two, 0, ids, 20)); /* 2 blocks: none is left */
        float q[32], slopes[4];
        random_query(q, slopes, &s, &r);
        view before;
        view_step(context, cache_step(cache, &s, &one, 0, q, slopes), 50, &s, &before);
        EXPECT_STATUS(context, EKV_ERROR_CAPACITY,
                      append_ids(context, cache, &s, one, 0, ids, 15)); /* 65 tokens: a fifth block */
        EXPECT(strlen(ekv_last_error(context)) > 0, "no message");
        check_unchanged(context, cache, &s, one, &before, 50, 0, q, slopes);
        EXPECT_STATUS(context, EKV_ERROR_CAPACITY, append_ids(context, cache, &s, two, 1, ids, 33)); /* another layer, longer */
        check_unchanged(context, cache, &s, one, &before, 50, 0, q, slopes);
        EXPECT(ekv_sequence_length(cache, two, 1) == 0, "a failed append to layer 1 left tokens");
        EXPECT_OK(context, append_ids(context, cache, &s, two, 1, ids, 32)); /* fits into the blocks of layer 0 */
        EXPECT_OK(context, ekv_sequence_free(context, cache, two));
        EXPECT_STATUS(context, EKV_ERROR_CAPACITY, append_ids(context, cache, &s, one, 0, ids, 21)); /* 71 > max_length */
        check_unchanged(context, cache, &s, one, &before, 50, 2, q, slopes);
        EXPECT_OK(context, append_ids(context, cache, &s, one, 0, ids, 20)); /* 70 tokens, 5 blocks */
        EXPECT(ekv_cache_free_blocks(cache) == 1, "%lld blocks free", (long long)ekv_cache_free_blocks(cache));
        EXPECT_OK(context, ekv_sequence_create(context, cache, &two));
        view_free(&before);
        ekv_cache_destroy(cache);
    }
    backends_close(&backends);
}
END_TEST

START_TEST(unknown_sequences_and_layers) {
    backend_set backends;
    backends_open(&backends, 1);
    for (int b = 0; b < backends.count; b++) {
        case_begin("unknown_sequences_and_layers", b);
        ekv_context *context = backends.contexts[b];
        sizes s = {EKV_F16, 2, 2, 2, 8, 8, 16, 2, 6};
        ekv_cache *cache = cache_open(context, &s);
        int32_t sequence;
        const int64_t ids[] = {1, 2, 3};
        EXPECT_OK(context, ekv_sequence_create(context, cache, &sequence));
        const int32_t unknown[] = {sequence + 1, -1, INT32_MAX, INT32_MIN};
        for (int i = 0; i < 4; i++) {
            EXPECT(ekv_sequence_length(cache, unknown[i], 0) == -1, "length of sequence %d", unknown[i]);
            EXPECT(ekv_sequence_length(cache, sequence, i == 0 ? 2 : unknown[i]) == -1, "length of a layer that is not there");
            EXPECT(ekv_cache_block_table(cache, unknown[i]) == NULL, "block table of sequence %d", unknown[i]);
            EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_sequence_free(context, cache, unknown[i]));
            EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_truncate(context, cache, unknown[i], 0));
            EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, append_ids(context, cache, &s, unknown[i], 0, ids, 3));
            EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT,
                          append_ids(context, cache, &s, sequence, i == 0 ? 2 : unknown[i], ids, 3));
        }
        EXPECT(ekv_sequence_length(cache, sequence, 0) == 0 && ekv_sequence_length(cache, sequence, 1) == 0,
               "a new sequence is empty");
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_truncate(context, cache, sequence, -1));
        EXPECT_OK(context, ekv_sequence_free(context, cache, sequence));
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_sequence_free(context, cache, sequence));
        ekv_cache_destroy(cache);
    }
    backends_close(&backends);
}
END_TEST

/* Layers of one sequence at different lengths, as while a model runs: each decodes over its own tokens. */
START_TEST(layers_of_different_length) {
    backend_set backends;
    backends_open(&backends, 1);
    for (int b = 0; b < backends.count; b++) {
        rng r = case_begin("layers_of_different_length", b);
        case_note("%s", backends.names[b]);
        ekv_context *context = backends.contexts[b];
        sizes s = {EKV_F32, 3, 1, 2, 16, 4, 16, 1, 9};
        ekv_cache *cache = cache_open(context, &s);
        const int64_t lengths[] = {100, 33, 0};
        model *m = calloc(1, sizeof *m);
        m->s = s;
        m->alive[0] = true;
        EXPECT_OK(context, ekv_sequence_create(context, cache, &m->handle[0]));
        for (int32_t l = 0; l < 3; l++) {
            m->length[0][l] = lengths[l];
            for (int64_t t = 0; t < lengths[l]; t++) {
                m->ids[0][l][t] = t + 7 * l;
            }
            EXPECT_OK(context, append_ids(context, cache, &s, m->handle[0], l, m->ids[0][l], lengths[l]));
        }
        check_sizes(m, cache);
        for (int32_t l = 0; l < 3; l++) {
            check_fresh(m, context, cache, 0, l, &r);
        }
        ekv_cache_destroy(cache);
        free(m);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Sound bounds ----------------------------------------------------------------------------------------------------- */

typedef enum magnitude { ORDINARY, CANCELLING, HUGE_KEYS, TINY, SUBNORMAL, MIXED, CONSTANT, LARGEST, MAGNITUDES } magnitude;
static const char *const magnitude_names[] = {"ordinary",  "cancelling", "huge",     "tiny",
                                              "subnormal", "mixed",      "constant", "largest"};

static double type_largest(ekv_dtype dtype) {
    return dtype == EKV_F16 ? 65504 : 1e30;
}

static float one_element(magnitude m, ekv_dtype dtype, int32_t d, rng *r) {
    const float x = rng_rough_normal(r);
    switch (m) {
    case CANCELLING:
        return (d % 2 ? 1.0f : -1.0f) * (1000 + x);
    case HUGE_KEYS:
        return (float)(type_largest(dtype) / 4) * x;
    case TINY:
        return (dtype == EKV_F16 ? 1e-4f : 1e-30f) * x;
    case SUBNORMAL:
        return (dtype == EKV_F16 ? 1e-6f : 1e-40f) * x;
    case MIXED:
        return (float)ldexp(x, (int)rng_between(r, -12, 12));
    case CONSTANT:
        return 0.1f * (float)(d + 1);
    case LARGEST:
        return (float)(rng_chance(r, 0.5) ? type_largest(dtype) : -type_largest(dtype));
    default:
        return x;
    }
}

/* A query whose scores stay finite in f32. */
static float query_element(magnitude m, ekv_dtype dtype, int32_t d, rng *r) {
    const float x = rng_rough_normal(r);
    if (dtype != EKV_F16 && (m == HUGE_KEYS || m == LARGEST)) {
        return 1e-3f * x;
    }
    return m == CANCELLING ? 1 + 1e-3f * x : m == MIXED ? (float)ldexp(x, (int)rng_between(r, -8, 8)) : (float)(1 + d % 3) * x;
}

/* The exact score: products of two f32 are exact in double, and long double adds them with room to spare. */
static double exact_score(const problem *p, const float *q, int64_t token, double slope, int64_t n) {
    const void *key = problem_key(p, 0, token, 0);
    long double sum = 0;
    for (int32_t d = 0; d < p->shape.k_dim; d++) {
        sum += (long double)((double)q[d] * dtype_load(p->shape.dtype, key, d));
    }
    return (double)(sum * (long double)p->step.scale + (long double)slope * (long double)(token - (n - 1)));
}

static int64_t check_sound(const problem *p, const float *bounds) {
    const int64_t n = p->shape.lengths[0];
    int64_t checked = 0;
    for (int32_t h = 0; h < p->q_heads; h++) {
        const float *q = (const float *)p->q.data + h * p->shape.k_dim;
        for (int64_t t = 0; t < n; t++, checked++) {
            const float bound = bounds[h * problem_stride(p) + t / p->shape.page_size];
            const double score = exact_score(p, q, t, problem_slope(p, h), n);
            EXPECT(bound >= score, "head %d: page %lld has the bound %.9g, its token %lld the score %.17g", h,
                   (long long)(t / p->shape.page_size), bound, (long long)t, score);
        }
    }
    return checked;
}

static void sound_problem(problem *p, rng *r, magnitude m) {
    static const int32_t dims[] = {1, 3, 8, 31, 64, 128, 200}, pages[] = {1, 2, 16, 64};
    static const float slopes[][4] = {{0, 0, 0, 0}, {0.5f, 0.0078125f, 1, 0.3f}, {-0.5f, -1, -0.1f, -3e-3f}};
    shape s;
    memset(&s, 0, sizeof s);
    s.layout = (layout)rng_between(r, 0, LAYOUT_COUNT - 1);
    s.dtype = (ekv_dtype)rng_between(r, 0, 2);
    s.batch = s.kv_heads = s.queries[0] = 1;
    s.group = 4;
    s.k_dim = RNG_PICK(r, dims);
    s.v_dim = 1;
    s.page_size = RNG_PICK(r, pages);
    s.lengths[0] = (int32_t)rng_between(r, 1, 96);
    s.q_size = 1;
    problem_make(p, &s, r);
    for (int64_t t = 0; t < s.lengths[0]; t++) {
        for (int32_t d = 0; d < s.k_dim; d++) {
            dtype_store(s.dtype, problem_key(p, 0, t, 0), d, one_element(m, s.dtype, d, r));
        }
    }
    for (int32_t i = 0; i < p->q_heads * s.k_dim; i++) {
        ((float *)p->q.data)[i] = query_element(m, s.dtype, i % s.k_dim, r);
    }
    p->step.scale = rng_chance(r, 0.5) ? 1 : (float)rng_range(r, 0.01, 0.5);
    problem_set_heads(p, NULL, NULL, slopes[rng_between(r, 0, 2)]);
}

START_TEST(bounds_are_sound) {
    int64_t checked = 0;
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 8000) {
        rng r = case_begin("bounds_are_sound", index);
        const magnitude m = (magnitude)(index % MAGNITUDES);
        problem p;
        sound_problem(&p, &r, m);
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: %s keys: %s", backends.names[b], magnitude_names[m], problem_describe(&p));
            problem_index(&p, backends.contexts[b], EKV_STATISTICS_BOX);
            guard bounds = guard_alloc((size_t)(p.rows * problem_stride(&p)) * sizeof(float));
            EXPECT_OK(backends.contexts[b], ekv_page_bounds(backends.contexts[b], &p.step, bounds.data, problem_stride(&p)));
            checked += check_sound(&p, bounds.data);
            guard_free(&bounds);
        }
        problem_free(&p);
    }
    printf("%lld exact scores against their page's bound\n", (long long)checked);
    backends_close(&backends);
}
END_TEST

/* Means and deviations of keys of every size: never infinite, never lost, exactly 0 where the channel is constant. */
START_TEST(moments_of_extreme_keys) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 2000) {
        rng r = case_begin("moments_of_extreme_keys", index);
        const magnitude m = (magnitude)(index % MAGNITUDES);
        problem p;
        sound_problem(&p, &r, m);
        const bool narrow = p.shape.dtype == EKV_F16;
        oracle o;
        const int32_t head = (int32_t)rng_between(&r, 0, p.q_heads - 1);
        oracle_make(&o, &p, 0, head, NULL);
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: %s keys, head %d: %s", backends.names[b], magnitude_names[m], head, problem_describe(&p));
            problem_index(&p, backends.contexts[b], EKV_STATISTICS_GAUSSIAN);
            guard mean = guard_alloc((size_t)(p.rows * problem_stride(&p)) * sizeof(float));
            guard deviation = guard_alloc((size_t)(p.rows * problem_stride(&p)) * sizeof(float));
            EXPECT_OK(backends.contexts[b],
                      ekv_page_moments(backends.contexts[b], &p.step, mean.data, deviation.data, problem_stride(&p)));
            for (int64_t page = 0; page < o.pages; page++) {
                const double got = ((float *)mean.data)[head * problem_stride(&p) + page], size = o.page_size_of_sum[page];
                const double spread = ((float *)deviation.data)[head * problem_stride(&p) + page];
                /* a subnormal f16 mean or deviation is off by up to 2^-25, whatever its size */
                double q_sum = 0;
                for (int32_t d = 0; d < p.shape.k_dim; d++) {
                    q_sum += fabs(p.step.scale * ((const float *)p.q.data)[head * p.shape.k_dim + d]);
                }
                /* and so is a subnormal product by up to 2^-149, in z units */
                const double alpha = problem_alpha(&p, head), unit = alpha > 1.0 ? fmax(1.0, 1.0 / (alpha - 1.0)) : 1.0;
                const double room = ((narrow ? 0x1p-11 : 0x1p-24) + 300 * 0x1p-24) * size + (narrow ? 0x1p-25 : 1e-45) * q_sum +
                                    (p.shape.k_dim + 4) * 0x1p-149 * unit;
                EXPECT(fabs(got - o.page_mean[page]) <= room, "mean of page %lld is %.9g, exact %.9g", (long long)page, got,
                       o.page_mean[page]);
                EXPECT(fabs(spread - o.page_deviation[page]) <= room, "deviation of page %lld is %.9g, exact %.9g",
                       (long long)page, spread, o.page_deviation[page]);
                EXPECT(m != CONSTANT || problem_slope(&p, head) != 0 || spread <= 1e-6 * size, "constant keys deviate by %.9g",
                       spread);
            }
            guard_free(&mean);
            guard_free(&deviation);
        }
        oracle_free(&o);
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* An f32 key too large for an f16 cache becomes infinity there: the page is read whatever the budget, its bound is infinite. */
START_TEST(overflowing_keys_are_read) {
    backend_set backends;
    backends_open(&backends, 1);
    static const float bad[] = {65520.0f, -1e30f, INFINITY, NAN};
    for (int b = 0; b < backends.count; b++) {
        for (int kind = 0; kind < 4; kind++) {
            case_begin("overflowing_keys_are_read", kind);
            case_note("%s: a key of %g", backends.names[b], bad[kind]);
            ekv_context *context = backends.contexts[b];
            sizes s = {EKV_F16, 1, 1, 1, 4, 4, 4, 1, 10};
            ekv_cache *cache = cache_open(context, &s);
            int32_t sequence;
            EXPECT_OK(context, ekv_sequence_create(context, cache, &sequence));
            ekv_append_params rows = ekv_append_params_default();
            rows.count = 1;
            for (int t = 0; t < 40; t++) { /* the bad key in page 3; the others, but the first page, score little */
                const float k[] = {t < 4 ? 5.0f : 0.1f, 0, t == 13 ? bad[kind] : 0, 0}, v[] = {1, 2, 3, 4};
                rows.k = k;
                rows.v = v;
                EXPECT_OK(context, ekv_cache_append(context, cache, sequence, 0, &rows));
            }
            const float q[] = {1, 1, 0, 1};
            float out[4], bounds[10];
            uint8_t selected[10];
            ekv_decode_params step = cache_step(cache, &s, &sequence, 0, q, NULL);
            step.out = out;
            step.budget = 1;
            step.policy = EKV_POLICY_TOPK;
            EXPECT_OK(context, ekv_page_bounds(context, &step, bounds, 10));
            EXPECT_OK(context, ekv_select_pages(context, &step, selected, 10));
            EXPECT(bounds[3] == INFINITY && selected[3] == 1, "bound %g, selected %d", bounds[3], selected[3]);
            step.policy = EKV_POLICY_GAUSSIAN;
            EXPECT_OK(context, ekv_select_pages(context, &step, selected, 10));
            EXPECT(selected[3] == 1, "gaussian does not select the page");
            EXPECT_OK(context, ekv_cache_truncate(context, cache, sequence, 13)); /* the bad key goes */
            step.policy = EKV_POLICY_TOPK;
            EXPECT_OK(context, ekv_page_bounds(context, &step, bounds, 10));
            EXPECT(bounds[3] < 10, "after truncation the bound is %g", bounds[3]);
            ekv_cache_destroy(cache);
        }
    }
    backends_close(&backends);
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {TEST_ENTRY(any_history_equals_a_fresh_build),
                                TEST_ENTRY(cache_equals_own_memory),
                                TEST_ENTRY(append_rounds_to_nearest_even),
                                TEST_ENTRY(capacity_errors_change_nothing),
                                TEST_ENTRY(unknown_sequences_and_layers),
                                TEST_ENTRY(layers_of_different_length),
                                TEST_ENTRY(bounds_are_sound),
                                TEST_ENTRY(moments_of_extreme_keys),
                                TEST_ENTRY(overflowing_keys_are_read)};
    return HARNESS_MAIN(argv[0], tests);
}
