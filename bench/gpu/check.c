/*
 * Compares the backend cuda with the double-precision reference on random decode steps, and checks what only a device can get
 * wrong: same bits twice, graph replay after appends, a bad block, NaN keys, refusals.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Usage: entmaxkv-gpu-check [cases] [seed] [first case]      returns 0, 1 on a failure, 77 without a GPU
 */
#include "cpu/reference.h"
#include "entmaxkv/entmaxkv.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;
static long current_case = -1;

#define FAIL(...)                                                                                                              \
  do {                                                                                                                         \
    failures++;                                                                                                                \
    printf("FAIL case %ld: ", current_case);                                                                                   \
    printf(__VA_ARGS__);                                                                                                       \
    printf("\n");                                                                                                              \
  } while (0)
#define CUDA(call)                                                                                                             \
  do {                                                                                                                         \
    const cudaError_t e_ = (call);                                                                                             \
    if (e_ != cudaSuccess) {                                                                                                   \
      printf("FAIL case %ld: %s: %s\n", current_case, #call, cudaGetErrorString(e_));                                          \
      exit(1);                                                                                                                 \
    }                                                                                                                          \
  } while (0)

/* ---- random numbers ---- */

static uint64_t state;
static uint64_t next_u64(void) { /* splitmix64 */
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static double uniform(void) { return (double)(next_u64() >> 11) * 0x1p-53; }
static int between(int low, int high) { return low + (int)(next_u64() % (uint64_t)(high - low + 1)); }
static bool chance(double p) { return uniform() < p; }
static float normal(void) { return (float)(sqrt(-2.0 * log(1.0 - uniform())) * cos(6.283185307179586 * uniform())); }
#define PICK(array) ((array)[between(0, (int)(sizeof(array) / sizeof(array)[0]) - 1)])

/* ---- stored elements ---- */

static size_t size_of(ekv_dtype t) { return t == EKV_F32 ? 4 : 2; }

static uint16_t to_half(float x) { /* finite values of moderate size only */
    uint32_t b;
    memcpy(&b, &x, 4);
    const uint32_t sign = b >> 16 & 0x8000u;
    const int e = (int)(b >> 23 & 255) - 112;
    uint32_t m = b & 0x7fffffu;
    if (x != x) return 0x7e00;
    if (e <= 0) {
        if (e < -10) return (uint16_t)sign;
        m |= 0x800000u;
        const int shift = 14 - e;
        const uint32_t half = 1u << (shift - 1), low = m & ((1u << shift) - 1);
        uint32_t r = m >> shift;
        r += low > half || (low == half && r & 1);
        return (uint16_t)(sign | r);
    }
    if (e >= 31) return (uint16_t)(sign | 0x7c00u);
    uint32_t r = (uint32_t)e << 10 | m >> 13;
    const uint32_t low = m & 0x1fffu;
    r += low > 0x1000u || (low == 0x1000u && r & 1);
    return (uint16_t)(sign | r);
}

static uint16_t to_bfloat(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}

static void put(void *base, ekv_dtype t, int64_t i, float x) {
    if (t == EKV_F32)
        ((float *)base)[i] = x;
    else
        ((uint16_t *)base)[i] = t == EKV_F16 ? to_half(x) : to_bfloat(x);
}

/* ---- memory on both sides ---- */

typedef struct twin {
    void *host, *device;
    size_t bytes;
} twin;

static twin twin_make(size_t bytes) {
    twin t = {calloc(1, bytes + 16), NULL, bytes};
    CUDA(cudaMalloc(&t.device, bytes + 16));
    CUDA(cudaMemset(t.device, 0xa5, bytes + 16));
    return t;
}
static void twin_up(const twin *t) { CUDA(cudaMemcpy(t->device, t->host, t->bytes, cudaMemcpyHostToDevice)); }
static void twin_down(void *to, const twin *t) { CUDA(cudaMemcpy(to, t->device, t->bytes, cudaMemcpyDeviceToHost)); }
static void twin_free(twin *t) {
    free(t->host);
    CUDA(cudaFree(t->device));
    *t = (twin){0};
}

/* ---- problems ---- */

enum { MAX_BATCH = 4, MAX_HEADS = 64 };

typedef struct problem {
    ekv_kv host_kv, device_kv;
    ekv_decode_params host, device; /* the same step */
    twin k, v, q, out, table, lengths, q_start, report, mask;
    ekv_index *host_index, *device_index;
    int32_t q_tokens, max_pages, queries[MAX_BATCH], length[MAX_BATCH];
    int64_t rows;
    double head_alpha[MAX_HEADS];
    float head_scale[MAX_HEADS], slopes[MAX_HEADS];
    char text[400];
} problem;

typedef struct contexts {
    ekv_context *cuda, *reference, *cpu;
} contexts;

static void strides(ekv_kv *kv, int layout, int pad) {
    const int64_t p = kv->page_size, h = kv->kv_heads, dk = kv->k_dim + pad, dv = kv->v_dim + pad;
    if (layout == 0) { /* [blocks][page][heads][dim] */
        kv->k_head_stride = dk, kv->k_token_stride = h * dk, kv->k_block_stride = p * h * dk;
        kv->v_head_stride = dv, kv->v_token_stride = h * dv, kv->v_block_stride = p * h * dv;
    } else { /* [blocks][heads][page][dim] */
        kv->k_token_stride = dk, kv->k_head_stride = p * dk, kv->k_block_stride = p * h * dk;
        kv->v_token_stride = dv, kv->v_head_stride = p * dv, kv->v_block_stride = p * h * dv;
    }
}

static int64_t key_at(const ekv_kv *kv, int64_t block, int slot, int head) {
    return block * kv->k_block_stride + slot * kv->k_token_stride + head * kv->k_head_stride;
}
static int64_t value_at(const ekv_kv *kv, int64_t block, int slot, int head) {
    return block * kv->v_block_stride + slot * kv->v_token_stride + head * kv->v_head_stride;
}

static void fill_kv(problem *p, int content) {
    const ekv_kv *kv = &p->host_kv;
    float *center = malloc((size_t)kv->k_dim * sizeof *center);
    for (int64_t b = 0; b < kv->blocks; b++)
        for (int h = 0; h < kv->kv_heads; h++) {
            for (int d = 0; d < kv->k_dim; d++) center[d] = content == 1 ? 0.7f * normal() : 0.0f;
            const bool peak = content == 2 && chance(0.05);
            for (int t = 0; t < kv->page_size; t++) {
                const float size = content == 3 ? 0.01f : peak ? 2.0f : 1.0f;
                for (int d = 0; d < kv->k_dim; d++)
                    put(p->k.host, kv->dtype, key_at(kv, b, t, h) + d, center[d] + size * normal());
                for (int d = 0; d < kv->v_dim; d++) put(p->v.host, kv->dtype, value_at(kv, b, t, h) + d, normal());
                if (content == 4 && t > 0) /* ties */
                    memcpy((char *)p->k.host + (size_t)key_at(kv, b, t, h) * size_of(kv->dtype),
                           (char *)p->k.host + (size_t)key_at(kv, b, 0, h) * size_of(kv->dtype),
                           (size_t)kv->k_dim * size_of(kv->dtype));
            }
        }
    free(center);
}

/* NaN in the slots of a sequence's last page that hold no token. */
static void poison_unused(problem *p) {
    const ekv_kv *kv = &p->host_kv;
    for (int b = 0; b < p->host.batch; b++) {
        const int n = p->length[b], page = n / kv->page_size;
        if (n % kv->page_size == 0) continue;
        const int64_t block = ((int32_t *)p->table.host)[b * p->host.block_table_stride + page];
        for (int t = n % kv->page_size; t < kv->page_size; t++)
            for (int h = 0; h < kv->kv_heads; h++) {
                for (int d = 0; d < kv->k_dim; d++) put(p->k.host, kv->dtype, key_at(kv, block, t, h) + d, NAN);
                for (int d = 0; d < kv->v_dim; d++) put(p->v.host, kv->dtype, value_at(kv, block, t, h) + d, NAN);
            }
    }
}

static void make_problem(problem *p, const contexts *c, int max_length) {
    static const int k_dims[] = {64, 128, 128, 128, 80, 96, 192, 256, 32, 40, 576, 100, 72}, pages[] = {8, 16, 16, 32, 64, 128};
    static const int groups[] = {1, 1, 2, 3, 4, 8, 12}, query_counts[] = {1, 1, 1, 2, 3, 8};
    static const double alphas[] = {1.5, 1.5, 2.0, 4.0 / 3.0, 1.0, 1.25, 1.05, 1.001, 3.0, 2.5, 1.7};
    memset(p, 0, sizeof *p);
    ekv_kv kv = ekv_kv_default();
    kv.dtype = (ekv_dtype)between(0, 2);
    kv.k_dim = PICK(k_dims);
    kv.v_dim = chance(0.7) ? kv.k_dim > 512 ? 512 : kv.k_dim : kv.k_dim == 192 ? 128 : between(1, 300);
    kv.page_size = PICK(pages);
    const int group = PICK(groups), batch = between(1, MAX_BATCH), content = between(0, 4), layout = between(0, 1);
    kv.kv_heads = between(1, group > 4 ? 2 : 3);
    const bool ragged = chance(0.5);
    int64_t pages_used = 0;
    for (int b = 0; b < batch; b++) {
        static const int near[] = {0, 1, -1, 2};
        p->queries[b] = ragged ? PICK(query_counts) : 1;
        int n = chance(0.15) ? 0 : chance(0.3) ? kv.page_size * between(1, 9) + PICK(near) : between(1, max_length);
        if (n > 0 && n < p->queries[b]) n = p->queries[b];
        p->length[b] = n;
        const int used = (n + kv.page_size - 1) / kv.page_size;
        p->max_pages = used > p->max_pages ? used : p->max_pages;
        pages_used += used;
        p->q_tokens += p->queries[b];
    }
    if (p->max_pages == 0) p->max_pages = 1;
    kv.blocks = pages_used + 3;
    strides(&kv, layout, chance(0.3) ? between(1, 2) * (chance(0.5) ? 8 : 1) : 0);
    p->host_kv = kv;
    p->k = twin_make((size_t)(kv.blocks * kv.k_block_stride) * size_of(kv.dtype));
    p->v = twin_make((size_t)(kv.blocks * kv.v_block_stride) * size_of(kv.dtype));
    ekv_decode_params step = ekv_decode_params_default();
    step.batch = batch;
    step.block_table_stride = p->max_pages + between(0, 2);
    p->table = twin_make((size_t)(batch * step.block_table_stride) * 4);
    p->lengths = twin_make((size_t)batch * 4);
    p->q_start = twin_make((size_t)(batch + 1) * 4);
    int32_t *order = malloc((size_t)kv.blocks * 4);
    for (int i = 0; i < kv.blocks; i++) {
        const int j = between(0, i);
        order[i] = order[j];
        order[j] = i;
    }
    int next = 0;
    for (int b = 0; b < batch; b++) {
        for (int i = 0; i < step.block_table_stride; i++)
            ((int32_t *)p->table.host)[b * step.block_table_stride + i] = i * kv.page_size < p->length[b] ? order[next++] : -1;
        ((int32_t *)p->lengths.host)[b] = p->length[b];
        ((int32_t *)p->q_start.host)[b + 1] = ((int32_t *)p->q_start.host)[b] + p->queries[b];
    }
    free(order);
    fill_kv(p, content);
    poison_unused(p);
    step.q_heads = kv.kv_heads * group;
    p->rows = (int64_t)p->q_tokens * step.q_heads;
    step.q_dtype = (ekv_dtype)between(0, 2);
    step.out_dtype = chance(0.7) ? EKV_F32 : (ekv_dtype)between(0, 2);
    step.out_head_stride = kv.v_dim + between(0, 3);
    step.out_token_stride = step.out_head_stride * step.q_heads;
    p->q = twin_make((size_t)(p->rows * kv.k_dim) * size_of(step.q_dtype));
    p->out = twin_make((size_t)(p->q_tokens * step.out_token_stride) * size_of(step.out_dtype));
    p->report = twin_make((size_t)p->rows * sizeof(ekv_report));
    p->mask = twin_make((size_t)(p->rows * p->max_pages));
    const float q_size = content == 3 ? 0.1f : (float)(0.5 + 2.0 * uniform());
    for (int64_t i = 0; i < p->rows * kv.k_dim; i++) put(p->q.host, step.q_dtype, i, q_size * normal());
    step.alpha = PICK(alphas);
    for (int h = 0; h < step.q_heads; h++) {
        p->head_alpha[h] = PICK(alphas);
        p->head_scale[h] = 0.05f + 0.1f * (float)uniform();
        p->slopes[h] = chance(0.3) ? 0.0f : 0.02f * normal();
    }
    if (chance(0.3)) step.head_alpha = p->head_alpha;
    if (chance(0.3)) step.head_scale = p->head_scale;
    if (chance(0.4)) step.slopes = p->slopes;
    twin *const all[] = {&p->k, &p->v, &p->q, &p->table, &p->lengths, &p->q_start};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) twin_up(all[i]);
    p->host_kv.k = p->k.host, p->host_kv.v = p->v.host;
    p->device_kv = p->host_kv;
    p->device_kv.k = p->k.device, p->device_kv.v = p->v.device;
    p->host = step;
    p->host.kv = &p->host_kv;
    p->host.block_table = p->table.host, p->host.lengths = p->lengths.host, p->host.q = p->q.host, p->host.out = p->out.host;
    p->host.report = p->report.host;
    p->device = step;
    p->device.kv = &p->device_kv;
    p->device.block_table = p->table.device, p->device.lengths = p->lengths.device, p->device.q = p->q.device;
    p->device.out = p->out.device, p->device.report = p->report.device;
    if (ragged) {
        p->host.q_start = p->q_start.host;
        p->device.q_start = p->q_start.device;
        for (int b = 0; b < batch; b++)
            p->device.max_queries = p->queries[b] > p->device.max_queries ? p->queries[b] : p->device.max_queries;
        p->device.max_queries += between(0, 1);
    }
    p->device.max_length = chance(0.5) ? (int64_t)p->max_pages * kv.page_size : 0;
    ekv_index_params shape = ekv_index_params_default();
    shape.dtype = kv.dtype, shape.kv_heads = kv.kv_heads, shape.k_dim = kv.k_dim, shape.v_dim = kv.v_dim;
    shape.page_size = kv.page_size, shape.blocks = kv.blocks;
    if (ekv_index_create(c->cpu, &shape, NULL, 0, &p->host_index) != EKV_OK) FAIL("host index: %s", ekv_last_error(c->cpu));
    if (ekv_index_create(c->cuda, &shape, NULL, 0, &p->device_index) != EKV_OK)
        FAIL("device index: %s", ekv_last_error(c->cuda));
    for (int b = 0; b < batch; b++)
        if (ekv_index_update(c->cpu, p->host_index, &p->host_kv, p->host.block_table + b * step.block_table_stride, 0,
                             p->length[b], p->length[b]) != EKV_OK)
            FAIL("host update: %s", ekv_last_error(c->cpu));
    ekv_index_append_params append = ekv_index_append_params_default();
    append.batch = batch;
    append.block_table = p->device.block_table;
    append.block_table_stride = step.block_table_stride;
    append.lengths = p->device.lengths;
    append.max_count = p->max_pages * kv.page_size;
    if (ekv_index_append(c->cuda, p->device_index, &p->device_kv, &append) != EKV_OK)
        FAIL("append: %s", ekv_last_error(c->cuda));
    p->device.index = p->device_index;
    p->host.index = p->host_index;
    snprintf(p->text, sizeof p->text,
             "%s q %s out %s k %d v %d page %d kv_heads %d group %d batch %d lengths %d.. queries %d.. content %d "
             "layout %d alpha %g%s%s%s",
             ekv_dtype_name(kv.dtype), ekv_dtype_name(step.q_dtype), ekv_dtype_name(step.out_dtype), (int)kv.k_dim,
             (int)kv.v_dim, (int)kv.page_size, (int)kv.kv_heads, group, batch, p->length[0], p->queries[0], content, layout,
             step.alpha, step.head_alpha ? " per head" : "", step.head_scale ? " scales" : "", step.slopes ? " slopes" : "");
}

static void free_problem(problem *p) {
    twin *const all[] = {&p->k, &p->v, &p->q, &p->out, &p->table, &p->lengths, &p->q_start, &p->report, &p->mask};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) twin_free(all[i]);
    ekv_index_destroy(p->host_index);
    ekv_index_destroy(p->device_index);
}

