/*
 * The host side of the CUDA backend: devices, scratch memory, how a step is cut, and the order of its launches.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Launches of a step, in order, each depending on the one before (docs/gpu.md says why there are that many):
 *      heads     only with per-head alpha, scale or slopes: their values travel in the launch
 *      norms, probe, pages or sketch, probe   certified: bounds by norms, then of what is left by boxes, or by sketches where there is
 *                a basis; after each a lower bound of tau
 *      pages     topk: box bounds; gaussian: moments, of every page
 *      cut       topk, gaussian: the threshold of each row
 *      compact   sparse policies: the pages, or tokens, that some row of an item reads
 *      scan      the one pass over keys (entmax), or over keys and values (softmax)
 *      finish    tau, support, and values of small supports (entmax); combine (softmax)
 *      values    values of large supports
 *      mass, report   only with a report
 */
#include "cuda/cuda.h"
#include "cuda/step.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define SCRATCH_CEILING       ((size_t)2 << 30) /* a step that needs more runs in rounds */
#define LEAST_TOKENS_PER_WARP 32

typedef struct ekv_cuda {
    int device, multiprocessors, major; /* major compute capability */
    cudaStream_t stream;                /* of calls that have none of their own */
    void *scratch;
    size_t scratch_bytes;
    double zeta_quantile, zeta; /* of zeta_n scores; 0: not computed yet */
    int32_t zeta_n;
} ekv_cuda;

static ekv_cuda *state_of(const ekv_context *context) { return context->cuda; }

/* ---- errors and devices ---- */

static ekv_status fail_cuda(ekv_context *context, cudaError_t error, const char *what) {
    (void)cudaGetLastError(); /* leave nothing behind for the caller's own checks */
    const ekv_status status = error == cudaErrorMemoryAllocation ? EKV_ERROR_OUT_OF_MEMORY : EKV_ERROR_INTERNAL;
    return ekv_fail(context, status, "CUDA: %s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

#define CUDA_TRY(context, call, what)                                                                                          \
  do {                                                                                                                         \
    const cudaError_t error_ = (call);                                                                                         \
    if (error_ != cudaSuccess) return fail_cuda(context, error_, what);                                                        \
  } while (0)

/* Makes the context's device current; *previous is for leave_device. */
static ekv_status enter_device(ekv_context *context, int device, int *previous) {
    CUDA_TRY(context, cudaGetDevice(previous), "cudaGetDevice");
    if (*previous != device) CUDA_TRY(context, cudaSetDevice(device), "cudaSetDevice");
    return EKV_OK;
}

static void leave_device(int device, int previous) {
    if (previous != device && cudaSetDevice(previous) != cudaSuccess) (void)cudaGetLastError();
}

const char *ekv_cuda_missing(void) {
    int count = 0, device = 0, major = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count == 0) error = cudaErrorNoDevice;
    if (error == cudaSuccess) error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return error == cudaErrorInsufficientDriver
                   ? "no NVIDIA driver, or one that is older than the CUDA runtime of this build"
                   : cudaGetErrorString(error);
    }
    return major >= 8 ? NULL : "needs a GPU of compute capability 8.0 or newer";
}

bool ekv_cuda_describe(int i, ekv_cuda_gpu *gpu) {
    struct cudaDeviceProp properties;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || i >= count || cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    *gpu = (ekv_cuda_gpu){.major = properties.major, .minor = properties.minor, .multiprocessors = properties.multiProcessorCount,
                          .bytes = properties.totalGlobalMem};
    snprintf(gpu->name, sizeof gpu->name, "%s", properties.name);
    return true;
}

ekv_status ekv_cuda_open(ekv_context *context, void *stream) {
    int device;
    CUDA_TRY(context, cudaGetDevice(&device), "cudaGetDevice");
    ekv_cuda *c = ekv_allocate(&context->allocator, sizeof *c);
    if (!c) return ekv_fail(context, EKV_ERROR_OUT_OF_MEMORY, "out of memory for the context");
    memset(c, 0, sizeof *c);
    c->device = device;
    c->stream = stream;
    cudaError_t error = cudaDeviceGetAttribute(&c->multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&c->major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess) {
        ekv_release(&context->allocator, c, sizeof *c);
        return fail_cuda(context, error, "cudaDeviceGetAttribute");
    }
    context->cuda = c;
    return EKV_OK;
}

void ekv_cuda_close(ekv_context *context) {
    ekv_cuda *c = state_of(context);
    int previous;
    if (!c) return;
    if (c->scratch && enter_device(context, c->device, &previous) == EKV_OK) {
        if (cudaFree(c->scratch) != cudaSuccess) (void)cudaGetLastError();
        leave_device(c->device, previous);
    }
    ekv_release(&context->allocator, c, sizeof *c);
    context->cuda = NULL;
}

int ekv_cuda_device(const ekv_context *context) { return state_of(context)->device; }

/* ---- what a device step must satisfy ---- */

