/*
 * The CUDA backend as the dispatcher sees it.  In a build without ENTMAXKV_CUDA the same calls exist and say so; no other code
 * asks.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Everything is enqueued on the stream of the call; nothing waits for the device or allocates, but where a comment says so. The
 * device that was current when the context was made is the context's; each call makes it current and restores the caller's.
 */
#ifndef EKV_CUDA_H
#define EKV_CUDA_H

#include "dispatch/step.h"

/* A device, for those who ask what there is. */
typedef struct ekv_cuda_gpu {
    char name[256];
    int major, minor, multiprocessors;
    size_t bytes;
} ekv_cuda_gpu;

typedef enum ekv_cuda_query_kind { EKV_CUDA_BOUNDS = 1, EKV_CUDA_MOMENTS = 2, EKV_CUDA_SELECTION = 3 } ekv_cuda_query_kind;

#if EKV_HAVE_CUDA

/* Why the backend cannot run on this machine; NULL if it can.  The text is static. */
const char *ekv_cuda_missing(void);
/* Describes device i = 0, 1, ...; false past the last, or if there is no driver. */
bool ekv_cuda_describe(int i, ekv_cuda_gpu *gpu);
/* Makes and frees context->cuda; open allocates a little and may start the device. */
ekv_status ekv_cuda_open(ekv_context *context, void *stream);
void ekv_cuda_close(ekv_context *context);

/* What only a device step must satisfy; completes the step. */
ekv_status ekv_cuda_check(ekv_context *context, ekv_step *step);
ekv_status ekv_cuda_scratch(ekv_context *context, const ekv_step *step, size_t *bytes);
/* Allocates. */
ekv_status ekv_cuda_reserve(ekv_context *context, const ekv_step *step);
/* Allocates only when the scratch is too small and not fixed, never while the stream is being captured. */
ekv_status ekv_cuda_decode(ekv_context *context, const ekv_step *step);
ekv_status ekv_cuda_query(ekv_context *context, const ekv_step *step, ekv_cuda_query_kind kind, void *a, void *b,
                          int64_t stride);

/* For tests: what the sketch says about every token of a step whose bounds all lie above `origin`, [slots][pages][page_size] f16, how far
 * above (see step.h).  Waits for the device. */
ekv_status ekv_cuda_token_bounds(ekv_context *context, const ekv_step *step, double origin, uint16_t *above, size_t bytes);

/* Device memory of an index (waits for the device): allocate unless it is the caller's, forget all pages; release. */
ekv_status ekv_cuda_index_create(ekv_context *context, void **memory, size_t bytes, bool owned, size_t counts_at,
                                 size_t counts_bytes);
int ekv_cuda_device(const ekv_context *context);
/* Device memory, copies between any two memories, and filling it with a byte; all wait for the device. */
ekv_status ekv_cuda_allocate(ekv_context *context, size_t bytes, void **memory);
void ekv_cuda_release(int device, void *memory); /* NULL is allowed */
ekv_status ekv_cuda_copy(ekv_context *context, void *to, const void *from, size_t bytes);
ekv_status ekv_cuda_copy_rows(ekv_context *context, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t rows);
ekv_status ekv_cuda_fill(ekv_context *context, void *to, int value, size_t bytes);
/* Statistics of the pages that hold the last count tokens of each sequence.  counts_start [batch + 1] as q_start, or NULL:
 * max_count each.  lengths NULL: one sequence, tokens [first, first + max_count) of `length`. */
typedef struct ekv_cuda_pages {
    const ekv_kv *kv; /* NULL: forget those pages */
    const int32_t *block_table, *lengths, *counts_start;
    int64_t block_table_stride, first, length, max_count;
    int32_t batch;
    void *stream;
    bool own_stream; /* use the context's */
} ekv_cuda_pages;
ekv_status ekv_cuda_index_pages(ekv_context *context, ekv_index *index, const ekv_cuda_pages *pages);

#else

#  define EKV_NO_CUDA(context) ekv_fail(context, EKV_ERROR_UNSUPPORTED, "this build has no CUDA backend")
static inline bool ekv_cuda_describe(int i, ekv_cuda_gpu *gpu) {
    (void)i, (void)gpu;
    return false;
}
static inline ekv_status ekv_cuda_open(ekv_context *context, void *stream) {
    (void)stream;
    return EKV_NO_CUDA(context);
}
static inline void ekv_cuda_close(ekv_context *context) { (void)context; }
static inline ekv_status ekv_cuda_check(ekv_context *context, ekv_step *step) {
    (void)step;
    return EKV_NO_CUDA(context);
}
static inline ekv_status ekv_cuda_scratch(ekv_context *context, const ekv_step *step, size_t *bytes) {
    (void)step, (void)bytes;
    return EKV_NO_CUDA(context);
}
static inline ekv_status ekv_cuda_reserve(ekv_context *context, const ekv_step *step) {
    (void)step;
    return EKV_NO_CUDA(context);
}
static inline ekv_status ekv_cuda_decode(ekv_context *context, const ekv_step *step) {
    (void)step;
    return EKV_NO_CUDA(context);
}
static inline ekv_status ekv_cuda_query(ekv_context *context, const ekv_step *step, ekv_cuda_query_kind kind, void *a, void *b,
                                        int64_t stride) {
    (void)step, (void)kind, (void)a, (void)b, (void)stride;
    return EKV_NO_CUDA(context);
}
static inline ekv_status ekv_cuda_index_create(ekv_context *context, void **memory, size_t bytes, bool owned, size_t counts_at,
                                               size_t counts_bytes) {
    (void)memory, (void)bytes, (void)owned, (void)counts_at, (void)counts_bytes;
    return EKV_NO_CUDA(context);
}
static inline int ekv_cuda_device(const ekv_context *context) {
    (void)context;
    return -1;
}
static inline ekv_status ekv_cuda_allocate(ekv_context *context, size_t bytes, void **memory) {
    (void)bytes, (void)memory;
    return EKV_NO_CUDA(context);
}
static inline void ekv_cuda_release(int device, void *memory) { (void)device, (void)memory; }
static inline ekv_status ekv_cuda_copy(ekv_context *context, void *to, const void *from, size_t bytes) {
    (void)to, (void)from, (void)bytes;
    return EKV_NO_CUDA(context);
}
static inline ekv_status ekv_cuda_copy_rows(ekv_context *context, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                            size_t width, size_t rows) {
    (void)to, (void)to_pitch, (void)from, (void)from_pitch, (void)width, (void)rows;
    return EKV_NO_CUDA(context);
}
static inline ekv_status ekv_cuda_fill(ekv_context *context, void *to, int value, size_t bytes) {
    (void)to, (void)value, (void)bytes;
    return EKV_NO_CUDA(context);
}
typedef struct ekv_cuda_pages {
    const ekv_kv *kv;
    const int32_t *block_table, *lengths, *counts_start;
    int64_t block_table_stride, first, length, max_count;
    int32_t batch;
    void *stream;
    bool own_stream;
} ekv_cuda_pages;
static inline ekv_status ekv_cuda_index_pages(ekv_context *context, ekv_index *index, const ekv_cuda_pages *pages) {
    (void)index, (void)pages;
    return EKV_NO_CUDA(context);
}

#endif

#endif