/* ---- comparing ---- */

static double worst_ratio; /* error / tolerance over all comparisons */

/* Relative L2 error that a row may have: scores in f32, their error magnified by the transform, and the output's type. */
static double tolerance(double alpha, double tau, ekv_dtype out) {
    const double z = fmax(1.0, fabs(tau) + 1.0), half = out == EKV_F32 ? 0.0 : out == EKV_F16 ? 0x1p-10 : 0x1p-7;
    if (alpha <= 2.0) return 6e-6 * z + half;
    return 8.0 * pow(2e-6 * z, 1.0 / (alpha - 1.0)) + half;
}

static void compare(const problem *p, const unsigned char *out, const ekv_report *report, const char *what) {
    const ekv_decode_params *step = &p->host;
    const ekv_report *expected = p->report.host;
    for (int64_t row = 0; row < p->rows; row++) {
        const int64_t at = row / step->q_heads * step->out_token_stride + row % step->q_heads * step->out_head_stride;
        const double alpha = step->head_alpha ? step->head_alpha[row % step->q_heads] : step->alpha;
        double error = 0.0, size = 0.0;
        for (int d = 0; d < p->host_kv.v_dim; d++) {
            const double a = ekv_reference_load(step->out_dtype, out, at + d),
                         b = ekv_reference_load(step->out_dtype, p->out.host, at + d);
            error += (a - b) * (a - b);
            size += b * b;
        }
        const ekv_report *r = &report[row], *e = &expected[row];
        const double allowed = tolerance(alpha, e->tau > -1e300 ? e->tau : 0.0, step->out_dtype),
                     floor = 0.02 * p->host_kv.v_dim;
        const double relative = sqrt(error / fmax(size, floor / fmax(1.0, (double)e->support)));
        worst_ratio = fmax(worst_ratio, relative / allowed);
        if (!(relative <= allowed))
            FAIL("%s row %lld: relative error %.3g, allowed %.3g, alpha %g, tau %g (expected %g), support %lld (%lld); %s",
                 what, (long long)row, relative, allowed, alpha, r->tau, e->tau, (long long)r->support, (long long)e->support,
                 p->text);
        const double z = fmax(1.0, fabs(e->tau) + 1.0);
        if (!(r->tau == e->tau || fabs(r->tau - e->tau) <= 1e-5 * z))
            FAIL("%s row %lld: tau %.9g, expected %.9g; %s", what, (long long)row, r->tau, e->tau, p->text);
        if (llabs(r->support - e->support) > 2 + e->support / 50)
            FAIL("%s row %lld: support %lld, expected %lld, alpha %g; %s", what, (long long)row, (long long)r->support,
                 (long long)e->support, alpha, p->text);
        if (r->tokens != e->tokens || r->pages != e->pages)
            FAIL("%s row %lld: tokens %lld pages %lld, expected %lld %lld; %s", what, (long long)row, (long long)r->tokens,
                 (long long)r->pages, (long long)e->tokens, (long long)e->pages, p->text);
        if (failures > 20) exit(1);
    }
}

