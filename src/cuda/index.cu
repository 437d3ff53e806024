/*
 * Page statistics from keys and values in device memory; what they are: entmaxkv/kernels.h (box, moments, norms).  A warp takes
 * one page of one head; sums are in a fixed order, moments in two passes.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/common.cuh"

namespace {

constexpr int BUILD_THREADS = 256;

template <typename T> struct moments_type { typedef float type; };
template <> struct moments_type<__half> { typedef __half type; };

__device__ __forceinline__ void put(float *p, float x) { *p = x; }
__device__ __forceinline__ void put(__half *p, float x) { *p = __float2half_rn(x); }
__device__ __forceinline__ void put(__nv_bfloat16 *p, float x) { *p = __float2bfloat16_rn(x); }

template <typename T> __device__ void build_box(const T *rows, long long stride, int n, int dim, T *out) {
    const int lane = threadIdx.x & 31;
    bool bad = false;
    for (int d = lane; d < dim; d += 32) {
        float low = CUDART_INF_F, high = -CUDART_INF_F;
        for (int i = 0; i < n; i++) {
            const float x = to_float(rows[i * stride + d]);
            bad |= !(fabsf(x - x) <= 0.0f);
            low = fminf(x, low);
            high = fmaxf(x, high);
        }
        put(out + d, low);
        put(out + dim + d, high);
    }
    if (!__any_sync(ALL_LANES, bad)) return;
    for (int d = lane; d < 2 * dim; d += 32) put(out + d, CUDART_NAN_F);
}

template <typename T>
__device__ void build_moments(const T *rows, long long stride, int n, int dim, typename moments_type<T>::type *out) {
    const float share = 1.0f / (float)n;
    for (int d = threadIdx.x & 31; d < dim; d += 32) {
        float mean = 0.0f, squares = 0.0f;
        for (int i = 0; i < n; i++) mean = __fadd_rn(mean, __fmul_rn(to_float(rows[i * stride + d]), share));
        for (int i = 0; i < n; i++) {
            const float c = to_float(rows[i * stride + d]) - mean;
            squares = __fadd_rn(squares, __fmul_rn(__fmul_rn(c, c), share));
        }
        put(out + d, mean);
        put(out + dim + d, sqrtf(squares));
    }
}

/* Never below the exact norm: the factor covers the rounding of the sum, of the root, and to float (src/cpu/page.h). */
template <typename T> __device__ void build_norm(const T *rows, long long stride, int n, int dim, float *out) {
    double largest = 0.0;
    for (int i = 0; i < n; i++) {
        double sum = 0.0;
        for (int d = threadIdx.x & 31; d < dim; d += 32) {
            const double x = (double)to_float(rows[i * stride + d]);
            sum += x * x;
        }
        sum = warp_sum(sum);
        if (largest == largest && !(sum <= largest)) largest = sum; /* a NaN is taken, and stays */
    }
    const double norm = sqrt(largest) * (1.0 + 0x1p-22) + 0x1p-140;
    if ((threadIdx.x & 31) == 0) *out = norm <= 3.4028234663852886e38 ? (float)norm : CUDART_INF_F;
}

/* The page and head that this warp builds, or pages left as they are. */
struct task {
    int page, head, n;
    long long block;
};

__device__ bool find_task(const ekv_cuda_build &b, task &t) {
    const long long i = (blockIdx.x * (long long)BUILD_THREADS + threadIdx.x) >> 5;
    t.head = (int)(i % b.kv_heads);
    const long long rest = i / b.kv_heads;
    const int sequence = (int)(rest / b.pages);
    if (sequence >= b.batch) return false;
    long long length = b.length, first_page = b.first_page;
    if (b.lengths) {
        length = b.lengths[sequence];
        const long long count = b.counts_in ? b.counts_in[sequence + 1] - b.counts_in[sequence] : b.max_count;
        first_page = max(0ll, length - min(count, (long long)b.max_count)) / b.page_size;
    }
    t.page = (int)(first_page + rest % b.pages);
    t.n = (int)min((long long)b.page_size, length - (long long)t.page * b.page_size);
    if (t.n <= 0) return false;
    t.block = b.table ? (long long)b.table[sequence * b.table_stride + t.page] : sequence * b.table_stride + t.page;
    return t.block >= 0 && t.block < b.index_blocks;
}

template <typename T> __global__ void __launch_bounds__(BUILD_THREADS) build_pages(const ekv_cuda_build b) {
    task t;
    if (!find_task(b, t) || t.block >= b.blocks) return;
    const T *keys = (const T *)b.k + t.block * b.k_block_stride + t.head * b.k_head_stride;
    const T *values = (const T *)b.v + t.block * b.v_block_stride + t.head * b.v_head_stride;
    const long long at = t.head * b.index_blocks + t.block;
    if (b.boxes) build_box(keys, b.k_token_stride, t.n, b.k_dim, (T *)(b.boxes + at * b.box_bytes));
    if (b.moments)
        build_moments(keys, b.k_token_stride, t.n, b.k_dim,
                      (typename moments_type<T>::type *)(b.moments + at * b.moments_bytes));
    if (b.norms) {
        build_norm(keys, b.k_token_stride, t.n, b.k_dim, b.norms + at * 2);
        build_norm(values, b.v_token_stride, t.n, b.v_dim, b.norms + at * 2 + 1);
    }
    if (t.head != 0 || (threadIdx.x & 31) != 0) return;
    b.counts[t.block] = (uint16_t)t.n;
    if (!b.sketched) return;
    const int stretch = (int)(t.page / b.stretch); /* encode_pages came before this kernel and saw the old numbers */
    b.sketched[t.block] = b.bases && stretch < b.stretches ? (uint16_t)t.n : (uint16_t)0;
    b.stretch_of[t.block] = stretch;
}

__global__ void __launch_bounds__(BUILD_THREADS) forget_pages(const ekv_cuda_build b) {
    task t;
    if (!find_task(b, t) || t.head != 0 || (threadIdx.x & 31) != 0) return;
    b.counts[t.block] = 0;
    if (b.sketched) b.sketched[t.block] = 0;
}

unsigned blocks_of(const ekv_cuda_build &b) {
    const long long warps = (long long)b.batch * b.pages * b.kv_heads;
    return (unsigned)((warps * 32 + BUILD_THREADS - 1) / BUILD_THREADS);
}

} // namespace

extern "C" int ekv_cuda_launch_build(const ekv_cuda_build *b, void *stream) {
    void (*const kernel)(const ekv_cuda_build) = b->dtype == EKV_F32   ? build_pages<float>
                                                 : b->dtype == EKV_F16 ? build_pages<__half>
                                                                       : build_pages<__nv_bfloat16>;
    return (int)start_plain(kernel, blocks_of(*b), BUILD_THREADS, stream, *b);
}

extern "C" int ekv_cuda_launch_forget(const ekv_cuda_build *b, void *stream) {
    return (int)start_plain(forget_pages, blocks_of(*b), BUILD_THREADS, stream, *b);
}