ekv_status ekv_cuda_check(ekv_context *context, ekv_step *step) {
    ekv_decode_params *p = &step->p;
    const ekv_kv *kv = &step->kv;
#define SUPPORTED(condition, ...)                                                                                              \
  if (!(condition)) return ekv_fail(context, EKV_ERROR_UNSUPPORTED, __VA_ARGS__)
#define VALID(condition, ...)                                                                                                  \
  if (!(condition)) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
    SUPPORTED(kv->page_size >= 8 && (kv->page_size & (kv->page_size - 1)) == 0,
              "kv->page_size is %d: the cuda backend takes powers of two from 8", (int)kv->page_size);
    if (p->max_length == 0) p->max_length = p->block_table_stride * kv->page_size;
    VALID(p->max_length >= 0 && p->max_length <= INT32_MAX - EKV_MAX_PAGE_SIZE, "max_length is %lld, not in 0..2^31-257",
          (long long)p->max_length);
    VALID(ekv_ceil_div(p->max_length, kv->page_size) <= p->block_table_stride || (p->batch <= 1 && !p->block_table),
          "max_length is %lld, more than block_table_stride %lld pages", (long long)p->max_length,
          (long long)p->block_table_stride);
    if (!p->q_start && p->max_queries == 0) p->max_queries = 1;
    VALID(p->max_queries >= 1, "max_queries is %d: with q_start in device memory it says the most query tokens of a sequence",
          (int)p->max_queries);
    VALID(p->q_start || p->max_queries == 1, "max_queries is %d without q_start", (int)p->max_queries);
    VALID(p->policy != EKV_POLICY_PAGES || ekv_ceil_div(p->max_length, kv->page_size) <= p->page_mask_stride,
          "page_mask_stride is %lld, less than the pages of max_length", (long long)p->page_mask_stride);
    step->tokens = (int64_t)p->batch * p->max_queries;
    SUPPORTED(step->tokens * p->q_heads < (int64_t)1 << 31,
              "batch * max_queries * q_heads is %lld: the cuda backend takes less than 2^31",
              (long long)(step->tokens * p->q_heads));
    return EKV_OK;
}

/* ---- the cut of a step ---- */

typedef struct cut {
    int64_t items, round_items;
    bool softmax, entmax, heads, sparse;
    size_t bytes;
} cut;

static bool is_aligned(const void *base, int64_t a, int64_t b, int64_t c, int32_t dim, ekv_dtype dtype) {
    const int64_t per = 16 / (int64_t)ekv_element_bytes(dtype);
    return (uintptr_t)base % 16 == 0 && a % per == 0 && b % per == 0 && c % per == 0 && dim % 8 == 0;
}

/* Rows that share reads: as many as the registers of the kernel that fits the dimensions hold (typed.cuh). */
static int32_t rows_of(const ekv_step *step, const cut *u) {
    const ekv_kv *kv = &step->kv;
    bool fast =
        kv->k_dim <= 256 && is_aligned(kv->k, kv->k_block_stride, kv->k_token_stride, kv->k_head_stride, kv->k_dim, kv->dtype);
    if (u->softmax)
        fast = fast && is_aligned(kv->v, kv->v_block_stride, kv->v_token_stride, kv->v_head_stride, kv->v_dim, kv->dtype);
    const int64_t most = !fast ? 2 : u->softmax ? 4 : EKV_CUDA_MAX_ROWS, total = (int64_t)step->p.max_queries * step->group;
    const int64_t need = ekv_ceil_div(total, ekv_ceil_div(total, most));
    int32_t rows = 1;
    while (rows < need) rows *= 2;
    return rows;
}