/* Runs the device step into fresh memory of the host's. */
static bool run_device(problem *p, const contexts *c, unsigned char *out, ekv_report *report) {
    CUDA(cudaMemset(p->out.device, 0xa5, p->out.bytes));
    CUDA(cudaMemset(p->report.device, 0xa5, p->report.bytes));
    const ekv_status status = ekv_decode(c->cuda, &p->device);
    if (status != EKV_OK) {
        FAIL("decode: %s; %s", ekv_last_error(c->cuda), p->text);
        return false;
    }
    CUDA(cudaDeviceSynchronize());
    twin_down(out, &p->out);
    twin_down(report, &p->report);
    return true;
}

static void run_reference(problem *p, const contexts *c) {
    memset(p->out.host, 0, p->out.bytes);
    if (ekv_decode(c->reference, &p->host) != EKV_OK) FAIL("reference: %s", ekv_last_error(c->reference));
}

/* The pages that the device selects, checked against the CPU's choice. */
static void check_selection(problem *p, const contexts *c, const char *what) {
    uint8_t *cpu = calloc(1, p->mask.bytes + 1);
    CUDA(cudaMemset(p->mask.device, 0, p->mask.bytes));
    if (ekv_select_pages(c->cuda, &p->device, p->mask.device, p->max_pages) != EKV_OK)
        FAIL("select: %s", ekv_last_error(c->cuda));
    CUDA(cudaDeviceSynchronize());
    twin_down(p->mask.host, &p->mask);
    if (ekv_select_pages(c->cpu, &p->host, cpu, p->max_pages) != EKV_OK) FAIL("cpu select: %s", ekv_last_error(c->cpu));
    int64_t differ = 0, pages = 0;
    for (size_t i = 0; i < p->mask.bytes; i++) {
        differ += (cpu[i] != 0) != (((uint8_t *)p->mask.host)[i] != 0);
        pages += cpu[i] != 0;
    }
    if (differ > 2 + pages / 50)
        FAIL("%s: %lld of %lld selected pages differ from the CPU's; %s", what, (long long)differ, (long long)pages, p->text);
    free(cpu);
}

