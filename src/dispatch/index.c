/*
 * The page statistics of one layer: memory, building, forgetting.
 *
 * A page's statistics are rebuilt from its keys whenever one of its tokens changes.  A page is small, its keys have just been written
 * and are in cache, and the result is that of a bulk build to the last bit; running sums would drift.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/cuda.h"
#include "dispatch/internal.h"

#include <string.h>

#define ALL_STATISTICS (EKV_STATISTICS_BOX | EKV_STATISTICS_GAUSSIAN | EKV_STATISTICS_NORMS | EKV_STATISTICS_SKETCH)

/* Lays the arrays out in index->memory, or with NULL memory only measures. */
static size_t lay_out(ekv_index *index) {
    const ekv_index_params *s = &index->shape;
    const size_t pages = (size_t)s->kv_heads * (size_t)s->blocks, row = 2 * (size_t)s->k_dim;
    ekv_arena arena = {index->memory, 0};
    index->box_bytes = s->statistics & EKV_STATISTICS_BOX ? row * ekv_element_bytes(s->dtype) : 0;
    index->moments_bytes = s->statistics & EKV_STATISTICS_GAUSSIAN ? row * ekv_element_bytes(ekv_moments_dtype(s->dtype)) : 0;
    index->boxes = ekv_take(&arena, pages, index->box_bytes);
    index->moments = ekv_take(&arena, pages, index->moments_bytes);
    index->norms = ekv_take(&arena, pages, s->statistics & EKV_STATISTICS_NORMS ? 2 * sizeof(float) : 0);
    index->counts = ekv_take(&arena, (size_t)s->blocks, sizeof *index->counts);
    ekv_sketch_lay_out(index, &arena);
    if (!(s->statistics & EKV_STATISTICS_NORMS)) index->norms = NULL;
    return arena.used;
}

static ekv_status check_params(ekv_context *context, const ekv_index_params *s) {
#define CHECK(condition, ...) \
    if (!(condition)) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
    CHECK(ekv_dtype_valid(s->dtype), "params->dtype is %d, not an ekv_dtype", (int)s->dtype);
    CHECK(s->kv_heads >= 1 && s->kv_heads <= 65536, "params->kv_heads is %d, not in 1..65536", (int)s->kv_heads);
    CHECK(s->k_dim >= 1 && s->k_dim <= EKV_MAX_DIM, "params->k_dim is %d, not in 1..%d", (int)s->k_dim, EKV_MAX_DIM);
    CHECK(s->v_dim >= 1 && s->v_dim <= EKV_MAX_DIM, "params->v_dim is %d, not in 1..%d", (int)s->v_dim, EKV_MAX_DIM);
    CHECK(s->page_size >= 1 && s->page_size <= EKV_MAX_PAGE_SIZE, "params->page_size is %d, not in 1..%d", (int)s->page_size,
          EKV_MAX_PAGE_SIZE);
    CHECK(s->blocks >= 1 && s->blocks <= INT32_MAX, "params->blocks is %lld, not in 1..2^31-1", (long long)s->blocks);
    CHECK(!(s->statistics & ~(uint32_t)ALL_STATISTICS), "params->statistics is 0x%x: unknown flags", (unsigned)s->statistics);
#undef CHECK
    if (s->statistics & EKV_STATISTICS_SKETCH && s->page_size % EKV_SKETCH_GROUP)
        return ekv_fail(context, EKV_ERROR_UNSUPPORTED, "params->page_size is %d: SKETCH statistics need a multiple of %d",
                        (int)s->page_size, EKV_SKETCH_GROUP);
    return EKV_OK;
}

size_t ekv_index_bytes(const ekv_index_params *params) {
    ekv_index index = {.shape = ekv_index_params_default()};
    if (!params || !ekv_copy_params(&index.shape, sizeof index.shape, params, sizeof(size_t))) return 0;
    return check_params(NULL, &index.shape) == EKV_OK ? lay_out(&index) : 0;
}

/* The memory of an index whose fields are filled in but for the arrays. */
static ekv_status create_on_device(ekv_context *context, ekv_index *index, ekv_index **out) {
    ekv_index measure = {.shape = index->shape, .memory = index}; /* any address will do to find an offset */
    lay_out(&measure);
    const size_t counts_at = (size_t)((uintptr_t)measure.counts - (uintptr_t)measure.memory);
    const size_t counts_bytes = (size_t)index->shape.blocks * sizeof(uint16_t);
    index->on_device = true;
    index->device = ekv_cuda_device(context);
    ekv_status status = ekv_cuda_index_create(context, &index->memory, index->memory_bytes, index->owned, counts_at, counts_bytes);
    if (status != EKV_OK) {
        ekv_release(&context->allocator, index, sizeof *index);
        return status;
    }
    lay_out(index);
    if (index->codes) status = ekv_device_sketch_create(context, index);
    if (status != EKV_OK) return ekv_index_destroy(index), status;
    *out = index;
    return EKV_OK;
}