static void lay_out(ekv_cuda_step *s, const cut *u, const ekv_step *step, ekv_arena *arena) {
    const size_t items = (size_t)s->round_items, slots = items * (size_t)s->rows, list = u->entmax ? (size_t)s->list_stride : 0;
    const size_t splits = (size_t)s->splits, soft = u->softmax ? splits : 0, pages = (size_t)s->max_pages;
    const bool stats = step->bounds || step->moments || s->query_kind || s->levels;
    s->heads = ekv_take(arena, u->heads ? (size_t)s->q_heads : 0, sizeof *s->heads);
    s->list_z = ekv_take(arena, slots * list, sizeof(float));
    s->list_token = ekv_take(arena, slots * list, sizeof(int32_t));
    s->weight = ekv_take(arena, slots * list, sizeof(float));
    s->segment_count = ekv_take(arena, slots * splits * EKV_CUDA_WARPS, sizeof(int32_t));
    s->floor = ekv_take(arena, slots * splits, sizeof(float));
    s->result = ekv_take(arena, slots, sizeof *s->result);
    s->value_part = ekv_take(arena, u->entmax ? slots * (size_t)s->supers * (size_t)s->v_dim : 0, sizeof(double));
    s->ticket = ekv_take(arena, slots, sizeof(uint32_t));
    s->soft_max = ekv_take(arena, slots * soft, sizeof(float));
    s->soft_sum = ekv_take(arena, slots * soft, sizeof(double));
    s->soft_values = ekv_take(arena, slots * soft * (size_t)s->v_dim, sizeof(float));
    s->page_a = ekv_take(arena, stats ? slots * pages : 0, sizeof(float));
    s->page_b = ekv_take(arena, stats ? slots * pages : 0, sizeof(float));
    s->group_of_pages = ekv_take(arena, stats ? slots * (size_t)s->groups : 0, sizeof *s->group_of_pages);
    s->cut = ekv_take(arena, slots, sizeof *s->cut);
    s->looked = ekv_take(arena, s->levels ? items * (size_t)s->chunks : 0, sizeof(int32_t));
    const size_t reads = u->sparse ? items * (size_t)s->chunks : 0, sketched = s->levels & EKV_CUDA_SKETCH ? slots : 0;
    s->lookup = ekv_take(arena, sketched, sizeof *s->lookup);
    s->above = ekv_take(arena, sketched * pages * (size_t)s->page_size, sizeof *s->above);
    s->read_entry = ekv_take(arena, reads * (size_t)s->read_stride, sizeof(int32_t));
    s->read_mask = ekv_take(arena, reads * (size_t)s->chunk_pages, sizeof(uint32_t));
    s->read_count = ekv_take(arena, reads, sizeof(int32_t));
    s->read_pages = ekv_take(arena, reads, sizeof(int32_t));
    s->read_tokens = ekv_take(arena, reads, sizeof(int32_t));
    s->row_pages = ekv_take(arena, reads * (size_t)s->rows, sizeof(int32_t));
    s->row_tokens = ekv_take(arena, reads * (size_t)s->rows, sizeof(int32_t));
    if (!u->heads) s->heads = NULL;
    if (!u->sparse) s->read_entry = NULL;
    if (s->policy != EKV_POLICY_TOPK && s->policy != EKV_POLICY_GAUSSIAN && !s->levels) s->cut = NULL;
}

/* Blocks per item.  One wave where there are few items; with many, the fewest that leave little of the last wave empty. */
static int64_t even_splits(int64_t items, int64_t resident) {
    int64_t best = 1;
    double best_use = 0.0;
    if (items == 0) return 1;
    if (resident / items >= 4) return resident / items;
    for (int64_t splits = 1; splits <= 12 && best_use < 0.92; splits++) {
        const int64_t blocks = items * splits;
        const double use = (double)blocks / (double)(ekv_ceil_div(blocks, resident) * resident);
        if (use > best_use) best = splits, best_use = use;
    }
    return best;
}

