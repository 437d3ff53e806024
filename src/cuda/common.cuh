/*
 * What all kernels share: items and rows, loads of stored elements, reductions in a fixed order.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_CUDA_COMMON_CUH
#define EKV_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>
#include <stdint.h>

#include "cuda/step.h"

#define ALL_LANES   0xffffffffu
#define LIST_MARGIN 0x1p-12 /* z units: left below a lower bound of tau, so that f32 rounding never drops a candidate */
#define TAU_SLACK   0x1p-30

/* ---- kernels that follow each other ---- */

/* First statement of every kernel of a step.  The next kernel may be brought to the multiprocessors from here on; it waits in
 * its own begin_kernel for all of this one to be done and visible.  Nothing is read or written before that. */
__device__ __forceinline__ void begin_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Launches a kernel of a step; where the device can, its start overlaps the end of the one before. */
inline cudaError_t start(void (*kernel)(const ekv_cuda_step), const ekv_cuda_step &s, long long blocks, unsigned threads,
                         void *stream) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(threads);
    config.stream = (cudaStream_t)stream;
    config.attrs = &attribute;
    config.numAttrs = s.overlap ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, s);
}

/* Launches a kernel that waits for all before it. */
template <typename... P, typename... A>
cudaError_t start_plain(void (*kernel)(P...), long long blocks, unsigned threads, void *stream, const A &...args) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(threads);
    config.stream = (cudaStream_t)stream;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

/* ---- items and rows ---- */

struct item_info {
    int sequence, head, first_row, rows; /* rows: those that exist */
    int begin, queries, length;          /* query tokens of the sequence: first, number; its tokens */
    int n, pages;                        /* what the last row sees */
    bool invalid;                        /* the device's lengths contradict what the host was told */
    const int32_t *table;
    long long table_base;
};

struct row_info {
    int token, head; /* query token in the batch, query head */
    int n, q_token;  /* tokens that it sees; its own index */
    int active;      /* the row exists */
    int softmax;
    int power;           /* the smallest whole number >= beta, at least 1; 65 for all above 64 */
    float slope, factor; /* z units; what the query is multiplied by */
    double alpha;
};

__device__ __forceinline__ item_info describe_item(const ekv_cuda_step &s, long long index) {
    item_info it;
    const unsigned item = (unsigned)index, rest = item / (unsigned)s.kv_heads; /* 32 bits: host.c sees to it */
    it.head = (int)(item % (unsigned)s.kv_heads);
    it.first_row = (int)(rest % (unsigned)s.row_blocks) * s.rows;
    it.sequence = (int)(rest / (unsigned)s.row_blocks);
    it.begin = s.q_start ? s.q_start[it.sequence] : it.sequence;
    it.queries = (s.q_start ? s.q_start[it.sequence + 1] : it.sequence + 1) - it.begin;
    it.length = s.lengths[it.sequence];
    it.rows = min(s.rows, it.queries * s.group - it.first_row);
    it.rows = max(it.rows, 0);
    it.invalid = it.length < 0 || it.length > s.max_length || it.queries > s.max_queries;
    const int last = it.rows > 0 ? (it.first_row + it.rows - 1) / s.group : 0;
    it.n = it.length <= 0 || it.invalid || it.rows == 0 ? 0 : max(0, it.length - (it.queries - 1 - last));
    it.pages = (it.n + s.page_size - 1) >> s.page_shift;
    it.table = s.table ? s.table + it.sequence * s.table_stride : nullptr;
    it.table_base = s.table ? 0 : it.sequence * s.table_stride;
    return it;
}