/* Bounds and moments of the device against the reference's: bounds may not be lower. */
static void check_statistics(problem *p, const contexts *c) {
    const size_t n = (size_t)(p->rows * p->max_pages);
    twin a = twin_make(n * 4), b = twin_make(n * 4);
    float *x = malloc(n * 4), *y = malloc(n * 4);
    CUDA(cudaMemset(a.device, 0, n * 4));
    CUDA(cudaMemset(b.device, 0, n * 4));
    if (ekv_page_bounds(c->cuda, &p->device, a.device, p->max_pages) != EKV_OK) FAIL("bounds: %s", ekv_last_error(c->cuda));
    CUDA(cudaDeviceSynchronize());
    twin_down(x, &a);
    if (ekv_page_bounds(c->reference, &p->host, a.host, p->max_pages) != EKV_OK)
        FAIL("bounds: %s", ekv_last_error(c->reference));
    memset(b.host, 0, n * 4);
    if (ekv_page_bounds(c->cpu, &p->host, b.host, p->max_pages) != EKV_OK) FAIL("bounds: %s", ekv_last_error(c->cpu));
    for (size_t i = 0; i < n; i++) { /* not below the exact bound of the tokens that the row sees, nor far above the CPU's */
        const double e = ((float *)a.host)[i], cpu = ((float *)b.host)[i];
        if (e == 0.0) continue;
        if (!(x[i] >= e - 1e-6 * (1.0 + fabs(e)) && x[i] <= cpu + 1e-3 * (1.0 + fabs(cpu))) && !(isinf(cpu) && isinf(x[i]))) {
            FAIL("bound %zu is %.9g, exact %.9g, the CPU's %.9g; %s", i, (double)x[i], e, cpu, p->text);
            break;
        }
    }
    CUDA(cudaMemset(a.device, 0, n * 4));
    if (ekv_page_moments(c->cuda, &p->device, a.device, b.device, p->max_pages) != EKV_OK)
        FAIL("moments: %s", ekv_last_error(c->cuda));
    CUDA(cudaDeviceSynchronize());
    twin_down(x, &a);
    twin_down(y, &b);
    memset(a.host, 0, n * 4);
    memset(b.host, 0, n * 4);
    if (ekv_page_moments(c->cpu, &p->host, a.host, b.host, p->max_pages) != EKV_OK) FAIL("moments: %s", ekv_last_error(c->cpu));
    for (size_t i = 0; i < n; i++) {
        const double m = ((float *)a.host)[i], s = ((float *)b.host)[i], allowed = 4e-3 * (0.05 + s + fabs(m) * 0.1);
        if (fabs(x[i] - m) > allowed || fabs(y[i] - s) > allowed) {
            FAIL("moments %zu are %.9g %.9g, the CPU's %.9g %.9g; %s", i, (double)x[i], (double)y[i], m, s, p->text);
            break;
        }
    }
    free(x);
    free(y);
    twin_free(&a);
    twin_free(&b);
}