/* Everything but the scratch pointers. */
static void describe(const ekv_context *context, const ekv_step *step, ekv_cuda_step *s, cut *u) {
    const ekv_decode_params *p = &step->p;
    const ekv_kv *kv = &step->kv;
    const ekv_index *index = step->index;
    *u = (cut){.heads = p->head_alpha || p->head_scale || p->slopes};
    for (int32_t h = 0; h < p->q_heads; h++) {
        const bool soft = ekv_alpha_of(p, h) < EKV_SOFTMAX_BELOW;
        u->softmax |= soft;
        u->entmax |= !soft;
    }
    s->k = kv->k, s->v = kv->v;
    s->k_block_stride = kv->k_block_stride, s->k_token_stride = kv->k_token_stride, s->k_head_stride = kv->k_head_stride;
    s->v_block_stride = kv->v_block_stride, s->v_token_stride = kv->v_token_stride, s->v_head_stride = kv->v_head_stride;
    s->blocks = kv->blocks;
    s->kv_heads = kv->kv_heads, s->k_dim = kv->k_dim, s->v_dim = kv->v_dim, s->page_size = kv->page_size, s->dtype = kv->dtype;
    for (s->page_shift = 0; 1 << s->page_shift < kv->page_size;) s->page_shift++;
    s->table = p->block_table, s->lengths = p->lengths, s->q_start = p->q_start;
    s->table_stride = p->block_table_stride;
    s->batch = p->batch, s->max_length = (int32_t)p->max_length, s->max_queries = p->max_queries;
    s->max_pages = (int32_t)ekv_max64(1, ekv_ceil_div(p->max_length, kv->page_size));
    s->q = p->q, s->out = p->out;
    s->q_token_stride = p->q_token_stride, s->q_head_stride = p->q_head_stride;
    s->out_token_stride = p->out_token_stride, s->out_head_stride = p->out_head_stride;
    s->q_dtype = p->q_dtype, s->out_dtype = p->out_dtype, s->q_heads = p->q_heads, s->group = step->group;
    s->alpha = p->alpha;
    s->scale = p->scale == 0.0f ? (float)(1.0 / sqrt((double)kv->k_dim)) : p->scale;
    s->policy = p->policy, s->first_pages = p->first_pages, s->recent_tokens = p->recent_tokens;
    s->gaussian_model = p->gaussian_model;
    s->budget_pages = ekv_max64(1, p->budget / kv->page_size + (p->budget % kv->page_size != 0));
    s->margin_sigma = p->margin_sigma, s->margin_fraction = p->margin_fraction;
    s->page_mask = p->page_mask, s->page_mask_stride = p->page_mask_stride;
    if (index) {
        s->boxes = index->boxes, s->moments = index->moments, s->counts = index->counts;
        s->norms = index->shape.statistics & EKV_STATISTICS_NORMS ? index->norms : NULL;
        s->index_blocks = index->shape.blocks;
        s->box_bytes = (int64_t)index->box_bytes, s->moments_bytes = (int64_t)index->moments_bytes;
        s->sketches = index->sketches, s->bases = index->bases, s->basis_rows = index->rows, s->centers = index->centers;
        s->sketched = index->sketched, s->stretch_of = index->stretch_of;
        s->codes = index->codes, s->units = ekv_sketch_units(index->codes), s->sketch_bytes = (int64_t)index->sketch_bytes;
        if (index->codes) s->stretch = index->stretch, s->stretches = ekv_index_stretches(index);
        s->center_stride = (int32_t)ekv_padded(kv->k_dim);
    }
    s->rows = rows_of(step, u);
    if (p->policy == EKV_POLICY_CERTIFIED) { /* without bounds, or for few tokens, that is full */
        const uint32_t have = index && p->max_length > EKV_CUDA_LEAST_TOKENS ? index->shape.statistics : 0;
        const bool sketch = have & EKV_STATISTICS_NORMS && have & EKV_STATISTICS_SKETCH && ekv_device_basis(index);
        s->levels = (have & EKV_STATISTICS_NORMS ? EKV_CUDA_NORMS : 0) |
                    (sketch ? EKV_CUDA_SKETCH : have & EKV_STATISTICS_BOX ? EKV_CUDA_BOXES : 0);
        s->policy = s->levels ? EKV_POLICY_CERTIFIED : EKV_POLICY_FULL;
        s->max_mass = p->max_mass;
    }
    u->sparse = step->sparse || s->levels;
    s->report = p->report;
    s->overlap = state_of(context)->major >= 9;
    s->report_mass = p->report && p->report_mass && step->sparse;
    s->certify = p->report && step->bounds;
    /* Items, and blocks enough to fill the device some times over, each with work for its warps. */
    s->row_blocks = (int32_t)ekv_ceil_div((int64_t)p->max_queries * step->group, s->rows);
    u->items = (int64_t)p->batch * s->row_blocks * kv->kv_heads;
    /* One wave: as many blocks as are resident at once (typed.cuh).  Measured faster than two or four waves at every length. */
    const int64_t processors = state_of(context)->multiprocessors;
    const int64_t resident = processors * (s->rows > 2 ? 2 : s->rows == 2 || u->softmax ? 3 : 4);
    int64_t splits = even_splits(u->items, resident);
    splits = ekv_min64(splits, ekv_max64(1, p->max_length / (EKV_CUDA_WARPS * LEAST_TOKENS_PER_WARP)));
    s->splits = (int32_t)ekv_max64(1, ekv_min64(splits, EKV_CUDA_MAX_SPLITS));
    s->segment = ekv_ceil_div(s->max_pages, (int64_t)s->splits * EKV_CUDA_WARPS) * kv->page_size;
    s->list_stride = s->splits * EKV_CUDA_WARPS * s->segment;
    s->supers = ekv_ceil_div(p->max_length, EKV_CUDA_SUPER);
    s->groups = ekv_ceil_div(s->max_pages, EKV_CUDA_GROUP);
    /* Chunks of pages: enough blocks to fill the device, each at least what its warps take at once. */
    const int64_t per_chunk =
        ekv_max64(ekv_max64(1, u->items * s->max_pages / (8 * processors)), ekv_ceil_div(s->max_pages, EKV_CUDA_MAX_CHUNKS));
    s->chunk_pages = (int32_t)(ekv_ceil_div(per_chunk, 256) * 256);
    s->chunks = (int32_t)ekv_ceil_div(s->max_pages, s->chunk_pages);
    if (s->levels & EKV_CUDA_SKETCH) {
        const int64_t batch = EKV_CUDA_SKETCH_PAGES, even = ekv_ceil_div(u->items * s->max_pages, 20 * processors);
        const int64_t most = ekv_max64(1, EKV_CUDA_STRETCHES * s->stretch / batch);
        s->sketch_pages = (int32_t)(batch * ekv_min64(most, ekv_max64(1, ekv_ceil_div(even, batch))));
        s->sketch_chunks = (int32_t)ekv_ceil_div(s->max_pages, s->sketch_pages);
    }
    s->read_stride = (int64_t)s->chunk_pages * (s->levels & EKV_CUDA_SKETCH ? s->page_size : 1);
}

/* How many items make a round, and what that takes. */
static void choose_round(const ekv_context *context, const ekv_step *step, ekv_cuda_step *s, cut *u) {
    ekv_arena arena = {NULL, 0};
    s->round_items = ekv_max64(1, u->items);
    lay_out(s, u, step, &arena);
    if (arena.used > SCRATCH_CEILING) {
        s->round_items = ekv_max64(1, (int64_t)((double)SCRATCH_CEILING / (double)arena.used * (double)u->items));
        arena.used = 0;
        lay_out(s, u, step, &arena);
    }
    u->round_items = s->round_items;
    u->bytes = arena.used;
    const int64_t slots = s->round_items * s->rows, wanted = ekv_ceil_div(2 * state_of(context)->multiprocessors, slots);
    s->value_splits = (int32_t)ekv_max64(1, ekv_min64(wanted, s->supers));
}