__device__ __forceinline__ row_info describe_row(const ekv_cuda_step &s, const item_info &it, int r) {
    row_info row;
    const int local = it.first_row + r, token = local / s.group;
    row.active = r < it.rows;
    row.token = it.begin + token;
    row.head = it.head * s.group + local % s.group;
    row.n = !row.active || it.n == 0 ? 0 : max(0, it.length - (it.queries - 1 - token));
    row.q_token = row.n - 1;
    ekv_cuda_head h = {s.alpha, s.scale, 0.0f};
    if (s.heads && row.active) h = s.heads[row.head];
    row.alpha = h.alpha;
    row.softmax = h.alpha < EKV_CUDA_SOFTMAX_BELOW;
    const double factor = row.softmax ? 1.0 : h.alpha - 1.0;
    const double beta = 1.0 / factor;
    row.power = beta > 65.0 ? 65 : beta <= 1.0 ? 1 : (int)ceil(beta - 1e-9);
    row.factor = (float)(factor * (double)h.scale);
    row.slope = (float)(factor * (double)h.slope);
    return row;
}

/* The physical block of a page, or -1 if the table's entry is outside of the pool. */
__device__ __forceinline__ int block_of(const ekv_cuda_step &s, const item_info &it, int page) {
    const long long block = it.table ? (long long)it.table[page] : it.table_base + page;
    return block >= 0 && block < s.blocks ? (int)block : -1;
}

/* Tokens of a page that a row which sees n tokens sees. */
__device__ __forceinline__ int page_tokens(const ekv_cuda_step &s, int n, int page) {
    return min(s.page_size, n - (page << s.page_shift));
}

/* topk and gaussian: the last page, the first pages, the recent window; pages without statistics are forced by their NaN. */
__device__ __forceinline__ bool forced(const ekv_cuda_step &s, int n, int pages, int page) {
    if (page == pages - 1 || page < s.first_pages) return true;
    return s.recent_tokens > 0 && page >= max(0, n - s.recent_tokens) >> s.page_shift;
}

/* 1, 2 or 3 if beta is that number (alpha = 2, 3/2, 4/3), else 0. */
__device__ __forceinline__ int whole_beta(double beta) {
    for (int b = 1; b <= 3; b++)
        if (fabs(beta - (double)b) < 1e-12) return b;
    return 0;
}

/* ---- stored elements ---- */

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ float load_any(const void *base, long long i, int dtype) {
    if (dtype == EKV_F32) return ((const float *)base)[i];
    if (dtype == EKV_F16) return to_float(((const __half *)base)[i]);
    return to_float(((const __nv_bfloat16 *)base)[i]);
}

__device__ __forceinline__ void store_any(void *base, long long i, int dtype, float x) {
    if (dtype == EKV_F32)
        ((float *)base)[i] = x;
    else if (dtype == EKV_F16)
        ((__half *)base)[i] = __float2half_rn(x);
    else
        ((__nv_bfloat16 *)base)[i] = __float2bfloat16_rn(x);
}

/* 16 bytes that are read once: past the first-level cache. */
__device__ __forceinline__ uint4 load_stream(const void *p) {
#ifdef __CUDA_ARCH__
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
#else
    return *(const uint4 *)p;
#endif
}

__device__ __forceinline__ void unpack(uint32_t w, __half, float &a, float &b) {
    __half2 h;
    memcpy(&h, &w, 4);
    const float2 f = __half22float2(h);
    a = f.x;
    b = f.y;
}
__device__ __forceinline__ void unpack(uint32_t w, __nv_bfloat16, float &a, float &b) {
    a = __uint_as_float(w << 16);
    b = __uint_as_float(w & 0xffff0000u);
}

/* Eight elements of a row as loaded, and as floats.  VEC: 16-byte loads of whole chunks; otherwise element by element, `count`
 * of them. */