ekv_status ekv_index_create_on_host(ekv_context *context, const ekv_index_params *shape, void *memory, ekv_index **out) {
    ekv_index measure = {.shape = *shape};
    const size_t need = lay_out(&measure);
    ekv_index *index = ekv_allocate(&context->allocator, sizeof *index);
    if (!index) return ekv_fail(context, EKV_ERROR_OUT_OF_MEMORY, "out of memory: %zu bytes for the index", sizeof *index);
    *index = (ekv_index){.shape = *shape, .allocator = context->allocator, .memory = memory, .memory_bytes = need, .owned = !memory};
    if (!memory) index->memory = ekv_allocate(&context->allocator, need);
    if (!index->memory) {
        ekv_release(&context->allocator, index, sizeof *index);
        return ekv_fail(context, EKV_ERROR_OUT_OF_MEMORY, "out of memory: %zu bytes for the index", need);
    }
    lay_out(index);
    memset(index->counts, 0, (size_t)shape->blocks * sizeof *index->counts);
    ekv_sketch_clear(index);
    *out = index;
    return EKV_OK;
}

ekv_status ekv_index_create(ekv_context *context, const ekv_index_params *params, void *memory, size_t bytes, ekv_index **out) {
    ekv_index_params shape = ekv_index_params_default();
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    if (!params) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "params is NULL");
    if (!out) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "index is NULL");
    if (!ekv_copy_params(&shape, sizeof shape, params, sizeof(size_t)))
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "params->size is %zu, not that of an ekv_index_params", params->size);
    const ekv_status status = check_params(context, &shape);
    if (status != EKV_OK) return status;
    ekv_index measure = {.shape = shape};
    const size_t need = lay_out(&measure);
    if (memory && bytes < need)
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "bytes is %zu, the index needs %zu", bytes, need);
    if (memory && (uintptr_t)memory % EKV_ALIGNMENT)
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "memory is %p, not aligned to %d bytes", memory, EKV_ALIGNMENT);
    if (!context->cuda) return ekv_index_create_on_host(context, &shape, memory, out);
    ekv_index *index = ekv_allocate(&context->allocator, sizeof *index);
    if (!index) return ekv_fail(context, EKV_ERROR_OUT_OF_MEMORY, "out of memory: %zu bytes for the index", sizeof *index);
    *index = (ekv_index){.shape = shape, .allocator = context->allocator, .memory = memory, .memory_bytes = need, .owned = !memory};
    return create_on_device(context, index, out);
}

void ekv_index_destroy(ekv_index *index) {
    if (!index) return;
    const ekv_allocator allocator = index->allocator;
    ekv_index_destroy(index->mirror);
    if (index->owned && index->on_device)
        ekv_cuda_release(index->device, index->memory);
    else if (index->owned)
        ekv_release(&allocator, index->memory, index->memory_bytes);
    ekv_release(&allocator, index, sizeof *index);
}

/* An index lives where the context that made it computes. */
static ekv_status check_place(ekv_context *context, const ekv_index *index) {
    if (index->on_device != (context->cuda != NULL) || (index->on_device && index->device != ekv_cuda_device(context)))
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "index is in %s memory, the context's backend is %s",
                        index->on_device ? "a device's" : "host", context->backend);
    return EKV_OK;
}

ekv_status ekv_check_index(ekv_context *context, const ekv_index *index, const ekv_kv *kv) {
    const ekv_index_params *s = &index->shape;
    const ekv_status status = check_place(context, index);
    if (status != EKV_OK) return status;
    if (s->dtype != kv->dtype || s->kv_heads != kv->kv_heads || s->k_dim != kv->k_dim || s->v_dim != kv->v_dim ||
        s->page_size != kv->page_size || s->blocks < kv->blocks)
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT,
                        "index is for %s, kv_heads %d, k_dim %d, v_dim %d, page_size %d, blocks %lld, which does not fit kv",
                        ekv_dtype_name(s->dtype), (int)s->kv_heads, (int)s->k_dim, (int)s->v_dim, (int)s->page_size,
                        (long long)s->blocks);
    return EKV_OK;
}

/* ---- building ---- */

typedef struct update {
    const ekv_kernels *kernels;
    ekv_index *index;
    const ekv_kv *kv;
    const int32_t *block_table;
    int64_t base; /* without a table page p lies in block base + p */
    int64_t first_page, pages, length;
} update;