static void make_cut(const ekv_context *context, const ekv_step *step, ekv_cuda_step *s, cut *u, int query_kind) {
    memset(s, 0, sizeof *s);
    s->query_kind = query_kind;
    describe(context, step, s, u);
    if (query_kind) u->softmax = u->entmax = false; /* no lists, no sums; rows as in a step */
    choose_round(context, step, s, u);
}

/* ---- scratch ---- */

static ekv_status grow(ekv_context *context, size_t bytes) {
    ekv_cuda *c = state_of(context);
    void *memory = NULL;
    CUDA_TRY(context, cudaMalloc(&memory, bytes), "cudaMalloc of the scratch memory");
    if (c->scratch) CUDA_TRY(context, cudaFree(c->scratch), "cudaFree"); /* waits for the steps that use it */
    c->scratch = memory;
    c->scratch_bytes = bytes;
    return EKV_OK;
}

static ekv_status need_scratch(ekv_context *context, const ekv_step *step, size_t bytes) {
    ekv_cuda *c = state_of(context);
    if (bytes <= c->scratch_bytes) return EKV_OK;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    CUDA_TRY(context, cudaStreamIsCapturing(step->p.stream, &capture), "cudaStreamIsCapturing");
    if (context->fixed_scratch || capture != cudaStreamCaptureStatusNone)
        return ekv_fail(context, EKV_ERROR_CAPACITY, "the step needs %zu bytes of scratch; %zu are reserved and %s", bytes,
                        c->scratch_bytes, context->fixed_scratch ? "fixed_scratch is set" : "the stream is being captured");
    return grow(context, bytes);
}

ekv_status ekv_cuda_scratch(ekv_context *context, const ekv_step *step, size_t *bytes) {
    ekv_cuda_step s;
    cut u;
    make_cut(context, step, &s, &u, 0);
    *bytes = u.bytes;
    return EKV_OK;
}

ekv_status ekv_cuda_reserve(ekv_context *context, const ekv_step *step) {
    size_t bytes;
    int previous;
    const int device = state_of(context)->device;
    ekv_cuda_scratch(context, step, &bytes);
    if (bytes <= state_of(context)->scratch_bytes) return EKV_OK;
    ekv_status status = enter_device(context, device, &previous);
    if (status != EKV_OK) return status;
    status = grow(context, bytes);
    leave_device(device, previous);
    return status;
}

/* ---- launching ---- */

#define LAUNCH(call, what)                                                                                                     \
  do {                                                                                                                         \
    const int error_ = (call);                                                                                                 \
    if (error_ != 0) return fail_cuda(context, (cudaError_t)error_, "launch of " what);                                        \
  } while (0)

static int launch_scan(const ekv_cuda_step *s, int dtype, int kind, void *stream) {
    return dtype == EKV_F32   ? ekv_cuda_launch_scan_f32(s, kind, stream)
           : dtype == EKV_F16 ? ekv_cuda_launch_scan_f16(s, kind, stream)
                              : ekv_cuda_launch_scan_bf16(s, kind, stream);
}

static ekv_status upload_heads(ekv_context *context, const ekv_step *step, const ekv_cuda_step *s) {
    const ekv_decode_params *p = &step->p;
    for (int32_t first = 0; first < p->q_heads; first += EKV_CUDA_HEADS_PER_LAUNCH) {
        ekv_cuda_head head[EKV_CUDA_HEADS_PER_LAUNCH];
        const int32_t n = (int32_t)ekv_min64(EKV_CUDA_HEADS_PER_LAUNCH, p->q_heads - first);
        for (int32_t i = 0; i < n; i++) {
            const float scale = p->head_scale ? p->head_scale[first + i] : p->scale;
            head[i] =
                (ekv_cuda_head){ekv_alpha_of(p, first + i), scale == 0.0f ? (float)(1.0 / sqrt((double)step->kv.k_dim)) : scale,
                                p->slopes ? p->slopes[first + i] : 0.0f};
        }
        LAUNCH(ekv_cuda_launch_heads((ekv_cuda_head *)s->heads + first, head, n, p->stream), "heads");
    }
    return EKV_OK;
}

/* Zeta of a full page: the last page, which may be shorter, is always read. */
static double zeta_of(ekv_cuda *c, double quantile, int32_t n) {
    if (c->zeta_n != n || c->zeta_quantile != quantile) {
        c->zeta = (double)(float)ekv_normal_quantile(ekv_pow(quantile, 1.0 / n));
        c->zeta_n = n;
        c->zeta_quantile = quantile;
    }
    return c->zeta;
}