template <typename T, bool VEC> struct chunk8 {
    uint4 w;
    __device__ __forceinline__ void clear() { w = make_uint4(0, 0, 0, 0); }
    __device__ __forceinline__ void load(const T *p, int) { w = load_stream(p); }
    __device__ __forceinline__ void get(float (&x)[8]) const {
        unpack(w.x, T(), x[0], x[1]);
        unpack(w.y, T(), x[2], x[3]);
        unpack(w.z, T(), x[4], x[5]);
        unpack(w.w, T(), x[6], x[7]);
    }
};
template <> struct chunk8<float, true> {
    uint4 w, y;
    __device__ __forceinline__ void clear() { w = y = make_uint4(0, 0, 0, 0); }
    __device__ __forceinline__ void load(const float *p, int) {
        w = load_stream(p);
        y = load_stream(p + 4);
    }
    __device__ __forceinline__ void get(float (&x)[8]) const {
        x[0] = __uint_as_float(w.x), x[1] = __uint_as_float(w.y), x[2] = __uint_as_float(w.z), x[3] = __uint_as_float(w.w);
        x[4] = __uint_as_float(y.x), x[5] = __uint_as_float(y.y), x[6] = __uint_as_float(y.z), x[7] = __uint_as_float(y.w);
    }
};
template <typename T> struct chunk_by_element {
    float f[8];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] = 0.0f;
    }
    __device__ __forceinline__ void load(const T *p, int count) {
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] = e < count ? to_float(p[e]) : 0.0f;
    }
    __device__ __forceinline__ void get(float (&x)[8]) const {
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = f[e];
    }
};
template <> struct chunk8<float, false> : chunk_by_element<float> {};
template <> struct chunk8<__half, false> : chunk_by_element<__half> {};
template <> struct chunk8<__nv_bfloat16, false> : chunk_by_element<__nv_bfloat16> {};

/* ---- reductions ---- */

/* A whole number that orders floats; NaN counts as +infinity, and -0 as 0. */
__device__ __forceinline__ uint32_t order_of(float x) {
    if (x != x) x = CUDART_INF_F;
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_order(uint32_t order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, m));
    return x;
}
template <typename T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) x += __shfl_xor_sync(ALL_LANES, x, m);
    return x;
}

/* Sums U values (one per key) over LPK lanes each.  Lane j of the LPK gets the sum of value j / (LPK / U).  Each addition joins
 * the same two lanes for every value, so that the result does not depend on which value it is. */
template <int LPK, int U> __device__ __forceinline__ float butterfly(float (&a)[U], int lane) {
#pragma unroll
    for (int m = LPK / 2, left = U; m > 0; m >>= 1) {
        if (left > 1) {
            left >>= 1;
            const bool upper = lane & m;
#pragma unroll
            for (int i = 0; i < U / 2; i++) {
                if (i >= left) break;
                const float give = upper ? a[i] : a[i + left], own = upper ? a[i + left] : a[i];
                a[i] = own + __shfl_xor_sync(ALL_LANES, give, m);
            }
        } else {
            a[0] += __shfl_xor_sync(ALL_LANES, a[0], m);
        }
    }
    return a[0];
}

/* Reductions over a block of THREADS threads.  Two buffers are used in turn, so that one barrier serves each call. */
template <int THREADS> struct block_reduce {
    static constexpr int W = THREADS / 32;
    double a[2][W], b[2][W];

    /* Sums of x and y, the same in all threads. */
    __device__ __forceinline__ void sum2(double &x, double &y, int &turn) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        x = warp_sum(x);
        y = warp_sum(y);
        if (lane == 0) a[turn][warp] = x, b[turn][warp] = y;
        __syncthreads();
        x = y = 0.0;
#pragma unroll
        for (int w = 0; w < W; w++) x += a[turn][w], y += b[turn][w];
        turn ^= 1;
    }
    __device__ __forceinline__ double max1(double x, int &turn) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
        for (int m = 16; m > 0; m >>= 1) x = fmax(x, __shfl_xor_sync(ALL_LANES, x, m));
        if (lane == 0) a[turn][warp] = x;
        __syncthreads();
        x = a[turn][0];
#pragma unroll
        for (int w = 1; w < W; w++) x = fmax(x, a[turn][w]);
        turn ^= 1;
        return x;
    }
    __device__ __forceinline__ unsigned long long sum_u64(unsigned long long x, int &turn) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        unsigned long long *buffer = (unsigned long long *)a[turn];
        x = warp_sum(x);
        if (lane == 0) buffer[warp] = x;
        __syncthreads();
        x = 0;