static void one_case(const contexts *c) {
    problem p;
    make_problem(&p, c, chance(0.2) ? 9000 : 1500);
    unsigned char *out = malloc(p.out.bytes), *again = malloc(p.out.bytes);
    ekv_report *report = malloc(p.report.bytes), *report_again = malloc(p.report.bytes);
    bool soft = false;
    for (int h = 0; h < p.host.q_heads; h++) soft |= (p.host.head_alpha ? p.host.head_alpha[h] : p.host.alpha) < 1.0 + 1e-7;
    /* full, twice */
    run_reference(&p, c);
    if (run_device(&p, c, out, report)) compare(&p, out, report, "full");
    if (run_device(&p, c, again, report_again) &&
        (memcmp(out, again, p.out.bytes) || memcmp(report, report_again, p.report.bytes)))
        FAIL("full: two runs differ; %s", p.text);
    /* every page by mask: the same bits for entmax rows */
    memset(p.mask.host, 1, p.mask.bytes);
    twin_up(&p.mask);
    p.device.policy = p.host.policy = EKV_POLICY_PAGES;
    p.device.page_mask = p.mask.device, p.host.page_mask = p.mask.host;
    p.device.page_mask_stride = p.host.page_mask_stride = p.max_pages;
    if (p.device.max_length == 0) p.device.max_length = (int64_t)p.max_pages * p.host_kv.page_size;
    if (run_device(&p, c, again, report_again)) {
        compare(&p, again, report_again, "all pages");
        if (!soft && memcmp(out, again, p.out.bytes)) FAIL("full and all pages differ in bits; %s", p.text);
    }
    check_statistics(&p, c);
    /* selection, then attention over what the device selected */
    for (int policy = EKV_POLICY_TOPK; policy <= EKV_POLICY_GAUSSIAN; policy++) {
        if (policy == EKV_POLICY_GAUSSIAN && soft) continue;
        p.device.policy = p.host.policy = (ekv_policy)policy;
        p.device.budget = p.host.budget = between(1, 600);
        p.device.first_pages = p.host.first_pages = between(0, 2);
        p.device.recent_tokens = p.host.recent_tokens = chance(0.5) ? 0 : between(1, 100);
        p.device.gaussian_model = p.host.gaussian_model = (ekv_gaussian_model)between(0, 2);
        check_selection(&p, c, ekv_policy_name((ekv_policy)policy));
        p.host.policy = EKV_POLICY_PAGES;
        p.host.page_mask = p.mask.host;
        p.device.report_mass = chance(0.5);
        p.host.report_mass = 1;
        run_reference(&p, c);
        if (run_device(&p, c, out, report)) {
            compare(&p, out, report, ekv_policy_name((ekv_policy)policy));
            for (int64_t row = 0; p.device.report_mass && row < p.rows; row++) {
                const double e = ((ekv_report *)p.report.host)[row].mass_bound, m = report[row].mass_bound;
                if (!(m >= e - 1e-4 - 1e-3 * e && m <= e + 5e-3 + 0.05 * e))
                    FAIL("%s row %lld: mass bound %.9g, reference %.9g, certified %d; %s", ekv_policy_name((ekv_policy)policy),
                         (long long)row, m, e, (int)report[row].certified, p.text);
            }
        }
        p.device.report_mass = p.host.report_mass = 0;
    }
    free(out);
    free(again);
    free(report);
    free(report_again);
    free_problem(&p);
}