/* Bounds from one level, and the probe of the pages with the best of them. */
static ekv_status launch_level(ekv_context *context, const ekv_cuda_step *step, int level, void *stream) {
    ekv_cuda_step s = *step;
    s.pass = level;
    if (level == EKV_CUDA_BOXES) LAUNCH(launch_scan(&s, s.dtype, EKV_CUDA_PAGE_BOUNDS, stream), "page bounds");
    if (level == EKV_CUDA_SKETCH) LAUNCH(ekv_cuda_launch_sketch(&s, stream), "sketch bounds");
    LAUNCH(launch_scan(&s, s.dtype, EKV_CUDA_PROBE, stream), "probe");
    return EKV_OK;
}

static ekv_status launch_certified(ekv_context *context, const ekv_cuda_step *s, void *stream) {
    ekv_status status = EKV_OK;
    LAUNCH(ekv_cuda_launch_norms(s, stream), "norms"); /* zeroes the counts of what the next level looks at as well */
    if (s->levels & EKV_CUDA_NORMS) status = launch_level(context, s, EKV_CUDA_NORMS, stream);
    if (status == EKV_OK && s->levels & EKV_CUDA_BOXES) status = launch_level(context, s, EKV_CUDA_BOXES, stream);
    if (status == EKV_OK && s->levels & EKV_CUDA_SKETCH) status = launch_level(context, s, EKV_CUDA_SKETCH, stream);
    return status;
}

static ekv_status launch_selection(ekv_context *context, const ekv_cuda_step *s, void *stream) {
    if (s->levels) return launch_certified(context, s, stream);
    if (s->policy == EKV_POLICY_TOPK) LAUNCH(launch_scan(s, s->dtype, EKV_CUDA_PAGE_BOUNDS, stream), "page bounds");
    if (s->policy == EKV_POLICY_GAUSSIAN)
        LAUNCH(launch_scan(s, ekv_moments_dtype((ekv_dtype)s->dtype), EKV_CUDA_PAGE_MOMENTS, stream), "page moments");
    if (s->cut) LAUNCH(ekv_cuda_launch_cut(s, stream), "cut");
    return EKV_OK;
}

static ekv_status launch_round(ekv_context *context, const ekv_cuda_step *s, const cut *u, void *stream) {
    const ekv_status status = launch_selection(context, s, stream);
    if (status != EKV_OK) return status;
    if (s->read_entry) LAUNCH(ekv_cuda_launch_compact(s, stream), "compact");
    if (u->entmax) {
        LAUNCH(launch_scan(s, s->dtype, EKV_CUDA_SCAN_ENTMAX, stream), "scan");
        LAUNCH(ekv_cuda_launch_finish(s, stream), "finish");
        if (s->max_length > EKV_CUDA_SUPER) LAUNCH(ekv_cuda_launch_values(s, stream), "values");
    }
    if (u->softmax) {
        LAUNCH(launch_scan(s, s->dtype, EKV_CUDA_SCAN_SOFTMAX, stream), "scan");
        LAUNCH(ekv_cuda_launch_combine(s, stream), "combine");
    }
    if (!s->report) return EKV_OK;
    if (s->certify) {
        if (s->policy != EKV_POLICY_TOPK) LAUNCH(launch_scan(s, s->dtype, EKV_CUDA_PAGE_BOUNDS, stream), "page bounds");
        LAUNCH(ekv_cuda_launch_mass(s, stream), "mass");
    }
    LAUNCH(ekv_cuda_launch_report(s, stream), "report");
    return EKV_OK;
}

static ekv_status launch_query(ekv_context *context, const ekv_cuda_step *s, void *stream) {
    if (s->query_kind == EKV_CUDA_QUERY_BOUNDS)
        LAUNCH(launch_scan(s, s->dtype, EKV_CUDA_PAGE_BOUNDS, stream), "page bounds");
    else if (s->query_kind == EKV_CUDA_QUERY_MOMENTS)
        LAUNCH(launch_scan(s, ekv_moments_dtype((ekv_dtype)s->dtype), EKV_CUDA_PAGE_MOMENTS, stream), "page moments");
    else {
        const ekv_status status = launch_selection(context, s, stream);
        if (status != EKV_OK) return status;
    }
    LAUNCH(ekv_cuda_launch_query(s, stream), "query");
    return EKV_OK;
}

static ekv_status run_rounds(ekv_context *context, const ekv_step *step, ekv_cuda_step *s, cut *u) {
    ekv_status status = need_scratch(context, step, u->bytes);
    if (status != EKV_OK) return status;
    ekv_arena arena = {state_of(context)->scratch, 0};
    lay_out(s, u, step, &arena);
    if (step->moments) s->zeta = zeta_of(state_of(context), step->p.quantile, step->kv.page_size);
    if (u->heads) status = upload_heads(context, step, s);
    for (int64_t first = 0; first < u->items && status == EKV_OK; first += u->round_items) {
        s->first_item = first;
        s->round_items = ekv_min64(u->round_items, u->items - first);
        status = s->query_kind ? launch_query(context, s, step->p.stream) : launch_round(context, s, u, step->p.stream);
    }
    return status;
}