#pragma unroll
        for (int w = 0; w < W; w++) x += buffer[w];
        turn ^= 1;
        return x;
    }
    /* Exclusive prefix sum over the threads; total in all of them. */
    __device__ __forceinline__ int prefix(int x, int &total, int &turn) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        int *buffer = (int *)a[turn];
        int sum = x;
#pragma unroll
        for (int m = 1; m < 32; m <<= 1) {
            const int other = __shfl_up_sync(ALL_LANES, sum, m);
            if (lane >= m) sum += other;
        }
        if (lane == 31) buffer[warp] = sum;
        __syncthreads();
        int before = 0;
        total = 0;
#pragma unroll
        for (int w = 0; w < W; w++) {
            if (w == warp) before = total;
            total += buffer[w];
        }
        turn ^= 1;
        return before + sum - x;
    }
};

/* ---- thresholds ---- */

/* What a candidate must exceed; always below the floor, however coarse floats are there: z_max is one. */
__device__ __forceinline__ float threshold_of(float floor) {
    const float below = __double2float_rd((double)floor - LIST_MARGIN);
    return below < floor ? below : nextafterf(floor, -CUDART_INF_F);
}

/* Raises the lower bound by Newton steps on the norm (sum t^m)^(1/m) = 1, m a whole number >= beta, from the left: the iterates
 * never pass the root, which lies below tau (src/cpu/entmax.h, tau_lower).  By one warp, on tokens that are all different. */
__device__ __forceinline__ float raise_floor(const float *list_z, int count, float z_max, float floor, int power,
                                             int steps = 5) {
    if (power > 64 || !(z_max > -CUDART_INF_F)) return floor;
    const int lane = threadIdx.x & 31;
    float tau = fmaxf(-1.0f, __fsub_rd(floor, z_max));
    for (int step = 0; step < steps; step++) {
        float s0 = 0.0f, s1 = 0.0f;
        for (int i = lane; i < count; i += 32) {
            const float z = list_z[i], t = z <= z_max ? fmaxf(z - z_max - tau, 0.0f) : 0.0f;
            float u = 1.0f; /* t^(power - 1) */
            if (power == 2) {
                u = t;
            } else {
                float x = t;
                for (int k = power - 1; k > 0; k >>= 1, x *= x)
                    if (k & 1) u *= x;
            }
            s0 += u * t;
            s1 += power == 1 ? (t > 0.0f ? 1.0f : 0.0f) : u;
        }
        s0 = warp_sum(s0);
        s1 = warp_sum(s1);
        if (!(s0 > 1.0f)) break;
        const float target = power == 1 ? 1.0f : power == 2 ? sqrtf(s0) : powf(s0, 1.0f - 1.0f / (float)power);
        const float delta = (s0 - target) / s1;
        if (!(delta > 0.0f)) break;
        tau = fminf(tau + delta, 0.0f);
        if (delta < 1e-4f) break;
    }
    return fmaxf(floor, __fadd_rd(z_max, tau));
}

/* ---- summaries of pages ---- */

/* Sums up the 32 pages from p0 for one row: ekv_cuda_group.  By one warp. */
template <bool BOUNDS>
__device__ __forceinline__ void summarize(const ekv_cuda_step &s, const row_info &row, long long slot, int p0) {
    const int lane = threadIdx.x & 31, page = p0 + lane, pages = (row.n + s.page_size - 1) >> s.page_shift;
    if (p0 >= pages) return;
    const bool there = page < pages;
    const long long at = slot * s.max_pages + page;
    const float a = there ? s.page_a[at] : 0.0f;
    ekv_cuda_group sums = {0.0, 0.0, 0.0, -CUDART_INF_F, -CUDART_INF_F, 0};
    if (BOUNDS) {
        const bool out = there && (a != a || (s.policy != EKV_POLICY_CERTIFIED && forced(s, row.n, pages, page)));
        sums.best = warp_max(there && !out ? a : -CUDART_INF_F);
        sums.forced = __popc(__ballot_sync(ALL_LANES, out));
    } else {
        const float b = there ? s.page_b[at] : 0.0f;
        const bool bad = !(fabsf(a) < CUDART_INF_F) || !(b < CUDART_INF_F);
        const double m = (double)a, d = (double)b, count = there ? (double)page_tokens(s, row.n, page) : 0.0;
        sums.sum = warp_sum(count * m);
        sums.squares = warp_sum(count * (d * d + m * m));
        sums.typical = warp_sum(page + 1 < pages ? m + 1.5 * d : 0.0);
        sums.best = warp_max(there ? a : -CUDART_INF_F);
        sums.reach = warp_max(there ? a + 40.0f * b + 1.0f : -CUDART_INF_F);
        sums.forced = __popc(__ballot_sync(ALL_LANES, bad));
    }
    if (lane == 0) s.group_of_pages[slot * s.groups + p0 / EKV_CUDA_GROUP] = sums;
}