/* ---- what only a device can get wrong ---- */

/* A step captured once, replayed after the lengths have grown, equals a direct call; nothing is allocated or waited for
 * meanwhile. */
static void check_graph(const contexts *c) {
    problem p;
    do {
        make_problem(&p, c, 1500);
        bool usable = p.device.q_start == NULL && p.length[0] > 40;
        for (int b = 0; b < p.host.batch; b++) usable = usable && p.length[b] > 40;
        if (usable) break;
        free_problem(&p);
    } while (1);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    p.device.stream = stream;
    p.device.policy = EKV_POLICY_TOPK;
    p.device.budget = 100;
    p.device.max_length = (int64_t)p.max_pages * p.host_kv.page_size;
    ekv_index_append_params append = ekv_index_append_params_default();
    append.batch = p.host.batch;
    append.block_table = p.device.block_table;
    append.block_table_stride = p.device.block_table_stride;
    append.lengths = p.device.lengths;
    append.stream = stream;
    for (int b = 0; b < p.host.batch; b++) ((int32_t *)p.lengths.host)[b] -= 30;
    twin_up(&p.lengths);
    if (ekv_reserve(c->cuda, &p.device) != EKV_OK) FAIL("reserve: %s", ekv_last_error(c->cuda));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    if (ekv_index_append(c->cuda, p.device_index, &p.device_kv, &append) != EKV_OK)
        FAIL("capture: %s", ekv_last_error(c->cuda));
    if (ekv_decode(c->cuda, &p.device) != EKV_OK) FAIL("capture: %s", ekv_last_error(c->cuda));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    unsigned char *out = malloc(p.out.bytes), *again = malloc(p.out.bytes);
    for (int round = 0; round < 3; round++) {
        CUDA(cudaMemset(p.out.device, 0xa5, p.out.bytes));
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaStreamSynchronize(stream));
        twin_down(out, &p.out);
        CUDA(cudaMemset(p.out.device, 0xa5, p.out.bytes));
        CUDA(cudaDeviceSynchronize());
        if (ekv_decode(c->cuda, &p.device) != EKV_OK) FAIL("decode: %s", ekv_last_error(c->cuda));
        CUDA(cudaStreamSynchronize(stream));
        twin_down(again, &p.out);
        if (memcmp(out, again, p.out.bytes)) FAIL("graph replay %d differs from a direct call; %s", round, p.text);
        for (int b = 0; b < p.host.batch; b++) ((int32_t *)p.lengths.host)[b] += 10;
        twin_up(&p.lengths);
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    free(out);
    free(again);
    free_problem(&p);
}