static ekv_status run(ekv_context *context, const ekv_step *step, ekv_cuda_step *s, cut *u) {
    int previous;
    const int device = state_of(context)->device;
    if (u->items == 0) return EKV_OK;
    ekv_status status = enter_device(context, device, &previous);
    if (status != EKV_OK) return status;
    status = run_rounds(context, step, s, u);
    leave_device(device, previous);
    return status;
}

ekv_status ekv_cuda_decode(ekv_context *context, const ekv_step *step) {
    ekv_cuda_step s;
    cut u;
    make_cut(context, step, &s, &u, 0);
    return run(context, step, &s, &u);
}

ekv_status ekv_cuda_query(ekv_context *context, const ekv_step *step, ekv_cuda_query_kind kind, void *a, void *b,
                          int64_t stride) {
    ekv_cuda_step s;
    cut u;
    make_cut(context, step, &s, &u, (int)kind);
    VALID(s.max_pages <= stride || step->p.max_length == 0, "stride is %lld, less than the pages of max_length",
          (long long)stride);
    s.query_a = a;
    s.query_b = b;
    s.query_stride = stride;
    return run(context, step, &s, &u);
}

/* Bounds of all tokens, whether the sketch pays or not: the stages of a step with a cut of the caller's. */
ekv_status ekv_cuda_token_bounds(ekv_context *context, const ekv_step *step, double origin, uint16_t *above, size_t bytes) {
    enum { MOST_SLOTS = 64 };
    ekv_cuda_step s;
    cut u;
    ekv_cuda_cut cuts[MOST_SLOTS];
    make_cut(context, step, &s, &u, 0);
    const int64_t slots = s.round_items * s.rows;
    if (!(s.levels & EKV_CUDA_SKETCH) || slots > MOST_SLOTS || u.items != s.round_items ||
        bytes != (size_t)slots * (size_t)s.max_pages * (size_t)s.page_size * sizeof *above)
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "not a step whose bounds can be looked at");
    ekv_status status = ekv_cuda_reserve(context, step);
    if (status != EKV_OK) return status;
    ekv_arena arena = {state_of(context)->scratch, 0};
    lay_out(&s, &u, step, &arena);
    if (u.heads) status = upload_heads(context, step, &s);
    if (status != EKV_OK) return status;
    LAUNCH(ekv_cuda_launch_norms(&s, step->p.stream), "norms");
    s.pass = EKV_CUDA_NORMS;
    LAUNCH(launch_scan(&s, s.dtype, EKV_CUDA_PROBE, step->p.stream), "probe"); /* makes the tables */
    for (int64_t i = 0; i < slots; i++) cuts[i] = (ekv_cuda_cut){.cut = origin, .origin = origin};
    CUDA_TRY(context, cudaStreamSynchronize(step->p.stream), "cudaStreamSynchronize");
    status = ekv_cuda_copy(context, s.cut, cuts, (size_t)slots * sizeof *cuts);
    if (status != EKV_OK) return status;
    LAUNCH(ekv_cuda_launch_sketch(&s, step->p.stream), "sketch bounds");
    CUDA_TRY(context, cudaStreamSynchronize(step->p.stream), "cudaStreamSynchronize");
    return ekv_cuda_copy(context, above, s.above, bytes);
}

/* ---- memory ---- */

ekv_status ekv_cuda_allocate(ekv_context *context, size_t bytes, void **memory) {
    int previous;
    const int device = state_of(context)->device;
    ekv_status status = enter_device(context, device, &previous);
    if (status != EKV_OK) return status;
    const cudaError_t error = cudaMalloc(memory, bytes ? bytes : 1);
    if (error != cudaSuccess) status = fail_cuda(context, error, "cudaMalloc");
    leave_device(device, previous);
    return status;
}

ekv_status ekv_cuda_copy(ekv_context *context, void *to, const void *from, size_t bytes) {
    ekv_cuda *c = state_of(context);
    int previous;
    ekv_status status = enter_device(context, c->device, &previous);
    if (status != EKV_OK) return status;
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, c->stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(c->stream);
    if (error != cudaSuccess) status = fail_cuda(context, error, "cudaMemcpy");
    leave_device(c->device, previous);
    return status;
}

