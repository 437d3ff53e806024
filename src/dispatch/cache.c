/*
 * The managed cache: one pool of blocks, one block table per sequence for all layers, a length per sequence and layer.
 *
 * Memory is [layers][kv_heads][blocks][page_size][dim], so that one head's pages follow each other and a long sequence whose blocks
 * were handed out in order is read as one stream.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/internal.h"

#include <string.h>

#define REQUIRE(condition, status, ...) \
    if (!(condition)) return ekv_fail(context, status, __VA_ARGS__)
#define VALID(condition, ...) REQUIRE(condition, EKV_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

static bool is_sequence(const ekv_cache *cache, int32_t sequence) {
    return sequence >= 0 && sequence < cache->shape.max_sequences && cache->pages[sequence] >= 0;
}

static int64_t *length_at(const ekv_cache *cache, int32_t sequence, int32_t layer) {
    return &cache->lengths[(int64_t)sequence * cache->shape.layers + layer];
}

static void view_layer(const ekv_cache *cache, int32_t layer, ekv_kv *kv) {
    const ekv_cache_params *s = &cache->shape;
    const int64_t rows = s->blocks * s->page_size;
    *kv = ekv_kv_default();
    kv->dtype = s->dtype;
    kv->kv_heads = s->kv_heads;
    kv->k_dim = s->k_dim;
    kv->v_dim = s->v_dim;
    kv->page_size = s->page_size;
    kv->blocks = s->blocks;
    kv->k_token_stride = s->k_dim;
    kv->k_block_stride = (int64_t)s->page_size * s->k_dim;
    kv->k_head_stride = rows * s->k_dim;
    kv->v_token_stride = s->v_dim;
    kv->v_block_stride = (int64_t)s->page_size * s->v_dim;
    kv->v_head_stride = rows * s->v_dim;
    kv->k = ekv_at(cache->k, layer * s->kv_heads * kv->k_head_stride, s->dtype);
    kv->v = ekv_at(cache->v, layer * s->kv_heads * kv->v_head_stride, s->dtype);
}

/* ---- creation ---- */

static ekv_status check_params(ekv_context *context, ekv_cache_params *s) {
    VALID(ekv_dtype_valid(s->dtype), "params->dtype is %d, not an ekv_dtype", (int)s->dtype);
    VALID(s->layers >= 1 && s->layers <= 65536, "params->layers is %d, not in 1..65536", (int)s->layers);
    VALID(s->kv_heads >= 1 && s->kv_heads <= 65536, "params->kv_heads is %d, not in 1..65536", (int)s->kv_heads);
    VALID(s->k_dim >= 1 && s->k_dim <= EKV_MAX_DIM, "params->k_dim is %d, not in 1..%d", (int)s->k_dim, EKV_MAX_DIM);
    VALID(s->v_dim >= 1 && s->v_dim <= EKV_MAX_DIM, "params->v_dim is %d, not in 1..%d", (int)s->v_dim, EKV_MAX_DIM);
    VALID(s->page_size >= 1 && s->page_size <= EKV_MAX_PAGE_SIZE, "params->page_size is %d, not in 1..%d", (int)s->page_size,
          EKV_MAX_PAGE_SIZE);
    VALID(s->blocks >= 1 && s->blocks <= INT32_MAX / s->page_size, "params->blocks is %lld, not in 1..%d", (long long)s->blocks,
          INT32_MAX / s->page_size);
    VALID(s->max_sequences >= 1 && s->max_sequences <= 1 << 20, "params->max_sequences is %d, not in 1..2^20", (int)s->max_sequences);
    VALID(s->placement == EKV_PLACEMENT_DEFAULT || s->placement == EKV_PLACEMENT_FIRST_TOUCH || s->placement == EKV_PLACEMENT_INTERLEAVE,
          "params->placement is %d, not an ekv_placement", (int)s->placement);
    VALID(s->max_length >= 0, "params->max_length is %lld, below 0", (long long)s->max_length);
    if (s->max_length == 0 || s->max_length > s->blocks * s->page_size) s->max_length = s->blocks * s->page_size;
    const double rows = (double)s->layers * s->kv_heads * (double)s->blocks * s->page_size;
    VALID(rows * (s->k_dim > s->v_dim ? s->k_dim : s->v_dim) * 4.0 < 9e18, "params: layers * kv_heads * blocks * page_size overflows");
    return EKV_OK;
}