void ekv_index_forget(ekv_index *index, int64_t block) {
    index->counts[block] = 0;
    if (index->codes) index->sketched[block] = 0;
}

static int64_t block_of(const int32_t *table, int64_t page) { return table ? table[page] : page; }

/* One page of one head; task i is page i / heads, head i % heads. */
static void build_page(void *arg, int64_t i) {
    const update *u = arg;
    ekv_index *index = u->index;
    const ekv_kv *kv = u->kv;
    const int head = (int)(i % kv->kv_heads);
    const int64_t page = u->first_page + i / kv->kv_heads, block = u->base + block_of(u->block_table, page);
    const int n = (int)ekv_min64(kv->page_size, u->length - page * kv->page_size);
    const void *keys[EKV_MAX_PAGE_SIZE], *values[EKV_MAX_PAGE_SIZE];
    for (int t = 0; t < n; t++) {
        keys[t] = ekv_key(kv, block, t, head);
        values[t] = ekv_value(kv, block, t, head);
    }
    const uint32_t statistics = index->shape.statistics;
    if (statistics & EKV_STATISTICS_BOX) {
        ekv_box_args a = {keys, n, kv->k_dim, (void *)ekv_index_box(index, head, block)};
        u->kernels->box[kv->dtype](&a);
    }
    if (statistics & EKV_STATISTICS_GAUSSIAN) {
        ekv_moments_args a = {keys, n, kv->k_dim, (void *)ekv_index_moments(index, head, block)};
        u->kernels->moments[kv->dtype](&a);
    }
    if (statistics & EKV_STATISTICS_NORMS) {
        ekv_norms_args k = {keys, n, kv->k_dim, ekv_index_key_norm(index, head, block)};
        ekv_norms_args v = {values, n, kv->v_dim, ekv_index_value_norm(index, head, block)};
        u->kernels->norms[kv->dtype](&k);
        u->kernels->norms[kv->dtype](&v);
    }
}

const ekv_kernels *ekv_statistics_kernels(const ekv_context *context) {
    ekv_backend_entry best;
    return !context->kernels && ekv_find_backend(NULL, &best) ? best.kernels : context->kernels;
}

static void rebuild(ekv_context *context, ekv_index *index, const ekv_kv *kv, const int32_t *block_table, int64_t base, int64_t first,
                    int64_t count, int64_t length) {
    if (count <= 0 || first >= length) return;
    const int64_t end = ekv_min64(first + count, length), first_page = first / kv->page_size;
    const ekv_kernels *kernels = ekv_statistics_kernels(context);
    update u = {kernels, index, kv, block_table, base, first_page, ekv_ceil_div(end, kv->page_size) - first_page, length};
    ekv_parallel(context, u.pages * kv->kv_heads, build_page, &u);
    for (int64_t page = first_page; page < first_page + u.pages; page++)
        index->counts[base + block_of(block_table, page)] = (uint16_t)ekv_min64(kv->page_size, length - page * kv->page_size);
    ekv_sketch_update(context, index, kernels, kv, block_table, base, first, count, length);
}

void ekv_index_rebuild(ekv_context *context, ekv_index *index, const ekv_kv *kv, const int32_t *block_table, int64_t first,
                       int64_t count, int64_t length) {
    rebuild(context, index, kv, block_table, 0, first, count, length);
}

/* Checks the range of tokens and the blocks that hold it; of an update also those of other tokens whose keys the sketch reads. */
static ekv_status check_range(ekv_context *context, const ekv_index *index, const int32_t *block_table, bool update, int64_t first,
                              int64_t count, int64_t length) {
    if (first < 0) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "first is %lld, below 0", (long long)first);
    if (count < 0) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "count is %lld, below 0", (long long)count);
    if (count > length - first)
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "length is %lld, but first + count is %lld + %lld", (long long)length,
                        (long long)first, (long long)count);
    if (count == 0 || (index->on_device && block_table)) return EKV_OK; /* a device table cannot be read here */
    const int64_t page_size = index->shape.page_size;
    int64_t begin = first, end = first + count;
    if (update) ekv_sketch_reads(index, &begin, &end, length);
    for (int64_t page = begin / page_size; page <= (end - 1) / page_size; page++) {
        const int64_t block = block_of(block_table, page);
        if (block < 0 || block >= index->shape.blocks)
            return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "block_table[%lld] is %lld, not in 0..%lld", (long long)page,
                            (long long)block, (long long)index->shape.blocks - 1);
    }
    return EKV_OK;
}

ekv_status ekv_check_blocks(ekv_context *context, const ekv_index *index, const int32_t *block_table, int64_t first, int64_t count) {
    return check_range(context, index, block_table, false, first, count, INT64_MAX);
}