ekv_status ekv_cuda_fill(ekv_context *context, void *to, int value, size_t bytes) {
    ekv_cuda *c = state_of(context);
    int previous;
    ekv_status status = enter_device(context, c->device, &previous);
    if (status != EKV_OK) return status;
    cudaError_t error = cudaMemsetAsync(to, value, bytes, c->stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(c->stream);
    if (error != cudaSuccess) status = fail_cuda(context, error, "cudaMemset");
    leave_device(c->device, previous);
    return status;
}

ekv_status ekv_cuda_copy_rows(ekv_context *context, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t rows) {
    ekv_cuda *c = state_of(context);
    int previous;
    ekv_status status = enter_device(context, c->device, &previous);
    if (status != EKV_OK) return status;
    cudaError_t error = cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, cudaMemcpyDefault, c->stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(c->stream);
    if (error != cudaSuccess) status = fail_cuda(context, error, "cudaMemcpy2D");
    leave_device(c->device, previous);
    return status;
}

/* ---- the index ---- */

static ekv_status create_memory(ekv_context *context, void **memory, size_t bytes, bool owned, size_t counts_at,
                                size_t counts_bytes) {
    ekv_cuda *c = state_of(context);
    if (owned) CUDA_TRY(context, cudaMalloc(memory, bytes), "cudaMalloc of the index");
    cudaError_t error = cudaMemsetAsync((char *)*memory + counts_at, 0, counts_bytes, c->stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(c->stream); /* steps on any stream may come next */
    if (error == cudaSuccess) return EKV_OK;
    if (owned) (void)cudaFree(*memory);
    return fail_cuda(context, error, "cudaMemset of the index");
}

ekv_status ekv_cuda_index_create(ekv_context *context, void **memory, size_t bytes, bool owned, size_t counts_at,
                                 size_t counts_bytes) {
    int previous;
    const int device = state_of(context)->device;
    ekv_status status = enter_device(context, device, &previous);
    if (status != EKV_OK) return status;
    status = create_memory(context, memory, bytes, owned, counts_at, counts_bytes);
    leave_device(device, previous);
    return status;
}

void ekv_cuda_release(int device, void *memory) {
    int previous;
    if (!memory || enter_device(NULL, device, &previous) != EKV_OK) return;
    if (cudaFree(memory) != cudaSuccess) (void)cudaGetLastError();
    leave_device(device, previous);
}

ekv_status ekv_cuda_index_pages(ekv_context *context, ekv_index *index, const ekv_cuda_pages *pages) {
    ekv_cuda *c = state_of(context);
    const ekv_index_params *shape = &index->shape;
    const int64_t size = shape->page_size;
    ekv_cuda_build b = {.kv_heads = shape->kv_heads,
                        .k_dim = shape->k_dim,
                        .v_dim = shape->v_dim,
                        .page_size = shape->page_size,
                        .dtype = (int32_t)shape->dtype,
                        .table = pages->block_table,
                        .lengths = pages->lengths,
                        .counts_in = pages->counts_start,
                        .table_stride = pages->block_table_stride,
                        .first = pages->first,
                        .length = pages->length,
                        .batch = pages->batch,
                        .max_count = (int32_t)ekv_min64(pages->max_count, INT32_MAX),
                        .counts = index->counts,
                        .index_blocks = shape->blocks,
                        .box_bytes = (int64_t)index->box_bytes,
                        .moments_bytes = (int64_t)index->moments_bytes};
    b.first_page = pages->first / size;
    b.pages = pages->lengths ? ekv_ceil_div(pages->max_count, size) + 1
                             : ekv_ceil_div(pages->first + pages->max_count, size) - b.first_page;
    if (shape->statistics & EKV_STATISTICS_BOX) b.boxes = index->boxes;
    if (shape->statistics & EKV_STATISTICS_GAUSSIAN) b.moments = index->moments;
    if (shape->statistics & EKV_STATISTICS_NORMS) b.norms = index->norms;
    const bool sketch = index->codes && ekv_device_basis(index);
    if (index->codes) {
        b.sketches = index->sketches, b.expanded = index->expanded, b.centers = index->centers;
        b.bases = sketch ? index->bases : NULL;
        b.sketched = index->sketched, b.stretch_of = index->stretch_of;
        b.sketch_bytes = (int64_t)index->sketch_bytes, b.stretch = index->stretch, b.stretches = ekv_index_stretches(index);
        b.codes = index->codes, b.units = ekv_sketch_units(index->codes), b.axes = ekv_sketch_axes(shape->k_dim);
        b.center_stride = (int32_t)ekv_padded(shape->k_dim);
        b.touched = ekv_ceil_div(pages->max_count, b.stretch * size) + 1;
    }
    if (pages->kv) {
        const ekv_kv *kv = pages->kv;
        b.k = kv->k, b.v = kv->v, b.blocks = kv->blocks;
        b.k_block_stride = kv->k_block_stride, b.k_token_stride = kv->k_token_stride, b.k_head_stride = kv->k_head_stride;
        b.v_block_stride = kv->v_block_stride, b.v_token_stride = kv->v_token_stride, b.v_head_stride = kv->v_head_stride;
    }
    if (b.batch == 0 || pages->max_count == 0) return EKV_OK;
    int previous;
    ekv_status status = enter_device(context, c->device, &previous);
    if (status != EKV_OK) return status;
    void *stream = pages->own_stream ? c->stream : pages->stream;
    int error = 0;
    if (pages->kv && sketch) error = ekv_cuda_launch_centers(&b, stream);
    if (pages->kv && sketch && error == 0) error = ekv_cuda_launch_encode(&b, stream);
    if (error == 0) error = pages->kv ? ekv_cuda_launch_build(&b, stream) : ekv_cuda_launch_forget(&b, stream);
    if (error != 0) status = fail_cuda(context, (cudaError_t)error, "launch of the index kernel");
    leave_device(c->device, previous);
    return status;
}