void ekv_cache_destroy(ekv_cache *cache) {
    if (!cache) return;
    const ekv_allocator allocator = cache->allocator;
    const ekv_cache_params *s = &cache->shape;
    ekv_cache_unplace(cache);
    if (cache->indexes)
        for (int32_t layer = 0; layer < s->layers; layer++) ekv_index_destroy(cache->indexes[layer]);
    ekv_release(&allocator, cache->indexes, (size_t)s->layers * sizeof *cache->indexes);
    ekv_release(&allocator, cache->k, cache->k_bytes);
    ekv_release(&allocator, cache->v, cache->v_bytes);
    ekv_release(&allocator, cache->tables, (size_t)s->max_sequences * (size_t)cache->table_stride * sizeof *cache->tables);
    ekv_release(&allocator, cache->pages, (size_t)s->max_sequences * sizeof *cache->pages);
    ekv_release(&allocator, cache->lengths, (size_t)s->max_sequences * (size_t)s->layers * sizeof *cache->lengths);
    ekv_release(&allocator, cache->free_blocks, (size_t)s->blocks * sizeof *cache->free_blocks);
    ekv_release(&allocator, cache, sizeof *cache);
}

static bool allocate_arrays(ekv_cache *cache) {
    const ekv_cache_params *s = &cache->shape;
    const size_t rows = (size_t)s->layers * (size_t)s->kv_heads * (size_t)s->blocks * (size_t)s->page_size;
    cache->k_bytes = rows * (size_t)s->k_dim * ekv_element_bytes(s->dtype);
    cache->v_bytes = rows * (size_t)s->v_dim * ekv_element_bytes(s->dtype);
    cache->table_stride = ekv_ceil_div(s->max_length, s->page_size);
    cache->k = ekv_allocate(&cache->allocator, cache->k_bytes);
    cache->v = ekv_allocate(&cache->allocator, cache->v_bytes);
    cache->tables = ekv_allocate(&cache->allocator, (size_t)s->max_sequences * (size_t)cache->table_stride * sizeof *cache->tables);
    cache->pages = ekv_allocate(&cache->allocator, (size_t)s->max_sequences * sizeof *cache->pages);
    cache->lengths = ekv_allocate(&cache->allocator, (size_t)s->max_sequences * (size_t)s->layers * sizeof *cache->lengths);
    cache->free_blocks = ekv_allocate(&cache->allocator, (size_t)s->blocks * sizeof *cache->free_blocks);
    return cache->k && cache->v && cache->tables && cache->pages && cache->lengths && cache->free_blocks;
}

static ekv_status create_indexes(ekv_context *context, ekv_cache *cache) {
    const ekv_cache_params *s = &cache->shape;
    if (!s->statistics) return EKV_OK;
    cache->indexes = ekv_allocate(&cache->allocator, (size_t)s->layers * sizeof *cache->indexes);
    REQUIRE(cache->indexes, EKV_ERROR_OUT_OF_MEMORY, "out of memory for the cache");
    memset(cache->indexes, 0, (size_t)s->layers * sizeof *cache->indexes);
    ekv_index_params p = ekv_index_params_default();
    p.dtype = s->dtype;
    p.kv_heads = s->kv_heads;
    p.k_dim = s->k_dim;
    p.v_dim = s->v_dim;
    p.page_size = s->page_size;
    p.blocks = s->blocks;
    p.statistics = s->statistics;
    for (int32_t layer = 0; layer < s->layers; layer++) {
        const ekv_status status = ekv_index_create(context, &p, NULL, 0, &cache->indexes[layer]);
        if (status != EKV_OK) return status;
    }
    return EKV_OK;
}