/* ---- certified ---- */

/* Whether the boxes of the pages that norms leave are worth their bytes: what the rows' samples say together. */
__device__ __forceinline__ bool boxes_pay(const ekv_cuda_step &s, long long local_item) {
    constexpr float PAYS = 1.25f; /* bytes of keys that must be saved for each byte of a box */
    if (!(s.levels & EKV_CUDA_BOXES)) return false;
    const float keys = (float)s.page_size * (float)s.k_dim * (s.dtype == EKV_F32 ? 4.0f : 2.0f);
    float share = 0.0f;
    for (int r = 0; r < s.rows; r++) share += s.cut[local_item * s.rows + r].share;
    return keys * (1.0f - share) > PAYS * (float)s.box_bytes;
}

/* ---- the list of pages, or tokens, that an item reads ---- */

struct page_entry {
    int page, block; /* block -1: outside of the pool */
    uint32_t mask;
};

/* prefix[c]: entries in the chunks before c; prefix[chunks] is their number.  All threads of the block call this; it ends in a
 * barrier. */
__device__ __forceinline__ int load_chunk_prefix(const ekv_cuda_step &s, const item_info &it, long long local_item,
                                                 int *prefix) {
    if (!s.read_entry) return it.pages;
    for (int c = threadIdx.x; c < s.chunks; c += blockDim.x) prefix[c + 1] = s.read_count[local_item * s.chunks + c];
    __syncthreads();
    if (threadIdx.x < 32) {
        int before = 0;
        for (int c = 0; c < s.chunks; c += 32) {
            const int i = c + threadIdx.x;
            int x = i < s.chunks ? prefix[i + 1] : 0;
            for (int m = 1; m < 32; m <<= 1) {
                const int other = __shfl_up_sync(ALL_LANES, x, m);
                if ((int)threadIdx.x >= m) x += other;
            }
            if (i < s.chunks) prefix[i + 1] = before + x;
            before += __shfl_sync(ALL_LANES, x, 31);
        }
        if (threadIdx.x == 0) prefix[0] = 0;
    }
    __syncthreads();
    return prefix[s.chunks];
}

/* The last chunk that begins at or before entry e. */
__device__ __forceinline__ int chunk_of_entry(const ekv_cuda_step &s, const int *prefix, int e) {
    int low = 0, high = s.chunks - 1;
    while (low < high) {
        const int middle = (low + high + 1) >> 1;
        if (prefix[middle] <= e)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

__device__ __forceinline__ page_entry fetch_entry(const ekv_cuda_step &s, const item_info &it, long long local_item,
                                                  const int *prefix, int e) {
    page_entry entry = {e, -1, ALL_LANES};
    if (s.read_entry) {
        const int c = chunk_of_entry(s, prefix, e);
        const long long chunk = local_item * s.chunks + c;
        entry.page = s.read_entry[chunk * s.read_stride + (e - prefix[c])];
        entry.mask = s.read_mask[chunk * s.chunk_pages + (e - prefix[c])];
    }
    entry.block = block_of(s, it, entry.page);
    return entry;
}

#endif