ekv_status ekv_index_update(ekv_context *context, ekv_index *index, const ekv_kv *kv, const int32_t *block_table, int64_t first,
                            int64_t count, int64_t length) {
    ekv_kv view = ekv_kv_default();
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    if (!index) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "index is NULL");
    if (!kv) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "kv is NULL");
    if (!ekv_copy_params(&view, sizeof view, kv, sizeof(size_t)))
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "kv->size is %zu, not that of an ekv_kv", kv->size);
    ekv_status status = ekv_check_kv(context, &view);
    if (status == EKV_OK) status = ekv_check_index(context, index, &view);
    if (status == EKV_OK) status = check_range(context, index, block_table, true, first, count, length);
    if (status == EKV_OK && context->cuda) {
        const ekv_cuda_pages pages = {.kv = &view, .block_table = block_table, .first = first, .length = length, .max_count = count,
                                      .batch = 1, .own_stream = true};
        return ekv_cuda_index_pages(context, index, &pages);
    }
    if (status == EKV_OK) ekv_index_rebuild(context, index, &view, block_table, first, count, length);
    return status;
}

/* The sequences of ekv_index_append one by one, checked before anything is touched. */
static ekv_status append_on_host(ekv_context *context, ekv_index *index, const ekv_kv *kv, const ekv_index_append_params *p) {
    for (int pass = 0; pass < 2; pass++)
        for (int32_t b = 0; b < p->batch; b++) {
            const int64_t length = p->lengths[b], new_tokens = p->q_start ? (int64_t)p->q_start[b + 1] - p->q_start[b] : p->max_count;
            const int64_t count = ekv_min64(new_tokens, length), first = length - count;
            const int32_t *table = p->block_table ? p->block_table + b * p->block_table_stride : NULL;
            if (!table && b * p->block_table_stride + ekv_ceil_div(length, kv->page_size) > kv->blocks)
                return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "lengths[%d] is %lld, past the pool of %lld blocks", (int)b,
                                (long long)length, (long long)kv->blocks);
            if (pass == 0) {
                const ekv_status status = check_range(context, index, table, true, first, count, length);
                if (status != EKV_OK) return status;
            } else {
                rebuild(context, index, kv, table, table ? 0 : b * p->block_table_stride, first, count, length);
            }
        }
    return EKV_OK;
}

ekv_status ekv_index_append(ekv_context *context, ekv_index *index, const ekv_kv *kv, const ekv_index_append_params *params) {
    ekv_kv view = ekv_kv_default();
    ekv_index_append_params p = ekv_index_append_params_default();
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    if (!index || !kv || !params)
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", !index ? "index" : !kv ? "kv" : "params");
    if (!ekv_copy_params(&view, sizeof view, kv, sizeof(size_t)))
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "kv->size is %zu, not that of an ekv_kv", kv->size);
    if (!ekv_copy_params(&p, sizeof p, params, sizeof(size_t)))
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "params->size is %zu, not that of an ekv_index_append_params", params->size);
    ekv_status status = ekv_check_kv(context, &view);
    if (status == EKV_OK) status = ekv_check_index(context, index, &view);
    if (status != EKV_OK) return status;
    if (p.batch < 0) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "params->batch is %d, below 0", (int)p.batch);
    if (p.max_count < 0) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "params->max_count is %d, below 0", (int)p.max_count);
    if (!p.lengths && p.batch > 0) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "params->lengths is NULL");
    if (!context->cuda) return append_on_host(context, index, &view, &p);
    const ekv_cuda_pages pages = {.kv = &view, .block_table = p.block_table, .lengths = p.lengths, .counts_start = p.q_start,
                                  .block_table_stride = p.block_table_stride, .max_count = p.max_count, .batch = p.batch,
                                  .stream = p.stream};
    return ekv_cuda_index_pages(context, index, &pages);
}

ekv_status ekv_index_invalidate(ekv_context *context, ekv_index *index, const int32_t *block_table, int64_t first, int64_t count) {
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    if (!index) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "index is NULL");
    ekv_status status = check_place(context, index);
    if (status == EKV_OK) status = ekv_check_blocks(context, index, block_table, first, count);
    if (status != EKV_OK || count == 0) return status;
    if (context->cuda) {
        const ekv_cuda_pages pages = {.block_table = block_table, .first = first, .length = first + count, .max_count = count, .batch = 1,
                                      .own_stream = true};
        return ekv_cuda_index_pages(context, index, &pages);
    }
    const int64_t page_size = index->shape.page_size;
    for (int64_t page = first / page_size; page <= (first + count - 1) / page_size; page++)
        ekv_index_forget(index, block_of(block_table, page));
    return EKV_OK;
}