ekv_status ekv_cache_create(ekv_context *context, const ekv_cache_params *params, ekv_cache **out) {
    ekv_cache_params shape = ekv_cache_params_default();
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(params, "params is NULL");
    VALID(out, "cache is NULL");
    REQUIRE(!context->cuda, EKV_ERROR_UNSUPPORTED, "the managed cache lives in host memory: the cuda backend takes ekv_kv");
    VALID(ekv_copy_params(&shape, sizeof shape, params, sizeof(size_t)), "params->size is %zu, not that of an ekv_cache_params",
          params->size);
    ekv_status status = check_params(context, &shape);
    if (status != EKV_OK) return status;
    ekv_cache *cache = ekv_allocate(&context->allocator, sizeof *cache);
    REQUIRE(cache, EKV_ERROR_OUT_OF_MEMORY, "out of memory for the cache");
    memset(cache, 0, sizeof *cache);
    cache->shape = shape;
    cache->allocator = context->allocator;
    status = allocate_arrays(cache) ? create_indexes(context, cache)
                                    : ekv_fail(context, EKV_ERROR_OUT_OF_MEMORY, "out of memory: %zu bytes for keys and values",
                                               cache->k_bytes + cache->v_bytes);
    if (status == EKV_OK) status = ekv_cache_place(context, cache);
    if (status != EKV_OK) {
        ekv_cache_destroy(cache);
        return status;
    }
    for (int32_t i = 0; i < shape.max_sequences; i++) cache->pages[i] = -1;
    for (int64_t i = 0; i < shape.blocks; i++) cache->free_blocks[i] = (int32_t)(shape.blocks - 1 - i); /* block 0 on top */
    cache->free_count = shape.blocks;
    *out = cache;
    return EKV_OK;
}

/* ---- sequences ---- */

ekv_status ekv_sequence_create(ekv_context *context, ekv_cache *cache, int32_t *sequence) {
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(cache, "cache is NULL");
    VALID(sequence, "sequence is NULL");
    int32_t id = 0;
    while (id < cache->shape.max_sequences && cache->pages[id] >= 0) id++;
    REQUIRE(id < cache->shape.max_sequences, EKV_ERROR_CAPACITY, "the cache holds its max_sequences, %d, already",
            (int)cache->shape.max_sequences);
    cache->pages[id] = 0;
    for (int32_t layer = 0; layer < cache->shape.layers; layer++) *length_at(cache, id, layer) = 0;
    *sequence = id;
    return EKV_OK;
}

/* Gives the blocks of pages >= keep back, last first, so that they are handed out again in order. */
static void free_pages(ekv_cache *cache, int32_t sequence, int64_t keep) {
    const int32_t *table = cache->tables + sequence * cache->table_stride;
    while (cache->pages[sequence] > keep) {
        const int32_t block = table[--cache->pages[sequence]];
        for (int32_t layer = 0; cache->indexes && layer < cache->shape.layers; layer++) ekv_index_forget(cache->indexes[layer], block);
        cache->free_blocks[cache->free_count++] = block;
    }
}

ekv_status ekv_sequence_free(ekv_context *context, ekv_cache *cache, int32_t sequence) {
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(cache, "cache is NULL");
    VALID(is_sequence(cache, sequence), "sequence is %d, which does not exist", (int)sequence);
    free_pages(cache, sequence, 0);
    cache->pages[sequence] = -1;
    return EKV_OK;
}

int64_t ekv_sequence_length(const ekv_cache *cache, int32_t sequence, int32_t layer) {
    if (!cache || !is_sequence(cache, sequence) || layer < 0 || layer >= cache->shape.layers) return -1;
    return *length_at(cache, sequence, layer);
}

ekv_status ekv_cache_truncate(ekv_context *context, ekv_cache *cache, int32_t sequence, int64_t length) {
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(cache, "cache is NULL");
    VALID(is_sequence(cache, sequence), "sequence is %d, which does not exist", (int)sequence);
    VALID(length >= 0, "length is %lld, below 0", (long long)length);
    const int64_t page_size = cache->shape.page_size, keep = ekv_ceil_div(length, page_size);
    free_pages(cache, sequence, keep);
    for (int32_t layer = 0; layer < cache->shape.layers; layer++) {
        int64_t *now = length_at(cache, sequence, layer);
        if (*now <= length) continue;
        *now = length;
        if (!cache->indexes || length % page_size == 0) continue;
        ekv_kv kv;
        view_layer(cache, layer, &kv);
        ekv_index_rebuild(context, cache->indexes[layer], &kv, cache->tables + sequence * cache->table_stride, length - 1, 1, length);
    }
    return EKV_OK;
}

/* ---- append ---- */

typedef struct append {
    const ekv_kernels *kernels;
    const ekv_kv *kv;
    const int32_t *table;
    const ekv_append_params *rows;
    int64_t first;
} append;

static void store(const append *a, const void *from, int dim, const void *to) {
    if (a->rows->dtype == a->kv->dtype) {
        memcpy((void *)to, from, (size_t)dim * ekv_element_bytes(a->kv->dtype));
        return;
    }
    float x[EKV_MAX_DIM];
    ekv_load_row_args load = {from, dim, 1.0f, x};
    ekv_store_row_args save = {x, dim, (void *)to};
    a->kernels->load_row[a->rows->dtype](&load);
    a->kernels->store_row[a->kv->dtype](&save);
}