/* A block outside of the pool and a NaN key: the heads that read them become NaN, the others stay as they were. */
static void check_poison(const contexts *c) {
    problem p;
    do {
        make_problem(&p, c, 1500);
        if (p.host.batch >= 2 && p.length[0] > 100 && p.length[1] > 100 && p.host_kv.kv_heads >= 2 &&
            p.device.out_dtype == EKV_F32)
            break;
        free_problem(&p);
    } while (1);
    unsigned char *out = malloc(p.out.bytes), *bad = malloc(p.out.bytes);
    ekv_report *report = malloc(p.report.bytes);
    if (!run_device(&p, c, out, report)) return;
    ((int32_t *)p.table.host)[1] = 1 << 30; /* page 1 of sequence 0 */
    twin_up(&p.table);
    const int32_t block =
        ((int32_t *)p.table.host)[p.host.block_table_stride]; /* page 0 of sequence 1: NaN in its first KV head */
    put(p.k.host, p.host_kv.dtype, key_at(&p.host_kv, block, 3, 0) + 1, NAN);
    twin_up(&p.k);
    if (!run_device(&p, c, bad, report)) return;
    for (int64_t row = 0; row < p.rows; row++) {
        const int64_t token = row / p.host.q_heads, head = row % p.host.q_heads;
        const int64_t at = token * p.host.out_token_stride + head * p.host.out_head_stride;
        const int32_t *start = p.q_start.host;
        const int kv_head = (int)head / (p.host.q_heads / p.host_kv.kv_heads);
        const bool broken = token < start[1] || (token < start[2] && kv_head == 0);
        const float *x = (float *)bad + at, *y = (float *)out + at;
        for (int d = 0; d < p.host_kv.v_dim; d++) {
            if (broken ? !isnan(x[d]) : memcmp(&x[d], &y[d], 4) != 0) {
                FAIL("poison: row %lld element %d is %g, before %g, expected %s; %s", (long long)row, d, (double)x[d],
                     (double)y[d], broken ? "NaN" : "no change", p.text);
                break;
            }
        }
    }
    free(out);
    free(bad);
    free(report);
    free_problem(&p);
}

