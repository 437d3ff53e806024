/*
 * The sketch of an index in device memory, as far as the host has to do with it: its basis.
 *
 * A basis is found and checked by the code that does so for host memory, on a small host index of the same shape, the mirror, which
 * keeps it; its numbers are then copied to the device, where keys are encoded and bounds are read (cuda/sketch.cu).  Device memory's
 * arrays are those of ekv_sketch_lay_out: bases, rows and expanded are copies of the mirror's (pointers in a basis stay the host's),
 * centers are unknown where they are NaN, and fits and centered are not used.
 *
 * All of this waits for the device: it is done before decoding, or rarely.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/cuda.h"
#include "dispatch/internal.h"

#include <string.h>

#define MIRROR_PAGE EKV_SKETCH_GROUP /* page size of the mirror, and of the keys that a basis is found from */

/* No basis, no centers, nothing sketched. */
static ekv_status clear(ekv_context *context, const ekv_index *index) {
    const ekv_index_params *s = &index->shape;
    const size_t centers = (size_t)s->kv_heads * (size_t)ekv_index_stretches(index) * ekv_padded(s->k_dim) * sizeof(float);
    ekv_status status = ekv_cuda_fill(context, index->sketched, 0, (size_t)s->blocks * sizeof *index->sketched);
    if (status == EKV_OK) status = ekv_cuda_fill(context, index->centers, 0xFF, centers);
    return status;
}

ekv_status ekv_device_sketch_create(ekv_context *context, ekv_index *index) {
    ekv_index_params shape = index->shape;
    shape.page_size = MIRROR_PAGE;
    shape.blocks = EKV_SKETCH_TRAINING / MIRROR_PAGE;
    shape.statistics = EKV_STATISTICS_SKETCH;
    const ekv_status status = ekv_index_create_on_host(context, &shape, NULL, &index->mirror);
    return status == EKV_OK ? clear(context, index) : status;
}

/* The mirror's basis to the device, with the first center; everything else that was sketched is forgotten. */
static ekv_status publish(ekv_context *context, const ekv_index *index) {
    const ekv_index *m = index->mirror;
    const size_t heads = (size_t)index->shape.kv_heads, dim = (size_t)index->shape.k_dim;
    ekv_status status = clear(context, index);
    if (status == EKV_OK) status = ekv_cuda_copy(context, index->bases, m->bases, heads * sizeof *m->bases);
    if (status == EKV_OK)
        status = ekv_cuda_copy(context, index->rows, m->rows, heads * (size_t)ekv_sketch_axes(index->shape.k_dim) * dim * sizeof *m->rows);
    if (status == EKV_OK)
        status = ekv_cuda_copy(context, index->expanded, m->expanded, heads * ekv_sketch_expanded(index->shape.k_dim) * sizeof(float));
    for (int32_t head = 0; head < index->shape.kv_heads && status == EKV_OK; head++)
        status = ekv_cuda_copy(context, (float *)(uintptr_t)ekv_index_center(index, head, 0), ekv_index_center(m, head, 0),
                               ekv_padded(index->shape.k_dim) * sizeof(float));
    if (status != EKV_OK) ekv_sketch_clear(index->mirror); /* half a basis is none */
    return status;
}

ekv_status ekv_device_load_basis(ekv_context *context, ekv_index *index, const void *data, size_t bytes) {
    const size_t count_bytes = (size_t)index->shape.blocks * sizeof *index->counts;
    uint16_t *counts = ekv_allocate(&context->allocator, count_bytes);
    if (!counts) return ekv_fail(context, EKV_ERROR_OUT_OF_MEMORY, "out of memory: %zu bytes to look at the index", count_bytes);
    ekv_status status = ekv_cuda_copy(context, counts, index->counts, count_bytes);
    for (int64_t block = 0; block < index->shape.blocks && status == EKV_OK; block++)
        if (counts[block])
            status = ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT,
                              "index holds tokens (%d in block %lld): a basis is loaded before the first one", (int)counts[block],
                              (long long)block);
    ekv_release(&context->allocator, counts, count_bytes);
    memset(index->mirror->counts, 0, (size_t)index->mirror->shape.blocks * sizeof *counts);
    if (status == EKV_OK) status = ekv_index_load_basis(context, index->mirror, data, bytes);
    return status == EKV_OK ? publish(context, index) : status;
}

/* The first EKV_SKETCH_TRAINING keys of a sequence to host memory, [tokens][heads][dim]. */
static ekv_status copy_keys(ekv_context *context, const ekv_kv *kv, int64_t blocks, const int32_t *device_table, int32_t *table,
                            char *keys) {
    const size_t e = ekv_element_bytes(kv->dtype), width = (size_t)kv->k_dim * e, pitch = width * (size_t)kv->kv_heads;
    const int64_t pages = ekv_ceil_div(EKV_SKETCH_TRAINING, kv->page_size);
    ekv_status status = EKV_OK;
    if (device_table) status = ekv_cuda_copy(context, table, device_table, (size_t)pages * sizeof *table);
    for (int64_t page = 0; page < pages && status == EKV_OK; page++) {
        const int64_t block = device_table ? table[page] : page;
        if (block < 0 || block >= blocks)
            return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "block_table[%lld] is %lld, not in 0..%lld", (long long)page,
                            (long long)block, (long long)blocks - 1);
        for (int32_t head = 0; head < kv->kv_heads && status == EKV_OK; head++)
            status = ekv_cuda_copy_rows(context, keys + (size_t)(page * kv->page_size) * pitch + (size_t)head * width, pitch,
                                        ekv_key(kv, block, 0, head), (size_t)kv->k_token_stride * e, width, (size_t)kv->page_size);
    }
    return status;
}

ekv_status ekv_device_find_basis(ekv_context *context, ekv_index *index, const ekv_kv *kv, const int32_t *block_table, int64_t length) {
    const ekv_index_params *s = &index->shape;
    const size_t table_bytes = (size_t)ekv_ceil_div(EKV_SKETCH_TRAINING, s->page_size) * sizeof(int32_t);
    const size_t row = (size_t)s->kv_heads * (size_t)s->k_dim;
    const size_t bytes = EKV_SKETCH_TRAINING * row * ekv_element_bytes(s->dtype) + table_bytes;
    char *memory = ekv_allocate(&context->allocator, bytes);
    if (!memory) return ekv_fail(context, EKV_ERROR_OUT_OF_MEMORY, "out of memory: %zu bytes to find a basis", bytes);
    char *keys = memory + table_bytes;
    ekv_status status = copy_keys(context, kv, kv->blocks, block_table, (int32_t *)(void *)memory, keys);
    const ekv_kv copied = {.size = sizeof copied, .k = keys, .v = keys, .dtype = s->dtype, .kv_heads = s->kv_heads, .k_dim = s->k_dim,
                           .v_dim = s->v_dim, .page_size = MIRROR_PAGE, .blocks = EKV_SKETCH_TRAINING / MIRROR_PAGE,
                           .k_block_stride = (int64_t)row * MIRROR_PAGE, .k_token_stride = (int64_t)row, .k_head_stride = s->k_dim};
    if (status == EKV_OK)
        status = ekv_sketch_find(context, index->mirror, ekv_statistics_kernels(context), &copied, NULL, EKV_SKETCH_TRAINING);
    ekv_release(&context->allocator, memory, bytes);
    if (status == EKV_OK) status = publish(context, index);
    if (status != EKV_OK) return status;
    const ekv_cuda_pages pages = {.kv = kv, .block_table = block_table, .length = length, .max_count = length, .batch = 1,
                                  .own_stream = true};
    return ekv_cuda_index_pages(context, index, &pages);
}