/* One token, all heads. */
static void append_token(void *arg, int64_t t) {
    const append *a = arg;
    const ekv_append_params *r = a->rows;
    const int64_t token = a->first + t, block = a->table[token / a->kv->page_size], slot = token % a->kv->page_size;
    for (int head = 0; head < a->kv->kv_heads; head++) {
        store(a, ekv_at(r->k, t * r->k_token_stride + head * r->k_head_stride, r->dtype), a->kv->k_dim,
              ekv_key(a->kv, block, slot, head));
        store(a, ekv_at(r->v, t * r->v_token_stride + head * r->v_head_stride, r->dtype), a->kv->v_dim,
              ekv_value(a->kv, block, slot, head));
    }
}

ekv_status ekv_cache_append(ekv_context *context, ekv_cache *cache, int32_t sequence, int32_t layer, const ekv_append_params *rows) {
    ekv_append_params r = ekv_append_params_default();
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(cache, "cache is NULL");
    VALID(rows, "rows is NULL");
    VALID(ekv_copy_params(&r, sizeof r, rows, sizeof(size_t)), "rows->size is %zu, not that of an ekv_append_params", rows->size);
    const ekv_cache_params *s = &cache->shape;
    VALID(is_sequence(cache, sequence), "sequence is %d, which does not exist", (int)sequence);
    VALID(layer >= 0 && layer < s->layers, "layer is %d, not in 0..%d", (int)layer, (int)s->layers - 1);
    VALID(r.count >= 0, "rows->count is %lld, below 0", (long long)r.count);
    VALID(ekv_dtype_valid(r.dtype), "rows->dtype is %d, not an ekv_dtype", (int)r.dtype);
    if (r.count == 0) return EKV_OK;
    VALID(r.k, "rows->k is NULL");
    VALID(r.v, "rows->v is NULL");
    if (!r.k_head_stride) r.k_head_stride = s->k_dim;
    if (!r.k_token_stride) r.k_token_stride = (int64_t)s->kv_heads * s->k_dim;
    if (!r.v_head_stride) r.v_head_stride = s->v_dim;
    if (!r.v_token_stride) r.v_token_stride = (int64_t)s->kv_heads * s->v_dim;

    int64_t *length = length_at(cache, sequence, layer);
    REQUIRE(r.count <= s->max_length - *length, EKV_ERROR_CAPACITY, "rows->count is %lld, but the sequence has %lld of %lld tokens",
            (long long)r.count, (long long)*length, (long long)s->max_length);
    const int64_t pages = ekv_ceil_div(*length + r.count, s->page_size), more = pages - cache->pages[sequence];
    REQUIRE(more <= cache->free_count, EKV_ERROR_CAPACITY, "rows->count is %lld: %lld more blocks are needed and %lld are free",
            (long long)r.count, (long long)more, (long long)cache->free_count);
    int32_t *table = cache->tables + sequence * cache->table_stride;
    while (cache->pages[sequence] < pages) table[cache->pages[sequence]++] = cache->free_blocks[--cache->free_count];

    ekv_kv kv;
    view_layer(cache, layer, &kv);
    ekv_backend_entry best;
    append a = {context->kernels, &kv, table, &r, *length};
    if (!a.kernels && ekv_find_backend(NULL, &best)) a.kernels = best.kernels;
    ekv_parallel(context, r.count, append_token, &a);
    *length += r.count;
    if (cache->indexes) ekv_index_rebuild(context, cache->indexes[layer], &kv, table, a.first, r.count, *length);
    return EKV_OK;
}

/* ---- views ---- */

ekv_status ekv_cache_layer(const ekv_cache *cache, int32_t layer, ekv_kv *kv, const ekv_index **index) {
    if (!cache || layer < 0 || layer >= cache->shape.layers) return EKV_ERROR_INVALID_ARGUMENT;
    if (kv) view_layer(cache, layer, kv);
    if (index) *index = cache->indexes ? cache->indexes[layer] : NULL;
    return EKV_OK;
}

const int32_t *ekv_cache_block_table(const ekv_cache *cache, int32_t sequence) {
    return cache && is_sequence(cache, sequence) ? cache->tables + sequence * cache->table_stride : NULL;
}

int64_t ekv_cache_free_blocks(const ekv_cache *cache) { return cache ? cache->free_count : 0; }