static void expect(const contexts *c, const problem *p, const ekv_decode_params *step, ekv_status wanted, const char *what) {
    unsigned char *out = malloc(p->out.bytes);
    CUDA(cudaMemset(p->out.device, 0xa5, p->out.bytes));
    const ekv_status status = ekv_decode(c->cuda, step);
    if (status != wanted) FAIL("%s: status %s (%s)", what, ekv_strerror(status), ekv_last_error(c->cuda));
    CUDA(cudaDeviceSynchronize());
    twin_down(out, &p->out);
    for (size_t i = 0; i < p->out.bytes; i++)
        if (out[i] != 0xa5) {
            FAIL("%s: the output was touched", what);
            break;
        }
    free(out);
}

static void check_refusals(const contexts *c) {
    problem p;
    make_problem(&p, c, 500);
    ekv_decode_params step = p.device;
    ekv_kv kv = p.device_kv;
    kv.page_size = 24;
    step.kv = &kv;
    step.index = NULL;
    expect(c, &p, &step, EKV_ERROR_UNSUPPORTED, "page size 24");
    step = p.device;
    step.index = p.host_index;
    expect(c, &p, &step, EKV_ERROR_INVALID_ARGUMENT, "index in host memory");
    step = p.device;
    step.max_length = step.block_table_stride * kv.page_size * 100;
    expect(c, &p, &step, EKV_ERROR_INVALID_ARGUMENT, "max_length past the table");
    step = p.device;
    step.alpha = 0.5;
    expect(c, &p, &step, EKV_ERROR_INVALID_ARGUMENT, "alpha 0.5");
    ekv_context_params params = ekv_context_params_default();
    params.backend = "cuda";
    params.fixed_scratch = 1;
    contexts fixed = *c;
    if (ekv_context_create(&params, &fixed.cuda, NULL, 0) != EKV_OK) FAIL("second context");
    expect(&fixed, &p, &p.device, EKV_ERROR_CAPACITY, "fixed scratch");
    if (ekv_reserve(fixed.cuda, &p.device) != EKV_OK || ekv_decode(fixed.cuda, &p.device) != EKV_OK) FAIL("after reserve");
    CUDA(cudaDeviceSynchronize());
    ekv_context_destroy(fixed.cuda);
    if (cudaGetLastError() != cudaSuccess) FAIL("an error was left behind");
    free_problem(&p);
}

int main(int argc, char **argv) {
    const long cases = argc > 1 ? atol(argv[1]) : 150, first = argc > 3 ? atol(argv[3]) : 0;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
    char message[256];
    contexts c;
    ekv_context_params params = ekv_context_params_default();
    params.backend = "cuda";
    if (ekv_context_create(&params, &c.cuda, message, sizeof message) != EKV_OK) {
        printf("skipped: %s\n", message);
        return 77;
    }
    params.backend = "reference";
    if (ekv_context_create(&params, &c.reference, message, sizeof message) != EKV_OK) return 1;
    params.backend = "scalar"; /* the CPU backend that every build has */
    if (ekv_context_create(&params, &c.cpu, message, sizeof message) != EKV_OK) return 1;
    for (long i = first; i < cases; i++) {
        current_case = i;
        state = seed * 1000003u + (uint64_t)i;
        one_case(&c);
        if (i % 10 == 0) check_graph(&c);
        if (i % 10 == 5) check_poison(&c);
        if (i == first) check_refusals(&c);
    }
    printf("%ld cases, seed %llu: %d failures; worst error / tolerance %.3f\n", cases - first, (unsigned long long)seed,
           failures, worst_ratio);
    ekv_context_destroy(c.cuda);
    ekv_context_destroy(c.reference);
    ekv_context_destroy(c.cpu);
    return failures != 0;
}
